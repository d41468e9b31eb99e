//! Queue pairs in the background beside those of users, between two RNICs.

mod support;

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use support::program::{ALL_ACCESS, CAP, read, send, write};
use support::{End, Memory, Server, pair};
use verbatim_device::control::{
    QpAttr, QpAttrMask, QpClass, QpState, QpStatistics, QpType, Reply, Request, VERSION,
};
use verbatim_seqpacket::Socket;

const SUCCESS: u32 = 0;
const MIB: u64 = 1 << 20;

/// A connection with default attributes fails after eight ACK timeouts of 50 ms: this is several times as long.
const LONG: Duration = Duration::from_millis(1500);

fn set_class(end: &End, class: QpClass) {
    let qpn = end.qp.qpn;
    let reply = end.program.call(Request::SetQpClass { qpn, class });
    assert!(matches!(reply, Reply::Done), "{reply:?}");
}

/// Two programs at two RNICs, connected in the background.
fn background_pair(a: &Server, b: &Server) -> (End, End) {
    let (left, right) = pair(a, b);
    for end in [&left, &right] {
        set_class(end, QpClass::Background);
    }
    (left, right)
}

/// What an RNIC has counted of its queue pairs, all at the same moment.
struct Seen(Vec<QpStatistics>);

impl Seen {
    fn at(server: &Server) -> Self {
        let socket = Socket::connect(&server.socket()).expect("the RNIC listens");
        let reply = socket.call::<_, Reply>(&Request::QueryStatistics { from_qpn: 0 }, &[]);
        match reply.expect("an answer").message {
            Reply::Statistics { qps, .. } => Self(qps),
            reply => panic!("unexpected answer {reply:?}"),
        }
    }

    fn find(&self, end: &End, name: &str) -> Option<u64> {
        let qp = self.0.iter().find(|qp| qp.qpn == end.qp.qpn)?;
        let found = qp.counters.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| *value)
    }

    fn value(&self, end: &End, name: &str) -> u64 {
        self.find(end, name)
            .unwrap_or_else(|| panic!("there is no counter {name}"))
    }
}

fn pattern(seed: usize) -> impl Fn(usize) -> u8 {
    move |index| (index.wrapping_mul(31) ^ (index >> 9) ^ seed) as u8
}

fn check(memory: &Memory, seed: usize) {
    let expected: Vec<u8> = (0..memory.bytes as usize).map(pattern(seed)).collect();
    assert!(memory.as_slice() == expected, "the bytes differ");
}

/// WRITEs of a user, several under way at any time, while `more` says so. How many there were.
fn stream(from: &mut End, to: &Memory, mut more: impl FnMut() -> ControlFlow<()>) -> u64 {
    const UNDER_WAY: u64 = 8;
    let source = from.program.adopted(MIB, ALL_ACCESS);
    let post = |from: &mut End, number| {
        let sges = [source.sge(0, MIB as u32)];
        from.program.post(&mut from.qp, write(number, to, 0), &sges);
    };
    (0..UNDER_WAY).for_each(|number| post(from, number));
    let (mut posted, mut done) = (UNDER_WAY, 0);
    while done < posted {
        assert_eq!(from.queue.wait().status, SUCCESS, "the user's connection");
        done += 1;
        if more().is_continue() {
            post(from, posted);
            posted += 1;
        }
    }
    done
}

#[test]
fn a_user_keeps_the_wire_and_the_background_has_what_is_left() {
    const MESSAGES: u64 = 128;
    let (a, b) = (Server::start([127, 7, 98, 1]), Server::start([127, 7, 98, 2]));
    let (mut user, user_to) = pair(&a, &b);
    let (mut back, back_to) = background_pair(&a, &b);
    let source = user.program.adopted(MIB, ALL_ACCESS);
    let into = user_to.program.adopted(MIB, ALL_ACCESS);
    let mut back_source = back.program.adopted(64 * MIB, ALL_ACCESS);
    let back_into = back_to.program.adopted(64 * MIB, ALL_ACCESS);
    back_source.fill(pattern(1));
    // All of it is posted at once: whether the RNIC has work of the user does not depend on when this thread runs.
    for number in 0..MESSAGES {
        let sges = [source.sge(0, MIB as u32)];
        user.program.post(&mut user.qp, write(number, &into, 0), &sges);
    }
    for number in 0..64 {
        let sges = [back_source.sge(number * MIB, MIB as u32)];
        let request = write(number, &back_into, number * MIB);
        back.program.post(&mut back.qp, request, &sges);
    }
    // The last look before the user has sent everything.
    let mut last = (0, 0);
    for _ in 0..MESSAGES {
        assert_eq!(user.queue.wait().status, SUCCESS);
        let seen = Seen::at(&a);
        let sent = [&user, &back].map(|end| seen.value(end, "sent_pkts"));
        if seen.value(&user, "sent_bytes") < MESSAGES * MIB {
            last = (sent[0], sent[1]);
        }
    }
    let (of_user, of_background) = last;
    println!("the user sent {of_user} packets, the background {of_background} meanwhile");
    assert!(of_user > 0, "there was time to look");
    assert!(
        of_user >= 9 * of_background,
        "the user had less than 90 %: {of_user} of {}",
        of_user + of_background
    );
    // Nothing but the end of the user's stream lets it go on.
    for number in 0..64 {
        let done = back.queue.wait();
        assert_eq!((done.wr_id, done.status), (number, SUCCESS));
    }
    check(&back_into, 1);
    assert!(Seen::at(&a).value(&back, "background_turns") > 0);
}

/// Both RNICs are busy with users, so requests, READ data and acknowledgements of the background are starved at both ends.
#[test]
fn starving_fails_no_connection_and_loses_nothing() {
    const BYTES: u64 = 8 * MIB;
    const PIECES: u64 = 64;
    let (a, b) = (Server::start([127, 7, 99, 1]), Server::start([127, 7, 99, 2]));
    let (mut there, mut back) = pair(&a, &b);
    let targets = [&there, &back].map(|end| end.program.adopted(MIB, ALL_ACCESS));
    let pairs = [background_pair(&a, &b), background_pair(&b, &a)];
    let end = Instant::now() + LONG;
    let goes_on = || match Instant::now() < end {
        true => ControlFlow::Continue(()),
        false => ControlFlow::Break(()),
    };
    std::thread::scope(|scope| {
        let [at_there, at_back] = &targets;
        let users = [
            scope.spawn(|| stream(&mut there, at_back, goes_on)),
            scope.spawn(|| stream(&mut back, at_there, goes_on)),
        ];
        let workers = pairs.map(|(mut near, mut far)| {
            let servers = [&a, &b];
            scope.spawn(move || {
                let mut source = near.program.adopted(BYTES, ALL_ACCESS);
                let mut remote = far.program.adopted(BYTES, ALL_ACCESS);
                let fetched = near.program.adopted(BYTES, ALL_ACCESS);
                let written = far.program.adopted(BYTES, ALL_ACCESS);
                let told = far.program.adopted(PIECES * 4096, ALL_ACCESS);
                source.fill(pattern(2));
                remote.fill(pattern(3));
                for piece in 0..PIECES {
                    let sges = [told.sge(piece * 4096, 4096)];
                    far.program.post_recv(&mut far.qp, piece, &sges);
                }
                let whole = |memory: &Memory| [memory.sge(0, BYTES as u32)];
                let at_once = [
                    (write(1, &written, 0), whole(&source)),
                    (read(2, &remote, 0), whole(&fetched)),
                ];
                for (request, sges) in at_once {
                    near.program.post(&mut near.qp, request, &sges);
                }
                for piece in 0..PIECES {
                    let sges = [source.sge(piece * 4096, 4096)];
                    near.program.post(&mut near.qp, send(100 + piece), &sges);
                }
                for wr_id in [1, 2].into_iter().chain((0..PIECES).map(|piece| 100 + piece)) {
                    let done = near.queue.wait();
                    assert_eq!((done.wr_id, done.status), (wr_id, SUCCESS));
                }
                for piece in 0..PIECES {
                    let done = far.queue.wait();
                    assert_eq!((done.wr_id, done.status, done.byte_len), (piece, SUCCESS, 4096));
                }
                check(&fetched, 3);
                check(&written, 2);
                assert!(told.as_slice() == &source.as_slice()[..told.bytes as usize]);
                let seen = servers.map(Seen::at);
                let of =
                    |name: &str| [&near, &far].map(|end| seen.iter().find_map(|seen| seen.find(end, name)));
                println!(
                    "turns {:?}, starved {:?}",
                    of("background_turns"),
                    of("background_starved_turns")
                );
                let starved = of("background_starved_turns").map(Option::unwrap_or_default);
                (starved, of("retry_exceeded_err"))
            })
        });
        for user in users {
            println!(
                "a user's messages: {}",
                user.join().expect("the user was not disturbed")
            );
        }
        for worker in workers {
            let (starved, failed) = worker.join().expect("the background was served");
            assert!(
                starved.iter().all(|turns| *turns > 0),
                "both ends were starved: {starved:?}"
            );
            assert_eq!(failed, [Some(0), Some(0)]);
        }
    });
}

/// What comes alone after a user's burst is sent, though nothing more happens at the RNIC.
#[test]
fn an_rnic_that_sleeps_wakes_for_the_background() {
    let (a, b) = (Server::start([127, 7, 100, 1]), Server::start([127, 7, 100, 2]));
    let (mut user, user_to) = pair(&a, &b);
    let (mut back, back_to) = background_pair(&a, &b);
    let source = user.program.adopted(MIB, ALL_ACCESS);
    let into = user_to.program.adopted(MIB, ALL_ACCESS);
    let mut back_source = back.program.adopted(4096, ALL_ACCESS);
    let back_into = back_to.program.adopted(4096, ALL_ACCESS);
    for round in 0..100 {
        back_source.fill(pattern(round as usize));
        let burst = [source.sge(0, MIB as u32)];
        user.program.post(&mut user.qp, write(round, &into, 0), &burst);
        assert_eq!(user.queue.wait().status, SUCCESS);
        let request = write(round, &back_into, 0);
        back.program
            .post(&mut back.qp, request, &[back_source.sge(0, 4096)]);
        let done = back.queue.wait();
        assert_eq!((done.wr_id, done.status), (round, SUCCESS));
        check(&back_into, round as usize);
    }
}

/// An acknowledgement that waits for its turn is sent before its queue pair goes.
#[test]
fn who_hears_the_last_word_in_the_background_and_goes_has_acknowledged_it() {
    let (a, b) = (Server::start([127, 7, 101, 1]), Server::start([127, 7, 101, 2]));
    // The RNIC of who hears it is busy.
    let (user_to, mut user) = pair(&a, &b);
    let into = user_to.program.adopted(MIB, ALL_ACCESS);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            stream(&mut user, &into, || match stop.load(Relaxed) {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            })
        });
        for round in 0..20 {
            let (mut left, mut right) = background_pair(&a, &b);
            let from = left.program.adopted(4096, ALL_ACCESS);
            let to = right.program.adopted(4096, ALL_ACCESS);
            right.program.post_recv(&mut right.qp, 1, &[to.sge(0, 8)]);
            left.program.post(&mut left.qp, send(2), &[from.sge(0, 8)]);
            assert_eq!(right.queue.wait().wr_id, 1);
            drop(right);
            let done = left.queue.wait();
            if (done.wr_id, done.status) != (2, SUCCESS) {
                stop.store(true, Relaxed);
                panic!("round {round}: {done:?}");
            }
        }
        stop.store(true, Relaxed);
    });
}

#[test]
fn the_class_is_the_queue_pairs_until_it_is_changed() {
    let (a, b) = (Server::start([127, 7, 102, 1]), Server::start([127, 7, 102, 2]));
    let (left, right) = pair(&a, &b);
    let is_in_background = || Seen::at(&a).find(&left, "background_turns").is_some();
    assert!(!is_in_background());
    set_class(&left, QpClass::Background);
    assert!(is_in_background());
    let reset = QpAttr {
        state: QpState::Reset,
        ..QpAttr::default()
    };
    left.program.modify(&left.qp, QpAttrMask::STATE, reset);
    assert!(is_in_background());
    left.program.connect_qp(&left.qp, b.address, right.qp.qpn);
    assert!(is_in_background());
    set_class(&left, QpClass::User);
    assert!(!is_in_background());

    let class = QpClass::Background;
    let refused = |program: &support::Program, qpn| program.errno(Request::SetQpClass { qpn, class });
    let datagrams = left.program.qp_with(&left.queue, CAP, QpType::Ud, None);
    let unreliable = left.program.qp_with(&left.queue, CAP, QpType::Uc, None);
    for qpn in [datagrams.qpn, unreliable.qpn, left.qp.qpn ^ 0x40_0000] {
        assert_eq!(refused(&left.program, qpn), libc::EINVAL);
    }
    let stranger = End::new(&a);
    assert_eq!(refused(&stranger.program, left.qp.qpn), libc::EINVAL);
    assert!(!is_in_background());
}

/// A program of the release before this one, which knows of no classes.
#[test]
fn an_earlier_version_of_the_contract_is_spoken() {
    let server = Server::start([127, 7, 103, 1]);
    let errno = |version| {
        let socket = Socket::connect(&server.socket()).expect("the RNIC listens");
        let name = "earlier".to_owned();
        let reply = socket.call::<_, Reply>(&Request::OpenContext { version, name }, &[]);
        match reply.expect("an answer").message {
            Reply::Context { .. } => 0,
            Reply::Error { errno, .. } => errno,
            reply => panic!("unexpected answer {reply:?}"),
        }
    };
    assert_eq!(
        [VERSION, 11, 10, VERSION + 1].map(errno),
        [0, 0, libc::EPROTO, libc::EPROTO]
    );
}
