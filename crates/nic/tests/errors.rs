//! What goes wrong, and whom it concerns.

mod support;

use support::program::{ALL_ACCESS, CAP, read, send, write};
use support::{End, Memory, Server, pair, wait_for};
use verbatim_device::control::{
    Access, Backing, QpAttr, QpAttrMask, QpCap, QpState, QpType, Reply, Request, Segment, VERSION,
};
use verbatim_device::layout::{SendWqe, Sge};

/// `enum ibv_wc_status`.
const SUCCESS: u32 = 0;
const LOC_LEN_ERR: u32 = 1;
const LOC_QP_OP_ERR: u32 = 2;
const LOC_PROT_ERR: u32 = 4;
const WR_FLUSH_ERR: u32 = 5;
const REM_INV_REQ_ERR: u32 = 9;
const REM_ACCESS_ERR: u32 = 10;
const RETRY_EXC_ERR: u32 = 12;

const PAGES: u64 = 16 * 4096;

/// The first request fails so, the one behind it is flushed, and the queue pair is in ERR.
fn expect_failure(left: &mut End, request: SendWqe, sges: &[Sge], status: u32) {
    left.program.post(&mut left.qp, request, sges);
    left.program.post(&mut left.qp, send(99), &[]);
    let failed = left.queue.wait();
    assert_eq!((failed.wr_id, failed.status), (request.wr_id, status));
    let flushed = left.queue.wait();
    assert_eq!((flushed.wr_id, flushed.status), (99, WR_FLUSH_ERR));
    assert_eq!(left.program.state(&left.qp), QpState::Err);
}

#[test]
fn remote_memory_is_protected_by_key_range_right_and_domain() {
    let (a, b) = (Server::start([127, 7, 10, 1]), Server::start([127, 7, 10, 2]));
    let attempt = |prepare: &dyn Fn(&mut End) -> Memory, request: &dyn Fn(&Memory) -> SendWqe| {
        let (mut left, mut right) = pair(&a, &b);
        let from = left.program.adopted(PAGES, ALL_ACCESS);
        let mut to = prepare(&mut right);
        to.fill(|_| 7);
        expect_failure(&mut left, request(&to), &[from.sge(0, 5000)], REM_ACCESS_ERR);
        assert!(to.as_slice().iter().all(|byte| *byte == 7), "nothing was written");
        wait_for("the responder's error state", || {
            (right.program.state(&right.qp) == QpState::Err).then_some(())
        });
    };
    let whole = |right: &mut End| right.program.adopted(PAGES, ALL_ACCESS);
    attempt(&whole, &|to| SendWqe {
        rkey: to.key ^ 0x100,
        ..write(1, to, 0)
    });
    attempt(&whole, &|to| SendWqe {
        rkey: to.key ^ 1,
        ..write(1, to, 0)
    });
    attempt(&whole, &|to| write(1, to, PAGES - 4999));
    attempt(&whole, &|to| SendWqe {
        remote_address: u64::MAX - 10,
        ..write(1, to, 0)
    });
    attempt(&whole, &|to| read(1, to, PAGES - 4999));
    attempt(
        &|right| right.program.adopted(PAGES, Access::LOCAL_WRITE),
        &|to| write(1, to, 0),
    );
    attempt(
        &|right| right.program.adopted(PAGES, Access::LOCAL_WRITE),
        &|to| read(1, to, 0),
    );
    let other_domain = |right: &mut End| {
        let Reply::Pd { pd } = right.program.call(Request::AllocPd) else {
            panic!("no pd")
        };
        let own = std::mem::replace(&mut right.program.pd, pd);
        let memory = right.program.adopted(PAGES, ALL_ACCESS);
        right.program.pd = own;
        memory
    };
    attempt(&other_domain, &|to| write(1, to, 0));
    let deregistered = |right: &mut End| {
        let memory = right.program.adopted(PAGES, ALL_ACCESS);
        right.program.call(Request::DeregMr { lkey: memory.key });
        memory
    };
    attempt(&deregistered, &|to| write(1, to, 0));
    assert_eq!(a.stats.read().rx_nak_access, 9);
    assert_eq!(b.stats.read().tx_nak_access, 9);
}

#[test]
fn local_mistakes_stay_local() {
    let (a, b) = (Server::start([127, 7, 11, 1]), Server::start([127, 7, 11, 2]));
    let attempt = |request: SendWqe, sge: &dyn Fn(&Memory) -> Sge, status| {
        let (mut left, right) = pair(&a, &b);
        let from = left.program.adopted(PAGES, Access::empty());
        expect_failure(&mut left, request, &[sge(&from)], status);
        assert_eq!(right.program.state(&right.qp), QpState::Rts);
    };
    attempt(
        send(1),
        &|from| Sge {
            lkey: from.key ^ 0x100,
            ..from.sge(0, 10)
        },
        LOC_PROT_ERR,
    );
    attempt(send(1), &|from| from.sge(PAGES - 9, 10), LOC_PROT_ERR);
    let read = SendWqe {
        wr_id: 1,
        opcode: 4,
        ..SendWqe::default()
    };
    attempt(read, &|from| from.sge(0, 10), LOC_PROT_ERR);
    for unsupported in [10, 11, 14, 16, 255] {
        let request = SendWqe {
            wr_id: 1,
            opcode: unsupported,
            ..SendWqe::default()
        };
        attempt(request, &|from| from.sge(0, 8), LOC_QP_OP_ERR);
    }
}

#[test]
fn a_message_that_is_too_long_fails_on_both_sides() {
    let (a, b) = (Server::start([127, 7, 12, 1]), Server::start([127, 7, 12, 2]));
    let (mut left, mut right) = pair(&a, &b);
    let from = left.program.adopted(PAGES, ALL_ACCESS);
    let to = right.program.adopted(PAGES, ALL_ACCESS);
    right.program.post_recv(&mut right.qp, 5, &[to.sge(0, 9999)]);
    right.program.post_recv(&mut right.qp, 6, &[to.sge(0, 9999)]);
    expect_failure(&mut left, send(1), &[from.sge(0, 10_000)], REM_INV_REQ_ERR);
    let received = right.queue.wait();
    assert_eq!((received.wr_id, received.status), (5, LOC_LEN_ERR));
    let flushed = right.queue.wait();
    assert_eq!((flushed.wr_id, flushed.status), (6, WR_FLUSH_ERR));
    // No doorbell announces a RECV: the RNIC looks by itself.
    right.program.post_recv(&mut right.qp, 7, &[to.sge(0, 9999)]);
    let flushed = right.queue.wait();
    assert_eq!((flushed.wr_id, flushed.status), (7, WR_FLUSH_ERR));
}

#[test]
fn a_partner_that_is_gone_exhausts_the_retries_and_reset_starts_anew() {
    let (a, b) = (Server::start([127, 7, 13, 1]), Server::start([127, 7, 13, 2]));
    let (mut left, right) = (End::new(&a), End::new(&b));
    left.program
        .connect_qp_with(&left.qp, b.address, right.qp.qpn, |attr| attr.retry_cnt = 1);
    right.program.call(Request::DestroyQp { qpn: right.qp.qpn });
    expect_failure(&mut left, send(1), &[], RETRY_EXC_ERR);
    b.wait_for("packets for nobody", |counters| counters.rx_unknown_qp >= 2);

    left.program
        .modify(&left.qp, QpAttrMask::STATE, QpAttr::default());
    left.qp.send.reset();
    left.qp.recv.reset();
    let mut again = End::new(&b);
    left.program.connect_qp(&left.qp, b.address, again.qp.qpn);
    again.program.connect_qp(&again.qp, a.address, left.qp.qpn);
    again.program.post_recv(&mut again.qp, 3, &[]);
    left.program.post(&mut left.qp, send(2), &[]);
    assert_eq!((left.queue.wait().wr_id, again.queue.wait().wr_id), (2, 3));
}

#[test]
fn an_overrun_costs_only_those_who_use_the_queue() {
    let (a, b) = (Server::start([127, 7, 14, 1]), Server::start([127, 7, 14, 2]));
    let (left, _right) = pair(&a, &b);
    let (mut bystander, partner) = pair(&a, &b);
    let small = left.program.cq(1);
    let mut overrunning = left.program.qp(&small, CAP);
    let far = End::new(&b);
    left.program.connect_qp(&overrunning, b.address, far.qp.qpn);
    far.program.connect_qp(&far.qp, a.address, overrunning.qpn);
    let target = far.program.adopted(PAGES, ALL_ACCESS);
    for n in 0..3 {
        left.program.post(&mut overrunning, write(n, &target, 0), &[]);
    }
    a.wait_for("the overrun", |counters| counters.cq_overruns == 1);
    wait_for("the error state", || {
        (left.program.state(&overrunning) == QpState::Err).then_some(())
    });
    assert_eq!(
        left.program.state(&left.qp),
        QpState::Rts,
        "its other queue pair has another queue"
    );
    let memory = partner.program.adopted(PAGES, ALL_ACCESS);
    bystander
        .program
        .post(&mut bystander.qp, write(1, &memory, 0), &[]);
    assert_eq!(bystander.queue.wait().status, SUCCESS);
}

#[test]
fn requests_that_make_no_sense_are_refused_with_the_right_errno() {
    let server = Server::start([127, 7, 15, 1]);
    let mut end = End::new(&server);
    let other = End::new(&server);
    let memory = end.program.adopted(PAGES, ALL_ACCESS);
    let program = &end.program;
    let (pd, cq, qpn) = (program.pd, end.queue.cq, end.qp.qpn);
    let open = |version| Request::OpenContext {
        version,
        name: "again".into(),
    };
    let segment = Segment {
        address: 4096,
        length: 4096,
        backing: Backing::Process,
    };
    let reg = |pd, access, length, segments: &[Segment]| Request::RegMr {
        pd,
        address: 4096,
        length,
        iova: 0,
        access,
        segments: segments.to_vec(),
        key: None,
    };
    let qp = |pd, cq, cap| Request::CreateQp {
        pd,
        send_cq: cq,
        recv_cq: cq,
        qp_type: QpType::Rc,
        cap,
        srq: None,
        qpn: None,
    };
    let modify = |mask, attr| Request::ModifyQp { qpn, mask, attr };
    let attr = QpAttr {
        state: QpState::Init,
        port_num: 1,
        ..QpAttr::default()
    };
    let init = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS;
    for (request, errno) in [
        (open(VERSION), libc::EINVAL),
        (open(VERSION + 1), libc::EPROTO),
        (
            Request::AddListener {
                instance: "web".to_owned(),
            },
            libc::EINVAL,
        ),
        (Request::DeallocPd { pd }, libc::EBUSY),
        (Request::DeallocPd { pd: other.program.pd }, libc::EINVAL),
        (Request::DestroyCq { cq }, libc::EBUSY),
        (Request::DestroyCq { cq: other.queue.cq }, libc::EINVAL),
        (
            Request::CreateCq {
                entries: 0,
                channel: None,
                event: None,
            },
            libc::EINVAL,
        ),
        (
            Request::CreateCq {
                entries: u32::MAX,
                channel: None,
                event: None,
            },
            libc::EINVAL,
        ),
        (
            Request::DeregMr {
                lkey: memory.key ^ 0xff,
            },
            libc::EINVAL,
        ),
        (reg(other.program.pd, ALL_ACCESS, 4096, &[segment]), libc::EINVAL),
        (reg(pd, Access::REMOTE_WRITE, 4096, &[segment]), libc::EINVAL),
        (
            reg(pd, Access::from_bits_retain(1 << 9), 4096, &[segment]),
            libc::EOPNOTSUPP,
        ),
        (reg(pd, ALL_ACCESS, 4097, &[segment]), libc::EINVAL),
        (qp(other.program.pd, cq, CAP), libc::EINVAL),
        (qp(pd, other.queue.cq, CAP), libc::EINVAL),
        (
            qp(
                pd,
                cq,
                QpCap {
                    max_send_sge: 17,
                    ..CAP
                },
            ),
            libc::EINVAL,
        ),
        (
            qp(
                pd,
                cq,
                QpCap {
                    max_recv_wr: u32::MAX,
                    ..CAP
                },
            ),
            libc::EINVAL,
        ),
        (Request::QueryQp { qpn: other.qp.qpn }, libc::EINVAL),
        (Request::DestroyQp { qpn: other.qp.qpn }, libc::EINVAL),
        (modify(QpAttrMask::STATE, attr), libc::EINVAL),
        (
            modify(
                QpAttrMask::STATE,
                QpAttr {
                    state: QpState::Rts,
                    ..attr
                },
            ),
            libc::EINVAL,
        ),
        (modify(init, QpAttr { port_num: 2, ..attr }), libc::EINVAL),
        (modify(init | QpAttrMask::ALT_PATH, attr), libc::EOPNOTSUPP),
        (
            modify(QpAttrMask::from_bits_retain(1 << 30), attr),
            libc::EOPNOTSUPP,
        ),
    ] {
        let shown = format!("{request:?}");
        assert_eq!(program.errno(request), errno, "{shown}");
    }
    // Refused requests have changed nothing: the objects still go, in order.
    program.modify(&end.qp, init, attr);
    program.call(Request::DestroyQp { qpn });
    program.call(Request::DestroyCq { cq });
    program.call(Request::DeregMr { lkey: memory.key });
    program.call(Request::DeallocPd { pd });
    assert_eq!(program.errno(Request::DeallocPd { pd }), libc::EINVAL);
    end.program.pd = 0;
    server.wait_for("the other one's objects alone", |counters| {
        (counters.pds, counters.cqs, counters.qps, counters.mrs) == (1, 1, 1, 0)
    });
}
