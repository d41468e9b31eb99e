//! The record of a process's control path: what must be made again elsewhere (MigrRDMA §3.2).
//!
//! Destroyed objects are not in it. All numbers are virtual unless the field says otherwise.

use serde::{Deserialize, Serialize};
use verbatim_device::control::{Access, MwType, QpAttr, QpCap, QpType, SrqAttr};

/// One end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Endpoint {
    /// GID in network byte order.
    pub gid: [u8; 16],
    /// Queue pair number.
    pub qpn: u32,
}

/// Everything that one process made.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RoadMap {
    /// The process, in its own PID namespace.
    pub pid: u32,
    /// Rises with every object that is made, changed or destroyed.
    pub version: u64,
    /// The opened devices.
    pub contexts: Vec<ContextRecord>,
    /// Verbs in use that cannot be moved yet, in words for an operator.
    pub blockers: Vec<String>,
}

/// One opened device.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ContextRecord {
    /// Its number within the process.
    pub id: u32,
    /// Its GID table as the program knows it: that of the host where it was opened. The first entry is that host's address.
    pub gids: Vec<[u8; 16]>,
    /// Entries of that table by which address handles send, each once.
    pub handle_gids: Vec<[u8; 16]>,
    /// How often it has moved.
    pub moves: u32,
    /// Protection domains.
    pub pds: Vec<PdRecord>,
    /// Memory regions.
    pub mrs: Vec<MrRecord>,
    /// Memory windows.
    pub mws: Vec<MwRecord>,
    /// Completion channels.
    pub channels: Vec<ChannelRecord>,
    /// Completion queues.
    pub cqs: Vec<CqRecord>,
    /// Shared receive queues.
    pub srqs: Vec<SrqRecord>,
    /// Queue pairs.
    pub qps: Vec<QpRecord>,
}

/// A protection domain.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PdRecord {
    /// Its number within the context.
    pub pd: u32,
}

/// A memory region.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MrRecord {
    /// Local key.
    pub lkey: u32,
    /// Remote key.
    pub rkey: u32,
    /// The RNIC's local key today.
    pub physical_lkey: u32,
    /// The RNIC's remote key today.
    pub physical_rkey: u32,
    /// Protection domain.
    pub pd: u32,
    /// Start in the program's address space.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
    /// The address that keys refer to.
    pub iova: u64,
    /// What the keys allow.
    pub access: Access,
    /// Where the bytes are.
    pub segments: Vec<SegmentRecord>,
}

/// A memory window. What it is bound to changes by work requests, and is told when none are in flight any more.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct MwRecord {
    /// Remote key, of which only the index stays.
    pub rkey: u32,
    /// The RNIC's today, likewise.
    pub physical_rkey: u32,
    /// Protection domain.
    pub pd: u32,
    /// Its type.
    pub mw_type: MwType,
}

/// A stretch of a memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentRecord {
    /// Virtual address in the program.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
    /// Offset in the process's file of adopted memory; `None` if the memory is not adopted.
    pub offset: Option<u64>,
}

/// A completion channel.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ChannelRecord {
    /// Its number within the context.
    pub channel: u32,
}

/// A completion queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CqRecord {
    /// Its number within the context.
    pub cq: u32,
    /// How many entries it has.
    pub entries: u32,
    /// Where its events go, if anywhere. They say `cq`.
    pub channel: Option<u32>,
}

/// A shared receive queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SrqRecord {
    /// Its number within the context.
    pub srq: u32,
    /// Protection domain.
    pub pd: u32,
    /// Its limits as the program was given them. The one that is armed is not part of it: whoever claims the queue arms it.
    pub attr: SrqAttr,
}

/// A queue pair.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct QpRecord {
    /// Its number.
    pub qpn: u32,
    /// Protection domain.
    pub pd: u32,
    /// Where send completions go.
    pub send_cq: u32,
    /// Where receive completions go.
    pub recv_cq: u32,
    /// Where RECVs come from, if not from an own queue.
    pub srq: Option<u32>,
    /// The transport.
    pub qp_type: QpType,
    /// What the program was given.
    pub cap: QpCap,
    /// Attributes as the program set them, state included.
    pub attr: QpAttr,
    /// Multicast groups that it is attached to.
    pub groups: Vec<[u8; 16]>,
    /// The physical number today.
    pub physical_qpn: u32,
    /// The GID of its RNIC by which it is connected today, of a connected queue pair.
    pub local_gid: Option<[u8; 16]>,
    /// The physical other end today, of a connected queue pair.
    pub remote: Option<Endpoint>,
    /// An operator has paused it.
    pub paused: bool,
}
