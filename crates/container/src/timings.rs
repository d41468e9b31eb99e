//! When the parts of an operation happened.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// One moment of an operation, as the proxy saw it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// CRIU's name for it (`network-lock`, `post-dump`, …; `criu/action-scripts.c`), or `go` for the moment at which
    /// the request was let through.
    pub name: String,
    /// Since `CLOCK_MONOTONIC`'s origin: comparable between processes of one host, not between hosts.
    pub at: Duration,
}

/// The marks of one dump or restore, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timings {
    /// The marks.
    pub marks: Vec<Mark>,
}

impl Timings {
    /// From the request's release to the latest mark: what this operation has added to the blackout so far.
    pub fn total(&self) -> Duration {
        match (self.marks.first(), self.marks.last()) {
            (Some(first), Some(last)) => last.at.saturating_sub(first.at),
            _ => Duration::ZERO,
        }
    }

    /// The moment called `name`, if it was reached.
    pub fn at(&self, name: &str) -> Option<Duration> {
        self.marks
            .iter()
            .find(|mark| mark.name == name)
            .map(|mark| mark.at)
    }

    /// Each mark's distance from the one before it.
    pub fn steps(&self) -> impl Iterator<Item = (&str, Duration)> {
        self.marks
            .windows(2)
            .map(|pair| (pair[1].name.as_str(), pair[1].at.saturating_sub(pair[0].at)))
    }

    pub(crate) fn push(&mut self, name: impl Into<String>, at: Duration) {
        self.marks.push(Mark {
            name: name.into(),
            at,
        });
    }
}

/// The steps in milliseconds: `query-ext-files +2.1, post-dump +11.4`.
impl fmt::Display for Timings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, step)) in self.steps().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{name} +{:.1}", step.as_secs_f64() * 1e3)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_shown_in_milliseconds() {
        let mut timings = Timings::default();
        assert_eq!(timings.to_string(), "");
        for (name, at) in [("go", 1_000), ("query-ext-files", 3_100), ("post-dump", 14_500)] {
            timings.push(name, Duration::from_micros(at));
        }
        assert_eq!(timings.to_string(), "query-ext-files +2.1, post-dump +11.4");
    }
}
