//! The exchange over the transport as it is.

pub use verbatim_roce as roce;

#[path = "pair.rs"]
pub mod pair;
