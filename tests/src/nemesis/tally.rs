//! What came of it: counts, and which fault met which phase.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::schedule::Aim;

/// Before the first step, the steps of a source in their order, and after the command's end. Not every method has each.
const PHASES: [&str; 17] = [
    "before",
    "Open",
    "PreCopy",
    "PreSetup",
    "WaitBeforeStop",
    "Pause",
    "DumpRDMA",
    "DumpOthers",
    "Transfer",
    "Deciding",
    "FullRestore",
    "Running",
    "RestoreRDMA",
    "Replay",
    "RolledBack",
    "Closed",
    "after",
];

/// Of 90 moves 43 took place. Where half of them do, fewer than a third of so many do once in two thousand runs.
const FEW: usize = 128;

/// An aim that so many moves were held for, and that has struck in none, will not.
const TRIES: u32 = 4;

/// A step of a host's part in a session, as `verbatim sessions --json` has it.
#[derive(Debug, Clone, serde::Deserialize)]
pub struct Step {
    /// Its name.
    pub name: String,
    /// When it began, in milliseconds since 1970.
    pub unix_ms: u64,
}

/// A fault that has struck.
#[derive(Debug, Clone)]
pub struct Struck {
    /// [`super::Fault::kind`].
    pub kind: String,
    /// When, in milliseconds since 1970.
    pub unix_ms: u64,
    /// The move was held at its point meanwhile.
    pub at_point: bool,
}

/// All moves so far.
#[derive(Debug, Default)]
pub struct Tally {
    /// Moves that were asked for.
    pub moves: usize,
    /// Of these, how many took place.
    pub committed: usize,
    /// And how many did not.
    pub rolled_back: usize,
    /// How often a fault struck in a phase.
    met: BTreeMap<(String, String), usize>,
    /// What moves were held for, how often, and whether it has struck there.
    tried: BTreeMap<String, (u32, bool)>,
}

impl Tally {
    /// Adds what struck a move whose source passed these steps. `end`: when the command ended.
    pub fn add(
        &mut self,
        committed: bool,
        aim: Option<Aim>,
        struck: &[Struck],
        steps: &[Step],
        end_unix_ms: u64,
    ) {
        self.moves += 1;
        match committed {
            true => self.committed += 1,
            false => self.rolled_back += 1,
        }
        if let Some(aim) = aim {
            let mut there = struck.iter().filter(|one| one.at_point);
            let (tries, hit) = self.tried.entry(aim.to_string()).or_default();
            *tries += 1;
            *hit |= there.any(|one| one.kind == aim.fault.kind());
        }
        for one in struck {
            let phase = phase_at(one.unix_ms, steps, end_unix_ms);
            *self.met.entry((one.kind.clone(), phase)).or_default() += 1;
        }
    }

    fn tries(&self, aim: Aim) -> (u32, bool) {
        self.tried.get(&aim.to_string()).copied().unwrap_or_default()
    }

    /// What is to be tried once more: when all has been tried, that which has not struck in its phase, those first that were tried the
    /// fewest times.
    pub fn again(&self) -> Option<Aim> {
        let all = Aim::all();
        if all.iter().any(|aim| self.tries(*aim).0 == 0) {
            return None;
        }
        let missed = all.into_iter().filter(|aim| !self.tries(*aim).1);
        missed.min_by_key(|aim| self.tries(*aim).0)
    }

    /// Faults that strike in no phase in which they could, however often they are tried.
    pub fn hopeless(&self) -> Vec<String> {
        let is_hopeless = |aim: &Aim| {
            let (tries, hit) = self.tries(*aim);
            !hit && tries >= TRIES
        };
        let all = Aim::all().into_iter().filter(is_hopeless);
        all.map(|aim| aim.to_string()).collect()
    }

    /// Whether at least a third of the moves took place. Of a few moves chance alone may take more: a sixth is enough of those.
    pub fn enough_committed(&self) -> bool {
        let share = if self.moves < FEW { 6 } else { 3 };
        share * self.committed >= self.moves
    }
}

/// The last step that had begun.
fn phase_at(unix_ms: u64, steps: &[Step], end_unix_ms: u64) -> String {
    let begun = steps.iter().filter(|step| step.unix_ms <= unix_ms);
    match begun.max_by_key(|step| step.unix_ms) {
        _ if unix_ms > end_unix_ms => "after".to_owned(),
        Some(step) => step.name.clone(),
        None => "before".to_owned(),
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            moves,
            committed,
            rolled_back,
            met,
            tried,
        } = self;
        let hit = tried.values().filter(|(_, hit)| *hit).count();
        let struck: usize = met.values().sum();
        writeln!(
            f,
            "{moves} moves: {committed} committed, {rolled_back} rolled back; {struck} faults, {} of {} in the phase that was due",
            hit,
            Aim::all().len()
        )?;
        let kinds: BTreeSet<_> = met.keys().map(|(kind, _)| kind).collect();
        // Also those that nothing has met, so that this is seen.
        let mut phases: Vec<_> = PHASES.iter().map(|phase| (*phase).to_owned()).collect();
        for (_, phase) in met.keys() {
            if !phases.contains(phase) {
                phases.push(phase.clone());
            }
        }
        write!(f, "{:<28}", "")?;
        for phase in &phases {
            write!(f, " {phase:>14}")?;
        }
        for kind in kinds {
            write!(f, "\n{kind:<28}")?;
            for phase in &phases {
                let count = met.get(&(kind.clone(), phase.clone())).copied();
                write!(
                    f,
                    " {:>14}",
                    count.map_or("-".to_owned(), |count| count.to_string())
                )?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use verbatim_session::Phase;

    use super::*;
    use crate::nemesis::schedule::Fault;

    fn step(name: &str, unix_ms: u64) -> Step {
        Step {
            name: name.to_owned(),
            unix_ms,
        }
    }

    #[test]
    fn a_fault_belongs_to_the_step_that_had_begun() {
        let steps = [step("Open", 100), step("PreCopy", 200), step("Transfer", 300)];
        for (at, phase) in [
            (50, "before"),
            (100, "Open"),
            (250, "PreCopy"),
            (400, "Transfer"),
            (501, "after"),
        ] {
            assert_eq!(phase_at(at, &steps, 500), phase);
        }
    }

    #[test]
    fn a_third_must_commit_and_the_table_is_in_order() {
        let mut tally = Tally::default();
        let steps = [step("Transfer", 100), step("PreCopy", 50)];
        let struck = |unix_ms| Struck {
            kind: "cancel".to_owned(),
            unix_ms,
            at_point: true,
        };
        let aim = Aim {
            fault: Fault::Cancel,
            phase: Phase::Transfer,
        };
        tally.add(true, Some(aim), &[struck(60), struck(150)], &steps, 200);
        tally.add(false, None, &[], &steps, 200);
        tally.add(false, None, &[struck(300)], &steps, 200);
        assert!(tally.enough_committed());
        tally.add(false, None, &[], &steps, 200);
        assert!(tally.enough_committed(), "of so few");
        let text = tally.to_string();
        assert!(
            text.starts_with("4 moves: 1 committed, 3 rolled back; 3 faults, 1 of "),
            "{text}"
        );
        let places = ["PreCopy", "Transfer", "after"].map(|phase| text.find(phase).unwrap());
        assert!(places.is_sorted(), "{text}");
    }

    #[test]
    fn what_never_strikes_is_tried_again_and_then_told() {
        let mut tally = Tally::default();
        let all = Aim::all();
        let missed = all[3];
        for aim in &all {
            assert_eq!(tally.again(), None, "not all were tried");
            let struck = Struck {
                kind: aim.fault.kind(),
                unix_ms: 1,
                at_point: *aim != missed,
            };
            tally.add(true, Some(*aim), &[struck], &[], 2);
        }
        for _ in 1..TRIES {
            assert_eq!(tally.again(), Some(missed));
            assert!(tally.hopeless().is_empty());
            tally.add(true, Some(missed), &[], &[], 2);
        }
        assert_eq!(tally.hopeless(), [missed.to_string()]);
        let struck = Struck {
            kind: missed.fault.kind(),
            unix_ms: 1,
            at_point: true,
        };
        tally.add(true, Some(missed), &[struck], &[], 2);
        assert_eq!(tally.again(), None);
        assert!(tally.hopeless().is_empty());
    }

    #[test]
    fn a_third_of_many_moves_and_a_sixth_of_few_are_enough() {
        for (moves, committed, enough) in [(128, 43, true), (128, 42, false), (18, 3, true), (18, 2, false)] {
            let tally = Tally {
                moves,
                committed,
                ..Tally::default()
            };
            assert_eq!(tally.enough_committed(), enough, "{committed} of {moves}");
        }
    }
}
