//! The source: its agent, and what it keeps.

use strum::VariantArray;
use verbatim_session::behind::{Action, Behind, Event, Told};
use verbatim_session::decision::{Outcome, Timer};
use verbatim_session::fill::Noted;

use super::{Effect, Quirk, Quirks, SourceAgent, Steps, World};
use crate::simulated::Simulated;

/// Gives the machine an event, and carries out what is done at once.
fn handle(world: &mut World, event: Event) {
    let Some(agent) = &mut world.source.agent else {
        return;
    };
    let Some(behind) = &mut agent.behind else { return };
    let before = behind.state();
    let actions = behind.handle(event);
    if behind.state() != before {
        agent.timers = 0;
    }
    carry_out(world, actions);
}

fn carry_out(world: &mut World, actions: Vec<Action>) {
    let Some(agent) = &mut world.source.agent else {
        return;
    };
    for action in actions {
        match action {
            Action::Ask => agent.effect = Some(Effect::Ask),
            Action::Clear => {
                agent.effect = Some(Effect::Clear);
                agent.gives = false;
            }
            Action::After(timer) => agent.timers |= 1 << timer as u8,
        }
    }
}

/// What was carried out is done.
fn done(world: &mut World, event: Event) {
    if let Some(agent) = &mut world.source.agent {
        agent.effect = None;
    }
    handle(world, event);
}

pub(super) fn steps(steps: &mut Steps<'_>) {
    let world = steps.world;
    if world.source.kept {
        steps.fault("somebody removes what is kept", |world| {
            (world.source.kept, world.source.lost) = (false, true);
        });
    }
    steps.fault("the host reboots", |world| {
        world.source.lost |= world.source.kept;
        (world.source.agent, world.source.kept) = (None, false);
    });
    let quirks = steps.quirks;
    let Some(agent) = world.source.agent else {
        steps.later("the agent starts", move |world| start(world, quirks));
        return;
    };
    steps.fault("the agent dies", |world| world.source.agent = None);
    if !agent.gives && quirks.has(Quirk::AnswersBeforeItLooks) && agent.behind.is_some() {
        steps.then("looks for what is kept", |world| {
            if let Some(agent) = &mut world.source.agent {
                agent.gives = world.source.kept;
            }
        });
    }
    hears(steps);
    effects(steps, &agent);
    for timer in Timer::VARIANTS {
        let bit = 1 << *timer as u8;
        if agent.timers & bit != 0 {
            steps.timer("it is time to try again", *timer, |world| {
                if let Some(agent) = &mut world.source.agent {
                    agent.timers &= !bit;
                }
                handle(world, Event::Elapsed(*timer));
            });
        }
    }
}

/// The session is over here some time after it is over at the destination.
fn hears(steps: &mut Steps<'_>) {
    let world = steps.world;
    if world.source.over.is_some() || world.destination.agent.is_none() {
        return;
    }
    let quirks = steps.quirks;
    let outcome = match world.destination.journal {
        // Once the guest has been let run, and not before.
        Told::Committed(_) if world.has_moved() => Outcome::Committed,
        Told::RolledBack => Outcome::RolledBack,
        Told::Committed(_) | Told::NotKnown | Told::Undecided => return,
    };
    steps.then("hears how the session has ended", move |world| {
        world.source.over = Some(outcome);
        match outcome {
            Outcome::Committed if quirks.has(Quirk::ForgetsWhenItHasLeft) => {
                world.source.kept = false;
            }
            Outcome::RolledBack if quirks.has(Quirk::KeepsWhenRolledBack) => {}
            _ => handle(world, Event::Over(outcome)),
        }
    });
}

/// An agent comes after one that died.
fn start(world: &mut World, quirks: Quirks) {
    let (behind, actions) = match (world.source.kept, world.source.over) {
        (false, _) => (None, Vec::new()),
        (true, None) if quirks.has(Quirk::ForgetsWhatIsOpen) => {
            world.source.kept = false;
            (None, Vec::new())
        }
        (true, Some(Outcome::Committed)) if quirks.has(Quirk::DoesNotAskAgain) => (None, Vec::new()),
        (true, Some(Outcome::RolledBack)) if quirks.has(Quirk::KeepsWhenRolledBack) => (None, Vec::new()),
        (true, over) => {
            let (behind, actions) = Behind::recover(over);
            (Some(behind), actions)
        }
    };
    world.source.agent = Some(SourceAgent {
        gives: world.source.kept && !quirks.has(Quirk::AnswersBeforeItLooks),
        behind,
        effect: None,
        timers: 0,
    });
    carry_out(world, actions);
}

fn effects(steps: &mut Steps<'_>, agent: &SourceAgent) {
    let world = steps.world;
    match agent.effect {
        None => {}
        Some(Effect::Ask) => {
            if world.destination.agent.is_some() {
                let says = match world.destination.missing {
                    0 if steps.quirks.has(Quirk::SaysWhatIsNotListed) => Told::Committed(Noted::Nothing),
                    _ => world.destination.journal,
                };
                steps.then("hears what is missing there", move |world| {
                    done(world, Event::Told(says));
                });
            }
            let silent = match steps.quirks.has(Quirk::SilentNeedsNothing) {
                true => Event::Told(Told::RolledBack),
                false => Event::Silent,
            };
            let no_answer = move |world: &mut World| done(world, silent);
            match world.destination.agent {
                Some(_) => steps.may("gets no answer", no_answer),
                None => steps.then("gets no answer", no_answer),
            }
        }
        Some(Effect::Clear) => {
            steps.then("removes what it keeps", |world| {
                world.source.kept = false;
                done(world, Event::Cleared { gone: true });
            });
            steps.may("cannot remove what it keeps", |world| {
                done(world, Event::Cleared { gone: false });
            });
        }
    }
}
