//! Transfers between two programs whose threads poll without pause, beside the same with one such thread on each side, and
//! beside another program that uses the processors.
//!
//! On a machine with few cores such threads keep a software RNIC from its core. A round takes each number of pollers in turn, so that
//! whatever else the machine does meets all of them; ratios are taken within a round.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use verbatim_e2e::{TestLab, Tools};

use crate::context::Context;
use crate::programs::{self, program};
use crate::summary::Summary;

const BYTES: &str = "8388608";
const TRANSFERS: &str = "100";

/// Threads that poll on each side.
const POLLERS: [u32; 3] = [1, 2, 4];

/// The port on which the programs find each other.
const PORT: u16 = 18_520;

const LIMIT: Duration = Duration::from_secs(300);

/// What the client says.
#[derive(Debug, Clone, Copy, Deserialize, Serialize)]
struct Measured {
    pollers: u32,
    median_ms: f64,
    worst_ms: f64,
    gbit_s: f64,
}

/// All rounds with so many pollers.
#[derive(Debug, Serialize)]
struct Row {
    pollers: u32,
    /// Another program computes on each processor meanwhile.
    beside_others: bool,
    rounds: Vec<Measured>,
    /// Of the rounds' medians.
    median_ms: Summary,
    worst_ms: Summary,
    gbit_s: Summary,
    /// Throughput as a part of that of one poller in the same round.
    ratio: Summary,
}

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    bytes: &'static str,
    transfers: &'static str,
    rows: Vec<Row>,
    /// How often the RNICs told their programs that they were starved.
    starved: [u64; 2],
}

/// Measures, prints and writes.
pub fn run(tools: &Tools, rounds: u32, out: &Path) -> anyhow::Result<()> {
    let context = Context::now();
    let lab = TestLab::up(tools, &["src", "peer"])?;
    println!("WRITEs of 8 MiB beside threads that poll; worst of {TRANSFERS}, medians of {rounds} rounds");
    println!(
        "{:>8} {:>8} {:>10} {:>10} {:>10} {:>8} {:>8}",
        "pollers", "others", "median ms", "worst ms", "most ms", "Gbit/s", "ratio"
    );
    let mut rows = Vec::new();
    for beside_others in [false, true] {
        let mut measured: Vec<Vec<Measured>> = vec![Vec::new(); POLLERS.len()];
        for _ in 0..rounds {
            let _others = beside_others
                .then(|| Others::start(context.processors))
                .transpose()?;
            for (pollers, measured) in POLLERS.into_iter().zip(&mut measured) {
                measured.push(transfers(&lab, pollers)?);
            }
        }
        let alone = measured[0].clone();
        for (pollers, measured) in POLLERS.into_iter().zip(measured) {
            let row = row(pollers, beside_others, measured, &alone);
            print(&row);
            rows.push(row);
        }
    }
    let starved = [starved(&lab, "src")?, starved(&lab, "peer")?];
    println!(
        "the RNICs said that they were starved {} and {} times",
        starved[0], starved[1]
    );
    lab.down()?;
    let report = Report {
        context,
        bytes: BYTES,
        transfers: TRANSFERS,
        rows,
        starved,
    };
    std::fs::write(out, serde_json::to_vec_pretty(&report)?)
        .with_context(|| format!("cannot write {}", out.display()))?;
    println!("{}\n", out.display());
    Ok(())
}

fn row(pollers: u32, beside_others: bool, rounds: Vec<Measured>, alone: &[Measured]) -> Row {
    let of = |get: fn(&Measured) -> f64| Summary::of(rounds.iter().map(get));
    Row {
        pollers,
        beside_others,
        median_ms: of(|round| round.median_ms),
        worst_ms: of(|round| round.worst_ms),
        gbit_s: of(|round| round.gbit_s),
        ratio: Summary::of(
            rounds
                .iter()
                .zip(alone)
                .map(|(round, alone)| round.gbit_s / alone.gbit_s),
        ),
        rounds,
    }
}

fn print(row: &Row) {
    println!(
        "{:>8} {:>8} {:>10.2} {:>10.2} {:>10.2} {:>8.2} {:>8.2}",
        row.pollers,
        if row.beside_others { "yes" } else { "no" },
        row.median_ms.median,
        row.worst_ms.median,
        row.worst_ms.most,
        row.gbit_s.median,
        row.ratio.median,
    );
}

fn transfers(lab: &TestLab, pollers: u32) -> anyhow::Result<Measured> {
    let program = program("pollers")?;
    let pollers = pollers.to_string();
    let argv = [program.as_str(), BYTES, TRANSFERS, &pollers];
    let server = lab.start("peer", &argv)?;
    lab.listens("peer", 1, PORT)?;
    let address = lab.address("peer")?;
    let client = lab
        .start("src", &[&argv[..], &[&address]].concat())?
        .succeed(LIMIT)?;
    server.succeed(LIMIT)?;
    serde_json::from_str(&client.stdout).with_context(|| format!("no result{}", client.output()))
}

/// What the RNIC of a host counts of it.
fn starved(lab: &TestLab, host: &str) -> anyhow::Result<u64> {
    let verbatim = lab
        .tools()
        .verbatim
        .to_str()
        .context("a path that is not UTF-8")?;
    let told = lab
        .start_plain(host, &[verbatim, "nic", "stat", "--json"])?
        .succeed(LIMIT)?;
    let told: serde_json::Value = serde_json::from_str(&told.stdout)?;
    told["device"]["starved"]
        .as_u64()
        .with_context(|| format!("the RNIC of {host} does not say how often it was starved"))
}

/// A program that computes, for each processor.
struct Others(Vec<Child>);

impl Others {
    fn start(processors: usize) -> anyhow::Result<Self> {
        let this = programs::this()?;
        let mut others = Self(Vec::new());
        for _ in 0..processors {
            let child = Command::new(&this).arg("compute").stdin(Stdio::null()).spawn();
            others
                .0
                .push(child.context("cannot start this program once more")?);
        }
        Ok(others)
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// One of [`Others`], until the bench ends it or ends itself. It has a session of its own, so that the scheduler takes it for another
/// user's (sched(7), autogroup).
pub fn compute() -> anyhow::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    rustix::process::setsid()?;
    loop {
        std::hint::black_box(());
    }
}
