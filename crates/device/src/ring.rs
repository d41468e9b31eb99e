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
//! | signs | [`Signs`] | [`SignsWriter`] |
//!
//! The RNIC's ends take nothing on trust: they copy a slot before they look at it, and an index that cannot be is
//! [`BadIndex`], which costs the program its queue pair and nobody else anything.

mod completion;
mod doorbell;
mod index;
mod signs;
#[cfg(test)]
mod testing;
mod work;

pub use completion::{Armed, CqConsumer, CqProducer};
pub use doorbell::{Doorbell, DoorbellReader};
pub use index::BadIndex;
pub use signs::{Signs, SignsWriter};
pub use work::{Body, RecvConsumer, RecvProducer, SendConsumer, SendProducer, SentWqe};
