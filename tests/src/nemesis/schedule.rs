//! What a seed says: by which method each move goes, and what strikes it when.

use std::fmt;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// A move is struck by so many faults at most.
const MOST_STRIKES: usize = 3;
/// A strike that goes by the clock comes so long after the move began at the latest: an undisturbed move takes half of that.
const LATEST: Duration = Duration::from_millis(1200);
/// Strikes at a held point come within so long.
const SPREAD: Duration = Duration::from_millis(150);
/// What a strike takes away comes back after this at the latest.
const LONGEST: Duration = Duration::from_secs(8);

/// Points around the decision: from the last moment at which the source runs to the first at which the destination does.
const DECISIVE: [&str; 10] = [
    "source-freeze",
    "source-transfer",
    "source-restore",
    "source-commit",
    "source-ask",
    "source-committed",
    "destination-restore",
    "destination-commit",
    "destination-committed",
    "destination-running",
];

/// Which of the hosts of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The host where the instance is.
    Source,
    /// The host to which it goes.
    Destination,
    /// The host of the program at the other end of its connections.
    Partner,
}

/// A program that an agent starts for a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    /// CRIU itself.
    Criu,
    /// The proxy between runc and CRIU.
    Proxy,
    /// runc.
    Runc,
}

/// Which packets of a host a cut takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Those that come.
    In,
    /// Those that go.
    Out,
    /// All.
    Both,
}

/// What is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disk {
    /// `/run`: images, sockets, memory.
    Runtime,
    /// The journal's.
    State,
}

/// What strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The agent dies of SIGKILL, and another one is started when the strike is over.
    KillAgent(Side),
    /// The agent is stopped by SIGSTOP until the strike is over.
    StopAgent(Side),
    /// The program dies of SIGKILL; if it does not run yet, as soon as it does.
    KillTool(Side, Tool),
    /// The host's link loses all packets until the strike is over.
    Cut(Side, Way),
    /// The host's disk takes nothing more until the strike is over.
    Fill(Side, Disk),
    /// `verbatim cancel`.
    Cancel,
}

/// When a strike comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// So long after `verbatim migrate` was started.
    Clock(Duration),
    /// So long after the move has come to the point at which it is held ([`Schedule::held_at`]).
    Held(Duration),
}

/// One fault of a move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strike {
    /// When it comes.
    pub moment: Moment,
    /// What it does.
    pub fault: Fault,
    /// When what it took away comes back.
    pub lasts: Duration,
}

/// A point at which an agent can be held (`verbatim agent --list-faults`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Point {
    /// Its name.
    pub name: String,
    /// Whose agent passes it.
    pub side: Side,
}

/// A move and what strikes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// The method that is asked for.
    pub method: &'static str,
    /// Where the move is held until the strikes that are meant for this moment have struck. A step lasts milliseconds: strikes by
    /// the clock alone would meet the short ones never.
    pub held_at: Option<Point>,
    /// What strikes it.
    pub strikes: Vec<Strike>,
}

impl Schedule {
    /// That of the `number`th move by this seed. `points` are those that there are; each move's schedule depends on its own number
    /// only.
    pub fn of(seed: u64, number: u64, points: &[Point]) -> Self {
        let mut dice = StdRng::seed_from_u64(seed.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let method = *["wait-before-stop", "pause-resume", "auto"]
            .choose(&mut dice)
            .expect("there are three");
        // Undisturbed moves tell little, but that the next one begins from nothing left over.
        let count = if dice.random_bool(0.1) {
            0
        } else {
            dice.random_range(1..=MOST_STRIKES)
        };
        let aimed = count > 0 && dice.random_bool(0.75);
        // Two copies could come of what happens around the decision.
        let decisive = dice.random_bool(0.4);
        let passed: Vec<_> = points
            .iter()
            .filter(|point| passes(method, &point.name))
            .filter(|point| !decisive || DECISIVE.contains(&point.name.as_str()))
            .collect();
        let held_at = passed
            .choose(&mut dice)
            .filter(|_| aimed)
            .map(|point| (*point).clone());
        let mut strikes: Vec<Strike> = Vec::new();
        for index in 0..count {
            // The first one is what the move is held for.
            let held = held_at.is_some() && (index == 0 || dice.random_bool(0.5));
            let moment = match held {
                true => Moment::Held(up_to(SPREAD, &mut dice)),
                false => Moment::Clock(up_to(LATEST, &mut dice)),
            };
            let mut fault = any_fault(&mut dice);
            // Each cut alone is shorter than the retries of a connection; two in a row are not.
            let is_cut = |fault: &Fault| matches!(fault, Fault::Cut(..));
            while is_cut(&fault) && strikes.iter().any(|strike| is_cut(&strike.fault)) {
                fault = any_fault(&mut dice);
            }
            // Short ones more often.
            let part: f64 = dice.random();
            let lasts = Duration::from_millis(50).max(LONGEST.mul_f64(part * part));
            strikes.push(Strike { moment, fault, lasts });
        }
        Self {
            method,
            held_at,
            strikes,
        }
    }
}

/// Whether an undisturbed move by this method comes to a point. Those of a drain that is cut off are met by loss only.
fn passes(method: &str, point: &str) -> bool {
    const DRAIN: [&str; 4] = [
        "source-suspend",
        "source-drain",
        "partner-drain",
        "partner-drained",
    ];
    match method {
        _ if point.ends_with("-stop") || point.ends_with("-settle") => false,
        "pause-resume" => !DRAIN.contains(&point),
        "wait-before-stop" => point != "source-pause",
        _ => !DRAIN.contains(&point) && point != "source-pause",
    }
}

fn up_to(limit: Duration, dice: &mut StdRng) -> Duration {
    Duration::from_millis(dice.random_range(0..limit.as_millis() as u64))
}

fn any_fault(dice: &mut StdRng) -> Fault {
    let any = [Side::Source, Side::Destination, Side::Partner];
    let any = *any.choose(dice).expect("there are three");
    let end = if dice.random() {
        Side::Source
    } else {
        Side::Destination
    };
    match dice.random_range(0..16) {
        0..4 => Fault::KillAgent(any),
        4..7 => Fault::StopAgent(any),
        7 => Fault::KillTool(end, Tool::Criu),
        8 => Fault::KillTool(end, Tool::Proxy),
        9 => Fault::KillTool(end, Tool::Runc),
        10 => Fault::Cut(any, Way::Both),
        11 => Fault::Cut(any, Way::In),
        12 => Fault::Cut(any, Way::Out),
        13 => Fault::Fill(any, Disk::Runtime),
        14 => Fault::Fill(any, Disk::State),
        _ => Fault::Cancel,
    }
}

impl Fault {
    /// What the tables of the outcome call its kind.
    pub fn kind(&self) -> String {
        let side = |side: &Side| format!("{side:?}").to_lowercase();
        match self {
            Self::KillAgent(of) => format!("kill agent of {}", side(of)),
            Self::StopAgent(of) => format!("stop agent of {}", side(of)),
            Self::KillTool(of, tool) => {
                format!("kill {} of {}", format!("{tool:?}").to_lowercase(), side(of))
            }
            Self::Cut(of, way) => format!("cut {} of {}", format!("{way:?}").to_lowercase(), side(of)),
            Self::Fill(of, disk) => format!("fill {} of {}", format!("{disk:?}").to_lowercase(), side(of)),
            Self::Cancel => "cancel".to_owned(),
        }
    }
}

impl fmt::Display for Strike {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.moment {
            Moment::Clock(after) => write!(f, "after {after:?}: ")?,
            Moment::Held(after) => write!(f, "held for {after:?}: ")?,
        }
        write!(f, "{}", self.fault.kind())?;
        match self.fault {
            Fault::KillTool(..) | Fault::Cancel => Ok(()),
            _ => write!(f, " for {:.1?}", self.lasts),
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.method)?;
        if let Some(point) = &self.held_at {
            write!(f, ", held at {}", point.name)?;
        }
        for strike in &self.strikes {
            write!(f, "; {strike}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points() -> Vec<Point> {
        let named = |name: &str, side| Point {
            name: name.to_owned(),
            side,
        };
        vec![
            named("source-transfer", Side::Source),
            named("source-pause", Side::Source),
            named("partner-drain", Side::Partner),
            named("partner-stop", Side::Partner),
        ]
    }

    #[test]
    fn a_seed_always_says_the_same_and_another_one_something_else() {
        let of = |seed| -> Vec<_> {
            (0..50)
                .map(|number| Schedule::of(seed, number, &points()))
                .collect()
        };
        assert_eq!(of(7), of(7));
        assert_ne!(of(7), of(8));
    }

    #[test]
    fn each_kind_comes_and_no_move_has_two_cuts() {
        let schedules: Vec<_> = (0..4000)
            .map(|number| Schedule::of(1, number, &points()))
            .collect();
        let mut kinds = std::collections::BTreeSet::new();
        for schedule in &schedules {
            assert!(schedule.strikes.len() <= MOST_STRIKES);
            let cuts = schedule.strikes.iter();
            assert!(
                cuts.filter(|strike| matches!(strike.fault, Fault::Cut(..)))
                    .count()
                    <= 1
            );
            assert!(schedule.strikes.iter().all(|strike| strike.lasts <= LONGEST));
            let held = schedule
                .strikes
                .iter()
                .any(|strike| matches!(strike.moment, Moment::Held(_)));
            assert_eq!(held, schedule.held_at.is_some(), "{schedule}");
            if let Some(point) = &schedule.held_at {
                assert!(passes(schedule.method, &point.name), "{schedule}");
            }
            kinds.extend(schedule.strikes.iter().map(|strike| strike.fault.kind()));
        }
        // Agents killed and stopped, cuts and disks of three hosts, tools of two, and the operator.
        assert_eq!(kinds.len(), 3 + 3 + 6 + 9 + 6 + 1, "{kinds:?}");
        assert!(schedules.iter().any(|schedule| schedule.strikes.is_empty()));
    }
}
