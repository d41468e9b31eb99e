//! The contract between a program's side of a verbs device (the guest library, or the agent on its behalf) and the
//! software RNIC.
//!
//! - [`control`]: the requests of the control path, one `SOCK_SEQPACKET` connection per context. The connection *is* the
//!   context ([`Connection`]): whoever holds the descriptor holds it, and when the last holder closes it the RNIC destroys everything that
//!   was made on it.
//! - [`gids`]: which GID of an RNIC takes the place of one of another.
//! - [`image`]: the state of a paused connection, which may be too long for a message.
//! - [`layout`]: what lies in the context's *arena*, the shared memory that the RNIC makes for it: doorbells, send,
//!   receive and completion queues.
//! - [`ring`]: the two ends of each queue, typed by role, over those raw bytes.
//!
//! The RNIC trusts nothing that the other side can write: indices, requests and messages are copied first and checked
//! after. The other side trusts the RNIC.

mod connection;
pub mod control;
pub mod gids;
pub mod image;
pub mod layout;
pub mod ring;
mod shared;
pub mod transitions;

pub use connection::{Connection, recv, send};
