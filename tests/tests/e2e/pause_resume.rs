//! Migrations by the other method: connections pause within the protocol, in the middle of what is under way.

use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{Bandwidth, Instance, Migration, TestLab, Traffic, eventually, left_behind};

use crate::Test;
use crate::migration::{Check, both_in_one_instance, plausible};

const HOSTS: &[&str] = &["src", "dst", "peer"];
const FOUR_HOSTS: &[&str] = &["src", "dst", "peer", "spare"];
const LIMIT: Duration = Duration::from_secs(60);
const SOME_BYTES: u64 = 8 << 20;
const PACKETS: u64 = 1000;
const PAUSE_RESUME: &[&str] = &["--method", "pause-resume"];
const OPTIONS: &[&str] = &[
    "--op",
    "all",
    "-q",
    "4",
    "-s",
    "65536",
    "--random-size",
    "--bidirectional",
];

/// All of them.
pub fn tests() -> Vec<Test> {
    let mut tests = vec![
        Test::new("pause_resume::client", HOSTS, |lab| there_and_back(lab, false)),
        Test::new("pause_resume::server", HOSTS, |lab| there_and_back(lab, true)),
        Test::new(
            "pause_resume::by_turns_with_the_other_method",
            FOUR_HOSTS,
            by_turns,
        ),
        Test::new("pause_resume::both_in_one_instance", HOSTS, |lab| {
            both_in_one_instance(lab, "0", PAUSE_RESUME)
        }),
        Test::new("pause_resume::both_ends_move_at_once", FOUR_HOSTS, both_ends),
        Test::new("pause_resume::unreliable_connections_do_not", HOSTS, unreliable),
        Test::new("pause_resume::auto_looks_at_what_is_under_way", HOSTS, auto),
        Test::new("pause_resume::auto_waits_for_little", HOSTS, auto_waits),
    ];
    for options in [
        &["ib_write_bw"][..],
        &["ib_send_bw", "--use-srq"],
        &["ib_atomic_bw"],
    ] {
        let name = format!(
            "pause_resume::{}",
            options.concat().replace("--", "_").replace('-', "_")
        );
        tests.push(Test::new(name, HOSTS, move |lab| perftest(lab, options)));
    }
    for order in ["source-pause fail", "source-freeze fail", "partner-suspend fail"] {
        let name = format!("pause_resume::{}", order.replace([' ', '-'], "_"));
        tests.push(Test::new(name, HOSTS, move |lab| rolls_back(lab, order)).injecting_faults());
    }
    tests
}

/// To and fro, twice.
const FEWEST_MOVES: usize = 4;

/// Of which one at least is to find requests under way.
const MOST_MOVES: usize = 16;

/// Moves it by this method.
fn moves(instance: &Instance<'_>, to: &str) -> anyhow::Result<Migration> {
    let migration = instance.migrate_with(to, PAUSE_RESUME)?;
    migration.must_be_committed()?;
    ensure!(migration.method == "pause-resume", "{migration:?}");
    ensure!(
        migration.phases_ms["WaitBeforeStop"] == 0.0 && migration.phases_ms["Pause"] > 0.0,
        "{migration:?}"
    );
    Ok(migration)
}

fn there_and_back(lab: &TestLab, server: bool) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let (moved, home) = match server {
        false => (&check.client, "src"),
        true => (&check.server, "peer"),
    };
    let mut under_way = 0;
    // As often as it takes, where the RNICs are faster than the program: it is their requests under way that are looked at.
    for (number, to) in ["dst", home].into_iter().cycle().take(MOST_MOVES).enumerate() {
        if number >= FEWEST_MOVES && under_way > 0 {
            break;
        }
        let migration = moves(moved, to).with_context(|| check.words())?;
        plausible(&migration, 4)?;
        ensure!(migration.paused.image_bytes > 0, "{migration:?}");
        under_way += migration.paused.requests;
        check.flows(to)?;
    }
    ensure!(under_way > 0, "nothing was under way in any of the moves");
    check.end()?;
    Ok(())
}

/// What one method leaves the other takes up, at either end.
fn by_turns(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let (client, server) = (&check.client, &check.server);
    for (moved, to, pauses) in [
        (client, "dst", true),
        (client, "src", false),
        (server, "spare", true),
        (client, "dst", true),
        (server, "peer", false),
        (client, "src", true),
        (server, "spare", true),
    ] {
        if pauses {
            moves(moved, to).with_context(|| check.words())?;
        } else {
            let migration = moved.moves(to).with_context(|| check.words())?;
            ensure!(migration.method == "wait-before-stop", "{migration:?}");
        }
        check.flows(to)?;
    }
    check.end()?;
    Ok(())
}

fn both_ends(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    for (client_to, server_to) in [("dst", "spare"), ("src", "peer")] {
        let start = |instance: &Instance<'_>, to| {
            let argv = ["migrate", instance.name(), "--to", to, "--json"];
            lab.verbatim(&[&argv[..], PAUSE_RESUME].concat())
        };
        let moving = [start(&check.client, client_to)?, start(&check.server, server_to)?];
        for moving in moving {
            let migration = Migration::of(&moving.wait(LIMIT)?)?;
            migration.must_be_committed().with_context(|| check.words())?;
            ensure!(migration.method == "pause-resume", "{migration:?}");
        }
        check.flows(client_to)?;
        check.flows(server_to)?;
    }
    check.end()?;
    Ok(())
}

/// Tens of megabytes are under way at both ends, also while no program gets a core: to wait for them takes longer than to pause a few
/// connections.
fn auto(lab: &TestLab) -> anyhow::Result<()> {
    let load = ["-q", "4", "-s", "262144", "--depth", "32", "--bidirectional"];
    let check = Check::start(lab, &load)?;
    let migration = check.client.migrate_with("dst", &["--method", "auto"])?;
    migration.must_be_committed()?;
    let why = "to pause 4 connections about 0.1 ms";
    ensure!(
        migration.method == "pause-resume" && migration.method_reason.contains(why),
        "{migration:?}"
    );
    check.flows("dst")?;
    check.end()?;
    Ok(())
}

/// Nothing is under way: the client sleeps for seconds after the data that start it off. To wait for that takes less than to pause
/// hundreds of connections.
fn auto_waits(lab: &TestLab) -> anyhow::Result<()> {
    let load = ["-q", "512", "-s", "16384", "--depth", "1", "--nap", "5000"];
    let check = Check::start(lab, &load)?;
    let migration = check.client.migrate_with("dst", &["--method", "auto"])?;
    migration.must_be_committed()?;
    let why = "to pause 512 connections about";
    ensure!(
        migration.method == "wait-before-stop" && migration.method_reason.contains(why),
        "{migration:?}"
    );
    check.flows("dst")?;
    check.end()?;
    Ok(())
}

/// The migration goes on with the other method, and says why.
fn unreliable(lab: &TestLab) -> anyhow::Result<()> {
    let test = Bandwidth::start(lab, &["ib_write_bw", "-c", "UC"])?;
    Traffic::of(lab, "src")?.flows(SOME_BYTES, LIMIT)?;
    let migration = test.client.migrate_with("dst", &["--method", "auto"])?;
    migration.must_be_committed()?;
    ensure!(
        migration.method == "wait-before-stop" && migration.method_reason.contains("unreliable connection"),
        "{migration:?}"
    );
    Traffic::of(lab, "dst")?.flows(SOME_BYTES, LIMIT)?;
    test.end()?;
    Ok(())
}

/// Perftest with much in flight; one side moves there and back.
fn perftest(lab: &TestLab, program: &[&str]) -> anyhow::Result<()> {
    let test = Bandwidth::start(lab, &[program, &["-q", "4"]].concat())?;
    Traffic::of(lab, "src")?
        .packets_flow(PACKETS, LIMIT)
        .with_context(|| test.words())?;
    for (moved, to) in [(&test.client, "dst"), (&test.server, "src")] {
        moves(moved, to).with_context(|| test.words())?;
        Traffic::of(lab, to)?
            .packets_flow(PACKETS, LIMIT)
            .with_context(|| test.words())?;
    }
    test.end()?;
    Ok(())
}

/// A failure leaves the instance where it is, its connections go on, and another attempt succeeds.
fn rolls_back(lab: &TestLab, order: &str) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let (point, _) = order.split_once(' ').context("POINT ACTION")?;
    let host = if point.starts_with("partner") {
        "peer"
    } else {
        "src"
    };
    lab.order_faults(host, order)?;
    let migration = check.client.migrate_with("dst", PAUSE_RESUME)?;
    migration.must_be_rolled_back(&[point])?;
    lab.order_faults(host, "")?;
    check.flows("src")?;
    check.flows("peer")?;
    eventually("a clean destination", LIMIT, || {
        Ok(left_behind(lab, "dst", "client")?.is_empty().then_some(()))
    })?;
    moves(&check.client, "dst").with_context(|| check.words())?;
    check.flows("dst")?;
    check.end()?;
    Ok(())
}
