//! Half a round trip of small messages, beside that of a UDP ping-pong whose ends poll.

use std::time::Duration;

use anyhow::bail;
use serde::Serialize;
use verbatim_e2e::{LatencyRow, PERFTEST_PORT, TestLab};

use super::OPERATIONS;
use super::udp::{Waiting, half_round_trip_us};

const SIZES: [u64; 7] = [2, 8, 64, 1024, 4096, 16_384, 65_536];

/// Above that a UDP datagram is cut into fragments.
const LARGEST_UDP_BYTES: u64 = 8192;

const MESSAGES: u32 = 10_000;
const LIMIT: Duration = Duration::from_secs(60);

/// Microseconds by message size.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Point {
    pub bytes: u64,
    pub median_us: f64,
}

#[derive(Debug, Serialize)]
pub struct Series {
    pub operation: &'static str,
    pub points: Vec<Point>,
}

#[derive(Debug, Serialize)]
pub struct Latencies {
    /// Half a round trip, but for READ, which is a whole one.
    pub operations: Vec<Series>,
    /// Half a round trip of UDP, polling.
    pub udp: Vec<Point>,
}

impl Latencies {
    /// `ib_write_lat` at 8 bytes as a multiple of UDP.
    pub fn ratio(&self) -> Option<f64> {
        let at_8 = |points: &[Point]| Some(points.iter().find(|point| point.bytes == 8)?.median_us);
        Some(at_8(&self.operations.first()?.points)? / at_8(&self.udp)?)
    }
}

pub fn measure(lab: &TestLab) -> anyhow::Result<Latencies> {
    println!("latency, median, us");
    let mut udp = Vec::new();
    for bytes in SIZES.into_iter().filter(|bytes| *bytes <= LARGEST_UDP_BYTES) {
        let median_us = half_round_trip_us(lab, ["src", "peer"], Waiting::Polling, bytes, MESSAGES)?;
        println!("{:>6} {bytes:>6} {median_us:>8.2}", "UDP");
        udp.push(Point { bytes, median_us });
    }
    let mut operations = Vec::new();
    for operation in OPERATIONS {
        let mut points = Vec::new();
        for bytes in SIZES {
            let median_us = perftest(lab, operation, bytes)?;
            println!("{operation:>6} {bytes:>6} {median_us:>8.2}");
            points.push(Point { bytes, median_us });
        }
        operations.push(Series { operation, points });
    }
    Ok(Latencies { operations, udp })
}

fn perftest(lab: &TestLab, operation: &str, bytes: u64) -> anyhow::Result<f64> {
    let program = format!("ib_{operation}_lat");
    let (size, count) = (bytes.to_string(), MESSAGES.to_string());
    let argv = [program.as_str(), "-F", "-s", &size, "-n", &count];
    let server = lab.start("peer", &argv)?;
    lab.listens("peer", 1, PERFTEST_PORT)?;
    let address = lab.address("peer")?;
    let client = lab
        .start("src", &[&argv[..], &[&address]].concat())?
        .succeed(LIMIT)?;
    server.succeed(LIMIT)?;
    match LatencyRow::parse(&client)?[..] {
        [row] if row.typical_us.is_finite() => Ok(row.typical_us),
        [_] => bail!("{program} could not measure the processor's clock; try again on a quieter machine"),
        ref rows => bail!("{program} printed {} results", rows.len()),
    }
}
