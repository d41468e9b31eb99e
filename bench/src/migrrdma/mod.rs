//! The figures of MigrRDMA's evaluation (§5), each a module, with the paper's figure beside ours where it gives a number.
//!
//! All of them move Debian's perftest, or another program of Debian's, in containers between hosts of a lab.

pub mod application;
pub mod connections;
pub mod drain;
pub mod pair;
pub mod timeline;

use std::path::Path;

use anyhow::Context as _;
use serde::Serialize;

/// Writes a report.
pub fn write(report: &impl Serialize, out: &Path) -> anyhow::Result<()> {
    std::fs::write(out, serde_json::to_vec_pretty(report)?)
        .with_context(|| format!("cannot write {}", out.display()))?;
    println!("{}\n", out.display());
    Ok(())
}
