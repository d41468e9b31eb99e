//! Sending and receiving; what is too long for one packet travels in a memfd.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use verbatim_seqpacket::{Error, MAX_MESSAGE_BYTES, Socket};

/// The longest message that a receiver accepts, in bytes.
const MAX_LONG_BYTES: u64 = 256 << 20;

#[derive(Serialize, Deserialize)]
enum Packet {
    /// The encoded message.
    Here(Vec<u8>),
    /// The encoded message, of that many bytes, is in the last descriptor.
    InMemfd(u64),
}

/// Sends one message of any length.
pub fn send<T: Serialize>(socket: &Socket, message: &T, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
    let bytes = postcard::to_stdvec(message).map_err(|source| Error::Malformed { bytes: 0, source })?;
    if bytes.len() < MAX_MESSAGE_BYTES - 64 {
        return socket.send(&Packet::Here(bytes), fds);
    }
    let os = |call| move |source| Error::Os { call, source };
    let memfd = rustix::fs::memfd_create("verbatim-message", rustix::fs::MemfdFlags::CLOEXEC)
        .map_err(|errno| os("memfd_create")(errno.into()))?;
    let mut file = File::from(memfd);
    file.write_all(&bytes).map_err(os("write"))?;
    let mut all = fds.to_vec();
    all.push(file.as_fd());
    socket.send(&Packet::InMemfd(bytes.len() as u64), &all)
}

/// Receives one message of any length and the descriptors that came with it.
pub fn recv<T: DeserializeOwned>(socket: &Socket) -> Result<(T, Vec<OwnedFd>), Error> {
    let received = socket.recv::<Packet>()?;
    let mut fds = received.fds;
    let bytes = match received.message {
        Packet::Here(bytes) => bytes,
        Packet::InMemfd(length) => {
            let missing = || Error::Os {
                call: "recvmsg",
                source: std::io::Error::other("a long message came without its memory, or is too long"),
            };
            let memory = fds
                .pop()
                .filter(|memory| length <= MAX_LONG_BYTES && is_memory(memory))
                .ok_or_else(missing)?;
            let mut file = File::from(memory);
            let mut bytes = Vec::new();
            file.seek(SeekFrom::Start(0))
                .and_then(|_| file.take(length).read_to_end(&mut bytes))
                .map_err(|source| Error::Os { call: "read", source })?;
            bytes
        }
    };
    let message = postcard::from_bytes(&bytes).map_err(|source| Error::Malformed {
        bytes: bytes.len(),
        source,
    })?;
    Ok((message, fds))
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
    fn a_long_message_and_its_descriptors_arrive() {
        let (a, b) = Socket::pair().unwrap();
        let long: Vec<u32> = (0..100_000).collect();
        send(&a, &long, &[a.as_fd()]).unwrap();
        let (got, fds) = recv::<Vec<u32>>(&b).unwrap();
        assert_eq!(got, long);
        assert_eq!(fds.len(), 1);
        send(&a, &7u8, &[]).unwrap();
        assert_eq!(recv::<u8>(&b).unwrap().0, 7);
    }

    #[test]
    fn a_promise_of_a_descriptor_that_does_not_come_is_an_error() {
        let (a, b) = Socket::pair().unwrap();
        a.send(&Packet::InMemfd(10), &[]).unwrap();
        assert!(recv::<u8>(&b).is_err());
    }

    #[test]
    fn only_memory_is_read() {
        let (a, b) = Socket::pair().unwrap();
        let mut file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.write_all(&[1; 10]).unwrap();
        for other in [file.as_fd(), File::open("/dev/zero").unwrap().as_fd(), a.as_fd()] {
            a.send(&Packet::InMemfd(10), &[other]).unwrap();
            assert!(recv::<[u8; 10]>(&b).is_err());
        }
    }
}
