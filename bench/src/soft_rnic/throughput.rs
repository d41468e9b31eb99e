//! Bandwidth, message rate and processor time of WRITE, READ and SEND by message size, with 1 and 16 queue pairs.

use std::time::Duration;

use anyhow::{Context, bail};
use serde::Serialize;
use verbatim_e2e::{BandwidthRow, PERFTEST_PORT, TestLab};

use super::OPERATIONS;
use crate::bandwidth::tcp;

const SIZES: [u64; 8] = [8, 64, 1024, 4096, 16_384, 65_536, 1 << 20, 8 << 20];
const QUEUE_PAIRS: [u32; 2] = [1, 16];

/// One operation with so many queue pairs.
#[derive(Debug, Serialize)]
pub struct Series {
    pub operation: &'static str,
    pub queue_pairs: u32,
    /// One TCP stream, right before, in Gbit/s.
    pub tcp_gbit_s: f64,
    pub points: Vec<Point>,
}

/// One message size.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Point {
    pub bytes: u64,
    pub gbit_s: f64,
    pub messages_per_s: f64,
    /// Processor seconds of the two RNICs per 10^9 bytes.
    pub cpu_s_per_gb: f64,
}

impl Series {
    /// The bandwidth at this size.
    pub fn at(&self, bytes: u64) -> Option<&Point> {
        self.points.iter().find(|point| point.bytes == bytes)
    }
}

pub fn measure(lab: &TestLab, seconds: u32) -> anyhow::Result<Vec<Series>> {
    println!("throughput, Gbit/s (million messages/s; CPU s/GB of both RNICs), {seconds} s each");
    let mut all = Vec::new();
    for operation in OPERATIONS {
        for queue_pairs in QUEUE_PAIRS {
            let mut series = Series {
                operation,
                queue_pairs,
                tcp_gbit_s: tcp(lab, seconds)?,
                points: Vec::new(),
            };
            println!(
                "{operation}, {queue_pairs} QPs; one TCP stream: {:.2}",
                series.tcp_gbit_s
            );
            for bytes in SIZES {
                let point = point(lab, operation, queue_pairs, bytes, seconds)?;
                println!(
                    "{bytes:>9} {:>8.3} ({:.3}; {:.2})",
                    point.gbit_s,
                    point.messages_per_s / 1e6,
                    point.cpu_s_per_gb
                );
                series.points.push(point);
            }
            all.push(series);
        }
    }
    Ok(all)
}

/// Runs one perftest bandwidth program between the hosts.
pub fn point(
    lab: &TestLab,
    operation: &str,
    queue_pairs: u32,
    bytes: u64,
    seconds: u32,
) -> anyhow::Result<Point> {
    let program = format!("ib_{operation}_bw");
    let (pairs, size, time) = (queue_pairs.to_string(), bytes.to_string(), seconds.to_string());
    let argv = [program.as_str(), "-F", "-s", &size, "-q", &pairs, "-D", &time];
    let limit = Duration::from_secs(u64::from(seconds) + 60);
    let before = cpu(lab)?;
    let server = lab.start("peer", &argv)?;
    lab.listens("peer", 1, PERFTEST_PORT)?;
    let address = lab.address("peer")?;
    let client = lab
        .start("src", &[&argv[..], &[&address]].concat())?
        .succeed(limit)?;
    server.succeed(limit)?;
    let used = cpu(lab)? - before;
    let rows = BandwidthRow::parse(&client)?;
    let [row] = rows[..] else {
        bail!("{program} printed {} results", rows.len());
    };
    let bytes_s = row.average_mib_s * f64::from(1 << 20);
    // perftest measures the middle of its time only, so the bytes of all of it are estimated by the rate.
    let gigabytes = bytes_s * f64::from(seconds) / 1e9;
    Ok(Point {
        bytes,
        gbit_s: bytes_s * 8.0 / 1e9,
        messages_per_s: bytes_s / bytes as f64,
        cpu_s_per_gb: used.as_secs_f64() / gigabytes,
    })
}

fn cpu(lab: &TestLab) -> anyhow::Result<Duration> {
    Ok(lab.cpu_time("src", "nic").context("processor time")? + lab.cpu_time("peer", "nic")?)
}
