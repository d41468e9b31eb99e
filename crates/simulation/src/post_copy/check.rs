//! What must always hold, and what a good end is.

use verbatim_session::behind::{self, Told};
use verbatim_session::fill;

use super::{Qemu, Session, Why, World, is_filled};

/// What must never happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Violation {
    /// A guest is taken for whole that lacks RAM.
    TakenForWhole,
    /// The journal says that nothing is missing, and something is.
    NotedTooEarly,
    /// The source gives away what may still be asked for; no fault did it.
    ForgottenTooEarly,
    /// The guest was ended, and its RAM was not lost.
    EndedForNothing,
    /// The guest moves on without some of its RAM.
    MovesWithoutRam,
}

/// Looks at one step.
pub fn violation(before: &World, after: &World) -> Option<Violation> {
    let became = |is: fn(&World) -> bool| is(after) && !is(before);
    if became(|world| world.lacks() && is_taken_for_whole(world)) {
        Some(Violation::TakenForWhole)
    } else if became(|world| world.lacks() && is_filled(world.destination.journal)) {
        Some(Violation::NotedTooEarly)
    } else if became(|world| world.is_needed() && !world.source.kept && !world.source.lost) {
        Some(Violation::ForgottenTooEarly)
    } else if became(|world| world.destination.qemu == Qemu::Gone(Why::Lost) && !world.source.lost) {
        Some(Violation::EndedForNothing)
    } else if became(|world| {
        world.destination.qemu == Qemu::Gone(Why::Moved) && world.destination.missing > 0
    }) {
        Some(Violation::MovesWithoutRam)
    } else {
        None
    }
}

/// An agent knows the guest, and would let it move on.
fn is_taken_for_whole(world: &World) -> bool {
    let agent = world.destination.agent;
    agent.is_some_and(|agent| agent.fill.is_none_or(|fill| fill.is_whole()))
}

/// Whether everything has ended, and as it should: a guest that runs has all of its RAM, and nothing is kept or waited for.
pub fn is_good_end(world: &World) -> bool {
    let (source, destination) = (&world.source, &world.destination);
    let source_is_over = source.over.is_some()
        && source.agent.is_some_and(|agent| {
            let ended = |behind: behind::Behind| behind.state() == behind::State::Ended;
            agent.behind.is_none_or(ended) && agent.effect.is_none()
        });
    let destination_is_over = destination.agent.is_some_and(|agent| {
        let ended = |fill: fill::Fill| fill.state() == fill::State::Ended;
        agent.session == Session::Over && agent.fill.is_none_or(ended) && agent.effect.is_none()
    });
    let nothing_is_left = !source.kept && destination.listed.is_none() && destination.writing.is_none();
    let is_noted = is_filled(destination.journal) || destination.journal == Told::RolledBack;
    source_is_over
        && destination_is_over
        && nothing_is_left
        && is_noted
        && !world.lacks()
        && destination.qemu != Qemu::Held
}
