//! Instances that move while they run.

use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{Bandwidth, CheckReport, Instance, Migration, TestLab, Traffic, VCHECK_PORT};

use crate::Test;

const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(60);
/// What must pass for data to be said to flow: many messages on every queue pair.
const SOME_BYTES: u64 = 8 << 20;
/// Longer than any test: a check is interrupted when it has seen enough.
const FOREVER: &str = "7200";

/// All of them.
pub fn tests() -> Vec<Test> {
    let mut tests = vec![
        Test::new("migration::without_rdma", HOSTS, without_rdma),
        Test::new("migration::ib_write_bw_sender", HOSTS, |lab| {
            perftest(lab, Side::Client)
        }),
        Test::new("migration::ib_write_bw_receiver", HOSTS, |lab| {
            perftest(lab, Side::Server)
        }),
        Test::new("migration::partner_outside_of_instances", HOSTS, partner_outside),
        Test::new("migration::both_in_one_instance", HOSTS, |lab| {
            both_in_one_instance(lab, "0", &[])
        }),
        Test::new("migration::towards_the_partner", HOSTS, towards_the_partner),
    ];
    for (name, argv) in PERFTEST {
        for side in [Side::Client, Side::Server] {
            let name = format!("migration::{name}_{}", side.name());
            tests.push(Test::new(name, HOSTS, move |lab| {
                perftest_by_turns(lab, argv, side)
            }));
        }
    }
    for operation in ["send", "write", "write-imm", "read", "mix"] {
        for side in [Side::Client, Side::Server] {
            let name = format!("migration::vcheck_{operation}_{}", side.name());
            tests.push(Test::new(name, HOSTS, move |lab| vcheck(lab, operation, side)));
        }
    }
    tests
}

/// Perftest in ways that each need another object to move. It counts messages or time; with events it can only count messages,
/// and it waits for all of them.
const PERFTEST: &[(&str, &[&str])] = &[
    (
        "send_bw_events",
        &["ib_send_bw", "-e", "-q", "4", "-s", "65536", "-n", "100000"],
    ),
    (
        "send_bw_srq",
        &["ib_send_bw", "--use-srq", "-q", "4", "-s", "65536"],
    ),
    (
        "send_bw_srq_events",
        &[
            "ib_send_bw",
            "--use-srq",
            "-e",
            "-q",
            "4",
            "-s",
            "4096",
            "-n",
            "1000000",
        ],
    ),
    ("atomic_bw", &["ib_atomic_bw", "-q", "4"]),
    ("send_bw_ud", &["ib_send_bw", "-c", "UD", "-s", "4096"]),
    ("send_bw_uc", &["ib_send_bw", "-c", "UC", "-s", "4096"]),
    (
        "write_bw_uc",
        &["ib_write_bw", "-c", "UC", "-q", "4", "-s", "65536"],
    ),
];

/// Which end of a connection moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Client,
    Server,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Server => "server",
        }
    }
}

/// A check that runs between two instances.
pub struct Check<'a> {
    lab: &'a TestLab,
    pub client: Instance<'a>,
    pub server: Instance<'a>,
}

impl<'a> Check<'a> {
    /// Starts the server in an instance on `peer` and the client in one on `src`; returns when data flows.
    pub fn start(lab: &'a TestLab, options: &[&str]) -> anyhow::Result<Self> {
        Self::start_as(lab, "", options)
    }

    /// The same with names that end in `which`.
    pub fn start_as(lab: &'a TestLab, which: &str, options: &[&str]) -> anyhow::Result<Self> {
        Self::start_with(lab, which, &[], options)
    }

    /// The same with options for both sides.
    pub fn start_with(
        lab: &'a TestLab,
        which: &str,
        both: &[&str],
        options: &[&str],
    ) -> anyhow::Result<Self> {
        let program = lab.tools().vcheck.display().to_string();
        let argv = [&[program.as_str(), "--stall-timeout", "60"], both].concat();
        let server = lab.instance("peer", &format!("server{which}"), &argv)?;
        server.listens(VCHECK_PORT)?;
        let address = server.address()?;
        let argv = [&argv[..], &["-D", FOREVER], options, &[&address]].concat();
        let client = lab.instance("src", &format!("client{which}"), &argv)?;
        let check = Self { lab, client, server };
        check.flows("src").with_context(|| check.words())?;
        Ok(check)
    }

    /// Waits until the check's data flows through the RNIC of `host`.
    pub fn flows(&self, host: &str) -> anyhow::Result<()> {
        Traffic::of(self.lab, host)?
            .flows(SOME_BYTES, LIMIT)
            .with_context(|| self.words())
    }

    /// Ends it; both sides must have found nothing wrong.
    pub fn end(self) -> anyhow::Result<(CheckReport, CheckReport)> {
        self.client.interrupt()?;
        let client = self.client.succeed(LIMIT).with_context(|| self.words())?;
        let server = self.server.succeed(LIMIT).with_context(|| self.words())?;
        CheckReport::both_clean(&client, &server)
    }

    /// What both sides have said so far.
    pub fn words(&self) -> String {
        verbatim_e2e::words(&self.client, &self.server)
    }
}

/// A move that took place, of this many connections, is reported as one.
pub fn plausible(migration: &Migration, connections: u64) -> anyhow::Result<()> {
    ensure!(migration.connections == connections, "{migration:?}");
    ensure!(
        migration.service_blackout_ms > 0.0 && migration.service_blackout_ms < migration.total_ms,
        "{migration:?}"
    );
    // The service blackout lies within the other one, and so do the phases between suspension and resumption.
    ensure!(
        connections == 0 || migration.communication_blackout_ms >= migration.service_blackout_ms,
        "{migration:?}"
    );
    ensure!(
        migration.phases_ms.values().all(|time| *time >= 0.0),
        "{migration:?}"
    );
    Ok(())
}

fn without_rdma(lab: &TestLab) -> anyhow::Result<()> {
    let instance = lab.instance(
        "src",
        "counter",
        &[
            "sh",
            "-c",
            "i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done",
        ],
    )?;
    verbatim_e2e::eventually("the first lines", LIMIT, || {
        Ok(instance.output()?.contains("\n2\n").then_some(()))
    })?;
    for to in ["dst", "src"] {
        plausible(&instance.moves(to)?, 0)?;
        let lines = instance.output()?.lines().count();
        verbatim_e2e::eventually("more lines", LIMIT, || {
            Ok((instance.output()?.lines().count() > lines + 5).then_some(()))
        })?;
    }
    // It went on where it was: no line is missing or there twice.
    let output = instance.output()?;
    let complete = &output[..output.rfind('\n').unwrap_or(0)];
    for (index, line) in complete.lines().enumerate() {
        ensure!(line == (index + 1).to_string(), "line {} is {line:?}", index + 1);
    }
    Ok(())
}

fn perftest(lab: &TestLab, side: Side) -> anyhow::Result<()> {
    let test = Bandwidth::start(lab, &["ib_write_bw", "-q", "16", "-s", "65536"])?;
    Traffic::of(lab, "src")?
        .flows(SOME_BYTES, LIMIT)
        .with_context(|| test.words())?;
    let moved = match side {
        Side::Client => &test.client,
        Side::Server => &test.server,
    };
    plausible(&moved.moves("dst")?, 16)?;
    Traffic::of(lab, "dst")?
        .flows(SOME_BYTES, LIMIT)
        .with_context(|| test.words())?;
    test.end()?;
    Ok(())
}

/// Perftest in one of its ways; one side of it moves there and back.
fn perftest_by_turns(lab: &TestLab, argv: &[&str], side: Side) -> anyhow::Result<()> {
    const PACKETS: u64 = 1000;
    let test = Bandwidth::start(lab, argv)?;
    Traffic::of(lab, "src")?
        .packets_flow(PACKETS, LIMIT)
        .with_context(|| test.words())?;
    let (moved, home) = match side {
        Side::Client => (&test.client, "src"),
        Side::Server => (&test.server, "peer"),
    };
    for to in ["dst", home] {
        moved.moves(to).with_context(|| test.words())?;
        Traffic::of(lab, to)?
            .packets_flow(PACKETS, LIMIT)
            .with_context(|| test.words())?;
    }
    test.end()?;
    Ok(())
}

fn vcheck(lab: &TestLab, operation: &str, side: Side) -> anyhow::Result<()> {
    let options = [
        "--op",
        operation,
        "-q",
        "4",
        "-s",
        "65536",
        "--random-size",
        "--bidirectional",
    ];
    let check = Check::start(lab, &options)?;
    let (moved, home) = match side {
        Side::Client => (&check.client, "src"),
        Side::Server => (&check.server, "peer"),
    };
    for to in ["dst", home] {
        let migration = moved.moves(to).with_context(|| check.words())?;
        plausible(&migration, 4)?;
        check.flows(to)?;
    }
    check.end()?;
    Ok(())
}

/// The partner is a plain process of its host, with the guest library but without a container.
fn partner_outside(lab: &TestLab) -> anyhow::Result<()> {
    let program = lab.tools().vcheck.display().to_string();
    let server = lab.start("peer", &[&program])?;
    lab.listens("peer", 1, VCHECK_PORT)?;
    let address = lab.address("peer")?;
    let client = lab.instance(
        "src",
        "client",
        &[&program, "--op", "mix", "-q", "2", "-D", FOREVER, &address],
    )?;
    Traffic::of(lab, "src")?.flows(SOME_BYTES, LIMIT)?;
    plausible(&client.moves("dst")?, 2)?;
    Traffic::of(lab, "dst")?.flows(SOME_BYTES, LIMIT)?;
    client.interrupt()?;
    let client = client.succeed(LIMIT)?;
    CheckReport::both_clean(&client, &server.succeed(LIMIT)?)?;
    Ok(())
}

/// Both ends of the connections are processes of one instance, which moves as a whole.
pub fn both_in_one_instance(lab: &TestLab, gid_index: &str, how: &[&str]) -> anyhow::Result<()> {
    let program = lab.tools().vcheck.display().to_string();
    // The server's status is the instance's if the client's is good.
    let script = format!(
        "trap : INT; {program} -x {gid_index} & server=$!; \
         until {program} -x {gid_index} --op mix -q 2 -s 16384 -n 40000 --bidirectional 127.0.0.1; do \
         test $? = 2 || exit 1; sleep 0.1; done; wait $server"
    );
    let instance = lab.instance("src", "pair", &["sh", "-c", &script])?;
    Traffic::of(lab, "src")?
        .flows(SOME_BYTES, LIMIT)
        .with_context(|| instance.output().unwrap_or_default())?;
    let migration = instance.migrate_with("dst", how)?;
    migration
        .must_be_committed()
        .with_context(|| instance.output().unwrap_or_default())?;
    plausible(&migration, 4)?;
    Traffic::of(lab, "dst")?
        .flows(SOME_BYTES, LIMIT)
        .with_context(|| instance.output().unwrap_or_default())?;
    let output = instance.succeed(LIMIT)?.stdout;
    let clean = output
        .lines()
        .filter(|line| line.contains("\"verdict\":\"ok\""))
        .count();
    ensure!(clean == 2, "the two sides wrote {output}");
    Ok(())
}

/// The instance comes to the host where its partner is, and both share one RNIC from then on.
fn towards_the_partner(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, &["--op", "mix", "-q", "2", "-s", "16384", "--random-size"])?;
    for to in ["peer", "dst"] {
        plausible(&check.client.moves(to).with_context(|| check.words())?, 2)?;
        check.flows(to)?;
    }
    check.end()?;
    Ok(())
}
