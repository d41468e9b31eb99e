//! What a seed says: by which method each move goes, and what strikes it when.

use std::fmt;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use strum::VariantArray;
use verbatim_agent::faults::Point;
use verbatim_session::Phase;

/// A move is struck by so many faults at most.
const MOST_STRIKES: usize = 3;
/// A strike that goes by the clock comes so long after the move began at the latest: an undisturbed move takes half of that.
const LATEST: Duration = Duration::from_millis(1200);
/// Strikes at a held point come within so long.
const SPREAD: Duration = Duration::from_millis(150);
/// What a strike takes away comes back after this at the latest.
const LONGEST: Duration = Duration::from_secs(8);

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

/// Whose agent passes a point.
pub fn side_of(point: Point) -> Side {
    match point.name().split('-').next() {
        Some("source") => Side::Source,
        Some("destination") => Side::Destination,
        Some("partner") => Side::Partner,
        other => unreachable!("a point of {other:?}"),
    }
}

/// A fault and the phase in which it strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aim {
    /// What strikes.
    pub fault: Fault,
    /// When.
    pub phase: Phase,
}

impl Aim {
    /// Each fault in each phase in which there is somebody to strike.
    pub fn all() -> Vec<Self> {
        let of_phase = |phase: &Phase| {
            let aim = |fault| Self { fault, phase: *phase };
            Fault::all()
                .into_iter()
                .map(aim)
                .filter(Self::has_a_victim)
                .collect::<Vec<_>>()
        };
        Phase::VARIANTS.iter().flat_map(of_phase).collect()
    }

    fn has_a_victim(&self) -> bool {
        let Self { fault, phase } = self;
        match fault {
            // The last thing of the pre-setup is to start them. The source's wait for the decision and the old place's end; with the
            // decision those at the destination are done.
            Fault::KillTool(Side::Source, _) => *phase > Phase::Prepare,
            Fault::KillTool(..) => (Phase::Quiesce..=Phase::Verify).contains(phase),
            // What comes too late is refused.
            Fault::Cancel => *phase < Phase::Decide,
            _ => true,
        }
    }
}

impl fmt::Display for Aim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.fault.kind(), self.phase)
    }
}

/// A move and what strikes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// The method that is asked for.
    pub method: &'static str,
    /// How memory goes.
    pub memory_transport: &'static str,
    /// Where the move is held until the strikes that are meant for this moment have struck. A step lasts milliseconds: strikes by
    /// the clock alone would meet the short ones never.
    pub held_at: Option<Point>,
    /// What strikes it.
    pub strikes: Vec<Strike>,
}

impl Schedule {
    /// That of the `number`th move by this seed; each move's schedule depends on its own number only.
    ///
    /// Three in four are aimed: held at a point until the fault that is due has struck, so that in so many moves as there are aims,
    /// and a third more, each fault strikes in each phase. The seed says in which order.
    pub fn of(seed: u64, number: u64) -> Self {
        let mut dice = dice(seed, number);
        let schedule = match number % 4 {
            3 => Self::by_the_clock(&mut dice),
            place => Self::aimed(aim(seed, number / 4 * 3 + place), &mut dice),
        };
        schedule.by_some_transport(&mut dice)
    }

    /// That of a move which is held for an aim once more, since what else struck with it came first.
    pub fn again(seed: u64, number: u64, aim: Aim) -> Self {
        let mut dice = dice(seed, number);
        Self::aimed(aim, &mut dice).by_some_transport(&mut dice)
    }

    fn by_some_transport(self, dice: &mut StdRng) -> Self {
        let by_rdma = dice.random_bool(0.5);
        Self {
            memory_transport: if by_rdma { "rdma" } else { "tls" },
            ..self
        }
    }

    /// What strikes first, and in which phase, if the move is held for that.
    pub fn aim(&self) -> Option<Aim> {
        let (point, strike) = (self.held_at?, self.strikes.first()?);
        Some(Aim {
            fault: strike.fault,
            phase: point.phase(),
        })
    }

    fn by_the_clock(dice: &mut StdRng) -> Self {
        let method = *["wait-before-stop", "pause-resume", "auto"]
            .choose(dice)
            .expect("there are three");
        // Undisturbed moves tell little, but that the next one begins from nothing left over.
        let strikes = dice.random_range(0..=MOST_STRIKES);
        let mut schedule = Self {
            method,
            memory_transport: "tls",
            held_at: None,
            strikes: Vec::new(),
        };
        for _ in 0..strikes {
            let moment = Moment::Clock(up_to(LATEST, dice));
            let fault = schedule.another_fault(dice);
            schedule.add(moment, fault, dice);
        }
        schedule
    }

    fn aimed(aim: Aim, dice: &mut StdRng) -> Self {
        let mut methods = ["wait-before-stop", "pause-resume"];
        methods.shuffle(dice);
        let points = Point::ALL.iter().filter(|point| point.phase() == aim.phase);
        let points: Vec<Point> = points.copied().collect();
        let passed = |method: &&str| {
            let passed = points.iter().filter(|point| passes(method, point.name()));
            passed.copied().collect::<Vec<_>>()
        };
        let method = *methods
            .iter()
            .find(|method| !passed(method).is_empty())
            .expect("each phase has a point that a move passes");
        let mut schedule = Self {
            method,
            memory_transport: "tls",
            held_at: passed(&method).choose(dice).copied(),
            strikes: Vec::new(),
        };
        schedule.add(Moment::Held(up_to(SPREAD, dice)), aim.fault, dice);
        // Others come with it or after it, so that it is not they that the move ends by.
        for _ in 0..dice.random_range(0..MOST_STRIKES) {
            let moment = Moment::Held(up_to(LATEST, dice));
            let fault = schedule.another_fault(dice);
            schedule.add(moment, fault, dice);
        }
        schedule
    }

    fn another_fault(&self, dice: &mut StdRng) -> Fault {
        // Each cut alone is shorter than the retries of a connection; two in a row are not.
        let is_cut = |fault: &Fault| matches!(fault, Fault::Cut(..));
        let has_cut = self.strikes.iter().any(|strike| is_cut(&strike.fault));
        let all = Fault::all().into_iter();
        let possible: Vec<_> = all.filter(|fault| !(has_cut && is_cut(fault))).collect();
        *possible.choose(dice).expect("not all are cuts")
    }

    fn add(&mut self, moment: Moment, fault: Fault, dice: &mut StdRng) {
        // Short ones more often.
        let part: f64 = dice.random();
        let lasts = Duration::from_millis(50).max(LONGEST.mul_f64(part * part));
        self.strikes.push(Strike { moment, fault, lasts });
    }
}

fn dice(seed: u64, number: u64) -> StdRng {
    StdRng::seed_from_u64(seed.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// What is due: all aims, in an order that the seed says, and then again.
fn aim(seed: u64, number: u64) -> Aim {
    let mut all = Aim::all();
    all.shuffle(&mut StdRng::seed_from_u64(seed));
    all[usize::try_from(number).unwrap_or(usize::MAX) % all.len()]
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
        // A greeting comes at any time, and a move tries no dump that takes long beside its blackout.
        _ if point == "hello"
            || point == "source-deep"
            || point.ends_with("-stop")
            || point.ends_with("-settle") =>
        {
            false
        }
        "pause-resume" => !DRAIN.contains(&point),
        "wait-before-stop" => point != "source-pause",
        _ => !DRAIN.contains(&point) && point != "source-pause",
    }
}

fn up_to(limit: Duration, dice: &mut StdRng) -> Duration {
    Duration::from_millis(dice.random_range(0..limit.as_millis() as u64))
}

impl Fault {
    /// Each of them.
    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::Cancel];
        for side in [Side::Source, Side::Destination, Side::Partner] {
            all.extend([Self::KillAgent(side), Self::StopAgent(side)]);
            all.extend([Way::In, Way::Out, Way::Both].map(|way| Self::Cut(side, way)));
            all.extend([Disk::Runtime, Disk::State].map(|disk| Self::Fill(side, disk)));
            if side != Side::Partner {
                all.extend([Tool::Criu, Tool::Proxy, Tool::Runc].map(|tool| Self::KillTool(side, tool)));
            }
        }
        all
    }

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
        write!(f, "{}, memory over {}", self.method, self.memory_transport)?;
        if let Some(point) = &self.held_at {
            write!(f, ", held at {}", point.name())?;
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

    #[test]
    fn a_seed_always_says_the_same_and_another_one_something_else() {
        let of = |seed| -> Vec<_> { (0..50).map(|number| Schedule::of(seed, number)).collect() };
        assert_eq!(of(7), of(7));
        assert_ne!(of(7), of(8));
    }

    #[test]
    fn each_aim_is_met_in_a_third_more_moves_than_there_are() {
        let aims = Aim::all();
        let moves = aims.len().div_ceil(3) as u64 * 4;
        let met: Vec<Aim> = (0..moves)
            .filter_map(|number| Schedule::of(5, number).aim())
            .collect();
        for aim in &aims {
            assert!(met.contains(aim), "{aim}");
        }
        // Agents killed and stopped, cuts and disks of three hosts, tools of two, and the operator.
        assert_eq!(Fault::all().len(), 3 + 3 + 6 + 9 + 6 + 1);
    }

    #[test]
    fn an_aim_can_be_tried_again_with_other_company() {
        let aim = Aim::all()[17];
        let again: Vec<_> = (0..20).map(|number| Schedule::again(5, number, aim)).collect();
        assert!(again.iter().all(|schedule| schedule.aim() == Some(aim)));
        assert!(again.iter().any(|schedule| *schedule != again[0]));
    }

    #[test]
    fn no_move_has_two_cuts_and_each_comes_to_where_it_is_held() {
        for number in 0..4000 {
            let schedule = Schedule::of(1, number);
            assert!(schedule.strikes.len() <= MOST_STRIKES);
            let cuts = schedule.strikes.iter();
            let cuts = cuts.filter(|strike| matches!(strike.fault, Fault::Cut(..)));
            assert!(cuts.count() <= 1, "{schedule}");
            assert!(schedule.strikes.iter().all(|strike| strike.lasts <= LONGEST));
            for strike in &schedule.strikes {
                let held = matches!(strike.moment, Moment::Held(_));
                assert_eq!(held, schedule.held_at.is_some(), "{schedule}");
            }
            if let Some(point) = schedule.held_at {
                assert!(passes(schedule.method, point.name()), "{schedule}");
            }
        }
        assert!((0..100).any(|number| Schedule::of(1, number).strikes.is_empty()));
    }
}
