//! Atomics, memory windows, invalidation, and regions that change under their keys.

mod support;

use std::os::fd::AsFd;

use support::program::{ALL_ACCESS, read, send, write};
use support::{End, Memory, Program, Server, pair};
use verbatim_device::control::{
    Access, Backing, MwType, QpAttr, QpAttrMask, QpState, Reply, Request, Segment, Translation,
};
use verbatim_device::layout::{SEND_SIGNALED, SendWqe, WR_BIND_MW, WR_LOCAL_INV};

const SUCCESS: u32 = 0;
const MW_BIND_ERR: u32 = 6;
const REM_ACCESS_ERR: u32 = 10;
const BIND_MW: u32 = 5;
const WITH_INV: u32 = 8;

const BINDABLE: Access = ALL_ACCESS.union(Access::MW_BIND);

fn atomic(opcode: u8, memory: &Memory, at: u64, compare_add: u64, swap: u64) -> SendWqe {
    SendWqe {
        opcode,
        compare_add,
        swap,
        ..write(1, memory, at)
    }
}

#[test]
fn atomics_change_adopted_and_other_memory() {
    let (a, b) = (Server::start([127, 7, 50, 1]), Server::start([127, 7, 50, 2]));
    let (mut left, right) = pair(&a, &b);
    let result = left.program.adopted(4096, ALL_ACCESS);
    let word = |memory: &Memory, at: usize| {
        u64::from_ne_bytes(memory.as_slice()[at..at + 8].try_into().expect("eight bytes"))
    };
    for private in [false, true] {
        let memory = match private {
            false => right.program.adopted(4096, ALL_ACCESS),
            true => right.program.private(4096, ALL_ACCESS),
        };
        let mut run = |request| {
            left.program.post(&mut left.qp, request, &[result.sge(0, 8)]);
            assert_eq!(left.queue.wait().status, SUCCESS);
            word(&result, 0)
        };
        assert_eq!(run(atomic(6, &memory, 16, 7, 0)), 0);
        assert_eq!(run(atomic(6, &memory, 16, u64::MAX, 0)), 7);
        assert_eq!(run(atomic(5, &memory, 16, 5, 99)), 6, "no match, no change");
        assert_eq!(run(atomic(5, &memory, 16, 6, 99)), 6);
        assert_eq!(
            (word(&memory, 8), word(&memory, 16), word(&memory, 24)),
            (0, 99, 0)
        );
    }
    let read_only = right
        .program
        .adopted(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    left.program
        .post(&mut left.qp, atomic(6, &read_only, 0, 1, 0), &[result.sge(0, 8)]);
    assert_eq!(left.queue.wait().status, REM_ACCESS_ERR);
}

fn window(program: &Program, mw_type: MwType) -> u32 {
    let Reply::Mw { rkey } = program.call(Request::AllocMw {
        pd: program.pd,
        mw_type,
        rkey: None,
    }) else {
        panic!("no window")
    };
    rkey
}

/// Binds and gives the status of the completion.
fn bind(end: &mut End, window: u32, rkey: u32, memory: &Memory, range: (u64, u64), access: Access) -> u32 {
    let request = SendWqe {
        wr_id: 77,
        opcode: WR_BIND_MW,
        flags: SEND_SIGNALED,
        imm: rkey,
        rkey: window,
        remote_address: range.0,
        compare_add: range.1,
        swap: u64::from(memory.key) | u64::from(access.bits()) << 32,
        ..SendWqe::default()
    };
    end.program.post(&mut end.qp, request, &[]);
    let done = end.queue.wait();
    assert_eq!((done.wr_id, done.opcode), (77, BIND_MW));
    done.status
}

fn through(rkey: u32, address: u64, request: SendWqe) -> SendWqe {
    SendWqe {
        rkey,
        remote_address: address,
        ..request
    }
}

const WRITE: Access = Access::REMOTE_WRITE;

#[test]
fn a_type_1_window_opens_a_part_of_a_region_until_it_is_bound_anew() {
    let (a, b) = (Server::start([127, 7, 51, 1]), Server::start([127, 7, 51, 2]));
    let (mut left, mut right) = pair(&a, &b);
    let from = left.program.adopted(4096, ALL_ACCESS);
    let memory = right
        .program
        .adopted(1 << 16, Access::LOCAL_WRITE | Access::MW_BIND);
    let mw = window(&right.program, MwType::One);
    let base = memory.address;
    assert_eq!(
        bind(&mut right, mw, mw ^ 5, &memory, (base + 100, 50), WRITE),
        SUCCESS
    );
    let key = mw ^ 5;
    left.program.post(
        &mut left.qp,
        through(key, base + 100, write(1, &memory, 0)),
        &[from.sge(0, 50)],
    );
    assert_eq!(
        left.queue.wait().status,
        SUCCESS,
        "the region itself lets nobody in"
    );

    // It holds the region.
    let dereg = Request::DeregMr { lkey: memory.key };
    assert_eq!(right.program.errno(dereg.clone()), libc::EBUSY);
    // Bound anew: only the new key counts.
    assert_eq!(
        bind(&mut right, key, key ^ 1, &memory, (base, 10), WRITE),
        SUCCESS
    );
    assert_eq!(
        bind(&mut right, key ^ 1, key ^ 2, &memory, (0, 0), Access::empty()),
        SUCCESS,
        "unbound"
    );
    right.program.call(dereg);
    left.program.post(
        &mut left.qp,
        through(key ^ 2, base, write(2, &memory, 0)),
        &[from.sge(0, 1)],
    );
    assert_eq!(left.queue.wait().status, REM_ACCESS_ERR);
    right.program.call(Request::DeallocMw { rkey: mw });
    assert_eq!(right.program.errno(Request::DeallocMw { rkey: mw }), libc::EINVAL);
}

#[test]
fn windows_refuse_what_they_were_not_bound_for() {
    let (a, b) = (Server::start([127, 7, 52, 1]), Server::start([127, 7, 52, 2]));
    let attempt = |access, request: &dyn Fn(u32, &Memory) -> SendWqe, length, status| {
        let (mut left, mut right) = pair(&a, &b);
        let from = left.program.adopted(4096, ALL_ACCESS);
        let memory = right.program.adopted(1 << 16, BINDABLE);
        let mw = window(&right.program, MwType::Two);
        let range = (memory.address + 4096, 100);
        assert_eq!(bind(&mut right, mw, mw ^ 1, &memory, range, access), SUCCESS);
        left.program
            .post(&mut left.qp, request(mw ^ 1, &memory), &[from.sge(0, length)]);
        assert_eq!(left.queue.wait().status, status);
    };
    let at = |offset| {
        move |key, memory: &Memory| {
            through(
                key,
                (memory.address + 4096).wrapping_add(offset),
                write(1, memory, 0),
            )
        }
    };
    attempt(WRITE, &at(0), 100, SUCCESS);
    attempt(WRITE, &at(0), 101, REM_ACCESS_ERR);
    attempt(WRITE, &at(u64::MAX), 1, REM_ACCESS_ERR);
    attempt(Access::REMOTE_READ, &at(0), 8, REM_ACCESS_ERR);
    attempt(
        WRITE,
        &|key, memory| through(key ^ 1, memory.address + 4096, write(1, memory, 0)),
        8,
        REM_ACCESS_ERR,
    );
    let zero_based = WRITE | Access::ZERO_BASED;
    attempt(
        zero_based,
        &|key, memory| through(key, 60, write(1, memory, 0)),
        40,
        SUCCESS,
    );
    attempt(
        zero_based,
        &|key, memory| through(key, 60, write(1, memory, 0)),
        41,
        REM_ACCESS_ERR,
    );
    attempt(zero_based, &at(0), 8, REM_ACCESS_ERR);
}

#[test]
fn a_type_2_window_belongs_to_its_queue_pair_until_it_is_invalidated() {
    let (a, b) = (Server::start([127, 7, 53, 1]), Server::start([127, 7, 53, 2]));
    let (mut left, mut right) = pair(&a, &b);
    let from = left.program.adopted(4096, ALL_ACCESS);
    let memory = right.program.adopted(1 << 16, BINDABLE);
    let range = (memory.address, 4096);
    let mw = window(&right.program, MwType::Two);
    assert_eq!(
        bind(&mut right, mw, mw, &memory, range, WRITE | Access::REMOTE_READ),
        SUCCESS
    );
    left.program.post(
        &mut left.qp,
        through(mw, memory.address, read(1, &memory, 0)),
        &[from.sge(0, 64)],
    );
    assert_eq!(left.queue.wait().status, SUCCESS);

    // Another queue pair of the same domain.
    let mut other = right.program.qp(&right.queue, support::program::CAP);
    let mut stranger = left.program.qp(&left.queue, support::program::CAP);
    left.program.connect_qp(&stranger, b.address, other.qpn);
    right.program.connect_qp(&other, a.address, stranger.qpn);
    left.program.post(
        &mut stranger,
        through(mw, memory.address, write(2, &memory, 0)),
        &[from.sge(0, 8)],
    );
    assert_eq!(left.queue.wait().status, REM_ACCESS_ERR);

    // The partner invalidates it with a message.
    right.program.post_recv(&mut right.qp, 5, &[memory.sge(0, 64)]);
    let invalidate = SendWqe {
        opcode: 9,
        imm: mw,
        ..send(3)
    };
    left.program.post(&mut left.qp, invalidate, &[from.sge(0, 8)]);
    let received = right.queue.wait();
    assert_eq!(
        (
            received.wr_id,
            received.status,
            received.wc_flags & WITH_INV,
            received.imm
        ),
        (5, SUCCESS, WITH_INV, mw)
    );
    assert_eq!(left.queue.wait().status, SUCCESS);
    // Free again: it can be bound with another key, and ended by its own side.
    assert_eq!(bind(&mut right, mw, mw ^ 9, &memory, range, WRITE), SUCCESS);
    let local = SendWqe {
        wr_id: 6,
        opcode: WR_LOCAL_INV,
        imm: mw ^ 9,
        ..SendWqe::default()
    };
    right.program.post(&mut right.qp, local, &[]);
    assert_eq!(right.queue.wait().status, SUCCESS);
    left.program.post(
        &mut left.qp,
        through(mw ^ 9, memory.address, write(7, &memory, 0)),
        &[from.sge(0, 8)],
    );
    assert_eq!(left.queue.wait().status, REM_ACCESS_ERR);

    // A queue pair takes the binding of its windows with it.
    let back = left.program.qp(&left.queue, support::program::CAP);
    other = right.program.qp(&right.queue, support::program::CAP);
    left.program.connect_qp(&back, b.address, other.qpn);
    right.program.connect_qp(&other, a.address, back.qpn);
    let mut end = End { qp: other, ..right };
    assert_eq!(bind(&mut end, mw ^ 9, mw ^ 10, &memory, range, WRITE), SUCCESS);
    assert_eq!(
        end.program.errno(Request::DeregMr { lkey: memory.key }),
        libc::EBUSY
    );
    end.program.call(Request::DestroyQp { qpn: end.qp.qpn });
    end.program.call(Request::DeregMr { lkey: memory.key });
}

#[test]
fn binds_that_are_not_allowed_fail() {
    let (a, b) = (Server::start([127, 7, 54, 1]), Server::start([127, 7, 54, 2]));
    let attempt = |mw_type, region: Access, range: &dyn Fn(&Memory) -> (u64, u64), access, twist: u32| {
        let (_left, mut right) = pair(&a, &b);
        let memory = right.program.adopted(4096, region);
        let mw = window(&right.program, mw_type);
        let status = bind(&mut right, mw, mw ^ twist, &memory, range(&memory), access);
        assert_eq!(status, MW_BIND_ERR);
    };
    let all = |memory: &Memory| (memory.address, 4096);
    attempt(MwType::One, ALL_ACCESS, &all, WRITE, 1);
    attempt(MwType::One, Access::MW_BIND, &all, WRITE, 1);
    attempt(MwType::One, BINDABLE, &|memory| (memory.address, 4097), WRITE, 1);
    attempt(MwType::One, BINDABLE, &|memory| (memory.address - 1, 8), WRITE, 1);
    attempt(MwType::One, BINDABLE, &|_| (u64::MAX - 3, 8), WRITE, 1);
    attempt(MwType::One, BINDABLE, &all, WRITE, 0x100);
    attempt(MwType::One, BINDABLE, &all, WRITE | Access::ZERO_BASED, 1);
    attempt(MwType::Two, BINDABLE, &|memory| (memory.address, 0), WRITE, 1);
    attempt(MwType::Two, BINDABLE, &all, Access::from_bits_retain(1 << 9), 1);
}

#[test]
fn a_region_changes_under_its_keys() {
    let (a, b) = (Server::start([127, 7, 55, 1]), Server::start([127, 7, 55, 2]));
    let (mut left, right) = pair(&a, &b);
    let mut from = left.program.adopted(4096, ALL_ACCESS);
    from.fill(|_| 3);
    let memory = right.program.adopted(4096, Access::LOCAL_WRITE);
    let other = right.program.adopted(8192, ALL_ACCESS);
    let change = |access, translation| Request::ReregMr {
        lkey: memory.key,
        pd: None,
        access,
        translation,
    };
    let Reply::Mr { lkey, rkey } = right.program.call(change(Some(ALL_ACCESS), None)) else {
        panic!("no keys")
    };
    assert_eq!((lkey, rkey), (memory.key, memory.key));
    left.program
        .post(&mut left.qp, write(1, &memory, 0), &[from.sge(0, 100)]);
    assert_eq!(left.queue.wait().status, SUCCESS);
    assert_eq!(memory.as_slice()[..100], [3; 100]);

    let segments = vec![Segment {
        address: other.address,
        length: 8192,
        backing: Backing::File {
            fd_index: 0,
            offset: 0,
        },
    }];
    let elsewhere = Translation {
        address: other.address,
        length: 8192,
        iova: other.address,
        segments,
    };
    let file = other.file.as_ref().expect("adopted memory has a file");
    let request = change(None, Some(elsewhere));
    assert!(right.program.ask(&request, &[]).is_err(), "without the file");
    right.program.ask(&request, &[file.as_fd()]).expect("with it");
    left.program.post(
        &mut left.qp,
        through(memory.key, other.address + 4096, write(2, &other, 0)),
        &[from.sge(0, 10)],
    );
    assert_eq!(left.queue.wait().status, SUCCESS);
    assert_eq!(other.as_slice()[4096..4106], [3; 10]);

    // Another domain: its queue pair cannot reach it any more.
    let Reply::Pd { pd } = right.program.call(Request::AllocPd) else {
        panic!("no pd")
    };
    right.program.call(Request::ReregMr {
        lkey: memory.key,
        pd: Some(pd),
        access: None,
        translation: None,
    });
    assert_eq!(right.program.errno(Request::DeallocPd { pd }), libc::EBUSY);
    left.program.post(
        &mut left.qp,
        through(memory.key, other.address, write(3, &other, 0)),
        &[from.sge(0, 1)],
    );
    assert_eq!(left.queue.wait().status, REM_ACCESS_ERR);
    for wrong in [
        Request::ReregMr {
            lkey: memory.key ^ 1,
            pd: None,
            access: None,
            translation: None,
        },
        Request::ReregMr {
            lkey: memory.key,
            pd: Some(999),
            access: None,
            translation: None,
        },
        change(Some(Access::REMOTE_WRITE), None),
    ] {
        assert_eq!(right.program.errno(wrong), libc::EINVAL);
    }
    let reset = QpAttr {
        state: QpState::Reset,
        ..QpAttr::default()
    };
    right.program.modify(&right.qp, QpAttrMask::STATE, reset);
}
