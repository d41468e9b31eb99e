//! What a request costs where nothing moves, beside qemu-nbd on a file of the same file system.

use std::path::Path;

use serde::Serialize;

use super::fio::{self, Load, Run};
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
    ours: Side,
    qemu_nbd: Side,
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

/// Measures and prints. Both have an image with the same content.
pub fn run(
    ours: &Ours,
    folder: &Path,
    images: &[std::path::PathBuf; 2],
    size: u64,
    rounds: u32,
) -> anyhow::Result<Vec<Row>> {
    let address = ours.volume("idle", size, &images[0])?;
    let (qemu, peer) = qemu_nbd(folder, &images[1])?;
    println!("4 KiB through NBD, nothing moves; medians of {rounds} runs by turns: ours, qemu-nbd, ratio");
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
        let (mut near, mut far) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            near.push(measured(&ours.daemons[0], &address, load)?);
            far.push(measured(&qemu, &peer, load)?);
        }
        let (near, far) = (Side::of(near), Side::of(far));
        let row = Row {
            pattern,
            depth,
            latency_ratio: near.latency.median / far.latency.median,
            requests_a_second_ratio: near.requests_a_second.median / far.requests_a_second.median,
            processor_ratio: near.processor.median / far.processor.median,
            ours: near,
            qemu_nbd: far,
        };
        let told = |get: fn(&Side) -> &Summary, ratio: f64, places: usize| {
            let (near, far) = (get(&row.ours).median, get(&row.qemu_nbd).median);
            format!("{near:.places$} {far:.places$} {ratio:.2}")
        };
        println!(
            "{pattern:>10} {depth:>5} {:>28} {:>30} {:>28}",
            told(|side| &side.latency, row.latency_ratio, 1),
            told(|side| &side.requests_a_second, row.requests_a_second_ratio, 0),
            told(|side| &side.processor, row.processor_ratio, 1),
        );
        rows.push(row);
    }
    ours.forget("idle")?;
    Ok(rows)
}

fn measured(server: &Server, uri: &str, load: Load) -> anyhow::Result<(Run, f64)> {
    let before = server.processor_time()?;
    let run = fio::run(uri, load)?;
    Ok((run, server.processor_time()? - before))
}
