//! The contents of a process's memory.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::error::Error;
use crate::ranges::Ranges;
use crate::{PAGE, sys};

/// The memory of a process, to be read.
#[derive(Debug)]
pub struct Memory {
    pid: u32,
    /// `/proc/PID/mem`, which also has what the process itself may not read.
    file: File,
}

impl Memory {
    /// That of a process, as it is now: not of a program that it becomes.
    pub fn open(pid: u32) -> Result<Self, Error> {
        let path = format!("/proc/{pid}/mem");
        let file = File::open(path).map_err(Error::io("open the memory of a process"))?;
        Ok(Self { pid, file })
    }

    /// Reads a number, if it can be read.
    pub(crate) fn number(&self, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, address).ok()?;
        Some(u64::from_ne_bytes(bytes))
    }

    /// Reads the pages of a range into bytes of its length; returns which could be read. Others are gone.
    pub fn read(&self, range: Range<u64>, into: &mut [u8]) -> Result<Ranges, Error> {
        assert_eq!(
            range.end - range.start,
            into.len() as u64,
            "the room is that of the range"
        );
        let mut read = Ranges::default();
        let mut at = range.start;
        while at < range.end {
            let room = &mut into[(at - range.start) as usize..];
            let whole = match sys::read::read(self.pid, at, room) {
                Ok(bytes) => bytes as u64 / PAGE * PAGE,
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) => 0,
                Err(error) => return Err(Error::io("read the memory of a process")(error)),
            };
            if whole > 0 {
                read.insert(at..at + whole);
                at += whole;
                continue;
            }
            let page = &mut room[..PAGE as usize];
            match self.file.read_exact_at(page, at) {
                Ok(()) => read.insert(at..at + PAGE),
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(Error::io("read the memory of a process")(error)),
            }
            at += PAGE;
        }
        Ok(read)
    }
}

/// Whether there is nothing at that address, or no memory at all any more.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::UnexpectedEof
        || matches!(
            error.raw_os_error(),
            Some(libc::EIO | libc::EFAULT | libc::ENOMEM)
        )
}
