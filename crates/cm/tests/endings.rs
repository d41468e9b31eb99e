//! How connections end: by a program, by its death, by a peer that has forgotten them.

mod world;

use std::time::Duration;

use verbatim_cm::wire::RejectReason;
use verbatim_cm::{CommId, Event, State};
use world::story::{DREQ, REJ, accepted, asked, established, world};
use world::{OWNER, World, connect, gid};

#[test]
fn both_disconnect_at_once() {
    let (mut world, _) = world();
    let (active, passive) = established(&mut world);
    world.hosts[0].disconnect(world.now, active, &[]).unwrap();
    world.hosts[1].disconnect(world.now, passive, &[]).unwrap();
    while world.step() {}
    for host in [0, 1] {
        assert!(matches!(
            world.event(host).unwrap().event,
            Event::Disconnected { timed_out: false, .. }
        ));
        assert_eq!(world.event(host).unwrap().event, Event::TimeWaitExit);
        assert_eq!(world.event(host), None);
    }
}

#[test]
fn nobody_answers_the_dreq() {
    let (mut world, _) = world();
    let (active, _) = established(&mut world);
    world.mute = Some(0);
    world.hosts[0].disconnect(world.now, active, &[]).unwrap();
    while world.step() {}
    assert!(matches!(
        world.event(0).unwrap().event,
        Event::Disconnected { timed_out: true, .. }
    ));
    assert_eq!(world.event(0).unwrap().event, Event::TimeWaitExit);
}

/// What the peer is told when an id is destroyed at each state, and what it makes of it.
#[test]
fn destroyed_at_any_state() {
    type Story = fn(&mut World) -> (CommId, CommId);
    let rejected = |event: Event| matches!(event, Event::Rejected { .. });
    let disconnected = |event: Event| matches!(event, Event::Disconnected { .. });
    let check = |story: Story, who: usize, message: u8, seen: &dyn Fn(Event) -> bool| {
        let (mut world, _) = world();
        let ids = story(&mut world);
        let ids = [ids.0, ids.1];
        let before = world.sent.len();
        world.hosts[who].destroy(world.now, ids[who]).unwrap();
        assert_eq!(world.hosts[who].state(ids[who]), None);
        assert_eq!(world.hosts[who].owner(ids[who]), None);
        world.settle();
        assert_eq!(world.sent[before], (who, message));
        assert!(
            seen(world.event(1 - who).expect("the peer is told").event),
            "{message:#x}"
        );
        while world.step() {}
        while world.event(1 - who).is_some() {}
        assert_eq!(world.event(who), None, "nobody is there to be told");
        world.hosts[1 - who].destroy(world.now, ids[1 - who]).unwrap();
        while world.step() {}
        world.assert_over(1);
    };
    check(asked, 0, REJ, &rejected);
    check(asked, 1, REJ, &rejected);
    check(accepted, 0, REJ, &rejected);
    check(accepted, 1, REJ, &rejected);
    check(established, 0, DREQ, &disconnected);
    check(established, 1, DREQ, &disconnected);
}

/// The DREQ of a destroyed id is repeated until it is answered.
#[test]
fn a_destroyed_connection_still_ends_at_the_peer() {
    let (mut world, _) = world();
    let (active, passive) = established(&mut world);
    world.mute = Some(0);
    world.hosts[0].destroy(world.now, active).unwrap();
    world.run_for(Duration::from_secs(2));
    assert_eq!(world.event(1), None);
    world.mute = None;
    world.run_for(Duration::from_secs(2));
    assert!(matches!(
        world.event(1).unwrap().event,
        Event::Disconnected { .. }
    ));
    world.hosts[1].destroy(world.now, passive).unwrap();
    while world.step() {}
    world.assert_over(1);
}

/// The peer has started anew and takes the queue pair for another connection.
#[test]
fn a_stale_connection_ends() {
    let (mut world, _) = world();
    let (_, passive) = established(&mut world);
    let mut config = world::config(0);
    config.first_comm_id = 0x7000_0000;
    world.hosts[0] = verbatim_cm::Cm::new(config);
    let again = world.hosts[0]
        .connect(world.now, OWNER, &connect(0, 1, 0x11))
        .unwrap();
    world.settle();
    let event = world.event(0).unwrap().event;
    assert!(
        matches!(
            event,
            Event::Rejected {
                reason: RejectReason::STALE_CONNECTION,
                ..
            }
        ),
        "{event:?}"
    );
    assert_eq!(world.hosts[0].state(again), Some(State::TimeWait));
    let notice = world.event(1).unwrap();
    assert_eq!(notice.id, passive);
    assert!(matches!(
        notice.event,
        Event::Disconnected { timed_out: false, .. }
    ));
    // From now on it may.
    world.hosts[0]
        .connect(world.now, OWNER, &connect(0, 1, 0x11))
        .unwrap();
    world.settle();
    assert!(matches!(world.event(1).unwrap().event, Event::ConnectRequest(_)));
}

/// Whoever says so from elsewhere ends nothing.
#[test]
fn not_stale_by_hearsay() {
    let (mut world, _) = world();
    let (_, passive) = established(&mut world);
    let mut liar = verbatim_cm::Cm::new(verbatim_cm::Config {
        first_comm_id: 0x7000_0000,
        ..world::config(0)
    });
    liar.connect(world.now, OWNER, &connect(0, 1, 0x11)).unwrap();
    let req = liar.poll_transmit().unwrap();
    world.hosts[1].handle_mad(world.now, gid(7), gid(1), &*req.bytes, &world.queue_pairs[1]);
    world.settle();
    assert!(matches!(world.event(1).unwrap().event, Event::ConnectRequest(_)));
    assert_eq!(world.hosts[1].state(passive), Some(State::Established));
}
