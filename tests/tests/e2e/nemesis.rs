//! A nemesis: the client moves to and fro, and what a seed says strikes meanwhile, several faults at once, in any order. After each
//! move all is made whole; then every session ends, one copy runs where it is said to be, and the check goes on. At the end it has
//! found nothing lost, repeated or reordered.
//!
//! RNICs are left alone: with one that dies, connections are lost, as they should be.

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use verbatim_e2e::nemesis::{Hosts, Schedule, Step, Story, Tally, copies, heal, prepare, struck_move};
use verbatim_e2e::{Migration, TestLab, eventually, left_behind, patience};

use crate::Test;
use crate::migration::Check;

const HOSTS: &[&str] = &["src", "dst", "peer"];
const NAME: &str = "client";
const CONNECTIONS: u32 = 4;
/// What strikes where no seed is named, so that two runs of `make test` differ by what has changed alone. `make nemesis` takes others.
const SEED: u64 = 1;
/// How long a move may take with all that strikes it.
const MOVE_LIMIT: Duration = Duration::from_secs(150);
/// How long until all sessions have ended when all is whole again.
const SETTLE_LIMIT: Duration = Duration::from_secs(90);
const OPTIONS: &[&str] = &[
    "--op",
    "all",
    "-q",
    "4",
    "-s",
    "16384",
    "--random-size",
    "--bidirectional",
];
/// What strikes takes connections and programs to a stop for longer than the check's own limits: retries of 7 × 4.3 s.
const PATIENT: &[&str] = &["--stall-timeout", "180", "--ack-timeout", "20", "--verbose"];

/// All of them.
pub fn tests() -> Vec<Test> {
    // What is no number is told by the test itself.
    let lasts = minutes().unwrap_or_default();
    let strikes = Test::new("nemesis::strikes", HOSTS, strikes).longer_by(lasts);
    vec![strikes.injecting_faults()]
}

/// How long it goes on.
fn minutes() -> anyhow::Result<Duration> {
    let minutes = number("VERBATIM_NEMESIS_MINUTES")?.unwrap_or(2);
    Ok(Duration::from_secs(60 * minutes))
}

/// A number from the environment.
fn number(variable: &str) -> anyhow::Result<Option<u64>> {
    match std::env::var(variable) {
        Ok(text) if text.is_empty() => Ok(None),
        Ok(text) => {
            let number = text.parse();
            number
                .map(Some)
                .with_context(|| format!("{variable}={text:?} is not a number"))
        }
        Err(_) => Ok(None),
    }
}

fn strikes(lab: &TestLab) -> anyhow::Result<()> {
    let minutes = minutes()?;
    let seed = match std::env::var_os("VERBATIM_NEMESIS_SEED") {
        None => SEED,
        Some(_) => number("VERBATIM_NEMESIS_SEED")?.unwrap_or_else(rand::random),
    };
    let first = number("VERBATIM_NEMESIS_FIRST")?.unwrap_or(0);
    eprintln!("seed {seed}, for {} minutes", minutes.as_secs() / 60);
    prepare(lab, HOSTS)?;
    let check = Check::start_with(lab, "", PATIENT, OPTIONS)?;
    let mut nemesis = Nemesis {
        lab,
        check,
        here: "src",
        there: "dst",
        tally: Tally::default(),
    };
    let end = Instant::now() + minutes;
    for number in first.. {
        if Instant::now() >= end {
            break;
        }
        let schedule = match nemesis.tally.again() {
            Some(aim) => Schedule::again(seed, number, aim),
            None => Schedule::of(seed, number),
        };
        let story = Story::default();
        let done = nemesis.one(&schedule, &story);
        if done.is_err() {
            eprintln!("{}", nemesis.tally);
        }
        done.with_context(|| {
            format!(
                "seed {seed}, move {number}: {schedule}{story}\n{}",
                nemesis.check.words()
            )
        })?;
        eprintln!("{number}: {schedule}{story}");
    }
    let Nemesis { check, tally, .. } = nemesis;
    let (client, server) = check.end().with_context(|| format!("seed {seed}: {tally}"))?;
    eprintln!(
        "seed {seed}: {tally}\n{} messages, longest gap {:.1} s at the client, {:.1} s at the server",
        client.posted + server.posted,
        client.longest_gap_ms / 1e3,
        server.longest_gap_ms / 1e3
    );
    ensure!(
        tally.enough_committed(),
        "seed {seed}: fewer than a third of the moves took place: {tally}"
    );
    let hopeless = tally.hopeless();
    ensure!(
        hopeless.is_empty(),
        "seed {seed}: faults that never struck in their phase: {}",
        hopeless.join(", ")
    );
    Ok(())
}

/// A host's part in a session, of `verbatim sessions --json`.
#[derive(Debug, serde::Deserialize)]
struct Session {
    id: String,
    host: String,
    role: String,
    step: String,
    state: String,
    steps: Vec<Step>,
    error: Option<String>,
}

fn sessions(lab: &TestLab, all: bool) -> anyhow::Result<Vec<Session>> {
    let arguments: &[&str] = match all {
        true => &["sessions", "--all", "--json"],
        false => &["sessions", "--json"],
    };
    let listed = lab.ask(arguments)?;
    // The command only warns of an agent that is not there, and what that one knows would be missing.
    ensure!(
        listed.stderr.is_empty(),
        "not all agents answer: {}",
        listed.stderr
    );
    serde_json::from_str(&listed.stdout).context("`verbatim sessions --json` prints no JSON")
}

struct Nemesis<'a> {
    lab: &'a TestLab,
    check: Check<'a>,
    here: &'static str,
    there: &'static str,
    tally: Tally,
}

impl Nemesis<'_> {
    fn one(&mut self, schedule: &Schedule, story: &Story) -> anyhow::Result<()> {
        let hosts = Hosts {
            source: self.here,
            destination: self.there,
            partner: "peer",
        };
        let begun_unix_ms = now_unix_ms();
        let moved = struck_move(self.lab, NAME, hosts, schedule, patience(MOVE_LIMIT), story);
        heal(self.lab, &hosts).context("the nemesis cannot make all whole again")?;
        story.tell("all is whole again");
        let (finished, struck, end_unix_ms) = moved?;
        // A command whose agent died has no report; those of others must not lie.
        let report = Migration::of(&finished);
        ensure!(
            report.is_ok() || finished.code != 0,
            "a move that went well has no report{}",
            finished.output()
        );
        let report = report.ok();
        let said = report.as_ref().map(|report| report.outcome.clone());
        match &report {
            Some(report) => story.tell(format!(
                "{}: {}",
                report.outcome,
                report.error.as_deref().unwrap_or("well")
            )),
            None => story.tell(format!("no report: {}", finished.stderr.trim())),
        }
        let host = self.settled(story)?;
        let committed = host == self.there;
        if let Some(said) = said {
            let right = (said == verbatim_e2e::MOVED) == committed;
            ensure!(right, "the report says {said}, and the instance is on {host}");
        }
        let mut steps = Vec::new();
        for session in sessions(self.lab, true)? {
            let is_this = session.role == "source"
                && session
                    .steps
                    .first()
                    .is_some_and(|step| step.unix_ms >= begun_unix_ms);
            if is_this {
                steps.extend(session.steps);
            }
        }
        self.tally
            .add(committed, schedule.aim(), &struck, &steps, end_unix_ms);
        if committed {
            std::mem::swap(&mut self.here, &mut self.there);
        }
        Ok(())
    }

    /// Waits until all sessions have ended, and then looks whether all is as it should be; on which host the instance is.
    fn settled(&self, story: &Story) -> anyhow::Result<String> {
        let mut open = Vec::new();
        eventually("sessions that have ended", patience(SETTLE_LIMIT), || {
            open = sessions(self.lab, false)?;
            Ok(open.is_empty().then_some(()))
        })
        .with_context(|| {
            let open = open.iter().map(|session| {
                format!(
                    "{} {} {}: {} at {}, {:?}",
                    session.id, session.host, session.role, session.state, session.step, session.error
                )
            });
            open.collect::<Vec<_>>().join("; ")
        })?;
        story.tell("all sessions have ended");
        let mut row = None;
        eventually(
            "an instance that runs with its connections",
            patience(SETTLE_LIMIT),
            || {
                let now = self.check.client.row()?;
                if now.state == "exited" {
                    bail!("the instance has ended: {now:?}");
                }
                let server = self.check.server.row()?;
                if server.state == "exited" {
                    bail!("its partner has ended: {server:?}");
                }
                let good = [&now, &server]
                    .iter()
                    .all(|row| row.state == "running" && row.connections == CONNECTIONS);
                row = Some((now.clone(), server));
                Ok(good.then_some(()))
            },
        )
        .with_context(|| format!("{row:?}"))?;
        let (row, _) = row.context("no row")?;
        self.one_copy(&row.host)?;
        for host in [row.host.as_str(), "peer"] {
            self.check.flows(host)?;
        }
        self.goes_on()?;
        story.tell(format!(
            "the instance runs on {} alone, and the check goes on",
            row.host
        ));
        let other = HOSTS.iter().filter(|host| **host != row.host && **host != "peer");
        for host in other {
            let mut left = Vec::new();
            eventually("a host without leftovers", patience(SETTLE_LIMIT), || {
                left = left_behind(self.lab, host, NAME)?;
                Ok(left.is_empty().then_some(()))
            })
            .with_context(|| format!("left behind on {host}: {left:?}"))?;
        }
        Ok(row.host)
    }

    /// By processes, not by what agents say.
    fn one_copy(&self, host: &str) -> anyhow::Result<()> {
        let mut found = Vec::new();
        eventually("one copy of the instance", patience(SETTLE_LIMIT), || {
            found.clear();
            for host in HOSTS {
                let copies = copies(self.lab, host, NAME)?;
                found.extend(copies.into_iter().map(|pid| (*host, pid)));
            }
            Ok((found.len() == 1 && found[0].0 == host).then_some(()))
        })
        .with_context(|| format!("`verbatim ps` says {host}, and there are {found:?}"))
    }

    /// What both programs have counted grows, and they have found nothing wrong.
    fn goes_on(&self) -> anyhow::Result<()> {
        for instance in [&self.check.client, &self.check.server] {
            let before = completed(&instance.output()?);
            eventually("a check that goes on", patience(SETTLE_LIMIT), || {
                Ok((completed(&instance.output()?) > before).then_some(()))
            })
            .with_context(|| format!("{} stands at {before:?}", instance.name()))?;
            let output = instance.output()?;
            ensure!(
                !output.contains("defect"),
                "{} found a defect: {output}",
                instance.name()
            );
        }
        Ok(())
    }
}

/// How much has completed and arrived, of the last line of progress (`vcheck --verbose`).
fn completed(output: &str) -> Option<u64> {
    let line = output.lines().rev().find(|line| line.contains(" completed, "))?;
    let numbers = line
        .split_whitespace()
        .filter_map(|word| word.parse::<u64>().ok());
    // Seconds, completed, received.
    Some(numbers.skip(1).take(2).sum())
}

fn now_unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
