//! Messages between a server and the owner of a lease, over TLS, in the frames of volumes.

use serde::{Deserialize, Serialize};
use verbatim_far::{End, Exposed};

/// The version of these messages.
pub const VERSION: u32 = 2;

/// The number of a session of the agents, in which a disk goes to another host.
pub type Session = u64;

/// The most bytes of a map in one message; they are its data.
pub const PIECE: usize = 8 << 20;

/// The key to return to a lease. Only its server and its owner know it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Token(pub u128);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

/// A message of the owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToServer {
    /// First message: ask for memory.
    Lease {
        /// [`VERSION`] of the sender.
        version: u32,
        /// The caller's name, which must be in its certificate.
        host: String,
        /// The owner's name of the lease.
        name: String,
        /// The length in bytes.
        bytes: u64,
        /// The owner's end.
        end: End,
        /// A lease that the owner may still have.
        resume: Option<Token>,
    },
    /// The owner is there.
    Ping,
    /// The owner no longer needs the memory.
    Goodbye,
    /// First message: ask for the lease that comes to the caller's host. Its memory is not reachable before
    /// [`Self::TakeOver`].
    Adopt {
        /// [`VERSION`] of the sender.
        version: u32,
        /// The caller's name, which must be in its certificate.
        host: String,
        /// Both owners' name of the lease.
        name: String,
        /// The length in bytes.
        bytes: u64,
        /// The session in which it comes.
        by: Session,
        /// The caller's end.
        end: End,
        /// The token, if the caller may have taken the lease over already, on a connection that was lost.
        resume: Option<Token>,
    },
    /// By the owner: this host may adopt the lease in this session. An earlier offer is over.
    Offer {
        /// The host.
        to: String,
        /// The session.
        by: Session,
    },
    /// By the owner: the offer is taken back.
    Withdraw {
        /// The session of the offer.
        by: Session,
    },
    /// By an owner that writes no more: a piece of the map of the pages, as the message's data.
    Deposit {
        /// The session of the offer.
        by: Session,
        /// The first byte of the piece in the map.
        at: u64,
        /// The length of the map.
        total: u64,
    },
    /// By the adopting host, when the session is committed. The earlier owner's queue pair is destroyed
    /// before the answer.
    TakeOver {
        /// The session.
        by: Session,
    },
    /// By the new owner: it has the map.
    HasMap {
        /// The session.
        by: Session,
    },
}

/// A message of the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToOwner {
    /// The lease; the server's end is connected.
    Granted {
        /// The key to return to the lease.
        token: Token,
        /// The server's end.
        end: End,
        /// The place of the memory.
        memory: Exposed,
        /// The memory is that of the lease to resume, and no earlier request lands in it any more.
        kept: bool,
    },
    /// There is no lease, for this reason.
    Refused(String),
    /// The server's process is there.
    Pong,
    /// The server is about to end: the memory has to be given up soon.
    Leaving,
    /// The answer to [`ToServer::Offer`].
    Offered {
        /// The session.
        by: Session,
    },
    /// The answer to the last piece of [`ToServer::Deposit`].
    Deposited {
        /// The session.
        by: Session,
    },
    /// The answer to [`ToServer::TakeOver`]: the lease is the caller's, and no other host reaches it. A piece
    /// of the map, as the message's data.
    Taken {
        /// The session.
        by: Session,
        /// The first byte of the piece in the map.
        at: u64,
        /// The length of the map; 0 if there is none.
        total: u64,
    },
    /// The answer to [`ToServer::Adopt`] and [`ToServer::TakeOver`]: no lease comes to this host in this
    /// session (any more).
    NotOffered,
    /// The server hands its memory over to this one, or no longer: the owner has to take its pages there.
    HandOver {
        /// The other memory server.
        to: Option<String>,
    },
    /// To the earlier owner: the lease is this host's.
    Gone {
        /// The host.
        to: String,
    },
}
