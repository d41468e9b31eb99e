//! Pause and resume: a connection goes on at another queue pair, or at another RNIC, and its partner's RNIC finds it.

mod support;

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use support::program::{ALL_ACCESS, CAP, gid, read, send, write};
use support::{End, PeerAgent, Server, pair, wait_for};
use verbatim_device::control::{
    ForwardedQp, MOST_QPS, PeerVerdict, QpAttr, QpAttrMask, QpSecret, QpState, QpType, Reply, Request,
    RestoredQp,
};
use verbatim_device::image::{self, QpImage, Restoring};
use verbatim_device::layout::{SEND_INLINE, SEND_SIGNALED, SendWqe};
use verbatim_device::ring::Body;
use verbatim_roce::wire::bth::{BTH_BYTES, Bth};
use verbatim_roce::wire::migeth::{MAC_BYTES, MIGETH_BYTES, MIGETH_VERSION, MOST_HOPS, MigrationEth};
use verbatim_roce::wire::opcode::Opcode;
use verbatim_roce::{Flow, Location, Psn, Qpn, VENDOR_ERR_PAUSED};
use verbatim_seqpacket::{Carried, Socket};

const SUCCESS: u32 = 0;
const WR_FLUSH_ERR: u32 = 5;
const RETRY_EXC_ERR: u32 = 12;
const KEY: [u8; 32] = [0x17; 32];
const MEMORY: u64 = 64 * 4096;
/// So many messages of eight bytes are sent.
const MESSAGES: u64 = 100;

fn done(end: &End, request: Request) {
    let reply = end.program.call(request);
    assert!(matches!(reply, Reply::Done), "{reply:?}");
}

fn share_secret(ends: [&End; 2]) {
    for (end, first) in ends.into_iter().zip([true, false]) {
        let secret = Some(QpSecret { key: KEY, first });
        done(
            end,
            Request::SetQpSecret {
                qpn: end.qp.qpn,
                secret,
            },
        );
    }
}

fn pause(end: &End) {
    done(
        end,
        Request::PauseQps {
            qpns: vec![end.qp.qpn],
            limit_s: None,
        },
    );
}

fn resume(end: &End) {
    done(
        end,
        Request::ResumeQps {
            qpns: vec![end.qp.qpn],
        },
    );
}

fn dump(end: &End) -> QpImage {
    let request = dump_request(end.qp.qpn);
    match end.program.ask_for_fds(&request, &[]) {
        Ok((Reply::QpImages(carried), mut fds)) => {
            let mut images = image::take(carried, &mut fds).expect("images");
            assert_eq!(images.len(), 1);
            images.remove(0)
        }
        other => panic!("{other:?}"),
    }
}

fn dump_request(qpn: u32) -> Request {
    Request::DumpQps { qpns: vec![qpn] }
}

/// The errno of what the RNIC says to an image.
fn try_restore(end: &End, image: &[u8]) -> Result<(), i32> {
    let mut restoring = Restoring::default();
    restoring.add(end.qp.qpn, image, 0);
    let (request, memory) = restoring.requests().next().expect("one").expect("room");
    let fds: Vec<_> = memory.iter().map(AsFd::as_fd).collect();
    match end.program.ask(&request, &fds) {
        Ok(Reply::QpsRestored { refused, .. }) => match refused[..] {
            [] => Ok(()),
            [(0, errno)] => Err(errno),
            _ => panic!("{refused:?}"),
        },
        Ok(other) => panic!("{other:?}"),
        Err((errno, _)) => Err(errno),
    }
}

fn restore(end: &End, image: &[u8]) {
    assert_eq!(try_restore(end, image), Ok(()));
}

fn refused(end: &End, image: &[u8]) -> i32 {
    try_restore(end, image).expect_err("a refusal")
}

/// What comes for the connection at its old place is passed on.
fn forward_request(qpn: u32, address: IpAddr, to_qpn: u32) -> Request {
    let to_gid = gid(address);
    Request::ForwardQps {
        qps: vec![ForwardedQp { qpn, to_gid, to_qpn }],
        seconds: 60,
    }
}

/// An end of a conversation: it sends its numbers in order, and receives the other's.
struct Talker {
    end: End,
    /// The first message that is not complete.
    completed: u64,
    received: Vec<u64>,
    memory: support::Memory,
    /// RECVs posted, over all places.
    receives: u64,
}

impl Talker {
    fn new(end: End) -> Self {
        let memory = end.program.adopted(MEMORY, ALL_ACCESS);
        let mut talker = Self {
            end,
            completed: 0,
            received: Vec::new(),
            memory,
            receives: 0,
        };
        while talker.receives < MESSAGES {
            talker.post_receive(talker.receives);
            talker.receives += 1;
        }
        talker
    }

    fn post_receive(&mut self, wr_id: u64) {
        let sge = self.memory.sge(wr_id * 8, 8);
        self.end.program.post_recv(&mut self.end.qp, wr_id, &[sge]);
    }

    fn push(&mut self, wr_id: u64) {
        let wqe = SendWqe {
            flags: SEND_INLINE | SEND_SIGNALED,
            inline_bytes: 8,
            ..send(wr_id)
        };
        self.end.qp.send.push(&wqe, Body::Inline(&[&wr_id.to_ne_bytes()]));
    }

    fn say(&mut self, messages: std::ops::Range<u64>) {
        for wr_id in messages {
            self.push(wr_id);
        }
        self.end.program.ring(&mut self.end.qp);
    }

    /// Takes completions, each of which must be the next one of its queue.
    fn poll(&mut self) {
        while let Some(cqe) = self.end.queue.poll() {
            assert_eq!(cqe.status, SUCCESS, "{cqe:?}");
            if cqe.opcode >= 128 {
                assert_eq!(cqe.wr_id, self.received.len() as u64);
                let at = cqe.wr_id as usize * 8;
                let bytes = self.memory.as_slice()[at..at + 8].try_into().unwrap();
                self.received.push(u64::from_ne_bytes(bytes));
            } else {
                assert_eq!(cqe.wr_id, self.completed);
                self.completed += 1;
            }
        }
    }

    fn is_done(&mut self) -> bool {
        self.poll();
        self.completed == MESSAGES && self.received.len() as u64 == MESSAGES
    }

    /// Goes on at another RNIC: what its program would be, and what it has received, moves along.
    fn move_to(&mut self, server: &Server, dump: &QpImage, posted: u64) -> End {
        self.poll();
        let new = End::new(server);
        let memory = new.program.adopted(MEMORY, ALL_ACCESS);
        let old = std::mem::replace(&mut self.end, new);
        self.memory = memory;
        let pending: Vec<u64> = (self.completed..posted).collect();
        assert_eq!(dump.requests, pending[..dump.requests.len()]);
        assert_eq!(dump.receive, None, "the messages have one packet each");
        for wr_id in pending {
            self.push(wr_id);
        }
        for wr_id in self.received.len() as u64..MESSAGES {
            self.post_receive(wr_id);
        }
        self.end.program.ring(&mut self.end.qp);
        restore(&self.end, &dump.image);
        assert_eq!(self.end.program.state(&self.end.qp), QpState::Rts);
        old
    }
}

fn talkers(a: &Server, b: &Server) -> [Talker; 2] {
    let (left, right) = pair(a, b);
    share_secret([&left, &right]);
    [Talker::new(left), Talker::new(right)]
}

fn finish(talkers: &mut [Talker; 2]) {
    wait_for("all messages", || {
        let all = talkers.each_mut().map(Talker::is_done);
        (all == [true; 2]).then_some(())
    });
    for talker in talkers {
        assert!(
            talker.received.iter().copied().eq(0..MESSAGES),
            "{:?}",
            talker.received
        );
    }
}

#[test]
fn one_end_moves_to_another_rnic_in_the_middle() {
    let hosts = [1, 2, 3].map(|host| Server::start([127, 7, 80, host]));
    move_one_end(&hosts, || {});
}

/// The agents do not say in time that the two ends name each other: the secret of both does.
#[test]
fn a_move_does_not_wait_for_the_agents_word() {
    let hosts = [1, 2, 3].map(|host| Server::start([127, 7, 83, host]));
    let mut agents = Vec::new();
    move_one_end(&hosts, || agents.extend(hosts.iter().map(PeerAgent::of)));
    let [_, b, c] = [&agents[0], &agents[1], &agents[2]].map(|agent| agent.question().pair);
    assert_eq!(
        (b.own.gid, c.own.gid),
        (gid(hosts[1].address), gid(hosts[2].address))
    );
}

/// Requests that were posted while the queue pair stood still have no doorbell and no timer left: they go once the partner has been heard.
#[test]
fn what_was_posted_while_it_stood_still_goes_on_by_the_secret() {
    let [a, b, c] = [1, 2, 3].map(|host| Server::start([127, 7, 84, host]));
    let [mut left, mut right] = talkers(&a, &b);
    let _silent = [&a, &b, &c].map(PeerAgent::of);
    left.say(0..40);
    right.say(0..40);
    wait_for("both to be quiet", || {
        let said = [&mut left, &mut right].map(|talker| {
            talker.poll();
            (talker.completed, talker.received.len())
        });
        (said == [(40, 40); 2]).then_some(())
    });
    pause(&left.end);
    let saved = dump(&left.end);
    assert!(saved.requests.is_empty());
    let old = left.move_to(&c, &saved, 40);
    done(&old, forward_request(old.qp.qpn, c.address, left.end.qp.qpn));
    done(&old, Request::DestroyQp { qpn: old.qp.qpn });
    left.say(40..MESSAGES);
    resume(&left.end);
    wait_for("what was posted", || {
        left.poll();
        right.poll();
        (right.received.len() as u64 == MESSAGES).then_some(())
    });
    right.say(40..MESSAGES);
    finish(&mut [left, right]);
}

/// A RESUME that a program makes with its own secret: it says that the partner goes on at `source`. The MAC is right, and the hops are the
/// forger's choice.
fn forge_resume(to: &End, server: &Server, from: IpAddr, source: Location, hops: u8) {
    let bth = Bth {
        opcode: Opcode::RC_RESUME,
        solicited: false,
        migrated: true,
        pad_count: 0,
        version: 0,
        pkey: 0xffff,
        fecn: false,
        becn: false,
        dest_qpn: Qpn::new(to.qp.qpn),
        ack_request: false,
        psn: Psn::new(0),
    };
    let mut header = MigrationEth {
        version: MIGETH_VERSION,
        hops: 0,
        begun: false,
        // Where the queue pair begins: nothing was sent.
        expected: Psn::new(to.qp.qpn),
        source,
        counter: (1 << 40) + 1,
        about: 0,
        mac: [0; MAC_BYTES],
    };
    let mut covered = [0; MIGETH_BYTES];
    header.emit(&mut covered);
    let mut hasher = blake3::Hasher::new_keyed(&KEY);
    // Of the first end, and no syndrome.
    hasher.update(&[0, bth.opcode.0, 0]);
    hasher.update(&bth.psn.get().to_be_bytes());
    hasher.update(&covered[..MIGETH_BYTES - MAC_BYTES]);
    (header.hops, header.mac) = (
        hops,
        *hasher.finalize().as_bytes().first_chunk().expect("32 bytes"),
    );
    let mut packet = vec![0; BTH_BYTES + MIGETH_BYTES];
    let (head, payload) = packet
        .split_first_chunk_mut::<BTH_BYTES>()
        .expect("as long as a BTH");
    bth.emit(head);
    header.emit(payload.try_into().expect("as long as the header"));
    let socket = UdpSocket::bind((from, 0)).expect("an address of this host");
    let end = SocketAddr::from((server.address, 4791));
    let flow = Flow::new(socket.local_addr().expect("an address"), end).expect("both are IPv4");
    packet.extend(flow.icrc(&packet, 0).to_le_bytes());
    socket.send_to(&packet, end).expect("it is sent");
}

/// A program knows the secret of its own connection. With a RESUME of its own making it could name any queue pair as the partner of its
/// own one: the RNIC asks that host, and sends nothing there meanwhile, unless the message has come from that very RNIC.
#[test]
fn a_forged_resume_is_a_reason_to_ask_and_no_more() {
    let [a, b, victim] = [1, 2, 3].map(|host| Server::start([127, 7, 86, host]));
    let stranger: IpAddr = [127, 7, 86, 4].into();
    let forged = [
        // From elsewhere, as if it were direct.
        (stranger, MOST_HOPS, false),
        (a.address, MOST_HOPS, false),
        // From an RNIC that has passed it on; more hops than there are is no sign of a direct one.
        (victim.address, MOST_HOPS - 1, false),
        (victim.address, 0, false),
        (victim.address, MOST_HOPS + 1, false),
        (victim.address, u8::MAX, false),
        // The RNIC itself: it speaks of its own queue pairs alone.
        (victim.address, MOST_HOPS, true),
    ];
    for (from, hops, is_believed) in forged {
        let [left, mut right] = talkers(&a, &b);
        let agent = PeerAgent::of(&b);
        // The one before may be on its way out still.
        let mine =
            || std::iter::from_fn(|| Some(agent.question())).find(|q| q.pair.own.qpn == right.end.qp.qpn);
        let asked = mine().expect("it is asked about");
        agent.answer(&asked, PeerVerdict::Confirmed);
        let target = End::new(&victim);
        let source = Location {
            address: victim.address,
            qpn: Qpn::new(target.qp.qpn),
        };
        let (resumes, sent) = (b.stats.read().rx_resumes, victim.stats.read().rx_packets);
        forge_resume(&right.end, &b, from, source, hops);
        b.wait_for("the RESUME", |counters| counters.rx_resumes > resumes);
        let asked = agent.question();
        assert_eq!(asked.pair.other.qpn, target.qp.qpn, "from {from}, {hops} hops");
        assert_eq!(asked.pair.other.gid, gid(victim.address));
        let before = b.stats.read().tx_packets;
        right.say(0..1);
        if is_believed {
            victim.wait_for("what is sent there", |counters| counters.rx_packets > sent);
            continue;
        }
        // The answer comes after the request was looked at, and says no.
        agent.answer(&asked, PeerVerdict::Refused);
        let failed = right.end.queue.wait();
        assert_eq!(failed.status, RETRY_EXC_ERR, "from {from}, {hops} hops");
        assert_eq!(b.stats.read().tx_packets, before, "from {from}, {hops} hops");
        drop((left, target));
    }
}

fn move_one_end([a, b, c]: &[Server; 3], once_connected: impl FnOnce()) {
    let [mut left, mut right] = talkers(a, b);
    once_connected();
    left.say(0..40);
    right.say(0..40);
    pause(&left.end);
    // Its partner says more, and learns that it has to wait.
    right.say(40..MESSAGES);
    b.wait_for("the partner to be paused", |counters| counters.pauses == 1);
    assert_eq!(right.end.program.state(&right.end.qp), QpState::Rts);
    let saved = dump(&left.end);
    let old = left.move_to(c, &saved, 40);
    done(&old, forward_request(old.qp.qpn, c.address, left.end.qp.qpn));
    done(&old, Request::DestroyQp { qpn: old.qp.qpn });
    resume(&left.end);
    left.say(40..MESSAGES);
    let mut both = [left, right];
    finish(&mut both);
    let (counters, of_c) = (b.stats.read(), c.stats.read().tx_resumes);
    // RESUME is repeated after a millisecond without an acknowledgement, which a busy machine may take.
    assert!(counters.rx_resumes >= 1, "{counters:?}");
    assert_eq!(counters.migration_ignored, 0, "{counters:?}");
    // And back again, with another number.
    let [mut left, right] = both;
    pause(&left.end);
    let saved = dump(&left.end);
    assert!(saved.requests.is_empty());
    let _old = left.move_to(a, &saved, MESSAGES);
    resume(&left.end);
    b.wait_for("the second RESUME", |now| now.rx_resumes > counters.rx_resumes);
    assert_eq!(c.stats.read().tx_resumes, of_c, "it has nothing to do with that");
    drop(right);
}

#[test]
fn both_ends_move_at_once_and_find_each_other() {
    let [a, b, c, d] = [1, 2, 3, 4].map(|host| Server::start([127, 7, 81, host]));
    let [mut left, mut right] = talkers(&a, &b);
    left.say(0..50);
    right.say(0..50);
    pause(&left.end);
    pause(&right.end);
    let saved = [dump(&left.end), dump(&right.end)];
    let olds = [left.move_to(&c, &saved[0], 50), right.move_to(&d, &saved[1], 50)];
    // The first of them says where it is before anybody knows where the other one is.
    resume(&left.end);
    b.wait_for("RESUME at the old place", |counters| counters.rx_packets > 0);
    for (old, (new, at)) in olds.iter().zip([(&left, &c), (&right, &d)]) {
        done(old, forward_request(old.qp.qpn, at.address, new.end.qp.qpn));
    }
    done(&olds[1], Request::DestroyQp { qpn: olds[1].qp.qpn });
    drop(olds);
    resume(&right.end);
    left.say(50..MESSAGES);
    right.say(50..MESSAGES);
    finish(&mut [left, right]);
    let forwarded = a.stats.read().resumes_forwarded + b.stats.read().resumes_forwarded;
    assert!(forwarded > 0);
}

/// Large messages of every kind, within one RNIC, whose keys stay the same: from one queue pair to another one.
#[test]
fn messages_of_many_packets_move_from_one_queue_pair_to_another() {
    let [a, b] = [1, 2].map(|host| Server::start([127, 7, 82, host]));
    let (mut left, right) = pair(&a, &b);
    share_secret([&left, &right]);
    let mut from = left.program.adopted(64 << 20, ALL_ACCESS);
    from.fill(|at| at as u8 ^ (at >> 13) as u8);
    let to = right.program.adopted(64 << 20, ALL_ACCESS);
    let half = 32u32 << 20;
    left.program
        .post(&mut left.qp, write(0, &to, 0), &[from.sge(0, half)]);
    left.program
        .post(&mut left.qp, read(1, &to, 0), &[from.sge(half.into(), half)]);
    b.wait_for("the middle of the WRITE", |counters| counters.rx_packets > 100);
    pause(&left);
    let saved = dump(&left);
    assert!(left.queue.poll().is_none(), "it was not in the middle");
    // The READ is taken off the ring when there is room for its data.
    assert!(
        saved.requests == [0] || saved.requests == [0, 1],
        "{:?}",
        saved.requests
    );

    let new = left.program.qp(&left.queue, CAP);
    let old = std::mem::replace(&mut left.qp, new);
    // Without the requests it would not know what it has: refused, and nothing is changed by it.
    assert_eq!(refused(&left, &saved.image), libc::EINVAL);
    assert_eq!(left.program.state(&left.qp), QpState::Reset);
    left.program
        .post(&mut left.qp, write(0, &to, 0), &[from.sge(0, half)]);
    left.program
        .post(&mut left.qp, read(1, &to, 0), &[from.sge(half.into(), half)]);
    restore(&left, &saved.image);
    done(&left, Request::DestroyQp { qpn: old.qpn });
    resume(&left);
    for wr_id in [0, 1] {
        let cqe = left.queue.wait();
        assert_eq!((cqe.wr_id, cqe.status, cqe.qpn), (wr_id, SUCCESS, left.qp.qpn));
    }
    let half = half as usize;
    assert!(to.as_slice()[..half] == from.as_slice()[..half]);
    assert!(from.as_slice()[..half] == from.as_slice()[half..]);
    let room: Vec<_> = (0..CAP.max_send_wr).map(|_| left.qp.send.room()).collect();
    assert_eq!(room[0], CAP.max_send_wr, "all slots are free again");
}

#[test]
fn an_operators_pause_is_no_error_and_its_limit_is_one() {
    let limit = Duration::from_millis(700);
    let a = Server::start([127, 7, 83, 1]);
    let b = Server::start_with([127, 7, 83, 2], |config| config.limits.pause_limit = limit);
    let [left, mut right] = talkers(&a, &b);
    pause(&left.end);
    pause(&left.end);
    right.say(0..10);
    b.wait_for("the pause", |counters| counters.pauses == 1);
    let to_error = Request::ModifyQp {
        qpn: left.end.qp.qpn,
        mask: QpAttrMask::STATE,
        attr: QpAttr {
            state: QpState::Err,
            ..QpAttr::default()
        },
    };
    assert_eq!(left.end.program.errno(to_error), libc::EBUSY);
    let qpn = left.end.qp.qpn;
    assert_eq!(left.end.program.errno(Request::StopQp { qpn }), libc::EBUSY);
    resume(&left.end);
    resume(&left.end);
    wait_for("the answers", || {
        right.poll();
        (right.completed == 10).then_some(())
    });
    assert_eq!(b.stats.read().ack_timeouts, 0);

    pause(&left.end);
    right.say(10..12);
    let failed = right.end.queue.wait();
    assert_eq!(
        (failed.wr_id, failed.status, failed.vendor_err),
        (10, RETRY_EXC_ERR, VENDOR_ERR_PAUSED)
    );
    let flushed = right.end.queue.wait();
    assert_eq!(
        (flushed.wr_id, flushed.status, flushed.vendor_err),
        (11, WR_FLUSH_ERR, 0)
    );
    // The completion comes before the end of the turn that counts it.
    b.wait_for("the count of it", |counters| counters.pause_limit_exceeded == 1);
    let socket = Socket::connect(&b.socket()).expect("the RNIC listens");
    let reply = socket.call::<_, Reply>(&Request::QueryStatistics { from_qpn: 0 }, &[]);
    let Reply::Statistics { device, qps, .. } = reply.expect("an answer").message else {
        panic!("no statistics")
    };
    let value = |list: &[(String, u64)], name: &str| {
        let found = list.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| *value)
    };
    for list in [&device, &qps[0].counters] {
        assert_eq!(value(list, "pauses"), Some(2));
        assert!(value(list, "rcvd_resumes") >= Some(1));
        assert_eq!(value(list, "pause_limit_exceeded"), Some(1));
    }
}

/// Both ends, as an operator's pause stops them: no time passes at either, and after their limit they find each other again.
#[test]
fn a_pause_with_a_limit_ends_by_itself_at_both_ends() {
    let (a, b) = (Server::start([127, 7, 85, 1]), Server::start([127, 7, 85, 2]));
    let [left, mut right] = talkers(&a, &b);
    let is_paused = |end: &End| match end.program.call(Request::QueryQp { qpn: end.qp.qpn }) {
        Reply::QpAttr { paused, .. } => paused,
        reply => panic!("{reply:?}"),
    };
    for end in [&left.end, &right.end] {
        assert!(!is_paused(end));
        for limit_s in [None, Some(3600), Some(1)] {
            let qpn = end.qp.qpn;
            done(
                end,
                Request::PauseQps {
                    qpns: vec![qpn],
                    limit_s,
                },
            );
            assert!(is_paused(end));
        }
    }
    right.say(0..10);
    wait_for("the answers", || {
        right.poll();
        (right.completed == 10).then_some(())
    });
    assert!(!is_paused(&left.end) && !is_paused(&right.end));
    for server in [&a, &b] {
        let counted = server.stats.read();
        assert_eq!((counted.ack_timeouts, counted.pause_limit_exceeded), (0, 0));
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let server = Server::start([127, 7, 84, 1]);
    for qp_type in [QpType::Uc, QpType::Ud] {
        let end = End::of_type(&server, qp_type);
        let qpn = end.qp.qpn;
        for request in [
            Request::PauseQps {
                qpns: vec![qpn],
                limit_s: None,
            },
            dump_request(qpn),
            Request::SetQpSecret { qpn, secret: None },
        ] {
            assert_eq!(end.program.errno(request), libc::EINVAL);
        }
    }
    let end = End::new(&server);
    let qpn = end.qp.qpn;
    assert_eq!(
        end.program.errno(Request::PauseQps {
            qpns: vec![qpn],
            limit_s: None
        }),
        libc::EINVAL,
        "in RESET"
    );
    for bytes in [1000, 100_000, 10_000_000] {
        assert_eq!(refused(&end, &vec![7; bytes]), libc::EINVAL);
    }
    let restored = RestoredQp {
        qpn,
        image_bytes: 1000,
        sgid_index: 0,
    };
    for (qps, images) in [
        (vec![restored], Carried::InMemfd(1000)),
        (vec![restored], Carried::Here(vec![0; 999])),
        (vec![restored; 2], Carried::Here(vec![0; 1000])),
        (vec![], Carried::Here(vec![0; 1])),
        (vec![restored; MOST_QPS + 1], Carried::Here(Vec::new())),
    ] {
        assert_eq!(
            end.program.errno(Request::RestoreQps { qps, images }),
            libc::EINVAL
        );
    }
    let (live, _other) = pair(&server, &server);
    let qpn = live.qp.qpn;
    assert_eq!(live.program.errno(dump_request(qpn)), libc::EBUSY);
    let forward = |to_qpn, address| forward_request(qpn, address, to_qpn);
    assert_eq!(live.program.errno(forward(5, server.address)), libc::EBUSY);
    // One that cannot is no reason for the others, before it or after it.
    let is_paused = || match live.program.call(Request::QueryQp { qpn }) {
        Reply::QpAttr { paused, .. } => paused,
        reply => panic!("{reply:?}"),
    };
    for qpns in [vec![qpn, 0xabcdef], vec![0xabcdef, qpn]] {
        let requests = [
            (
                Request::PauseQps {
                    qpns: qpns.clone(),
                    limit_s: None,
                },
                true,
            ),
            (Request::ResumeQps { qpns }, false),
        ];
        for (request, paused) in requests {
            assert_ne!(live.program.errno(request), 0);
            assert_eq!(is_paused(), paused);
        }
    }
    let states = |qpns: Vec<u32>| live.program.call(Request::QueryQps { qpns });
    assert!(matches!(states(vec![qpn; 2]), Reply::QpStates(states) if states == [QpState::Rts; 2]));
    let qpns = vec![qpn, 0xabcdef];
    assert_eq!(live.program.errno(Request::QueryQps { qpns }), libc::EINVAL);
    let qpns = vec![qpn; MOST_QPS + 1];
    assert_eq!(
        live.program.errno(Request::PauseQps { qpns, limit_s: None }),
        libc::EINVAL
    );
    assert!(!is_paused());
    pause(&live);
    assert_eq!(live.program.errno(forward(0, server.address)), libc::EINVAL);
    let group = "224.0.0.1".parse().unwrap();
    assert_eq!(live.program.errno(forward(5, group)), libc::EINVAL);
    let saved = dump(&live);
    assert_eq!(refused(&live, &saved.image), libc::EBUSY, "not in RESET");
    // Another program's queue pair is nobody else's to pause.
    assert_ne!(
        end.program.errno(Request::PauseQps {
            qpns: vec![qpn],
            limit_s: None
        }),
        0
    );
    assert_ne!(end.program.errno(dump_request(qpn)), 0);
    let mut damaged = saved.image;
    damaged[40] ^= 1;
    assert_eq!(refused(&end, &damaged), libc::EINVAL);
}
