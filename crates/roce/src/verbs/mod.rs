//! Work requests and completions, as plain values.
//!
//! The numbers of each enum are those of `infiniband/verbs.h`, so that rings shared with a program can hold them as
//! they are. A request holds its scatter/gather list or its inline bytes itself: taking one allocates nothing.

mod completion;
mod data;
mod operation;
mod request;

pub use completion::{
    Completion, Queue, VENDOR_ERR_PAUSED, VENDOR_ERR_RESUMING, WcFlags, WcOpcode, WcStatus,
};
pub use data::{Immediate, MAX_INLINE, MAX_MESSAGE, MAX_SGE, SendData, Sge, SgeList};
pub use operation::{AtomicOp, Bind, Operation};
pub use request::{BadRequest, Destination, Path, ReceiveRequest, SendRequest, Traffic};
