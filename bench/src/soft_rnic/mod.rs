//! What the software RNIC can do, each figure beside a peer that was measured between the same two hosts, in the same
//! minutes: one TCP stream for bandwidth, a UDP ping-pong that polls for latency, the RNIC itself without loss for loss.
//!
//! Everything runs unmodified programs: Debian's perftest, iperf3, and `qp_setup` (plain libibverbs, beside the benches).

mod latency;
mod loss;
mod many_to_one;
mod page;
pub(crate) mod plot;
mod setup;
mod throughput;
pub mod udp;

use std::path::Path;

use serde::Serialize;
use verbatim_e2e::{Stolen, TestLab, Tools};

use crate::context::Context;

/// What perftest's programs are called by: the operation.
const OPERATIONS: [&str; 3] = ["write", "read", "send"];

/// Others may take so much of the processors before a run says little about the RNIC, in percent.
const QUIET_PERCENT: f64 = 10.0;

/// All that was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    context: Context,
    /// What the hypervisor gave to others of the processors' time, in percent.
    stolen_percent: f64,
    /// Seconds of each single measurement of bandwidth.
    seconds: u32,
    throughput: Vec<throughput::Series>,
    latency: latency::Latencies,
    setup: Vec<setup::Setup>,
    regions: setup::Regions,
    loss: Vec<loss::Goodput>,
    many_to_one: Vec<many_to_one::Overload>,
}

/// Measures, prints, and writes the JSON file; with `docs` also the page and the plots there.
pub fn run(tools: &Tools, seconds: u32, out: &Path, docs: Option<&Path>) -> anyhow::Result<()> {
    let context = Context::now();
    let stolen = Stolen::now();
    let lab = TestLab::up(tools, &["src", "peer"])?;
    let mut report = Report {
        context,
        stolen_percent: 0.0,
        seconds,
        throughput: throughput::measure(&lab, seconds)?,
        latency: latency::measure(&lab)?,
        setup: setup::measure(&lab)?,
        regions: setup::measure_regions(&lab)?,
        loss: loss::measure(&lab, seconds)?,
        many_to_one: many_to_one::measure(tools, seconds)?,
    };
    lab.down()?;
    report.stolen_percent = stolen.percent_since();
    if report.stolen_percent > QUIET_PERCENT {
        eprintln!(
            "The hypervisor gave {:.0} % of the processors' time to others meanwhile: measure again on a quiet machine.",
            report.stolen_percent
        );
    }
    std::fs::write(out, serde_json::to_vec_pretty(&report)?)?;
    println!("{}", out.display());
    if let Some(docs) = docs {
        page::write(&report, docs)?;
    }
    Ok(())
}
