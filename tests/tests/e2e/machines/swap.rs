//! Virtual machines whose disk is memory of a third host: the guest has its pages written there, spoils them, and has them read back, while it moves and
//! the lease with it.

use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::process::Signal;
use serde_json::Value;
use verbatim_e2e::{ROLLED_BACK, Running, TestLab, eventually, left_behind, patience};

use super::{Guest, NAME, THREE, blockers};
use crate::Test;
use crate::faults::Subject;

const LIMIT: Duration = Duration::from_secs(60);

/// What its host calls the disk.
const DISK: &str = "guest.swap";

/// The guest's driver is of the legacy interface.
const WANTED: &str = "peer:16M:disable-modern=on";

/// What fails before the guest runs at the destination, at which host.
const SHORT: &[(&str, &str)] = &[("src", "source-commit exit"), ("dst", "destination-commit fail")];

/// The rest.
const LONG: &[(&str, &str)] = &[
    ("src", "source-open exit"),
    ("src", "source-pre-copy exit"),
    ("dst", "destination-prepare-restore fail"),
    ("dst", "destination-prepare-restore exit"),
    ("src", "source-freeze fail"),
    ("src", "source-transfer exit"),
    ("src", "source-restore fail"),
    ("dst", "destination-restore fail"),
    ("dst", "destination-restore exit"),
    ("dst", "destination-commit exit"),
    ("dst", "destination-committed exit"),
];

/// What strikes after it, at which host: whoever is left brings the move to its end.
const DECIDED: &[(&str, &str)] = &[
    ("dst", "destination-running exit"),
    ("src", "source-committed exit"),
];

pub fn tests() -> Vec<Test> {
    vec![
        Test::new("machines::swap_moves", THREE, moves),
        Test::new("machines::swap_stays", THREE, |lab| {
            stays(lab, SHORT, &DECIDED[..1])
        })
        .injecting_faults(),
        Test::new("machines::swap_stays_long", THREE, |lab| {
            stays(lab, LONG, &DECIDED[1..])
        })
        .injecting_faults()
        .only_on_demand(true),
        Test::new("machines::swap_without_what_it_needs", THREE, lacks)
            .injecting_faults()
            .only_on_demand(true),
        Test::new("machines::swap_moves_often", THREE, often).only_on_demand(true),
    ]
}

/// Memory of `peer`, as long as this lives.
fn serve(lab: &TestLab) -> anyhow::Result<Running> {
    let program = lab.tools().verbatim.to_str().context("a path in UTF-8")?;
    let socket = lab.path("peer", "/run/verbatim/memory.sock")?;
    let _ = std::fs::remove_file(&socket);
    let mut served = lab.start_plain(
        "peer",
        &[
            program,
            "memory",
            "serve",
            "--size",
            "64M",
            "--name",
            "peer",
            "--config-dir",
            "/run/verbatim",
        ],
    )?;
    eventually("a memory server", patience(LIMIT), || {
        ensure!(!served.has_ended()?, "it has ended: {}", served.stderr()?);
        Ok(socket.exists().then_some(()))
    })?;
    Ok(served)
}

fn start<'a>(lab: &'a TestLab, backup: &str) -> anyhow::Result<Guest<'a>> {
    Guest::start_with(lab, &["--swap", &format!("{WANTED},backup={backup}")], &[])
}

/// The disk on a host, if there is one.
fn disk(lab: &TestLab, host: &str) -> anyhow::Result<Option<Value>> {
    let program = lab.tools().verbatim.to_str().context("a path in UTF-8")?;
    let listed = lab.start_plain(host, &[program, "swap", "list", "--json"])?;
    let listed: Value = serde_json::from_str(&listed.succeed(patience(LIMIT))?.stdout)?;
    let rows = listed.as_array().context("a list")?;
    ensure!(rows.len() <= 1, "{listed}");
    Ok(rows.first().cloned())
}

/// The one lease that `peer` has given.
fn lease(lab: &TestLab) -> anyhow::Result<Value> {
    let program = lab.tools().verbatim.to_str().context("a path in UTF-8")?;
    let status = lab.start_plain("peer", &[program, "memory", "status", "--json"])?;
    let status: Value = serde_json::from_str(&status.succeed(patience(LIMIT))?.stdout)?;
    ensure!(
        status["leases"].as_array().context("a list")?.len() == 1,
        "{status}"
    );
    Ok(status["leases"][0].clone())
}

/// The guest runs there, with its disk; no other host has anything of it.
fn works(lab: &TestLab, guest: &Guest, host: &str) -> anyhow::Result<()> {
    let mut last = String::new();
    eventually("an instance that runs", patience(LIMIT), || {
        let row = guest.instance.row();
        last = format!("{row:?}");
        let row = row.ok();
        Ok(row
            .filter(|row| row.state == "running" && row.host == host)
            .map(drop))
    })
    .with_context(|| last.clone())?;
    guest.counts_on()?;
    let other = if host == "src" { "dst" } else { "src" };
    let mut last = Value::Null;
    eventually("one disk", patience(LIMIT), || {
        let (here, there) = (disk(lab, host)?, disk(lab, other)?);
        let lease = lease(lab)?;
        let is_served = here
            .as_ref()
            .is_some_and(|row| row["role"] == "serving" && row["instance"] == NAME && row["name"] == DISK);
        let is_leased = lease["host"] == host && lease["moves_to"].is_null();
        last = serde_json::json!([here, there, lease]);
        Ok((is_served && is_leased && there.is_none()).then_some(()))
    })
    .with_context(|| last.to_string())?;
    let row = disk(lab, host)?.context("there was one")?;
    ensure!(row["lost_bytes"] == 0 && row["requests"]["failed"] == 0, "{row}");
    Ok(())
}

/// There and back, the lease with it; between agents that are replaced.
fn moves(lab: &TestLab) -> anyhow::Result<()> {
    let _served = serve(lab)?;
    let guest = start(lab, "none")?;
    works(lab, &guest, "src")?;
    let check = lab.ask(&["check", NAME, "--to", "dst"])?.output();
    ensure!(
        check.contains("the swap disk swap stays in memory of peer"),
        "{check}"
    );
    for (here, there) in [("src", "dst"), ("dst", "src")] {
        guest.moves(there)?;
        works(lab, &guest, there)?;
        eventually("a host without leftovers", patience(LIMIT), || {
            Ok(left_behind(lab, here, NAME)?.is_empty().then_some(()))
        })?;
        // The disk's process outlives the agent.
        lab.restart(there, "agent")?;
        works(lab, &guest, there)?;
    }
    let row = disk(lab, "src")?.context("it is there")?;
    ensure!(
        row["used_bytes"].as_u64().is_some_and(|bytes| bytes > 8 << 20),
        "the guest has not written all its pages: {row}"
    );
    lab.ask(&["stop", NAME])?;
    eventually("the end of the disk", patience(LIMIT), || {
        Ok(disk(lab, "src")?.is_none().then_some(()))
    })?;
    ensure!(left_behind(lab, "src", NAME)?.is_empty());
    Ok(())
}

/// Many times in a row, with each kind of backup.
fn often(lab: &TestLab) -> anyhow::Result<()> {
    let _served = serve(lab)?;
    for backup in ["none", "file"] {
        let guest = start(lab, backup)?;
        for number in 0..10 {
            let there = ["dst", "src"][number % 2];
            let migration = guest.instance.migrate(there)?;
            migration.must_be_committed()?;
            eprintln!(
                "{backup}: to {there}: {:.1} ms of {:.0}",
                migration.service_blackout_ms, migration.total_ms
            );
            works(lab, &guest, there)?;
        }
        lab.ask(&["stop", NAME])?;
    }
    Ok(())
}

/// Moves that come to nothing, and such that an agent does not see to their end.
fn stays(lab: &TestLab, undone: &[(&str, &str)], decided: &[(&str, &str)]) -> anyhow::Result<()> {
    let _served = serve(lab)?;
    let guest = start(lab, "none")?;
    let attempt = |host: &str, order: &str, to: &str| {
        lab.order_faults(host, &format!("{order}\n"))?;
        let migrate = lab.verbatim(&["migrate", NAME, "--to", to, "--json"])?;
        if order.ends_with("exit") {
            lab.ended(host, "agent")?;
            lab.order_faults(host, "")?;
            lab.lab().start(host, "agent")?;
        }
        // What it says depends on who has died.
        let ended = migrate.wait(patience(LIMIT))?;
        lab.order_faults(host, "")?;
        anyhow::Ok(ended)
    };
    for (host, order) in undone {
        let case = || {
            let ended = attempt(host, order, "dst")?;
            ensure!(ended.code == 1, "{}", ended.output());
            works(lab, &guest, "src")?;
            eventually("a destination without leftovers", patience(LIMIT), || {
                Ok(left_behind(lab, "dst", NAME)?.is_empty().then_some(()))
            })
        };
        case().with_context(|| format!("{host}: {order}"))?;
    }
    for (host, order) in decided {
        let case = || {
            attempt(host, order, "dst")?;
            works(lab, &guest, "dst")?;
            guest.moves("src")?;
            works(lab, &guest, "src")
        };
        case().with_context(|| format!("{host}: {order}"))?;
    }
    guest.moves("dst")?;
    works(lab, &guest, "dst")
}

/// What is not there is said, and the guest stays where it is.
fn lacks(lab: &TestLab) -> anyhow::Result<()> {
    let run = |wanted: &str| {
        let said = lab.refused(&[
            "run", "--host", "src", "--vm", NAME, "--swap", wanted, "--", "-M", "pc",
        ])?;
        let behind = left_behind(lab, "src", NAME)?;
        ensure!(behind.is_empty(), "{wanted}: {behind:?}");
        anyhow::Ok(said)
    };
    let said = run(WANTED)?;
    ensure!(said.contains("does `verbatim memory serve` run there?"), "{said}");
    let served = serve(lab)?;
    for (wanted, why) in [
        ("peer:65M", "64 of 64 MiB left"),
        ("nowhere:1M", "there is no host nowhere"),
        ("peer:1M:nosuch=1", "nosuch"),
        ("peer:1000", "whole pages"),
    ] {
        let said = run(wanted)?;
        ensure!(said.contains(why), "{wanted}: {said}");
    }
    let guest = start(lab, "file")?;
    let program = lab.tools().verbatim.to_str().context("a path in UTF-8")?;
    let detach = lab.start_plain("src", &[program, "swap", "detach", DISK])?;
    let said = detach.wait(patience(LIMIT))?;
    ensure!(
        said.code == 1 && said.stderr.contains("in use by the instance guest"),
        "{}",
        said.output()
    );

    // The server is killed: the file stands in, and the lease does not move.
    served.signal(Signal::KILL)?;
    drop(served);
    eventually("a server that is missed", patience(LIMIT), || {
        let row = disk(lab, "src")?.context("it is there")?;
        Ok((row["copies"][0]["state"] == "down").then_some(()))
    })?;
    guest.counts_on()?;
    let said = blockers(lab)?;
    ensure!(said.contains("the memory server peer"), "{said}");
    let migration = guest.instance.migrate("dst")?;
    let why = migration.error.unwrap_or_default();
    ensure!(
        migration.outcome == ROLLED_BACK && why.contains("the memory server of peer"),
        "{why}"
    );
    guest.counts_on()?;

    // It is back, and filled; it is killed when everything waits for the decision, and nothing is decided.
    let served = serve(lab)?;
    eventually("a server that has everything", patience(LIMIT), || {
        let row = disk(lab, "src")?.context("it is there")?;
        let of = |copy: usize| row["copies"][copy]["bytes"].as_u64();
        Ok((of(0) == of(1) && row["copies"][0]["state"] == "up").then_some(()))
    })?;
    let waiting = || {
        lab.order_faults("dst", "destination-commit hang\n")?;
        let reached = lab.path("dst", "/run/verbatim/faults.reached")?;
        let _ = std::fs::remove_file(&reached);
        let migrate = lab.verbatim(&["migrate", NAME, "--to", "dst", "--json"])?;
        eventually("the point", patience(LIMIT), || {
            Ok(reached.exists().then_some(()))
        })?;
        anyhow::Ok(migrate)
    };
    let migrate = waiting()?;
    served.signal(Signal::KILL)?;
    drop(served);
    eventually("a destination that knows", patience(LIMIT), || {
        let row = disk(lab, "dst")?.context("it is there")?;
        Ok((row["role"] == "arriving").then_some(()))
    })?;
    lab.order_faults("dst", "")?;
    let ended = migrate.wait(patience(LIMIT))?;
    ensure!(ended.code == 1, "{}", ended.output());
    guest.counts_on()?;
    let _served = serve(lab)?;
    eventually("a server that has everything", patience(LIMIT), || {
        let row = disk(lab, "src")?.context("it is there")?;
        let of = |copy: usize| row["copies"][copy]["bytes"].as_u64();
        Ok((of(0) == of(1) && row["copies"][0]["state"] == "up").then_some(()))
    })?;

    // The destination's process is killed there: nothing is decided either.
    let migrate = waiting()?;
    let row = disk(lab, "dst")?.context("it is there")?;
    ensure!(row["role"] == "ready", "{row}");
    kill_in(lab, "dst", &row)?;
    lab.order_faults("dst", "")?;
    let ended = migrate.wait(patience(LIMIT))?;
    ensure!(ended.code == 1, "{}", ended.output());
    works(lab, &guest, "src")?;

    // The source's, while everything waits: the destination needs it no more.
    let migrate = waiting()?;
    let row = disk(lab, "src")?.context("it is there")?;
    ensure!(row["role"] == "held", "{row}");
    kill_in(lab, "src", &row)?;
    lab.order_faults("dst", "")?;
    let ended = migrate.wait(patience(LIMIT))?;
    ensure!(ended.code == 0, "{}", ended.output());
    works(lab, &guest, "dst")
}

/// Kills the process of a disk.
fn kill_in(lab: &TestLab, host: &str, row: &Value) -> anyhow::Result<()> {
    let pid = row["pid"].to_string();
    let killed = lab.start_plain(host, &["kill", "-KILL", &pid])?;
    killed.succeed(patience(LIMIT)).map(drop)
}
