//! Bytes of any length beside a message: in it while they are few, else in a file in memory that travels with it.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use crate::Error;

/// Where a message's bytes are.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Carried {
    /// In the message.
    Here(Vec<u8>),
    /// So many, from the start of the last descriptor that comes with it, a memfd.
    InMemfd(u64),
}

impl Carried {
    /// Puts bytes where they belong: more than `most_here` into a file, which is to be sent as the last descriptor.
    pub fn new(bytes: Vec<u8>, most_here: usize) -> Result<(Self, Option<OwnedFd>), Error> {
        if bytes.len() <= most_here {
            return Ok((Self::Here(bytes), None));
        }
        let os = |call| move |source| Error::Os { call, source };
        let memfd = rustix::fs::memfd_create("verbatim-message", rustix::fs::MemfdFlags::CLOEXEC)
            .map_err(|errno| os("memfd_create")(errno.into()))?;
        let mut file = File::from(memfd);
        file.write_all(&bytes).map_err(os("write"))?;
        Ok((Self::InMemfd(bytes.len() as u64), Some(file.into())))
    }

    /// How many bytes there are, or are said to be.
    pub fn length(&self) -> u64 {
        match self {
            Self::Here(bytes) => bytes.len() as u64,
            Self::InMemfd(length) => *length,
        }
    }

    /// The bytes. What was said to be in a file is refused if it is longer than `most`, or the file no memory; if the file has
    /// fewer bytes, there are fewer.
    pub fn take(self, fds: &mut Vec<OwnedFd>, most: u64) -> Result<Vec<u8>, Error> {
        let length = match self {
            Self::Here(bytes) => return Ok(bytes),
            Self::InMemfd(length) => length,
        };
        let missing = || Error::Os {
            call: "recvmsg",
            source: std::io::Error::other("a long message came without its memory, or is too long"),
        };
        let memory = fds
            .pop()
            .filter(|memory| length <= most && is_memory(memory))
            .ok_or_else(missing)?;
        let mut file = File::from(memory);
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(0))
            .and_then(|_| file.take(length).read_to_end(&mut bytes))
            .map_err(|source| Error::Os { call: "read", source })?;
        Ok(bytes)
    }
}

/// What they are may be nobody else's affair.
impl std::fmt::Debug for Carried {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Here(bytes) => write!(f, "{} bytes", bytes.len()),
            Self::InMemfd(bytes) => write!(f, "{bytes} bytes in memory"),
        }
    }
}

/// Only files in memory have seals (`man 2 F_GET_SEALS`). Reading anything else, a file of a FUSE file system for one,
/// could take for ever.
fn is_memory(file: &OwnedFd) -> bool {
    rustix::fs::fcntl_get_seals(file).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_bytes_are_in_the_message_and_many_in_memory() {
        for length in [0, 10, 11, 100_000] {
            let bytes: Vec<u8> = (0..length).map(|index: u32| index as u8).collect();
            let (carried, memory) = Carried::new(bytes.clone(), 10).unwrap();
            assert_eq!(memory.is_some(), length > 10);
            let mut fds = Vec::from_iter(memory);
            assert_eq!(carried.take(&mut fds, 100_000).unwrap(), bytes);
            assert!(fds.is_empty());
        }
    }

    #[test]
    fn what_is_too_long_or_not_there_is_refused() {
        let (carried, memory) = Carried::new(vec![1; 11], 10).unwrap();
        let mut fds = Vec::from_iter(memory);
        assert!(carried.clone().take(&mut fds, 10).is_err());
        assert!(carried.take(&mut Vec::new(), 100).is_err());
    }

    #[test]
    fn fewer_bytes_than_were_said_are_no_more() {
        let (_, memory) = Carried::new(vec![1; 11], 10).unwrap();
        let mut fds = Vec::from_iter(memory);
        assert_eq!(Carried::InMemfd(50).take(&mut fds, 100).unwrap(), [1; 11]);
    }

    #[test]
    fn only_memory_is_read() {
        let mut file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.write_all(&[1; 10]).unwrap();
        let (socket, _other) = crate::Socket::pair().unwrap();
        let zero = File::open("/dev/zero").unwrap();
        for other in [OwnedFd::from(file), zero.into(), socket.into_fd()] {
            assert!(Carried::InMemfd(10).take(&mut vec![other], 100).is_err());
        }
    }
}
