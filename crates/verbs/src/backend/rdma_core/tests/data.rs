use verbatim_device::control::{AddressVector, SrqAttr};
use verbatim_device::layout::{self, SendWqe};
use verbatim_device::ring::Body;

use super::*;
use crate::backend::{PhysicalMemory, PhysicalMrInit, Refused};
use crate::work::RECV_BIT;
use crate::work::SendOpcode;

fn sge(address: u64) -> Sge {
    Sge {
        address,
        length: 8,
        lkey: 5,
    }
}

fn wqe(wr_id: u64, opcode: SendOpcode, flags: u8) -> SendWqe {
    SendWqe {
        wr_id,
        opcode: opcode as u8,
        flags,
        imm: 0xaabb_ccdd,
        remote_address: 0x7000,
        rkey: 0x1234,
        compare_add: 3,
        swap: 4,
        ..SendWqe::default()
    }
}

#[test]
fn a_chain_is_posted_as_one_with_every_field_where_it_belongs() {
    let fake = Fake::new();
    let device = fake.open();
    let (_, _, qp) = queue_pair(&*device, QpType::Rc, None);
    let mut send = device.qp_ends(&qp).unwrap().send;
    let all = layout::SEND_SIGNALED | layout::SEND_SOLICITED | layout::SEND_FENCE;
    send.push(
        &wqe(0, SendOpcode::WriteWithImm, all),
        Body::Sges(&[sge(1), sge(2)]),
    );
    let inline = wqe(1, SendOpcode::Send, layout::SEND_INLINE);
    send.push(&inline, Body::Inline(&[b"he", b"", b"llo"]));
    send.push(&wqe(2, SendOpcode::CompareSwap, 0), Body::Sges(&[sge(3)]));
    send.push(&wqe(3, SendOpcode::Read, 0), Body::Sges(&[]));
    assert_eq!(fake.get(|knobs| knobs.posted), 0, "not before it is published");
    send.unpush(1);
    send.push(&wqe(3, SendOpcode::FetchAdd, 0), Body::Sges(&[sge(4)]));
    send.publish().unwrap();

    let seen = fake.last(4);
    let places: Vec<_> = seen
        .iter()
        .map(|seen| (seen.wr.wr_id, seen.index, seen.of))
        .collect();
    assert_eq!(places, [(0, 0, 4), (1, 1, 4), (2, 2, 4), (3, 3, 4)]);
    assert_eq!(seen[0].sge[..2], [sge(1), sge(2)]);
    assert_eq!(
        (seen[0].wr.opcode, seen[0].wr.send_flags, seen[0].wr.imm_data),
        (1, 7, 0xaabb_ccdd)
    );
    // SAFETY: a WRITE, and two ATOMICs.
    unsafe {
        assert_eq!(
            (seen[0].wr.wr.rdma.remote_addr, seen[0].wr.wr.rdma.rkey),
            (0x7000, 0x1234)
        );
        let atomic = seen[2].wr.wr.atomic;
        assert_eq!(
            (atomic.remote_addr, atomic.compare_add, atomic.swap, atomic.rkey),
            (0x7000, 3, 4, 0x1234)
        );
        assert_eq!(seen[3].wr.wr.atomic.compare_add, 3);
    }
    assert_eq!(
        (seen[1].wr.send_flags, seen[1].wr.num_sge, seen[1].sge[0].length),
        (8, 1, 5)
    );
    assert_eq!(&seen[1].inline_data[..5], b"hello");
    assert_eq!(seen[3].sge[0], sge(4));

    send.publish().unwrap();
    assert_eq!(fake.get(|knobs| knobs.posted), 4, "nothing twice");
}

#[test]
fn room_follows_from_completions_and_nothing_is_signaled_unasked() {
    let fake = Fake::new();
    let device = fake.open();
    let (_, cq, qp) = queue_pair(&*device, QpType::Rc, None);
    let mut send = device.qp_ends(&qp).unwrap().send;
    let mut end = device.cq_end(&cq).unwrap();
    fake.set(|knobs| knobs.hold = 1);
    for position in 0..8 {
        assert_eq!(send.room(), 8 - position as u32);
        let flags = if position == 5 { layout::SEND_SIGNALED } else { 0 };
        send.push(&wqe(position, SendOpcode::Write, flags), Body::Sges(&[]));
    }
    send.publish().unwrap();
    assert!(
        fake.last(8)
            .iter()
            .enumerate()
            .all(|(n, seen)| (seen.wr.send_flags == 2) == (n == 5))
    );
    assert_eq!((send.room(), send.unfinished()), (0, 8));
    assert_eq!(end.pop(), None);
    fake.release(qp.qpn);
    assert_eq!(send.room(), 0, "a completion counts when it is taken");
    assert_eq!(end.pop().unwrap().wr_id, 5);
    assert_eq!(end.pop(), None);
    assert_eq!((send.room(), send.unfinished()), (6, 2));
    send.reset();
    assert_eq!((send.room(), send.unfinished()), (8, 0));
    // Positions go on.
    send.push(&wqe(8, SendOpcode::Send, layout::SEND_SIGNALED), Body::Sges(&[]));
    send.publish().unwrap();
    assert_eq!(send.unfinished(), 1);
    fake.release(qp.qpn);
    assert_eq!(end.pop().unwrap().wr_id, 8);
    assert_eq!(send.unfinished(), 0);
}

#[test]
fn what_is_refused_was_never_posted() {
    let fake = Fake::new();
    let device = fake.open();
    let (_, _, qp) = queue_pair(&*device, QpType::Rc, None);
    let ends = device.qp_ends(&qp).unwrap();
    let (mut send, mut recv) = (ends.send, ends.recv);
    fake.refuse(1, libc::EOPNOTSUPP);
    for (position, opcode) in [SendOpcode::Send, SendOpcode::Write, SendOpcode::Send]
        .into_iter()
        .enumerate()
    {
        send.push(&wqe(position as u64, opcode, 0), Body::Sges(&[sge(1)]));
        recv.push(position as u64 | RECV_BIT, &[sge(2)]);
    }
    let refused = Refused {
        count: 2,
        messages: 1,
        errno: libc::EOPNOTSUPP,
    };
    assert_eq!(send.publish(), Err(refused));
    assert_eq!(
        recv.publish(),
        Err(Refused {
            messages: 0,
            ..refused
        })
    );
    assert_eq!((send.room(), recv.room(), send.unfinished()), (7, 7, 1));
    fake.refuse(-1, 0);
    send.push(&wqe(1, SendOpcode::Send, 0), Body::Sges(&[]));
    assert_eq!(send.publish(), Ok(()));
    assert_eq!(fake.last(1)[0].of, 1, "what was refused is forgotten");
}

#[test]
fn an_opcode_that_libraries_do_not_take_from_a_list_is_refused() {
    let fake = Fake::new();
    let device = fake.open();
    let (_, _, qp) = queue_pair(&*device, QpType::Rc, None);
    let mut send = device.qp_ends(&qp).unwrap().send;
    send.push(&wqe(0, SendOpcode::Write, 0), Body::Sges(&[]));
    let atomic_write = SendWqe {
        opcode: 15,
        ..wqe(1, SendOpcode::Write, 0)
    };
    send.push(&atomic_write, Body::Sges(&[]));
    let refused = send.publish().unwrap_err();
    assert_eq!((refused.count, refused.errno), (1, libc::EOPNOTSUPP));
    assert_eq!(fake.last(1)[0].wr.wr_id, 0);
}

#[test]
fn completions_carry_everything_over() {
    let fake = Fake::new();
    let device = fake.open();
    let (_, cq, qp) = queue_pair(&*device, QpType::Rc, None);
    let mut recv = device.qp_ends(&qp).unwrap().recv;
    for position in 0..3u64 {
        recv.push(position | RECV_BIT, &[sge(position), sge(9)]);
    }
    recv.publish().unwrap();
    assert_eq!(recv.room(), 5);
    assert!((0..3).all(|n| fake.receive(qp.qpn, 100 + n, false)));
    assert!(!fake.receive(qp.qpn, 1, false));
    let mut end = device.cq_end(&cq).unwrap();
    let got: Vec<_> = std::iter::from_fn(|| end.pop()).collect();
    assert_eq!(
        got.iter()
            .map(|cqe| (cqe.wr_id & !RECV_BIT, cqe.byte_len))
            .collect::<Vec<_>>(),
        [(0, 100), (1, 101), (2, 102)]
    );
    let cqe = got[0];
    assert_eq!(
        (cqe.qpn, cqe.opcode, cqe.status, cqe.vendor_err),
        (qp.qpn, 128, 0, 7)
    );
    assert_eq!(
        (cqe.imm, cqe.wc_flags, cqe.src_qpn, cqe.sl),
        (0x1234_5678, 3, 99, 3)
    );
    assert_eq!(cqe.timestamp_ns, 0, "who asks for the time is told ours");
    assert_eq!(recv.room(), 8);
}

#[test]
fn recvs_of_a_shared_queue_complete_in_any_order() {
    let fake = Fake::new();
    let device = fake.open();
    let (pd, cq, _) = queue_pair(&*device, QpType::Rc, None);
    let attr = SrqAttr {
        max_wr: 6,
        max_sge: 2,
        limit: 0,
    };
    let srq = device.create_srq(pd, &attr).unwrap();
    let init = PhysicalQpInit {
        pd,
        send_cq: cq.cq,
        recv_cq: cq.cq,
        srq: Some(srq.srq),
        qp_type: QpType::Rc,
        cap: CAP,
    };
    let qps = [device.create_qp(&init).unwrap(), device.create_qp(&init).unwrap()];
    let mut recv = device.srq_end(&srq).unwrap();
    for slot in 0..6u64 {
        recv.push(slot | RECV_BIT, &[sge(slot)]);
    }
    assert_eq!(recv.room(), 0);
    recv.publish().unwrap();
    assert!(fake.receive(qps[0].qpn, 1, true) && fake.receive(qps[1].qpn, 1, false));
    let mut end = device.cq_end(&cq).unwrap();
    assert_eq!(end.pop().unwrap().wr_id, RECV_BIT | 5);
    assert_eq!(end.pop().unwrap().wr_id, RECV_BIT);
    assert_eq!(recv.room(), 2);
}

#[test]
fn datagrams_go_to_their_address_handles_as_long_as_these_are_there() {
    let fake = Fake::new();
    let device = fake.open();
    let (pd, _, qp) = queue_pair(&*device, QpType::Ud, None);
    let mut send = device.qp_ends(&qp).unwrap().send;
    let handles: Vec<u32> = [7, 8]
        .into_iter()
        .map(|last| {
            let mut av = AddressVector::default();
            av.dgid[15] = last;
            device.create_ah(pd, &av).unwrap()
        })
        .collect();
    let to = |wr_id, ah| SendWqe {
        ah,
        remote_qpn: 0x77,
        remote_qkey: 0x1111_1111,
        ..wqe(wr_id, SendOpcode::Send, 0)
    };
    for (position, handle) in handles.iter().enumerate() {
        send.push(&to(position as u64, *handle), Body::Sges(&[sge(0)]));
    }
    send.publish().unwrap();
    for (seen, last) in fake.last(2).iter().zip([7, 8]) {
        // SAFETY: datagrams, to handles that are alive; `handle` is the third member of the fake's (and the header's).
        unsafe {
            let ud = seen.wr.wr.ud;
            assert_eq!(*ud.ah.cast::<u32>().add(4), last);
            assert_eq!((ud.remote_qpn, ud.remote_qkey), (0x77, 0x1111_1111));
        }
    }
    device.destroy_ah(handles[1]).unwrap();
    send.push(&to(2, handles[0]), Body::Sges(&[]));
    send.push(&to(3, handles[1]), Body::Sges(&[]));
    send.push(&to(4, handles[0]), Body::Sges(&[]));
    let refused = send.publish().unwrap_err();
    assert_eq!(
        (refused.count, refused.messages, refused.errno),
        (2, 2, libc::EINVAL)
    );
    assert_eq!(fake.last(1)[0].wr.wr_id, 2);
    assert_eq!(send.unfinished(), 3);
}

#[test]
fn windows_are_bound_by_the_verb_of_their_type() {
    let fake = Fake::new();
    let device = fake.open();
    let (pd, cq, qp) = queue_pair(&*device, QpType::Rc, None);
    let ends = device.qp_ends(&qp).unwrap();
    let mut send = ends.send;
    let memory = PhysicalMemory {
        address: 0x10000,
        length: 4096,
        iova: 0x10000,
        segments: &[],
        file: None,
    };
    let init = PhysicalMrInit {
        pd,
        access: verbatim_device::control::Access::MW_BIND,
        memory,
    };
    let (lkey, _) = device.reg_mr(&init).unwrap();
    let [one, two] = [MwType::One, MwType::Two].map(|mw_type| device.alloc_mw(pd, mw_type).unwrap());
    let unbound = device.query_mw(two).unwrap();
    assert_eq!((unbound.rkey, unbound.bound), (two, None));
    device.restore_mw(&unbound).unwrap();
    let bind = |wr_id, window: u32| SendWqe {
        wr_id,
        opcode: layout::WR_BIND_MW,
        flags: layout::SEND_SIGNALED,
        rkey: window,
        imm: window + 1,
        remote_address: 0x10010,
        compare_add: 64,
        swap: u64::from(lkey) | 2 << 32,
        ..SendWqe::default()
    };
    send.push(&wqe(0, SendOpcode::Write, 0), Body::Sges(&[]));
    send.push(&bind(1, one), Body::Sges(&[]));
    send.push(&bind(2, two), Body::Sges(&[]));
    send.push(
        &SendWqe {
            imm: two + 1,
            ..wqe(3, SendOpcode::LocalInvalidate, 0)
        },
        Body::Sges(&[]),
    );
    send.publish().unwrap();

    let seen = fake.last(3);
    assert_eq!(
        seen.iter()
            .map(|seen| (seen.wr.wr_id, seen.of))
            .collect::<Vec<_>>(),
        [(0, 1), (2, 2), (3, 2)]
    );
    assert_eq!(fake.get(|knobs| (knobs.binds, knobs.mw_rkey_seen)), (1, two));
    let request = seen[1].wr.bind_mw;
    assert_eq!(
        (request.rkey, request.bind_info.addr, request.bind_info.length),
        (two + 1, 0x10010, 64)
    );
    assert_eq!(request.bind_info.mw_access_flags, 2);
    // SAFETY: the region is alive.
    assert_eq!(unsafe { (*request.bind_info.mr).lkey }, lkey);
    assert_eq!(seen[2].wr.imm_data, two + 1);
    let mut end = device.cq_end(&cq).unwrap();
    assert_eq!(end.pop().unwrap().wr_id, 1);
    assert_eq!(end.pop().unwrap().wr_id, 2);

    device.dealloc_mw(two + 1).unwrap();
    send.push(&bind(4, two), Body::Sges(&[]));
    assert_eq!(send.publish().unwrap_err().errno, libc::EINVAL);
}
