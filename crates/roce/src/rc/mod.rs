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
//! The halves share nothing but the [`crate::link::Link`]; [`queue_pair`] holds the state that rules over both, and
//! [`migration`] stops them and lets them go on, here or elsewhere.

mod dialogue;
mod image;
mod migration;
mod position;
mod queue_pair;
mod requester;
mod responder;

pub use image::{IMAGE_VERSION, ImageError, RcImage};
pub use migration::{Secret, SecretEnd, Standing};
pub use position::{Outstanding, Position};
pub use queue_pair::RcQp;
