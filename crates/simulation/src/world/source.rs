//! The source's host.

use strum::VariantArray;
use verbatim_session::Role;
use verbatim_session::decision::source::{Action, Event, EventKind, Question, Source, State, StateKind};
use verbatim_session::decision::{CommitAnswer, Fact, Keep, Timer, destination};

use crate::coverage;

use super::{Common, End, Message, Quirk, Quirks, Steps, Tasks, World, blind};

/// The process that stands between runc and CRIU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Proxy {
    /// There is none.
    None,
    /// It holds CRIU's answer back for as long as its agent is there.
    Waiting,
    /// It holds it, with or without an agent.
    Holding,
}

/// How far the steps before the decision are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Progress {
    /// The partner is coming to a stop.
    Quiescing,
    /// The tasks are to be dumped.
    Freezing,
    /// The destination is to restore them.
    Restoring,
    /// It has said that it did.
    Restored,
    /// The machine knows.
    Verified,
}

/// What the driver carries out for the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// [`Action::Freeze`].
    Freeze,
    /// [`Action::Hold`].
    Hold,
    /// [`Action::Undo`].
    Undo,
    /// [`Action::Probe`].
    Probe,
}

/// An agent that is up, and knows the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Agent {
    /// Its machine.
    pub machine: Source,
    /// What it does to the tasks, in order.
    pub effects: [Option<Effect>; 3],
    /// It tells the others that the session was rolled back.
    pub tells: bool,
    /// It does what is left after the decision.
    pub finishes: bool,
    /// How far the steps before the decision are.
    pub progress: Progress,
    /// It has taken the session up from an earlier one.
    pub has_come_later: bool,
}

/// The host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SourceHost {
    /// What every host has.
    pub common: Common,
    /// The agent.
    pub agent: Option<Agent>,
    /// The tasks.
    pub tasks: Tasks,
    /// CRIU is there, and its ptrace keeps the tasks still.
    pub criu: bool,
    /// The cgroup is frozen.
    pub frozen: bool,
    /// The proxy.
    pub proxy: Proxy,
    /// An agent runs that does not know the session.
    pub knows_nothing: bool,
}

impl SourceHost {
    pub(super) fn new() -> Self {
        Self {
            common: Common::new(),
            agent: Some(Agent::with(Source::begin())),
            tasks: Tasks::Alive,
            criu: false,
            frozen: false,
            proxy: Proxy::None,
            knows_nothing: false,
        }
    }

    pub(super) fn runs(&self) -> bool {
        self.tasks == Tasks::Alive && !self.criu && !self.frozen
    }

    /// The proxy has CRIU let the tasks go on, and thaws them.
    pub(super) fn proxy_aborts(&mut self) {
        (self.criu, self.frozen) = (false, false);
        self.proxy = Proxy::None;
    }
}

impl Agent {
    fn with(machine: Source) -> Self {
        Self {
            machine,
            effects: [None; 3],
            tells: false,
            finishes: false,
            progress: Progress::Quiescing,
            has_come_later: false,
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

/// Gives the machine an event, and carries out what is done at once.
pub(super) fn handle(world: &mut World, event: Event) {
    let host = &mut world.source;
    let Some(agent) = &mut host.agent else { return };
    let state = StateKind::from(agent.machine.state());
    coverage::note(Role::Source, state as usize, EventKind::from(event) as usize);
    let actions = agent.machine.handle(event);
    if StateKind::from(agent.machine.state()) != state {
        host.common.new_state();
    }
    carry_out(world, actions);
}

fn carry_out(world: &mut World, actions: Vec<Action>) {
    let host = &mut world.source;
    let Some(agent) = &mut host.agent else { return };
    for action in actions {
        match action {
            Action::Freeze => agent.push(Effect::Freeze),
            Action::Hold => agent.push(Effect::Hold),
            Action::Undo => agent.push(Effect::Undo),
            Action::Probe => agent.push(Effect::Probe),
            Action::Write(mark) => host.common.write(mark),
            Action::Ask(Question::Commit) => world.mail.send(Message::Commit),
            Action::Ask(Question::Settle) => world.mail.send(Message::Settle),
            Action::Tell => agent.tells = true,
            Action::Finish => agent.finishes = true,
            Action::After(timer) => host.common.timers |= 1 << timer as u8,
            Action::Doubt | Action::Refuse => {}
        }
    }
}

pub(super) fn start(world: &mut World) {
    let host = &mut world.source;
    match host.common.journal {
        Some(standing) => {
            let (machine, actions) = Source::recover(standing);
            host.agent = Some(Agent {
                has_come_later: true,
                ..Agent::with(machine)
            });
            carry_out(world, actions);
        }
        None => host.knows_nothing = true,
    }
}

pub(super) fn steps(steps: &mut Steps<'_>) {
    let world = steps.world;
    let host = world.source;
    if !host.common.nic {
        steps.later("the RNIC starts", |world| world.source.common.nic = true);
    }
    let Some(agent) = host.agent else {
        if host.proxy == Proxy::Waiting {
            steps.then("the proxy aborts the dump of an agent that is gone", |world| {
                world.source.proxy_aborts();
            });
        } else if !host.knows_nothing {
            steps.later("the agent starts", start);
        }
        return;
    };
    work(steps, &agent);
    effects(steps, &agent);
    after_the_decision(steps, &agent);
    let quirks = steps.quirks;
    if host.common.writes[0].is_some() {
        steps.then("a record is on disk", |world| {
            if let Some((mark, written)) = world.source.common.written(quirks) {
                handle(world, Event::Written(mark, written));
            }
        });
    }
    for timer in Timer::VARIANTS {
        let bit = 1 << *timer as u8;
        if host.common.timers & bit != 0 {
            let what = match timer {
                Timer::Ask => "it is time to ask again",
                Timer::Doubt => "it has waited long",
                Timer::Probe => "it is time to look again",
                Timer::Write => "it is time to write again",
            };
            steps.timer(what, *timer, |world| {
                world.source.common.timers &= !bit;
                handle(world, Event::Elapsed(*timer));
            });
        }
    }
}

/// The steps before the decision, as one line.
fn work(steps: &mut Steps<'_>, agent: &Agent) {
    let world = steps.world;
    if !agent.machine.can_be_cancelled() {
        return;
    }
    fn agent_of(world: &mut World) -> &mut Agent {
        world.source.agent.as_mut().expect("it is up")
    }
    if matches!(agent.machine.state(), State::Working(_)) {
        match agent.progress {
            Progress::Quiescing => {
                if !world.mail.has(Message::Quiesce) && !world.partner.has_told && !world.partner.is_over() {
                    steps.timer("asks the partner to come to a stop", Timer::Ask, |world| {
                        world.mail.send(Message::Quiesce)
                    });
                }
                if world.partner.has_told {
                    steps.then("hears that nothing is in flight", |world| {
                        agent_of(world).progress = Progress::Freezing
                    });
                }
            }
            Progress::Freezing if world.source.tasks == Tasks::Alive => {
                steps.then("CRIU has dumped the tasks", |world| {
                    agent_of(world).progress = Progress::Restoring;
                    world.source.criu = true;
                    world.source.proxy = Proxy::Waiting;
                    handle(world, Event::Dumped);
                });
            }
            Progress::Freezing => {
                steps.then("there is nothing to dump", |world| handle(world, Event::Failed))
            }
            Progress::Restoring => {
                if !world.mail.has(Message::Restore)
                    && !world.destination.has_told
                    && !world.destination.is_over()
                {
                    steps.timer("asks the destination to restore", Timer::Ask, |world| {
                        world.mail.send(Message::Restore)
                    });
                }
                if world.destination.has_told {
                    steps.then("hears that the tasks are restored", |world| {
                        agent_of(world).progress = Progress::Restored
                    });
                }
            }
            Progress::Restored => steps.then("has verified everything", |world| {
                agent_of(world).progress = Progress::Verified;
                handle(world, Event::Verified);
            }),
            Progress::Verified => {}
        }
    }
    // An agent that has come since says that it does not know the session any more.
    if world.partner.is_over() || world.destination.is_over() || is_damaged_there(world) {
        steps.then("hears that another host has given up", |world| {
            handle(world, Event::Failed)
        });
    }
    steps.may("a step fails", |world| handle(world, Event::Failed));
    steps.may("an operator cancels", |world| handle(world, Event::Cancel));
}

fn effects(steps: &mut Steps<'_>, agent: &Agent) {
    let host = steps.world.source;
    let quirks = steps.quirks;
    let Some(effect) = agent.effects[0] else {
        return;
    };
    fn done(world: &mut World, event: Event) {
        if let Some(agent) = &mut world.source.agent {
            agent.pop();
        }
        handle(world, event);
    }
    match effect {
        // Where CRIU is gone meanwhile the tasks have run on, and the images are not theirs any more.
        Effect::Freeze if host.criu => steps.then("the cgroup is frozen", |world| {
            world.source.frozen = !quirks.has(Quirk::PtraceOnly);
            done(world, Event::Frozen);
        }),
        Effect::Hold if host.proxy == Proxy::Waiting => steps.then("the proxy holds the tasks", |world| {
            world.source.proxy = Proxy::Holding;
            done(world, Event::Held);
        }),
        Effect::Freeze | Effect::Hold => {
            steps.then("the tasks cannot be held", |world| done(world, Event::Failed))
        }
        Effect::Undo => steps.then("the tasks go on", |world| {
            world.source.proxy_aborts();
            done(world, Event::Undone);
        }),
        Effect::Probe => {
            let fact = fact(&host, quirks);
            let what = match fact {
                Fact::Unknown => "cannot see how the tasks stand",
                _ => "sees how the tasks stand",
            };
            steps.then(what, |world| done(world, Event::Fact(fact)));
        }
    }
}

fn fact(host: &SourceHost, quirks: Quirks) -> Fact {
    match host.tasks {
        _ if let Some(fact) = blind(&host.common, quirks) => fact,
        Tasks::None | Tasks::Gone => Fact::Gone { ran: true },
        _ if host.runs() => Fact::Running,
        _ => Fact::Frozen,
    }
}

fn after_the_decision(steps: &mut Steps<'_>, agent: &Agent) {
    let world = steps.world;
    if matches!(agent.machine.state(), State::Asking(_) | State::Resolving(..)) {
        let answer = answer(world);
        if let Some((answer, what)) = answer {
            steps.then(what, |world| handle(world, Event::Answer(answer)));
        }
    }
    // Neither host knows, and no partner does.
    if matches!(agent.machine.state(), State::Asking(_))
        && agent.machine.is_in_doubt()
        && is_damaged_there(world)
        && !world.partner.says_committed()
    {
        steps.later("an operator decides, since no host can", |world| {
            world.forced = true;
            handle(world, Event::Resolve(Keep::Source));
        });
    }
    if matches!(agent.machine.state(), State::Asking(_)) && agent.machine.is_in_doubt() {
        steps.fault("an operator keeps the source's copy", |world| {
            world.forced = true;
            handle(world, Event::Resolve(Keep::Source));
        });
        steps.fault("an operator keeps the destination's copy", |world| {
            world.forced = true;
            handle(world, Event::Resolve(Keep::Destination));
        });
    }
    let partner_over = world.partner.is_over();
    if agent.tells {
        // Once. Who does not hear it misses the source, and finds out.
        steps.then("tells the others that it was rolled back", |world| {
            world.mail.send(Message::Abort);
            world.mail.send(Message::Settle);
            if let Some(agent) = &mut world.source.agent {
                agent.tells = false;
            }
            handle(world, Event::Told);
        });
    }
    if agent.finishes {
        if world.source.tasks != Tasks::Gone || world.source.criu || world.source.frozen {
            steps.then("the frozen copy is killed", |world| {
                let host = &mut world.source;
                (host.tasks, host.criu, host.frozen, host.proxy) = (Tasks::Gone, false, false, Proxy::None);
                handle(world, Event::Cleared);
            });
        }
        let switched = partner_over && world.partner.end != End::Old;
        if !world.mail.has(Message::Switch) && !partner_over {
            steps.timer("asks the partner to switch", Timer::Ask, |world| {
                world.mail.send(Message::Switch)
            });
        }
        let there = world.destination.is_over();
        if !world.mail.has(Message::Claim) && !there {
            steps.timer("asks the destination to resume", Timer::Ask, |world| {
                world.mail.send(Message::Claim)
            });
        }
        if (switched || partner_over && world.forced) && there && world.source.tasks == Tasks::Gone {
            steps.then("everything is done after the decision", |world| {
                if let Some(agent) = &mut world.source.agent {
                    agent.finishes = false;
                }
                handle(world, Event::Finished);
            });
        }
    }
}

/// What the destination would say now. An answer that is late says the same: only NotYet ever changes.
fn answer(world: &World) -> Option<(CommitAnswer, &'static str)> {
    let host = &world.destination;
    if host.knows_nothing {
        return Some((
            CommitAnswer::NotKnown,
            "hears that the session is not known there",
        ));
    }
    let agent = host.agent.as_ref()?;
    let answer = agent.machine.answer();
    match answer {
        CommitAnswer::Runs => Some((answer, "hears that it runs there")),
        CommitAnswer::NotRun(_) => Some((answer, "hears that it has not run there")),
        CommitAnswer::NotKnown => {
            let is_known = world
                .source
                .agent
                .is_some_and(|agent| agent.machine.is_in_doubt());
            (!is_known).then_some((answer, "hears that records are missing there"))
        }
        CommitAnswer::NotYet => None,
    }
}

/// The destination has lost the records that would say what became of the session.
fn is_damaged_there(world: &World) -> bool {
    let there = world.destination.agent.map(|agent| agent.machine.answer());
    there == Some(CommitAnswer::NotKnown)
}

impl SourceHost {
    /// The session is over here, or its agent is another one: whoever watches it misses it, sooner or later.
    pub(super) fn is_missed(&self) -> bool {
        match &self.agent {
            Some(agent) => {
                agent.has_come_later
                    || matches!(
                        agent.machine.state(),
                        State::Closing(_) | State::Ended(_) | State::Finishing
                    )
            }
            None => true,
        }
    }
}

/// Whether the machine of the destination has come to an end that a source need not wait for.
pub(super) fn is_over(state: destination::State) -> bool {
    matches!(
        state,
        destination::State::Closing(..) | destination::State::Ended(_)
    )
}
