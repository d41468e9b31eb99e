//! A send request with its range of PSNs.

use crate::{
    BadRequest, Host, LocalAccess, MAX_MESSAGE, Mtu, Operation, Psn, SendData, SendRequest, SgeList,
    WcOpcode, WcStatus,
};

/// A request on its way.
#[derive(Debug)]
pub(super) struct Wqe {
    pub request: SendRequest,
    pub opcode: WcOpcode,
    /// Length of the message in bytes.
    pub len: u32,
    /// Its first PSN.
    pub first: Psn,
    /// How many PSNs it has.
    pub packets: u32,
    /// For a READ: how many packets are asked for at a time.
    read_piece: u32,
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
                let len = if failure.is_some() {
                    0
                } else {
                    request.data.len_bytes() as u32
                };
                let opcode = request.operation.wc_opcode();
                Wqe {
                    request,
                    opcode,
                    len,
                    first,
                    packets: mtu.packets(len),
                    read_piece,
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
                };
                let failure = Some(WcStatus::LocQpOpErr);
                Wqe {
                    request,
                    opcode,
                    len: 0,
                    first,
                    packets: 1,
                    read_piece,
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

    /// How many packets to ask for at `psn` of a READ: up to the end of the piece that it lies in. The pieces of a READ
    /// never change, so that a retry asks for the rest of a piece that the responder either executed or did not: a
    /// request of which one part is a duplicate and the other one is new would be invalid.
    pub fn rest_of_piece(&self, psn: Psn) -> u32 {
        let offset = psn.offset_from(self.first);
        (self.read_piece - offset % self.read_piece).min(self.packets - offset)
    }

    /// Where in the message the packet with this PSN starts, and how long its payload is.
    pub fn span(&self, psn: Psn, mtu: Mtu) -> (u32, u32) {
        let offset = psn.offset_from(self.first) * mtu.bytes();
        (offset, (self.len - offset).min(mtu.bytes()))
    }
}

fn check(request: &SendRequest, max_rd_atomic: u8, host: &mut impl Host) -> Result<(), WcStatus> {
    let is_read = request.operation.is_read();
    let list = match &request.data {
        SendData::Inline { .. } if is_read => return Err(WcStatus::LocQpOpErr),
        SendData::Inline { .. } => return Ok(()),
        SendData::Sges(list) => list,
    };
    if is_read && max_rd_atomic == 0 {
        return Err(WcStatus::LocQpOpErr);
    }
    if list.len_bytes() > u64::from(MAX_MESSAGE) {
        return Err(WcStatus::LocLenErr);
    }
    let access = if is_read {
        LocalAccess::Write
    } else {
        LocalAccess::Read
    };
    for sge in list.as_slice().iter().filter(|sge| sge.len > 0) {
        host.check_local(sge.lkey, sge.addr, sge.len, access)
            .map_err(|_| WcStatus::LocProtErr)?;
    }
    Ok(())
}
