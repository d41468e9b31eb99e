//! Pause and resume: what is sent and what is not, who waits and for how long, and what is not believed.

mod pair;

use std::time::Duration;

use pair::exchange::{LONG, SHORT, busy, elsewhere, finish, one_moves, small_steps, trace};
use pair::world::World;
use pair::{SEND, Setup, Side, sge, write};
use verbatim_roce::wire::aeth::Syndrome;
use verbatim_roce::wire::opcode::{Kind, Opcode};
use verbatim_roce::{
    Flow, Location, Packet, QpState, Qpn, Queue, Secret, SecretEnd, Standing, Time, VENDOR_ERR_PAUSED,
    VENDOR_ERR_RESUMING, WcStatus,
};

/// Counts the packets of a kind that are sent, and lets all of them through.
fn count_opcode(world: &mut World, opcode: Opcode) -> std::rc::Rc<std::cell::RefCell<Vec<Time>>> {
    let seen = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
    let times = seen.clone();
    world.filter = Some(Box::new(move |now, packet| {
        if packet.bth.opcode == opcode {
            times.borrow_mut().push(now);
        }
        true
    }));
    seen
}

#[test]
fn a_stopped_one_is_silent_but_for_naks_and_its_partner_waits() {
    let mut world = busy(small_steps());
    for _ in 0..20 {
        world.step();
    }
    let now = world.now;
    assert!(world.end(Side::A).qp.halt(now));
    assert_eq!(world.end(Side::A).qp.next_timeout(), None);
    let done = world.end(Side::A).host.completions.len();
    world.run_for(SHORT);
    assert_eq!(world.end(Side::A).qp.standing(), Standing::Stopped);
    assert_eq!(world.end(Side::B).qp.standing(), Standing::Paused);
    for side in [Side::A, Side::B] {
        let end = world.end(side);
        let query = end.qp.query();
        assert_eq!(
            (query.state, query.cur_state),
            (Some(QpState::Rts), Some(QpState::Rts))
        );
    }
    let naks = world.end(Side::A).qp.migration_counters().sent_stop_naks;
    assert!(naks > 0);
    let sent = world.end(Side::B).qp.counters().sent_requests;
    world.run_for(LONG);
    let counters = *world.end(Side::B).qp.counters();
    assert_eq!(
        (counters.sent_requests, counters.local_ack_timeout_err),
        (sent, 0)
    );
    assert_eq!(world.end(Side::B).qp.migration_counters().pauses, 1);
    assert_eq!(world.end(Side::A).qp.migration_counters().sent_stop_naks, naks);
    assert_eq!(
        world.end(Side::A).host.completions.len(),
        done,
        "it completes nothing"
    );
}

#[test]
fn who_waits_too_long_fails_and_says_why() {
    let limit = Duration::from_secs(3);
    let setup = Setup {
        config: verbatim_roce::QpConfig {
            pause_limit: limit,
            ..Setup::default().config
        },
        ..small_steps()
    };
    // B waits for A, which is stopped and never comes back.
    let mut world = busy(setup);
    for _ in 0..20 {
        world.step();
    }
    let now = world.now;
    assert!(world.end(Side::A).qp.halt(now));
    world.run_for(SHORT);
    let paused_at = world.now;
    world.run_until(paused_at + (limit - Duration::from_millis(1)));
    assert_eq!(world.end(Side::B).qp.state(), QpState::Rts);
    world.run();
    assert!(world.now < paused_at + limit + Duration::from_millis(1));
    let end = world.end(Side::B);
    assert_eq!(end.qp.state(), QpState::Err);
    let failed = end.host.completions.iter().filter(|wc| wc.queue == Queue::Send);
    let failed: Vec<_> = failed.filter(|wc| wc.status != WcStatus::Success).collect();
    assert_eq!(
        (failed[0].status, failed[0].vendor_err),
        (WcStatus::RetryExcErr, VENDOR_ERR_PAUSED)
    );
    assert!(
        failed[1..]
            .iter()
            .all(|wc| (wc.status, wc.vendor_err) == (WcStatus::WrFlushErr, 0))
    );
    assert_eq!(end.qp.migration_counters().pause_limit_exceeded, 1);

    // A goes on elsewhere, and nobody acknowledges it.
    let mut world = busy(setup);
    let moving = world.take_out(Side::A);
    world.filter = Some(Box::new(|_, packet| packet.bth.opcode != Opcode::RC_RESUME));
    world.put_in(Side::A, moving, elsewhere(Side::A, 0, 0x11));
    world.run();
    let end = world.end(Side::A);
    assert_eq!(end.qp.state(), QpState::Err);
    let first = end
        .host
        .completions
        .iter()
        .find(|wc| wc.queue == Queue::Send)
        .unwrap();
    assert_eq!(
        (first.wr_id, first.status, first.vendor_err),
        (0, WcStatus::RetryExcErr, VENDOR_ERR_RESUMING)
    );
}

/// As one that has not moved: it finds out when it has something to say.
#[test]
fn who_resumes_in_vain_with_nothing_to_send_goes_on() {
    let mut world = World::new(small_steps());
    for (side, key) in [(Side::A, 1), (Side::B, 2)] {
        world.end(side).host.register(key, 0, vec![0; 4096]);
        world.end(side).host.post_receive(0, &[sge(key, 0, 100)]);
    }
    let moving = world.take_out(Side::A);
    world.filter = Some(Box::new(|_, packet| packet.bth.opcode != Opcode::RC_RESUME));
    world.put_in(Side::A, moving, elsewhere(Side::A, 0, 0x11));
    world.run();
    let end = world.end(Side::A);
    assert_eq!(
        (end.qp.state(), end.qp.standing()),
        (QpState::Rts, Standing::Running)
    );
    assert!(end.host.events.is_empty() && end.host.outcomes(Queue::Receive).is_empty());
    assert_eq!(end.qp.migration_counters().pause_limit_exceeded, 1);
    assert_eq!(end.qp.counters().retry_exceeded_err, 0);
}

#[test]
fn resume_is_repeated_ever_more_rarely_until_it_is_acknowledged() {
    let mut world = busy(small_steps());
    let moving = world.take_out(Side::A);
    let seen = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
    let times = seen.clone();
    world.filter = Some(Box::new(move |now, packet| {
        let resume = packet.bth.opcode == Opcode::RC_RESUME;
        if resume {
            times.borrow_mut().push(now);
        }
        let lost = resume && times.borrow().len() <= 9;
        !lost
    }));
    world.run_for(SHORT);
    assert_eq!(world.end(Side::B).qp.standing(), Standing::Paused);
    world.put_in(Side::A, moving, elsewhere(Side::A, 0, 0x11));
    world.run();
    let seen = seen.borrow();
    let gaps: Vec<u128> = seen.windows(2).map(|two| (two[1] - two[0]).as_millis()).collect();
    assert_eq!(gaps, [1, 2, 4, 8, 16, 32, 64, 64, 64], "the tenth was the last");
    assert_eq!(world.end(Side::A).qp.migration_counters().rcvd_resume_acks, 1);
}

/// The next migration begins, with a secret of its own, before the partner has heard of the last one.
#[test]
fn a_secret_that_changes_while_it_says_where_it_is() {
    let plain = finish(busy(small_steps()));
    let mut world = busy(small_steps());
    let moving = world.take_out(Side::A);
    world.filter = Some(Box::new(|_, packet| packet.bth.opcode != Opcode::RC_RESUME));
    world.run_for(SHORT);
    world.put_in(Side::A, moving, elsewhere(Side::A, 0, 0x11));
    world.run_for(Duration::from_millis(50));
    assert_eq!(world.end(Side::A).qp.standing(), Standing::Resuming);
    for (side, end) in [(Side::A, SecretEnd::Second), (Side::B, SecretEnd::First)] {
        let secret = Secret::new([0x99; 32], end);
        world.end(side).qp.set_secret(Some(secret));
    }
    world.filter = None;
    assert!(finish(world) == plain);
}

#[test]
fn an_idle_connection_moves_with_one_resume_and_one_acknowledgement() {
    let mut world = World::new(small_steps());
    one_moves(&mut world, Side::A, LONG, 0x41);
    world.run();
    let counters = *world.end(Side::A).qp.migration_counters();
    assert_eq!((counters.sent_resumes, counters.rcvd_resume_acks), (1, 1));
    let counters = *world.end(Side::B).qp.migration_counters();
    assert_eq!(
        (counters.rcvd_resumes, counters.sent_resume_acks, counters.pauses),
        (1, 1, 0)
    );
}

/// Nothing that a partner could not know is sent to it: it may be the kernel's or a card's.
#[test]
fn without_a_secret_nothing_new_is_on_the_wire() {
    let mut world = busy(small_steps());
    for side in [Side::A, Side::B] {
        world.end(side).qp.set_secret(None);
    }
    world.filter = Some(Box::new(|_, packet| {
        assert!(packet.bth.opcode.0 <= 0x17, "{:?}", packet.bth.opcode);
        assert_ne!(packet.aeth.map(|aeth| aeth.syndrome), Some(Syndrome::Stopped));
        true
    }));
    let plain = finish(busy(small_steps()));
    for _ in 0..40 {
        world.step();
    }
    let now = world.now;
    assert!(world.end(Side::A).qp.halt(now));
    world.run_for(Duration::from_micros(300));
    let now = world.now;
    world.end(Side::A).qp.resume(now);
    assert!(finish(world) == plain);
}

/// What whoever sees the packets and can send his own does with them.
#[test]
fn forged_replayed_and_reflected_messages_are_counted_and_ignored() {
    let mut world = busy(small_steps());
    let captured = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
    let into = captured.clone();
    for _ in 0..20 {
        world.step();
    }
    world.capture = Some(Box::new(move |_, to, bytes| {
        if Packet::parse(bytes).unwrap().info.kind == Kind::Migration {
            into.borrow_mut().push((to, bytes.to_vec()));
        }
    }));
    let [a, b] = world.at;
    one_moves(&mut world, Side::A, SHORT, 0x55);
    world.run_for(Duration::from_millis(1));
    world.capture = None;
    let messages = captured.take();
    let to_b = messages.iter().filter(|(to, _)| *to == b.address).count();
    assert!(
        to_b >= 2 && messages.len() > to_b,
        "stop NAK, RESUME, and its acknowledgement"
    );
    let [before_a, before_b] = [Side::A, Side::B].map(|side| *world.end(side).qp.migration_counters());
    assert_eq!((before_a.migration_replayed, before_b.migration_replayed), (0, 0));

    let now_a = world.at[0];
    let resealed = |bytes: &[u8], qpn: Qpn, change: usize, flow: &Flow| {
        let mut bytes = bytes.to_vec();
        bytes[5..8].copy_from_slice(&qpn.get().to_be_bytes()[1..]);
        if change > 0 {
            bytes[change] ^= 1;
        }
        let end = bytes.len() - 4;
        let icrc = flow.icrc(&bytes[..end], 0);
        bytes[end..].copy_from_slice(&icrc.to_le_bytes());
        bytes
    };
    let way = |from: Location, to: Location| pair::world::flow(from.address, to.address);
    for (to, bytes) in &messages {
        // Again; to the one who has sent it; and with each byte changed behind the base transport header.
        let (from, to) = if *to == b.address { (a, b) } else { (b, now_a) };
        let other = if to == b { now_a } else { b };
        world.inject(
            to.address,
            from.address,
            resealed(bytes, to.qpn, 0, &way(from, to)),
        );
        world.inject(
            other.address,
            to.address,
            resealed(bytes, other.qpn, 0, &way(to, other)),
        );
        for at in 12..bytes.len() - 4 {
            world.inject(
                to.address,
                from.address,
                resealed(bytes, to.qpn, at, &way(from, to)),
            );
        }
    }
    let injected_standing = [Side::A, Side::B].map(|side| world.end(side).qp.standing());
    assert_eq!(injected_standing, [Standing::Running; 2]);
    let others = messages.len() as u64;
    world.run();
    let [after_a, after_b] = [Side::A, Side::B].map(|side| *world.end(side).qp.migration_counters());
    let replayed = after_a.migration_replayed + after_b.migration_replayed;
    assert!(replayed >= others, "{replayed} of {others}");
    assert!(after_a.migration_forged + after_b.migration_forged > 50 * others);
    assert_eq!(after_b.pauses, before_b.pauses);
    assert_eq!(
        (after_a.pauses, after_a.rcvd_resumes, after_b.rcvd_resumes),
        (0, 0, 1)
    );
    assert!(trace(&mut world) == finish(busy(small_steps())));
}

#[test]
fn a_place_to_which_there_is_no_way_is_refused_until_there_is_one() {
    let mut world = busy(small_steps());
    world.end(Side::B).host.no_way = true;
    one_moves(&mut world, Side::A, SHORT, 0x55);
    world.run_for(Duration::from_millis(20));
    assert_eq!(world.end(Side::A).qp.standing(), Standing::Resuming);
    assert!(world.end(Side::B).qp.migration_counters().migration_refused > 2);
    world.end(Side::B).host.no_way = false;
    assert!(finish(world) == finish(busy(small_steps())));
}

/// One that was stopped before it could send anything moves too: its program has not gone to RTS yet.
#[test]
fn a_half_connected_one_moves() {
    let setup = small_steps();
    let mut world = busy(setup);
    let plain = finish(busy(setup));
    // A is taken back to RTR, with the same host.
    let [init, rtr, rts] = pair::steps(&setup, Side::A);
    let end = world.end(Side::A);
    let mut host = pair::TestHost::new();
    let mut qp = verbatim_roce::RcQp::new(pair::qpn(Side::A), setup.config);
    for step in [init, rtr] {
        qp.modify(&step, &mut host).unwrap();
    }
    qp.set_secret(Some(pair::world::secret(Side::A)));
    end.qp = qp;
    for _ in 0..12 {
        world.step();
    }
    one_moves(&mut world, Side::A, SHORT, 0x56);
    world.run_for(Duration::from_millis(3));
    let end = world.end(Side::A);
    assert_eq!(
        (end.qp.state(), end.qp.standing()),
        (QpState::Rtr, Standing::Running)
    );
    end.host.events.clear();
    end.qp.modify(&rts, &mut end.host).unwrap();
    assert!(finish(world) == plain);
}

/// It goes on waiting for the RECV that was missing, and is not asked more often than it may be.
#[test]
fn a_wait_for_a_receive_moves() {
    let setup = Setup {
        rnr_retry: 3,
        min_rnr_timer: 20,
        ..small_steps()
    };
    let mut world = World::new(setup);
    for (side, key) in [(Side::A, 1), (Side::B, 2)] {
        world.end(side).host.register(key, 0, vec![3; 4096]);
    }
    world.end(Side::A).host.post(0, SEND, &[sge(1, 0, 100)]);
    while world.end(Side::A).qp.counters().rcvd_rnr_nak == 0 {
        assert!(world.step());
    }
    let asked_at = world.now;
    world.run_for(Duration::from_millis(1));
    let moving = world.take_out(Side::A);
    world.run_for(LONG);
    let back_at = world.now;
    world.put_in(Side::A, moving, elsewhere(Side::A, 0, 0x11));
    let seen = count_opcode(&mut world, Opcode::RC_SEND_ONLY);
    world.run_for(Duration::from_millis(12));
    // Code 20 is 10.24 ms (IBA §9.7.5.2.8), of which 1 ms had passed.
    let wait = seen.borrow()[0] - back_at;
    assert!(
        wait >= Duration::from_micros(9_240) && wait < Duration::from_millis(10),
        "{wait:?}"
    );
    assert!(asked_at < back_at);
    world.end(Side::B).host.post_receive(0, &[sge(2, 0, 100)]);
    world.run();
    assert_eq!(
        world.end(Side::A).host.outcomes(Queue::Send),
        [(0, WcStatus::Success)]
    );
    // The three retries are those of both stays together.
    let mut world = World::new(setup);
    for (side, key) in [(Side::A, 1), (Side::B, 2)] {
        world.end(side).host.register(key, 0, vec![3; 4096]);
    }
    world.end(Side::A).host.post(0, SEND, &[sge(1, 0, 100)]);
    while world.end(Side::B).qp.counters().sent_rnr_nak < 2 {
        assert!(world.step());
    }
    one_moves(&mut world, Side::A, SHORT, 0x11);
    world.run();
    assert_eq!(
        world.end(Side::A).host.outcomes(Queue::Send),
        [(0, WcStatus::RnrRetryExcErr)]
    );
    let naks = world.end(Side::B).qp.counters().sent_rnr_nak;
    assert!((4..=5).contains(&naks), "{naks}");
}

/// The connection was at its end when it was stopped: the partner is still told why.
#[test]
fn a_refusal_moves() {
    let mut world = World::new(small_steps());
    world.end(Side::A).host.register(1, 0, vec![3; 4096]);
    world
        .end(Side::A)
        .host
        .post(0, write(0x9000, 77), &[sge(1, 0, 100)]);
    while world.end(Side::B).host.events.is_empty() {
        assert!(world.step());
    }
    one_moves(&mut world, Side::B, SHORT, 0x22);
    world.run();
    assert_eq!(
        world.end(Side::A).host.outcomes(Queue::Send),
        [(0, WcStatus::RemAccessErr)]
    );
    for side in [Side::A, Side::B] {
        assert_eq!(world.end(side).qp.state(), QpState::Err);
    }
}

/// An operator's pause: both ends are stopped, for longer than all their retries last, and nobody says that they shall go on.
#[test]
fn what_is_stopped_for_a_time_goes_on_by_itself() {
    let plain = finish(busy(small_steps()));
    let time = Duration::from_secs(600);
    for steps in [0, 7, 20, 60] {
        let mut world = busy(small_steps());
        for _ in 0..steps {
            world.step();
        }
        let now = world.now;
        for side in [Side::A, Side::B] {
            let qp = &mut world.end(side).qp;
            qp.limit_halt(now, Some(now));
            assert!(qp.halt(now), "what is not stopped has no limit");
            // The latest counts.
            qp.limit_halt(now, Some(now + SHORT));
            qp.limit_halt(now, Some(now + time));
        }
        world.run_for(time - SHORT);
        for side in [Side::A, Side::B] {
            assert_eq!(world.end(side).qp.standing(), Standing::Stopped);
        }
        world.run();
        assert_eq!(trace(&mut world), plain, "after {steps} steps");
        assert!(world.now >= now + time);
    }
}
