//! The exchange over the transport without the tests for pause and resume.

pub use verbatim_plain_roce as roce;

#[path = "pair.rs"]
pub mod pair;
