//! What the backend `rdma-core` has for a move, on rxe: tests of the crate `verbs` that need one, run in the machine. `make
//! vm-test` puts their program beside the probes.

use crate::site::{End, Site};
use anyhow::{Context, ensure};
use std::path::Path;
use std::time::Duration;

/// How long all of them may take.
const LIMIT: Duration = Duration::from_secs(180);
/// How many there are.
const COUNT: usize = 7;

/// The tests.
pub const ALL: &[crate::tool::Test] = &[("backend::what_a_move_needs", what_a_move_needs)];

fn what_a_move_needs(site: &Site) -> anyhow::Result<()> {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/vm-probes/verbs");
    let program = program
        .canonicalize()
        .with_context(|| format!("{} is missing: run `make vm-test`", program.display()))?;
    let program = program.to_str().context("a path that is not UTF-8")?;
    let argv = [program, "--ignored", "--test-threads=1", "tests::rxe::"];
    let finished = site.start(End::Rxe, &argv)?.wait(LIMIT)?;
    ensure!(
        finished.code == 0 && finished.stdout.contains(&format!("ok. {COUNT} passed")),
        "status {}{}{}",
        finished.code,
        finished.output(),
        site.words()
    );
    Ok(())
}
