//! Runs of fio through NBD.

use std::process::Command;

use anyhow::{Context as _, ensure};
use serde::Serialize;
use serde_json::Value;

use super::ended;

/// What fio does.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// As fio calls it.
    pub pattern: &'static str,
    /// How many requests at once.
    pub depth: u32,
    /// For how long.
    pub seconds: u32,
    /// The only processor of fio; all if there is none.
    pub processor: Option<usize>,
}

/// Half of a run: its reads, or its writes. Times in µs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Half {
    /// How many.
    pub requests: u64,
    /// In a second.
    pub iops: f64,
    pub mean: f64,
    pub p90: f64,
    pub p99: f64,
    /// The longest.
    pub most: f64,
}

/// A run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Run {
    pub reads: Option<Half>,
    pub writes: Option<Half>,
}

impl Run {
    /// Of all requests.
    pub fn requests(&self) -> u64 {
        self.halves().map(|half| half.requests).sum()
    }

    /// In a second.
    pub fn iops(&self) -> f64 {
        self.halves().map(|half| half.iops).sum()
    }

    /// The mean of all requests.
    pub fn mean(&self) -> f64 {
        let total: f64 = self.halves().map(|half| half.mean * half.requests as f64).sum();
        total / self.requests().max(1) as f64
    }

    /// The larger 99th percentile of its halves.
    pub fn p99(&self) -> f64 {
        self.halves().map(|half| half.p99).fold(0.0, f64::max)
    }

    /// The longest of all.
    pub fn most(&self) -> f64 {
        self.halves().map(|half| half.most).fold(0.0, f64::max)
    }

    fn halves(&self) -> impl Iterator<Item = Half> {
        self.reads.into_iter().chain(self.writes)
    }
}

/// What runs fio, 4 KiB each.
pub fn command(uri: &str, load: Load) -> Command {
    let mut command = Command::new("fio");
    command
        .args([
            "--name=tenant",
            "--ioengine=nbd",
            "--bs=4k",
            "--time_based",
            "--output-format=json",
        ])
        .args(["--rwmixread=70", "--size=100%", "--randrepeat=1"])
        .arg(format!("--uri={uri}"))
        .arg(format!("--rw={}", load.pattern))
        .arg(format!("--iodepth={}", load.depth))
        .arg(format!("--runtime={}", load.seconds));
    if let Some(processor) = load.processor {
        command.arg(format!("--cpus_allowed={processor}"));
    }
    command
}

/// Runs it to its end.
pub fn run(uri: &str, load: Load) -> anyhow::Result<Run> {
    parse(&ended(&mut command(uri, load))?)
}

/// What fio has written.
pub fn parse(text: &str) -> anyhow::Result<Run> {
    // Notes may stand before it.
    let json = text.find('{').map_or("", |begin| &text[begin..]);
    let report: Value = serde_json::from_str(json).with_context(|| format!("fio says {text:?}"))?;
    let job = &report["jobs"][0];
    let half = |name: &str| -> Option<Half> {
        let half = &job[name];
        let requests = half["total_ios"].as_u64().filter(|&requests| requests > 0)?;
        let time = &half["clat_ns"];
        let micros = |value: &Value| value.as_f64().unwrap_or(f64::NAN) / 1000.0;
        Some(Half {
            requests,
            iops: half["iops"].as_f64()?,
            mean: micros(&time["mean"]),
            p90: micros(&time["percentile"]["90.000000"]),
            p99: micros(&time["percentile"]["99.000000"]),
            most: micros(&time["max"]),
        })
    };
    let run = Run {
        reads: half("read"),
        writes: half("write"),
    };
    ensure!(run.requests() > 0, "fio has done nothing: {text}");
    Ok(run)
}
