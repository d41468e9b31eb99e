//! Work requests and completions as the program sees them. The numbers are those of `<infiniband/verbs.h>`.

use verbatim_device::control::Access;
use verbatim_device::layout::Sge;
pub use verbatim_device::ring::Body;

/// In the `wr_id` that an RNIC sees: a RECV. An RNIC need not tell in a failed completion what failed.
pub(crate) const RECV_BIT: u64 = 1 << 63;

/// The most scatter/gather entries that a request may have.
pub(crate) const MAX_SGE: usize = 32;

/// `enum ibv_wr_opcode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SendOpcode {
    /// `IBV_WR_RDMA_WRITE`
    Write = 0,
    /// `IBV_WR_RDMA_WRITE_WITH_IMM`
    WriteWithImm = 1,
    /// `IBV_WR_SEND`
    Send = 2,
    /// `IBV_WR_SEND_WITH_IMM`
    SendWithImm = 3,
    /// `IBV_WR_RDMA_READ`
    Read = 4,
    /// `IBV_WR_ATOMIC_CMP_AND_SWP`
    CompareSwap = 5,
    /// `IBV_WR_ATOMIC_FETCH_AND_ADD`
    FetchAdd = 6,
    /// `IBV_WR_LOCAL_INV`
    LocalInvalidate = 7,
    /// `IBV_WR_BIND_MW`; [`SendWr::bind`] makes one.
    BindMw = 8,
    /// `IBV_WR_SEND_WITH_INV`
    SendWithInvalidate = 9,
    /// `IBV_WR_ATOMIC_WRITE`: eight bytes, of the body, or those of [`SendWr::compare_add`] where there is none.
    AtomicWrite = 15,
}

impl SendOpcode {
    /// The opcode of that number; `None` for those that no backend has.
    #[inline]
    pub fn from_raw(raw: u32) -> Option<Self> {
        Some(match raw {
            0 => Self::Write,
            1 => Self::WriteWithImm,
            2 => Self::Send,
            3 => Self::SendWithImm,
            4 => Self::Read,
            5 => Self::CompareSwap,
            6 => Self::FetchAdd,
            7 => Self::LocalInvalidate,
            8 => Self::BindMw,
            9 => Self::SendWithInvalidate,
            15 => Self::AtomicWrite,
            _ => return None,
        })
    }

    /// Whether it consumes a RECV of the other end.
    #[inline]
    pub fn is_two_sided(self) -> bool {
        matches!(
            self,
            Self::Send | Self::SendWithImm | Self::SendWithInvalidate | Self::WriteWithImm
        )
    }
}

/// `IBV_SEND_FENCE`
pub const SEND_FENCE: u32 = 1;
/// `IBV_SEND_SIGNALED`
pub const SEND_SIGNALED: u32 = 1 << 1;
/// `IBV_SEND_SOLICITED`
pub const SEND_SOLICITED: u32 = 1 << 2;
/// `IBV_SEND_INLINE`; [`SendWr::body`] says it, the flag is not looked at.
pub const SEND_INLINE: u32 = 1 << 3;

/// A send request, borrowed from the caller for the time of the call.
#[derive(Debug, Clone, Copy)]
pub struct SendWr<'a> {
    /// Given back in the completion.
    pub wr_id: u64,
    /// What to do.
    pub opcode: SendOpcode,
    /// `SEND_*` of this module (`enum ibv_send_flags`).
    pub flags: u32,
    /// Immediate data as on the wire, or the rkey to invalidate.
    pub imm: u32,
    /// Remote address.
    pub remote_address: u64,
    /// Remote key as the program knows it.
    pub rkey: u32,
    /// ATOMIC: compare or add operand.
    pub compare_add: u64,
    /// ATOMIC: swap operand.
    pub swap: u64,
    /// Datagrams: to whom.
    pub ud: UdAddress,
    /// The data. [`Sge`] has the layout of `struct ibv_sge`, keys as the program knows them.
    pub body: Body<'a>,
}

/// To whom a datagram goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UdAddress {
    /// [`crate::Ah::number`].
    pub ah: u32,
    /// The remote queue pair.
    pub remote_qpn: u32,
    /// Its Q_Key.
    pub remote_qkey: u32,
}

/// What a memory window is bound to by a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MwBind {
    /// The window's remote key.
    pub mw_rkey: u32,
    /// The remote key that it gets; differs in the low eight bits.
    pub new_rkey: u32,
    /// The region's local key; 0 with length 0.
    pub lkey: u32,
    /// Start of the range.
    pub address: u64,
    /// Its length; 0 unbinds.
    pub length: u64,
    /// What the window allows.
    pub access: Access,
}

impl SendWr<'_> {
    fn bare(wr_id: u64, opcode: SendOpcode, flags: u32) -> Self {
        Self {
            wr_id,
            opcode,
            flags,
            imm: 0,
            remote_address: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
            ud: UdAddress::default(),
            body: Body::Sges(&[]),
        }
    }

    /// Binds a memory window (`IBV_WR_BIND_MW`).
    pub fn bind(wr_id: u64, flags: u32, bind: &MwBind) -> Self {
        Self {
            rkey: bind.mw_rkey,
            imm: bind.new_rkey,
            remote_address: bind.address,
            compare_add: bind.length,
            swap: u64::from(bind.access.bits()) << 32 | u64::from(bind.lkey),
            ..Self::bare(wr_id, SendOpcode::BindMw, flags)
        }
    }

    /// Invalidates a remote key of this process (`IBV_WR_LOCAL_INV`).
    pub fn local_invalidate(wr_id: u64, flags: u32, rkey: u32) -> Self {
        Self {
            imm: rkey,
            ..Self::bare(wr_id, SendOpcode::LocalInvalidate, flags)
        }
    }
}

/// A receive request.
#[derive(Debug, Clone, Copy)]
pub struct RecvWr<'a> {
    /// Given back in the completion.
    pub wr_id: u64,
    /// Where the message goes.
    pub sges: &'a [Sge],
}

/// `IBV_WC_GRH`: 40 bytes are in front of the data.
pub const WC_GRH: u32 = 1;

/// `IBV_WC_WITH_IMM`
pub const WC_WITH_IMM: u32 = 2;

/// `IBV_WC_IP_CSUM_OK`, which no queue pair of ours can have.
pub const WC_IP_CSUM_OK: u32 = 4;

/// `IBV_WC_WITH_INV`: a remote key of this process was invalidated.
pub const WC_WITH_INV: u32 = 8;

/// `IBV_WC_SUCCESS`
pub const WC_SUCCESS: u32 = 0;
/// `IBV_WC_LOC_QP_OP_ERR`
pub const WC_LOC_QP_OP_ERR: u32 = 2;
/// `IBV_WC_WR_FLUSH_ERR`
pub const WC_WR_FLUSH_ERR: u32 = 5;

/// A completion, with the layout of `struct ibv_wc`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Wc {
    /// The request's.
    pub wr_id: u64,
    /// `enum ibv_wc_status`.
    pub status: u32,
    /// `enum ibv_wc_opcode`.
    pub opcode: u32,
    /// The RNIC's own detail of an error.
    pub vendor_err: u32,
    /// Bytes transferred.
    pub byte_len: u32,
    /// Immediate data as on the wire, or the invalidated rkey.
    pub imm: u32,
    /// The virtual number of the queue pair.
    pub qp_num: u32,
    /// Datagrams: the remote queue pair.
    pub src_qp: u32,
    /// `enum ibv_wc_flags`.
    pub wc_flags: u32,
    /// 0.
    pub pkey_index: u16,
    /// 0 on RoCE.
    pub slid: u16,
    /// Service level.
    pub sl: u8,
    /// 0 on RoCE.
    pub dlid_path_bits: u8,
}

const _: () = assert!(size_of::<Wc>() == 48);

impl Wc {
    /// Of a request that no RNIC will carry out.
    pub(crate) fn flushed(wr_id: u64, qp_num: u32) -> Self {
        Self {
            wr_id,
            qp_num,
            status: WC_WR_FLUSH_ERR,
            ..Self::default()
        }
    }
}

/// A completion and when the RNIC made it, for extended completion queues.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Completion {
    /// The completion.
    pub wc: Wc,
    /// `CLOCK_MONOTONIC` in ns.
    pub timestamp_ns: u64,
    /// Whether the sender asked for an event.
    pub solicited: bool,
}
