//! For tests: RNICs that are a few queues in memory, and a migration between them as the agents would lead it.

mod nic;
mod story;
pub mod wire;

pub use nic::World;
pub use story::{CAP, End, Migration, Shape, Story, buffer};
