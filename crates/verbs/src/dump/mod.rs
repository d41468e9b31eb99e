//! Checkpoint and restore by the program itself: the verbs `ibv_dump_context` and `ibv_restore_object` (MigrOS §3.5,
//! Listing 1), without an agent. The C side, and how it is used, are in `include/verbatim.h` and `docs/checkpoint-api.md`.
//!
//! ```text
//!   Context::dump                                          Record::parse, Context::restore_…, Context::refill
//!   stand ─► all queue pairs stand still ─► take ─► format ─► (a file) ─► format ─► restore ─► they go on
//!     │                                       └─ bodies ─┘                 └─ bodies ─┘
//!     └──── Context::go_on: they go on where they are
//! ```
//! All of it is done by the thread that asks. No session has the process meanwhile (`control_gate`), and none gets what stands
//! still afterwards.

mod bodies;
#[cfg(test)]
mod every_step_tests;
mod fit;
mod format;
mod record;
mod restore;
mod stand;
mod take;

pub use crate::error::DumpError;
pub use format::{HEAD_BYTES, RECORD_HEAD_BYTES, VERSION};
pub use record::{Record, check};
pub use restore::Restored;
pub use take::{Dump, Owner, QpUser};

pub(crate) use stand::{Standing, blocker};

/// What a record describes. The numbers are those of `enum ibv_object_type` in `include/verbatim.h`. In a dump they come in
/// this order, in which they can be restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
pub enum ObjectType {
    /// A protection domain.
    Pd = 1,
    /// A completion channel.
    Channel = 2,
    /// A completion queue.
    Cq = 3,
    /// A shared receive queue.
    Srq = 4,
    /// A memory region.
    Mr = 5,
    /// An address handle.
    Ah = 6,
    /// A queue pair.
    Qp = 7,
    /// A memory window.
    Mw = 8,
}

impl ObjectType {
    /// All of them, in their order.
    pub const ALL: [Self; 8] = [
        Self::Pd,
        Self::Channel,
        Self::Cq,
        Self::Srq,
        Self::Mr,
        Self::Ah,
        Self::Qp,
        Self::Mw,
    ];

    /// The type of that number.
    pub fn from_raw(raw: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|object| *object as u32 == raw)
    }
}
