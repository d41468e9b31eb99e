//! Connections between two daemons about a volume that moves.
//!
//! [`crate::wire`] has the messages; [`source`] sends changes and chunks; [`destination`] writes them.
//! Another transport than TLS has the same duties: to carry [`ToDestination`](crate::wire::ToDestination) and
//! [`ToSource`](crate::wire::ToSource) in any order, and to report a loss.
//!
//! Chunks have a connection of their own ([`chunks`]), so that no change waits behind them, or go by
//! one-sided RDMA: [`fetching`] reads them from the ring of [`lending`]. All other messages stay on TLS,
//! changes of the tenant among them: the RNIC serves copies after programs, and a change must not wait for
//! programs.

pub mod chunks;
pub mod destination;
pub mod fetching;
pub mod lending;
pub mod source;
