//! The destination: its agent, QEMU, and the guest.

use strum::VariantArray;
use verbatim_session::behind::Told;
use verbatim_session::decision::{Timer, Written};
use verbatim_session::fill::{Action, Event, Fill, Noted};

use super::{Bringing, DestinationAgent, Qemu, Quirk, Quirks, Record, Session, Steps, Why, World, is_filled};

/// Gives the machine an event, and carries out what is done at once.
fn handle(world: &mut World, event: Event) {
    let Some(agent) = &mut world.destination.agent else {
        return;
    };
    let Some(fill) = &mut agent.fill else { return };
    let before = fill.state();
    let actions = fill.handle(event);
    if fill.state() != before {
        agent.timers = 0;
    }
    carry_out(world, actions);
}

fn carry_out(world: &mut World, actions: Vec<Action>) {
    let Some(agent) = &mut world.destination.agent else {
        return;
    };
    for action in actions {
        match action {
            Action::Listen => agent.effect = Some(Bringing::Listen),
            Action::Kill => agent.effect = Some(Bringing::Kill),
            Action::Clear => agent.effect = Some(Bringing::Clear),
            Action::Write => world.destination.writing = Some(Record::Filled),
            Action::After(timer) => agent.timers |= 1 << timer as u8,
        }
    }
}

/// What was carried out is done.
fn done(world: &mut World, event: Event) {
    if let Some(agent) = &mut world.destination.agent {
        agent.effect = None;
    }
    handle(world, event);
}

fn set(world: &mut World, session: Session) {
    if let Some(agent) = &mut world.destination.agent {
        agent.session = session;
    }
}

/// QEMU is gone, and its RAM and the list with it.
fn end(world: &mut World, why: Why) {
    world.destination.qemu = Qemu::Gone(why);
    world.destination.listed = None;
}

/// The guest has not run, and will not.
fn give_up(world: &mut World) {
    set(world, Session::Over);
    end(world, Why::GivenUp);
    world.destination.journal = Told::RolledBack;
}

pub(super) fn steps(steps: &mut Steps<'_>) {
    let world = steps.world;
    steps.fault("the host reboots", |world| {
        (world.destination.agent, world.destination.writing) = (None, None);
        match world.destination.qemu {
            Qemu::Running => end(world, Why::Ended),
            Qemu::Held => end(world, Why::GivenUp),
            Qemu::Gone(_) => {}
        }
    });
    let quirks = steps.quirks;
    let Some(agent) = world.destination.agent else {
        steps.later("the agent starts", move |world| start(world, quirks));
        return;
    };
    steps.fault("the agent dies", |world| {
        (world.destination.agent, world.destination.writing) = (None, None);
    });
    session(steps, &agent);
    pages(steps, &agent);
    effects(steps, &agent);
    if world.destination.writing.is_some() {
        steps.then("a record is on disk", written);
        steps.fault("the disk refuses a record", |world| {
            match world.destination.writing.take() {
                Some(Record::Committed) => give_up(world),
                Some(Record::Filled) => handle(world, Event::Written(Written::Failed)),
                None => {}
            }
        });
    }
    for timer in Timer::VARIANTS {
        let bit = 1 << *timer as u8;
        if agent.timers & bit != 0 {
            steps.timer("it is time to try again", *timer, |world| {
                if let Some(agent) = &mut world.destination.agent {
                    agent.timers &= !bit;
                }
                handle(world, Event::Elapsed(*timer));
            });
        }
    }
}

fn session(steps: &mut Steps<'_>, agent: &DestinationAgent) {
    match agent.session {
        Session::Restored => {
            steps.then("is asked to commit", |world| set(world, Session::Committing));
            steps.may("the session is given up", give_up);
        }
        Session::Committing if steps.world.destination.writing.is_none() => {
            steps.then("begins to write that it is committed", |world| {
                world.destination.writing = Some(Record::Committed);
            });
        }
        Session::Committing => {}
        Session::Releasing => steps.then("lets the guest run", |world| {
            set(world, Session::Over);
            world.destination.qemu = Qemu::Running;
            let (fill, actions) = Fill::begin();
            if let Some(agent) = &mut world.destination.agent {
                agent.fill = Some(fill);
            }
            carry_out(world, actions);
        }),
        Session::Over => {}
    }
}

fn written(world: &mut World) {
    match world.destination.writing.take() {
        Some(Record::Committed) => {
            world.destination.journal = Told::Committed(Noted::Missing);
            set(world, Session::Releasing);
        }
        Some(Record::Filled) => {
            world.destination.journal = Told::Committed(Noted::Nothing);
            handle(world, Event::Written(Written::Durable));
        }
        None => {}
    }
}

/// An agent comes after one that died.
fn start(world: &mut World, quirks: Quirks) {
    world.destination.agent = Some(DestinationAgent {
        session: Session::Over,
        fill: None,
        effect: None,
        timers: 0,
    });
    match (world.destination.qemu, world.destination.journal) {
        // What was not released never runs.
        (Qemu::Held, _) => give_up(world),
        (Qemu::Gone(Why::GivenUp), _) => world.destination.journal = Told::RolledBack,
        (Qemu::Gone(_), journal) => {
            world.destination.listed = None;
            if !is_filled(journal) && !quirks.has(Quirk::EndIsNotNoted) {
                world.destination.journal = Told::Committed(Noted::Nothing);
            }
        }
        (Qemu::Running, _) if quirks.has(Quirk::ForgetsList) => {}
        (Qemu::Running, journal) => {
            let noted = match journal {
                Told::Committed(noted) => noted,
                Told::NotKnown | Told::Undecided | Told::RolledBack => Noted::Unknown,
            };
            let (fill, actions) = Fill::recover(noted, world.destination.listed.is_some());
            if let Some(agent) = &mut world.destination.agent {
                agent.fill = Some(fill);
            }
            carry_out(world, actions);
        }
    }
}

/// What is missing comes, from before the decision on.
fn pages(steps: &mut Steps<'_>, agent: &DestinationAgent) {
    let world = steps.world;
    let brings = match agent.effect {
        Some(effect) => effect == Bringing::Listen,
        None => agent.session != Session::Over,
    };
    let is_there = matches!(world.destination.qemu, Qemu::Held | Qemu::Running);
    let Some(listed) = world.destination.listed.filter(|_| brings && is_there) else {
        return;
    };
    if world.destination.missing < listed {
        steps.then("takes what has come off the list", |world| {
            world.destination.listed = Some(world.destination.missing);
        });
    }
    if listed == 0 {
        return;
    }
    let lost = move |world: &mut World| match world.destination.qemu {
        Qemu::Held => give_up(world),
        _ => done(world, Event::Lost),
    };
    // Between it is asked for nothing: whether it is lost is found when the guest runs.
    let looks = matches!(agent.session, Session::Restored | Session::Over);
    let gives = world.source.agent.map(|agent| agent.gives && world.source.kept);
    match gives {
        Some(true) if world.destination.missing > 0 => {
            steps.then("a page comes", |world| world.destination.missing -= 1);
        }
        Some(true) => {}
        _ if !looks => {}
        Some(false) => steps.then("hears that nothing is kept", lost),
        None if steps.quirks.has(Quirk::SilentKeepsNothing) => steps.then("gets no answer", lost),
        None => {}
    }
}

fn effects(steps: &mut Steps<'_>, agent: &DestinationAgent) {
    let world = steps.world;
    match agent.effect {
        None => {}
        Some(Bringing::Listen) => {
            let is_gone = matches!(world.destination.qemu, Qemu::Gone(_));
            if is_gone || world.destination.listed.is_none_or(|pages| pages == 0) {
                steps.then("finds that nothing is missing", |world| {
                    done(world, Event::Filled)
                });
            }
        }
        Some(Bringing::Kill) => {
            steps.then("ends QEMU", |world| {
                if world.destination.qemu == Qemu::Running {
                    end(world, Why::Lost);
                }
                done(world, Event::Killed { gone: true });
            });
            steps.may("cannot end QEMU", |world| {
                done(world, Event::Killed { gone: false })
            });
        }
        Some(Bringing::Clear) => {
            steps.then("removes the list", |world| {
                world.destination.listed = None;
                done(world, Event::Cleared { gone: true });
            });
            steps.may("cannot remove the list", |world| {
                done(world, Event::Cleared { gone: false });
            });
        }
    }
}

pub(super) fn guest(steps: &mut Steps<'_>) {
    let world = steps.world;
    if world.destination.qemu != Qemu::Running {
        return;
    }
    steps.may("it ends", |world| world.destination.qemu = Qemu::Gone(Why::Ended));
    let Some(agent) = world.destination.agent else {
        return;
    };
    steps.may("an operator stops it", |world| end(world, Why::Ended));
    let is_whole = agent.fill.is_none_or(|fill| fill.is_whole()) || steps.quirks.has(Quirk::MovesOn);
    if agent.session == Session::Over && is_whole {
        steps.may("it moves on to another host", |world| end(world, Why::Moved));
    }
}
