//! What rdma-core's test suite says of a device, against what is known of it.
//!
//! Three tables of one form, a test to a line: what a run of `tests/conformance/suite.py` found (as JSON, with more in
//! it), what is expected (`expected.txt`), and what the kernel's rxe does (`rxe.txt`), which is the measure: whatever
//! passes there passes here. [`Verdict::of`] compares them.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use anyhow::{Context, bail};
use serde::Deserialize;

/// What `suite.py --json` writes.
#[derive(Debug, Deserialize)]
pub struct SuiteReport {
    /// Seed of the tests' random choices.
    pub seed: u64,
    /// Every test that ran.
    pub tests: Vec<SuiteTest>,
}

/// How one test ended.
#[derive(Debug, Clone, Deserialize)]
pub struct SuiteTest {
    /// Its full name, as `tests.test_cq.CQTest.test_resize_cq`.
    #[serde(rename = "test")]
    pub name: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Why, if it did not pass.
    pub reason: String,
    /// The traceback, if there is one.
    pub details: String,
}

/// How a test ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It did what it should.
    Pass,
    /// The suite itself did not run it.
    Skip,
    /// An assertion did not hold.
    Fail,
    /// It raised an exception.
    Error,
    /// It did not end in time.
    Timeout,
    /// Its process ended before its time.
    Crash,
}

/// What is expected of a test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expected {
    /// That it passes.
    Pass,
    /// That the suite skips it, and why.
    Skip(String),
    /// That it does not pass, and why that is right.
    Exception(String),
}

/// A table of tests: a name, a tab, a value; `#` begins a comment.
pub type Table<V> = BTreeMap<String, V>;

/// The comparison of a run with what is known.
#[derive(Debug, Default)]
pub struct Verdict {
    /// What is worse than it should be; a run is good if there is none of these.
    pub worse: Vec<String>,
    /// What is better than the list says, or not in it: the list should be amended.
    pub notes: Vec<String>,
    /// How many tests passed, were skipped, or are exceptions.
    pub counts: Counts,
}

/// How many tests ended in which way.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Passed.
    pub pass: usize,
    /// Skipped by the suite.
    pub skip: usize,
    /// Did not pass, and were not expected to.
    pub exception: usize,
    /// Everything else.
    pub worse: usize,
}

impl FromStr for Expected {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        match text.split_once(": ") {
            None if text == "pass" => Ok(Self::Pass),
            Some(("skip", reason)) => Ok(Self::Skip(reason.to_owned())),
            Some(("exception", reason)) => Ok(Self::Exception(reason.to_owned())),
            _ => bail!("{text:?} is none of `pass`, `skip: REASON`, `exception: REASON`"),
        }
    }
}

impl FromStr for Outcome {
    type Err = anyhow::Error;

    /// Reads `OUTCOME` or `OUTCOME: REASON`.
    fn from_str(text: &str) -> anyhow::Result<Self> {
        let word = text.split_once(':').map_or(text, |(word, _)| word);
        Self::deserialize(serde::de::value::StrDeserializer::<serde::de::value::Error>::new(
            word,
        ))
        .with_context(|| format!("{text:?} is not the outcome of a test"))
    }
}

/// Reads a table.
pub fn table<V: FromStr<Err = anyhow::Error>>(text: &str) -> anyhow::Result<Table<V>> {
    let mut table = Table::new();
    for line in text.lines() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, value) = line
            .split_once('\t')
            .with_context(|| format!("no tab in {line:?}"))?;
        if table.insert(name.to_owned(), value.trim_end().parse()?).is_some() {
            bail!("{name} is there twice");
        }
    }
    Ok(table)
}

impl Verdict {
    /// Compares a run with what is expected, and with what the reference does.
    pub fn of(run: &[SuiteTest], expected: &Table<Expected>, reference: &Table<Outcome>) -> Self {
        let mut verdict = Self::default();
        for test in run {
            verdict.add(test, expected.get(&test.name), reference.get(&test.name));
        }
        let missing = expected
            .keys()
            .filter(|name| !run.iter().any(|test| test.name == **name));
        verdict
            .notes
            .extend(missing.map(|name| format!("{name}: in the list, but not in this suite")));
        verdict
    }

    fn add(&mut self, test: &SuiteTest, expected: Option<&Expected>, reference: Option<&Outcome>) {
        let name = &test.name;
        if test.outcome == Outcome::Pass {
            self.counts.pass += 1;
            match expected {
                Some(Expected::Pass) => {}
                Some(_) => self.notes.push(format!("{name}: passes, say so in the list")),
                None => self.notes.push(format!("{name}: passes, but is not in the list")),
            }
            return;
        }
        let complaint = match (test.outcome, expected) {
            _ if reference == Some(&Outcome::Pass) => Some("passes on the kernel's rxe"),
            (_, Some(Expected::Exception(_))) => {
                self.counts.exception += 1;
                None
            }
            (Outcome::Skip, None | Some(Expected::Skip(_))) => {
                self.counts.skip += 1;
                None
            }
            (_, Some(Expected::Pass)) => Some("should pass"),
            (_, Some(Expected::Skip(_))) => Some("should be skipped"),
            (_, None) => Some("is not in the list"),
        };
        if let Some(complaint) = complaint {
            self.counts.worse += 1;
            self.worse.push(format!(
                "{name}: {complaint}, but: {:?}: {}{}",
                test.outcome,
                test.reason,
                indented(&test.details)
            ));
        }
    }
}

fn indented(text: &str) -> String {
    text.trim_end()
        .lines()
        .map(|line| format!("\n    {line}"))
        .collect()
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            pass,
            skip,
            exception,
            worse,
        } = self;
        write!(
            f,
            "{pass} pass, {skip} skipped by the suite, {exception} exceptions, {worse} worse than they should be"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(name: &str, outcome: Outcome) -> SuiteTest {
        SuiteTest {
            name: name.to_owned(),
            outcome,
            reason: "why".to_owned(),
            details: String::new(),
        }
    }

    #[test]
    fn tables_are_read() {
        let expected: Table<Expected> =
            table("# a comment\n\na\tpass\nb\tskip: no GPU\nc\texception: it: needs a fork\n").unwrap();
        assert_eq!(expected.len(), 3);
        assert_eq!(expected["b"], Expected::Skip("no GPU".to_owned()));
        assert_eq!(expected["c"], Expected::Exception("it: needs a fork".to_owned()));
        let reference: Table<Outcome> = table("a\tpass\nb\tskip: no GPU\nc\ttimeout: 60 s\n").unwrap();
        assert_eq!(reference["c"], Outcome::Timeout);
        for wrong in ["a pass", "a\tskip", "a\tgood", "a\tpass\na\tpass"] {
            assert!(table::<Expected>(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn worse_than_expected_is_worse() {
        let expected = table("a\tpass\nb\tskip: no GPU\nc\texception: vendor\nd\tskip: none\n").unwrap();
        let reference = table("d\tpass\n").unwrap();
        let outcomes = [
            ("a", Outcome::Pass, 0),
            ("a", Outcome::Skip, 1),
            ("a", Outcome::Timeout, 1),
            ("b", Outcome::Skip, 0),
            ("b", Outcome::Error, 1),
            ("c", Outcome::Crash, 0),
            // What passes on the reference must pass, whatever the list says.
            ("d", Outcome::Skip, 1),
            // A test of a newer suite.
            ("new", Outcome::Skip, 0),
            ("new", Outcome::Fail, 1),
        ];
        for (name, outcome, worse) in outcomes {
            let verdict = Verdict::of(&[ended(name, outcome)], &expected, &reference);
            assert_eq!(verdict.worse.len(), worse, "{name} {outcome:?}: {verdict:?}");
            assert_eq!(verdict.counts.worse, worse);
        }
    }

    #[test]
    fn better_than_expected_is_told() {
        let expected = table("b\tskip: no GPU\nc\texception: vendor\n").unwrap();
        let run = [ended("b", Outcome::Pass), ended("new", Outcome::Pass)];
        let verdict = Verdict::of(&run, &expected, &Table::new());
        assert!(verdict.worse.is_empty());
        // Those two, and that `c` was not there.
        assert_eq!(verdict.notes.len(), 3, "{:?}", verdict.notes);
    }
}
