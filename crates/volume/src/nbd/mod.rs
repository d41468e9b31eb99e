//! The NBD protocol, as `doc/proto.md` of the reference implementation has it: newstyle negotiation, simple replies.
//!
//! [`wire`] parses and builds, and knows no socket; [`export`]: what is found by its name; [`server`] negotiates, and is a connection by TLS; [`local`] is one of a client on this machine. What is offered: READ, WRITE, FLUSH, DISCARD (TRIM),
//! WRITE_ZEROES, FUA, several connections at once, TLS. What is not: structured replies, metadata contexts, resize of an export that is open: a client hears of another
//! size when it connects anew, for which the connections of those end that do so by themselves ([`export::Export::for_those_who_connect_anew`]).

pub mod export;
pub mod local;
mod outbox;
pub mod server;
pub mod wire;
