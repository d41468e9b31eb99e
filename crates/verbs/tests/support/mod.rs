//! Software RNICs in threads, programs at them, and what the agents would do between them.
#![allow(dead_code, unused_imports, reason = "each test takes its part")]

pub mod agent;
pub mod end;
pub mod nic;

pub use agent::{Agent, Replacement};
pub use end::End;
pub use nic::Nic;
