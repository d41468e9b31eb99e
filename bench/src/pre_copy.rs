//! What it costs to send memory ahead, over TLS and by one-sided RDMA: processor time on both hosts, time, and what a partner at full
//! speed loses meanwhile, and in the pre-setup after it.
//!
//! A program that writes to so much private memory is moved to and fro, each way of sending by turns in one run. What a move of the same
//! program with next to no memory takes is subtracted: what is left is the memory's. `ib_write_bw` between two other instances is the
//! partner; what it gets is counted by its RNIC while the first round runs, and before.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde::Serialize;
use verbatim_e2e::{Bandwidth, Instance, Migration, TestLab, Tools, Traffic, eventually};

use crate::context::Context;
use crate::migrrdma::write;
use crate::programs::program;
use crate::summary::Summary;

const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(120);
/// What the move of a program without memory is measured with, in MiB: less is not sent ahead.
const LITTLE_MIB: u32 = 16;
/// Of memory of this machine that is touched before anything is measured, in bytes: the machine may be a virtual one that gets its
/// pages one by one when they are touched first, which is no cost of a migration.
const TOUCHED: usize = 6 << 30;
/// For how long the partner is watched before a move.
const BEFORE: Duration = Duration::from_secs(1);

/// A way of sending: its name, transport and tuning.
type Way = (&'static str, &'static str, &'static str);

const WAYS: [Way; 7] = [
    ("TLS, one part for each run", "tls", "pack=off"),
    ("TLS", "tls", ""),
    ("WRITE", "rdma", "operation=write"),
    ("READ", "rdma", "operation=read"),
    ("READ, as a program's", "rdma", "operation=read,class=user"),
    (
        "READ, single pages",
        "rdma",
        "operation=read,run=4096,window=1048576",
    ),
    (
        "READ, clustered",
        "rdma",
        "operation=read,run=1048576,window=1048576",
    ),
];

/// Beside a partner.
const BESIDE: [Way; 4] = [
    ("TLS, full rate", "tls", "rate=full"),
    ("TLS", "tls", ""),
    ("WRITE, full rate", "rdma", "operation=write,rate=full,class=user"),
    ("WRITE", "rdma", "operation=write"),
];

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    mebibytes: u32,
    alone: Vec<Alone>,
    beside: Vec<Beside>,
}

/// Without other traffic.
#[derive(Debug, Serialize)]
struct Alone {
    way: &'static str,
    tuning: &'static str,
    /// Processor time of both agents and both RNICs, in ms for each MiB.
    processor_ms: Summary,
    /// Of the first round, in MiB/s.
    rate: Summary,
    /// Of the whole move, in ms.
    total_ms: Summary,
    service_ms: Summary,
}

/// Beside a partner at full speed.
#[derive(Debug, Serialize)]
struct Beside {
    way: &'static str,
    tuning: &'static str,
    /// Of the partner, in Gbit/s.
    before: Summary,
    /// While memory is sent ahead.
    meanwhile: Summary,
    /// Part of it that is lost.
    lost: Summary,
    /// The same in the pre-setup: runc and CRIU are started on both hosts.
    lost_in_pre_setup: Summary,
    /// Of the pre-setup.
    pre_setup_ms: Summary,
    /// Of all rounds, in MB/s.
    rate: Summary,
}

/// Measures, prints and writes.
pub fn run(tools: &Tools, repeats: u32, most: u32, out: &Path) -> anyhow::Result<()> {
    let context = Context::now();
    touch_memory();
    let mebibytes = most.clamp(64, 512);
    println!("{mebibytes} MiB sent ahead, {repeats} of each by turns; medians (worst)");
    println!(
        "{:<28} {:>18} {:>16} {:>18} {:>18}",
        "alone", "processor ms/MiB", "MiB/s", "total ms", "service ms"
    );
    let alone = alone(tools, mebibytes, repeats)?;
    println!(
        "{:<28} {:>16} {:>16} {:>16} {:>16} {:>14}",
        "beside a partner", "before Gbit/s", "meanwhile", "lost", "in pre-setup", "MB/s"
    );
    let beside = beside(tools, mebibytes, repeats)?;
    let report = Report {
        context,
        mebibytes,
        alone,
        beside,
    };
    write(&report, out)
}

fn touch_memory() {
    let mut memory = vec![0u8; TOUCHED];
    for page in memory.chunks_mut(4096) {
        page[0] = 1;
    }
    std::hint::black_box(&memory);
}

fn options(way: &Way) -> [&'static str; 4] {
    ["--memory-transport", way.1, "--memory-tuning", way.2]
}

/// A program with so much memory, on `src`.
fn with_memory<'l>(lab: &'l TestLab, name: &str, mebibytes: u32) -> anyhow::Result<Instance<'l>> {
    let size = mebibytes.to_string();
    let instance = lab.instance("src", name, &[&program("memory")?, &size])?;
    eventually("the program's memory", LIMIT, || {
        Ok(instance.output()?.contains("ready").then_some(()))
    })?;
    Ok(instance)
}

/// Processor time of agents and RNICs of two hosts so far, in ms.
fn processor_ms(lab: &TestLab) -> anyhow::Result<f64> {
    let mut all = Duration::ZERO;
    for host in ["src", "dst"] {
        for service in ["agent", "nic"] {
            all += lab.cpu_time(host, service)?;
        }
    }
    Ok(all.as_secs_f64() * 1e3)
}

fn moved(lab: &TestLab, instance: &Instance<'_>, there: &str, way: &Way) -> anyhow::Result<Migration> {
    let migration = instance.migrate_with(there, &options(way))?;
    migration.must_be_committed()?;
    filled(lab, there, instance.name())?;
    ensure!(migration.memory_transport == way.1, "{migration:?}");
    Ok(migration)
}

/// Until it has all the memory that it left at its last place.
fn filled(lab: &TestLab, host: &str, name: &str) -> anyhow::Result<()> {
    let folder = lab.path(host, &format!("/run/verbatim/private/{name}"))?;
    eventually("the end of the fill", LIMIT, || {
        Ok((!folder.exists()).then_some(()))
    })
}

fn alone(tools: &Tools, mebibytes: u32, repeats: u32) -> anyhow::Result<Vec<Alone>> {
    let lab = TestLab::up(tools, HOSTS)?;
    let large = with_memory(&lab, "large", mebibytes)?;
    let little = with_memory(&lab, "little", LITTLE_MIB)?;
    let mut found: Vec<Vec<(f64, Migration)>> = WAYS.iter().map(|_| Vec::new()).collect();
    let mut there = "dst";
    for _ in 0..repeats {
        for (way, found) in WAYS.iter().zip(&mut found) {
            let begin = processor_ms(&lab)?;
            moved(&lab, &little, there, way)?;
            let between = processor_ms(&lab)?;
            let migration = moved(&lab, &large, there, way)?;
            let end = processor_ms(&lab)?;
            let more = (end - between) - (between - begin);
            found.push((more / f64::from(mebibytes - LITTLE_MIB), migration));
            there = if there == "dst" { "src" } else { "dst" };
        }
    }
    lab.down()?;
    let rows = WAYS.iter().zip(found).map(|(way, found)| {
        let of = |get: fn(&(f64, Migration)) -> f64| Summary::of(found.iter().map(get));
        let row = Alone {
            way: way.0,
            tuning: way.2,
            processor_ms: of(|(processor, _)| *processor),
            rate: of(|(_, migration)| first_rate(migration)),
            total_ms: of(|(_, migration)| migration.total_ms),
            service_ms: of(|(_, migration)| migration.service_blackout_ms),
        };
        println!(
            "{:<28} {:>18} {:>16} {:>18} {:>18}",
            row.way,
            told(&row.processor_ms, 2),
            told(&row.rate, 0),
            told(&row.total_ms, 0),
            told(&row.service_ms, 0)
        );
        row
    });
    Ok(rows.collect())
}

/// MiB/s of the first round of private memory.
fn first_rate(migration: &Migration) -> f64 {
    let tracked = migration.pre_copy.private_tracked.as_ref();
    let first = tracked.and_then(|tracked| tracked.rounds.first());
    first.map_or(0.0, |first| {
        first.bytes as f64 / f64::from(1 << 20) / (first.ms / 1e3)
    })
}

fn told(summary: &Summary, digits: usize) -> String {
    format!("{:.digits$} ({:.digits$})", summary.median, summary.most)
}

fn beside(tools: &Tools, mebibytes: u32, repeats: u32) -> anyhow::Result<Vec<Beside>> {
    let lab = TestLab::up(tools, HOSTS)?;
    let partner = Bandwidth::start(&lab, &["ib_write_bw", "-q", "16", "-s", "2097152", "-t", "2"])?;
    let large = with_memory(&lab, "large", mebibytes)?;
    let traffic = Traffic::of(&lab, "peer")?;
    let mut found: Vec<Vec<Watched>> = BESIDE.iter().map(|_| Vec::new()).collect();
    for _ in 0..repeats {
        for (way, found) in BESIDE.iter().zip(&mut found) {
            let before = gbits(&traffic, Instant::now() + BEFORE);
            found.push(watched(&lab, &traffic, way, before)?);
            // Back again, however.
            filled(&lab, "dst", "large")?;
            large.migrate("src")?.must_be_committed()?;
            filled(&lab, "src", "large")?;
        }
    }
    partner.end()?;
    lab.down()?;
    let rows = BESIDE.iter().zip(found).map(|(way, found)| {
        let of = |get: fn(&Watched) -> f64| Summary::of(found.iter().map(get));
        let row = Beside {
            way: way.0,
            tuning: way.2,
            before: of(|found| found.before),
            meanwhile: of(|found| found.meanwhile),
            lost: of(|found| 1.0 - found.meanwhile / found.before),
            lost_in_pre_setup: of(|found| 1.0 - found.in_pre_setup / found.before),
            pre_setup_ms: of(|found| found.pre_setup.as_secs_f64() * 1e3),
            rate: of(|found| found.rate),
        };
        println!(
            "{:<28} {:>16} {:>16} {:>16} {:>16} {:>14}",
            row.way,
            told(&row.before, 2),
            told(&row.meanwhile, 2),
            told(&row.lost, 3),
            told(&row.lost_in_pre_setup, 3),
            told(&row.rate, 0)
        );
        row
    });
    Ok(rows.collect())
}

/// What passes until then, in Gbit/s.
fn gbits(traffic: &Traffic, until: Instant) -> f64 {
    let (begun, before) = (Instant::now(), traffic.payload_bytes());
    std::thread::sleep(until.saturating_duration_since(begun));
    per_second(traffic.payload_bytes() - before, begun.elapsed())
}

fn per_second(bytes: u64, time: Duration) -> f64 {
    bytes as f64 * 8e-9 / time.as_secs_f64()
}

/// What the partner had, in Gbit/s, around one move.
struct Watched {
    before: f64,
    /// While memory was sent ahead.
    meanwhile: f64,
    in_pre_setup: f64,
    pre_setup: Duration,
    /// How fast memory was sent, in MB/s.
    rate: f64,
}

/// Moves it, and watches the partner.
fn watched(lab: &TestLab, traffic: &Traffic, way: &Way, before: f64) -> anyhow::Result<Watched> {
    let argv = [
        &["migrate", "large", "--to", "dst", "--json-lines"],
        &options(way)[..],
    ]
    .concat();
    let running = lab.verbatim(&argv)?;
    let begins = |phase: &str| {
        let said = format!("\"phase\":\"{phase}\"");
        eventually(phase, LIMIT, || {
            let now = (Instant::now(), traffic.payload_bytes());
            Ok(running.stdout()?.contains(&said).then_some(now))
        })
    };
    let (begun, first) = begins("PreCopy")?;
    let (ended, last) = begins("PreSetup")?;
    let (stopped, then) = begins("WaitBeforeStop")?;
    let finished = running.succeed(LIMIT)?;
    let report = finished.stdout.lines().last().context("there is no report")?;
    let report: serde_json::Value = serde_json::from_str(report)?;
    ensure!(report["report"]["outcome"] == "committed", "{report}");
    let sent = report["report"]["bytes"]["pre_copy"].as_u64().unwrap_or(0);
    let time = ended - begun;
    let pre_setup = stopped - ended;
    Ok(Watched {
        before,
        meanwhile: per_second(last - first, time),
        in_pre_setup: per_second(then - last, pre_setup),
        pre_setup,
        rate: sent as f64 / 1e6 / time.as_secs_f64(),
    })
}
