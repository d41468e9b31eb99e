//! What every simulated world has in common.

use std::fmt;
use std::hash::Hash;

use strum::IntoEnumIterator;
use verbatim_session::decision::Timer;

use crate::explore::Known;

/// Faults that were in the code once, or could have been: one of them is put back, or none.
#[derive(Debug, Clone, Copy)]
pub struct Quirks<Q>(Option<Q>);

impl<Q: Copy + PartialEq> Quirks<Q> {
    /// None.
    pub const NONE: Self = Self(None);

    /// This one alone.
    pub fn only(quirk: Q) -> Self {
        Self(Some(quirk))
    }

    /// Whether it is put back.
    pub fn has(self, quirk: Q) -> bool {
        self.0 == Some(quirk)
    }
}

/// How a step comes about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// It follows from what was before, sooner or later.
    Ordinary,
    /// The same, and it may take long: a process is started again.
    Slow,
    /// A time has passed.
    Timer(Timer),
    /// It may happen or not: a message is lost, an operator changes their mind, a program ends.
    Chance,
    /// Something breaks. It counts against the limit of faults.
    Fault,
}

/// What can happen next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Step<Who> {
    /// Where, or to whom.
    pub who: Who,
    /// What.
    pub what: &'static str,
    /// How.
    pub kind: Kind,
}

impl<Who> Step<Who> {
    /// Whether it counts against the limit of faults.
    pub fn is_fault(&self) -> bool {
        self.kind == Kind::Fault
    }
}

impl<Who: fmt::Display> fmt::Display for Step<Who> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = if self.is_fault() { "! " } else { "" };
        write!(f, "{mark}{}: {}", self.who, self.what)
    }
}

/// Which steps are listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// Those that are no faults.
    Goes,
    /// Faults alone.
    Breaks,
    /// All.
    Both,
}

impl What {
    /// Whether a step of this kind is listed.
    pub fn lists(self, kind: Kind) -> bool {
        match self {
            Self::Goes => kind != Kind::Fault,
            Self::Breaks => kind == Kind::Fault,
            Self::Both => true,
        }
    }
}

/// A world that is a value: it lists what can happen next, each with the world after it.
pub trait Simulated: Clone + Eq + Hash + fmt::Debug {
    /// Where something happens, or to whom.
    type Who: Copy + Ord + Hash + fmt::Debug + fmt::Display;
    /// Faults that can be put back.
    type Quirk: Copy + PartialEq + fmt::Debug + Into<&'static str> + IntoEnumIterator;
    /// What must never happen.
    type Violation: Copy + PartialEq + fmt::Debug;
    /// A set of such worlds.
    type Known: Known<Self>;

    /// Faults of a walk strike within so many steps.
    const FAULTS_WITHIN: u64;

    /// After so many steps of a walk nothing breaks any more, and nothing is lost.
    const HEALED_AFTER: usize;

    /// Where the walk of a seed begins.
    fn of_seed(seed: u64) -> Self;

    /// Lists what can happen next. No two steps are the same.
    fn steps(&self, quirks: Quirks<Self::Quirk>, what: What, found: &mut Vec<(Step<Self::Who>, Self)>);

    /// What must not happen, and has happened by the step from here to `after`.
    fn violation(&self, after: &Self) -> Option<Self::Violation>;

    /// Whether everything has ended, and as it should.
    fn is_good_end(&self) -> bool;

    /// Whether an instance has moved.
    fn has_moved(&self) -> bool;

    /// Drops what nobody can tell from its absence, so that worlds are the same that go on alike.
    fn tidy(&mut self) {}
}

/// The steps of a world, each with the world after it.
pub struct Steps<'a, W: Simulated> {
    found: &'a mut Vec<(Step<W::Who>, W)>,
    what: What,
    /// The world before each of them.
    pub world: &'a W,
    /// The faults that are put back.
    pub quirks: Quirks<W::Quirk>,
    /// Whom those concern that are listed next.
    pub who: W::Who,
}

impl<'a, W: Simulated> Steps<'a, W> {
    /// None yet.
    pub fn new(
        world: &'a W,
        quirks: Quirks<W::Quirk>,
        what: What,
        who: W::Who,
        found: &'a mut Vec<(Step<W::Who>, W)>,
    ) -> Self {
        found.clear();
        Self {
            found,
            what,
            world,
            quirks,
            who,
        }
    }

    /// It happens, sooner or later, that …
    pub fn then(&mut self, what: &'static str, change: impl FnOnce(&mut W)) {
        self.add(what, Kind::Ordinary, change);
    }

    /// It happens, and may take long, that …
    pub fn later(&mut self, what: &'static str, change: impl FnOnce(&mut W)) {
        self.add(what, Kind::Slow, change);
    }

    /// A time passes.
    pub fn timer(&mut self, what: &'static str, timer: Timer, change: impl FnOnce(&mut W)) {
        self.add(what, Kind::Timer(timer), change);
    }

    /// It may happen that …
    pub fn may(&mut self, what: &'static str, change: impl FnOnce(&mut W)) {
        self.add(what, Kind::Chance, change);
    }

    /// A fault may strike.
    pub fn fault(&mut self, what: &'static str, change: impl FnOnce(&mut W)) {
        self.add(what, Kind::Fault, change);
    }

    fn add(&mut self, what: &'static str, kind: Kind, change: impl FnOnce(&mut W)) {
        if self.what.lists(kind) {
            let mut world = self.world.clone();
            change(&mut world);
            world.tidy();
            let who = self.who;
            self.found.push((Step { who, what, kind }, world));
        }
    }
}
