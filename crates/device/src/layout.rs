//! What lies where in a context's arena.
//!
//! ```text
//! 0                 ContextPage: doorbell bits, "the RNIC sleeps"
//! SIGNS_OFFSET      Signs: what the RNIC tells whoever polls
//! CONTEXT_BYTES …   queues, each at a page boundary, wherever the RNIC put it
//!
//! queue pair:  QpHeader (256 B) │ send slots (power of two) │ receive slots (power of two)
//! shared RECV: QpHeader (256 B) │ receive slots (power of two)
//! completion:  CqHeader (256 B) │ Cqe × entries (power of two)
//! ```
//!
//! Indices are free-running `u32` counters; slot = counter mod slots. A producer's counter is stored with release order
//! after the slot's bytes, a consumer's after it has read them.

use crate::control::{QpCap, SrqAttr};
use crate::shared::{AtomicU32, AtomicU64};

/// Bytes of the arena before the first queue.
pub const CONTEXT_BYTES: u64 = 16384;

/// Doorbell words: one bit per QP slot of the context.
pub const DOORBELL_WORDS: usize = 1024;

/// The most QPs in one context.
pub const MAX_QP_SLOTS: u32 = (DOORBELL_WORDS * 64) as u32;

/// The arena's first bytes.
///
/// To ring: store the producer index (release), set the slot's bit in `doorbells`, then its word's bit in `summary`
/// (sequentially consistent), then read `nic_sleeping` (sequentially consistent) and write the eventfd if it is not 0.
/// The RNIC, before it sleeps: sets `nic_sleeping` (sequentially consistent), looks at `summary` once more, sleeps.
#[repr(C, align(64))]
pub struct ContextPage {
    /// Not 0 while the RNIC sleeps or is about to.
    pub nic_sleeping: AtomicU32,
    _pad0: [u32; 15],
    /// Bit `w % 64` of word `w / 64`: `doorbells[w]` is not 0.
    pub summary: [AtomicU64; DOORBELL_WORDS / 64],
    /// Bit `s % 64` of word `s / 64`: the QP at slot `s` has new send requests.
    pub doorbells: [AtomicU64; DOORBELL_WORDS],
}

/// Where [`Signs`] are: between the [`ContextPage`] and the first queue, where RNICs that have none of it leave zeroes.
pub const SIGNS_OFFSET: u64 = 8448;

/// What the RNIC tells programs. It only writes here and never reads: what a program writes misleads nobody else.
#[repr(C, align(64))]
pub struct Signs {
    /// Not 0: the RNIC has to wait for a core. Who polls and finds nothing should leave it one for a moment.
    pub starved: AtomicU32,
    _pad0: [u32; 15],
}

/// A queue pair's counters.
#[repr(C, align(64))]
pub struct QpHeader {
    /// Send requests posted; the program writes it.
    pub sq_producer: AtomicU32,
    /// Receive requests posted; the program writes it.
    pub rq_producer: AtomicU32,
    _pad0: [u32; 30],
    /// Send requests finished (acknowledged, failed or flushed), whether or not they were signaled; the RNIC writes it.
    pub sq_completed: AtomicU32,
    /// Receive requests taken out of the queue; the RNIC writes it.
    pub rq_consumed: AtomicU32,
    _pad1: [u32; 30],
}

/// A completion queue's counters.
#[repr(C, align(64))]
pub struct CqHeader {
    /// Completions written; the RNIC writes it.
    pub producer: AtomicU32,
    _pad0: [u32; 31],
    /// Completions read; the program writes it.
    pub consumer: AtomicU32,
    /// [`CQ_ARMED`], [`CQ_ARMED_SOLICITED`] or 0: the program asks for one event. Who arms looks at `producer` again after
    /// it (sequentially consistent); the RNIC looks here after it has stored `producer`, puts 0 in its place and sends
    /// the event.
    pub armed: AtomicU32,
    _pad1: [u32; 30],
}

/// [`CqHeader::armed`]: an event at the next completion.
pub const CQ_ARMED: u32 = 1;
/// [`CqHeader::armed`]: an event at the next completion that is solicited or an error.
pub const CQ_ARMED_SOLICITED: u32 = 2;

/// One scatter/gather entry, `struct ibv_sge`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sge {
    /// Address, in the terms of the key.
    pub address: u64,
    /// Length in bytes.
    pub length: u32,
    /// Local key.
    pub lkey: u32,
}

/// [`SendWqe::flags`]: make a completion when done.
pub const SEND_SIGNALED: u8 = 1;
/// [`SendWqe::flags`]: the receiver's completion is solicited.
pub const SEND_SOLICITED: u8 = 2;
/// [`SendWqe::flags`]: the data follow in the slot, `inline_bytes` of them, in place of scatter/gather entries.
pub const SEND_INLINE: u8 = 4;
/// [`SendWqe::flags`]: start after all earlier READs and ATOMICs are done.
pub const SEND_FENCE: u8 = 8;

/// [`SendWqe::flags`]: an earlier queue pair of the connection has executed the request, and not completed it. It
/// completes here, in its turn, and nothing else happens, but that the original value of an ATOMIC, which is in
/// `compare_add`, goes to its entries. Reliable connections only.
pub const SEND_EXECUTED: u8 = 16;

/// [`SendWqe::opcode`]: `IBV_WR_LOCAL_INV`.
pub const WR_LOCAL_INV: u8 = 7;
/// [`SendWqe::opcode`]: `IBV_WR_BIND_MW`, see [`SendWqe`].
pub const WR_BIND_MW: u8 = 8;

/// [`SendWqe::opcode`]: `IBV_WR_ATOMIC_WRITE`.
pub const WR_ATOMIC_WRITE: u8 = 15;

/// A send request's first 64 bytes; scatter/gather entries or inline data follow.
///
/// A bind (`WR_BIND_MW`, of both window types) has no entries and uses the fields so: `rkey` the window's remote key,
/// `imm` the remote key that it gets (differs in the low eight bits), `remote_address` and `compare_add` start and length of
/// the range (length 0 unbinds), low half of `swap` the region's local key, high half the rights
/// (`enum ibv_access_flags`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SendWqe {
    /// Returned in the completion.
    pub wr_id: u64,
    /// `enum ibv_wr_opcode`.
    pub opcode: u8,
    /// `SEND_*`.
    pub flags: u8,
    /// Scatter/gather entries that follow.
    pub num_sge: u16,
    /// Immediate data as on the wire (`__be32`), or the rkey to invalidate (SEND with invalidate, `WR_LOCAL_INV`).
    pub imm: u32,
    /// Remote address.
    pub remote_address: u64,
    /// Remote key.
    pub rkey: u32,
    /// Bytes of inline data that follow.
    pub inline_bytes: u32,
    /// ATOMIC: compare or add operand. ATOMIC WRITE without entries and inline data: the eight bytes, as they are in memory.
    pub compare_add: u64,
    /// ATOMIC: swap operand.
    pub swap: u64,
    /// Datagrams: the remote QP number.
    pub remote_qpn: u32,
    /// Datagrams: the remote Q_Key.
    pub remote_qkey: u32,
    /// Datagrams: the address handle.
    pub ah: u32,
    /// 0.
    pub reserved: u32,
}

/// A receive request's first 16 bytes; scatter/gather entries follow.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RecvWqe {
    /// Returned in the completion.
    pub wr_id: u64,
    /// Scatter/gather entries that follow.
    pub num_sge: u32,
    /// 0.
    pub reserved: u32,
}

/// A completion, the fields of `struct ibv_wc`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cqe {
    /// The request's `wr_id`.
    pub wr_id: u64,
    /// When the RNIC wrote it, `CLOCK_MONOTONIC` in ns.
    pub timestamp_ns: u64,
    /// `enum ibv_wc_status`.
    pub status: u32,
    /// `enum ibv_wc_opcode`.
    pub opcode: u32,
    /// Our own detail of an error.
    pub vendor_err: u32,
    /// Bytes that were transferred.
    pub byte_len: u32,
    /// Immediate data as on the wire (`__be32`), or the invalidated rkey.
    pub imm: u32,
    /// The local QP number.
    pub qpn: u32,
    /// Datagrams: the remote QP number.
    pub src_qpn: u32,
    /// `enum ibv_wc_flags`.
    pub wc_flags: u32,
    /// Datagrams: service level.
    pub sl: u32,
    /// 1 for a solicited completion.
    pub solicited: u32,
}

const _: () = {
    assert!(size_of::<ContextPage>() as u64 <= SIGNS_OFFSET && SIGNS_OFFSET.is_multiple_of(64));
    assert!(SIGNS_OFFSET + size_of::<Signs>() as u64 <= CONTEXT_BYTES);
    assert!(size_of::<QpHeader>() == 256 && size_of::<CqHeader>() == 256);
    assert!(size_of::<SendWqe>() == 64 && size_of::<RecvWqe>() == 16 && size_of::<Sge>() == 16);
    assert!(size_of::<Cqe>() == 56);
};

/// Bytes from one completion to the next.
pub const CQE_STRIDE: u64 = 64;

/// Where receive slots lie, relative to the [`QpHeader`] in front of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecvLayout {
    /// Requests that may be posted.
    pub limit: u32,
    /// Slots, the next power of two.
    pub slots: u32,
    /// Bytes from one to the next.
    pub stride: u64,
    /// Where the first one starts.
    pub offset: u64,
    /// Where the last one ends: the length of all.
    pub bytes: u64,
}

impl RecvLayout {
    fn new(offset: u64, max_wr: u32, max_sge: u32) -> Self {
        let limit = max_wr.max(1);
        let slots = limit.next_power_of_two();
        let stride =
            (size_of::<RecvWqe>() as u64 + u64::from(max_sge) * size_of::<Sge>() as u64).next_multiple_of(32);
        Self {
            limit,
            slots,
            stride,
            offset,
            bytes: offset + u64::from(slots) * stride,
        }
    }

    /// The layout of a shared receive queue with these limits.
    pub fn shared(attr: &SrqAttr) -> Self {
        Self::new(size_of::<QpHeader>() as u64, attr.max_wr, attr.max_sge)
    }
}

/// Where the parts of a queue pair lie, relative to its offset in the arena. Both sides compute it from the limits that
/// the RNIC gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpLayout {
    /// Send requests that may be posted.
    pub send_limit: u32,
    /// Slots of the send queue, the next power of two.
    pub send_slots: u32,
    /// Bytes from one to the next.
    pub send_stride: u64,
    /// The receive queue.
    pub recv: RecvLayout,
    /// Length of all.
    pub bytes: u64,
}

impl QpLayout {
    /// The layout for these limits. With a shared receive queue the limits of the own one are those of one request
    /// without entries, whose slot nobody uses.
    pub fn new(cap: &QpCap) -> Self {
        let send_limit = cap.max_send_wr.max(1);
        let send_slots = send_limit.next_power_of_two();
        let send_body =
            (u64::from(cap.max_send_sge) * size_of::<Sge>() as u64).max(cap.max_inline_data.into());
        let send_stride = (size_of::<SendWqe>() as u64 + send_body).next_multiple_of(64);
        let recv_offset = size_of::<QpHeader>() as u64 + u64::from(send_slots) * send_stride;
        let recv = RecvLayout::new(recv_offset, cap.max_recv_wr, cap.max_recv_sge);
        Self {
            send_limit,
            send_slots,
            send_stride,
            recv,
            bytes: recv.bytes,
        }
    }
}

/// Where the parts of a completion queue lie, relative to its offset in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CqLayout {
    /// Entries, a power of two.
    pub entries: u32,
    /// Length of all.
    pub bytes: u64,
}

impl CqLayout {
    /// The layout for so many entries, rounded up to a power of two.
    pub fn new(entries: u32) -> Self {
        let entries = entries.max(1).next_power_of_two();
        Self {
            entries,
            bytes: size_of::<CqHeader>() as u64 + u64::from(entries) * CQE_STRIDE,
        }
    }
}
