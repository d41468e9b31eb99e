//! Images of paused connections, on their way between a program's side and the RNIC ([`Request::DumpQp`],
//! [`Request::RestoreQp`]).
//!
//! [`Request::DumpQp`]: crate::control::Request::DumpQp
//! [`Request::RestoreQp`]: crate::control::Request::RestoreQp

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};
use verbatim_seqpacket::{Carried, Error, MAX_MESSAGE_BYTES};

/// Longer ones travel in memory of their own. A program can have several requests under way without reading an answer: so many
/// answers fit into a socket's buffer, whose other end never waits for room.
const MOST_IN_ANSWER: usize = 3 << 10;

/// A request waits for room. So only one that fits into no message needs a descriptor, which a program at its limit of them
/// does not get: at that time its connections are nowhere else any more.
const MOST_IN_REQUEST: usize = MAX_MESSAGE_BYTES - (1 << 10);

/// What a program's side takes from its RNIC, which it trusts, in bytes.
const MOST: u64 = 256 << 20;

/// A connection that stands still.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpImage {
    /// For `RestoreQp`. It holds the connection's secret.
    pub image: Vec<u8>,
    /// The `wr_id`s of the send requests in it, oldest first: taken off the ring and not complete.
    pub requests: Vec<u64>,
    /// The `wr_id` of the RECV in it: taken for a message of which only a part has come.
    pub receive: Option<u64>,
}

impl std::fmt::Debug for QpImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "QpImage {{ {} bytes, requests: {:?}, receive: {:?} }}",
            self.image.len(),
            self.requests,
            self.receive
        )
    }
}

impl QpImage {
    /// What the answer to `DumpQp` carries, and the descriptor that goes with it.
    pub fn carry(&self) -> Result<(Carried, Option<OwnedFd>), Error> {
        let encoded = postcard::to_stdvec(self);
        let bytes = encoded.map_err(|source| Error::Malformed { bytes: 0, source })?;
        Carried::new(bytes, MOST_IN_ANSWER)
    }

    /// The same at the other end.
    pub fn take(carried: Carried, fds: &mut Vec<OwnedFd>) -> Result<Self, Error> {
        let bytes = carried.take(fds, MOST)?;
        postcard::from_bytes(&bytes).map_err(|source| Error::Malformed {
            bytes: bytes.len(),
            source,
        })
    }
}

/// What `RestoreQp` carries, and the descriptor that goes with it.
pub fn carry(image: &[u8]) -> Result<(Carried, Option<OwnedFd>), Error> {
    Carried::new(image.to_vec(), MOST_IN_REQUEST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Request;
    use std::os::fd::AsFd;
    use verbatim_seqpacket::Socket;

    /// The image that comes at the RNIC, and whether a descriptor was needed.
    fn over_a_socket(image: &[u8]) -> (Vec<u8>, bool) {
        let (ours, theirs) = Socket::pair().unwrap();
        let (carried, memory) = carry(image).unwrap();
        let fds: Vec<_> = memory.iter().map(AsFd::as_fd).collect();
        let request = Request::RestoreQp {
            qpn: u32::MAX,
            image: carried,
            sgid_index: u8::MAX,
        };
        ours.send(&request, &fds).unwrap();
        let mut received = theirs.recv::<Request>().unwrap();
        let Request::RestoreQp { image, .. } = received.message else {
            panic!("another request");
        };
        (image.take(&mut received.fds, MOST).unwrap(), memory.is_some())
    }

    #[test]
    fn images_are_taken_up_without_a_descriptor_as_long_as_they_fit_into_a_message() {
        for (length, has_descriptor) in [
            (0, false),
            (MOST_IN_ANSWER + 1, false),
            (MOST_IN_REQUEST, false),
            (MOST_IN_REQUEST + 1, true),
            (1 << 20, true),
        ] {
            let image: Vec<u8> = (0..length).map(|index| index as u8).collect();
            assert_eq!(over_a_socket(&image), (image, has_descriptor), "{length} bytes");
        }
    }
}
