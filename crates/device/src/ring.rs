//! The two ends of each queue.
//!
//! Raw shared memory becomes a ring end once, under the contract of its `new`, and exists from then on only as the end
//! of one role:
//!
//! | queue | the program's side | the RNIC's side |
//! | --- | --- | --- |
//! | send | [`SendProducer`] | [`SendConsumer`] |
//! | receive | [`RecvProducer`] | [`RecvConsumer`] |
//! | completion | [`CqConsumer`] | [`CqProducer`] |
//! | doorbell | [`Doorbell`] | [`DoorbellReader`] |
//!
//! The RNIC's ends take nothing on trust: they copy a slot before they look at it, and an index that cannot be is
//! [`BadIndex`], which costs the program its queue pair and nobody else anything.

mod completion;
mod doorbell;
#[cfg(test)]
mod testing;
mod work;

pub use completion::{CqConsumer, CqProducer};
pub use doorbell::{Doorbell, DoorbellReader};
pub use work::{Body, RecvConsumer, RecvProducer, SendConsumer, SendProducer, SentWqe};

/// A counter in shared memory claims more than the queue can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadIndex {
    /// What the other side wrote.
    pub claimed: u32,
    /// What this side has seen so far.
    pub seen: u32,
    /// How many slots there are.
    pub slots: u32,
}

impl std::fmt::Display for BadIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { claimed, seen, slots } = self;
        write!(
            f,
            "producer index {claimed} is more than {slots} slots ahead of {seen}"
        )
    }
}

impl std::error::Error for BadIndex {}
