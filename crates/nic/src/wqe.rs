//! What a program wrote into a slot, in the transport's terms, if it makes sense.

use verbatim_device::control::{QpCap, QpType};
use verbatim_device::layout::{
    self, SEND_EXECUTED, SEND_FENCE, SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED, SendWqe, WR_ATOMIC_WRITE,
    WR_BIND_MW, WR_LOCAL_INV,
};
use verbatim_device::ring::SentWqe;
use verbatim_roce::{
    AccessFlags, AtomicOp, BadRequest, Bind, Destination, Immediate, Lkey, Operation, Qpn, Rkey, SendData,
    SendRequest, Sge, SgeList, WcOpcode,
};

use crate::objects::Ah;
use crate::table::Table;

/// `enum ibv_wr_opcode`, those that go over the wire.
mod wr_opcode {
    pub const RDMA_WRITE: u8 = 0;
    pub const RDMA_WRITE_WITH_IMM: u8 = 1;
    pub const SEND: u8 = 2;
    pub const SEND_WITH_IMM: u8 = 3;
    pub const RDMA_READ: u8 = 4;
    pub const ATOMIC_CMP_AND_SWP: u8 = 5;
    pub const ATOMIC_FETCH_AND_ADD: u8 = 6;
    pub const SEND_WITH_INV: u8 = 9;
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

/// The queue pair that a request was posted to, as far as its requests depend on it.
pub struct Sender<'a> {
    pub qp_type: QpType,
    pub pd: u32,
    pub cap: &'a QpCap,
    pub ahs: &'a Table<Ah>,
}

/// What the program wrote into the slot, in the transport's terms.
pub fn send_request(wqe: &SentWqe, sender: &Sender<'_>) -> Result<SendRequest, BadRequest> {
    let head = &wqe.head;
    let (asked_for, opcode) = operation(head);
    let operation = match asked_for {
        Some(operation) if head.flags & SEND_EXECUTED != 0 => executed(&operation, head),
        asked_for => asked_for,
    };
    let bad = BadRequest {
        wr_id: head.wr_id,
        opcode,
    };
    let operation = operation
        .filter(|operation| has(sender.qp_type, operation))
        .ok_or(bad)?;
    if wqe.overlong {
        return Err(bad);
    }
    let data = if head.flags & SEND_INLINE != 0 {
        // What comes back has nowhere to go.
        let carried = matches!(
            operation,
            Operation::Send { .. }
                | Operation::SendInvalidate { .. }
                | Operation::Write { .. }
                | Operation::AtomicWrite { .. }
                | Operation::Executed { value: None, .. }
        );
        let fits = wqe.inline.len() <= sender.cap.max_inline_data as usize && carried;
        fits.then(|| SendData::inline(&wqe.inline)).flatten()
    } else if matches!(operation, Operation::AtomicWrite { .. }) && wqe.sges.is_empty() {
        SendData::inline(&head.compare_add.to_ne_bytes())
    } else {
        let fits = wqe.sges.len() <= sender.cap.max_send_sge as usize;
        fits.then(|| sge_list(&wqe.sges).map(SendData::Sges)).flatten()
    };
    let destination = match sender.qp_type {
        QpType::Ud => Some(destination(head, sender).ok_or(bad)?),
        QpType::Rc | QpType::Uc => None,
    };
    Ok(SendRequest {
        wr_id: head.wr_id,
        operation,
        data: data.ok_or(bad)?,
        signaled: head.flags & SEND_SIGNALED != 0,
        fence: head.flags & SEND_FENCE != 0,
        solicited: head.flags & SEND_SOLICITED != 0,
        destination,
    })
}

/// Which operations the transports have (IBA Vol 1 §9.2, table 38; ibv_post_send(3)).
fn has(qp_type: QpType, operation: &Operation) -> bool {
    match operation {
        Operation::Send { .. } => true,
        Operation::Write { .. } | Operation::LocalInvalidate { .. } | Operation::Bind(_) => {
            qp_type != QpType::Ud
        }
        Operation::Read { .. }
        | Operation::Atomic { .. }
        | Operation::AtomicWrite { .. }
        | Operation::SendInvalidate { .. }
        | Operation::Executed { .. } => qp_type == QpType::Rc,
    }
}

/// Whom a datagram is for; `None` if the address handle is not one of the queue pair's protection domain.
fn destination(head: &SendWqe, sender: &Sender<'_>) -> Option<Destination> {
    let ah = sender.ahs.get(head.ah).filter(|ah| ah.pd == sender.pd)?;
    Some(Destination {
        path: ah.path,
        qpn: Qpn::new(head.remote_qpn),
        qkey: head.remote_qkey,
    })
}

/// What is left of a request that an earlier queue pair has executed. Of a READ, the data would be missing.
fn executed(operation: &Operation, head: &SendWqe) -> Option<Operation> {
    let value = matches!(operation, Operation::Atomic { .. }).then_some(head.compare_add);
    let opcode = operation.wc_opcode();
    let is_read = matches!(operation, Operation::Read { .. });
    (!is_read).then_some(Operation::Executed { opcode, value })
}

fn operation(head: &SendWqe) -> (Option<Operation>, WcOpcode) {
    let imm = Some(Immediate(head.imm.to_ne_bytes()));
    let (remote_addr, rkey) = (head.remote_address, Rkey(head.rkey));
    let operation = match head.opcode {
        wr_opcode::RDMA_WRITE => Operation::Write {
            remote_addr,
            rkey,
            imm: None,
        },
        wr_opcode::RDMA_WRITE_WITH_IMM => Operation::Write {
            remote_addr,
            rkey,
            imm,
        },
        wr_opcode::SEND => Operation::Send { imm: None },
        wr_opcode::SEND_WITH_IMM => Operation::Send { imm },
        wr_opcode::SEND_WITH_INV => Operation::SendInvalidate { rkey: Rkey(head.imm) },
        wr_opcode::RDMA_READ => Operation::Read { remote_addr, rkey },
        wr_opcode::ATOMIC_CMP_AND_SWP => Operation::Atomic {
            remote_addr,
            rkey,
            op: AtomicOp::CompareSwap {
                compare: head.compare_add,
                swap: head.swap,
            },
        },
        wr_opcode::ATOMIC_FETCH_AND_ADD => Operation::Atomic {
            remote_addr,
            rkey,
            op: AtomicOp::FetchAdd {
                add: head.compare_add,
            },
        },
        WR_ATOMIC_WRITE => Operation::AtomicWrite { remote_addr, rkey },
        WR_LOCAL_INV => Operation::LocalInvalidate { rkey: Rkey(head.imm) },
        WR_BIND_MW => Operation::Bind(Bind {
            window: rkey,
            rkey: Rkey(head.imm),
            lkey: Lkey(head.swap as u32),
            addr: remote_addr,
            len: head.compare_add,
            access: AccessFlags::from_bits_retain((head.swap >> 32) as u32),
        }),
        _ => return (None, WcOpcode::Send),
    };
    (Some(operation), operation.wc_opcode())
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use verbatim_roce::{Path, Traffic};

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

    fn ask(wqe: &SentWqe, qp_type: QpType) -> Result<SendRequest, BadRequest> {
        let mut ahs = Table::new(1, 4, 0);
        let path = Path {
            source: [10, 0, 0, 1].into(),
            destination: [10, 0, 0, 2].into(),
            source_port: 4791,
            traffic: Traffic::default(),
        };
        for pd in [7, 8] {
            ahs.insert_with(|_, _| Ah { pd, path });
        }
        let sender = Sender {
            qp_type,
            pd: 7,
            cap: &CAP,
            ahs: &ahs,
        };
        send_request(wqe, &sender)
    }

    #[test]
    fn requests_outside_the_limits_of_the_queue_are_bad() {
        let ask = |wqe: &SentWqe| ask(wqe, QpType::Rc);
        assert!(ask(&wqe(wr_opcode::SEND, 2)).is_ok());
        assert_eq!(ask(&wqe(wr_opcode::SEND, 3)).unwrap_err().wr_id, 9);
        for unknown in (10..15).chain(16..=255) {
            assert!(ask(&wqe(unknown, 1)).is_err());
        }
        let mut inline = wqe(wr_opcode::RDMA_WRITE, 0);
        inline.head.flags = SEND_INLINE;
        inline.inline = vec![0; 32];
        assert!(ask(&inline).is_ok());
        for opcode in [wr_opcode::RDMA_READ, wr_opcode::ATOMIC_FETCH_AND_ADD] {
            inline.head.opcode = opcode;
            assert!(ask(&inline).is_err(), "there is nowhere to put what comes back");
        }
        inline.head.opcode = wr_opcode::RDMA_WRITE;
        inline.inline.push(0);
        assert!(ask(&inline).is_err());
        let mut overlong = wqe(wr_opcode::SEND, 0);
        overlong.overlong = true;
        assert!(ask(&overlong).is_err());
    }

    #[test]
    fn each_transport_has_its_operations() {
        let known = |qp_type| (0..=9).filter(move |opcode| ask(&with_ah(*opcode, 1), qp_type).is_ok());
        assert_eq!(known(QpType::Rc).collect::<Vec<_>>(), (0..=9).collect::<Vec<_>>());
        assert_eq!(known(QpType::Uc).collect::<Vec<_>>(), [0, 1, 2, 3, 7, 8]);
        assert_eq!(known(QpType::Ud).collect::<Vec<_>>(), [2, 3]);
    }

    #[test]
    fn what_was_executed_earlier_is_only_to_be_completed() {
        let executed = |opcode, qp_type| {
            let mut wqe = wqe(opcode, 1);
            wqe.head.flags = SEND_EXECUTED;
            wqe.head.compare_add = 70;
            ask(&wqe, qp_type).map(|request| request.operation).ok()
        };
        let done = |opcode, value| Some(Operation::Executed { opcode, value });
        assert_eq!(executed(wr_opcode::SEND, QpType::Rc), done(WcOpcode::Send, None));
        assert_eq!(
            executed(wr_opcode::ATOMIC_CMP_AND_SWP, QpType::Rc),
            done(WcOpcode::CompSwap, Some(70))
        );
        assert_eq!(executed(WR_BIND_MW, QpType::Rc), done(WcOpcode::BindMw, None));
        assert!(executed(wr_opcode::RDMA_READ, QpType::Rc).is_none());
        assert!(executed(wr_opcode::SEND, QpType::Uc).is_none());
        assert!(executed(wr_opcode::SEND, QpType::Ud).is_none());
    }

    fn with_ah(opcode: u8, ah: u32) -> SentWqe {
        let mut wqe = wqe(opcode, 1);
        wqe.head.ah = ah;
        (wqe.head.remote_qpn, wqe.head.remote_qkey) = (17, 0x1111_1111);
        wqe
    }

    #[test]
    fn a_datagram_goes_where_the_address_handle_of_its_domain_says() {
        let request = ask(&with_ah(wr_opcode::SEND, 1), QpType::Ud).unwrap();
        let destination = request.destination.unwrap();
        assert_eq!((destination.qpn.get(), destination.qkey), (17, 0x1111_1111));
        assert_eq!(destination.path.destination, IpAddr::from([10, 0, 0, 2]));
        for wrong in [0, 2, 3, u32::MAX] {
            assert!(ask(&with_ah(wr_opcode::SEND, wrong), QpType::Ud).is_err());
        }
    }

    #[test]
    fn immediate_data_keep_their_byte_order() {
        let request = ask(&wqe(wr_opcode::SEND_WITH_IMM, 1), QpType::Rc).unwrap();
        assert_eq!(
            request.operation,
            Operation::Send {
                imm: Some(Immediate([1, 2, 3, 4]))
            }
        );
    }
}
