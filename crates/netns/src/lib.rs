//! What programs have made of their network namespace: read in one, and put into another that is new.
//!
//! ```text
//!   source: read ─► State ─ encode ─► (the agents) ─ decode ─► State ─► place: destination
//! ```
//!
//! All of it happens in the network namespace of the calling thread. A state names links by their names, since a namespace
//! numbers them by itself. What is not moved is found ([`Found::obstacles`]) and named; nothing is left out without a word.
//!
//! Addresses, routes, rules and neighbours are carried as the kernel says them (rtnetlink(7)), attribute by attribute; an attribute that
//! is not known here is an obstacle. Sysctls are the files below `/proc/sys/net` that can be written. The ruleset of nftables
//! goes by nft(8), with the values of its counters.

mod entry;
mod found;
mod links;
mod netlink;
mod nft;
mod obstacles;
mod place;
mod read;
mod state;
mod sysctl;

pub use found::Found;
pub use place::{Error, place};
pub use read::{Reader, read};
pub use state::{Malformed, State};
