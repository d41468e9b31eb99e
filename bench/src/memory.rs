//! Blackouts against private memory: a program that writes to it at random, moved, and the same program written down and made again
//! by CRIU alone on one host, by turns in one run.
//!
//! Three programs for each size: one without RDMA (`bench/programs/memory.c`), which is also CRIU's own peer; `vcheck` with two queue
//! pairs and as much private memory; Python, whose reference counts are written all the time.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use verbatim_e2e::{Instance, Migration, TestLab, Tools, Traffic, VCHECK_PORT, eventually};

use crate::context::Context;
use crate::migrrdma::write;
use crate::programs::program;
use crate::soft_rnic::plot::{Axes, Line, Scale, draw};
use crate::stock;
use crate::summary::Summary;

/// MiB of private memory.
const SIZES: [u32; 5] = [0, 64, 300, 1024, 4096];
const LIMIT: Duration = Duration::from_secs(120);
/// What must pass between two moves.
const BYTES_BETWEEN: u64 = 8 << 20;

const PYTHON: &str = "
import os, sys
blocks = [bytearray(os.urandom(1 << 20)) for _ in range(int(sys.argv[1]))]
print('ready', flush=True)
turn = 0
while True:
    turn += 1
    for block in blocks: block[turn % len(block)] = turn & 255
    if not blocks: turn += 1
";

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    unit: &'static str,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    mebibytes: u32,
    /// CRIU alone, as the program saw it.
    stock: Summary,
    /// The same program moved, as it saw it.
    gap: Summary,
    /// By the reports: of the same program, of `vcheck`, of Python.
    service: [Summary; 3],
    total: [Summary; 3],
    migrations: Vec<Migration>,
}

/// Measures, prints, draws and writes.
pub fn run(tools: &Tools, repeats: u32, most: u32, out: &Path) -> anyhow::Result<()> {
    let context = Context::now();
    println!("private memory, {repeats} of each by turns; medians (worst), ms");
    println!(
        "{:>6} {:>18} {:>18} {:>18} {:>18} {:>18} {:>6}",
        "MiB", "CRIU alone", "moved", "service", "vcheck", "Python", "ratio"
    );
    let mut rows = Vec::new();
    for mebibytes in SIZES.into_iter().filter(|size| *size <= most) {
        let row = measure(tools, mebibytes, repeats)?;
        let told = |summary: &Summary| format!("{:.1} ({:.1})", summary.median, summary.most);
        println!(
            "{:>6} {:>18} {:>18} {:>18} {:>18} {:>18} {:>6.2}",
            mebibytes,
            told(&row.stock),
            told(&row.gap),
            told(&row.service[0]),
            told(&row.service[1]),
            told(&row.service[2]),
            row.service[0].median / row.stock.median
        );
        rows.push(row);
    }
    plot(&rows, &out.with_extension("svg"))?;
    let report = Report {
        context,
        unit: "ms",
        rows,
    };
    write(&report, out)
}

fn measure(tools: &Tools, mebibytes: u32, repeats: u32) -> anyhow::Result<Row> {
    let lab = TestLab::up(tools, &["one", "other", "peer"])?;
    let size = mebibytes.to_string();
    let plain = lab.instance("one", "plain", &[&program("memory")?, &size])?;
    let python = lab.instance("one", "python", &["/usr/bin/python3", "-c", PYTHON, &size])?;
    for instance in [&plain, &python] {
        eventually("the program's memory", LIMIT, || {
            Ok(instance.output()?.contains("ready").then_some(()))
        })?;
    }
    let vcheck = tools.vcheck.display().to_string();
    let server = lab.instance("peer", "server", &[&vcheck, "--stall-timeout", "60"])?;
    server.listens(VCHECK_PORT)?;
    let address = server.address()?;
    let mut argv = vec![
        vcheck.as_str(),
        "--stall-timeout",
        "60",
        "-D",
        "7200",
        "-q",
        "2",
        "--op",
        "write",
        "-s",
        "65536",
    ];
    if mebibytes > 0 {
        argv.extend(["--private", &size]);
    }
    argv.push(&address);
    let client = lab.instance("one", "client", &argv)?;
    let (mut stock_gaps, mut gaps, mut migrations) = (Vec::new(), Vec::new(), Vec::new());
    let mut here = "one";
    for _ in 0..repeats {
        stock_gaps.push(stock::gap(mebibytes)?);
        let there = if here == "one" { "other" } else { "one" };
        let begun = stock::now();
        migrations.push(moved(&lab, &plain, there)?);
        gaps.push(eventually("the program that goes on", LIMIT, || {
            Ok(stock::longest_gap(&plain.output()?, begun))
        })?);
        Traffic::of(&lab, here)?.flows(BYTES_BETWEEN, LIMIT)?;
        migrations.push(moved(&lab, &client, there)?);
        migrations.push(moved(&lab, &python, there)?);
        here = there;
    }
    Traffic::of(&lab, here)?.flows(BYTES_BETWEEN, LIMIT)?;
    lab.down()?;
    let of = |name: &str, get: fn(&Migration) -> f64| {
        Summary::of(migrations.iter().filter(|moved| moved.instance == name).map(get))
    };
    let all = |get| ["plain", "client", "python"].map(|name| of(name, get));
    Ok(Row {
        mebibytes,
        stock: Summary::of(stock_gaps),
        gap: Summary::of(gaps),
        service: all(|moved| moved.service_blackout_ms),
        total: all(|moved| moved.total_ms),
        migrations,
    })
}

fn moved(lab: &TestLab, instance: &Instance<'_>, to: &str) -> anyhow::Result<Migration> {
    let moved = instance.migrate(to)?;
    moved
        .must_be_committed()
        .map(|()| moved)
        .with_context(|| format!("{}{}", instance.name(), lab.logs()))
}

fn plot(rows: &[Row], path: &Path) -> anyhow::Result<()> {
    let axes = Axes {
        title: "How long a program stands still, by its private memory",
        x: "MiB",
        y: "ms",
        scale: Scale::Linear,
    };
    let line = |name: &str, peer: bool, get: fn(&Row) -> f64| Line {
        name: name.to_owned(),
        points: rows
            .iter()
            .map(|row| (f64::from(row.mebibytes), get(row)))
            .collect(),
        peer,
    };
    let lines = [
        line("CRIU alone, on one host", true, |row| row.stock.median),
        line("the same program, moved", false, |row| row.gap.median),
        line("vcheck, moved (service blackout)", false, |row| {
            row.service[1].median
        }),
        line("Python, moved (service blackout)", false, |row| {
            row.service[2].median
        }),
    ];
    draw(path, &axes, &lines)
}
