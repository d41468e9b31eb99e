//! The destination's host.

use strum::VariantArray;
use verbatim_session::authority::{self, Party};
use verbatim_session::decision::destination::{Action, Destination, Event, EventKind, State, StateKind};
use verbatim_session::decision::{CommitAnswer, Evidence, Fact, Outcome, Timer};
use verbatim_session::record::Standing;
use verbatim_session::{Role, authority::Message as Kind};

use crate::coverage;

use super::source::is_over;
use super::{Common, Message, Quirk, Quirks, Steps, Tasks, World, blind};

/// What the driver carries out for the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// [`Action::Release`], not begun.
    Release,
    /// [`Action::Release`]: the proxy has the order.
    Releasing,
    /// [`Action::Undo`].
    Undo,
    /// [`Action::Probe`].
    Probe,
}

/// An agent that is up, and knows the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Agent {
    /// Its machine.
    pub machine: Destination,
    /// What it does to the tasks, in order.
    pub effects: [Option<Effect>; 3],
    /// It does what is left after the decision, in the place of the source.
    pub drives: bool,
}

/// The host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DestinationHost {
    /// What every host has.
    pub common: Common,
    /// The agent.
    pub agent: Option<Agent>,
    /// The tasks.
    pub tasks: Tasks,
    /// CRIU and its proxy are there, and have not come to their end.
    pub criu: bool,
    /// The proxy was told to let the tasks go.
    pub ordered: bool,
    /// The proxy's marker is there.
    pub marker: bool,
    /// What was made at the RNIC before the decision is still there.
    pub contexts: bool,
    /// The source was told that the tasks are restored.
    pub has_told: bool,
    /// An agent runs that does not know the session.
    pub knows_nothing: bool,
    /// That the session is committed was in the journal once.
    pub has_committed: bool,
}

impl DestinationHost {
    pub(super) fn new() -> Self {
        Self {
            common: Common::new(),
            agent: Some(Agent::with(Destination::begin())),
            tasks: Tasks::None,
            criu: false,
            ordered: false,
            marker: false,
            contexts: true,
            has_told: false,
            knows_nothing: false,
            has_committed: false,
        }
    }

    /// Its part has come to an end.
    pub fn is_over(&self) -> bool {
        match &self.agent {
            Some(agent) => is_over(agent.machine.state()),
            None => self.knows_nothing,
        }
    }
}

impl Agent {
    fn with(machine: Destination) -> Self {
        Self {
            machine,
            effects: [None; 3],
            drives: false,
        }
    }

    fn push(&mut self, effect: Effect) {
        let slot = self.effects.iter_mut().find(|slot| slot.is_none());
        *slot.expect("a machine has few effects at once") = Some(effect);
    }

    fn pop(&mut self) {
        self.effects[0] = None;
        self.effects.rotate_left(1);
    }
}

pub(super) fn handle(world: &mut World, event: Event) {
    let host = &mut world.destination;
    let Some(agent) = &mut host.agent else { return };
    let state = StateKind::from(agent.machine.state());
    coverage::note(Role::Destination, state as usize, EventKind::from(event) as usize);
    let actions = agent.machine.handle(event);
    if StateKind::from(agent.machine.state()) != state {
        host.common.new_state();
    }
    carry_out(world, actions);
}

fn carry_out(world: &mut World, actions: Vec<Action>) {
    let host = &mut world.destination;
    let Some(agent) = &mut host.agent else { return };
    for action in actions {
        match action {
            Action::Write(mark) => host.common.write(mark),
            Action::Release => agent.push(Effect::Release),
            Action::Undo => agent.push(Effect::Undo),
            Action::Probe => agent.push(Effect::Probe),
            Action::Drive => agent.drives = true,
            Action::After(timer) => host.common.timers |= 1 << timer as u8,
            // Asking is a step of its own: see below.
            Action::Ask => {}
        }
    }
}

fn start(world: &mut World, quirks: Quirks) {
    let host = &mut world.destination;
    match host.common.journal {
        Some(standing) => {
            let standing = match standing {
                Standing::Damaged if quirks.has(Quirk::DamageIsCommit) => Standing::Committed,
                standing => standing,
            };
            let (machine, actions) = Destination::recover(standing, !host.common.rebooted);
            host.agent = Some(Agent::with(machine));
            carry_out(world, actions);
        }
        None => host.knows_nothing = true,
    }
}

pub(super) fn steps(steps: &mut Steps<'_>) {
    let world = steps.world;
    let host = world.destination;
    if !host.common.nic {
        steps.later("the RNIC starts", |world| {
            world.destination.common.nic = true;
        });
    }
    proxy(steps);
    if host.tasks == Tasks::Alive {
        steps.may("the program ends", |world| {
            world.destination.tasks = Tasks::Gone;
        });
    }
    let Some(agent) = host.agent else {
        // The proxy of an agent that is gone ends the restore, unless it has the order.
        let ends = host.criu && !host.ordered && host.tasks == Tasks::Held;
        if ends {
            steps.then("the proxy ends the restore of an agent that is gone", |world| {
                world.destination.tasks = Tasks::Gone;
                world.destination.criu = false;
            });
        } else if !host.knows_nothing {
            let quirks = steps.quirks;
            steps.later("the agent starts", move |world| start(world, quirks));
        }
        return;
    };
    messages(steps, &agent);
    effects(steps, &agent);
    let quirks = steps.quirks;
    if host.common.writes[0].is_some() {
        steps.then("a record is on disk", |world| {
            if let Some((mark, written)) = world.destination.common.written(quirks) {
                world.destination.has_committed |=
                    world.destination.common.journal == Some(Standing::Committed);
                handle(world, Event::Written(mark, written));
            }
        });
    }
    for timer in Timer::VARIANTS {
        let bit = 1 << *timer as u8;
        if host.common.timers & bit != 0 {
            let what = match timer {
                Timer::Write => "it is time to write again",
                Timer::Ask => "it is time to ask again",
                _ => "it is time to look again",
            };
            steps.timer(what, *timer, |world| {
                world.destination.common.timers &= !bit;
                handle(world, Event::Elapsed(*timer));
            });
        }
    }
}

/// What the proxy and CRIU do with the order.
fn proxy(steps: &mut Steps<'_>) {
    let host = steps.world.destination;
    let quirks = steps.quirks;
    if !host.criu {
        return;
    }
    let marks = !quirks.has(Quirk::NoMarker);
    if host.tasks == Tasks::Held && host.ordered {
        if marks && !host.marker {
            steps.then("the proxy leaves its marker", |world| {
                world.destination.marker = true
            });
        } else {
            steps.then("CRIU lets the tasks go", |world| {
                world.destination.tasks = Tasks::Alive;
                world.ran_there = true;
            });
        }
    }
    if host.tasks != Tasks::Held {
        steps.then("CRIU comes to its end", |world| {
            let host = &mut world.destination;
            host.criu = false;
            let event = match host.tasks {
                Tasks::Alive => Event::Released,
                _ => Event::ReleaseFailed,
            };
            released(world, event);
        });
    }
}

/// The driver hears how the release went.
pub(super) fn released(world: &mut World, event: Event) {
    if let Some(agent) = &mut world.destination.agent
        && agent.effects[0] == Some(Effect::Releasing)
    {
        agent.pop();
        handle(world, event);
    }
}

fn state_of(world: &World) -> Option<State> {
    world.destination.agent.map(|agent| agent.machine.state())
}

fn messages(steps: &mut Steps<'_>, agent: &Agent) {
    let world = steps.world;
    let may = |party, kind| authority::may(party, kind, Role::Destination);
    if world.mail.has(Message::Restore) && may(Party::Source, Kind::Prepare) {
        let restores = agent.machine.state() == State::Preparing;
        let what = if restores {
            "restores the tasks"
        } else {
            "is asked to restore too late"
        };
        steps.then(what, |world| {
            world.mail.take(Message::Restore);
            if restores {
                let host = &mut world.destination;
                (host.tasks, host.criu, host.has_told) = (Tasks::Held, true, true);
                handle(world, Event::Restored);
            }
        });
    }
    if world.mail.has(Message::Restore) && agent.machine.state() == State::Preparing {
        steps.may("cannot restore the tasks", |world| {
            world.mail.take(Message::Restore);
            handle(world, Event::Failed);
        });
    }
    if world.mail.has(Message::Commit) && may(Party::Source, Kind::Commit) {
        steps.then("is asked to commit", |world| {
            world.mail.take(Message::Commit);
            let alive = world.destination.contexts;
            handle(world, Event::Commit { alive });
        });
    }
    if world.mail.has(Message::ForgedCommit) {
        let taken = may(Party::Stranger, Kind::Commit) || steps.quirks.has(Quirk::NoAuthority);
        steps.then("is asked to commit by a stranger", |world| {
            world.mail.take(Message::ForgedCommit);
            if taken {
                let alive = world.destination.contexts;
                handle(world, Event::Commit { alive });
            }
        });
    }
    if world.mail.has(Message::Settle) && may(Party::Source, Kind::Abort) {
        steps.then("is told that the session is not wanted any more", |world| {
            world.mail.take(Message::Settle);
            handle(world, Event::Abort);
        });
    }
    if world.mail.has(Message::Claim) && may(Party::Source, Kind::Switch) {
        steps.then("is asked to resume", |world| {
            world.mail.take(Message::Claim);
            // A source asks for that only when it knows that the session is committed.
            let is_asking = state_of(world) == Some(State::Asking);
            handle(
                world,
                match is_asking {
                    true => Event::Answer(CommitAnswer::Runs),
                    false => Event::Finished,
                },
            );
        });
    }
    if agent.machine.state() == State::Asking {
        if let Some(outcome) = world.source_says() {
            let answer = match outcome {
                Outcome::Committed => CommitAnswer::Runs,
                Outcome::RolledBack => CommitAnswer::NotRun(Evidence::GivenUp),
            };
            steps.then("asks the source", |world| handle(world, Event::Answer(answer)));
        }
        if world.partner.says_committed() {
            steps.then("asks the partner", |world| {
                handle(world, Event::Answer(CommitAnswer::Runs))
            });
        }
    }
    if !agent.drives
        && matches!(
            agent.machine.state(),
            State::Preparing
                | State::Restored
                | State::Committing
                | State::Releasing
                | State::Running { drives: false }
        )
    {
        let loses = |world: &mut World| handle(world, Event::SourceLost);
        match world.source.is_missed() {
            true => steps.later("misses the source", loses),
            false => steps.may("loses sight of the source", loses),
        }
    }
    if agent.drives {
        let over = world.partner.is_over();
        if !world.mail.has(Message::SwitchInstead) && !over {
            steps.timer(
                "asks the partner to switch in the source's place",
                Timer::Ask,
                |world| world.mail.send(Message::SwitchInstead),
            );
        }
        if over {
            steps.then(
                "everything is done after the decision, in the source's place",
                |world| {
                    if let Some(agent) = &mut world.destination.agent {
                        agent.drives = false;
                    }
                    handle(world, Event::Finished);
                },
            );
        }
    }
}

fn effects(steps: &mut Steps<'_>, agent: &Agent) {
    let host = steps.world.destination;
    let quirks = steps.quirks;
    fn done(world: &mut World, event: Event) {
        if let Some(agent) = &mut world.destination.agent {
            agent.pop();
        }
        handle(world, event);
    }
    match agent.effects[0] {
        None | Some(Effect::Releasing) => {}
        Some(Effect::Release) if host.criu => steps.then("gives the order to the proxy", |world| {
            world.destination.ordered = true;
            if let Some(agent) = &mut world.destination.agent {
                agent.effects[0] = Some(Effect::Releasing);
            }
        }),
        Some(Effect::Release) => {
            steps.then("finds no proxy for the order", |world| {
                done(world, Event::ReleaseFailed)
            });
        }
        Some(Effect::Undo) => steps.then("removes all that is left of the session", |world| {
            let host = &mut world.destination;
            if host.tasks != Tasks::None {
                host.tasks = Tasks::Gone;
            }
            host.criu = false;
            host.ordered = false;
            done(world, Event::Undone);
        }),
        Some(Effect::Probe) => {
            let fact = fact(&host, quirks);
            let what = match fact {
                Fact::Unknown | Fact::Frozen => "cannot see how the tasks stand",
                _ => "sees how the tasks stand",
            };
            steps.then(what, |world| {
                // What was not released never runs: it is killed, unless nobody has looked.
                let has_looked = world.destination.common.nic;
                if fact == (Fact::Gone { ran: false }) && has_looked && world.destination.tasks != Tasks::None
                {
                    world.destination.tasks = Tasks::Gone;
                }
                done(world, Event::Fact(fact));
            });
        }
    }
}

fn fact(host: &DestinationHost, quirks: Quirks) -> Fact {
    if let Some(fact) = blind(&host.common, quirks) {
        return fact;
    }
    if quirks.has(Quirk::AnyErrorNotRun) && !host.criu {
        return Fact::Gone { ran: false };
    }
    match host.tasks {
        // The proxy may still let them go.
        Tasks::Held if host.criu => Fact::Frozen,
        Tasks::Alive => Fact::Running,
        Tasks::Held | Tasks::None | Tasks::Gone => Fact::Gone { ran: host.marker },
    }
}
