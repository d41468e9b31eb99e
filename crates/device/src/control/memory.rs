//! Memory regions and windows, and where their bytes are.

use bitflags::bitflags;
use serde::{Deserialize, Serialize};

bitflags! {
    /// `enum ibv_access_flags`, as far as the device knows them.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
    pub struct Access: u32 {
        /// `IBV_ACCESS_LOCAL_WRITE`
        const LOCAL_WRITE = 1;
        /// `IBV_ACCESS_REMOTE_WRITE`
        const REMOTE_WRITE = 1 << 1;
        /// `IBV_ACCESS_REMOTE_READ`
        const REMOTE_READ = 1 << 2;
        /// `IBV_ACCESS_REMOTE_ATOMIC`
        const REMOTE_ATOMIC = 1 << 3;
        /// `IBV_ACCESS_MW_BIND`
        const MW_BIND = 1 << 4;
        /// `IBV_ACCESS_ZERO_BASED`, of a memory window: remote addresses are offsets from its start. A region with it is
        /// registered with `iova` 0.
        const ZERO_BASED = 1 << 5;
    }
}

/// `enum ibv_mw_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum MwType {
    /// `IBV_MW_TYPE_1`: bound by `ibv_bind_mw`, to any queue pair of the protection domain.
    One = 1,
    /// `IBV_MW_TYPE_2`, as type 2B: belongs to the queue pair that bound it (IBA Vol 1 §10.6.7.2.3).
    Two = 2,
}

/// How a memory window is: what a bind has made of it, or an invalidation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MwState {
    /// Its remote key, with the tag of the last bind.
    pub rkey: u32,
    /// What it opens; `None`: nothing.
    pub bound: Option<MwBound>,
}

/// What a bound window opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MwBound {
    /// The region behind it.
    pub lkey: u32,
    /// Start, in the terms of the region.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
    /// What partners may do, and [`Access::ZERO_BASED`] if their addresses are offsets.
    pub access: Access,
    /// Of type 2: the only queue pair that it lets in.
    pub qpn: Option<u32>,
}

/// How the RNIC reaches a stretch of a memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backing {
    /// The pages are part of a file that both sides map (adopted memory).
    File {
        /// Which of the descriptors sent with the request.
        fd_index: u32,
        /// Where in the file the segment starts, page aligned.
        offset: u64,
    },
    /// The RNIC reads and writes the process's memory through `/proc/PID/mem`.
    Process,
}

/// A stretch of a memory region in the program's address space. A region's segments are contiguous and in order; the
/// first may start before the region and the last end after it, at page boundaries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Virtual address in the program.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
    /// How to reach it.
    pub backing: Backing,
}

/// Memory of a region, see [`Request::RegMr`](super::Request::RegMr).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Translation {
    /// Start in the program's address space.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
    /// The address that keys refer to.
    pub iova: u64,
    /// Where the bytes are.
    pub segments: Vec<Segment>,
}
