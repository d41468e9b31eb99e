//! The NBD protocol, as `doc/proto.md` of the reference implementation has it: newstyle negotiation, simple replies.
//!
//! [`wire`] parses and builds, and knows no socket; [`export`]: volumes by their names; [`server`]
//! negotiates, and serves a connection by TLS; [`local`] serves a client on this machine. Offered: READ,
//! WRITE, FLUSH, DISCARD (TRIM), WRITE_ZEROES, FUA, several connections at once, TLS. Not offered: structured
//! replies, metadata contexts, resize of an open export. A client learns another size when it reconnects;
//! connections of clients that reconnect by themselves are ended for that
//! ([`export::Export::for_those_who_connect_anew`]).

pub mod export;
pub mod local;
mod outbox;
pub mod server;
pub mod wire;
