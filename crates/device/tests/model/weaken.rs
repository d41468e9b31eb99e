//! The model must be able to fail: each ordering in the sources is weakened, one at a time.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release};

use crate::scenarios::SCENARIOS;
use crate::shared::{Place, Weakened, explore};

/// Tells a process of [`fails`] what to run.
const VARIABLE: &str = "VERBATIM_MODEL_WEAKENED";

/// An ordering that could be weaker, and why it is as it is.
struct Spare {
    /// A piece of its line.
    line: &'static str,
    access: &'static str,
    /// What it could be.
    to: &'static [Ordering],
    why: &'static str,
}

const SPARE: &[Spare] = &[
    Spare {
        line: "armed.store",
        access: "store",
        to: &[Release, Relaxed],
        why: "the fence behind it does it",
    },
    Spare {
        line: "armed.swap",
        access: "swap",
        to: &[AcqRel, Relaxed],
        why: "that it is one access is what counts",
    },
    Spare {
        line: "!= self.consumed",
        access: "load",
        to: &[Relaxed],
        why: "a look: `pop` loads again before it reads",
    },
    Spare {
        line: "header().sq_producer.load",
        access: "load",
        to: &[Relaxed],
        why: "a check: `pending` loads again before the slot is read",
    },
    Spare {
        line: "doorbells[word]",
        access: "fetch_or",
        to: &[AcqRel],
        why: "before it sleeps the RNIC looks at `summary`, not here",
    },
    Spare {
        line: "doorbells[word]",
        access: "swap",
        to: &[AcqRel],
        why: "as above",
    },
    Spare {
        line: "summary.load(Acquire)",
        access: "load",
        to: &[Relaxed],
        why: "a look: the swap behind it decides",
    },
    Spare {
        line: "summary.swap",
        access: "swap",
        to: &[AcqRel, Relaxed],
        why: "what orders requests is the swap of their own word",
    },
];

/// Weakens each place that the scenarios pass, and asks that one of them fails.
///
/// # Panics
/// If none does, and the place is not listed; or if one does although it is listed.
pub fn weaken_each_place() {
    let mut passed_by: BTreeMap<Place, Vec<usize>> = BTreeMap::new();
    for (index, (_, scenario)) in SCENARIOS.iter().enumerate() {
        for place in explore(None, *scenario).1 {
            passed_by.entry(place).or_default().push(index);
        }
    }
    let mut surprises = Vec::new();
    for (place, scenarios) in &passed_by {
        for now in weaker(place) {
            let failing = scenarios.iter().find(|index| fails(place, now, **index));
            let line = line_of(place);
            let spare = SPARE.iter().find(|spare| {
                line.contains(spare.line) && spare.access == place.access && spare.to.contains(&now)
            });
            let verdict = match (failing, spare) {
                (Some(index), _) => format!("\"{}\" fails", SCENARIOS[*index].0),
                (None, Some(spare)) => format!("all holds: {}", spare.why),
                (None, None) => "all holds".to_owned(),
            };
            let Place { at, access, ordering } = place;
            println!("{at:<28} {access:<8} {ordering} -> {now:?}: {verdict}");
            if failing.is_some() == spare.is_some() {
                surprises.push(format!("{at} {access} {ordering} -> {now:?}: {verdict}: {line}"));
            }
        }
    }
    assert!(surprises.is_empty(), "{}", surprises.join("\n"));
}

/// What the ordering at a place can be weakened to.
fn weaker(place: &Place) -> Vec<Ordering> {
    match (place.ordering.as_str(), place.access) {
        ("Relaxed", _) => vec![],
        ("SeqCst", "fence") => vec![AcqRel, Relaxed],
        ("SeqCst", "load") => vec![Acquire, Relaxed],
        ("SeqCst", "store") => vec![Release, Relaxed],
        ("SeqCst", _) => vec![AcqRel, Relaxed],
        _ => vec![Relaxed],
    }
}

/// In a process of its own: what is left of an execution that was cut off may end it.
fn fails(place: &Place, now: Ordering, scenario: usize) -> bool {
    let myself = std::env::current_exe().expect("the test's own path");
    let outcome = std::process::Command::new(myself)
        .args(["--exact", "weakened_as_asked", "--ignored"])
        .env(
            VARIABLE,
            format!("{scenario} {} {} {now:?}", place.at, place.access),
        )
        .output()
        .expect("the test can be started");
    !outcome.status.success()
}

/// The other half of [`fails`]: runs the scenario that the variable names.
///
/// # Panics
/// If it fails, as it should.
pub fn run_as_asked() {
    let asked = std::env::var(VARIABLE).expect("\"every_ordering_is_needed\" starts this with the variable");
    let [scenario, at, access, now] = asked.split(' ').collect::<Vec<_>>()[..] else {
        panic!("four words and not \"{asked}\"")
    };
    let now = [Relaxed, Acquire, Release, AcqRel]
        .into_iter()
        .find(|ordering| format!("{ordering:?}") == now)
        .expect("an ordering");
    let (_, scenario) = SCENARIOS[scenario.parse::<usize>().expect("a number")];
    let place = (at.to_owned(), access.to_owned());
    explore(Some(Weakened { place, now }), scenario);
}

fn line_of(place: &Place) -> String {
    let mut parts = place.at.rsplitn(3, ':');
    let (_column, line, file) = (parts.next(), parts.next(), parts.next());
    let number: usize = line.and_then(|line| line.parse().ok()).expect("a line's number");
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("src")
        .join(file.expect("a file"));
    let text = std::fs::read_to_string(&path).expect("the source that was compiled");
    text.lines()
        .nth(number - 1)
        .expect("a line of it")
        .trim()
        .to_owned()
}
