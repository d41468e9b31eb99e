//! What must always hold, and what a good end is.

use super::state::{Part, Session, Stage};
use super::{World, bits};

/// What must never happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Violation {
    /// Two sessions are at work on one connection.
    BothEnds,
    /// A session is at work on a connection whose other end is not where it was joined.
    WrongPlace,
    /// A session that has asked partners to come to a stop waits for its turn.
    WaitsWhileSuspended,
}

/// Looks at a world.
pub fn violation(world: &World) -> Option<Violation> {
    for (one, instance) in world.instances.iter().enumerate() {
        let Some(instance) = instance else { continue };
        for other in bits(instance.peers).filter(|other| usize::from(*other) > one) {
            let at_work = world
                .sessions
                .iter()
                .filter(|session| is_at_work(session, one as u8, other));
            if at_work.count() > 1 {
                return Some(Violation::BothEnds);
            }
        }
    }
    for session in &world.sessions {
        for (peer, host) in (0..).zip(session.found) {
            let Some(host) = host else { continue };
            let is_prepared = session.parts[usize::from(host)] == Part::Prepared;
            if is_prepared && world.instance(peer).host != host {
                return Some(Violation::WrongPlace);
            }
        }
        let waits = matches!(
            session.stage,
            Stage::Taking | Stage::Finding | Stage::Joining | Stage::LettingGo(_) | Stage::Waiting(_)
        );
        if waits && session.parts.contains(&Part::Prepared) {
            return Some(Violation::WaitsWhileSuspended);
        }
    }
    None
}

/// Whether a session does something to the connection between two instances: the partner has a part in it, or the end that
/// moves has not resumed at the destination.
fn is_at_work(session: &Session, one: u8, other: u8) -> bool {
    let partner = match session.moving {
        moving if moving == one => other,
        moving if moving == other => one,
        _ => return false,
    };
    let Some(host) = session.found[usize::from(partner)] else {
        return false;
    };
    session.parts[usize::from(host)] == Part::Prepared || session.is_committed() && !session.is_resumed
}

/// Whether everything that was asked for has come to an end, and nothing is left of it.
pub fn is_good_end(world: &World) -> bool {
    let hosts_are_free = world
        .hosts
        .iter()
        .all(|host| host.up && host.turns.is_empty() && host.watched == 0);
    let nothing_is_asked = world
        .instances
        .iter()
        .flatten()
        .all(|instance| !instance.moving && instance.wishes == [None; 2]);
    let all_have_ended = world
        .sessions
        .iter()
        .all(|session| session.has_ended() && session.mail == 0 && !session.parts.contains(&Part::Prepared));
    hosts_are_free && nothing_is_asked && all_have_ended
}
