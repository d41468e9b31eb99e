//! A connection to another host sends nothing before that host has confirmed that the other end names it.

mod support;

use std::time::{Duration, Instant};

use support::program::{ALL_ACCESS, CAP, gid, send, write};
use support::{End, PeerAgent, Program, Server, wait_for};
use verbatim_device::control::{
    PeerPair, PeerStanding, PeerVerdict, QpAttr, QpAttrMask, QpEnd, QpState, QpType, Reply, Request,
};

const SUCCESS: u32 = 0;
const RETRY_EXC_ERR: u32 = 12;
const BYTES: u64 = 4096;

fn hosts(net: u8) -> [Server; 2] {
    [1, 2].map(|host| Server::start([127, 8, net, host]))
}

fn end_of(server: &Server, qpn: u32) -> QpEnd {
    QpEnd {
        gid: gid(server.address),
        qpn,
    }
}

/// A counter of the device's that is in no file.
fn counter(server: &Server, name: &str) -> u64 {
    let socket = verbatim_seqpacket::Socket::connect(&server.socket()).expect("the RNIC listens");
    let request = Request::QueryStatistics { from_qpn: 0 };
    match socket.call::<_, Reply>(&request, &[]).expect("an answer").message {
        Reply::Statistics { device, .. } => {
            let found = device.iter().find(|(known, _)| known == name);
            found.expect("a counter of that name").1
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn nothing_is_sent_and_no_time_passes_until_the_other_host_confirms() {
    let [a, b] = hosts(1);
    let agent = PeerAgent::of(&a);
    let (mut left, right) = (End::new(&a), End::new(&b));
    let (from, to) = (
        left.program.adopted(BYTES, ALL_ACCESS),
        right.program.adopted(BYTES, ALL_ACCESS),
    );
    right.program.connect_qp(&right.qp, a.address, left.qp.qpn);
    // Once its timeouts begin it fails in about 50 ms.
    let impatient = |attr: &mut QpAttr| (attr.timeout, attr.retry_cnt) = (1, 0);
    left.program
        .connect_qp_with(&left.qp, b.address, right.qp.qpn, impatient);
    left.program
        .post(&mut left.qp, write(1, &to, 0), &[from.sge(0, 64)]);
    let begun = Instant::now();
    let pair = PeerPair {
        own: end_of(&a, left.qp.qpn),
        other: end_of(&b, right.qp.qpn),
    };
    let mut questions = 0;
    while begun.elapsed() < Duration::from_millis(500) {
        let question = agent.question();
        assert_eq!((question.pair, question.again), (pair, false));
        assert_eq!(question.tenant, "instance test");
        agent.answer(&question, PeerVerdict::NotYet);
        questions += 1;
    }
    assert!(
        (7..20).contains(&questions),
        "growing steps: {questions} questions"
    );
    assert_eq!(left.program.state(&left.qp), QpState::Rts);
    let counters = a.stats.read();
    assert_eq!((counters.tx_packets, counters.ack_timeouts), (0, 0));
    assert_eq!(b.stats.read().rx_packets, 0);
    assert!(left.queue.poll().is_none());
    agent.answer(&agent.question(), PeerVerdict::Confirmed);
    let done = left.queue.wait();
    assert_eq!((done.wr_id, done.status), (1, SUCCESS));
    // It waits no more.
    left.program
        .post(&mut left.qp, write(2, &to, 0), &[from.sge(0, 64)]);
    assert_eq!(left.queue.wait().status, SUCCESS);
    assert_eq!(
        (counter(&a, "peers_asked_about"), counter(&a, "peers_confirmed")),
        (0, 1)
    );
}

/// An agent that has taken the question and hangs. It is waited for so long, and then the program's own timeouts end the connection.
#[test]
fn an_agent_that_never_answers_keeps_nobody_waiting_for_ever() {
    let [a, b] = hosts(8);
    let agent = PeerAgent::of(&a);
    let (mut left, right) = (End::new(&a), End::new(&b));
    let memory = memory_of(&left);
    right.program.connect_qp(&right.qp, a.address, left.qp.qpn);
    let impatient = |attr: &mut QpAttr| (attr.timeout, attr.retry_cnt) = (1, 0);
    left.program
        .connect_qp_with(&left.qp, b.address, right.qp.qpn, impatient);
    let begun = Instant::now();
    left.program.post(&mut left.qp, send(1), &[memory.sge(0, 64)]);
    assert_eq!(agent.question().pair.own.qpn, left.qp.qpn);
    let failed = left.queue.wait();
    assert_eq!((failed.wr_id, failed.status), (1, RETRY_EXC_ERR));
    assert!(
        begun.elapsed() >= Duration::from_secs(10),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!((a.stats.read().tx_packets, b.stats.read().rx_packets), (0, 0));
}

/// The acknowledgements of a queue pair that names somebody else's would acknowledge what that has sent.
#[test]
fn answers_wait_as_requests_do() {
    let [a, b] = hosts(2);
    let agent = PeerAgent::of(&a);
    let (left, mut right) = (End::new(&a), End::new(&b));
    let (to, from) = (
        left.program.adopted(BYTES, ALL_ACCESS),
        right.program.adopted(BYTES, ALL_ACCESS),
    );
    left.program.connect_qp(&left.qp, b.address, right.qp.qpn);
    right.program.connect_qp(&right.qp, a.address, left.qp.qpn);
    right
        .program
        .post(&mut right.qp, write(1, &to, 0), &[from.sge(0, 64)]);
    a.wait_for("the request to come, and to come again", |counters| {
        counters.rx_duplicates > 0
    });
    assert_eq!((a.stats.read().tx_packets, b.stats.read().rx_packets), (0, 0));
    agent.answer(&agent.question(), PeerVerdict::Confirmed);
    assert_eq!(right.queue.wait().status, SUCCESS);
}

#[test]
fn who_is_not_named_gets_no_answer_until_the_other_end_is_another_one() {
    let [a, b] = hosts(3);
    let agent = PeerAgent::of(&a);
    let (mut left, victim) = (End::new(&a), End::new(&b));
    let memory = left.program.adopted(BYTES, ALL_ACCESS);
    // The victim's real partner.
    let partner = End::new(&a);
    partner.program.connect_qp(&partner.qp, b.address, victim.qp.qpn);
    victim.program.connect_qp(&victim.qp, a.address, partner.qp.qpn);
    agent.answer(&agent.question(), PeerVerdict::Confirmed);
    left.program.connect_qp(&left.qp, b.address, victim.qp.qpn);
    left.program.post(&mut left.qp, send(1), &[memory.sge(0, 64)]);
    let refused = agent.question();
    assert!(!refused.again);
    agent.answer(&refused, PeerVerdict::Refused);
    let failed = left.queue.wait();
    assert_eq!((failed.wr_id, failed.status), (1, RETRY_EXC_ERR));
    assert_eq!((a.stats.read().tx_packets, b.stats.read().rx_packets), (0, 0));
    assert!(counter(&a, "unconfirmed_packets") > 0);
    assert_eq!(counter(&a, "peers_refused"), 1);

    // It is connected to somebody else: that is another question.
    let mut right = End::new(&b);
    let reset = QpAttr {
        state: QpState::Reset,
        ..QpAttr::default()
    };
    left.program.modify(&left.qp, QpAttrMask::STATE, reset);
    left.qp.send.reset();
    left.qp.recv.reset();
    left.program.connect_qp(&left.qp, b.address, right.qp.qpn);
    right.program.connect_qp(&right.qp, a.address, left.qp.qpn);
    // An answer to the earlier one changes nothing.
    agent.answer(&refused, PeerVerdict::Confirmed);
    let question = agent.question();
    assert_eq!((question.pair.other.qpn, question.again), (right.qp.qpn, false));
    assert_eq!(a.stats.read().tx_packets, 0);
    agent.answer(&question, PeerVerdict::Confirmed);
    let to = right.program.adopted(BYTES, ALL_ACCESS);
    right.program.post_recv(&mut right.qp, 5, &[to.sge(0, 64)]);
    left.program.post(&mut left.qp, send(2), &[memory.sge(0, 64)]);
    assert_eq!(left.queue.wait().status, SUCCESS);
}

#[test]
fn each_host_is_asked_about_its_own_ends_and_a_question_is_a_reason_to_ask() {
    let [a, b] = hosts(4);
    let agents = [PeerAgent::of(&a), PeerAgent::of(&b)];
    let (mut left, mut right) = (End::new(&a), End::new(&b));
    let memory = left.program.adopted(BYTES, ALL_ACCESS);
    left.program.connect_qp(&left.qp, b.address, right.qp.qpn);
    let question = agents[0].question();
    let asked = question.pair;
    let strangers = [
        PeerPair {
            own: end_of(&b, right.qp.qpn),
            other: end_of(&b, right.qp.qpn),
        },
        PeerPair {
            own: end_of(&b, right.qp.qpn ^ 0x55),
            other: asked.own,
        },
        PeerPair {
            own: end_of(&a, right.qp.qpn),
            other: asked.own,
        },
    ];
    let meet = |pairs: &[PeerPair]| agents[1].meet(pairs.to_vec());
    assert_eq!(meet(&[asked.turned()]), [PeerStanding::Unconnected]);
    right.program.connect_qp(&right.qp, a.address, left.qp.qpn);
    // Refused for now, it would ask after a second.
    let early = agents[1].question();
    assert_eq!(early.pair, asked.turned());
    agents[1].answer(&early, PeerVerdict::Refused);
    assert_eq!(
        meet(&strangers),
        [
            PeerStanding::Elsewhere,
            PeerStanding::Missing,
            PeerStanding::Foreign
        ]
    );
    let datagrams = End::of_type(&b, QpType::Ud);
    let at_datagrams = PeerPair {
        own: end_of(&b, datagrams.qp.qpn),
        other: asked.own,
    };
    assert_eq!(meet(&[at_datagrams]), [PeerStanding::Elsewhere]);
    let begun = Instant::now();
    assert_eq!(meet(&[asked.turned()]), [PeerStanding::Named]);
    let again = agents[1].question();
    assert!(again.again && again.pair == asked.turned());
    assert!(
        begun.elapsed() < Duration::from_millis(900),
        "{:?}",
        begun.elapsed()
    );
    // The other host's word alone opens nothing.
    assert_eq!(counter(&b, "peers_confirmed"), 0);
    agents[1].answer(&again, PeerVerdict::Confirmed);
    agents[0].answer(&question, PeerVerdict::Confirmed);
    let to = memory_of(&right);
    right.program.post_recv(&mut right.qp, 1, &[to.sge(0, 0)]);
    left.program.post(&mut left.qp, send(1), &[memory.sge(0, 0)]);
    assert_eq!(left.queue.wait().status, SUCCESS);
    assert_eq!(right.queue.wait().status, SUCCESS);
}

/// An end that asks nobody sends at once. Its packets are a reason for the other end, which was refused, to ask again: the answers do
/// not wait for half a minute.
#[test]
fn a_packet_from_the_other_end_is_a_reason_to_ask() {
    let [a, b] = hosts(9);
    let agent = PeerAgent::of(&a);
    let (left, mut right) = (End::new(&a), End::new(&b));
    let (to, from) = (memory_of(&left), memory_of(&right));
    left.program.connect_qp(&left.qp, b.address, right.qp.qpn);
    let mut refusals = 0;
    // Each refusal doubles the pause: one second, two, four.
    while refusals < 2 {
        agent.answer(&agent.question(), PeerVerdict::Refused);
        refusals += 1;
    }
    right.program.connect_qp(&right.qp, a.address, left.qp.qpn);
    let begun = Instant::now();
    right
        .program
        .post(&mut right.qp, write(1, &to, 0), &[from.sge(0, 64)]);
    agent.answer(&agent.question(), PeerVerdict::Confirmed);
    assert_eq!(right.queue.wait().status, SUCCESS);
    assert!(
        begun.elapsed() < Duration::from_millis(1500),
        "{:?}",
        begun.elapsed()
    );
}

/// A number that another RNIC was told to send to goes to nobody else before that RNIC has heard.
#[test]
fn the_number_of_a_queue_pair_that_was_confirmed_is_kept_back() {
    let [a, b] = hosts(10);
    let agents = [PeerAgent::of(&a), PeerAgent::of(&b)];
    let (mut left, right) = (End::new(&a), End::new(&b));
    let memory = memory_of(&left);
    left.program.connect_qp(&left.qp, b.address, right.qp.qpn);
    right.program.connect_qp(&right.qp, a.address, left.qp.qpn);
    let question = agents[0].question();
    agents[1].answer(&agents[1].question(), PeerVerdict::Confirmed);
    assert_eq!(
        agents[1].meet(vec![question.pair.turned()]),
        [PeerStanding::Named]
    );
    let qpn = right.qp.qpn;
    drop(right);
    let gone = agents[1].gone();
    assert_eq!(gone, question.pair.turned());
    assert_eq!(counter(&b, "numbers_kept_back"), 1);
    // Told before the late answer comes: that one counts for nothing.
    agents[0].peers_gone(vec![gone.turned()]);
    agents[0].answer(&question, PeerVerdict::Confirmed);
    left.program.post(&mut left.qp, send(1), &[memory.sge(0, 64)]);
    assert_eq!(left.queue.wait().status, RETRY_EXC_ERR);
    assert_eq!((a.stats.read().tx_packets, b.stats.read().rx_packets), (0, 0));
    // It is told again until it is heard of, and by the next agent at once.
    assert_eq!(agents[1].gone(), gone);
    let [_, there] = agents;
    drop(there);
    let there = PeerAgent::of(&b);
    assert_eq!(there.gone(), gone);
    // More queue pairs than wait before a number is given again.
    let others = End::new(&b);
    for _ in 0..1200 {
        let other = others.program.qp(&others.queue, CAP).qpn;
        assert_ne!(other, qpn);
        let reply = others.program.call(Request::DestroyQp { qpn: other });
        assert!(matches!(reply, Reply::Done));
    }
    there.peers_heard(vec![gone]);
    assert_eq!(counter(&b, "numbers_kept_back"), 0);
}

/// A connection that was confirmed, whose other end is gone, sends nothing more.
#[test]
fn a_confirmed_connection_ends_with_its_other_end() {
    let [a, b] = hosts(11);
    let agent = PeerAgent::of(&a);
    let (mut left, right) = (End::new(&a), End::new(&b));
    let (from, to) = (memory_of(&left), memory_of(&right));
    left.program.connect_qp(&left.qp, b.address, right.qp.qpn);
    right.program.connect_qp(&right.qp, a.address, left.qp.qpn);
    let question = agent.question();
    agent.answer(&question, PeerVerdict::Confirmed);
    left.program
        .post(&mut left.qp, write(1, &to, 0), &[from.sge(0, 64)]);
    assert_eq!(left.queue.wait().status, SUCCESS);
    let mut stranger = question.pair;
    stranger.other.qpn ^= 1;
    agent.peers_gone(vec![stranger]);
    left.program
        .post(&mut left.qp, write(2, &to, 0), &[from.sge(0, 64)]);
    assert_eq!(left.queue.wait().status, SUCCESS);
    agent.peers_gone(vec![question.pair]);
    let sent = a.stats.read().tx_packets;
    left.program
        .post(&mut left.qp, write(3, &to, 0), &[from.sge(0, 64)]);
    assert_eq!(left.queue.wait().status, RETRY_EXC_ERR);
    assert_eq!(a.stats.read().tx_packets, sent);
}

/// A confirmed connection is asked about again: within a minute or so, and by the next agent soon. An agent that cannot say ends nothing, a no does.
#[test]
fn what_is_confirmed_is_asked_again() {
    let [a, b] = hosts(13);
    let agent = PeerAgent::of(&a);
    let (mut left, right) = (End::new(&a), End::new(&b));
    let (from, to) = (memory_of(&left), memory_of(&right));
    left.program.connect_qp(&left.qp, b.address, right.qp.qpn);
    right.program.connect_qp(&right.qp, a.address, left.qp.qpn);
    let first = agent.question();
    agent.answer(&first, PeerVerdict::Confirmed);
    let mut writes = || {
        left.program
            .post(&mut left.qp, write(1, &to, 0), &[from.sge(0, 64)]);
        left.queue.wait().status
    };
    assert_eq!(writes(), SUCCESS);
    drop(agent);
    let agent = PeerAgent::of(&a);
    let again = agent.question();
    assert_eq!((again.pair, again.again), (first.pair, false));
    agent.answer(&again, PeerVerdict::NotYet);
    assert_eq!(writes(), SUCCESS);
    let last = agent.question();
    assert_eq!(last.pair, first.pair);
    assert_eq!(
        (counter(&a, "peers_asked_about"), counter(&a, "peers_refused")),
        (0, 0)
    );
    agent.answer(&last, PeerVerdict::Refused);
    let sent = a.stats.read().tx_packets;
    assert_eq!(writes(), RETRY_EXC_ERR);
    assert_eq!(a.stats.read().tx_packets, sent);
    assert_eq!(counter(&a, "peers_refused"), 1);
}

/// What serves the host itself, a swap disk say, waits for no agent.
#[test]
fn the_host_s_own_services_ask_nobody() {
    let [a, b] = hosts(12);
    let _agent = PeerAgent::of(&a);
    let (mut left, right) = (End::new(&a), End::new(&b));
    let (from, to) = (memory_of(&left), memory_of(&right));
    assert!(matches!(left.program.call(Request::ServeHost), Reply::Done));
    left.qp = left.program.qp(&left.queue, CAP);
    left.program.connect_qp(&left.qp, b.address, right.qp.qpn);
    right.program.connect_qp(&right.qp, a.address, left.qp.qpn);
    left.program
        .post(&mut left.qp, write(1, &to, 0), &[from.sge(0, 64)]);
    assert_eq!(left.queue.wait().status, SUCCESS);
    assert_eq!(counter(&a, "peers_asked_about"), 0);
}

fn memory_of(end: &End) -> support::Memory {
    end.program.adopted(BYTES, ALL_ACCESS)
}

#[test]
fn two_ends_at_one_host_need_nobody_s_word() {
    let [a, _] = hosts(5);
    let agent = PeerAgent::of(&a);
    let (mut left, right) = (End::new(&a), End::new(&a));
    let (from, to) = (memory_of(&left), memory_of(&right));
    left.program.connect_qp(&left.qp, a.address, right.qp.qpn);
    left.program
        .post(&mut left.qp, write(1, &to, 0), &[from.sge(0, 64)]);
    wait_for("it to wait", || {
        (counter(&a, "peers_asked_about") == 1).then_some(())
    });
    assert_eq!(a.stats.read().tx_packets, 0);
    right.program.connect_qp(&right.qp, a.address, left.qp.qpn);
    assert_eq!(left.queue.wait().status, SUCCESS);
    // One that aims at somebody else's sends nothing.
    let mut stranger = End::new(&a);
    let sent = a.stats.read().tx_packets;
    stranger.program.connect_qp(&stranger.qp, a.address, right.qp.qpn);
    let memory = memory_of(&stranger);
    stranger
        .program
        .post(&mut stranger.qp, send(1), &[memory.sge(0, 64)]);
    assert_eq!(stranger.queue.wait().status, RETRY_EXC_ERR);
    assert_eq!(a.stats.read().tx_packets, sent);
    drop(agent);
}

/// An agent that comes when programs are connected already does not interrupt them; the next one has what waits.
#[test]
fn agents_come_and_go() {
    let [a, b] = hosts(6);
    let (mut left, right) = support::pair(&a, &b);
    let (from, to) = (memory_of(&left), memory_of(&right));
    let writes = |left: &mut End| {
        left.program
            .post(&mut left.qp, write(1, &to, 0), &[from.sge(0, 64)]);
        assert_eq!(left.queue.wait().status, SUCCESS);
    };
    let agent = PeerAgent::of(&a);
    let earlier = agent.question();
    assert_eq!(earlier.pair.own.qpn, left.qp.qpn);
    writes(&mut left);
    agent.answer(&earlier, PeerVerdict::NotYet);
    writes(&mut left);
    drop(agent);
    let mut new = End::new(&a);
    new.program.connect_qp(&new.qp, b.address, 0x77);
    let memory = memory_of(&new);
    new.program.post(&mut new.qp, send(1), &[memory.sge(0, 64)]);
    let agent = PeerAgent::of(&a);
    let asked = [agent.question().pair.own.qpn, agent.question().pair.own.qpn];
    assert!(
        asked.contains(&left.qp.qpn) && asked.contains(&new.qp.qpn),
        "{asked:?}"
    );
    writes(&mut left);
    assert!(new.queue.poll().is_none());
    // Whoever ends is not asked about any more.
    drop((new, left));
    wait_for("nothing to be asked about", || {
        (counter(&a, "peers_asked_about") == 0).then_some(())
    });
}

/// Without an agent nobody could answer: nothing waits.
#[test]
fn without_an_agent_nothing_waits() {
    let [a, b] = hosts(7);
    let mut left = End::new(&a);
    left.program.connect_qp(&left.qp, b.address, 0x77);
    let memory = memory_of(&left);
    left.program.post(&mut left.qp, send(1), &[memory.sge(0, 64)]);
    b.wait_for("its packets", |counters| counters.rx_unknown_qp > 0);
    let _ = Program::connect(&a.socket(), "test");
}
