//! Sending and receiving; what is too long for one packet travels in a memfd.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use serde::Serialize;
use serde::de::DeserializeOwned;
use verbatim_seqpacket::{Carried, Error, MAX_MESSAGE_BYTES, Socket};
use verbatim_versions::Versioned;

/// The longest message that a receiver accepts, in bytes.
pub const MAX_LONG_BYTES: u64 = 256 << 20;

/// Sends one message of any length.
pub fn send<T: Serialize>(socket: &Socket, message: &T, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
    send_bytes(socket, postcard::to_stdvec(message), fds)
}

/// The same in the form that the message has in a version of the contract.
pub fn send_as<T: Versioned>(
    socket: &Socket,
    version: u32,
    message: &T,
    fds: &[BorrowedFd<'_>],
) -> Result<(), Error> {
    send_bytes(socket, message.encode(version), fds)
}

fn send_bytes(
    socket: &Socket,
    bytes: postcard::Result<Vec<u8>>,
    fds: &[BorrowedFd<'_>],
) -> Result<(), Error> {
    let bytes = bytes.map_err(|source| Error::Malformed { bytes: 0, source })?;
    let (carried, memory) = Carried::new(bytes, MAX_MESSAGE_BYTES - 64)?;
    let mut all = fds.to_vec();
    all.extend(memory.as_ref().map(AsFd::as_fd));
    socket.send(&carried, &all)
}

/// Receives one message of any length and the descriptors that came with it.
pub fn recv<T: DeserializeOwned>(socket: &Socket) -> Result<(T, Vec<OwnedFd>), Error> {
    recv_at_most(socket, MAX_LONG_BYTES)
}

/// The same; a message that did not fit into one packet and has more than `most` bytes is an error, and is not read.
pub fn recv_at_most<T: DeserializeOwned>(socket: &Socket, most: u64) -> Result<(T, Vec<OwnedFd>), Error> {
    recv_bytes(socket, most, |bytes| postcard::from_bytes(bytes))
}

/// The same of a message in the form that it has in a version of the contract.
pub fn recv_as<T: Versioned>(socket: &Socket, version: u32, most: u64) -> Result<(T, Vec<OwnedFd>), Error> {
    recv_bytes(socket, most, |bytes| T::decode(version, bytes))
}

fn recv_bytes<T>(
    socket: &Socket,
    most: u64,
    decode: impl FnOnce(&[u8]) -> postcard::Result<T>,
) -> Result<(T, Vec<OwnedFd>), Error> {
    let received = socket.recv::<Carried>()?;
    let mut fds = received.fds;
    let bytes = received.message.take(&mut fds, most.min(MAX_LONG_BYTES))?;
    let message = decode(&bytes).map_err(|source| Error::Malformed {
        bytes: bytes.len(),
        source,
    })?;
    Ok((message, fds))
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
        a.send(&Carried::InMemfd(10), &[]).unwrap();
        assert!(recv::<u8>(&b).is_err());
    }
}
