//! Migrations that fail before the commit: the instance goes on at its source, and a second attempt succeeds.

use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::process::Signal;
use verbatim_e2e::{TestLab, eventually, left_behind};

use crate::Test;
use crate::migration::Check;

const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(20);

/// A failure to order.
#[derive(Clone, Copy)]
struct Fault {
    name: &'static str,
    host: &'static str,
    /// The line in the agent's file.
    order: &'static str,
    /// What the error must name.
    reasons: &'static [&'static str],
    /// Whether the host's agent dies of it.
    deadly: bool,
}

const FAULTS: [Fault; 7] = [
    Fault {
        name: "destination_dies_in_pre_setup",
        host: "dst",
        order: "destination-pre-setup exit",
        reasons: &["dst"],
        deadly: true,
    },
    Fault {
        name: "destination_refuses_pre_setup",
        host: "dst",
        order: "destination-pre-setup fail",
        reasons: &["dst", "destination-pre-setup"],
        deadly: false,
    },
    Fault {
        name: "restore_fails",
        host: "dst",
        order: "destination-restore damage",
        reasons: &["dst", "restore"],
        deadly: false,
    },
    Fault {
        name: "destination_refuses_to_commit",
        host: "dst",
        order: "destination-commit fail",
        reasons: &["dst", "destination-commit"],
        deadly: false,
    },
    Fault {
        name: "partner_refuses",
        host: "peer",
        order: "partner-prepare fail",
        reasons: &["peer", "partner-prepare"],
        deadly: false,
    },
    Fault {
        name: "partner_refuses_to_suspend",
        host: "peer",
        order: "partner-suspend fail",
        reasons: &["peer", "partner-suspend"],
        deadly: false,
    },
    Fault {
        name: "partner_fails_when_suspended",
        host: "peer",
        order: "partner-drain fail",
        reasons: &["peer", "partner-drain"],
        deadly: false,
    },
];

/// All of them.
pub fn tests() -> Vec<Test> {
    let faults = FAULTS.into_iter().map(|fault| {
        let name = format!("rollback::{}", fault.name);
        Test::new(name, HOSTS, move |lab| rolls_back(lab, fault)).injecting_faults()
    });
    let cancelled = Test::new("rollback::cancelled_at_any_time", HOSTS, cancelled_at_any_time);
    faults.chain([cancelled]).collect()
}

fn rolls_back(lab: &TestLab, fault: Fault) -> anyhow::Result<()> {
    let check = Check::start(
        lab,
        &[
            "--op",
            "mix",
            "-q",
            "4",
            "-s",
            "65536",
            "--random-size",
            "--bidirectional",
        ],
    )?;

    lab.order_faults(fault.host, fault.order)?;
    check.client.migrate("dst")?.must_be_rolled_back(fault.reasons)?;
    lab.order_faults(fault.host, "")?;
    if fault.deadly {
        lab.lab().start(fault.host, "agent")?;
    }

    let row = check.client.row()?;
    ensure!(row.host == "src" && row.state == "running", "{row:?}");
    check.flows("src")?;
    check.flows("peer")?;
    eventually("a clean destination", LIMIT, || {
        Ok(left_behind(lab, "dst", "client")?.is_empty().then_some(()))
    })
    .map_err(|error| error.context(format!("left behind: {:?}", left_behind(lab, "dst", "client"))))?;

    check.client.moves("dst")?;
    check.flows("dst")?;
    eventually("a clean source", LIMIT, || {
        Ok(left_behind(lab, "src", "client")?.is_empty().then_some(()))
    })
    .map_err(|error| error.context(format!("left behind: {:?}", left_behind(lab, "src", "client"))))?;
    check.end()?;
    Ok(())
}

/// Ctrl-C, from before anything is prepared to after the commit: the instance is on one host, whole, and can be moved.
fn cancelled_at_any_time(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(
        lab,
        &[
            "--op",
            "mix",
            "-q",
            "4",
            "-s",
            "16384",
            "--random-size",
            "--bidirectional",
        ],
    )?;
    let mut here = "src".to_owned();
    let mut cancelled = 0;
    for delay_ms in [20, 120, 220, 320, 420, 520, 620, 720, 1000] {
        let to = if here == "src" { "dst" } else { "src" };
        let migrate = lab.verbatim(&["migrate", check.client.name(), "--to", to, "--json"])?;
        std::thread::sleep(Duration::from_millis(delay_ms));
        migrate.signal(Signal::INT)?;
        let finished = migrate.wait(LIMIT)?;
        cancelled += u32::from(finished.code != 0);
        let context = || format!("cancelled after {delay_ms} ms{}", finished.output());
        // The command does not wait for the way back.
        here = eventually("an instance that runs", LIMIT, || {
            let rows = lab.ask(&["ps", "--json"])?.stdout;
            let rows: Vec<serde_json::Value> = serde_json::from_str(&rows)?;
            let running: Vec<_> = rows.iter().filter(|row| row["name"] == "client").collect();
            ensure!(running.len() <= 1, "the instance is there twice: {rows:?}");
            let host = running
                .first()
                .filter(|row| row["state"] == "running")
                .map(|row| row["host"].clone());
            Ok(host.and_then(|host| host.as_str().map(str::to_owned)))
        })
        .with_context(context)?;
        check.flows(&here).with_context(context)?;
    }
    ensure!(cancelled > 0, "every migration was faster than its cancellation");
    let to = if here == "src" { "dst" } else { "src" };
    eventually("a destination that is free again", LIMIT, || {
        Ok(left_behind(lab, to, "client")?.is_empty().then_some(()))
    })?;
    check.client.moves(to)?;
    check.flows(to)?;
    check.end()?;
    Ok(())
}
