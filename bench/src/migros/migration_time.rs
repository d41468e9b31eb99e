//! How long a migration takes, and its parts, against the number of queue pairs (MigrOS §5.3, figure 10) and against how much memory is
//! registered (with figure 9), by pause-resume and by wait-before-stop by turns in the same run.
//!
//! The paper moves `ib_send_bw`, and its time is the longest that the other side waits for a message; ours of that kind is the
//! communication blackout. What it calls the time to make the objects is before the blackout here (`PreSetup`).

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde::Serialize;
use verbatim_e2e::{Migration, PHASES, TestLab, Tools, Traffic, eventually};

use crate::context::Context;
use crate::migrrdma::pair::{self, Move, Moved};
use crate::migrrdma::write;
use crate::programs::program;
use crate::soft_rnic::plot::{Axes, Line, Scale, draw, size};
use crate::summary::Summary;

const METHODS: [&str; 2] = ["pause-resume", "wait-before-stop"];
const QUEUE_PAIRS: [u32; 7] = [1, 4, 16, 64, 256, 1024, 4096];
/// Of each queue pair: few bytes, so that not the drain is measured.
const MESSAGE: &str = "-s 4096 -t 2";
const MEBIBYTES: [u32; 6] = [1, 4, 16, 64, 256, 1024];

const TCP_PORT: u16 = 18520;
const READY: Duration = Duration::from_secs(60);
/// What passes between two moves of a program that sends 4 KiB to and fro.
const BYTES_BETWEEN: u64 = 4 << 20;

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    unit: &'static str,
    by_queue_pairs: Vec<Row>,
    by_region: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    method: &'static str,
    queue_pairs: u32,
    /// Registered by the program that moves, besides a few KiB.
    region_bytes: u64,
    total: Summary,
    service_blackout: Summary,
    communication_blackout: Summary,
    phases: Vec<(&'static str, Summary)>,
    /// Content sent ahead, and while the instance was frozen.
    pre_copy_bytes: Summary,
    stop_and_copy_bytes: Summary,
    migrations: Vec<Migration>,
}

/// Measures, prints and writes: so many moves by each method for each number of queue pairs, to `most`, and each size.
pub fn run(tools: &Tools, repeats: u32, most: u32, out: &Path) -> anyhow::Result<()> {
    let context = Context::now();
    println!(
        "a migration, ms, medians of {repeats} moves by each method: against queue pairs (ib_write_bw, {MESSAGE}, sender moved)"
    );
    head("QPs");
    let mut by_queue_pairs = Vec::new();
    for queue_pairs in QUEUE_PAIRS.into_iter().filter(|count| *count <= most) {
        let migrations = by_queue_pairs_of(tools, queue_pairs, repeats)?;
        for row in rows(&migrations, queue_pairs, 0) {
            print(&queue_pairs.to_string(), &row);
            by_queue_pairs.push(row);
        }
    }
    println!("the same against registered memory (one queue pair, 4 KiB WRITEs to and fro, client moved)");
    head("memory");
    let mut by_region = Vec::new();
    for mebibytes in MEBIBYTES {
        let migrations = with_region(tools, mebibytes, repeats)?;
        for row in rows(&migrations, 1, u64::from(mebibytes) << 20) {
            print(&size(row.region_bytes as f64), &row);
            by_region.push(row);
        }
    }
    let at = |suffix: &str| {
        let stem = out.file_stem().unwrap_or_default().to_string_lossy();
        out.with_file_name(format!("{stem}-{suffix}.svg"))
    };
    plot(
        &by_queue_pairs,
        "queue pairs",
        Scale::Counts,
        &at("queue-pairs"),
        |row| f64::from(row.queue_pairs),
    )?;
    plot(
        &by_region,
        "registered memory",
        Scale::Sizes,
        &at("memory"),
        |row| row.region_bytes as f64,
    )?;
    let report = Report {
        context,
        unit: "ms",
        by_queue_pairs,
        by_region,
    };
    write(&report, out)
}

fn method(number: u32) -> &'static str {
    METHODS[number as usize % METHODS.len()]
}

fn by_queue_pairs_of(tools: &Tools, queue_pairs: u32, repeats: u32) -> anyhow::Result<Vec<Migration>> {
    // It ends with the lab, long before its time is over.
    let line = format!("ib_write_bw -F -u 19 -q {queue_pairs} {MESSAGE} -Q 1 -D 3600");
    let argv: Vec<_> = line.split(' ').collect();
    let moves = pair::moves_by(
        tools,
        &argv,
        Moved::Sender,
        repeats * METHODS.len() as u32,
        method,
    )?;
    Ok(moves
        .into_iter()
        .map(|Move { migration, .. }| migration)
        .collect())
}

/// Two programs that send a little to and fro all the time; the one that moves has so much registered.
fn with_region(tools: &Tools, mebibytes: u32, repeats: u32) -> anyhow::Result<Vec<Migration>> {
    let lab = TestLab::up(tools, &["one", "other", "peer"])?;
    let migrations = to_and_fro(&lab, mebibytes, repeats * METHODS.len() as u32).with_context(|| lab.logs());
    lab.down()?;
    migrations
}

fn to_and_fro(lab: &TestLab, mebibytes: u32, moves: u32) -> anyhow::Result<Vec<Migration>> {
    let program = program("latency")?;
    // Longer than the moves take: it ends with the lab.
    let argv = [program.as_str(), "write", "4096", "1000", "1000000", "1"];
    let server = lab.instance("peer", "server", &[&argv[..], &["0"]].concat())?;
    server.listens(TCP_PORT)?;
    let (address, region) = (server.address()?, mebibytes.to_string());
    let client = lab.instance("one", "client", &[&argv[..], &[&region, &address]].concat())?;
    for instance in [&server, &client] {
        eventually("connected queue pairs", READY, || {
            Ok(instance.output()?.contains("qpns").then_some(()))
        })?;
        let row = instance.row()?;
        let pid = row.pid.context("it has ended")?.to_string();
        lab.start_plain(&row.host, &["kill", "-USR1", &pid])?
            .succeed(READY)?;
    }
    let traffic = Traffic::of(lab, "peer")?;
    let (mut here, mut there) = ("one", "other");
    let mut migrations = Vec::new();
    for number in 0..moves {
        traffic.flows(BYTES_BETWEEN, READY)?;
        let method = method(number);
        let migration = client
            .migrate_with(there, &["--method", method])
            .and_then(|migration| migration.must_be_committed().map(|()| migration))
            .with_context(|| format!("move {} with {mebibytes} MiB", number + 1))?;
        ensure!(migration.method == method, "{}", migration.method_reason);
        std::mem::swap(&mut here, &mut there);
        migrations.push(migration);
    }
    traffic.flows(BYTES_BETWEEN, READY)?;
    Ok(migrations)
}

fn rows(migrations: &[Migration], queue_pairs: u32, region_bytes: u64) -> Vec<Row> {
    METHODS
        .into_iter()
        .map(|method| {
            let mine: Vec<_> = migrations
                .iter()
                .filter(|migration| migration.method == method)
                .cloned()
                .collect();
            let of = |get: &dyn Fn(&Migration) -> f64| Summary::of(mine.iter().map(get));
            Row {
                method,
                queue_pairs,
                region_bytes,
                total: of(&|of| of.total_ms),
                service_blackout: of(&|of| of.service_blackout_ms),
                communication_blackout: of(&|of| of.communication_blackout_ms),
                phases: PHASES
                    .map(|phase| (phase, of(&|of| of.phases_ms[phase])))
                    .to_vec(),
                pre_copy_bytes: of(&|of| of.bytes.pre_copy as f64),
                stop_and_copy_bytes: of(&|of| of.bytes.stop_and_copy as f64),
                migrations: mine,
            }
        })
        .collect()
}

fn head(what: &str) {
    println!(
        "{what:>8} {:16} {:>8} {:>8} {:>8}  phases",
        "", "total", "service", "commun."
    );
}

fn print(place: &str, row: &Row) {
    let phases: Vec<_> = row
        .phases
        .iter()
        .map(|(phase, summary)| format!("{phase} {:.1}", summary.median))
        .collect();
    println!(
        "{place:>8} {:16} {:>8.1} {:>8.1} {:>8.1}  {}",
        row.method,
        row.total.median,
        row.service_blackout.median,
        row.communication_blackout.median,
        phases.join(", ")
    );
}

fn plot(rows: &[Row], x: &str, scale: Scale, path: &Path, place: fn(&Row) -> f64) -> anyhow::Result<()> {
    let axes = Axes {
        title: "how long a migration takes",
        x,
        y: "ms",
        scale,
    };
    let line = |method: &'static str, name: &str, peer, get: fn(&Row) -> &Summary| Line {
        name: format!("{name}, {method}"),
        points: rows
            .iter()
            .filter(|row| row.method == method)
            .map(|row| (place(row), get(row).median))
            .collect(),
        peer,
    };
    let lines: Vec<_> = METHODS
        .into_iter()
        .flat_map(|method| {
            [
                line(method, "total", true, |row| &row.total),
                line(method, "communication blackout", false, |row| {
                    &row.communication_blackout
                }),
            ]
        })
        .collect();
    draw(path, &axes, &lines)
}
