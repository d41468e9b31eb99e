//! How long it takes to make verbs objects (MigrOS §5.3, figures 8 and 9): 64 of each by a program through `libverbatim.so`
//! (`bench/programs/objects.c`), and by the RNIC alone, with and without asking it for numbers and keys ([`numbers`]), as it is asked
//! when an instance moves by pause-resume.
//!
//! The paper gives no numbers in its text but says that most operations take milliseconds, and its figures are drawn; so there
//! is nothing of it in the table.

pub mod numbers;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};
use verbatim_e2e::{TestLab, Tools};

use self::numbers::Asked;
use crate::context::Context;
use crate::migrrdma::write;
use crate::programs::{self, program};
use crate::soft_rnic::plot::{Axes, Line, Scale, draw, size};
use crate::summary::{Spread, Summary};

/// As in the paper.
const COUNT: u32 = 64;
/// Of which the paper has 50, for each repeat.
const ROUNDS: u32 = 10;
const LIMIT: Duration = Duration::from_secs(600);

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    unit: &'static str,
    count: u32,
    rounds: u32,
    objects: Vec<Object>,
    regions: Vec<Region>,
    numbers: Vec<Numbers>,
}

/// Microseconds of one object, of all rounds.
#[derive(Debug, Serialize)]
struct Object {
    object: &'static str,
    time: Summary,
    spread: Spread,
}

/// The same of a memory region.
#[derive(Debug, Serialize)]
struct Region {
    bytes: u64,
    time: Summary,
    spread: Spread,
}

/// The same at the RNIC's socket.
#[derive(Debug, Serialize)]
struct Numbers {
    object: &'static str,
    given: Summary,
    asked_for: Summary,
}

/// What the program prints for a round.
#[derive(Debug, Deserialize)]
struct Round {
    round: u32,
    pd: f64,
    cq: f64,
    srq: f64,
    qp_create: f64,
    qp_init: f64,
    qp_rtr: f64,
    qp_rts: f64,
    mr: Vec<(u64, f64)>,
}

/// Measures, prints and writes.
pub fn run(tools: &Tools, repeats: u32, out: &Path) -> anyhow::Result<()> {
    let context = Context::now();
    let rounds = repeats * ROUNDS;
    let lab = TestLab::up(tools, &["src"])?;
    let measured = programs(&lab, rounds).and_then(|all| Ok((all, numbers(&lab, rounds)?)));
    let ((objects, regions), numbers) = measured.with_context(|| lab.logs())?;
    lab.down()?;
    plot(&regions, &out.with_extension("svg"))?;
    let report = Report {
        context,
        unit: "us",
        count: COUNT,
        rounds,
        objects,
        regions,
        numbers,
    };
    write(&report, out)
}

fn programs(lab: &TestLab, rounds: u32) -> anyhow::Result<(Vec<Object>, Vec<Region>)> {
    let (program, count) = (program("objects")?, COUNT.to_string());
    let finished = lab
        .start("src", &[&program, &count, &rounds.to_string()])?
        .succeed(LIMIT)?;
    let mut all = Vec::new();
    for line in finished.stdout.lines() {
        let round: Round = serde_json::from_str(line).with_context(|| line.to_owned())?;
        if round.round > 0 {
            all.push(round);
        }
    }
    ensure!(all.len() == rounds as usize, "{} rounds", all.len());
    println!("making an object through libverbatim.so, us: {rounds} rounds of {COUNT}");
    println!(
        "{:16} {:>10} {:>10} {:>10} {:>10} {:>10}",
        "", "median", "least", "worst", "mean", "deviation"
    );
    type Get = fn(&Round) -> f64;
    let kinds: [(&str, Get); 7] = [
        ("PD", |of| of.pd),
        ("CQ", |of| of.cq),
        ("SRQ", |of| of.srq),
        ("QP, create", |of| of.qp_create),
        ("QP, to INIT", |of| of.qp_init),
        ("QP, to RTR", |of| of.qp_rtr),
        ("QP, to RTS", |of| of.qp_rts),
    ];
    let objects = kinds.map(|(object, get)| {
        let object = Object {
            object,
            time: Summary::of(all.iter().map(get)),
            spread: Spread::of(all.iter().map(get)),
        };
        print(object.object, &object.time, &object.spread);
        object
    });
    let sizes: Vec<u64> = all[0].mr.iter().map(|(bytes, _)| *bytes).collect();
    let regions = sizes.into_iter().enumerate().map(|(place, bytes)| {
        let times = all.iter().map(|round| round.mr[place].1);
        let region = Region {
            bytes,
            time: Summary::of(times.clone()),
            spread: Spread::of(times),
        };
        print(
            &format!("MR, {}", size(bytes as f64)),
            &region.time,
            &region.spread,
        );
        region
    });
    Ok((objects.into(), regions.collect()))
}

fn print(name: &str, time: &Summary, spread: &Spread) {
    println!(
        "{name:16} {:>10.1} {:>10.1} {:>10.1} {:>10.1} {:>10.1}",
        time.median, time.least, time.most, spread.mean, spread.deviation
    );
}

/// This program's once more, in the host, since only who is there as root may ask.
fn numbers(lab: &TestLab, rounds: u32) -> anyhow::Result<Vec<Numbers>> {
    let this = programs::this()?;
    let (count, rounds) = (COUNT.to_string(), rounds.to_string());
    let finished = lab
        .start_plain("src", &[&this, "object-numbers", &count, &rounds])?
        .succeed(LIMIT)?;
    let lines = finished.stdout.lines();
    let all: Vec<Asked> = lines.map(serde_json::from_str).collect::<Result<_, _>>()?;
    println!("the same at the RNIC's socket, us, median (least to worst)");
    println!(
        "{:16} {:>28} {:>28}",
        "", "numbers are given", "numbers are asked for"
    );
    let mut rows = Vec::new();
    for object in numbers::OBJECTS {
        let of = |asked: bool| {
            let mine = all
                .iter()
                .filter(|one| one.object == object && one.asked == asked);
            Summary::of(mine.map(|one| one.us))
        };
        let row = Numbers {
            object,
            given: of(false),
            asked_for: of(true),
        };
        let summary = |of: &Summary| format!("{:.1} ({:.1} to {:.1})", of.median, of.least, of.most);
        println!(
            "{object:16} {:>28} {:>28}",
            summary(&row.given),
            summary(&row.asked_for)
        );
        rows.push(row);
    }
    Ok(rows)
}

fn plot(regions: &[Region], path: &Path) -> anyhow::Result<()> {
    let axes = Axes {
        title: "registering memory that was written to",
        x: "size of the region",
        y: "ms",
        scale: Scale::Sizes,
    };
    let line = Line {
        name: "libverbatim.so and the software RNIC".to_owned(),
        points: regions
            .iter()
            .map(|region| (region.bytes as f64, region.time.median / 1000.0))
            .collect(),
        peer: false,
    };
    draw(path, &axes, &[line])
}
