//! What must always hold, and what a good end is.

use verbatim_session::Role;
use verbatim_session::decision::{CommitAnswer, Mark, Outcome, destination, source};

use super::journal::{self, Says};
use super::{HOSTS, MOVES, Machine, World, index, named, session};

/// What must never happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Violation {
    /// Two copies run.
    TwoCopies,
    /// The last copy is removed, and no host went down with it.
    NoCopy,
    /// A destination says the opposite of what it has said, or a source writes it down.
    Contradicts,
    /// Memory is not kept any more that is still to come.
    MemoryForgotten,
    /// A destination does not know what became of a session that has begun behind all that is missing in its journal.
    NeedlessDoubt,
}

/// Looks at one step. What an operator has forced, the operator answers for.
pub fn violation(before: &World, after: &World) -> Option<Violation> {
    if after.forced {
        return None;
    }
    let copies = |world: &World| world.hosts.iter().filter(|host| host.tasks.is_some()).count();
    let running = after.hosts.iter().filter_map(|host| host.tasks);
    if running.filter(|tasks| tasks.run).count() > 1 {
        Some(Violation::TwoCopies)
    } else if copies(before) > 0 && copies(after) == 0 && !after.lost {
        Some(Violation::NoCopy)
    } else if (0..after.begun).any(|session| contradicts(before, after, session)) {
        Some(Violation::Contradicts)
    } else if after
        .hosts
        .iter()
        .filter_map(|host| host.tasks)
        .any(|tasks| tasks.lack && !tasks.cache)
    {
        Some(Violation::MemoryForgotten)
    } else if (0..after.begun).any(|session| doubts(after, session)) {
        Some(Violation::NeedlessDoubt)
    } else {
        None
    }
}

fn contradicts(before: &World, after: &World, session: u8) -> bool {
    let Some(said) = before.moves[usize::from(session)].said else {
        return false;
    };
    let now = [session::says(after, session), journal::says(after, session)];
    let from = usize::from(after.moves[usize::from(session)].from);
    let part = index(session, Role::Source) as u8;
    let records = after.hosts[from].journal.records.iter();
    let rolled_back = records
        .filter(|record| record.part == part)
        .any(|record| record.says == Says::Mark(Mark::RolledBack));
    now.into_iter().flatten().any(|now| now != said) || said == Outcome::Committed && rolled_back
}

/// The destination of the session doubts although no record is missing since it began.
fn doubts(world: &World, session: u8) -> bool {
    let there = world.moves[usize::from(session)].to;
    let part = index(session, Role::Destination);
    let Some(Machine::Destination(machine)) = world.part(there, part).map(|part| part.machine) else {
        return false;
    };
    let records = &world.hosts[usize::from(there)].journal.records;
    let opened = records
        .iter()
        .position(|record| usize::from(record.part) == part && record.says == Says::Opened);
    machine.answer() == CommitAnswer::NotKnown
        && opened.is_some_and(|at| records[at..].iter().all(|record| !record.is_lost))
}

/// Whether everything has ended, and as it should.
pub fn is_good_end(world: &World) -> bool {
    let copies = world.hosts.iter().filter(|host| host.tasks.is_some()).count();
    let nothing_moves = usize::from(world.begun) == MOVES || copies == 0 || !can_move_on(world);
    let agents = (0..HOSTS as u8).all(|host| world.agent(host).is_some());
    nothing_moves && agents && world.partner && all_have_ended(world) && all_is_in_order(world, copies)
}

/// Small worlds make fewer moves.
fn can_move_on(world: &World) -> bool {
    let next = world.moves.get(usize::from(world.begun));
    next.is_some_and(|next| next.to != 0)
}

fn all_have_ended(world: &World) -> bool {
    (0..HOSTS as u8).all(|host| {
        (0..2 * MOVES).all(|part| match world.part(host, part).map(|part| part.machine) {
            None => true,
            Some(Machine::Source(machine)) => matches!(machine.state(), source::State::Ended(_)),
            Some(Machine::Destination(machine)) => match machine.state() {
                destination::State::Ended(_) => true,
                // Nobody knows any more: it is left to the operator.
                destination::State::Asking => {
                    let (session, _) = named(part);
                    let from = usize::from(world.moves[usize::from(session)].from);
                    let source = index(session, Role::Source);
                    world.hosts[from].journal.standing(source).is_none()
                }
                _ => false,
            },
        })
    })
}

fn all_is_in_order(world: &World, copies: usize) -> bool {
    let there = world.hosts.iter().filter_map(|host| host.tasks);
    let whole = there.clone().all(|tasks| !tasks.lack && !tasks.cache);
    let runs = there
        .into_iter()
        .all(|tasks| tasks.run && tasks.record.held_by.is_none());
    let one = copies == 1 || copies == 0 && world.lost;
    let told = world.hosts.iter().all(|host| {
        (0..2 * MOVES).all(|part| {
            let waits = host.volumes & 1 << part != 0;
            // A journal that has lost every record of it cannot say what the daemon waits for, nor can one whose session nobody knows.
            let is_known = host
                .journal
                .standing(part)
                .is_some_and(|standing| standing.has_ended());
            !waits || !is_known
        })
    });
    // Nobody is left to tell a partner whose source has lost every record.
    let switched = world.moves[..usize::from(world.begun)]
        .iter()
        .zip(0..)
        .all(|(one, session)| {
            let source = index(session, Role::Source);
            let is_known = world.hosts[usize::from(one.from)]
                .journal
                .standing(source)
                .is_some();
            one.is_switched || one.said != Some(Outcome::Committed) || !is_known
        });
    told && whole && (world.forced || one && runs && switched)
}
