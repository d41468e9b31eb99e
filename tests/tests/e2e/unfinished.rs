//! Sessions that hosts of partners keep from their end: those hosts have nothing left of them, or never come back.

use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{MOVED, Migration, Running, TestLab, eventually};

use crate::Test;
use crate::migration::Check;

const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(60);
const OPTIONS: &[&str] = &["--op", "mix", "-q", "2", "-s", "16384", "--bidirectional"];

/// All of them.
pub fn tests() -> Vec<Test> {
    let tests = [
        Test::new(
            "unfinished::a_partners_machine_was_started_anew",
            HOSTS,
            a_partners_machine_was_started_anew,
        ),
        Test::new("unfinished::forgotten", HOSTS, forgotten),
    ];
    tests.into_iter().map(Test::injecting_faults).collect()
}

#[derive(Debug, serde::Deserialize)]
struct Session {
    id: String,
    host: String,
    state: String,
}

/// Sessions that have not ended, at hosts whose agents answer.
fn open_sessions(lab: &TestLab) -> anyhow::Result<Vec<Session>> {
    let listed = lab.ask(&["sessions", "--json"])?;
    serde_json::from_str(&listed.stdout).context("`verbatim sessions --json` prints no JSON")
}

/// A migration whose decision is taken, and none of whose partners knows it yet.
fn decided(lab: &TestLab) -> anyhow::Result<Running> {
    lab.order_faults("src", "source-switch hang\n")?;
    let migrate = lab.verbatim(&["migrate", "client", "--to", "dst", "--json"])?;
    let reached = lab.path("src", "/run/verbatim/faults.reached")?;
    eventually("a decision", LIMIT, || Ok(reached.exists().then_some(())))?;
    Ok(migrate)
}

/// The partner's machine is started anew between the decision and the switch: what was in its memory is gone, and its journal is there, or
/// lost. The session ends, and the report says what is lost.
fn a_partners_machine_was_started_anew(lab: &TestLab) -> anyhow::Result<()> {
    for journal_is_lost in [false, true] {
        let check = Check::start(lab, OPTIONS)?;
        let migrate = decided(lab)?;
        check.server.kill()?;
        lab.lab().kill("peer", "agent")?;
        let lost = match journal_is_lost {
            false => "rm -rf /run/verbatim/partners",
            true => "rm -rf /run/verbatim/partners /run/verbatim-state/*",
        };
        lab.start_plain("peer", &["sh", "-c", lost])?.succeed(LIMIT)?;
        lab.lab().start("peer", "agent")?;
        lab.order_faults("src", "")?;
        let report = Migration::of(&migrate.wait(LIMIT)?)?;
        ensure!(report.outcome == MOVED, "{report:?}");
        let error = report.error.clone().unwrap_or_default();
        ensure!(error.contains("peer has nothing left"), "{error}");
        eventually("the end of all sessions", LIMIT, || {
            Ok(open_sessions(lab)?.is_empty().then_some(()))
        })?;
        lab.ask(&["stop", "client"])?;
        std::fs::remove_file(lab.path("src", "/run/verbatim/faults.reached")?)?;
    }
    Ok(())
}

/// The partner's agent does not come back: an operator ends the session. It comes back all the same: its programs go on.
fn forgotten(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let migrate = decided(lab)?;
    lab.lab().kill("peer", "agent")?;
    lab.order_faults("src", "")?;
    let report = Migration::of(&migrate.wait(LIMIT)?)?;
    ensure!(report.outcome == MOVED, "{report:?}");
    let open = open_sessions(lab)?;
    let source = open.iter().find(|session| session.host == "src");
    let source = source.with_context(|| format!("{open:?}"))?;
    ensure!(source.state == "finishing", "{open:?}");
    let said = lab.verbatim(&["check", "client", "--to", "src"])?.wait(LIMIT)?;
    ensure!(
        said.output().contains("is out of reach") || said.output().contains("peer"),
        "{}",
        said.output()
    );

    let refused = lab.refused(&["session", "forget", &source.id, "--host", "src"])?;
    ensure!(refused.contains("--force"), "{refused}");
    lab.ask(&["session", "forget", &source.id, "--host", "src", "--force"])?;
    eventually("the end of the session", LIMIT, || {
        Ok(open_sessions(lab)?.is_empty().then_some(()))
    })?;
    let again = lab.refused(&["session", "forget", &source.id, "--force"])?;
    ensure!(again.contains("is over"), "{again}");

    lab.lab().start("peer", "agent")?;
    check.flows("dst")?;
    check.flows("peer")?;
    eventually("the end of the partner's part", LIMIT, || {
        Ok(open_sessions(lab)?.is_empty().then_some(()))
    })?;
    check.client.moves("src")?;
    check.end()?;
    Ok(())
}
