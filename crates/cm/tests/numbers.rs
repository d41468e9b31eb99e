//! Numbers of queue pairs are given again where a connection has been before it moved. Whoever has one then is served, and the
//! connection that has moved goes on. Who has lost a connection without a word still ends it at the peer.

mod world;

use proptest::prelude::*;
use verbatim_cm::wire::RejectReason;
use verbatim_cm::{Cm, CommId, Event, PortSpace, State};
use world::story::{established, world};
use world::{Faults, OWNER, World, accept, connect, gid, listen};

const HOME: usize = 0;
const SERVER: usize = 1;
const ELSEWHERE: usize = 2;

/// Both ways of moving: a queue pair that is connected anew in place of the old one, or the old one, which follows its peer.
#[derive(Clone, Copy, Debug)]
enum Way {
    Replaced,
    Followed,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Somebody at home asks for a connection on a queue pair with this number, if it is free.
    Ask(u32),
    /// One of the connections that are at home moves.
    Move(usize, Way),
    /// One of all connections ends.
    End(usize),
    /// Home starts anew: what is there is lost without a word.
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let way = prop_oneof![Just(Way::Replaced), Just(Way::Followed)];
    prop_oneof![
        6 => (1u32..4).prop_map(Step::Ask),
        4 => (0usize..8, way).prop_map(|(which, way)| Step::Move(which, way)),
        1 => (0usize..8).prop_map(Step::End),
        1 => Just(Step::Restart),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Home,
    Elsewhere,
    /// Home does not know of it any more; the server does.
    Lost,
}

#[derive(Clone, Copy, Debug)]
struct Connection {
    active: CommId,
    passive: CommId,
    /// Of the queue pair at home.
    number: u32,
    /// Of the queue pair at the server, as its program knows it.
    at_server: u32,
    at: At,
}

struct Story {
    world: World,
    connections: Vec<Connection>,
    next: u32,
    restarts: u32,
}

impl Story {
    fn new() -> Story {
        let mut world = World::new(3, Faults::default(), 0);
        world.hosts[SERVER]
            .listen(OWNER, &listen(PortSpace::TCP))
            .unwrap();
        Story {
            world,
            connections: Vec::new(),
            next: 0x100,
            restarts: 0,
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Ask(number) => {
                if self
                    .connections
                    .iter()
                    .any(|c| c.number == number && c.at == At::Home)
                {
                    return;
                }
                let lost = |c: &Connection| c.number == number && c.at == At::Lost;
                if let Some(lost) = self.connections.iter().position(lost) {
                    self.refused(number, lost);
                }
                self.served(number);
            }
            Step::Move(which, way) => self.moves(which, way),
            Step::End(which) => self.ends(which),
            Step::Restart => {
                self.restarts += 1;
                let mut config = world::config(HOME);
                config.first_comm_id += 0x10_0000 * self.restarts;
                self.world.hosts[HOME] = Cm::new(config);
                for connection in &mut self.connections {
                    if connection.at == At::Home {
                        connection.at = At::Lost;
                    }
                }
            }
        }
        self.all_stand();
    }

    fn ask(&mut self, number: u32) -> CommId {
        let asked = connect(HOME, SERVER, number);
        let active = self.world.hosts[HOME].connect(self.world.now, OWNER, &asked);
        self.world.settle();
        active.unwrap()
    }

    /// The server finds out that the peer has lost a connection, and ends it.
    fn refused(&mut self, number: u32, lost: usize) {
        let newcomer = self.ask(number);
        let notice = self.world.event(HOME).expect("an answer");
        let stale = RejectReason::STALE_CONNECTION;
        assert!(
            matches!(notice.event, Event::Rejected { reason, .. } if reason == stale),
            "{notice:?}"
        );
        self.world.hosts[HOME].destroy(self.world.now, newcomer).unwrap();
        let lost = self.connections.remove(lost);
        let notice = self.world.event(SERVER).expect("the end of what is lost");
        assert_eq!(notice.id, lost.passive);
        assert!(matches!(notice.event, Event::Disconnected { .. }), "{notice:?}");
        self.forget_at_server(&lost);
    }

    fn served(&mut self, number: u32) {
        let active = self.ask(number);
        let notice = self.world.event(SERVER).expect("a request");
        assert!(matches!(notice.event, Event::ConnectRequest(_)), "{notice:?}");
        let (passive, at_server) = (notice.id, self.next);
        self.next += 1;
        self.world.hosts[SERVER].taken(passive);
        self.world.queue_pairs[SERVER].to(at_server, gid(HOME), number);
        let now = self.world.now;
        self.world.hosts[SERVER]
            .accept(now, passive, &accept(at_server))
            .unwrap();
        self.world.settle();
        let notice = self.world.event(HOME).expect("a reply");
        assert!(matches!(notice.event, Event::ConnectResponse(_)), "{notice:?}");
        let now = self.world.now;
        self.world.hosts[HOME].establish(now, active, &[]).unwrap();
        self.world.settle();
        let notice = self.world.event(SERVER).expect("the connection stands");
        assert!(matches!(notice.event, Event::Established { .. }), "{notice:?}");
        self.connections.push(Connection {
            active,
            passive,
            number,
            at_server,
            at: At::Home,
        });
    }

    fn moves(&mut self, which: usize, way: Way) {
        let mut home = self.connections.iter_mut().filter(|c| c.at == At::Home);
        let Some(connection) = home.nth(which) else {
            return;
        };
        connection.at = At::Elsewhere;
        let queue_pairs = &mut self.world.queue_pairs[SERVER];
        let number = match way {
            Way::Replaced => {
                queue_pairs.remove(connection.at_server);
                self.next += 1;
                self.next - 1
            }
            Way::Followed => connection.at_server,
        };
        // As luck has it, with the same number there.
        queue_pairs.to(number, gid(ELSEWHERE), connection.number);
        let active = connection.active;
        self.world.move_id(active, HOME, ELSEWHERE);
    }

    fn ends(&mut self, which: usize) {
        let Some(connection) = self.connections.get(which).copied() else {
            return;
        };
        let place = match connection.at {
            At::Home => HOME,
            At::Elsewhere => ELSEWHERE,
            At::Lost => return,
        };
        self.connections.remove(which);
        let now = self.world.now;
        self.world.hosts[place].destroy(now, connection.active).unwrap();
        self.world.settle();
        let notice = self.world.event(SERVER).expect("its end");
        assert_eq!(notice.id, connection.passive);
        assert!(matches!(notice.event, Event::Disconnected { .. }), "{notice:?}");
        self.forget_at_server(&connection);
    }

    fn forget_at_server(&mut self, connection: &Connection) {
        self.world.queue_pairs[SERVER].remove(connection.at_server);
        let now = self.world.now;
        self.world.hosts[SERVER].destroy(now, connection.passive).unwrap();
        self.world.settle();
    }

    /// Nobody has been told anything else, and no connection has ended that should not.
    fn all_stand(&mut self) {
        self.world.settle();
        for connection in &self.connections {
            let state = self.world.hosts[SERVER].state(connection.passive);
            assert_eq!(state, Some(State::Established), "{connection:?}");
        }
        for host in [SERVER, ELSEWHERE] {
            let told = self.world.event(host);
            assert_eq!(told, None, "host {host}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn whoever_has_a_number_is_served_and_nobody_else_is_ended(steps in prop::collection::vec(step(), 1..40)) {
        let mut story = Story::new();
        for step in steps {
            story.step(step);
        }
    }
}

/// The same for a REP: the one who asks has a connection with a peer that has moved, and the one who answers has its number.
#[test]
fn who_answers_with_a_number_given_again_is_not_taken_for_the_one_that_has_moved() {
    let (mut world, _) = world();
    let (active, _) = established(&mut world);
    // The peer's queue pair has moved, and who asks has another one in place of its own.
    world.queue_pairs[0].remove(0x11);
    let second = world.hosts[0].connect(world.now, OWNER, &connect(0, 1, 0x12));
    let second = second.unwrap();
    world.settle();
    let request = world.event(1).expect("a request");
    world.hosts[1]
        .accept(world.now, request.id, &accept(0x22))
        .unwrap();
    world.settle();
    let notice = world.event(0).expect("a reply");
    assert!(matches!(notice.event, Event::ConnectResponse(_)), "{notice:?}");
    assert_eq!(notice.id, second);
    assert_eq!(world.hosts[0].state(active), Some(State::Established));
    assert_eq!(world.event(0), None);
}

/// And as long as the peer has not moved, such a number is a mistake.
#[test]
fn who_answers_with_a_number_that_is_connected_ends_the_earlier_connection() {
    let (mut world, _) = world();
    let (active, _) = established(&mut world);
    let second = world.hosts[0].connect(world.now, OWNER, &connect(0, 1, 0x12));
    let second = second.unwrap();
    world.settle();
    let request = world.event(1).expect("a request");
    world.hosts[1]
        .accept(world.now, request.id, &accept(0x22))
        .unwrap();
    world.settle();
    assert_eq!(world.hosts[0].state(second), Some(State::ReqSent));
    let notice = world.event(0).expect("the end of the first");
    assert_eq!(notice.id, active);
    assert!(matches!(notice.event, Event::Disconnected { .. }), "{notice:?}");
}
