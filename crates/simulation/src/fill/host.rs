//! The host: its agent, the processes that give memory, and the instance.

use strum::VariantArray;
use verbatim_session::decision::{Timer, Written};
use verbatim_session::fill::{Action, Event, Fill, Noted};

use super::{Agent, Effect, Quirk, Record, Session, Steps, Tasks, Why, World};

/// Gives the machine an event, and carries out what is done at once.
fn handle(world: &mut World, event: Event) {
    let Some(agent) = &mut world.agent else { return };
    let Some(fill) = &mut agent.fill else { return };
    let before = fill.state();
    let actions = fill.handle(event);
    if fill.state() != before {
        agent.timers = 0;
    }
    carry_out(world, actions);
}

fn carry_out(world: &mut World, actions: Vec<Action>) {
    let Some(agent) = &mut world.agent else { return };
    for action in actions {
        match action {
            Action::Listen => agent.effect = Some(Effect::Listen),
            Action::Kill => agent.effect = Some(Effect::Kill),
            Action::Clear => agent.effect = Some(Effect::RemoveCache),
            Action::Write => world.writing = Some(Record::Filled),
            Action::After(timer) => agent.timers |= 1 << timer as u8,
        }
    }
}

/// What was carried out is done.
fn done(world: &mut World, event: Event) {
    if let Some(agent) = &mut world.agent {
        agent.effect = None;
    }
    handle(world, event);
}

pub(super) fn agent(steps: &mut Steps<'_>) {
    let world = steps.world;
    let Some(agent) = world.agent else {
        let quirks = steps.quirks;
        steps.later("the agent starts", move |world| start(world, quirks));
        return;
    };
    session(steps, &agent);
    effects(steps, &agent);
    if world.writing.is_some() {
        steps.then("a record is on disk", written);
        steps.fault("the disk refuses a record", |world| match world.writing.take() {
            Some(Record::Committed) => give_up(world),
            Some(Record::Filled) => handle(world, Event::Written(Written::Failed)),
            None => {}
        });
    }
    for timer in Timer::VARIANTS {
        let bit = 1 << *timer as u8;
        if agent.timers & bit != 0 {
            steps.timer("it is time to try again", *timer, |world| {
                if let Some(agent) = &mut world.agent {
                    agent.timers &= !bit;
                }
                handle(world, Event::Elapsed(*timer));
            });
        }
    }
    steps.fault("the agent dies", |world| {
        world.agent = None;
        world.writing = None;
    });
}

/// The session: the other hosts' part of it is told in one step.
fn session(steps: &mut Steps<'_>, agent: &Agent) {
    let quirks = steps.quirks;
    match agent.session {
        Session::Restored => {
            if steps.world.is_given() {
                steps.then("is asked to commit", |world| set(world, Session::Committing));
            } else {
                steps.then("finds nobody who would give the memory", give_up);
            }
            steps.may("the session is given up", give_up);
        }
        Session::Committing if steps.world.writing.is_none() => {
            steps.then("begins to write that it is committed", |world| {
                world.writing = Some(Record::Committed);
            });
        }
        Session::Committing => {}
        Session::Releasing if !steps.world.is_given() => {
            steps.then("does not let tasks go that nobody gives their memory", give_up);
        }
        Session::Releasing => steps.then("lets the tasks go", move |world| {
            set(world, Session::Over);
            world.tasks = Tasks::Running;
            let (fill, actions) = Fill::begin();
            if let Some(agent) = &mut world.agent {
                agent.fill = Some(fill);
            }
            carry_out(world, actions);
            if quirks.has(Quirk::ClearsWithTheSession) {
                world.clear();
            }
        }),
        Session::Over => {}
    }
}

fn set(world: &mut World, session: Session) {
    if let Some(agent) = &mut world.agent {
        agent.session = session;
    }
}

/// The tasks have not run, and will not.
fn give_up(world: &mut World) {
    set(world, Session::Over);
    world.tasks = Tasks::Gone(Why::GivenUp);
    world.journal = world.journal.map(|_| Noted::Nothing);
    world.clear();
}

fn written(world: &mut World) {
    match world.writing.take() {
        Some(Record::Committed) => {
            world.journal = Some(Noted::Missing);
            set(world, Session::Releasing);
        }
        Some(Record::Filled) => {
            world.journal = Some(Noted::Nothing);
            handle(world, Event::Written(Written::Durable));
        }
        None => {}
    }
}

/// An agent comes after one that died.
fn start(world: &mut World, quirks: super::Quirks) {
    world.agent = Some(Agent {
        session: Session::Over,
        fill: None,
        effect: None,
        timers: 0,
    });
    if quirks.has(Quirk::EndsWhatItFinds) {
        world.end_processes();
    }
    match (world.tasks, world.journal) {
        (Tasks::Held, _) => {
            // What was not released never runs.
            give_up(world);
        }
        (Tasks::Gone(_), _) => {
            world.clear();
            // Of no task anything is missing.
            world.journal = world.journal.map(|_| Noted::Nothing);
        }
        (Tasks::Running, noted) => {
            let noted = noted.unwrap_or(Noted::Unknown);
            let (fill, actions) = match quirks {
                _ if quirks.has(Quirk::ForgetsFill) => return,
                _ if quirks.has(Quirk::OnlyTheCache) => Fill::recover(Noted::Unknown, world.cache),
                _ => Fill::recover(noted, world.cache || world.socket),
            };
            if let Some(agent) = &mut world.agent {
                agent.fill = Some(fill);
            }
            carry_out(world, actions);
        }
    }
}

fn effects(steps: &mut Steps<'_>, agent: &Agent) {
    let world = steps.world;
    match agent.effect {
        None => {}
        Some(Effect::Listen) => {
            let is_gone = !world.worker && !world.guardian;
            if world.word || is_gone && !world.socket {
                steps.then("hears that nothing is missing", |world| {
                    done(world, Event::Filled)
                });
            } else if is_gone && steps.quirks.has(Quirk::GoneIsFilled) {
                steps.then("finds them gone", |world| done(world, Event::Filled));
            } else if is_gone {
                steps.then("finds them gone", |world| done(world, Event::Lost));
            } else if !world.worker && steps.quirks.has(Quirk::SilentIsLost) {
                steps.then("gets no answer", |world| done(world, Event::Lost));
            }
        }
        Some(Effect::Kill) => {
            steps.then("ends the tasks", |world| {
                if world.tasks == Tasks::Running {
                    world.tasks = Tasks::Gone(Why::Lost);
                }
                done(world, Event::Killed { gone: true });
            });
            steps.may("cannot end the tasks", |world| {
                done(world, Event::Killed { gone: false })
            });
        }
        Some(Effect::RemoveCache) => {
            steps.then("removes the files", |world| {
                world.cache = false;
                if let Some(agent) = &mut world.agent {
                    agent.effect = Some(Effect::EndProcesses);
                }
            });
            steps.may("cannot remove the files", |world| {
                done(world, Event::Cleared { gone: false });
            });
        }
        Some(Effect::EndProcesses) => steps.then("has the processes end", |world| {
            world.end_processes();
            done(world, Event::Cleared { gone: true });
        }),
    }
}

pub(super) fn processes(steps: &mut Steps<'_>) {
    let world = steps.world;
    if world.worker && world.lacks() && !world.stalled {
        steps.then("give a page", |world| world.missing -= 1);
    }
    let is_done = !world.lacks() && world.tasks != Tasks::Held;
    if world.worker && is_done && !world.word {
        steps.then("leave word that nothing is missing", |world| world.word = true);
    }
    if world.guardian && !world.worker {
        steps.then("the guardian starts another worker", |world| {
            world.worker = true;
            world.stalled = !world.cache;
        });
    }
    if world.worker && !world.guardian {
        steps.then("the worker starts another guardian", |world| {
            world.guardian = true
        });
    }
    if world.worker {
        steps.fault("the worker is killed", |world| {
            world.worker = false;
            world.killed |= !world.guardian;
        });
    }
    if world.guardian {
        steps.fault("the guardian is killed", |world| {
            world.guardian = false;
            world.killed |= !world.worker;
        });
    }
    if world.worker && world.guardian {
        steps.fault("both are killed at once", |world| {
            (world.worker, world.guardian, world.killed) = (false, false, true);
        });
    }
}

pub(super) fn instance(steps: &mut Steps<'_>) {
    let world = steps.world;
    if world.tasks != Tasks::Running {
        return;
    }
    steps.may("the program ends", |world| world.tasks = Tasks::Gone(Why::Ended));
    if world.missing > 0 && world.is_given() {
        steps.may("the program gives a page back that has not come", |world| {
            world.missing -= 1
        });
    }
    let Some(agent) = world.agent else { return };
    let stops = |world: &mut World| {
        world.tasks = Tasks::Gone(Why::Ended);
        world.clear();
    };
    match world.stalled {
        // It stands still, and says so to its operator.
        true => steps.later("an operator stops it", stops),
        false => steps.may("an operator stops it", stops),
    }
    let is_whole = agent.fill.is_none_or(|fill| fill.is_whole()) || steps.quirks.has(Quirk::MovesOn);
    if agent.session == Session::Over && is_whole {
        steps.may("it moves on to another host", |world| {
            world.tasks = Tasks::Gone(Why::Moved);
            world.clear();
        });
    }
}

pub(super) fn faults(steps: &mut Steps<'_>) {
    let world = steps.world;
    if world.agent.is_none() && world.journal.is_some_and(|noted| noted != Noted::Unknown) {
        steps.fault("records of the journal are lost", |world| {
            world.journal = Some(Noted::Unknown);
        });
    }
    if world.cache && world.tasks == Tasks::Running {
        steps.fault("somebody removes the files", |world| world.cache = false);
    }
    steps.fault("the host reboots", |world| {
        let journal = world.journal;
        world.clear();
        (world.agent, world.writing, world.journal) = (None, None, journal);
        world.tasks = match world.tasks {
            Tasks::Running => Tasks::Gone(Why::Ended),
            Tasks::Held => Tasks::Gone(Why::GivenUp),
            gone => gone,
        };
    });
}
