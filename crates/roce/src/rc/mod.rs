//! The reliable connection (IBA §9.7): one queue pair with its requester and its responder.
//!
//! ```text
//!   send ring ──► requester ── requests ──►  (partner's responder)
//!   completions ◄─┘      ▲──── responses ──
//!
//!   receive ring ─► responder ◄── requests ── (partner's requester)
//!   completions ◄──┘      └─── responses ──►
//! ```
//!
//! The halves share nothing but the [`crate::link::Link`]; [`queue_pair`] holds the state that rules over both.

mod dialogue;
mod position;
mod queue_pair;
mod requester;
mod responder;

pub use position::{Outstanding, Position};
pub use queue_pair::RcQp;
