//! What must always hold, and what a good end is.

use strum::IntoStaticStr;
use verbatim_session::decision::{CommitAnswer, Outcome, destination, partner, source};
use verbatim_session::record::Standing;

use crate::world::source::Proxy;
use crate::world::{End, Tasks, World};

/// What must never happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, IntoStaticStr)]
pub enum Violation {
    /// Both copies run.
    TwoCopies,
    /// The instance has run at the destination, and runs at the source again.
    RunsAgain,
    /// It has run at the destination, and the partner's programs go on with the old connections.
    PartnerGoesBack,
    /// It runs at the source, and the partner's programs use the new connections.
    PartnerGoesAhead,
    /// It has run at the destination, and the source writes down that it was rolled back.
    SourceContradicts,
    /// It has run at the destination, which writes down that it was rolled back.
    DestinationContradicts,
    /// The destination says that it is committed there, which was never written down.
    NeverCommitted,
}

/// Looks at one step. What an operator has forced, the operator answers for.
pub fn violation(before: &World, after: &World) -> Option<Violation> {
    if after.forced {
        return None;
    }
    let rolled_back = |standing| standing == Some(Standing::RolledBack);
    let became = |is: fn(&World) -> bool| is(after) && !is(before);
    let ran = after.ran_there;
    if after.runs_here() && after.runs_there() {
        Some(Violation::TwoCopies)
    } else if ran && became(World::runs_here) {
        Some(Violation::RunsAgain)
    } else if ran && after.partner.end == End::Old && before.partner.end != End::Old {
        Some(Violation::PartnerGoesBack)
    } else if after.runs_here() && after.partner.end == End::New && before.partner.end != End::New {
        Some(Violation::PartnerGoesAhead)
    } else if ran && rolled_back(after.source.common.journal) && !rolled_back(before.source.common.journal) {
        Some(Violation::SourceContradicts)
    } else if ran
        && rolled_back(after.destination.common.journal)
        && !rolled_back(before.destination.common.journal)
    {
        Some(Violation::DestinationContradicts)
    } else if became(|world| says_committed(world) && !world.destination.has_committed) {
        Some(Violation::NeverCommitted)
    } else {
        None
    }
}

fn says_committed(world: &World) -> bool {
    let there = world.destination.agent.map(|agent| agent.machine.answer());
    there == Some(CommitAnswer::Runs)
}

/// Whether everything has ended, and as it should: one copy runs, or there is a named excuse; nothing is left.
pub fn is_good_end(world: &World) -> bool {
    has_ended(world) && nothing_is_left(world) && (world.forced || one_copy_is_left(world))
}

fn outcomes(world: &World) -> [Option<Outcome>; 3] {
    let here = match world.source.agent.map(|agent| agent.machine.state()) {
        Some(source::State::Ended(outcome)) => Some(outcome),
        _ => None,
    };
    let there = match world.destination.agent.map(|agent| agent.machine.state()) {
        Some(destination::State::Ended(outcome)) => Some(outcome),
        _ => None,
    };
    let partner = match world.partner.agent.map(|agent| agent.machine.state()) {
        Some(partner::State::Ended(outcome)) => Some(outcome),
        _ => None,
    };
    [here, there, partner]
}

fn has_ended(world: &World) -> bool {
    let [here, there, partner] = outcomes(world);
    (here.is_some() || world.source.knows_nothing)
        && (there.is_some() || world.destination.knows_nothing)
        && (partner.is_some() || world.partner.knows_nothing)
}

fn nothing_is_left(world: &World) -> bool {
    let commons = [
        world.source.common,
        world.destination.common,
        world.partner.common,
    ];
    !world.source.criu
        && !world.source.frozen
        && world.source.proxy == Proxy::None
        && world.destination.tasks != Tasks::Held
        && commons.iter().all(|common| common.nic && common.listeners)
}

fn one_copy_is_left(world: &World) -> bool {
    let known: Vec<_> = outcomes(world).into_iter().flatten().collect();
    let agree = known.windows(2).all(|pair| pair[0] == pair[1]);
    let (here, there) = (&world.source, &world.destination);
    agree
        && match known.first() {
            Some(Outcome::Committed) => {
                // Excuses: the program has ended there, the host went down with it, or CRIU was killed between the marker
                // and the first instruction.
                let lives = world.runs_there() || world.ran_there || there.common.rebooted || there.marker;
                lives && here.tasks == Tasks::Gone && world.partner.end == End::New
            }
            Some(Outcome::RolledBack) => {
                let lives = world.runs_here() || here.common.rebooted;
                lives && !world.runs_there() && world.partner.end == End::Old
            }
            None => false,
        }
}
