//! What is kept of a run: report.json, and what the report crate shows.

use serde::Serialize;
use serde_json::Value;
use verbatim_report::{Move, Output, Run};

use super::play::{Moved, Played};
use super::scenario::{Scenario, Side};
use super::timeline::milliseconds;
use super::verdict::{Verdict, judge};

/// A run, played and judged.
#[derive(Debug)]
pub struct Record {
    scenario: Scenario,
    played: Played,
    verdict: Verdict,
}

impl Record {
    /// Judges a run.
    pub fn new(scenario: Scenario, played: Played) -> Self {
        let verdict = judge(&scenario, &played);
        Self {
            scenario,
            played,
            verdict,
        }
    }

    /// For the report crate.
    pub fn show(&self) -> Run {
        let outputs = Side::BOTH.map(|side| {
            let end = &self.played.ends[side as usize];
            Output {
                program: format!("{} as {}, on {}", self.scenario.program, side.name(), end.host),
                exit_status: end.exit_status,
                text: self.verdict.said[side as usize].clone(),
            }
        });
        Run {
            number: self.scenario.number,
            title: self.scenario.title.clone(),
            story: self.scenario.story.clone(),
            partner: self.scenario.partner().to_owned(),
            trace: self.played.trace.clone(),
            moves: self.played.moves.iter().map(show_move).collect(),
            outputs: outputs.to_vec(),
            problems: self.verdict.problems.clone(),
        }
    }
}

fn show_move(moved: &Moved) -> Move {
    let report = &moved.report;
    let text = |key: &str| report[key].as_str().unwrap_or("?").to_owned();
    let number = |value: &Value| value.as_u64().unwrap_or_default();
    Move {
        source: text("source"),
        destination: text("destination"),
        committed: report["outcome"] == "committed",
        phases: moved.timeline.phases.clone(),
        service: moved.timeline.service,
        communication: moved.timeline.communication,
        total: milliseconds(&report["total_ms"]),
        bytes_pre_copy: number(&report["bytes"]["pre_copy"]),
        bytes_stop_and_copy: number(&report["bytes"]["stop_and_copy"]),
        connections: number(&report["connections"]),
        intercepted: number(&report["intercepted_wrs"]),
        replayed: number(&report["replayed_wrs"]),
    }
}

#[derive(Serialize)]
struct JsonReport<'a> {
    verdict: &'static str,
    runs: Vec<JsonRun<'a>>,
}

#[derive(Serialize)]
struct JsonRun<'a> {
    program: &'a str,
    moved: &'static str,
    exit_status: JsonStatus,
    migrations: Vec<&'a Value>,
    check: &'a Value,
}

/// `null` is the status of a program that did not end.
#[derive(Serialize)]
struct JsonStatus {
    sender: Option<i32>,
    receiver: Option<i32>,
}

/// The text of report.json.
pub fn json(records: &[Record], ok: bool) -> anyhow::Result<String> {
    let runs = records.iter().map(|record| JsonRun {
        program: record.scenario.program,
        moved: record.scenario.moved.name(),
        exit_status: JsonStatus {
            sender: record.played.ends[0].exit_status,
            receiver: record.played.ends[1].exit_status,
        },
        migrations: record.played.moves.iter().map(|moved| &moved.report).collect(),
        check: &record.verdict.check,
    });
    let report = JsonReport {
        verdict: if ok { "ok" } else { "failed" },
        runs: runs.collect(),
    };
    Ok(serde_json::to_string_pretty(&report)? + "\n")
}
