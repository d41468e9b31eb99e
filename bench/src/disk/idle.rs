//! What a request costs where nothing moves: of a volume beside QEMU's server of the same kind, on files of the same file system. Here by NBD, beside
//! qemu-nbd and nbdkit's file plugin.

use std::path::{Path, PathBuf};

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

/// What runs a load on each server: the run, and the seconds of processors that the server has used for it.
pub struct Sides<A, B> {
    pub ours: A,
    pub theirs: B,
}

/// Measures both by turns, and prints.
pub fn compare<A, B>(
    what: &str,
    peer: &'static str,
    rounds: u32,
    mut sides: Sides<A, B>,
) -> anyhow::Result<Vec<Row>>
where
    A: FnMut(Load) -> anyhow::Result<(Run, f64)>,
    B: FnMut(Load) -> anyhow::Result<(Run, f64)>,
{
    println!("{what}, nothing moves; medians of {rounds} runs by turns: ours, {peer}, ratio");
    println!(
        "{:>10} {:>5} {:>28} {:>30} {:>28}",
        "", "depth", "latency, µs", "requests a second", "processor, µs"
    );
    let mut rows = Vec::new();
    for (pattern, depth) in LOADS {
        let load = Load {
            pattern,
            depth,
            seconds: 3,
        };
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            // A page that is dirty already takes a write in half the time: so all are clean, whatever was before.
            rustix::fs::sync();
            ours.push((sides.ours)(load)?);
            rustix::fs::sync();
            theirs.push((sides.theirs)(load)?);
        }
        let (ours, theirs) = (Side::of(ours), Side::of(theirs));
        let row = Row {
            pattern,
            depth,
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
            "{pattern:>10} {depth:>5} {:>28} {:>30} {:>28}",
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
        rounds,
        Sides {
            ours: |load| measured(&ours.daemons[0], &near, load),
            theirs: |load| measured(&qemu, &far, load),
        },
    )?;
    // One server at a time has the file.
    drop(qemu);
    let (nbdkit, far) = nbdkit_on(folder, &images[1], 0)?;
    rows.extend(compare(
        "4 KiB through NBD",
        "nbdkit",
        rounds,
        Sides {
            ours: |load| measured(&ours.daemons[0], &near, load),
            theirs: |load| measured(&nbdkit, &far, load),
        },
    )?);
    ours.forget("idle")?;
    Ok(rows)
}

fn measured(server: &Server, uri: &str, load: Load) -> anyhow::Result<(Run, f64)> {
    let before = server.processor_time()?;
    let run = fio::run(uri, load)?;
    Ok((run, server.processor_time()? - before))
}
