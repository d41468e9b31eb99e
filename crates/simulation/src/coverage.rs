//! Which machine has met which event in which state.

use std::cell::Cell as Shared;
use std::collections::BTreeSet;
use std::fmt::Write;

use strum::VariantArray;
use verbatim_session::Role;
use verbatim_session::decision::{destination, partner, source};

/// A cell of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cell {
    /// Whose machine.
    pub role: Role,
    /// The state's name.
    pub state: &'static str,
    /// The event's name.
    pub event: &'static str,
}

/// More states than any machine has.
const STATES: usize = 16;

thread_local! {
    /// For each role and state, a bit for each event. It is written to at every step, so that it is no set.
    static MET: Shared<[[u16; STATES]; 3]> = const { Shared::new([[0; STATES]; 3]) };
}

/// The machine of a role is about to take an event; both are by their numbers.
pub(crate) fn note(role: Role, state: usize, event: usize) {
    let mut met = MET.get();
    met[role as usize][state] |= 1 << event;
    MET.set(met);
}

/// What this thread has met.
pub fn met() -> BTreeSet<Cell> {
    let bits = MET.get();
    let mut met = BTreeSet::new();
    for role in Role::VARIANTS {
        let (states, events) = names(*role);
        for (number, state) in states.iter().enumerate() {
            for (bit, event) in events.iter().enumerate() {
                if bits[*role as usize][number] & 1 << bit != 0 {
                    met.insert(Cell {
                        role: *role,
                        state,
                        event,
                    });
                }
            }
        }
    }
    met
}

/// The states and events of a role's machine.
pub fn names(role: Role) -> (Vec<&'static str>, Vec<&'static str>) {
    fn of<T: Copy + Into<&'static str>>(all: &[T]) -> Vec<&'static str> {
        all.iter().map(|one| (*one).into()).collect()
    }
    match role {
        Role::Source => (of(source::StateKind::VARIANTS), of(source::EventKind::VARIANTS)),
        Role::Destination => (
            of(destination::StateKind::VARIANTS),
            of(destination::EventKind::VARIANTS),
        ),
        Role::Partner => (of(partner::StateKind::VARIANTS), of(partner::EventKind::VARIANTS)),
    }
}

/// The cells that were not met.
pub fn missed(met: &BTreeSet<Cell>) -> Vec<Cell> {
    let mut missed = Vec::new();
    for role in Role::VARIANTS {
        let (states, events) = names(*role);
        for state in &states {
            for event in &events {
                let cell = Cell {
                    role: *role,
                    state,
                    event,
                };
                if !met.contains(&cell) {
                    missed.push(cell);
                }
            }
        }
    }
    missed
}

/// The tables: a row for each state, a column for each event, `x` for what was met.
pub fn tables(met: &BTreeSet<Cell>) -> String {
    let mut text = String::new();
    for role in Role::VARIANTS {
        let (states, events) = names(*role);
        let _ = writeln!(text, "{role}");
        for (index, event) in events.iter().enumerate() {
            let _ = writeln!(text, "  {:>14}{}└ {event}", "", "│ ".repeat(index));
        }
        for state in states {
            let _ = write!(text, "  {state:>14}");
            for event in &events {
                let cell = Cell {
                    role: *role,
                    state,
                    event,
                };
                text.push_str(if met.contains(&cell) { "x " } else { ". " });
            }
            text.push('\n');
        }
    }
    text
}
