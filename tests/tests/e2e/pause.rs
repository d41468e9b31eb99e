//! An operator's pause: connections stand still while their link is cut, for longer than all their retries last.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::Deserialize;
use verbatim_e2e::{Bandwidth, Instance, PERFTEST_PORT, TestLab, Traffic, eventually};

use crate::Test;
use crate::drain::Loss;
use crate::migration::Check;

const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(60);
const SOME_BYTES: u64 = 8 << 20;

/// 0.27 s for an answer (4.096 µs × 2^16), and seven retries: without one, a connection has failed after 2.1 s.
const ACK_TIMEOUT: &str = "16";
const RETRIES: Duration = Duration::from_micros(((8 * 4096) << 16) / 1000);

/// More than twice as long.
const CUT: Duration = Duration::from_secs(5);

const OPTIONS: &[&str] = &[
    "--op",
    "all",
    "-q",
    "4",
    "-s",
    "65536",
    "--random-size",
    "--bidirectional",
    "--ack-timeout",
    ACK_TIMEOUT,
];

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("pause::while_the_link_is_cut", HOSTS, while_the_link_is_cut),
        Test::new("pause::the_same_cut_without", HOSTS, the_same_cut_without),
        Test::new("pause::one_connection_of_many", HOSTS, one_connection_of_many),
        Test::new("pause::ib_write_bw", HOSTS, ib_write_bw),
        Test::new("pause::goes_on_by_itself", HOSTS, goes_on_by_itself),
        Test::new("pause::agents_come_and_go", HOSTS, agents_come_and_go),
        Test::new("pause::refusals", HOSTS, refusals),
    ]
}

/// What `verbatim pause --json` and `resume --json` print.
#[derive(Debug, Deserialize)]
struct Paused {
    connections: Vec<Connection>,
    notes: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Connection {
    connection: String,
    partner_host: String,
}

fn ask(lab: &TestLab, arguments: &[&str]) -> anyhow::Result<Paused> {
    let finished = lab.ask(&[arguments, &["--json"]].concat())?;
    serde_json::from_str(&finished.stdout).with_context(|| finished.stdout.clone())
}

/// How many connections of each are shown as paused.
fn shown(instances: [&Instance<'_>; 2]) -> anyhow::Result<[u32; 2]> {
    let [one, other] = instances;
    Ok([one.row()?.paused, other.row()?.paused])
}

/// Cuts the link of `peer` for [`CUT`], while nothing of what is between programs passes.
fn cut(lab: &TestLab) -> anyhow::Result<()> {
    let loss = Loss::of(lab, "peer", &["in", "out"], 100)?;
    std::thread::sleep(CUT);
    drop(loss);
    Ok(())
}

fn while_the_link_is_cut(lab: &TestLab) -> anyhow::Result<()> {
    assert!(CUT > 2 * RETRIES);
    let check = Check::start(lab, OPTIONS)?;
    // Either end's operator can do it.
    for name in ["client", "server"] {
        let paused = ask(lab, &["pause", name])?;
        let began = Instant::now();
        ensure!(
            paused.connections.len() == 4 && paused.notes.is_empty(),
            "{paused:?}"
        );
        let partner = if name == "client" { "peer" } else { "src" };
        ensure!(
            paused.connections.iter().all(|link| link.partner_host == partner),
            "{paused:?}"
        );
        ensure!(shown([&check.client, &check.server])? == [4, 4]);
        let bytes = Traffic::of(lab, "src")?.payload_bytes();
        cut(lab)?;
        ensure!(began.elapsed() >= CUT);
        ensure!(
            Traffic::of(lab, "src")?.payload_bytes() == bytes,
            "nothing may pass"
        );
        // Again: a new limit, and no more than that.
        ask(lab, &["pause", name, "--limit", "300"])?;
        ensure!(shown([&check.client, &check.server])? == [4, 4]);
        let resumed = ask(lab, &["resume", name])?;
        ensure!(
            resumed.connections.len() == 4 && resumed.notes.is_empty(),
            "{resumed:?}"
        );
        ensure!(shown([&check.client, &check.server])? == [0, 0]);
        check.flows("src")?;
        // Twice.
        let resumed = ask(lab, &["resume", name])?;
        ensure!(resumed.connections.is_empty(), "{resumed:?}");
    }
    let (client, server) = check.end()?;
    for report in [&client, &server] {
        let gap = Duration::from_secs_f64(report.longest_gap_ms / 1000.0);
        ensure!(gap >= CUT, "{report:?}");
    }
    Ok(())
}

/// So that the one above can fail.
fn the_same_cut_without(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    cut(lab)?;
    let ended = lab.verbatim(&["wait", check.client.name()])?.wait(LIMIT)?;
    ensure!(
        ended.code == 1,
        "the client ended with {}: {}",
        ended.code,
        check.words()
    );
    Ok(())
}

fn one_connection_of_many(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let all = ask(lab, &["pause", "client"])?;
    let one = &all.connections[2].connection;
    ask(lab, &["resume", "client"])?;
    let paused = ask(lab, &["pause", one])?;
    ensure!(
        paused.connections.len() == 1 && paused.connections[0].connection == *one,
        "{paused:?}"
    );
    ensure!(shown([&check.client, &check.server])? == [1, 1]);
    check.flows("src").context("the others go on")?;
    let resumed = ask(lab, &["resume", one])?;
    ensure!(resumed.connections.len() == 1, "{resumed:?}");
    check.flows("src")?;
    check.end()?;
    Ok(())
}

fn ib_write_bw(lab: &TestLab) -> anyhow::Result<()> {
    let argv = ["ib_write_bw", "-q", "4", "-s", "65536", "-u", ACK_TIMEOUT];
    let test = Bandwidth::start(lab, &argv)?;
    Traffic::of(lab, "src")?.flows(SOME_BYTES, LIMIT)?;
    ask(lab, &["pause", "client"]).with_context(|| test.words())?;
    cut(lab)?;
    ask(lab, &["resume", "client"])?;
    Traffic::of(lab, "src")?.flows(SOME_BYTES, LIMIT)?;
    test.end()?;
    Ok(())
}

fn goes_on_by_itself(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    ask(lab, &["pause", "client", "--limit", "1"])?;
    eventually("the end of the pause", LIMIT, || {
        Ok((shown([&check.client, &check.server])? == [0, 0]).then_some(()))
    })?;
    check.flows("src")?;
    check.end()?;
    Ok(())
}

/// Agents keep nothing of a pause: it is where it was when they come back. While a partner's is away nothing is done.
fn agents_come_and_go(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    lab.lab().kill("peer", "agent")?;
    let refusal = lab.refused(&["pause", "client"])?;
    ensure!(refusal.contains("peer"), "{refusal}");
    ensure!(check.client.row()?.paused == 0);
    check.flows("src").context("nothing was paused")?;
    lab.lab().start("peer", "agent")?;
    for host in ["src", "peer"] {
        // The processes come back to an agent that has just started.
        let paused = eventually("both ends to be with their agents", LIMIT, || {
            Ok(ask(lab, &["pause", "client"])
                .ok()
                .filter(|paused| paused.connections.len() == 4))
        })?;
        ensure!(paused.notes.is_empty(), "{paused:?}");
        lab.lab().kill(host, "agent")?;
        if host == "peer" {
            let refusal = lab.refused(&["resume", "client"])?;
            ensure!(refusal.contains("--force"), "{refusal}");
            ensure!(check.client.row()?.paused == 4);
        }
        lab.lab().start(host, "agent")?;
        eventually("what is paused to be known", LIMIT, || {
            Ok((shown([&check.client, &check.server])? == [4, 4]).then_some(()))
        })?;
        let resumed = ask(lab, &["resume", "client"])?;
        ensure!(resumed.connections.len() == 4, "{resumed:?}");
        check.flows("src")?;
    }
    check.end()?;
    Ok(())
}

fn refusals(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let refused = |arguments: &[&str], why: &str| -> anyhow::Result<()> {
        let refusal = lab.refused(arguments)?;
        ensure!(refusal.contains(why), "{arguments:?}: {refusal}");
        Ok(())
    };
    refused(&["pause", "nobody"], "nobody")?;
    refused(&["pause", "client/0x2"], "no connected queue pair 0x2")?;
    refused(&["resume", "client/0x2"], "no connected queue pair 0x2")?;

    // What is paused is not moved, and neither is its other end.
    ask(lab, &["pause", "client"])?;
    for instance in [&check.client, &check.server] {
        let migration = instance.migrate("dst")?;
        migration.must_be_rolled_back(&["is paused by an operator"])?;
        let checked = lab
            .verbatim(&["check", instance.name(), "--to", "dst"])?
            .wait(LIMIT)?;
        ensure!(
            checked.code == 1 && checked.stdout.contains("is paused by an operator"),
            "{checked:?}"
        );
    }
    ask(lab, &["resume", "client"])?;
    check.flows("src")?;
    check.client.moves("dst")?;
    // After a move, too.
    let paused = ask(lab, &["pause", "client"])?;
    ensure!(paused.connections.len() == 4 && shown([&check.client, &check.server])? == [4, 4]);
    ask(lab, &["resume", "server"])?;
    check.flows("dst")?;
    // An instance that ends while it is paused, and its partner.
    ask(lab, &["pause", "client"])?;
    check.client.kill()?;
    let resumed = ask(lab, &["resume", "server"])?;
    ensure!(
        resumed.notes.iter().any(|note| note.contains("is gone")),
        "{resumed:?}"
    );

    // Datagrams are not paused, and it is said so.
    let server = lab.instance(
        "peer",
        "datagrams",
        &["ib_send_bw", "-c", "UD", "-s", "1024", "-D", "20"],
    )?;
    server.listens(PERFTEST_PORT)?;
    let address = server.address()?;
    let client = ["ib_send_bw", "-c", "UD", "-s", "1024", "-D", "20", &address];
    let client = lab.instance("src", "sender", &client)?;
    Traffic::of(lab, "src")?.flows(1 << 20, LIMIT)?;
    let paused = ask(lab, &["pause", client.name()])?;
    ensure!(
        paused.connections.is_empty() && paused.notes[0].contains("UC or UD"),
        "{paused:?}"
    );
    Ok(())
}
