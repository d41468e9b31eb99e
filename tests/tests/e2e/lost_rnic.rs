//! RNICs that die when there is no way back any more: the programs lose their connections, as whenever an RNIC dies, and the
//! session ends.

use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{Instance, MOVED, TestLab, eventually, left_behind};

use crate::Test;
use crate::migration::Check;

const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(60);
/// As the RNICs have it where nothing else is said.
const PAUSE_LIMIT: Duration = Duration::from_secs(60);
const OPTIONS: &[&str] = &[
    "--op",
    "mix",
    "-q",
    "2",
    "-s",
    "16384",
    "--bidirectional",
    // A quarter of a second for an answer: who talks to the dead knows that soon.
    "--ack-timeout",
    "16",
];

/// All of them. One at either side is in every run.
pub fn tests() -> Vec<Test> {
    let cases = [
        ("dst", "destination-claim", "wait-before-stop"),
        ("dst", "destination-resume", "wait-before-stop"),
        ("dst", "destination-claim", "pause-resume"),
        ("peer", "partner-switch", "wait-before-stop"),
        ("peer", "partner-resume", "wait-before-stop"),
        ("peer", "partner-switch", "pause-resume"),
    ];
    let test = |(host, point, method): (&'static str, &'static str, &'static str)| {
        let name = format!("lost_rnic::{point}_{method}").replace('-', "_");
        let often = [
            ("destination-claim", "wait-before-stop"),
            ("partner-resume", "wait-before-stop"),
        ];
        let test = Test::new(name, HOSTS, move |lab| dies(lab, host, point, method)).injecting_faults();
        test.only_on_demand(!often.contains(&(point, method)))
    };
    cases.into_iter().map(test).collect()
}

fn dies(lab: &TestLab, host: &'static str, point: &str, method: &str) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    lab.order_faults(host, &format!("{point} kill-nic\n"))?;
    let migration = check.client.migrate_with("dst", &["--method", method])?;
    lab.order_faults(host, "")?;
    ensure!(migration.outcome == MOVED, "{migration:?}");
    let error = migration.error.unwrap_or_default();
    ensure!(error.contains(&format!("the RNIC of {host} died")), "{error:?}");

    // It has ended everywhere, and nothing is left of it.
    eventually("the end of the session", LIMIT, || {
        let open = lab.ask(&["sessions", "--json"])?.stdout;
        Ok((open.trim() == "[]").then_some(()))
    })?;
    eventually("a source without leftovers", LIMIT, || {
        Ok(left_behind(lab, "src", "client")?.is_empty().then_some(()))
    })?;

    if host == "peer" && method == "pause-resume" {
        // Its RNIC waits for the other one as for any that pauses: that takes longer than a test.
        check.client.kill()?;
        ended(&check.client)?;
        return server_only(&check);
    }
    // Both programs see what they see whenever an RNIC dies, and end.
    for instance in [&check.client, &check.server] {
        let row = ended(instance).with_context(|| check.words())?;
        ensure!(
            row == Some(1),
            "{} ended with {row:?}: {}",
            instance.name(),
            check.words()
        );
    }
    ensure!(check.client.row()?.host == "dst");

    // With another RNIC all is as before.
    lab.ended(host, "nic")?;
    lab.lab().start(host, "nic")?;
    let check = Check::start_as(lab, "-again", OPTIONS)?;
    for to in ["dst", "src"] {
        check.client.moves(to).with_context(|| check.words())?;
        check.flows(to)?;
    }
    check.end()?;
    Ok(())
}

fn server_only(check: &Check<'_>) -> anyhow::Result<()> {
    let status = ended(&check.server).with_context(|| check.words())?;
    ensure!(
        status == Some(1),
        "the server ended with {status:?}: {}",
        check.words()
    );
    Ok(())
}

/// With which status it ended. An end that was paused waits for the other, if it does not see that program end, for as long as
/// its RNIC's pause limit.
fn ended(instance: &Instance<'_>) -> anyhow::Result<Option<i32>> {
    eventually("the program's end", LIMIT + PAUSE_LIMIT, || {
        let row = instance.row()?;
        Ok((row.state == "exited").then_some(row.exit_status))
    })
}
