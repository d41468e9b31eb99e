//! The partner's host.

use strum::VariantArray;
use verbatim_session::Role;
use verbatim_session::authority::{self, Message as Kind, Party};
use verbatim_session::decision::partner::{Action, Event, EventKind, Partner, State, StateKind};
use verbatim_session::decision::{CommitAnswer, Evidence, Fact, Outcome, Timer, source};
use verbatim_session::record::Standing;

use crate::coverage;

use super::{Common, Message, Steps, World, blind};

/// Which connections the partner's programs use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// The old ones.
    Old,
    /// None: they are drained.
    Drained,
    /// The new ones.
    New,
}

/// What the driver carries out for the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// [`Action::Undo`].
    Undo,
    /// [`Action::Switch`].
    Switch,
    /// [`Action::Probe`].
    Probe,
}

/// An agent that is up, and knows the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Agent {
    /// Its machine.
    pub machine: Partner,
    /// What it does, in order.
    pub effects: [Option<Effect>; 3],
}

/// The host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PartnerHost {
    /// What every host has.
    pub common: Common,
    /// The agent.
    pub agent: Option<Agent>,
    /// The programs' connections.
    pub end: End,
    /// The source was told that nothing is in flight.
    pub has_told: bool,
    /// An agent runs that does not know the session.
    pub knows_nothing: bool,
}

impl PartnerHost {
    pub(super) fn new() -> Self {
        Self {
            common: Common::new(),
            agent: Some(Agent::with(Partner::begin())),
            end: End::Old,
            has_told: false,
            knows_nothing: false,
        }
    }

    /// It says to a host that asks that the session is committed.
    pub fn says_committed(&self) -> bool {
        let committed = [Standing::Switched, Standing::Closed(Outcome::Committed)];
        self.agent.is_some()
            && self
                .common
                .journal
                .is_some_and(|standing| committed.contains(&standing))
    }

    /// Its part has come to an end.
    pub fn is_over(&self) -> bool {
        match &self.agent {
            Some(agent) => matches!(agent.machine.state(), State::Closing(_) | State::Ended(_)),
            None => self.knows_nothing,
        }
    }
}

impl Agent {
    fn with(machine: Partner) -> Self {
        Self {
            machine,
            effects: [None; 3],
        }
    }

    fn push(&mut self, effect: Effect) {
        let slot = self.effects.iter_mut().find(|slot| slot.is_none());
        *slot.expect("a machine has few effects at once") = Some(effect);
    }
}

pub(super) fn handle(world: &mut World, event: Event) {
    let host = &mut world.partner;
    let Some(agent) = &mut host.agent else { return };
    let state = StateKind::from(agent.machine.state());
    coverage::note(Role::Partner, state as usize, EventKind::from(event) as usize);
    let actions = agent.machine.handle(event);
    if StateKind::from(agent.machine.state()) != state {
        host.common.new_state();
    }
    carry_out(world, actions);
}

fn carry_out(world: &mut World, actions: Vec<Action>) {
    let host = &mut world.partner;
    let Some(agent) = &mut host.agent else { return };
    let mut refused = false;
    for action in actions {
        match action {
            Action::Write(mark) => host.common.write(mark),
            Action::Drained => host.has_told = true,
            Action::Undo => agent.push(Effect::Undo),
            Action::Switch => agent.push(Effect::Switch),
            Action::Probe => agent.push(Effect::Probe),
            Action::After(timer) => host.common.timers |= 1 << timer as u8,
            // Asking is a step of its own: see below.
            Action::Ask => {}
            Action::Refuse => refused = true,
        }
    }
    if refused {
        super::source::handle(world, source::Event::Failed);
    }
}

fn start(world: &mut World) {
    let host = &mut world.partner;
    match host.common.journal {
        Some(standing) => {
            let (machine, actions) = Partner::recover(standing);
            host.agent = Some(Agent::with(machine));
            carry_out(world, actions);
        }
        None => host.knows_nothing = true,
    }
}

pub(super) fn steps(steps: &mut Steps<'_>) {
    let world = steps.world;
    let host = world.partner;
    if !host.common.nic {
        steps.later("the RNIC starts", |world| world.partner.common.nic = true);
    }
    let Some(agent) = host.agent else {
        if !host.knows_nothing {
            steps.later("the agent starts", start);
        }
        return;
    };
    messages(steps, &agent);
    effects(steps, &agent);
    let quirks = steps.quirks;
    if host.common.writes[0].is_some() {
        steps.then("a record is on disk", |world| {
            if let Some((mark, written)) = world.partner.common.written(quirks) {
                handle(world, Event::Written(mark, written));
            }
        });
    }
    for timer in Timer::VARIANTS {
        let bit = 1 << *timer as u8;
        if host.common.timers & bit != 0 {
            let what = match timer {
                Timer::Write => "it is time to write again",
                Timer::Probe => "it is time to look again",
                Timer::Ask | Timer::Doubt => "it is time to ask again",
            };
            steps.timer(what, *timer, |world| {
                world.partner.common.timers &= !bit;
                handle(world, Event::Elapsed(*timer));
            });
        }
    }
}

fn messages(steps: &mut Steps<'_>, agent: &Agent) {
    let world = steps.world;
    let state = agent.machine.state();
    let may = |party, kind| authority::may(party, kind, Role::Partner);
    if world.mail.has(Message::Quiesce) && may(Party::Source, Kind::Quiesce) {
        steps.then("comes to a stop", |world| {
            world.mail.take(Message::Quiesce);
            if state == State::Prepared {
                world.partner.end = End::Drained;
            }
            handle(world, Event::Quiesced);
        });
    }
    if world.mail.has(Message::Quiesce) && state == State::Prepared {
        steps.may("cannot come to a stop", |world| {
            world.mail.take(Message::Quiesce);
            handle(world, Event::Failed);
        });
    }
    if world.mail.has(Message::Abort) && may(Party::Source, Kind::Abort) {
        steps.then("is told that the session was rolled back", |world| {
            world.mail.take(Message::Abort);
            handle(world, Event::Abort);
        });
    }
    for (message, party, what) in [
        (Message::Switch, Party::Source, "is asked to switch"),
        (
            Message::SwitchInstead,
            Party::Destination,
            "is asked to switch by the destination",
        ),
    ] {
        if world.mail.has(message) && may(party, Kind::Switch) {
            steps.then(what, |world| {
                world.mail.take(message);
                handle(world, Event::Switch);
            });
        }
    }
    if matches!(state, State::Prepared | State::Draining | State::Drained) {
        let loses = |world: &mut World| handle(world, Event::SourceLost);
        match world.source.is_missed() {
            true => steps.later("misses the source", loses),
            false => steps.may("loses sight of the source", loses),
        }
    }
    if state == State::Asking {
        let there = world.destination.agent.map(|agent| agent.machine.answer());
        if let Some(answer @ (CommitAnswer::Runs | CommitAnswer::NotRun(_))) = there {
            steps.then("asks the destination", |world| {
                handle(world, Event::Answer(answer))
            });
        }
        if let Some(outcome) = world.source_says() {
            let answer = match outcome {
                Outcome::Committed => CommitAnswer::Runs,
                Outcome::RolledBack => CommitAnswer::NotRun(Evidence::GivenUp),
            };
            steps.then("asks the source", |world| handle(world, Event::Answer(answer)));
        }
    }
}

fn effects(steps: &mut Steps<'_>, agent: &Agent) {
    let host = steps.world.partner;
    let quirks = steps.quirks;
    let Some(effect) = agent.effects[0] else {
        return;
    };
    fn done(world: &mut World, event: Event) {
        if let Some(agent) = &mut world.partner.agent {
            agent.effects[0] = None;
            agent.effects.rotate_left(1);
        }
        handle(world, event);
    }
    match effect {
        Effect::Undo => steps.then("the old connections work again", |world| {
            world.partner.end = End::Old;
            done(world, Event::Undone);
        }),
        Effect::Switch => steps.then("the new connections work", |world| {
            world.partner.end = End::New;
            done(world, Event::Finished);
        }),
        Effect::Probe => {
            let fact = blind(&host.common, quirks).unwrap_or(Fact::Running);
            let what = match fact {
                Fact::Unknown => "cannot reach the programs",
                _ => "can reach the programs",
            };
            steps.then(what, |world| done(world, Event::Fact(fact)));
        }
    }
}
