//! What is sent while the instance runs, and what is told of it.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;
use verbatim_e2e::TestLab;

use crate::Test;
use crate::migration::Check;

const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(60);

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new(
            "pre_copy::the_blackout_has_a_limit",
            HOSTS,
            the_blackout_has_a_limit,
        ),
        Test::new("pre_copy::every_event_is_a_line", HOSTS, every_event_is_a_line),
    ]
}

/// Registered memory that is written to all the time.
fn busy(lab: &TestLab) -> anyhow::Result<Check<'_>> {
    Check::start(lab, &["--op", "write", "-q", "4", "-s", "65536"])
}

/// A limit that cannot be kept is an error before anything stops if it is strict, and otherwise told.
fn the_blackout_has_a_limit(lab: &TestLab) -> anyhow::Result<()> {
    let check = busy(lab)?;
    let refused = check
        .client
        .migrate_with("dst", &["--max-blackout", "1", "--strict"])?;
    refused.must_be_rolled_back(&["longer than 1 ms", "predicted blackout"])?;
    ensure!(refused.service_blackout_ms == 0.0, "{refused:?}");
    check.flows("src")?;

    let wide = check
        .client
        .migrate_with("dst", &["--max-blackout", "60000", "--strict"])?;
    wide.must_be_committed()?;
    ensure!(wide.pre_copy.converged, "{wide:?}");
    ensure!(
        wide.pre_copy.rounds.iter().any(|round| round.bytes > 1 << 20),
        "{wide:?}"
    );
    let sent: u64 = wide.pre_copy.rounds.iter().map(|round| round.bytes).sum();
    ensure!(sent == wide.bytes.pre_copy, "{wide:?}");
    // Too little private memory, whatever the kernel can do.
    let why = wide.pre_copy.private_in_one_piece.as_deref();
    let why = why.context("it is not said why private memory went in one piece")?;
    let known = why.contains("does not tell what is written to memory") || why.contains("not worth");
    ensure!(known && wide.pre_copy.pre_dumps.is_empty(), "{why}");
    check.flows("dst")?;

    let narrow = check.client.migrate_with("src", &["--max-blackout", "1"])?;
    narrow.must_be_committed()?;
    ensure!(!narrow.pre_copy.converged, "{narrow:?}");
    check.flows("src")?;
    check.end()?;
    Ok(())
}

fn every_event_is_a_line(lab: &TestLab) -> anyhow::Result<()> {
    let check = busy(lab)?;
    let moved = lab
        .verbatim(&[
            "migrate",
            "client",
            "--to",
            "dst",
            "--json-lines",
            "--max-bandwidth",
            "16",
        ])?
        .succeed(LIMIT)?;
    let events: Vec<Value> = moved
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).with_context(|| line.to_owned()))
        .collect::<Result<_, _>>()?;
    let of = |kind: &str| events.iter().filter(|event| event["event"] == kind).count();
    ensure!(
        of("phase") >= 5 && of("pre_copy") >= 1 && of("report") == 1,
        "{events:?}"
    );
    let last = events.last().context("no event")?;
    ensure!(last["report"]["outcome"] == "committed", "{last}");
    // All but the last burst has waited for its turn.
    let sent = last["report"]["bytes"]["pre_copy"].as_u64().context("no bytes")?;
    let bursts = (sent >> 20).saturating_sub(4);
    let total = last["report"]["total_ms"].as_f64().context("no time")?;
    ensure!(
        bursts > 0 && total >= 1000.0 * bursts as f64 / 16.0,
        "{sent} bytes in {total} ms are more than 16 MiB/s"
    );
    let round = events
        .iter()
        .find(|event| event["event"] == "pre_copy" && event["complete"] == true)
        .context("no complete round")?;
    ensure!(round["predicted_blackout_ms"].as_u64() >= Some(50), "{round}");
    check.flows("dst")?;
    check.end()?;
    Ok(())
}
