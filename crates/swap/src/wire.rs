//! What a server and the owner of a lease say to each other, over TLS: frames as of volumes.

use serde::{Deserialize, Serialize};
use verbatim_far::{End, Exposed};

/// The version of these messages.
pub const VERSION: u32 = 2;

/// The number of a session of the agents, by which a disk goes to another host.
pub type Session = u64;

/// The most bytes of a map in one message; they are its data.
pub const PIECE: usize = 8 << 20;

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
    /// First: memory is wanted of a lease that comes to the caller's host. Nothing of it is reached before [`Self::TakeOver`].
    Adopt {
        /// [`VERSION`] of the sender.
        version: u32,
        /// The caller's name, which must be in its certificate.
        host: String,
        /// What both owners call it.
        name: String,
        /// How much it is.
        bytes: u64,
        /// In which session it comes.
        by: Session,
        /// The caller's end.
        end: End,
        /// It may have taken it over already, on a connection that was lost.
        resume: Option<Token>,
    },
    /// Of an owner: that host may adopt the lease in that session. An earlier offer is over.
    Offer {
        /// The host.
        to: String,
        /// The session.
        by: Session,
    },
    /// Of an owner: nobody may.
    Withdraw {
        /// The session of the offer.
        by: Session,
    },
    /// Of an owner that writes no more: a piece of what is known of the pages, which is the message's data.
    Deposit {
        /// The session of the offer.
        by: Session,
        /// Where in the map the piece begins.
        at: u64,
        /// How long the map is.
        total: u64,
    },
    /// Of who has adopted it, when the session is committed. The queue pair of the owner before is destroyed when this is answered.
    TakeOver {
        /// The session.
        by: Session,
    },
    /// Of the new owner: it has the map.
    HasMap {
        /// The session.
        by: Session,
    },
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
    /// To [`ToServer::Offer`].
    Offered {
        /// The session.
        by: Session,
    },
    /// To the last piece of [`ToServer::Deposit`].
    Deposited {
        /// The session.
        by: Session,
    },
    /// To [`ToServer::TakeOver`]: the lease is the caller's, and nobody else reaches it. A piece of the map, which is the message's data.
    Taken {
        /// The session.
        by: Session,
        /// Where in the map the piece begins.
        at: u64,
        /// How long the map is; 0 if there is none.
        total: u64,
    },
    /// To [`ToServer::Adopt`] and [`ToServer::TakeOver`]: no lease comes to that host in that session, or not any more.
    NotOffered,
    /// The server hands its memory over to that one, or not any more: pages are to be taken there.
    HandOver {
        /// The other memory server.
        to: Option<String>,
    },
    /// To the owner before: the lease is that host's.
    Gone {
        /// The host.
        to: String,
    },
}
