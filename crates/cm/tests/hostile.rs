//! Peers that send anything, and more than anybody can keep.

mod world;

use proptest::prelude::*;
use verbatim_cm::wire::{MAD_BYTES, Mad, Message, Req};
use verbatim_cm::{
    Cm, CommId, Config, DropReason, Event, Limits, Listen, Outcome, Owner, PortSpace, Qpn, ServiceId, State,
    Time,
};
use world::{Connected, Faults, OWNER, World, accept, connect, gid, listen, resolve};

fn limited(limits: Limits) -> Cm {
    Cm::new(Config {
        limits,
        ..world::config(1)
    })
}

/// The REQ of another peer each time.
fn req(number: u32) -> Vec<u8> {
    let mut cm = Cm::new(world::config(0));
    cm.connect(Time::ZERO, OWNER, &connect(0, 1, number)).unwrap();
    let sent = cm.poll_transmit().unwrap();
    let mut mad = Mad::parse(&*sent.bytes).unwrap();
    let Message::Req(req) = &mut mad.message else {
        panic!("it is a REQ");
    };
    req.local_comm_id = CommId(number);
    mad.emit().to_vec()
}

fn ask(cm: &mut Cm, number: u32) -> Outcome {
    cm.handle_mad(Time::ZERO, gid(0), gid(1), &req(number), &Connected::default())
}

#[test]
fn a_backlog_is_a_limit() {
    let mut cm = Cm::new(world::config(1));
    let two = Listen {
        backlog: 2,
        ..listen(PortSpace::TCP)
    };
    cm.listen(OWNER, &two).unwrap();
    assert_eq!([ask(&mut cm, 1), ask(&mut cm, 2)], [Outcome::Taken; 2]);
    assert_eq!(ask(&mut cm, 3), Outcome::Dropped(DropReason::Backlog));
    assert_eq!(cm.poll_transmit(), None, "it is not rejected: it may come again");
    assert_eq!(ask(&mut cm, 2), Outcome::Taken, "a repetition is no more");
    // The event alone does not make room, only that the program has it.
    let first = cm.poll_event().unwrap().id;
    assert_eq!(ask(&mut cm, 3), Outcome::Dropped(DropReason::Backlog));
    cm.taken(first);
    cm.taken(first);
    assert_eq!(ask(&mut cm, 3), Outcome::Taken);
    assert_eq!(ask(&mut cm, 4), Outcome::Dropped(DropReason::Backlog));
    cm.destroy(Time::ZERO, first).unwrap();
    assert_eq!(
        ask(&mut cm, 4),
        Outcome::Dropped(DropReason::Backlog),
        "it had room already"
    );
    let second = cm.poll_event().unwrap().id;
    cm.destroy(Time::ZERO, second).unwrap();
    assert_eq!(ask(&mut cm, 4), Outcome::Taken);
    assert_eq!(cm.counters().dropped_backlog, 4);
}

#[test]
fn a_listener_that_ends_rejects_what_nobody_has_taken() {
    let mut cm = Cm::new(world::config(1));
    let listener = cm.listen(OWNER, &listen(PortSpace::TCP)).unwrap();
    for number in 1..4 {
        ask(&mut cm, number);
    }
    let taken = cm.poll_event().unwrap().id;
    cm.taken(taken);
    cm.destroy(Time::ZERO, listener).unwrap();
    assert_eq!(cm.poll_event(), None);
    assert_eq!(cm.ids_of(OWNER), [taken]);
    let rejected = std::iter::from_fn(|| cm.poll_transmit()).count();
    assert_eq!(rejected, 2);
}

#[test]
fn all_together_have_limits() {
    let limits = Limits {
        ids: 6,
        ids_per_owner: 4,
        pending: 3,
        lingering: 2,
        away: 2,
    };
    let mut cm = limited(limits);
    cm.listen(OWNER, &listen(PortSpace::TCP)).unwrap();
    assert_eq!(
        [ask(&mut cm, 1), ask(&mut cm, 2), ask(&mut cm, 3)],
        [Outcome::Taken; 3]
    );
    assert_eq!(
        ask(&mut cm, 4),
        Outcome::Dropped(DropReason::Limits),
        "three of one owner"
    );
    let other = |number| Listen {
        service: ServiceId(number),
        ..listen(PortSpace::TCP)
    };
    assert!(cm.listen(OWNER, &other(1)).is_err());
    for number in 1..3 {
        cm.listen(Owner(7), &other(number)).unwrap();
    }
    assert!(cm.listen(Owner(7), &other(3)).is_err(), "six in all");
    // What is left of destroyed ids is limited, too.
    for id in cm.ids_of(OWNER) {
        if cm.state(id) == Some(State::ReqReceived) {
            cm.destroy(Time::ZERO, id).unwrap();
        }
    }
    assert_eq!((cm.len(), cm.counters().forgotten), (5, 1));
    // And what has gone away.
    let mut gone = Vec::new();
    for number in 5..8 {
        assert_eq!(ask(&mut cm, number), Outcome::Taken);
        let id = cm.poll_event().unwrap().id;
        cm.take(Time::ZERO, id).unwrap();
        gone.push(id);
    }
    assert_eq!(ask(&mut cm, 7), Outcome::Away(gone[2]));
    assert_eq!(ask(&mut cm, 6), Outcome::Away(gone[1]));
    assert_eq!(
        ask(&mut cm, 5),
        Outcome::Taken,
        "the first is forgotten, and asks anew"
    );
}

/// One end of everything that there can be, as a target.
fn busy() -> (World, Vec<CommId>) {
    let mut world = World::new(2, Faults::default(), 0);
    for space in [PortSpace::TCP, PortSpace::UDP] {
        world.hosts[0].listen(OWNER, &listen(space)).unwrap();
        world.hosts[1].listen(OWNER, &listen(space)).unwrap();
    }
    for qpn in 0..6 {
        for (from, to) in [(0, 1), (1, 0)] {
            world.hosts[from]
                .connect(world.now, OWNER, &connect(from, to, 0x11 + qpn))
                .unwrap();
        }
    }
    world.hosts[0].resolve(world.now, OWNER, &resolve(0, 1)).unwrap();
    world.hosts[1].resolve(world.now, OWNER, &resolve(1, 0)).unwrap();
    world.settle();
    for host in [0, 1] {
        let mut number = 0;
        while let Some(notice) = world.event(host) {
            if let Event::ConnectRequest(_) = notice.event {
                number += 1;
                if number > 1 {
                    world.hosts[host]
                        .accept(world.now, notice.id, &accept(0x80 + number))
                        .unwrap();
                }
            }
        }
    }
    world.settle();
    for host in [0, 1] {
        let mut number = 0;
        while let Some(notice) = world.event(host) {
            if let Event::ConnectResponse(_) = notice.event {
                number += 1;
                if number > 1 {
                    world.hosts[host].establish(world.now, notice.id, &[]).unwrap();
                }
                if number > 3 {
                    world.hosts[host].disconnect(world.now, notice.id, &[]).unwrap();
                }
            }
        }
    }
    let ids = world.hosts[0].ids_of(OWNER);
    (world, ids)
}

#[test]
fn the_target_is_busy() {
    let (world, ids) = busy();
    let mut states: Vec<String> = ids
        .iter()
        .map(|id| format!("{:?}", world.hosts[0].state(*id).unwrap()))
        .collect();
    states.sort();
    states.dedup();
    let all = [
        "DreqSent",
        "Established",
        "Listening",
        "RepReceived",
        "RepSent",
        "ReqReceived",
        "ReqSent",
        "SidrReqReceived",
        "SidrReqSent",
    ];
    assert_eq!(states, all);
}

/// A message whose numbers may be right.
fn plausible(ids: Vec<CommId>, others: Vec<CommId>) -> impl Strategy<Value = Vec<u8>> {
    let numbers = prop::sample::select(ids);
    let others = prop::sample::select(others);
    let bytes = prop::collection::vec(any::<u8>(), MAD_BYTES);
    (0x10u8..0x19, numbers, others, bytes, any::<u8>()).prop_map(|(attribute, id, other, mut bytes, how)| {
        bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
        bytes[16..18].copy_from_slice(&[0, attribute]);
        let own = if matches!(attribute, 0x10 | 0x17 | 0x18) {
            24
        } else {
            28
        };
        bytes[own..own + 4].copy_from_slice(&id.0.to_be_bytes());
        if own == 28 {
            bytes[24..28].copy_from_slice(&other.0.to_be_bytes());
        }
        if how & 1 == 0 {
            bytes[32] &= 0xc0; // of REJ and MRA: about which message
        }
        if attribute == 0x10 || attribute == 0x17 {
            let space = if how & 2 == 0 {
                PortSpace::TCP
            } else {
                PortSpace::UDP
            };
            let service = ServiceId::of_port(space, world::PORT);
            bytes[32..40].copy_from_slice(&service.0.to_be_bytes());
        }
        bytes
    })
}

fn input() -> impl Strategy<Value = Vec<u8>> {
    let (world, ids) = busy();
    let others = world.hosts[1].ids_of(OWNER);
    prop_oneof![
        4 => plausible(ids, others),
        1 => prop::collection::vec(any::<u8>(), 0..300),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Nothing panics, no id gets stuck, and everything can still be ended.
    #[test]
    fn invented_messages(inputs in prop::collection::vec((input(), 0usize..3), 1..80)) {
        let (mut world, _) = busy();
        for (bytes, steps) in inputs {
            let now = world.now;
            world.hosts[0].handle_mad(now, gid(1), gid(0), &bytes, &world.queue_pairs[0]);
            for _ in 0..steps {
                world.step();
            }
            while world.event(0).is_some() {}
        }
        for host in [0, 1] {
            world.hosts[host].destroy_owner(world.now, OWNER);
        }
        while world.step() {}
        world.assert_over(0);
    }
}

/// A REQ with every value in each of its small fields.
#[test]
fn any_field_of_a_req() {
    let good = req(1);
    let Ok(Mad {
        message: Message::Req(parsed),
        ..
    }) = Mad::parse(&good)
    else {
        panic!("it is a REQ");
    };
    assert_eq!(
        *parsed,
        Req {
            qpn: Qpn::new(1),
            ..*parsed.clone()
        }
    );
    for at in [67, 71, 74, 75, 118, 119] {
        for value in 0..=255 {
            let mut bytes = good.clone();
            bytes[at] = value;
            let mut cm = Cm::new(world::config(1));
            cm.listen(OWNER, &listen(PortSpace::TCP)).unwrap();
            if cm.handle_mad(Time::ZERO, gid(0), gid(1), &bytes, &Connected::default()) == Outcome::Taken {
                let id = cm.poll_event().unwrap().id;
                cm.accept(Time::ZERO, id, &accept(1)).unwrap();
                let mut sent = 0;
                while let Some(due) = cm.next_deadline() {
                    cm.handle_timeout(due);
                    while cm.poll_transmit().is_some() {
                        sent += 1;
                    }
                }
                assert!(sent <= 17, "{at} {value}: {sent}");
            } else {
                let mad = Mad::parse(&*cm.poll_transmit().unwrap().bytes);
                assert!(matches!(
                    mad,
                    Ok(Mad {
                        message: Message::Rej(_),
                        ..
                    })
                ));
            }
        }
    }
}
