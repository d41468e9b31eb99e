//! An id goes to another RNIC at each state, and the handshake goes on there: both ends, one after the other.

mod world;

use std::time::Duration;

use verbatim_cm::wire::{RejectReason, SidrStatus};
use verbatim_cm::{
    AdoptError, Answer, Cm, CommId, Error, Event, IdImage, Limits, Listen, ListenAddress, PortSpace, Qpn,
    State, Time,
};
use world::{Faults, OWNER, World, accept, connect, gid, listen, resolve};

const OLD: [usize; 2] = [0, 1];
const NEW: [usize; 2] = [2, 3];

/// A connection of which each end may be at its old or its new place.
struct Ends {
    world: World,
    ids: [Option<CommId>; 2],
    moved: [bool; 2],
}

impl Ends {
    fn new() -> Ends {
        let mut world = World::new(4, Faults::default(), 0);
        world.hosts[1].listen(OWNER, &listen(PortSpace::TCP)).unwrap();
        Ends {
            world,
            ids: [None; 2],
            moved: [false; 2],
        }
    }

    fn place(&self, side: usize) -> usize {
        if self.moved[side] { NEW[side] } else { OLD[side] }
    }

    fn id(&self, side: usize) -> CommId {
        self.ids[side].expect("it is there by now")
    }

    fn move_side(&mut self, side: usize) {
        let (id, from) = (self.id(side), self.place(side));
        self.moved[side] = !self.moved[side];
        let to = self.place(side);
        let state = self.world.hosts[from].state(id);
        self.world.move_id(id, from, to);
        assert_eq!(self.world.hosts[from].state(id), None);
        assert_eq!(self.world.hosts[to].state(id), state);
    }

    fn event(&mut self, side: usize) -> Event {
        let place = self.place(side);
        let notice = self
            .world
            .event(place)
            .unwrap_or_else(|| panic!("side {side} is told"));
        if let Some(id) = self.ids[side] {
            assert_eq!(notice.id, id);
        }
        self.ids[side] = Some(notice.id);
        notice.event
    }

    /// The manager where a side is, and the side's id.
    fn end(&mut self, side: usize) -> (&mut Cm, CommId) {
        let (place, id) = (self.place(side), self.id(side));
        (&mut self.world.hosts[place], id)
    }

    /// The whole life of a connection, with a stop before and after each step.
    fn live(&mut self, mut stop: impl FnMut(&mut Ends, usize)) {
        let now = self.world.now;
        let id = self.world.hosts[0].connect(now, OWNER, &connect(0, 1, 0x11));
        self.ids[0] = Some(id.unwrap());
        stop(self, 0);
        self.world.settle();
        stop(self, 1);
        assert!(matches!(self.event(1), Event::ConnectRequest(_)));
        stop(self, 2);
        let (now, (cm, id)) = (self.world.now, self.end(1));
        cm.accept(now, id, &accept(0x22)).unwrap();
        stop(self, 3);
        self.world.settle();
        stop(self, 4);
        assert!(matches!(self.event(0), Event::ConnectResponse(_)));
        stop(self, 5);
        let (now, (cm, id)) = (self.world.now, self.end(0));
        cm.establish(now, id, b"ready").unwrap();
        stop(self, 6);
        self.world.settle();
        assert!(matches!(self.event(1), Event::Established { .. }));
        stop(self, 7);
        let (now, (cm, id)) = (self.world.now, self.end(1));
        cm.disconnect(now, id, &[]).unwrap();
        stop(self, 8);
        self.world.settle();
        stop(self, 9);
        for side in [0, 1] {
            let event = self.event(side);
            assert!(
                matches!(event, Event::Disconnected { timed_out: false, .. }),
                "{event:?}"
            );
        }
        stop(self, 10);
        while self.world.step() {}
        stop(self, 11);
        for side in [0, 1] {
            assert_eq!(self.event(side), Event::TimeWaitExit);
            let (now, (cm, id)) = (self.world.now, self.end(side));
            cm.destroy(now, id).unwrap();
        }
        while self.world.step() {}
        self.world.assert_over(1);
    }
}

const STOPS: usize = 12;

#[test]
fn each_end_moves_at_each_state() {
    let mut passed_on = 0;
    for sides in [&[0][..], &[1], &[0, 1]] {
        for at in 0..STOPS {
            let mut ends = Ends::new();
            let mut states = Vec::new();
            ends.live(|ends, stop| {
                for side in sides.iter().copied().filter(|_| stop == at) {
                    // The passive id is there when its request has come, of which the program may not know yet.
                    if side == 1 && ends.ids[1].is_none() {
                        let waiting = ends.world.hosts[1].ids_of(OWNER);
                        let listening =
                            |id: &CommId| ends.world.hosts[1].state(*id) == Some(State::Listening);
                        ends.ids[1] = waiting.into_iter().find(|id| !listening(id));
                    }
                    if ends.ids[side].is_some() {
                        states.push(ends.world.hosts[ends.place(side)].state(ends.id(side)));
                        ends.move_side(side);
                    }
                }
            });
            assert!(!states.is_empty() || (at == 0 && sides == [1]));
            passed_on += ends.world.passed_on;
        }
    }
    assert!(
        passed_on > 20,
        "messages came to the old places, too: {passed_on}"
    );
}

/// There and back at every stop: the old place takes what it had passed on before.
#[test]
fn an_end_comes_back() {
    for at in 0..STOPS {
        let mut ends = Ends::new();
        ends.live(|ends, stop| {
            if stop == at || stop == at + 1 {
                ends.move_side(0);
            }
        });
    }
}

/// A program goes with all it has: its listener, a request that it has not seen, and one that comes later.
#[test]
fn a_listener_goes_with_its_requests() {
    let mut world = World::new(3, Faults::default(), 0);
    let one = Listen {
        address: ListenAddress::One(world::address(1)),
        ..listen(PortSpace::TCP)
    };
    let listener = world.hosts[1].listen(OWNER, &one).unwrap();
    world.hosts[0]
        .connect(world.now, OWNER, &connect(0, 1, 0x11))
        .unwrap();
    world.settle();
    for id in world.hosts[1].ids_of(OWNER) {
        world.move_id(id, 1, 2);
    }
    assert!(world.hosts[1].is_empty());
    assert_eq!(world.event(1), None);
    let seen = |world: &mut World| {
        world.settle();
        let notice = world.event(2).expect("a request");
        let Event::ConnectRequest(request) = notice.event else {
            panic!("a request");
        };
        assert_eq!(request.listener, listener);
        (notice.id, request)
    };
    let (first, _) = seen(&mut world);
    // Repeated where the listener was, and told there that the program takes its time.
    world.run_for(Duration::from_secs(1));
    assert!(world.passed_on > 0);
    assert_eq!(world.hosts[2].state(first), Some(State::MraReqSent));
    // By the old address, and by the new one.
    world.hosts[0]
        .connect(world.now, OWNER, &connect(0, 1, 0x12))
        .unwrap();
    let (_, request) = seen(&mut world);
    assert_eq!(request.path.remote, gid(0));
    world.hosts[0]
        .connect(world.now, OWNER, &connect(0, 2, 0x13))
        .unwrap();
    let (_, request) = seen(&mut world);
    assert_eq!(request.path.local, gid(2));
    // When nothing is passed on any more, nobody is there.
    world.hosts[1].forget(listener);
    world.hosts[0]
        .connect(world.now, OWNER, &connect(0, 1, 0x14))
        .unwrap();
    world.settle();
    let event = world.event(0).unwrap().event;
    assert!(
        matches!(
            event,
            Event::Rejected {
                reason: RejectReason::INVALID_SERVICE_ID,
                ..
            }
        ),
        "{event:?}"
    );
}

/// Whoever listens where the other has gone from gets what comes there.
#[test]
fn a_new_listener_at_the_old_place() {
    let mut world = World::new(3, Faults::default(), 0);
    let old = world.hosts[1].listen(OWNER, &listen(PortSpace::TCP)).unwrap();
    world.move_id(old, 1, 2);
    let new = world.hosts[1].listen(OWNER, &listen(PortSpace::TCP)).unwrap();
    assert_ne!(old, new);
    world.hosts[0]
        .connect(world.now, OWNER, &connect(0, 1, 0x11))
        .unwrap();
    world.settle();
    assert!(matches!(world.event(1).unwrap().event, Event::ConnectRequest(_)));
    let image = world.hosts[2].take(world.now, old).unwrap();
    let back = world.hosts[1].adopt(world.now, OWNER, image, None);
    assert_eq!(back, Err(AdoptError::InUse));
}

#[test]
fn questions_for_queue_pairs_move() {
    for (move_asker, move_asked) in [(true, false), (false, true), (true, true)] {
        let mut world = World::new(4, Faults::default(), 0);
        world.hosts[1].listen(OWNER, &listen(PortSpace::UDP)).unwrap();
        let asker = world.hosts[0].resolve(world.now, OWNER, &resolve(0, 1)).unwrap();
        world.settle();
        let asked = world.event(1).unwrap().id;
        let (mut asker_at, mut asked_at) = (0, 1);
        if move_asker {
            world.move_id(asker, 0, 2);
            asker_at = 2;
        }
        if move_asked {
            world.move_id(asked, 1, 3);
            asked_at = 3;
        }
        let answer = Answer {
            status: SidrStatus::VALID,
            qpn: Qpn::new(0x33),
            qkey: 7,
            private_data: vec![],
        };
        world.hosts[asked_at].answer(world.now, asked, &answer).unwrap();
        world.settle();
        let Event::ResolveResponse(response) = world.event(asker_at).unwrap().event else {
            panic!("an answer");
        };
        assert_eq!(response.qpn, answer.qpn);
    }
}

/// A timer goes on with what was left of it.
#[test]
fn timers_go_on() {
    let mut world = World::new(3, Faults::default(), 0);
    world.mute = Some(0);
    let id = world.hosts[0]
        .connect(world.now, OWNER, &connect(0, 1, 0x11))
        .unwrap();
    let deadline = world.hosts[0].next_deadline().unwrap();
    world.run_for(Duration::from_millis(100));
    let image = world.hosts[0].image(world.now, id).unwrap();
    assert_eq!(
        world.hosts[0].state(id),
        Some(State::ReqSent),
        "a copy does not take it away"
    );
    assert_eq!(
        (image.comm_id(), image.state(), image.local()),
        (id, State::ReqSent, Some(gid(0)))
    );
    world.move_id(id, 0, 2);
    assert_eq!(world.hosts[0].next_deadline(), None);
    assert_eq!(world.hosts[2].next_deadline(), Some(deadline));
    world.mute = Some(2);
    while world.step() {}
    assert_eq!(world.event(2).unwrap().event, Event::Unreachable);
    assert_eq!(
        world.sent.iter().filter(|sent| sent.1 == 0x10).count(),
        16,
        "at both places together"
    );
}

#[test]
fn what_cannot_be_taken_up() {
    let mut ends = Ends::new();
    let now = ends.world.now;
    let id = ends.world.hosts[0]
        .connect(now, OWNER, &connect(0, 1, 0x11))
        .unwrap();
    let image = ends.world.hosts[0].image(now, id).unwrap();
    let host = &mut ends.world.hosts[0];
    assert_eq!(
        host.adopt(now, OWNER, image.clone(), None),
        Err(AdoptError::Taken(id))
    );
    assert_eq!(host.take(now, CommId(7)), Err(Error::NoSuchId));
    let mut config = world::config(2);
    config.limits = Limits {
        ids: 0,
        ..Limits::default()
    };
    let mut full = Cm::new(config);
    assert_eq!(full.adopt(now, OWNER, image, None), Err(AdoptError::TooManyIds));
}

/// Any change of an image's bytes is refused or taken, but never believed to be more than it is: nothing panics afterwards.
#[test]
fn damaged_images() {
    let mut images = Vec::new();
    let mut ends = Ends::new();
    ends.live(|ends, _| {
        for side in [0, 1] {
            if let Some(id) = ends.ids[side] {
                let host = &ends.world.hosts[ends.place(side)];
                images.push(host.image(ends.world.now, id).unwrap());
            }
        }
    });
    let (mut taken, mut refused) = (0, 0);
    for image in images {
        let good = postcard::to_stdvec(&image).unwrap();
        for at in 0..good.len() {
            for change in [1, 0x40, 0xff] {
                let mut bytes = good.clone();
                bytes[at] ^= change;
                let Ok(image) = postcard::from_bytes::<IdImage>(&bytes) else {
                    refused += 1;
                    continue;
                };
                let mut cm = Cm::new(world::config(2));
                let now = Time::from_nanos(5);
                match cm.adopt(now, OWNER, image, None) {
                    Ok(id) => {
                        taken += 1;
                        for _ in 0..20 {
                            while cm.poll_transmit().is_some() || cm.poll_event().is_some() {}
                            let Some(due) = cm.next_deadline() else { break };
                            cm.handle_timeout(due);
                        }
                        cm.destroy(now, id).unwrap();
                        cm.destroy_owner(now, OWNER);
                    }
                    Err(_) => refused += 1,
                }
            }
        }
    }
    assert!(taken > 1000 && refused > 1000, "{taken} {refused}");
}

/// All of an owner's ids stand still: nothing of them happens, nobody is answered, and then they go on where they were.
#[test]
fn what_is_held_stands_still_and_goes_on() {
    let mut world = World::new(2, Faults::default(), 0);
    let listener = world.hosts[1].listen(OWNER, &listen(PortSpace::TCP)).unwrap();
    let asking = world.hosts[0]
        .connect(world.now, OWNER, &connect(0, 1, 0x11))
        .unwrap();
    let held = world.hosts[1].hold(world.now, OWNER);
    assert_eq!(held.len(), 1);
    assert!(world.hosts[1].is_empty());
    world.run_for(Duration::from_secs(5));
    assert_eq!(
        world.hosts[0].state(asking),
        Some(State::ReqSent),
        "nobody answers"
    );
    assert_eq!(world.event(1), None);
    // Who is held does not lose its number, and what others make meanwhile does not keep it away.
    world.hosts[1].give_back(world.now, OWNER, held);
    assert_eq!(world.hosts[1].state(listener), Some(State::Listening));
    world.run_for(Duration::from_secs(7));
    assert!(matches!(
        world.event(1).expect("the REQ was repeated").event,
        Event::ConnectRequest(_)
    ));
}

#[test]
fn what_does_not_come_back_is_sent_on() {
    let mut world = World::new(3, Faults::default(), 0);
    world.hosts[1].listen(OWNER, &listen(PortSpace::TCP)).unwrap();
    let held = world.hosts[1].hold(world.now, OWNER);
    let ids: Vec<_> = held.iter().map(IdImage::comm_id).collect();
    assert_eq!(world.hosts[1].place_of(ids[0]), None);
    world.hosts[1].let_go(ids.clone(), Some(gid(2)));
    assert_eq!(world.hosts[1].place_of(ids[0]), Some(gid(2)));
}

#[test]
fn reserved_numbers_are_not_given() {
    let mut world = World::new(1, Faults::default(), 0);
    let cm = &mut world.hosts[0];
    let first = cm.config().first_comm_id;
    cm.reserve(CommId(first)).unwrap();
    assert_eq!(cm.reserve(CommId(first)), Err(AdoptError::Taken(CommId(first))));
    let given = cm.listen(OWNER, &listen(PortSpace::TCP)).unwrap();
    assert_eq!(given, CommId(first.wrapping_add(1)));
    assert_eq!(cm.reserve(given), Err(AdoptError::Taken(given)));
}

#[test]
fn bytes_of_another_version_are_refused() {
    let mut world = World::new(1, Faults::default(), 0);
    let id = world.hosts[0].listen(OWNER, &listen(PortSpace::TCP)).unwrap();
    let image = world.hosts[0].image(world.now, id).unwrap();
    let mut bytes = image.encode();
    assert_eq!(IdImage::decode(&bytes), Ok(image));
    bytes[0] += 1;
    assert!(IdImage::decode(&bytes).is_err());
    assert!(IdImage::decode(&[]).is_err());
}

/// A question that its asker repeats from elsewhere is the same question.
#[test]
fn a_question_that_is_repeated_from_elsewhere_is_no_new_one() {
    let mut world = World::new(3, Faults::default(), 0);
    world.hosts[1].listen(OWNER, &listen(PortSpace::UDP)).unwrap();
    let asker = world.hosts[0].resolve(world.now, OWNER, &resolve(0, 1)).unwrap();
    world.settle();
    assert!(world.event(1).is_some());
    world.move_id(asker, 0, 2);
    world.run_for(Duration::from_secs(30));
    assert!(world.sent.iter().filter(|sent| sent.1 == 0x17).count() > 1);
    assert_eq!(world.event(1), None);
}
