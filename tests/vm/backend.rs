//! What the backend `rdma-core` has for a move, and memory of another host by it, on rxe: tests of the crates `verbs`, `far` and `bulk`, run
//! in the machine. `make vm-test` puts their programs beside the probes.

use crate::site::{End, Site};
use anyhow::{Context, ensure};
use std::path::Path;
use std::time::Duration;

/// How long all of a program may take.
const LIMIT: Duration = Duration::from_secs(180);

/// The tests.
pub const ALL: &[crate::tool::Test] = &[
    ("backend::what_a_move_needs", what_a_move_needs),
    ("backend::memory_of_another_host", memory_of_another_host),
    ("backend::runs_of_pages", runs_of_pages),
];

fn what_a_move_needs(site: &Site) -> anyhow::Result<()> {
    run(site, "verbs", &["--ignored", "tests::rxe::"], 12)
}

/// But for what is about the software RNIC: one that ends, and a host without any.
fn memory_of_another_host(site: &Site) -> anyhow::Result<()> {
    let skipped = [
        "--skip",
        "an_rnic_that_goes_ends_the_wait",
        "--skip",
        "a_host_without_an_rnic",
    ];
    run(site, "far", &skipped, 12)
}

fn runs_of_pages(site: &Site) -> anyhow::Result<()> {
    run(site, "bulk", &[], 5)
}

/// Runs a test program, of which so many tests must pass, one after the other.
fn run(site: &Site, program: &str, arguments: &[&str], passed: usize) -> anyhow::Result<()> {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../target/vm-probes/{program}"));
    let program = program
        .canonicalize()
        .with_context(|| format!("{} is missing: run `make vm-test`", program.display()))?;
    let program = program.to_str().context("a path that is not UTF-8")?;
    let environment = ["env", "VERBATIM_BACKEND=rdma-core", "VERBATIM_FAR_DEVICE=rxe0"];
    let argv = [&environment[..], &[program, "--test-threads=1"], arguments].concat();
    let finished = site.start(End::Rxe, &argv)?.wait(LIMIT)?;
    ensure!(
        finished.code == 0 && finished.stdout.contains(&format!("ok. {passed} passed")),
        "status {}{}{}",
        finished.code,
        finished.output(),
        site.words()
    );
    Ok(())
}
