//! What a server and the owner of a lease say to each other, over TLS: frames as of volumes.

use serde::{Deserialize, Serialize};
use verbatim_far::{End, Exposed};

/// The version of these messages.
pub const VERSION: u32 = 1;

/// Who has it may come back to a lease. Only its server and its owner know it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Token(pub u128);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

/// From the owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToServer {
    /// First: memory is wanted.
    Lease {
        /// [`VERSION`] of the sender.
        version: u32,
        /// The caller's name, which must be in its certificate.
        host: String,
        /// What the owner calls it.
        name: String,
        /// How much.
        bytes: u64,
        /// The owner's end.
        end: End,
        /// A lease that it may still have.
        resume: Option<Token>,
    },
    /// The owner is there.
    Ping,
    /// It needs the memory no longer.
    Goodbye,
}

/// From the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToOwner {
    /// Here it is; the end is connected.
    Granted {
        /// For coming back.
        token: Token,
        /// The server's end.
        end: End,
        /// Where the memory is.
        memory: Exposed,
        /// It is the memory of the lease that was to be resumed, and nothing of before lands in it any more.
        kept: bool,
    },
    /// There is none, and why.
    Refused(String),
    /// The server's process is there.
    Pong,
    /// The server is about to end: the memory is to be given up soon.
    Leaving,
}
