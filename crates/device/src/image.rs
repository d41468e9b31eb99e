//! Images of paused connections, on their way between a program's side and the RNIC ([`Request::DumpQp`],
//! [`Request::RestoreQp`]).
//!
//! [`Request::DumpQp`]: crate::control::Request::DumpQp
//! [`Request::RestoreQp`]: crate::control::Request::RestoreQp

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};
use verbatim_seqpacket::{Carried, Error};

/// Longer ones travel in memory of their own. A program can have several requests under way without reading an answer: so many
/// answers fit into a socket's buffer, whose other end never waits for room.
pub const MOST_IN_MESSAGE: usize = 3 << 10;

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
        Carried::new(bytes, MOST_IN_MESSAGE)
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
    Carried::new(image.to_vec(), MOST_IN_MESSAGE)
}
