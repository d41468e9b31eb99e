//! One host's part in a session: what its machine wants done is carried out, coarsely.

use verbatim_session::Role;
use verbatim_session::decision::destination::{self, Destination};
use verbatim_session::decision::source::{self, Question, Source};
use verbatim_session::decision::{CommitAnswer, Evidence, Fact, Keep, Mark, Outcome, Written};
use verbatim_session::fill::{Fill, Noted};
use verbatim_session::recovery::{Brought, Record, Touches};

use super::journal::{self, Says};
use super::{Effect, Machine, Part, Quirk, Quirks, Steps, Tasks, World, host, index, named};

/// A part is an agent's from now on.
pub(super) fn insert(world: &mut World, host: u8, part: usize, machine: Machine, touches: Touches) {
    if let Some(agent) = &mut world.host_mut(host).agent {
        agent.parts[part] = Some(Part {
            machine,
            effects: Vec::new(),
            touches,
            is_recovered: true,
        });
    }
}

/// The part has to do with the instance's tasks: no other session moves them on.
pub(super) fn has_the_tasks(part: &Part) -> bool {
    match part.machine {
        Machine::Source(machine) => matches!(
            machine.state(),
            source::State::Probing(_)
                | source::State::Working(_)
                | source::State::Holding
                | source::State::Asking(_)
                | source::State::Resolving(..)
                | source::State::RollingBack
                | source::State::Undoing
        ),
        Machine::Destination(_) => false,
    }
}

/// What the destination of a session says of its decision.
pub(super) fn says(world: &World, session: u8) -> Option<Outcome> {
    match answer(world, session)? {
        CommitAnswer::Runs => Some(Outcome::Committed),
        CommitAnswer::NotRun(_) => Some(Outcome::RolledBack),
        CommitAnswer::NotYet | CommitAnswer::NotKnown => None,
    }
}

fn answer(world: &World, session: u8) -> Option<CommitAnswer> {
    let there = world.moves[usize::from(session)].to;
    let part = index(session, Role::Destination);
    world.agent(there)?;
    Some(match world.part(there, part).map(|part| part.machine) {
        Some(Machine::Destination(machine)) => machine.answer(),
        _ => {
            let standing = world.hosts[usize::from(there)].journal.standing(part);
            match (standing, journal::outcome(standing, Role::Destination)) {
                (None, _) => CommitAnswer::NotKnown,
                (_, Some(Outcome::Committed)) => CommitAnswer::Runs,
                (_, Some(Outcome::RolledBack)) => CommitAnswer::NotRun(Evidence::GivenUp),
                (_, None) => CommitAnswer::NotYet,
            }
        }
    })
}

fn handle_source(world: &mut World, host: u8, part: usize, event: source::Event) {
    let Some(agent) = &mut world.host_mut(host).agent else {
        return;
    };
    let Some(Part {
        machine: Machine::Source(machine),
        ..
    }) = &mut agent.parts[part]
    else {
        return;
    };
    let actions = machine.handle(event);
    source_actions(world, host, part, actions);
}

pub(super) fn source_actions(world: &mut World, host: u8, part: usize, actions: Vec<source::Action>) {
    use source::{Action, Event};
    let mut at_once = None;
    if let Some(Part { effects, .. }) = part_mut(world, host, part) {
        for action in actions {
            match action {
                Action::Freeze => effects.push(Effect::Freeze),
                Action::Hold => effects.push(Effect::Hold),
                Action::Write(mark) => effects.push(Effect::Write(mark)),
                Action::Probe => effects.push(Effect::Probe),
                Action::Undo => effects.push(Effect::Undo),
                Action::Finish => effects.push(Effect::Finish),
                Action::Tell => at_once = Some(Event::Told),
                // Asking is a step of its own: see below.
                Action::Ask(_) | Action::Doubt | Action::Refuse | Action::After(_) => {}
            }
        }
    }
    if let Some(event) = at_once {
        handle_source(world, host, part, event);
    }
}

fn handle_destination(world: &mut World, host: u8, part: usize, event: destination::Event) {
    let Some(agent) = &mut world.host_mut(host).agent else {
        return;
    };
    let Some(Part {
        machine: Machine::Destination(machine),
        ..
    }) = &mut agent.parts[part]
    else {
        return;
    };
    let actions = machine.handle(event);
    destination_actions(world, host, part, actions);
}

pub(super) fn destination_actions(
    world: &mut World,
    host: u8,
    part: usize,
    actions: Vec<destination::Action>,
) {
    use destination::Action;
    let Some(Part { effects, machine, .. }) = part_mut(world, host, part) else {
        return;
    };
    for action in actions {
        match action {
            Action::Write(mark) => effects.push(Effect::Write(mark)),
            Action::Release => effects.push(Effect::Release),
            Action::Probe => effects.push(Effect::Probe),
            Action::Undo => effects.push(Effect::Undo),
            // Asking is a step of its own, and so is driving: see below.
            Action::Ask | Action::Drive | Action::After(_) => {}
        }
    }
    // The volume daemon hears of it as soon as it is known.
    let is_decided = matches!(machine, Machine::Destination(machine)
        if matches!(machine.state(), destination::State::Running { .. } | destination::State::Closing(..)));
    if is_decided {
        tell_volumes(world, host, part);
    }
    host::let_go_of_the_name(world, host, part);
}

fn part_mut(world: &mut World, host: u8, part: usize) -> Option<&mut Part> {
    world.host_mut(host).agent.as_mut()?.parts[part].as_mut()
}

fn tell_volumes(world: &mut World, host: u8, part: usize) {
    let host = world.host_mut(host);
    if let Some(agent) = &mut host.agent {
        agent.tells |= host.volumes & 1 << part;
    }
}

/// The name is free, if this session has it.
fn let_go(world: &mut World, host: u8, part: usize) {
    let (session, _) = named(part);
    if let Some(agent) = &mut world.host_mut(host).agent
        && agent.reserved == Some(session)
    {
        agent.reserved = None;
    }
}

/// The part has come to its end: the agent forgets it.
fn close(world: &mut World, host: u8, part: usize) {
    let_go(world, host, part);
    if let Some(agent) = &mut world.host_mut(host).agent {
        agent.parts[part] = None;
    }
}

pub(super) fn steps(steps: &mut Steps<'_>, host: u8, part: usize) {
    let world = steps.world;
    let Some(here) = world.part(host, part) else {
        return;
    };
    if let Some(effect) = here.effects.first().copied() {
        let what = match effect {
            Effect::Write(Mark::Deciding) => "writes down that it decides",
            Effect::Write(Mark::Committed) => "writes down that it is committed",
            Effect::Write(Mark::Ran) => "writes down that it ran",
            Effect::Write(Mark::Cleared) => "writes down that the old place is cleared",
            Effect::Write(Mark::RolledBack) => "writes down that it is rolled back",
            Effect::Write(Mark::Closed(_)) => "writes down that it is over",
            Effect::Write(_) => "writes down what was decided",
            Effect::Freeze => "freezes the tasks",
            Effect::Hold => "has the tasks held",
            Effect::Release => "lets the tasks go",
            Effect::Probe => "looks how the tasks stand",
            Effect::Undo => "undoes the session",
            Effect::Finish => "clears the old place",
        };
        let quirks = steps.quirks;
        steps.then(what, |world| {
            if let Some(part) = part_mut(world, host, part) {
                part.effects.remove(0);
            }
            match named(part).1 {
                Role::Source => carry_out_source(world, host, part, effect, quirks),
                _ => carry_out_destination(world, host, part, effect),
            }
        });
    }
    match here.machine {
        Machine::Source(machine) => source_steps(steps, host, part, here, machine),
        Machine::Destination(machine) => destination_steps(steps, host, part, here, machine),
    }
}

fn carry_out_source(world: &mut World, number: u8, part: usize, effect: Effect, quirks: Quirks) {
    use source::Event;
    let (session, _) = named(part);
    let Some(here) = world.part(number, part).cloned() else {
        return;
    };
    let host = world.host_mut(number);
    let event = match effect {
        Effect::Write(mark) => {
            host.journal.write(part, Says::Mark(mark));
            if mark == Mark::Cleared {
                let_go(world, number, part);
            }
            if let Mark::Closed(_) = mark {
                handle_source(world, number, part, Event::Written(mark, Written::Durable));
                return close(world, number, part);
            }
            Event::Written(mark, Written::Durable)
        }
        Effect::Freeze => match &mut host.tasks {
            Some(tasks) => {
                tasks.run = false;
                Event::Frozen
            }
            None => Event::Failed,
        },
        Effect::Hold => match &mut host.tasks {
            Some(tasks) => {
                tasks.record.held_by = Some(u64::from(session));
                if let Some(agent) = &mut host.agent {
                    agent.reserved = Some(session);
                }
                Event::Held
            }
            None => Event::Failed,
        },
        Effect::Probe => Event::Fact(match host.tasks {
            Some(tasks) if here.touches.anything() => match tasks.run {
                true => Fact::Running,
                false => Fact::Frozen,
            },
            _ => Fact::Gone { ran: true },
        }),
        Effect::Undo => {
            if here.touches.undo
                && let Some(tasks) = &mut host.tasks
            {
                tasks.run = true;
                tasks.record.held_by = None;
            }
            tell_volumes(world, number, part);
            let_go(world, number, part);
            Event::Undone
        }
        Effect::Finish => {
            if here.touches.finish {
                host.tasks = None;
                host.marker = None;
                if let Some(agent) = &mut host.agent {
                    agent.fill = None;
                }
            }
            tell_volumes(world, number, part);
            match here.is_recovered && quirks.has(Quirk::LeavesThePartner) {
                true => Event::Finished,
                false => Event::Cleared,
            }
        }
        Effect::Release => return,
    };
    handle_source(world, number, part, event);
}

fn carry_out_destination(world: &mut World, number: u8, part: usize, effect: Effect) {
    use destination::Event;
    let (session, _) = named(part);
    let Some(here) = world.part(number, part).cloned() else {
        return;
    };
    let lacks = world.moves[usize::from(session)].lacks;
    let host = world.host_mut(number);
    let event = match effect {
        Effect::Write(mark) => {
            host.journal.write(
                part,
                match (mark, lacks) {
                    (Mark::Committed, true) => Says::Committed(Noted::Missing),
                    (Mark::Committed, false) => Says::Committed(Noted::Nothing),
                    _ => Says::Mark(mark),
                },
            );
            if let Mark::Closed(_) = mark {
                handle_destination(world, number, part, Event::Written(mark, Written::Durable));
                return close(world, number, part);
            }
            Event::Written(mark, Written::Durable)
        }
        Effect::Release if host.arriving == Some(session) => {
            host.arriving = None;
            host.marker = Some(session);
            host.tasks = Some(Tasks {
                run: true,
                record: Record {
                    brought: Brought::By(u64::from(session)),
                    held_by: None,
                },
                lack: lacks,
                cache: lacks,
            });
            if let Some(agent) = &mut host.agent {
                agent.reserved = None;
                agent.fill = lacks.then(|| (Fill::begin().0, Some(session)));
            }
            Event::Released
        }
        Effect::Release => Event::ReleaseFailed,
        Effect::Probe => Event::Fact(probe(world, number, part, &here)),
        Effect::Undo => {
            if here.touches.undo {
                host.arriving = None;
                host.tasks = None;
                host.marker = None;
            }
            Event::Undone
        }
        Effect::Freeze | Effect::Hold | Effect::Finish => return,
    };
    handle_destination(world, number, part, event);
}

/// As an agent looks: what is not the session's own is not looked at.
fn probe(world: &mut World, number: u8, part: usize, here: &Part) -> Fact {
    use destination::{NoMarker, State, Then};
    let (session, _) = named(part);
    let host = world.host_mut(number);
    let Machine::Destination(machine) = here.machine else {
        return Fact::Unknown;
    };
    let its = host
        .tasks
        .filter(|tasks| here.touches.finish && tasks.record.brought == Brought::By(u64::from(session)));
    match machine.state() {
        // Tasks that went may have run; of what is missing nothing is known.
        State::Judging(NoMarker::NeverReleased | NoMarker::Went) if !here.touches.finish => {
            Fact::Gone { ran: true }
        }
        State::Judging(NoMarker::Went) => Fact::Gone { ran: true },
        State::Judging(_) if here.touches.finish => match (host.marker == Some(session), its) {
            (true, Some(_)) => Fact::Running,
            (true, None) => Fact::Gone { ran: true },
            (false, _) => {
                host.arriving = None;
                Fact::Gone { ran: false }
            }
        },
        State::Probing(Then::Drive) if its.is_some() => Fact::Running,
        State::Probing(Then::Drive) => Fact::Gone { ran: true },
        _ => Fact::Gone { ran: false },
    }
}

fn source_steps(steps: &mut Steps<'_>, host: u8, part: usize, here: &Part, machine: Source) {
    use source::{Event, State};
    let world = steps.world;
    let (session, _) = named(part);
    let there = world.moves[usize::from(session)].to;
    let part_there = index(session, Role::Destination);
    let state_there = world.part(there, part_there).and_then(|part| match part.machine {
        Machine::Destination(machine) => Some(machine.state()),
        Machine::Source(_) => None,
    });
    let is_idle = here.effects.is_empty();
    match machine.state() {
        State::Working(ready) if is_idle && !ready.deciding => {
            steps.then("has dumped the tasks", |world| {
                handle_source(world, host, part, Event::Dumped)
            });
            steps.may("a step fails", |world| {
                handle_source(world, host, part, Event::Failed)
            });
        }
        State::Working(_) if is_idle => match state_there {
            Some(destination::State::Preparing) => steps.then("the tasks are restored there", |world| {
                world.host_mut(there).arriving = Some(session);
                handle_destination(world, there, part_there, destination::Event::Restored);
            }),
            Some(destination::State::Restored) => steps.then("all is verified", |world| {
                handle_source(world, host, part, Event::Verified)
            }),
            _ => steps.then("hears that the destination has given up", |world| {
                handle_source(world, host, part, Event::Failed)
            }),
        },
        State::Asking(question) => {
            let restored = state_there == Some(destination::State::Restored);
            let preparing = state_there == Some(destination::State::Preparing);
            match question {
                Question::Commit if restored => steps.then("asks the destination to commit", |world| {
                    let event = destination::Event::Commit { alive: true };
                    handle_destination(world, there, part_there, event);
                }),
                Question::Settle if restored || preparing => {
                    steps.then("tells the destination that it is not wanted any more", |world| {
                        handle_destination(world, there, part_there, destination::Event::Abort);
                    });
                }
                _ => {}
            }
            hears(steps, host, part, machine);
        }
        State::Finishing if is_idle && world.moves[usize::from(session)].is_switched => {
            steps.then("everything is done after the decision", |world| {
                handle_source(world, host, part, Event::Finished)
            });
        }
        _ => {}
    }
}

fn hears(steps: &mut Steps<'_>, host: u8, part: usize, machine: Source) {
    use source::Event;
    let (session, _) = named(part);
    let hears = |answer| move |world: &mut World| handle_source(world, host, part, Event::Answer(answer));
    match answer(steps.world, session) {
        Some(answer @ CommitAnswer::Runs) => steps.then("hears that it runs there", hears(answer)),
        Some(answer @ CommitAnswer::NotRun(_)) => {
            steps.then("hears that it has not run there", hears(answer))
        }
        Some(answer @ CommitAnswer::NotKnown) if !machine.is_in_doubt() => {
            steps.then("hears that nobody knows there", hears(answer))
        }
        Some(CommitAnswer::NotKnown) => steps.later("an operator decides, since no host can", |world| {
            world.forced = true;
            handle_source(world, host, part, Event::Resolve(Keep::Source));
        }),
        Some(CommitAnswer::NotYet) | None => {}
    }
}

fn destination_steps(steps: &mut Steps<'_>, host: u8, part: usize, here: &Part, machine: Destination) {
    use destination::{Event, State};
    let world = steps.world;
    let (session, _) = named(part);
    let Move {
        is_switched, drives, ..
    } = Move::of(world, session, machine);
    let source_lives = source_lives(world, session);
    let event = |event| move |world: &mut World| handle_destination(world, host, part, event);
    match machine.state() {
        State::Preparing | State::Restored | State::Running { drives: false } if !source_lives => {
            steps.later("misses the source", event(Event::SourceLost));
        }
        State::Preparing | State::Restored => {
            steps.may("loses sight of the source", event(Event::SourceLost));
        }
        // A source does not wait for a partner that is behind; a destination in its place does.
        State::Running { .. }
            if here.effects.is_empty() && (is_finishing(world, session) || drives && is_switched) =>
        {
            steps.then("its connections work", event(Event::Finished));
        }
        State::Asking => {
            let from = world.moves[usize::from(session)].from;
            let source = index(session, Role::Source);
            let standing = world.hosts[usize::from(from)].journal.standing(source);
            let said = journal::outcome(standing, Role::Source).filter(|_| world.agent(from).is_some());
            let answer = match said {
                Some(Outcome::Committed) => Some(CommitAnswer::Runs),
                Some(Outcome::RolledBack) => Some(CommitAnswer::NotRun(Evidence::GivenUp)),
                // A source that has it do what follows from the commit.
                None => is_finishing(world, session).then_some(CommitAnswer::Runs),
            };
            if let Some(answer) = answer {
                steps.then(
                    "hears from the source what was decided",
                    event(Event::Answer(answer)),
                );
            }
        }
        _ => {}
    }
}

/// What a destination sees of its move.
struct Move {
    is_switched: bool,
    drives: bool,
}

impl Move {
    fn of(world: &World, session: u8, machine: Destination) -> Self {
        Self {
            is_switched: world.moves[usize::from(session)].is_switched,
            drives: matches!(machine.state(), destination::State::Running { drives: true }),
        }
    }
}

fn source_of(world: &World, session: u8) -> Option<&Part> {
    world.part(
        world.moves[usize::from(session)].from,
        index(session, Role::Source),
    )
}

/// The agent that has begun the session at its source sees to it still.
fn source_lives(world: &World, session: u8) -> bool {
    source_of(world, session).is_some_and(|part| !part.is_recovered)
}

/// The source knows that it is committed, and does what is left.
fn is_finishing(world: &World, session: u8) -> bool {
    source_of(world, session).is_some_and(|part| {
        part.effects.is_empty()
            && matches!(part.machine, Machine::Source(machine) if machine.state() == source::State::Finishing)
    })
}

/// The host of the instance's partner.
pub(super) fn partner(steps: &mut Steps<'_>) {
    const SWITCHES: [&str; super::MOVES] = ["switches in move 0", "switches in move 1", "switches in move 2"];
    let world = steps.world;
    if !world.partner {
        steps.later("the partner is back", |world| world.partner = true);
        return;
    }
    for session in 0..world.begun {
        let to = world.moves[usize::from(session)].to;
        let there = world.part(to, index(session, Role::Destination));
        let drives = there.is_some_and(|part| {
            matches!(part.machine, Machine::Destination(machine)
                if machine.state() == destination::State::Running { drives: true })
        });
        if !world.moves[usize::from(session)].is_switched && (drives || is_finishing(world, session)) {
            steps.later(SWITCHES[usize::from(session)], |world| {
                world.moves[usize::from(session)].is_switched = true
            });
        }
    }
}
