//! A journal on a simulated disk: its records in their order, some of which are lost.

use verbatim_session::Role;
use verbatim_session::decision::{Mark, Outcome};
use verbatim_session::fill::Noted;
use verbatim_session::part;
use verbatim_session::record::{Parties, Standing, What};

use super::{MOVES, Quirk, Quirks, World, index};

/// What a record says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Says {
    /// The session began here.
    Opened,
    /// A decision.
    Mark(Mark),
    /// That it is committed, and whether memory comes later.
    Committed(Noted),
    /// That no memory is missing.
    Filled,
}

/// A record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Record {
    /// The part of the session.
    pub part: u8,
    /// What it says.
    pub says: Says,
    /// The boot in which it was written.
    pub boot: u8,
    /// When that was, by the clock.
    pub clock: i16,
    /// It cannot be read any more.
    pub is_lost: bool,
}

/// A journal.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Journal {
    /// The records.
    pub records: Vec<Record>,
    /// This boot.
    pub boot: u8,
    /// The clock.
    pub clock: i16,
    /// The disk has gone bad: one of the records is about to be found lost.
    pub is_bad: bool,
}

/// What the records of one part add up to.
#[derive(Debug, Clone, Copy)]
pub struct Read {
    /// By the core.
    pub part: part::Part,
    /// The boot in which the record was written that it stands by.
    pub boot: u8,
    /// When it began, by the clock.
    pub clock: i16,
}

impl Journal {
    pub fn write(&mut self, part: usize, says: Says) {
        self.records.push(Record {
            part: part as u8,
            says,
            boot: self.boot,
            clock: self.clock,
            is_lost: false,
        });
        if says == Says::Opened {
            self.clock += 1;
        }
    }

    /// What an agent that starts knows of each part.
    pub fn read(&self, quirks: Quirks) -> [Option<Read>; 2 * MOVES] {
        let mut all = [None; 2 * MOVES];
        let mut begun = 0;
        for record in &self.records {
            if record.is_lost {
                all.iter_mut()
                    .flatten()
                    .for_each(|read: &mut Read| read.part.damaged());
                continue;
            }
            let what = what(record.says);
            let read = all[usize::from(record.part)].get_or_insert_with(|| {
                begun += 1;
                Read {
                    part: part::Part::begin(begun, &what),
                    boot: record.boot,
                    clock: record.clock,
                }
            });
            read.part.add(&what);
            if record.says != Says::Filled {
                read.boot = record.boot;
            }
        }
        if self.records.iter().any(|record| record.is_lost) {
            for read in all.iter_mut().flatten() {
                if quirks.has(Quirk::DamageIsEverywhere) {
                    read.part.damaged();
                }
                let stays = matches!(
                    read.part.standing,
                    Standing::Closed(_) | Standing::Ran | Standing::Cleared | Standing::Switched
                );
                if quirks.has(Quirk::DamageIsCommit) && !stays {
                    read.part.standing = Standing::Damaged;
                }
            }
        }
        all
    }

    /// How a part stands now, to the agent that has written the records: it knows them all.
    pub fn standing(&self, part: usize) -> Option<Standing> {
        self.read(Quirks::NONE)[part].map(|read| read.part.standing)
    }

    /// The order of a part among those of this host.
    pub fn order(read: &Read, quirks: Quirks) -> i64 {
        let by_clock = [Quirk::ByClock, Quirk::MemoryByClock, Quirk::Guesses];
        match by_clock.into_iter().any(|quirk| quirks.has(quirk)) {
            true => i64::from(read.clock) << 8 | read.part.sequence as i64,
            false => read.part.sequence as i64,
        }
    }
}

fn what(says: Says) -> What {
    match says {
        Says::Opened => What::Opened(Parties::default()),
        Says::Mark(mark) => mark.into(),
        Says::Committed(noted) => What::Committed(noted),
        Says::Filled => What::Filled,
    }
}

/// What a host's records say of its part in a session to another host that asks.
pub fn outcome(standing: Option<Standing>, role: Role) -> Option<Outcome> {
    use verbatim_session::decision::Keep;
    match (role, standing?) {
        (_, Standing::Ran | Standing::Cleared | Standing::Resolved(Keep::Destination)) => {
            Some(Outcome::Committed)
        }
        (_, Standing::Closed(outcome)) => Some(outcome),
        (Role::Source, Standing::RolledBack | Standing::Resolved(Keep::Source)) => Some(Outcome::RolledBack),
        _ => None,
    }
}

/// What the destination of a session has written down of its decision, if that cannot be taken back.
pub fn says(world: &World, session: u8) -> Option<Outcome> {
    let there = world.moves[usize::from(session)].to;
    let part = index(session, Role::Destination) as u8;
    let records = &world.hosts[usize::from(there)].journal.records;
    let of_part = records
        .iter()
        .filter(|record| record.part == part && !record.is_lost);
    of_part
        .filter_map(|record| match record.says {
            Says::Mark(Mark::Ran) => Some(Outcome::Committed),
            Says::Mark(Mark::RolledBack) => Some(Outcome::RolledBack),
            Says::Mark(Mark::Closed(outcome)) => Some(outcome),
            _ => None,
        })
        .next_back()
}
