//! A process with a userfaultfd of ours in it.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::error::Error;
#[cfg(target_arch = "x86_64")]
use crate::inject::Stopped;
use crate::maps;
use crate::still::alone;
use crate::sys::ptrace;
use crate::sys::uffd;

/// A process whose memory can be protected from here. Dropping it lets go of all that is protected; it may be dropped whatever the
/// process does.
#[derive(Debug)]
pub struct Armed {
    pid: u32,
    process: OwnedFd,
    uffd: OwnedFd,
}

impl Armed {
    /// Puts a userfaultfd into the process.
    pub fn arm(pid: u32) -> Result<Self, Error> {
        let process = ptrace::open(pid).map_err(Error::io("open a process"))?;
        let uffd = alone(|| put_in(pid, &process))?;
        uffd::set_up(uffd.as_fd()).map_err(Error::Refused)?;
        Ok(Self { pid, process, uffd })
    }

    /// The userfaultfd.
    pub fn uffd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }

    /// The mappings of the process, and the page map of the same memory.
    pub fn memory(&self) -> Result<(String, File), Error> {
        let text = maps::read(self.pid)?;
        let pagemap = self.pagemap()?;
        self.is_the_same()?;
        Ok((text, pagemap))
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The mappings of the process.
    pub fn mappings(&self) -> Result<String, Error> {
        let text = maps::read(self.pid)?;
        self.is_the_same()?;
        Ok(text)
    }

    /// That of the memory that the process has now.
    fn pagemap(&self) -> Result<File, Error> {
        let path = format!("/proc/{}/pagemap", self.pid);
        File::open(path).map_err(Error::io("open the page map of a process"))
    }

    /// An error if the process has ended: its number may be another one's by now.
    fn is_there(&self) -> Result<(), Error> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut ended = [PollFd::new(&self.process, PollFlags::IN)];
        match poll(&mut ended, Some(&Timespec::default())) {
            Ok(0) | Err(_) => Ok(()),
            Ok(_) => Err(Error::Gone),
        }
    }

    /// An error if what is tracked is not the memory of the process any more.
    fn is_the_same(&self) -> Result<(), Error> {
        self.is_there()?;
        match uffd::has_memory(self.uffd.as_fd()) {
            true => Ok(()),
            // One that is ending has no memory, for some time before it has ended.
            false => maps::read(self.pid).and(Err(Error::Changed)),
        }
    }
}

/// Has the first thread of a process make a userfaultfd, takes a copy, and has it closed there.
#[cfg(target_arch = "x86_64")]
fn put_in(pid: u32, process: &OwnedFd) -> Result<OwnedFd, Error> {
    const FLAGS: u64 = uffd::USER_MODE_ONLY | (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    let mut thread = Stopped::stop(pid)?;
    let descriptor = thread.make_descriptor(libc::SYS_userfaultfd, [FLAGS, 0, 0])?;
    let taken = ptrace::take(process, descriptor);
    let closed = thread.call(libc::SYS_close, [descriptor as u64, 0, 0]);
    thread.go_on()?;
    closed?;
    taken.map_err(Error::io("take the userfaultfd of a process"))
}

#[cfg(not(target_arch = "x86_64"))]
fn put_in(_: u32, _: &OwnedFd) -> Result<OwnedFd, Error> {
    Err(Error::Refused(std::io::ErrorKind::Unsupported.into()))
}
