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

/// Why bytes are not a dump, or not a record, that can be restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DumpError {
    /// Something else altogether.
    #[error("these bytes are no dump of a context")]
    NoDump,
    /// Made by a later release.
    #[error("it has version {0}, and version {VERSION} is known")]
    Version(u16),
    /// Some bytes are not those that were written.
    #[error("it is damaged: its checksum is wrong")]
    Damaged,
    /// It is not so long as it says.
    #[error("its length is wrong")]
    Length,
    /// There are more records, or fewer, than it says.
    #[error("the number of its records is wrong")]
    Count,
    /// Of an object that there is not.
    #[error("there are no objects of type {0}")]
    Type(u16),
    /// The checksum is right, and yet the content cannot be.
    #[error("it cannot be restored: {0}")]
    Content(&'static str),
    /// More than 4 GiB of one object.
    #[error("it would be too long")]
    TooLong,
}

impl DumpError {
    /// The positive errno for a C caller.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Version(_) => libc::EPROTONOSUPPORT,
            Self::Damaged => libc::EBADMSG,
            Self::TooLong => libc::EFBIG,
            Self::NoDump | Self::Length | Self::Count | Self::Type(_) | Self::Content(_) => libc::EINVAL,
        }
    }
}
