//! When the parts of an operation happened.

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
