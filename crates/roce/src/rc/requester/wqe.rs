//! A send request with its range of PSNs.

use serde::{Deserialize, Serialize};

use crate::gather::check_data;
use crate::{BadRequest, Host, Mtu, Operation, Psn, SendData, SendRequest, SgeList, WcOpcode, WcStatus};

/// A request on its way.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Wqe {
    pub request: SendRequest,
    pub opcode: WcOpcode,
    /// Length of the message in bytes.
    pub len: u32,
    /// Its first PSN.
    pub first: Psn,
    /// How many PSNs it has: none if it happens here.
    pub packets: u32,
    /// For a READ: how many packets are asked for at a time.
    pub read_piece: u32,
    /// Happens here, and has happened.
    pub executed: bool,
    /// Why it cannot go on. It then fails the queue pair once it is the oldest.
    pub failure: Option<WcStatus>,
}

impl Wqe {
    /// A request as it comes off the ring. What is wrong with it is found here, before the first packet.
    pub fn new(
        item: Result<SendRequest, BadRequest>,
        first: Psn,
        mtu: Mtu,
        max_rd_atomic: u8,
        read_piece: u32,
        host: &mut impl Host,
    ) -> Wqe {
        match item {
            Ok(request) => {
                let failure = check(&request, max_rd_atomic, host).err();
                let is_local = request.operation.is_local();
                let len = match request.operation {
                    _ if failure.is_some() => 0,
                    Operation::Executed {
                        opcode: WcOpcode::CompSwap | WcOpcode::FetchAdd | WcOpcode::AtomicWrite,
                        ..
                    } => 8,
                    Operation::Executed { .. } => request.data.len_bytes() as u32,
                    _ if is_local => 0,
                    Operation::Atomic { .. } | Operation::AtomicWrite { .. } => 8,
                    _ => request.data.len_bytes() as u32,
                };
                let opcode = request.operation.wc_opcode();
                Wqe {
                    request,
                    opcode,
                    len,
                    first,
                    packets: if is_local { 0 } else { mtu.packets(len) },
                    read_piece,
                    executed: false,
                    failure,
                }
            }
            Err(BadRequest { wr_id, opcode }) => {
                let request = SendRequest {
                    wr_id,
                    operation: Operation::Send { imm: None },
                    data: SendData::Sges(SgeList::default()),
                    signaled: true,
                    fence: false,
                    solicited: false,
                    destination: None,
                };
                let failure = Some(WcStatus::LocQpOpErr);
                Wqe {
                    request,
                    opcode,
                    len: 0,
                    first,
                    packets: 1,
                    read_piece,
                    executed: false,
                    failure,
                }
            }
        }
    }

    /// The first PSN after it.
    pub fn end(&self) -> Psn {
        self.first.add(self.packets)
    }

    pub fn is_read(&self) -> bool {
        self.request.operation.is_read()
    }

    /// Complete only by data from the partner.
    pub fn is_read_or_atomic(&self) -> bool {
        self.request.operation.is_read_or_atomic()
    }

    pub fn is_local(&self) -> bool {
        self.request.operation.is_local()
    }

    /// Bytes of the message in the packets from `from` up to `to`.
    pub fn bytes_between(&self, from: Psn, to: Psn, mtu: Mtu) -> u64 {
        let before = |psn: Psn| u64::from(psn.offset_from(self.first)) * u64::from(mtu.bytes());
        let len = u64::from(self.len);
        before(to).min(len) - before(from).min(len)
    }

    /// How many packets to ask for at `psn` of a READ: up to the end of the piece that it lies in. The pieces of a READ
    /// never change, so that a retry asks for the rest of a piece that the responder either executed or did not: a
    /// request of which one part is a duplicate and the other one is new would be invalid.
    pub fn rest_of_piece(&self, psn: Psn) -> u32 {
        let offset = psn.offset_from(self.first);
        (self.read_piece - offset % self.read_piece).min(self.packets - offset)
    }

    /// The first PSN of the piece of a READ that this one lies in.
    pub fn piece_of(&self, psn: Psn) -> Psn {
        psn.sub(psn.offset_from(self.first) % self.read_piece)
    }

    /// Where in the message the packet with this PSN starts, and how long its payload is.
    pub fn span(&self, psn: Psn, mtu: Mtu) -> (u32, u32) {
        let offset = psn.offset_from(self.first) * mtu.bytes();
        (offset, (self.len - offset).min(mtu.bytes()))
    }
}

fn check(request: &SendRequest, max_rd_atomic: u8, host: &mut impl Host) -> Result<(), WcStatus> {
    if request.operation.is_local() {
        return Ok(());
    }
    if request.operation.is_read_or_atomic() && max_rd_atomic == 0 {
        return Err(WcStatus::LocQpOpErr);
    }
    check_data(request, host)
}
