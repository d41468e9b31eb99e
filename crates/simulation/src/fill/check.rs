//! What must always hold, and what a good end is.

use verbatim_session::fill::{Noted, State};

use super::{Tasks, Why, World};

/// What must never happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Violation {
    /// An instance is taken for whole that lacks memory.
    TakenForWhole,
    /// The journal says that nothing is missing, and something is.
    NotedTooEarly,
    /// The files, or the processes, are taken away though they are needed; no fault did it.
    RemovedTooEarly,
    /// The tasks were ended, and their memory was not lost.
    EndedForNothing,
    /// An instance moves on without some of its memory.
    MovesWithoutMemory,
}

/// Looks at one step.
pub fn violation(before: &World, after: &World) -> Option<Violation> {
    let became = |is: fn(&World) -> bool| is(after) && !is(before);
    if became(|world| world.lacks() && is_taken_for_whole(world)) {
        Some(Violation::TakenForWhole)
    } else if became(|world| world.lacks() && world.journal == Some(Noted::Nothing)) {
        Some(Violation::NotedTooEarly)
    } else if became(|world| world.lacks() && !world.is_given() && !world.killed) {
        Some(Violation::RemovedTooEarly)
    } else if became(|world| world.tasks == Tasks::Gone(Why::Lost) && !world.killed) {
        Some(Violation::EndedForNothing)
    } else if became(|world| world.tasks == Tasks::Gone(Why::Moved) && world.missing > 0) {
        Some(Violation::MovesWithoutMemory)
    } else {
        None
    }
}

/// An agent knows the instance, and would let it move on.
fn is_taken_for_whole(world: &World) -> bool {
    world
        .agent
        .is_some_and(|agent| agent.fill.is_none_or(|fill| fill.is_whole()))
}

/// Whether everything has ended, and as it should: what runs has all of its memory, and nothing is left of the fill.
pub fn is_good_end(world: &World) -> bool {
    let is_over = world.agent.is_some_and(|agent| {
        let ended = agent.fill.is_none_or(|fill| fill.state() == State::Ended);
        ended && agent.session == super::Session::Over && agent.effect.is_none()
    });
    let nothing_is_left = !world.cache && !world.is_given() && !world.socket && world.writing.is_none();
    let is_noted = matches!(world.journal, None | Some(Noted::Nothing | Noted::Unknown));
    is_over && nothing_is_left && is_noted && !world.lacks() && world.tasks != Tasks::Held
}
