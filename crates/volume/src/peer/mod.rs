//! What two daemons say to each other about a volume that moves.
//!
//! [`crate::wire`] has the messages; [`source`] sends changes and chunks; [`destination`] writes them. Another transport than TLS has to do what
//! they do: carry [`ToDestination`](crate::wire::ToDestination) and [`ToSource`](crate::wire::ToSource) in any order, and tell when it has lost something.

pub mod destination;
pub mod source;
