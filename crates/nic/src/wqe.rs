//! What a program wrote into a slot, in the transport's terms, if it makes sense.

use verbatim_device::control::QpCap;
use verbatim_device::layout::{self, SEND_FENCE, SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED, SendWqe};
use verbatim_device::ring::SentWqe;
use verbatim_roce::{
    BadRequest, Immediate, Lkey, Operation, Rkey, SendData, SendRequest, Sge, SgeList, WcOpcode,
};

/// `enum ibv_wr_opcode`, those that the device executes.
mod wr_opcode {
    pub const RDMA_WRITE: u8 = 0;
    pub const RDMA_WRITE_WITH_IMM: u8 = 1;
    pub const SEND: u8 = 2;
    pub const SEND_WITH_IMM: u8 = 3;
    pub const RDMA_READ: u8 = 4;
}

/// The entries of a request; `None` if there are more than the transport takes.
pub fn sge_list(sges: &[layout::Sge]) -> Option<SgeList> {
    let mut list = SgeList::default();
    let push = |sge: &layout::Sge| {
        list.push(Sge {
            addr: sge.address,
            len: sge.length,
            lkey: Lkey(sge.lkey),
        })
    };
    sges.iter().all(push).then_some(list)
}

/// What the program wrote into the slot, in the transport's terms.
pub fn send_request(wqe: &SentWqe, cap: &QpCap) -> Result<SendRequest, BadRequest> {
    let head = &wqe.head;
    let (operation, opcode) = operation(head);
    let bad = BadRequest {
        wr_id: head.wr_id,
        opcode,
    };
    let data = if head.flags & SEND_INLINE != 0 {
        let fits = wqe.inline.len() <= cap.max_inline_data as usize && opcode != WcOpcode::RdmaRead;
        fits.then(|| SendData::inline(&wqe.inline)).flatten()
    } else {
        let fits = wqe.sges.len() <= cap.max_send_sge as usize;
        fits.then(|| sge_list(&wqe.sges).map(SendData::Sges)).flatten()
    };
    match (operation, data) {
        (Some(operation), Some(data)) if !wqe.overlong => Ok(SendRequest {
            wr_id: head.wr_id,
            operation,
            data,
            signaled: head.flags & SEND_SIGNALED != 0,
            fence: head.flags & SEND_FENCE != 0,
            solicited: head.flags & SEND_SOLICITED != 0,
        }),
        _ => Err(bad),
    }
}

fn operation(head: &SendWqe) -> (Option<Operation>, WcOpcode) {
    let imm = Some(Immediate(head.imm.to_ne_bytes()));
    let (remote_addr, rkey) = (head.remote_address, Rkey(head.rkey));
    match head.opcode {
        wr_opcode::RDMA_WRITE => (
            Some(Operation::Write {
                remote_addr,
                rkey,
                imm: None,
            }),
            WcOpcode::RdmaWrite,
        ),
        wr_opcode::RDMA_WRITE_WITH_IMM => (
            Some(Operation::Write {
                remote_addr,
                rkey,
                imm,
            }),
            WcOpcode::RdmaWrite,
        ),
        wr_opcode::SEND => (Some(Operation::Send { imm: None }), WcOpcode::Send),
        wr_opcode::SEND_WITH_IMM => (Some(Operation::Send { imm }), WcOpcode::Send),
        wr_opcode::RDMA_READ => (Some(Operation::Read { remote_addr, rkey }), WcOpcode::RdmaRead),
        _ => (None, WcOpcode::Send),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAP: QpCap = QpCap {
        max_send_wr: 4,
        max_recv_wr: 4,
        max_send_sge: 2,
        max_recv_sge: 1,
        max_inline_data: 32,
    };

    fn wqe(opcode: u8, sges: usize) -> SentWqe {
        let head = SendWqe {
            wr_id: 9,
            opcode,
            imm: u32::from_ne_bytes([1, 2, 3, 4]),
            ..SendWqe::default()
        };
        SentWqe {
            head,
            sges: vec![layout::Sge::default(); sges],
            ..SentWqe::default()
        }
    }

    #[test]
    fn requests_outside_the_limits_of_the_queue_are_bad() {
        assert!(send_request(&wqe(wr_opcode::SEND, 2), &CAP).is_ok());
        assert_eq!(send_request(&wqe(wr_opcode::SEND, 3), &CAP).unwrap_err().wr_id, 9);
        for unknown in 5..=255 {
            assert!(send_request(&wqe(unknown, 1), &CAP).is_err());
        }
        let mut inline = wqe(wr_opcode::RDMA_WRITE, 0);
        inline.head.flags = SEND_INLINE;
        inline.inline = vec![0; 32];
        assert!(send_request(&inline, &CAP).is_ok());
        inline.head.opcode = wr_opcode::RDMA_READ;
        assert!(
            send_request(&inline, &CAP).is_err(),
            "a READ has nowhere to put inline data"
        );
        inline.head.opcode = wr_opcode::RDMA_WRITE;
        inline.inline.push(0);
        assert!(send_request(&inline, &CAP).is_err());
        let mut overlong = wqe(wr_opcode::SEND, 0);
        overlong.overlong = true;
        assert!(send_request(&overlong, &CAP).is_err());
    }

    #[test]
    fn immediate_data_keep_their_byte_order() {
        let request = send_request(&wqe(wr_opcode::SEND_WITH_IMM, 1), &CAP).unwrap();
        assert_eq!(
            request.operation,
            Operation::Send {
                imm: Some(Immediate([1, 2, 3, 4]))
            }
        );
    }
}
