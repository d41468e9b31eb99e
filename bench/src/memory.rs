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

/// How long one move may take: beside traffic, 4 GiB go ahead at 50 MiB/s and more.
const MOVE: Duration = Duration::from_secs(240);
/// What must pass between two moves.
const BYTES_BETWEEN: u64 = 8 << 20;

/// The programs: one without RDMA, `vcheck`, Python.
const NAMES: [&str; 3] = [PLAIN, VCHECK, "python"];
const PLAIN: &str = "plain";
const VCHECK: &str = "client";
/// MiB from which on each program is measured by itself: three of them, with what is on its way of one, and CRIU's images, are more than a machine of 24 GiB has.
const ALONE_FROM: u32 = 2048;

const PYTHON_PROGRAM: &str = "
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
    let mut found = Found::default();
    match mebibytes < ALONE_FROM {
        true => measure_together(tools, mebibytes, repeats, &NAMES, &mut found)?,
        false => {
            for name in NAMES {
                measure_together(tools, mebibytes, repeats, &[name], &mut found)?;
            }
        }
    }
    let of = |name: &str, get: fn(&Migration) -> f64| {
        let moves = found.migrations.iter().filter(|moved| moved.instance == name);
        Summary::of(moves.map(get))
    };
    let all = |get| NAMES.map(|name| of(name, get));
    Ok(Row {
        mebibytes,
        stock: Summary::of(found.stock),
        gap: Summary::of(found.gaps),
        service: all(|moved| moved.service_blackout_ms),
        total: all(|moved| moved.total_ms),
        migrations: found.migrations,
    })
}

/// What was measured with one size.
#[derive(Default)]
struct Found {
    stock: Vec<f64>,
    gaps: Vec<f64>,
    migrations: Vec<Migration>,
}

/// Programs that are moved one after the other, and CRIU alone, by turns.
fn measure_together(
    tools: &Tools,
    mebibytes: u32,
    repeats: u32,
    names: &[&str],
    found: &mut Found,
) -> anyhow::Result<()> {
    let lab = TestLab::up(tools, &["one", "other", "peer"])?;
    let mut programs = Vec::new();
    let mut server = None;
    for name in names {
        if *name == VCHECK {
            let vcheck = tools.vcheck.display().to_string();
            let started = lab.instance("peer", "server", &[&vcheck, "--stall-timeout", "60"])?;
            started.listens(VCHECK_PORT)?;
            server = Some(started);
        }
        let address = server.as_ref().map(Instance::address).transpose()?;
        programs.push(start(&lab, tools, name, mebibytes, address)?);
    }
    let flows = |here: &str| match server {
        Some(_) => Traffic::of(&lab, here)?.flows(BYTES_BETWEEN, LIMIT),
        None => Ok(()),
    };
    let mut here = "one";
    for _ in 0..repeats {
        let there = if here == "one" { "other" } else { "one" };
        for (name, program) in names.iter().zip(&programs) {
            if *name == VCHECK {
                flows(here)?;
            }
            if *name != PLAIN {
                found.migrations.push(moved(&lab, program, there)?);
                continue;
            }
            found.stock.push(stock::gap(mebibytes)?);
            let begun = stock::now();
            found.migrations.push(moved(&lab, program, there)?);
            found.gaps.push(eventually("the program that goes on", LIMIT, || {
                Ok(stock::longest_gap(&program.output()?, begun))
            })?);
        }
        here = there;
    }
    flows(here)?;
    lab.down()
}

/// Starts one of them; it has its memory when this returns.
fn start<'l>(
    lab: &'l TestLab,
    tools: &Tools,
    name: &str,
    mebibytes: u32,
    server: Option<String>,
) -> anyhow::Result<Instance<'l>> {
    let size = mebibytes.to_string();
    if name == VCHECK {
        let (vcheck, server) = (
            tools.vcheck.display().to_string(),
            server.context("there is no server")?,
        );
        let mut words = vec![
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
            words.extend(["--private", &size]);
        }
        words.push(&server);
        let started = lab.instance("one", name, &words)?;
        // It connects when it has its memory.
        Traffic::of(lab, "one")?.flows(BYTES_BETWEEN, LIMIT)?;
        return Ok(started);
    }
    let started = match name {
        PLAIN => lab.instance("one", name, &[&program("memory")?, &size])?,
        _ => lab.instance("one", name, &["/usr/bin/python3", "-c", PYTHON_PROGRAM, &size])?,
    };
    eventually("the program's memory", LIMIT, || {
        Ok(started.output()?.contains("ready").then_some(()))
    })?;
    Ok(started)
}

fn moved(lab: &TestLab, instance: &Instance<'_>, to: &str) -> anyhow::Result<Migration> {
    let moved = instance.migrate_within(MOVE, to, &[])?;
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
