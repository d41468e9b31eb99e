//! Many connections over a network with every fault, with ids that go to other hosts in the middle of it: every request comes
//! once, every connection ends in one ESTABLISHED on both sides or in an error on both, private data is as it was, an end is seen
//! once, and nothing is left.

mod world;

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use proptest::prelude::*;
use verbatim_cm::wire::RejectReason;
use verbatim_cm::{Cm, CommId, Config, Event, Notice, PortSpace, State, Time};
use world::{Faults, OWNER, World, accept, connect, listen};

/// What the passive program does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reply {
    Accept,
    Reject,
    Destroy,
}

/// What the active program does when the reply is here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Establish,
    Reject,
    Destroy,
}

/// Who ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Active,
    Passive,
    Both,
    /// The active program is gone.
    DestroyActive,
    DestroyPassive,
}

#[derive(Clone, Copy, Debug)]
struct Plan {
    /// In milliseconds.
    start: u64,
    reply: Reply,
    /// How long the passive program thinks, in milliseconds.
    thinks: u64,
    answer: Answer,
    end: End,
    /// The active program does not wait for the answer, but destroys its id after so many milliseconds.
    impatient: Option<u64>,
}

fn plan() -> impl Strategy<Value = Plan> {
    let reply = prop_oneof![6 => Just(Reply::Accept), 1 => Just(Reply::Reject), 1 => Just(Reply::Destroy)];
    let answer =
        prop_oneof![6 => Just(Answer::Establish), 1 => Just(Answer::Reject), 1 => Just(Answer::Destroy)];
    let end = prop::sample::select(vec![
        End::Active,
        End::Passive,
        End::Both,
        End::DestroyActive,
        End::DestroyPassive,
    ]);
    let thinks = prop_oneof![3 => Just(0u64), 1 => 0u64..3000];
    let impatient = prop_oneof![7 => Just(None), 1 => (0u64..1500).prop_map(Some)];
    (0u64..3000, reply, thinks, answer, end, impatient).prop_map(
        |(start, reply, thinks, answer, end, impatient)| Plan {
            start,
            reply,
            thinks,
            answer,
            end,
            impatient,
        },
    )
}

/// What one side of one connection has seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Seen {
    requests: u32,
    responses: u32,
    established: u32,
    rejected: u32,
    unreachable: u32,
    disconnected: u32,
    time_waits: u32,
    /// Its own program has ended it.
    destroyed: bool,
}

const ACTIVE: usize = 0;
const PASSIVE: usize = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Todo {
    Connect,
    Reply,
    Impatience,
    End,
}

struct Story {
    world: World,
    plans: Vec<Plan>,
    seen: Vec<[Seen; 2]>,
    /// Where each id is, and which side of which connection.
    ids: HashMap<CommId, (usize, usize, usize)>,
    sides: Vec<[Option<CommId>; 2]>,
    todo: BTreeMap<(Time, usize, Todo), ()>,
}

fn tag(number: usize, word: &str) -> Vec<u8> {
    format!("{word} {number:04}").into_bytes()
}

impl Story {
    fn new(faults: Faults, seed: u64, plans: Vec<Plan>) -> Story {
        // Host 0 asks, host 1 listens, hosts 2 and 3 are where ids go.
        let mut world = World::new(4, faults, seed);
        for (host, cm) in world.hosts.iter_mut().enumerate() {
            // So that a peer which was put off asks again while its answer is still known.
            *cm = Cm::new(Config {
                mra_service_timeout: 17,
                ..world::config(host)
            });
        }
        world.hosts[1].listen(OWNER, &listen(PortSpace::TCP)).unwrap();
        let mut story = Story {
            seen: vec![Default::default(); plans.len()],
            sides: vec![[None; 2]; plans.len()],
            ids: HashMap::new(),
            todo: BTreeMap::new(),
            world,
            plans,
        };
        for number in 0..story.plans.len() {
            story.later(number, Todo::Connect, story.plans[number].start);
        }
        story
    }

    fn later(&mut self, number: usize, todo: Todo, millis: u64) {
        let due = self.world.now + Duration::from_millis(millis);
        self.todo.insert((due, number, todo), ());
    }

    fn host(&self, number: usize, side: usize) -> Option<(usize, CommId)> {
        let id = self.sides[number][side]?;
        Some((self.ids.get(&id)?.0, id))
    }

    fn destroy(&mut self, number: usize, side: usize) {
        if let Some((host, id)) = self.host(number, side) {
            self.world.hosts[host].destroy(self.world.now, id).unwrap();
            self.ids.remove(&id);
            self.seen[number][side].destroyed = true;
        }
    }

    fn act(&mut self, number: usize, todo: Todo) {
        let (now, plan) = (self.world.now, self.plans[number]);
        match todo {
            Todo::Connect => {
                let mut request = connect(0, 1, 0x100 + number as u32);
                request.private_data = tag(number, "request");
                let id = self.world.hosts[0].connect(now, OWNER, &request).unwrap();
                self.sides[number][ACTIVE] = Some(id);
                self.ids.insert(id, (0, number, ACTIVE));
                if let Some(millis) = plan.impatient {
                    self.later(number, Todo::Impatience, millis);
                }
            }
            Todo::Reply => {
                let Some((host, id)) = self.host(number, PASSIVE) else {
                    return;
                };
                if self.world.hosts[host].state(id) == Some(State::Closed) {
                    return; // The peer has withdrawn it.
                }
                let mut reply = accept(0x8000 + number as u32);
                reply.private_data = tag(number, "reply");
                match plan.reply {
                    Reply::Accept => self.world.hosts[host].accept(now, id, &reply).unwrap(),
                    Reply::Reject => {
                        let why = RejectReason::CONSUMER;
                        let data = tag(number, "reject");
                        self.world.hosts[host].reject(now, id, why, &data).unwrap();
                        self.seen[number][PASSIVE].destroyed = true;
                    }
                    Reply::Destroy => self.destroy(number, PASSIVE),
                }
            }
            Todo::Impatience => {
                if self.seen[number][ACTIVE].responses == 0 {
                    self.destroy(number, ACTIVE);
                }
            }
            Todo::End => {
                let sides: &[usize] = match plan.end {
                    End::Active => &[ACTIVE],
                    End::Passive => &[PASSIVE],
                    End::Both => &[ACTIVE, PASSIVE],
                    End::DestroyActive => return self.destroy(number, ACTIVE),
                    End::DestroyPassive => return self.destroy(number, PASSIVE),
                };
                for side in sides {
                    if let Some((host, id)) = self.host(number, *side) {
                        self.world.hosts[host].disconnect(now, id, b"bye").unwrap();
                    }
                }
            }
        }
    }

    fn told(&mut self, host: usize, notice: Notice) {
        let now = self.world.now;
        if let Event::ConnectRequest(request) = &notice.event {
            let text = String::from_utf8_lossy(&request.private_data[8..12]);
            let number: usize = text.parse().expect("the private data is whole");
            self.seen[number][PASSIVE].requests += 1;
            self.world.hosts[host].taken(notice.id);
            self.sides[number][PASSIVE] = Some(notice.id);
            self.ids.insert(notice.id, (host, number, PASSIVE));
            self.later(number, Todo::Reply, self.plans[number].thinks);
            return;
        }
        let (place, number, side) = self.ids[&notice.id];
        assert_eq!(place, host, "it is told where it is");
        let seen = &mut self.seen[number][side];
        match notice.event {
            Event::ConnectResponse(response) => {
                seen.responses += 1;
                assert!(response.private_data.starts_with(&tag(number, "reply")));
                match self.plans[number].answer {
                    Answer::Establish => {
                        let data = tag(number, "ready");
                        self.world.hosts[host].establish(now, notice.id, &data).unwrap();
                        self.seen[number][side].established += 1;
                        self.both_established(number);
                    }
                    Answer::Reject => {
                        let why = RejectReason::CONSUMER;
                        self.world.hosts[host].reject(now, notice.id, why, &[]).unwrap();
                        self.seen[number][side].destroyed = true;
                    }
                    Answer::Destroy => self.destroy(number, side),
                }
            }
            Event::Established { private_data } => {
                seen.established += 1;
                assert!(private_data.starts_with(&tag(number, "ready")));
                self.both_established(number);
            }
            Event::Rejected {
                reason, private_data, ..
            } => {
                seen.rejected += 1;
                if reason == RejectReason::CONSUMER
                    && side == ACTIVE
                    && self.plans[number].reply == Reply::Reject
                {
                    assert!(private_data.starts_with(&tag(number, "reject")));
                }
            }
            Event::Unreachable => seen.unreachable += 1,
            Event::Disconnected { timed_out, .. } => {
                assert!(!timed_out || self.world.faults.loss > 0);
                seen.disconnected += 1;
            }
            Event::TimeWaitExit => seen.time_waits += 1,
            other => panic!("{other:?}"),
        }
    }

    fn both_established(&mut self, number: usize) {
        if self.seen[number].iter().all(|seen| seen.established == 1) {
            self.later(number, Todo::End, 50);
        }
    }

    fn poll(&mut self) {
        self.world.transmit();
        for host in 0..self.world.hosts.len() {
            while let Some(notice) = self.world.event(host) {
                self.told(host, notice);
            }
        }
        self.world.transmit();
    }

    fn run(&mut self, mut moves: Vec<(u64, usize, usize)>) {
        moves.sort_unstable();
        let mut moves = moves.into_iter().peekable();
        loop {
            self.poll();
            let todo = self.todo.first_key_value().map(|((due, ..), ())| *due);
            let Some(next) = self.world.next().into_iter().chain(todo).min() else {
                break;
            };
            let move_at = |millis: u64| Time::from_nanos(millis * 1_000_000);
            while let Some((_, pick, to)) = moves.next_if(|(millis, ..)| move_at(*millis) <= next) {
                self.move_one(pick, to);
            }
            self.world.step_to(next);
            self.poll();
            while let Some((key, ())) = self.todo.pop_first() {
                if key.0 > self.world.now {
                    self.todo.insert(key, ());
                    break;
                }
                self.act(key.1, key.2);
            }
        }
    }

    /// Some id that its program still has goes to another host; what nobody has polled goes along.
    fn move_one(&mut self, pick: usize, to: usize) {
        let mut ids: Vec<CommId> = self.ids.keys().copied().collect();
        ids.sort_unstable();
        let Some(id) = ids.get(pick % ids.len().max(1)).copied() else {
            return;
        };
        let from = self.ids[&id].0;
        let to = if to == from {
            (to + 1) % self.world.hosts.len()
        } else {
            to
        };
        self.world.move_id(id, from, to);
        self.ids.get_mut(&id).expect("it is known").0 = to;
    }

    fn check(&mut self) -> Result<(), TestCaseError> {
        for (number, (plan, seen)) in self.plans.iter().zip(&self.seen).enumerate() {
            let [active, passive] = seen;
            let context = format!("{number}: {plan:?} {seen:?}");
            prop_assert!(passive.requests <= 1, "a request comes once: {}", context);
            for side in seen {
                prop_assert!(side.established <= 1 && side.disconnected <= 1, "{}", context);
                prop_assert!(
                    side.rejected + side.unreachable <= 1 && side.time_waits <= 1,
                    "{}",
                    context
                );
            }
            let over =
                |side: &Seen| side.rejected + side.unreachable + side.disconnected > 0 || side.destroyed;
            prop_assert!(over(active), "{}", context);
            prop_assert!(over(passive) || passive.requests == 0, "{}", context);
            // As long as repetitions get through, there is only what the programs want.
            if active.unreachable + passive.unreachable > 0 {
                continue;
            }
            let agreed = plan.reply == Reply::Accept && plan.answer == Answer::Establish;
            if agreed && !(plan.impatient.is_some() && active.destroyed && active.established == 0) {
                prop_assert_eq!((active.established, passive.established), (1, 1), "{}", context);
                prop_assert_eq!(active.rejected + passive.rejected, 0, "{}", context);
            } else {
                prop_assert_eq!((active.established, passive.established), (0, 0), "{}", context);
            }
        }
        Ok(())
    }

    /// The programs end, and with them everything.
    fn close(&mut self) {
        // Whoever is connected with somebody who does not know.
        for number in 0..self.plans.len() {
            for side in [ACTIVE, PASSIVE] {
                if let Some((host, id)) = self.host(number, side)
                    && self.world.hosts[host].state(id) == Some(State::Established)
                {
                    self.world.hosts[host]
                        .disconnect(self.world.now, id, &[])
                        .unwrap();
                }
            }
        }
        self.run(Vec::new());
        let result = self.check();
        assert!(result.is_ok(), "{result:?}");
        for host in &mut self.world.hosts {
            for id in host.ids_of(OWNER) {
                let keep = host.state(id) == Some(State::Listening);
                if !keep {
                    host.destroy(self.world.now, id).unwrap();
                }
            }
        }
        self.ids.clear();
        while self.world.step() {}
        self.world.assert_over(1);
    }
}

fn faults() -> impl Strategy<Value = Faults> {
    (0u32..30, 0u32..50, any::<bool>()).prop_map(|(loss, duplication, reordering)| Faults {
        loss,
        duplication,
        reordering,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_connection_ends_alike_on_both_sides(
        faults in faults(),
        seed: u64,
        plans in prop::collection::vec(plan(), 1..40),
    ) {
        let mut story = Story::new(faults, seed, plans);
        story.run(Vec::new());
        story.close();
    }

    #[test]
    fn ids_move_meanwhile(
        faults in faults(),
        seed: u64,
        plans in prop::collection::vec(plan(), 1..20),
        moves in prop::collection::vec((0u64..8000, any::<usize>(), 0usize..4), 1..60),
    ) {
        let mut story = Story::new(faults, seed, plans);
        story.run(moves);
        story.close();
    }
}

/// The test above is about something: without faults nothing is repeated, with them much is.
#[test]
fn the_network_has_faults() {
    let plan = Plan {
        start: 0,
        reply: Reply::Accept,
        thinks: 0,
        answer: Answer::Establish,
        end: End::Active,
        impatient: None,
    };
    let resent = |faults| {
        let mut story = Story::new(faults, 1, vec![plan; 40]);
        story.run(Vec::new());
        story.close();
        let counters: Vec<_> = story.world.hosts.iter().map(|host| *host.counters()).collect();
        (
            counters[0].resent + counters[1].resent,
            counters[0].duplicates + counters[1].duplicates,
        )
    };
    assert_eq!(resent(Faults::default()), (0, 0));
    let bad = Faults {
        loss: 20,
        duplication: 20,
        reordering: true,
    };
    let (repeated, duplicates) = resent(bad);
    assert!(repeated > 40 && duplicates > 40, "{repeated} {duplicates}");
}
