//! What is assumed of the kernel's rxe, of CRIU and of the C library for programs on RNICs that are not ours
//! (`docs/rnic-assumptions.md`): the programs of `probes/`, each of which says of its claims which hold.
//!
//! A claim that does not hold is a finding too, and is in the list below. So a test fails when a kernel changes its ways,
//! whichever way.

use crate::site::{End, Site};
use anyhow::{Context, ensure};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

/// How long a probe may take. CRIU's, with five dumps, takes half a minute where two processors are emulated.
const LIMIT: Duration = Duration::from_secs(180);

/// The tests.
pub const ALL: &[crate::tool::Test] = &[
    ("probes::a_context_is_handed_over", |site| {
        look(site, "./handover", 16, &[])
    }),
    ("probes::packet_sequence_numbers", |site| {
        look(site, "./psn", 13, &["in-sqd-what-waits-for-a-recv-goes-on"])
    }),
    ("probes::markers_of_the_drain", |site| {
        // rxe answers the one by the length of its newest request, and the requester takes an acknowledge for the other's result.
        let wrong = [
            "a-read-that-is-repeated-behind-a-zero-length-write-is-answered",
            "an-atomic-that-is-repeated-behind-a-write-completes-with-its-result",
        ];
        look(site, "./markers", 19, &wrong)
    }),
    ("probes::a_namespace_of_ours", |site| {
        look(site, "./namespace ./namespace_first.so libibverbs.so.1", 7, &[])
    }),
    ("probes::dumps_with_an_open_context", |site| {
        look(site, "./frozen.sh", 15, &[])
    }),
];

/// Runs a probe in the machine: all of its `count` claims hold but for those named.
fn look(site: &Site, command: &str, count: usize, wrong: &[&str]) -> anyhow::Result<()> {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/vm-probes");
    let built = built
        .canonicalize()
        .with_context(|| format!("{} is missing: run `make -C tests/vm/probes`", built.display()))?;
    let folder = built.to_str().context("a path that is not UTF-8")?;
    let line = format!("cd '{folder}' && exec {command}");
    let finished = site.start(End::Rxe, &["sh", "-c", &line])?.wait(LIMIT)?;
    let said = || format!("status {}{}{}", finished.code, finished.output(), site.words());
    let claims: Vec<(&str, &str)> = finished
        .stdout
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| {
            line.rsplit_once(": holds")
                .or_else(|| line.split_once(": does not hold"))
        })
        .collect();
    let found: BTreeSet<&str> = claims
        .iter()
        .filter(|(_, seen)| !seen.is_empty())
        .map(|&(name, _)| name)
        .collect();
    let expected: BTreeSet<&str> = wrong.iter().copied().collect();
    ensure!(
        found == expected && claims.len() == count && finished.code == i32::from(!wrong.is_empty()),
        "of {count} claims {} were judged, and those that do not hold are {found:?} instead of {expected:?}: {}",
        claims.len(),
        said()
    );
    Ok(())
}
