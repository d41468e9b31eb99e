//! What a request costs where nothing moves: of a volume beside QEMU's server of the same kind, on files of the same file system. Here by NBD, beside
//! qemu-nbd and nbdkit's file plugin.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rustix::thread::CpuSet;
use serde::Serialize;

use super::fio::{self, Load, Run};
use super::many::nbdkit_on;
use super::servers::{Ours, Server, qemu_nbd};
use crate::summary::Summary;

const LOADS: [(&str, u32); 5] = [
    ("randread", 1),
    ("randread", 16),
    ("randwrite", 1),
    ("randwrite", 16),
    ("randrw", 4),
];

/// One server under one load.
#[derive(Debug, Serialize)]
pub struct Row {
    pattern: &'static str,
    depth: u32,
    /// Where server and load run: `free` is as the kernel likes.
    place: &'static str,
    /// Whom it is compared with.
    peer: &'static str,
    ours: Side,
    theirs: Side,
    /// Ours to theirs: the smaller the better.
    latency_ratio: f64,
    requests_a_second_ratio: f64,
    processor_ratio: f64,
}

#[derive(Debug, Serialize)]
struct Side {
    /// Of the rounds' means, in µs.
    latency: Summary,
    requests_a_second: Summary,
    /// Processor time of the server for each request, in µs.
    processor: Summary,
    runs: Vec<Run>,
}

impl Side {
    fn of(measured: Vec<(Run, f64)>) -> Self {
        let of = |get: fn(&(Run, f64)) -> f64| Summary::of(measured.iter().map(get));
        Self {
            latency: of(|(run, _)| run.mean()),
            requests_a_second: of(|(run, _)| run.iops()),
            processor: of(|(run, seconds)| seconds * 1e6 / run.requests() as f64),
            runs: measured.iter().map(|(run, _)| *run).collect(),
        }
    }
}

/// A load, and where it and its server run.
#[derive(Debug, Clone, Copy)]
pub struct Placed {
    pattern: &'static str,
    depth: u32,
    place: &'static str,
    /// Of the server, and of the load.
    processors: Option<[usize; 2]>,
}

/// All loads, wherever the kernel runs them.
pub fn free() -> Vec<Placed> {
    let place = |(pattern, depth)| Placed {
        pattern,
        depth,
        place: "free",
        processors: None,
    };
    LOADS.map(place).to_vec()
}

/// One request at a time, on chosen processors: where the kernel chooses, its choice makes more of a difference than the server, since an idle
/// processor is woken in tens of µs.
fn alone() -> anyhow::Result<Vec<Placed>> {
    let allowed = rustix::thread::sched_getaffinity(None)?;
    let mut allowed = (0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor));
    let first = allowed.next().context("this program may run somewhere")?;
    let apart = allowed.next().map(|second| ("apart", [first, second]));
    let places: Vec<_> = [("together", [first, first])].into_iter().chain(apart).collect();
    let loads = LOADS.iter().filter(|(_, depth)| *depth == 1);
    let placed = |pattern: &'static str| {
        places.iter().map(move |&(place, processors)| Placed {
            pattern,
            depth: 1,
            place,
            processors: Some(processors),
        })
    };
    Ok(loads.flat_map(|(pattern, _)| placed(pattern)).collect())
}

/// What runs a load on each server: the run, and the seconds of processors that the server has used for it.
pub struct Sides<A, B> {
    pub ours: A,
    pub theirs: B,
}

/// Measures both by turns, and prints.
pub fn compare<A, B>(
    what: &str,
    peer: &'static str,
    loads: &[Placed],
    rounds: u32,
    mut sides: Sides<A, B>,
) -> anyhow::Result<Vec<Row>>
where
    A: FnMut(Load, Option<usize>) -> anyhow::Result<(Run, f64)>,
    B: FnMut(Load, Option<usize>) -> anyhow::Result<(Run, f64)>,
{
    println!("{what}, nothing moves; medians of {rounds} runs by turns: ours, {peer}, ratio");
    println!(
        "{:>10} {:>5} {:>8} {:>28} {:>30} {:>28}",
        "", "depth", "place", "latency, µs", "requests a second", "processor, µs"
    );
    let mut rows = Vec::new();
    for &Placed {
        pattern,
        depth,
        place,
        processors,
    } in loads
    {
        let load = Load {
            pattern,
            depth,
            seconds: 3,
            processor: processors.map(|[_, load]| load),
        };
        let server = processors.map(|[server, _]| server);
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            // A page that is dirty already takes a write in half the time: so all are clean, whatever was before.
            rustix::fs::sync();
            ours.push((sides.ours)(load, server)?);
            rustix::fs::sync();
            theirs.push((sides.theirs)(load, server)?);
        }
        let (ours, theirs) = (Side::of(ours), Side::of(theirs));
        let row = Row {
            pattern,
            depth,
            place,
            peer,
            latency_ratio: ours.latency.median / theirs.latency.median,
            requests_a_second_ratio: ours.requests_a_second.median / theirs.requests_a_second.median,
            processor_ratio: ours.processor.median / theirs.processor.median,
            ours,
            theirs,
        };
        let told = |get: fn(&Side) -> &Summary, ratio: f64, places: usize| {
            let (ours, theirs) = (get(&row.ours).median, get(&row.theirs).median);
            format!("{ours:.places$} {theirs:.places$} {ratio:.2}")
        };
        println!(
            "{pattern:>10} {depth:>5} {place:>8} {:>28} {:>30} {:>28}",
            told(|side| &side.latency, row.latency_ratio, 1),
            told(|side| &side.requests_a_second, row.requests_a_second_ratio, 0),
            told(|side| &side.processor, row.processor_ratio, 1),
        );
        rows.push(row);
    }
    Ok(rows)
}

/// By NBD. Both have an image with the same content.
pub fn run(
    ours: &Ours,
    folder: &Path,
    images: &[PathBuf; 2],
    size: u64,
    rounds: u32,
) -> anyhow::Result<Vec<Row>> {
    let near = ours.volume("idle", size, &images[0])?;
    let (qemu, far) = qemu_nbd(folder, &images[1])?;
    let mut rows = compare(
        "4 KiB through NBD",
        "qemu-nbd",
        &free(),
        rounds,
        Sides {
            ours: |load, processor| measured(&ours.daemons[0], &near, load, processor),
            theirs: |load, processor| measured(&qemu, &far, load, processor),
        },
    )?;
    // One server at a time has the file.
    drop(qemu);
    let (nbdkit, far) = nbdkit_on(folder, &images[1], 0)?;
    rows.extend(compare(
        "4 KiB through NBD",
        "nbdkit",
        &[free(), alone()?].concat(),
        rounds,
        Sides {
            ours: |load, processor| measured(&ours.daemons[0], &near, load, processor),
            theirs: |load, processor| measured(&nbdkit, &far, load, processor),
        },
    )?);
    ours.forget("idle")?;
    Ok(rows)
}

fn measured(server: &Server, uri: &str, load: Load, processor: Option<usize>) -> anyhow::Result<(Run, f64)> {
    server.run_on(processor)?;
    let before = server.processor_time()?;
    let run = fio::run(uri, load)?;
    Ok((run, server.processor_time()? - before))
}
