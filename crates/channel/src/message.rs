//! Sending and receiving; what is too long for one packet travels in a memfd.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use serde::Serialize;
use serde::de::DeserializeOwned;
use verbatim_bounded::memory_of;
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

/// A message that has arrived, before it is read.
#[derive(Debug)]
pub struct Arrived {
    carried: Carried,
    fds: Vec<OwnedFd>,
}

impl Arrived {
    /// Its length in bytes, as its sender says it. No more of it is read.
    pub fn bytes(&self) -> u64 {
        self.carried.length()
    }

    /// The message in the form that it has in a version of the contract, and the descriptors that came with it. One that did not
    /// fit into one packet and has more than `most` bytes is an error, and is not read; so is one that says what takes more
    /// memory than the budget, of which there is less afterwards.
    pub fn read_as<T: Versioned>(
        self,
        version: u32,
        most: u64,
        budget: &mut usize,
    ) -> Result<(T, Vec<OwnedFd>), Error> {
        self.read(most, |bytes| T::decode(version, bytes, budget))
    }

    fn read<T>(
        self,
        most: u64,
        decode: impl FnOnce(&[u8]) -> Result<T, verbatim_bounded::Error>,
    ) -> Result<(T, Vec<OwnedFd>), Error> {
        let mut fds = self.fds;
        let bytes = self.carried.take(&mut fds, most.min(MAX_LONG_BYTES))?;
        let message = decode(&bytes).map_err(|why| Error::undecoded(bytes.len(), why))?;
        Ok((message, fds))
    }
}

/// Receives one message of any length, without reading it.
pub fn arrived(socket: &Socket) -> Result<Arrived, Error> {
    let received = socket.recv::<Carried>()?;
    Ok(Arrived {
        carried: received.message,
        fds: received.fds,
    })
}

/// Receives one message of any length and the descriptors that came with it.
pub fn recv<T: DeserializeOwned>(socket: &Socket) -> Result<(T, Vec<OwnedFd>), Error> {
    recv_at_most(socket, MAX_LONG_BYTES)
}

/// The same; a message that did not fit into one packet and has more than `most` bytes is an error, and is not read.
pub fn recv_at_most<T: DeserializeOwned>(socket: &Socket, most: u64) -> Result<(T, Vec<OwnedFd>), Error> {
    let arrived = arrived(socket)?;
    arrived.read(most, |bytes| verbatim_bounded::decode(bytes))
}

/// The same of a message in the form that it has in a version of the contract.
pub fn recv_as<T: Versioned>(socket: &Socket, version: u32, most: u64) -> Result<(T, Vec<OwnedFd>), Error> {
    let arrived = arrived(socket)?;
    arrived.read(most, |bytes| {
        T::decode(version, bytes, &mut memory_of(bytes.len()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RoadMap;

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
    fn a_message_that_would_grow_in_memory_is_refused() {
        let (a, b) = Socket::pair().unwrap();
        // A road map with nothing in it but empty texts.
        let mut road_map = postcard::to_stdvec(&RoadMap::default()).unwrap();
        road_map.pop();
        road_map.extend(postcard::to_stdvec(&(64u64 << 20)).unwrap());
        let length = road_map.len() as u64 + (64 << 20);
        let memory = rustix::fs::memfd_create("zeroes", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, length).unwrap();
        rustix::io::pwrite(&memory, &road_map, 0).unwrap();
        a.send(&Carried::InMemfd(length), &[memory.as_fd()]).unwrap();
        let refused = recv::<RoadMap>(&b).unwrap_err();
        assert!(matches!(refused, Error::TooLarge { .. }), "{refused}");
    }

    #[test]
    fn a_promise_of_a_descriptor_that_does_not_come_is_an_error() {
        let (a, b) = Socket::pair().unwrap();
        a.send(&Carried::InMemfd(10), &[]).unwrap();
        assert!(recv::<u8>(&b).is_err());
    }
}
