//! Queue pair numbers and memory keys: which the RNIC gives unasked, and those that are asked for.

mod support;

use std::collections::BTreeSet;
use std::os::fd::AsFd;

use support::program::{ALL_ACCESS, CAP, write};
use support::{Memory, Program, Qp, Queue, Server, wait_for};
use verbatim_device::control::{
    Access, Backing, FIRST_PUBLISHED_QPN, KEYS_PER_HOST, MwType, QPNS_PER_HOST, QpType, Reply, Request,
    Segment, VERSION,
};
use verbatim_device::layout::{SEND_SIGNALED, SendWqe, WR_BIND_MW};
use verbatim_nic::HostNumber;
use verbatim_seqpacket::{Listener, Socket};

const SUCCESS: u32 = 0;
const REM_ACCESS_ERR: u32 = 10;

fn qp_request(program: &Program, queue: &Queue, qpn: Option<u32>) -> Request {
    Request::CreateQp {
        pd: program.pd,
        send_cq: queue.cq,
        recv_cq: queue.cq,
        qp_type: QpType::Rc,
        cap: CAP,
        srq: None,
        qpn,
    }
}

/// Memory that the RNIC reaches through the process: no descriptor comes with it.
fn mr_request(program: &Program, key: Option<u32>) -> Request {
    Request::RegMr {
        pd: program.pd,
        address: 4096,
        length: 4096,
        iova: 4096,
        access: Access::LOCAL_WRITE,
        segments: vec![Segment {
            address: 4096,
            length: 4096,
            backing: Backing::Process,
        }],
        key,
    }
}

fn mw_request(program: &Program, rkey: Option<u32>) -> Request {
    Request::AllocMw {
        pd: program.pd,
        mw_type: MwType::One,
        rkey,
    }
}

struct End {
    program: Program,
    queue: Queue,
    qp: Qp,
}

fn end(server: &Server, qpn: u32) -> End {
    let program = Program::connect(&server.socket(), "asks");
    let queue = program.cq(64);
    let qp = program.make_qp(qp_request(&program, &queue, Some(qpn)));
    assert_eq!(qp.qpn, qpn);
    End { program, queue, qp }
}

impl End {
    /// Posts a request and gives the status of its completion.
    fn run(&mut self, request: SendWqe, from: &[&Memory]) -> u32 {
        let sges: Vec<_> = from.iter().map(|memory| memory.sge(0, 8)).collect();
        self.program.post(&mut self.qp, request, &sges);
        self.queue.wait().status
    }
}

#[test]
fn what_was_asked_for_is_used_on_the_wire() {
    let (a, b) = (Server::start([127, 7, 71, 1]), Server::start([127, 7, 71, 2]));
    // The lowest that can be, and the highest.
    let (mut left, mut right) = (end(&a, 2), end(&b, FIRST_PUBLISHED_QPN - 1));
    left.program.connect_qp(&left.qp, b.address, right.qp.qpn);
    right.program.connect_qp(&right.qp, a.address, left.qp.qpn);
    let bindable = ALL_ACCESS | Access::MW_BIND;
    let mut from = left.program.adopted_as(Some(0x100), 4096, ALL_ACCESS);
    from.fill(|n| n as u8 + 1);
    let to = right.program.adopted_as(Some(u32::MAX), 4096, bindable);
    assert_eq!((from.key, to.key), (0x100, u32::MAX));
    assert_eq!(left.run(write(1, &to, 16), &[&from]), SUCCESS);
    assert_eq!(to.as_slice()[16..24], [1, 2, 3, 4, 5, 6, 7, 8]);

    // A window, by the key that it was asked for with: it is bound to that key, and its region is found by the region's.
    let rkey = 0x1234_5678;
    let Reply::Mw { rkey: given } = right.program.call(mw_request(&right.program, Some(rkey))) else {
        panic!("no window")
    };
    assert_eq!(given, rkey);
    let bind = SendWqe {
        opcode: WR_BIND_MW,
        flags: SEND_SIGNALED,
        imm: rkey,
        rkey,
        remote_address: to.address,
        compare_add: 64,
        swap: u64::from(to.key) | u64::from(Access::REMOTE_WRITE.bits()) << 32,
        ..SendWqe::default()
    };
    assert_eq!(right.run(bind, &[]), SUCCESS);
    let through = |key| SendWqe {
        rkey: key,
        ..write(2, &to, 32)
    };
    assert_eq!(left.run(through(rkey), &[&from]), SUCCESS);
    assert_eq!(to.as_slice()[32..40], [1, 2, 3, 4, 5, 6, 7, 8]);
    // The index alone is no key.
    assert_eq!(left.run(through(rkey ^ 1), &[&from]), REM_ACCESS_ERR);
}

#[test]
fn a_region_keeps_the_key_that_was_asked_for_when_it_changes() {
    let a = Server::start([127, 7, 72, 1]);
    let program = Program::connect(&a.socket(), "asks");
    let key = 0x7777_7707;
    program.call(mr_request(&program, Some(key)));
    let change = Request::ReregMr {
        lkey: key,
        pd: None,
        access: Some(Access::LOCAL_WRITE | Access::REMOTE_READ),
        translation: None,
    };
    let reply = program.call(change);
    assert!(
        matches!(reply, Reply::Mr { lkey, rkey } if (lkey, rkey) == (key, key)),
        "{reply:?}"
    );
    program.call(Request::DeregMr { lkey: key });
    assert_eq!(program.errno(Request::DeregMr { lkey: key }), libc::EINVAL);
}

#[test]
fn what_is_taken_is_refused_and_nothing_is_left_of_that() {
    let a = Server::start_with([127, 7, 73, 1], |config| {
        let one = &mut config.limits.per_program;
        (one.max_qp, one.max_mr, one.max_mw) = (3, 3, 3);
    });
    let (first, second) = (
        Program::connect(&a.socket(), "one"),
        Program::connect(&a.socket(), "two"),
    );
    let queue = first.cq(16);
    let unasked = first.qp(&queue, CAP).qpn;
    let asked = first.make_qp(qp_request(&first, &queue, Some(0x1234))).qpn;
    let Reply::Mr { lkey, .. } = first.call(mr_request(&first, Some(0x1234_5600))) else {
        panic!("no region")
    };
    let Reply::Mw { rkey } = first.call(mw_request(&first, None)) else {
        panic!("no window")
    };

    let queue = second.cq(16);
    second.call(Request::DestroyQp {
        qpn: second.qp(&queue, CAP).qpn,
    });
    let bytes = second.arena_bytes();
    for _ in 0..100 {
        for qpn in [unasked, asked] {
            assert_eq!(second.errno(qp_request(&second, &queue, Some(qpn))), libc::EEXIST);
        }
        // Regions and windows share the keys, and the low eight bits tell none apart.
        for key in [lkey, lkey ^ 1, rkey, rkey ^ 1] {
            assert_eq!(second.errno(mr_request(&second, Some(key))), libc::EEXIST);
            assert_eq!(second.errno(mw_request(&second, Some(key))), libc::EEXIST);
        }
    }
    assert!(
        second.arena_bytes() <= bytes,
        "queues of refused queue pairs are gone"
    );
    for n in 0..3 {
        second.make_qp(qp_request(&second, &queue, Some(0x2000 + n)));
        second.call(mr_request(&second, Some((0x2000 + n) << 8)));
        second.call(mw_request(&second, Some((0x3000 + n) << 8)));
    }
    assert_eq!(
        second.errno(qp_request(&second, &queue, Some(0x4000))),
        libc::ENOMEM
    );
    assert_eq!(second.errno(mr_request(&second, Some(0x0040_0000))), libc::ENOMEM);
    for n in 0..3 {
        second.call(Request::DestroyQp { qpn: 0x2000 + n });
        second.call(Request::DeregMr {
            lkey: (0x2000 + n) << 8,
        });
        second.call(Request::DeallocMw {
            rkey: (0x3000 + n) << 8,
        });
    }
    second.call(Request::DeallocPd { pd: second.pd });

    // With a program goes what it has asked for.
    drop(first);
    let third = Program::connect(&a.socket(), "three");
    let queue = third.cq(16);
    wait_for("the end of the first program", || {
        third.ask(&qp_request(&third, &queue, Some(asked)), &[]).ok()
    });
    third.call(mr_request(&third, Some(lkey)));
}

/// How many of each the tests below have made.
const MANY: usize = 300;

/// Queue pair numbers, and the upper 24 bits of keys, that an RNIC gives unasked.
fn given(server: &Server) -> [BTreeSet<u32>; 2] {
    let program = Program::connect(&server.socket(), "plain");
    let queue = program.cq(16);
    let qpns = (0..MANY).map(|_| program.qp(&queue, CAP).qpn).collect();
    let keys = (0..MANY).map(|n| {
        let request = match n % 2 {
            0 => mr_request(&program, None),
            _ => mw_request(&program, None),
        };
        match program.call(request) {
            Reply::Mr { lkey: key, .. } | Reply::Mw { rkey: key } => key >> 8,
            reply => panic!("{reply:?}"),
        }
    });
    [qpns, keys.collect()]
}

#[test]
fn hosts_give_numbers_of_their_own() {
    for host in [0, 1, 119] {
        let server = Server::start_with([127, 7, 74, 200], |config| {
            config.host_number = HostNumber::new(host);
        });
        let parts =
            [QPNS_PER_HOST, KEYS_PER_HOST].map(|part| u32::from(host) * part..(u32::from(host) + 1) * part);
        for (numbers, part) in given(&server).iter().zip(parts) {
            assert_eq!(numbers.len(), MANY);
            assert!(
                numbers
                    .iter()
                    .all(|number| part.contains(number) && *number >= 0x100)
            );
        }
    }
    // If nothing is said, neighbours differ.
    let neighbours = [1, 2].map(|last| given(&Server::start([127, 7, 74, last])));
    for (one, other) in neighbours[0].iter().zip(&neighbours[1]) {
        assert!(one.is_disjoint(other));
    }
}

#[test]
fn what_is_gone_can_be_asked_for_at_once_and_is_not_given_for_long() {
    let a = Server::start([127, 7, 75, 1]);
    let program = Program::connect(&a.socket(), "asks");
    let queue = program.cq(16);
    let unasked = program.qp(&queue, CAP).qpn;
    // That one itself, one that would be given soon, and one that never would be.
    let wanted = [unasked, unasked + 7, 77];
    program.call(Request::DestroyQp { qpn: unasked });
    for qpn in wanted {
        for _ in 0..3 {
            let qp = program.make_qp(qp_request(&program, &queue, Some(qpn)));
            assert!(qp.qpn == qpn && program.errno(qp_request(&program, &queue, Some(qpn))) == libc::EEXIST);
            program.call(Request::DestroyQp { qpn });
            assert_eq!(program.errno(Request::QueryQp { qpn }), libc::EINVAL);
        }
    }
    let given: BTreeSet<_> = (0..MANY).map(|_| program.qp(&queue, CAP).qpn).collect();
    assert!(given.len() == MANY && wanted.iter().all(|qpn| !given.contains(qpn)));
    // One that lies between those is passed over while it lives.
    let ahead = (given.first().expect("some were given") + 1..)
        .find(|qpn| !given.contains(qpn))
        .expect("few were given");
    let qp = program.make_qp(qp_request(&program, &queue, Some(ahead)));
    let next: BTreeSet<_> = (0..MANY).map(|_| program.qp(&queue, CAP).qpn).collect();
    assert!(qp.qpn == ahead && next.len() == MANY && !next.contains(&ahead));
}

#[test]
fn the_next_number_of_a_queue_pair_cannot_be_told_from_the_last() {
    let a = Server::start([127, 7, 79, 1]);
    let program = Program::connect(&a.socket(), "guesses");
    let queue = program.cq(16);
    let given: Vec<_> = (0..MANY).map(|_| program.qp(&queue, CAP).qpn).collect();
    let steps: BTreeSet<_> = given
        .windows(2)
        .map(|pair| pair[1].wrapping_sub(pair[0]))
        .collect();
    assert!(steps.len() > MANY * 9 / 10, "{steps:?}");
}

#[test]
fn what_cannot_be_a_number_is_refused() {
    let a = Server::start([127, 7, 76, 1]);
    let program = Program::connect(&a.socket(), "asks");
    let queue = program.cq(16);
    // Those of management, of agents, of multicast, and those that have more than 24 bits.
    for qpn in [0, 1, FIRST_PUBLISHED_QPN, 0xff_fffe, 0xff_ffff, 1 << 24, u32::MAX] {
        assert_eq!(
            program.errno(qp_request(&program, &queue, Some(qpn))),
            libc::EINVAL,
            "{qpn:#x}"
        );
    }
    for key in [0, 1, 0xff] {
        assert_eq!(
            program.errno(mr_request(&program, Some(key))),
            libc::EINVAL,
            "{key:#x}"
        );
        assert_eq!(
            program.errno(mw_request(&program, Some(key))),
            libc::EINVAL,
            "{key:#x}"
        );
    }
    program.qp(&queue, CAP);
}

#[test]
fn nobody_has_more_by_asking() {
    let a = Server::start_with([127, 7, 77, 1], |config| {
        let limits = &mut config.limits;
        (limits.max_qp, limits.max_mr, limits.max_mw) = (50, 30, 20);
        // One tenant may have all.
        (limits.tenants.share_percent, limits.tenants.reserve_percent) = (100, 0);
    });
    let program = Program::connect(&a.socket(), "greedy");
    let queue = program.cq(16);
    let mut have = BTreeSet::new();
    for qpn in (2..FIRST_PUBLISHED_QPN).step_by(1 << 13) {
        match program.ask(&qp_request(&program, &queue, Some(qpn)), &[]) {
            Ok(_) => assert!(have.insert(qpn)),
            Err((errno, _)) => assert_eq!((errno, have.len()), (libc::ENOMEM, 50)),
        }
    }
    assert_eq!(program.errno(qp_request(&program, &queue, None)), libc::ENOMEM);
    let keys = (1..1 << 24).step_by(1 << 17).map(|number| number << 8);
    let made = keys.filter(|key| program.ask(&mr_request(&program, Some(*key)), &[]).is_ok());
    assert_eq!(made.count(), 30);
    let windows = (0..30).filter(|_| program.ask(&mw_request(&program, None), &[]).is_ok());
    assert_eq!(windows.count(), 20);
    assert_eq!(program.errno(mw_request(&program, None)), libc::ENOMEM);
    // All are as good as any other, and what one gives back another gets.
    let gone = *have.first().expect("there are some");
    program.call(Request::DestroyQp { qpn: gone });
    assert!(!have.contains(&program.qp(&queue, CAP).qpn));
    assert_eq!(
        program.errno(qp_request(&program, &queue, Some(gone))),
        libc::ENOMEM
    );
}

#[test]
fn only_who_makes_objects_for_others_may_ask() {
    let a = Server::start([127, 7, 78, 1]);
    let refused = |program: &Program| {
        let queue = program.cq(16);
        assert_eq!(
            program.errno(qp_request(program, &queue, Some(0x1234))),
            libc::EPERM
        );
        assert_eq!(program.errno(mr_request(program, Some(0x1234_5678))), libc::EPERM);
        assert_eq!(program.errno(mw_request(program, Some(0x1234_5678))), libc::EPERM);
        program.qp(&queue, CAP);
    };
    // Who has come over an instance's socket.
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("instance.sock");
    let listener = Listener::bind(&path).expect("a socket");
    let socket = Socket::connect(&a.socket()).expect("the RNIC listens");
    let added = socket.call::<_, Reply>(
        &Request::AddListener {
            instance: "web".to_owned(),
        },
        &[listener.as_fd()],
    );
    assert!(matches!(added.expect("an answer").message, Reply::Done));
    refused(&Program::connect(&path, "instance"));

    // Who was handed a context.
    let maker = Program::connect(&a.socket(), "agent");
    maker.call(mr_request(&maker, Some(0x1234_5678)));
    let attach = Request::AttachContext { version: VERSION };
    maker.ask(&attach, &[]).expect("it is attached to");
    refused(&maker);
}
