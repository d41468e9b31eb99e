//! What is reported.

use std::time::Duration;

use crate::trace::Trace;

/// How much of the time before the suspension a chart shows.
const BEFORE: Duration = Duration::from_millis(200);
/// How much of the time after the resume a chart shows.
const AFTER: Duration = Duration::from_millis(400);

/// All that is shown.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// On what it was measured, in words.
    pub machine: String,
    /// The runs, in their order.
    pub runs: Vec<Run>,
    /// What went wrong outside of any run.
    pub problems: Vec<String>,
}

impl Report {
    /// Whether there was a run, and nothing went wrong.
    pub fn is_ok(&self) -> bool {
        !self.runs.is_empty() && self.problems.is_empty() && self.runs.iter().all(Run::is_ok)
    }
}

/// One run: two programs that talk, of which one moves.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// Its number.
    pub number: u32,
    /// What it shows, in a few words.
    pub title: String,
    /// What happens in it, in a sentence or two.
    pub story: String,
    /// The host of the program that stays; the trace is that of its RNIC.
    pub partner: String,
    /// Payload bytes through the partner's RNIC, in both directions.
    pub trace: Trace,
    /// The migrations, in their order.
    pub moves: Vec<Move>,
    /// What the programs said.
    pub outputs: Vec<Output>,
    /// What went wrong; empty if all is well.
    pub problems: Vec<String>,
}

impl Run {
    /// Whether nothing went wrong.
    pub fn is_ok(&self) -> bool {
        self.problems.is_empty()
    }

    /// "src → dst", numbered if there are several.
    pub(crate) fn move_title(&self, index: usize) -> String {
        let title = self.moves.get(index).map(Move::title).unwrap_or_default();
        if self.moves.len() > 1 {
            format!("{}. {title}", index + 1)
        } else {
            title
        }
    }
}

/// The result of one program.
#[derive(Debug, Clone, Default)]
pub struct Output {
    /// Which program, in words.
    pub program: String,
    /// Its exit status, if it ended.
    pub exit_status: Option<i32>,
    /// What it said.
    pub text: String,
}

/// A part of a migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Phase {
    /// Its name.
    pub name: String,
    /// How long it took.
    pub time: Duration,
    /// Whether it lies in the communication blackout.
    pub in_blackout: bool,
}

/// A time during which something stood still.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Blackout {
    /// When it began, on the clock of the run's trace; `None` if it never did.
    pub begun: Option<Duration>,
    /// How long it was.
    pub time: Duration,
}

impl Blackout {
    /// Beginning and end in seconds.
    pub(crate) fn seconds(self) -> Option<(f64, f64)> {
        let begun = self.begun?.as_secs_f64();
        Some((begun, begun + self.time.as_secs_f64()))
    }
}

/// One migration.
#[derive(Debug, Clone, Default)]
pub struct Move {
    /// Where the instance was.
    pub source: String,
    /// Where it was to go.
    pub destination: String,
    /// Whether it is there now.
    pub committed: bool,
    /// Its phases, in the order in which they passed.
    pub phases: Vec<Phase>,
    /// The instance's threads did not run.
    pub service: Blackout,
    /// Its connections carried no data.
    pub communication: Blackout,
    /// From the request to the end.
    pub total: Duration,
    /// Bytes sent before anything stopped.
    pub bytes_pre_copy: u64,
    /// Bytes sent while the instance was frozen.
    pub bytes_stop_and_copy: u64,
    /// Connected queue pairs.
    pub connections: u64,
    /// Send requests that were intercepted.
    pub intercepted: u64,
    /// Requests that were posted again.
    pub replayed: u64,
}

impl Move {
    /// "src → dst".
    pub(crate) fn title(&self) -> String {
        format!("{} → {}", self.source, self.destination)
    }

    /// What a chart of it shows, in seconds on the clock of the trace; `None` if its connections were never suspended.
    pub(crate) fn window(&self) -> Option<(f64, f64)> {
        let begun = self.communication.begun?;
        let end = begun
            .saturating_add(self.communication.time)
            .saturating_add(AFTER);
        Some((begun.saturating_sub(BEFORE).as_secs_f64(), end.as_secs_f64()))
    }

    /// The phases of the blackout, in their order.
    pub(crate) fn blackout_phases(&self) -> impl Iterator<Item = &Phase> {
        self.phases.iter().filter(|phase| phase.in_blackout)
    }

    /// Duration of a phase.
    pub(crate) fn phase(&self, name: &str) -> Option<Duration> {
        self.phases
            .iter()
            .find(|phase| phase.name == name)
            .map(|phase| phase.time)
    }
}

/// The names of all phases of these moves, in the order in which they first pass.
pub(crate) fn phase_names(moves: &[Move]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for phase in moves.iter().flat_map(|one| &one.phases) {
        if !names.contains(&phase.name.as_str()) {
            names.push(&phase.name);
        }
    }
    names
}

/// The rows of the table of these moves: what, and a cell per move. The phases, then both blackouts, then what was sent.
pub(crate) fn table(moves: &[Move]) -> Vec<(String, Vec<String>)> {
    use crate::text::{bytes, milliseconds};
    let row =
        |name: &str, cell: &dyn Fn(&Move) -> String| (name.to_owned(), moves.iter().map(cell).collect());
    let mut rows = Vec::new();
    for name in phase_names(moves) {
        rows.push(row(name, &|one| {
            one.phase(name).map_or_else(|| "–".to_owned(), milliseconds)
        }));
    }
    rows.push(row("service blackout", &|one| milliseconds(one.service.time)));
    rows.push(row("communication blackout", &|one| {
        milliseconds(one.communication.time)
    }));
    rows.push(row("from request to end", &|one| milliseconds(one.total)));
    rows.push(row("sent ahead", &|one| bytes(one.bytes_pre_copy)));
    rows.push(row("sent in the blackout", &|one| bytes(one.bytes_stop_and_copy)));
    rows.push(row("queue pairs", &|one| one.connections.to_string()));
    rows.push(row("requests intercepted", &|one| one.intercepted.to_string()));
    rows.push(row("requests replayed", &|one| one.replayed.to_string()));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phase(name: &str, milliseconds: u64) -> Phase {
        Phase {
            name: name.into(),
            time: Duration::from_millis(milliseconds),
            in_blackout: name != "PreCopy",
        }
    }

    #[test]
    fn a_report_without_runs_is_not_ok() {
        assert!(!Report::default().is_ok());
        let mut report = Report {
            runs: vec![Run::default()],
            ..Report::default()
        };
        assert!(report.is_ok());
        report.runs[0].problems.push("lost".into());
        assert!(!report.is_ok());
    }

    #[test]
    fn the_window_is_cut_at_the_beginning_of_the_trace() {
        let mut one = Move::default();
        assert_eq!(one.window(), None);
        one.communication = Blackout {
            begun: Some(Duration::from_millis(50)),
            time: Duration::from_millis(100),
        };
        let (from, to) = one.window().unwrap();
        assert_eq!(from, 0.0);
        assert!((to - 0.55).abs() < 1e-9);
    }

    #[test]
    fn a_phase_that_a_move_did_not_reach_is_a_dash() {
        let full = Move {
            phases: vec![phase("PreCopy", 1), phase("Transfer", 20)],
            ..Move::default()
        };
        let short = Move {
            phases: vec![phase("PreCopy", 3)],
            ..Move::default()
        };
        let rows = table(&[short, full]);
        assert_eq!(
            rows[0],
            ("PreCopy".into(), vec!["3.0 ms".into(), "1.0 ms".into()])
        );
        assert_eq!(rows[1], ("Transfer".into(), vec!["–".into(), "20.0 ms".into()]));
    }
}
