//! What two daemons say to each other about a volume that moves.
//!
//! [`crate::wire`] has the messages; [`source`] sends changes and chunks; [`destination`] writes them. Another transport than TLS has to do what
//! they do: carry [`ToDestination`](crate::wire::ToDestination) and [`ToSource`](crate::wire::ToSource) in any order, and tell when it has lost something.
//!
//! Chunks have a connection of their own ([`chunks`]), so that no change waits behind them, or go by one-sided RDMA: [`fetching`] reads them from the ring of [`lending`]. All else stays on TLS, changes of
//! the tenant among them: the RNIC serves the copy behind programs, and a change must not wait for those.

pub mod chunks;
pub mod destination;
pub mod fetching;
pub mod lending;
pub mod source;
