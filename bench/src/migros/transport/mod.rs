//! What it costs that a connection can be paused, while nothing is (MigrOS §5.2, table 3): latency with and without a secret, by
//! turns, and instructions, which are the same in each run.
//!
//! A connection without a secret can neither be paused by its RNICs nor hear of it (`docs/wire-extension.md`): that is the paper's
//! *plain*; with one it is its *migratable*. Both are on the RNIC as it is.

pub mod instructions;
mod latency;
pub mod pair;

use std::path::Path;

use serde::Serialize;
use verbatim_e2e::Tools;

use crate::context::Context;
use crate::migrrdma::write;

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    unit: &'static str,
    instructions: Vec<instructions::Row>,
    latency: Vec<latency::Row>,
    trips: Vec<latency::Trips>,
}

/// Measures, prints and writes.
pub fn run(tools: &Tools, repeats: u32, out: &Path) -> anyhow::Result<()> {
    let context = Context::now();
    let instructions = instructions::measure(out)?;
    let (latency, trips) = latency::measure(tools, repeats, &out.with_extension("svg"))?;
    let report = Report {
        context,
        unit: "us",
        instructions,
        latency,
        trips,
    };
    write(&report, out)
}
