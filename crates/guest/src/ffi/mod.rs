//! The boundary to C: who owns what a pointer points to, and how each verb says that it failed.

mod answer;
mod boundary;
mod pointer;
mod text;

pub use answer::{Answer, Code, Count, Errno, MinusOne, Nothing, Pointer, errno, set_errno};
pub use boundary::{data_path, unsupported, verb};
pub use pointer::{CObject, Handle, read, slice, slice_mut, write};
pub use text::fill;
