//! `verbatim check --deep`, and the same within a migration: the dump is tried, and the instance runs on.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde_json::Value;
use verbatim_e2e::{Instance, PYTHON, ROLLED_BACK, TestLab, eventually};

use crate::Test;
use crate::migration::Check;

const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(60);
const OPTIONS: &[&str] = &[
    "--op",
    "mix",
    "-q",
    "4",
    "-s",
    "16384",
    "--random-size",
    "--bidirectional",
];

/// A limit of the blackout of which a quarter is longer than any small program's dump takes, also on a busy machine.
const LONG_BLACKOUT: &[&str] = &["--max-blackout", "4000"];

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("deep::nothing_is_lost", HOSTS, nothing_is_lost),
        Test::new(
            "deep::what_only_criu_refuses",
            &["src", "dst"],
            what_only_criu_refuses,
        ),
        Test::new("deep::within_a_migration", &["src", "dst"], within_a_migration),
        Test::new(
            "deep::files_that_the_destination_lacks",
            &["src", "dst"],
            files_that_the_destination_lacks,
        ),
        Test::new("deep::the_agent_dies", HOSTS, the_agent_dies).injecting_faults(),
        Test::new("deep::it_is_cancelled_or_fails", HOSTS, it_is_cancelled_or_fails).injecting_faults(),
    ]
}

/// The answer of a deep check, and whether it was a good one.
fn deep(lab: &TestLab, name: &str) -> anyhow::Result<(Value, bool)> {
    let asked = ["check", "--deep", name, "--to", "dst", "--json"];
    let finished = lab.verbatim(&asked)?.wait(LIMIT)?;
    let answer = serde_json::from_str(&finished.stdout).with_context(|| finished.output())?;
    Ok((answer, finished.code == 0))
}

/// One that goes well: how long no task ran.
fn goes_well(lab: &TestLab, name: &str) -> anyhow::Result<f64> {
    let (answer, well) = deep(lab, name)?;
    ensure!(well && answer["deep"]["not_tried"].is_null(), "{answer}");
    ensure!(
        answer["expected_pause_ms"].as_f64().is_some_and(|ms| ms > 0.0),
        "{answer}"
    );
    let pause = answer["deep"]["pause_ms"].as_f64();
    pause.filter(|ms| *ms > 0.0).with_context(|| answer.to_string())
}

/// Both ends of connections with traffic are written down again and again, by turns.
fn nothing_is_lost(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let mut pauses = Vec::new();
    for round in 0..20 {
        let which = if round % 4 == 3 {
            &check.server
        } else {
            &check.client
        };
        let pause =
            goes_well(lab, which.name()).with_context(|| format!("round {round}: {}", check.words()))?;
        pauses.push(pause);
        check.flows("src")?;
    }
    pauses.sort_by(f64::total_cmp);
    eprintln!(
        "stood still for {:.1} to {:.1} ms, median {:.1}",
        pauses[0], pauses[19], pauses[10]
    );
    let row = check.client.row()?;
    ensure!(row.host == "src" && row.state == "running", "{row:?}");
    // Nothing is left of it that would be in the way of a move.
    check.client.moves("dst")?;
    check.flows("dst")?;
    check.end().map(drop)
}

/// A signal that waits: `/proc` is not looked at for it, and CRIU refuses it.
const PENDING: &str = r#"
import signal, os, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTRAP})
os.kill(os.getpid(), signal.SIGTRAP)
print('ready')
count = 0
while True:
    count += 1
    print(count)
    time.sleep(0.05)
"#;

const COUNTS: &str = r#"
import time
print('ready')
count = 0
while True:
    count += 1
    print(count)
    time.sleep(0.05)
"#;

fn python<'l>(lab: &'l TestLab, name: &str, program: &str) -> anyhow::Result<Instance<'l>> {
    let instance = lab.instance("src", name, &[PYTHON, "-u", "-c", program])?;
    goes_on(&instance)?;
    Ok(instance)
}

/// It counts further than it has.
fn goes_on(instance: &Instance<'_>) -> anyhow::Result<()> {
    let lines = instance.output()?.lines().count();
    eventually(&format!("{} to go on", instance.name()), LIMIT, || {
        let output = instance.output()?;
        ensure!(!output.contains("Traceback"), "{output}");
        Ok((output.lines().count() > lines + 5).then_some(()))
    })
}

fn what_only_criu_refuses(lab: &TestLab) -> anyhow::Result<()> {
    let instance = python(lab, "pending", PENDING)?;
    // The other check finds nothing.
    lab.ask(&["check", "pending", "--to", "dst"])?;
    let (answer, well) = deep(lab, "pending")?;
    ensure!(!well && answer["deep"]["not_tried"].is_null(), "{answer}");
    let blockers = answer["blockers"].as_array().context("no blockers")?;
    let [Value::String(blocker)] = &blockers[..] else {
        bail!("{answer}")
    };
    ensure!(
        blocker.starts_with("process ")
            && blocker.contains("(python3")
            && blocker.contains("SIGTRAP is pending"),
        "{blocker}"
    );
    ensure!(
        !blocker.contains('\n') && !blocker.contains("infect.c"),
        "{blocker}"
    );
    let log = answer["deep"]["log"].as_str().context("no log")?;
    let log = std::fs::read_to_string(lab.path("src", log)?)?;
    ensure!(log.contains("pending SIGTRAP"), "{log}");
    goes_on(&instance)?;
    // In words: the log is named last.
    let said = lab
        .verbatim(&["check", "--deep", "pending", "--to", "dst"])?
        .wait(LIMIT)?;
    ensure!(
        said.code == 1 && said.stdout.contains("SIGTRAP"),
        "{}",
        said.output()
    );
    ensure!(
        said.stderr.contains("is expected to stand still for"),
        "{}",
        said.stderr
    );
    let last = said.stderr.lines().last().unwrap_or_default();
    ensure!(last.starts_with("CRIU's log: /"), "{}", said.stderr);
    // A migration with room for it finds the same before it sends anything.
    let refused = instance.migrate_with("dst", LONG_BLACKOUT)?;
    let error = refused.error.clone().unwrap_or_default();
    ensure!(
        refused.outcome == ROLLED_BACK && error.contains("SIGTRAP is pending"),
        "{refused:?}"
    );
    ensure!(
        refused.bytes.pre_copy == 0 && refused.pre_copy.rounds.is_empty(),
        "{refused:?}"
    );
    ensure!(refused.deep_check_ms.is_some_and(|ms| ms > 0.0), "{refused:?}");
    goes_on(&instance)?;
    ensure!(instance.row()?.host == "src");
    Ok(())
}

fn within_a_migration(lab: &TestLab) -> anyhow::Result<()> {
    let instance = python(lab, "counts", COUNTS)?;
    // A quarter of what is meant without a limit is too little.
    let moved = instance.migrate("dst")?;
    moved.must_be_committed()?;
    ensure!(moved.deep_check_ms.is_none(), "{moved:?}");
    let moved = instance.migrate_with("src", LONG_BLACKOUT)?;
    moved.must_be_committed()?;
    ensure!(moved.deep_check_ms.is_some_and(|ms| ms > 0.0), "{moved:?}");
    goes_on(&instance)?;
    // What was tried is not tried again.
    let pause = goes_well(lab, "counts")?;
    let (again, _) = deep(lab, "counts")?;
    let expected = again["expected_pause_ms"].as_f64().unwrap_or_default();
    ensure!(expected > 0.0, "{again}");
    eprintln!("stood still for {pause:.1} ms");
    let moved = instance.migrate_with("dst", LONG_BLACKOUT)?;
    moved.must_be_committed()?;
    ensure!(moved.deep_check_ms.is_none(), "{moved:?}");
    goes_on(&instance)
}

/// Has a file of the host open, and counts.
const READS: &str = r#"
import time
table = open('/mnt/table')
print('ready')
count = 0
while True:
    count += 1
    print(count)
    time.sleep(0.05)
"#;

/// The images say which files are open: the destination must have them, with the same length.
fn files_that_the_destination_lacks(lab: &TestLab) -> anyhow::Result<()> {
    let on = |host: &str, script: &str| {
        let ended = lab.start_plain(host, &["sh", "-c", script])?.succeed(LIMIT);
        ended.map(drop)
    };
    on("src", "mount -t tmpfs own /mnt && echo 12345 > /mnt/table")?;
    on("dst", "mount -t tmpfs own /mnt")?;
    let run = [
        "run", "--host", "src", "--name", "reads", "--bind", "/mnt", "--", PYTHON, "-u", "-c", READS,
    ];
    lab.ask(&run)?;
    let instance = lab.known("reads");
    goes_on(&instance)?;
    lab.ask(&["check", "reads", "--to", "dst"])?;
    for (there, words) in [
        ("true", "/mnt/table is not there"),
        ("echo 1 > /mnt/table", "/mnt/table has 2 bytes there, and 6"),
    ] {
        on("dst", there)?;
        let (answer, well) = deep(lab, "reads")?;
        ensure!(!well && answer["deep"]["not_tried"].is_null(), "{answer}");
        let blockers = answer["blockers"].as_array().context("no blockers")?;
        ensure!(
            blockers.len() == 1 && blockers[0].as_str().is_some_and(|said| said.contains(words)),
            "{answer}"
        );
        let refused = instance.migrate_with("dst", LONG_BLACKOUT)?;
        let error = refused.error.clone().unwrap_or_default();
        ensure!(
            refused.outcome == ROLLED_BACK && error.contains(words),
            "{refused:?}"
        );
        ensure!(
            refused.bytes.pre_copy == 0 && refused.deep_check_ms.is_some(),
            "{refused:?}"
        );
        goes_on(&instance)?;
    }
    on("dst", "echo 12345 > /mnt/table")?;
    goes_well(lab, "reads")?;
    instance.moves("dst")?;
    goes_on(&instance)
}

/// Begins a deep check that comes to where the instance is frozen and its images are written.
fn frozen(lab: &TestLab, name: &str, action: &str) -> anyhow::Result<verbatim_e2e::Running> {
    let reached = lab.path("src", "/run/verbatim/faults.reached")?;
    let _ = std::fs::remove_file(&reached);
    lab.order_faults("src", &format!("source-deep {action}\n"))?;
    let check = lab.verbatim(&["check", "--deep", name, "--to", "dst", "--json"])?;
    eventually("the frozen instance", LIMIT, || {
        let text = std::fs::read_to_string(&reached).unwrap_or_default();
        Ok(text.contains("source-deep").then_some(()))
    })?;
    Ok(check)
}

/// The agent is killed in the middle, twice: the next one lets the instance go on, with its connections.
fn the_agent_dies(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    for action in ["hang", "exit"] {
        let asked = frozen(lab, check.client.name(), action)?;
        if action == "hang" {
            let pid = lab.service_pid("src", "agent")?.to_string();
            lab.start_plain("src", &["kill", "-KILL", &pid])?.succeed(LIMIT)?;
        }
        lab.order_faults("src", "")?;
        lab.ended("src", "agent")?;
        lab.lab().start("src", "agent")?;
        let asked = asked.wait(LIMIT)?;
        ensure!(asked.code != 0, "{}", asked.output());
        eventually("an instance that runs", LIMIT, || {
            let row = check.client.row()?;
            ensure!(row.host == "src", "{row:?}");
            Ok((row.state == "running" && row.connections == 4).then_some(()))
        })?;
        check.flows("src").context(action)?;
        check.flows("peer").context(action)?;
        goes_well(lab, check.client.name()).context(action)?;
    }
    check.client.moves("dst")?;
    check.flows("dst")?;
    check.end().map(drop)
}

/// It fails in the middle, or its command goes away.
fn it_is_cancelled_or_fails(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let asked = frozen(lab, check.client.name(), "fail")?.wait(LIMIT)?;
    lab.order_faults("src", "")?;
    ensure!(asked.code == 1, "{}", asked.output());
    let answer: Value = serde_json::from_str(&asked.stdout)?;
    ensure!(
        answer["blockers"].as_array().is_some_and(Vec::is_empty),
        "{answer}"
    );
    ensure!(answer["deep"]["not_tried"].is_string(), "{answer}");
    check.flows("src")?;
    let asked = frozen(lab, check.client.name(), "hang")?;
    // A second one, or a move, is refused meanwhile.
    let refused = lab.refused(&["migrate", check.client.name(), "--to", "dst"])?;
    ensure!(refused.contains("is being moved already"), "{refused}");
    drop(asked);
    lab.order_faults("src", "")?;
    eventually("an instance that runs", LIMIT, || {
        Ok((check.client.row()?.state == "running").then_some(()))
    })?;
    check.flows("src")?;
    goes_well(lab, check.client.name())?;
    check.end().map(drop)
}
