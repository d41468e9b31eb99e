//! The objects that programs hold pointers to. How each is laid out and let go of stands with its verbs.

use crate::abi::*;
use crate::ffi::Handle;

/// An address handle of a program's.
pub type AhHandle = Handle<ibv_ah>;
/// A completion channel of a program's.
pub type ChannelHandle = Handle<ibv_comp_channel>;
/// A completion queue of a program's.
pub type CqHandle = Handle<ibv_cq_ex>;
/// On-chip memory of a program's.
pub type DmHandle = Handle<ibv_dm>;
/// A memory region of a program's.
pub type MrHandle = Handle<ibv_mr>;
/// A memory window of a program's.
pub type MwHandle = Handle<ibv_mw>;
/// A protection domain or a parent domain of a program's.
pub type PdHandle = Handle<ibv_pd>;
/// A queue pair of a program's. Each has room for the extended functions, whether it uses them or not.
pub type QpHandle = Handle<ibv_qp_ex>;
/// A shared receive queue of a program's.
pub type SrqHandle = Handle<ibv_srq>;
