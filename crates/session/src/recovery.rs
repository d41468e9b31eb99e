//! Which tasks are a session's that an agent finds in its journal.
//!
//! An agent finds tasks by an instance's name, and the name says nothing of sessions: an instance that left in a session, which is still being
//! finished, may have come back in another one. So the tasks' own record says which session has brought them, and which one holds them for
//! its decision. A session touches nothing but its own; one that has nothing here is closed all the same, and its partners
//! hear how it ended.
//!
//! The order of the sessions of an instance is that of their first records in the journal, never that of the clock.

use crate::Role;

/// How tasks came to be on a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Brought {
    /// They were started there.
    Started,
    /// This session has brought them.
    By(u64),
    /// Their record does not say: it is that of an earlier release.
    NotSaid,
}

/// What the record of the tasks says that are found under an instance's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Record {
    /// How they came.
    pub brought: Brought,
    /// The session that holds them for its decision.
    pub held_by: Option<u64>,
}

/// What a session wants to do to the tasks, and to volumes, connections and folders under the instance's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Deed {
    /// It was rolled back. A source lets the tasks go on; a destination ends them.
    Undo,
    /// It is committed. A source removes the tasks; a destination goes on with them.
    Finish,
}

/// Whether the session may do that. `record`: what is known of the tasks; there is none of a place that is only being made or cleared.
/// `is_latest`: no part of this instance's sessions began later on this host.
pub fn touches(role: Role, deed: Deed, session: u64, record: Option<Record>, is_latest: bool) -> bool {
    let Some(Record { brought, held_by }) = record else {
        return is_latest && role != Role::Partner;
    };
    match (role, deed) {
        (Role::Partner, _) => false,
        // Nobody is asked to commit before the record says for which session the tasks are held.
        (Role::Source, Deed::Finish) => held_by == Some(session),
        (Role::Source, Deed::Undo) => held_by.map_or(is_latest, |by| by == session),
        (Role::Destination, _) => {
            let is_its = match brought {
                Brought::Started => false,
                Brought::By(by) => by == session,
                Brought::NotSaid => true,
            };
            is_latest && is_its && held_by.is_none()
        }
    }
}

/// What of the tasks is a session's, for either end that it may come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Touches {
    /// For [`Deed::Undo`].
    pub undo: bool,
    /// For [`Deed::Finish`].
    pub finish: bool,
}

impl Touches {
    /// All is: the session has begun with this agent.
    pub const ALL: Self = Self {
        undo: true,
        finish: true,
    };

    /// Nothing is.
    pub const NOTHING: Self = Self {
        undo: false,
        finish: false,
    };

    /// As [`touches`] says.
    pub fn of(role: Role, session: u64, record: Option<Record>, is_latest: bool) -> Self {
        let touches = |deed| touches(role, deed, session, record, is_latest);
        Self {
            undo: touches(Deed::Undo),
            finish: touches(Deed::Finish),
        }
    }

    /// Whether anything is.
    pub fn anything(self) -> bool {
        self.undo || self.finish
    }
}

#[cfg(test)]
mod tests {
    use strum::VariantArray;

    use super::*;

    const RECORDS: [Option<u64>; 3] = [None, Some(1), Some(2)];
    const BROUGHT: [Brought; 4] = [Brought::Started, Brought::NotSaid, Brought::By(1), Brought::By(2)];

    #[test]
    fn a_source_removes_only_what_it_holds_itself() {
        for brought in BROUGHT {
            for held_by in RECORDS {
                let record = Some(Record { brought, held_by });
                for is_latest in [true, false] {
                    let touches = Touches::of(Role::Source, 1, record, is_latest);
                    assert_eq!(touches.finish, held_by == Some(1), "{record:?}");
                    let undoes = held_by == Some(1) || held_by.is_none() && is_latest;
                    assert_eq!(touches.undo, undoes, "{record:?}");
                }
            }
        }
    }

    #[test]
    fn a_destination_touches_only_what_it_has_brought_and_nobody_moves_on() {
        for brought in BROUGHT {
            for held_by in RECORDS {
                let record = Some(Record { brought, held_by });
                assert_eq!(Touches::of(Role::Destination, 1, record, false), Touches::NOTHING);
                let is_its = matches!(brought, Brought::By(1) | Brought::NotSaid) && held_by.is_none();
                let touches = Touches::of(Role::Destination, 1, record, true);
                assert_eq!((touches.undo, touches.finish), (is_its, is_its), "{record:?}");
            }
        }
    }

    #[test]
    fn a_place_without_tasks_is_the_latest_sessions() {
        for role in Role::VARIANTS {
            assert_eq!(Touches::of(*role, 1, None, false), Touches::NOTHING);
            let latest = Touches::of(*role, 1, None, true);
            assert_eq!(latest.anything(), *role != Role::Partner);
        }
    }

    #[test]
    fn at_most_one_session_of_an_instance_touches_its_tasks() {
        let roles = [Role::Source, Role::Destination];
        for (one, other) in roles.into_iter().flat_map(|one| roles.map(|other| (one, other))) {
            let mut records = vec![None];
            for brought in BROUGHT {
                records.extend(RECORDS.map(|held_by| Some(Record { brought, held_by })));
            }
            for record in records {
                let earlier = Touches::of(one, 1, record, false);
                let latest = Touches::of(other, 2, record, true);
                assert!(
                    !earlier.anything() || !latest.anything(),
                    "{one} {other} {record:?}"
                );
            }
        }
    }
}
