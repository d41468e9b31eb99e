//! Wait-before-stop in a network that is too bad to wait for: connections are stopped in the middle of their requests, and
//! what was not executed is posted again. A check with ATOMICs sees whatever is executed twice, or lost.

use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{Bandwidth, Instance, Migration, TestLab, Traffic, eventually, left_behind};

use crate::Test;
use crate::migration::Check;

const FOUR_HOSTS: &[&str] = &["src", "dst", "peer", "spare"];
const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(60);
const SOME_BYTES: u64 = 8 << 20;
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
    vec![
        Test::new(
            "drain::cut_in_either_direction",
            FOUR_HOSTS,
            cut_in_either_direction,
        ),
        Test::new("drain::never_waited_for", FOUR_HOSTS, never_waited_for),
        Test::new("drain::both_in_one_instance", HOSTS, both_in_one_instance),
        Test::new(
            "drain::with_a_shared_receive_queue",
            HOSTS,
            with_a_shared_receive_queue,
        ),
        Test::new("drain::stopped_and_rolled_back", HOSTS, stopped_and_rolled_back).injecting_faults(),
    ]
}

/// RoCE packets that a host loses, until this is dropped. Its agent's connections are as they were.
pub struct Loss<'a> {
    lab: &'a TestLab,
    host: &'static str,
}

impl<'a> Loss<'a> {
    /// So many of 100 packets, of those that go out, come in, or both.
    pub fn of(lab: &'a TestLab, host: &'static str, ways: &[&str], percent: u32) -> anyhow::Result<Self> {
        // nft refuses a comparison that is always true.
        let which = match percent {
            100.. => String::new(),
            _ => format!("numgen random mod 100 < {percent} "),
        };
        let mut rules = "add table ip lossy\n".to_owned();
        for way in ways {
            let hook = if *way == "in" { "input" } else { "output" };
            rules += &format!(
                "add chain ip lossy {way} {{ type filter hook {hook} priority 0; }}\n\
                 add rule ip lossy {way} udp dport 4791 {which}drop\n"
            );
        }
        lab.start_plain(host, &["nft", &rules])?.succeed(LIMIT)?;
        Ok(Self { lab, host })
    }
}

impl Drop for Loss<'_> {
    fn drop(&mut self) {
        let healed = self
            .lab
            .start_plain(self.host, &["nft", "delete table ip lossy"])
            .and_then(|running| running.succeed(LIMIT));
        if let Err(error) = healed {
            eprintln!("{error:#}");
        }
    }
}

/// What was done with requests that were not complete.
#[derive(Debug, Default)]
struct Unfinished {
    replayed: u64,
    completed: u64,
}

impl Unfinished {
    fn add(&mut self, migration: &Migration) {
        self.replayed += migration.unfinished_replayed_wrs;
        self.completed += migration.unfinished_completed_wrs;
    }
}

fn moves(check: &Check<'_>, instance: &Instance<'_>, to: &str, limit: &str) -> anyhow::Result<Migration> {
    let migration = instance
        .migrate_with(to, &["--drain-timeout", limit])
        .with_context(|| check.words())?;
    migration.must_be_committed().with_context(|| check.words())?;
    Ok(migration)
}

/// Either end moves while its packets, or those of the other one, or both, do not arrive.
fn cut_in_either_direction(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let mut unfinished = Unfinished::default();
    let client = [
        ("peer", &["out"][..], "dst"),
        ("peer", &["in"], "src"),
        ("peer", &["in", "out"], "dst"),
    ];
    for (host, ways, to) in client {
        let loss = Loss::of(lab, host, ways, 100)?;
        let migration = moves(&check, &check.client, to, "0.3").with_context(|| format!("{ways:?}"))?;
        ensure!(migration.phases_ms["WaitBeforeStop"] >= 300.0, "{migration:?}");
        unfinished.add(&migration);
        drop(loss);
        check.flows(to)?;
    }
    for (host, ways, to) in [("dst", &["out"][..], "spare"), ("dst", &["in", "out"], "peer")] {
        let loss = Loss::of(lab, host, ways, 100)?;
        unfinished.add(&moves(&check, &check.server, to, "0.3").with_context(|| format!("{ways:?}"))?);
        drop(loss);
        check.flows(to)?;
    }
    check.end()?;
    ensure!(
        unfinished.replayed > 0 && unfinished.completed > 0,
        "nothing was cut off: {unfinished:?}"
    );
    Ok(())
}

/// No drain at all: whatever is under way is cut off, by every move, in a network that loses packets.
fn never_waited_for(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let losses = ["src", "dst", "peer", "spare"]
        .into_iter()
        .map(|host| Loss::of(lab, host, &["in"], 2));
    let losses: anyhow::Result<Vec<_>> = losses.collect();
    let losses = losses?;
    let mut unfinished = Unfinished::default();
    for (client_to, server_to) in [
        ("dst", "spare"),
        ("src", "peer"),
        ("dst", "spare"),
        ("src", "peer"),
    ] {
        unfinished.add(&moves(&check, &check.client, client_to, "0")?);
        check.flows(client_to)?;
        unfinished.add(&moves(&check, &check.server, server_to, "0")?);
        check.flows(server_to)?;
    }
    drop(losses);
    check.end()?;
    ensure!(unfinished.replayed > 0, "nothing was under way: {unfinished:?}");
    Ok(())
}

/// Both ends of the connections are stopped and moved together, and so are the ends of two processes on one host. None of
/// their packets arrives from before a move on: on a busy machine all that is posted may be complete when they are stopped.
fn both_in_one_instance(lab: &TestLab) -> anyhow::Result<()> {
    let program = lab.tools().vcheck.display().to_string();
    let script = format!(
        "trap : INT; {program} & server=$!; \
         until {program} --op all -q 2 -s 16384 -n 60000 --bidirectional 127.0.0.1; do \
         test $? = 2 || exit 1; sleep 0.1; done; wait $server"
    );
    let instance = lab.instance("src", "pair", &["sh", "-c", &script])?;
    let words = || instance.output().unwrap_or_default();
    let mut here = "src";
    for to in ["dst", "src"] {
        Traffic::of(lab, here)?
            .flows(SOME_BYTES, LIMIT)
            .with_context(words)?;
        let loss = Loss::of(lab, here, &["out"], 100)?;
        let migration = instance
            .migrate_with(to, &["--drain-timeout", "0"])
            .with_context(words)?;
        drop(loss);
        migration.must_be_committed().with_context(words)?;
        ensure!(migration.unfinished_replayed_wrs > 0, "{migration:?}");
        here = to;
    }
    Traffic::of(lab, here)?
        .flows(SOME_BYTES, LIMIT)
        .with_context(words)?;
    let output = instance.succeed(LIMIT)?.stdout;
    let clean = output.matches("\"verdict\":\"ok\"").count();
    ensure!(clean == 2, "the two sides wrote {output}");
    Ok(())
}

/// The partner's shared receive queue stays where it is, and gets a RECV back that half a message has taken.
fn with_a_shared_receive_queue(lab: &TestLab) -> anyhow::Result<()> {
    const PACKETS: u64 = 1000;
    let test = Bandwidth::start(lab, &["ib_send_bw", "--use-srq", "-q", "4", "-s", "65536"])?;
    let mut here = "src";
    let mut unfinished = Unfinished::default();
    for to in ["dst", "src", "dst"] {
        Traffic::of(lab, here)?.packets_flow(PACKETS, LIMIT)?;
        let migration = test.client.migrate_with(to, &["--drain-timeout", "0"])?;
        migration.must_be_committed()?;
        unfinished.add(&migration);
        here = to;
    }
    Traffic::of(lab, here)?.packets_flow(PACKETS, LIMIT)?;
    test.end()?;
    ensure!(unfinished.replayed > 0, "{unfinished:?}");
    Ok(())
}

/// Whatever fails while connections are stopped: they go on, as if packets had been lost.
fn stopped_and_rolled_back(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    for (host, point, action) in [
        ("src", "source-stop", "fail"),
        ("peer", "partner-stop", "fail"),
        ("peer", "partner-settle", "fail"),
        ("src", "source-quiesce", "fail"),
        ("dst", "destination-restore", "damage"),
    ] {
        let context = || format!("{point} {action}, {}", check.words());
        lab.order_faults(host, &format!("{point} {action}\n"))?;
        let loss = Loss::of(lab, "peer", &["in", "out"], 100)?;
        let migration = check.client.migrate_with("dst", &["--drain-timeout", "0"])?;
        drop(loss);
        lab.order_faults(host, "")?;
        let reasons: &[&str] = if action == "fail" { &[point] } else { &[] };
        migration.must_be_rolled_back(reasons).with_context(context)?;
        check.flows("src").with_context(context)?;
        check.flows("peer").with_context(context)?;
        eventually("a clean destination", LIMIT, || {
            Ok(left_behind(lab, "dst", "client")?.is_empty().then_some(()))
        })
        .with_context(context)?;
    }
    let loss = Loss::of(lab, "peer", &["in", "out"], 100)?;
    let migration = moves(&check, &check.client, "dst", "0")?;
    drop(loss);
    ensure!(migration.unfinished_replayed_wrs > 0, "{migration:?}");
    check.flows("dst")?;
    check.end()?;
    Ok(())
}
