//! Connections by other GIDs than the hosts' addresses: those of IPv6, where the hosts' addresses are of IPv4.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde::Deserialize;
use verbatim_e2e::{Bandwidth, Instance, Migration, TestLab, Traffic, VCHECK_PORT};

use crate::Test;
use crate::migration::{Check, both_in_one_instance, plausible};

const HOSTS: &[&str] = &["src", "dst", "peer"];
const FOUR_HOSTS: &[&str] = &["src", "dst", "peer", "spare"];
const LIMIT: Duration = Duration::from_secs(60);
const SOME_BYTES: u64 = 8 << 20;
const PACKETS: u64 = 1000;
const WAIT: &[&str] = &["--method", "wait-before-stop"];
const PAUSE: &[&str] = &["--method", "pause-resume"];
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

/// A kind of GID in the hosts' tables, which begin with the host's address.
#[derive(Debug, Clone, Copy)]
struct Kind {
    name: &'static str,
    index: &'static str,
    /// With what its addresses begin.
    prefix: &'static str,
}

const KINDS: [Kind; 2] = [
    Kind {
        name: "global",
        index: "1",
        prefix: "fd76:",
    },
    Kind {
        name: "link_local",
        index: "2",
        prefix: "fe80:",
    },
];
const GLOBAL: Kind = KINDS[0];

/// All of them. Each kind of GID by one of the methods is in every run.
pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for kind in KINDS {
        for (name, how) in [("wait", WAIT), ("pause", PAUSE)] {
            let often =
                (kind.name, name) == ("global", "wait") || (kind.name, name) == ("link_local", "pause");
            let name = format!("gids::{}_{name}", kind.name);
            let test = Test::new(name, FOUR_HOSTS, move |lab| both_ends(lab, kind, how));
            tests.push(test.only_on_demand(!often));
        }
    }
    for (name, program) in [
        ("uc", &["ib_write_bw", "-c", "UC", "-q", "2"][..]),
        ("ud", &["ib_send_bw", "-c", "UD", "-s", "2048"]),
        (
            "events",
            &["ib_send_bw", "-e", "-q", "4", "-s", "65536", "-n", "100000"],
        ),
    ] {
        let name = format!("gids::perftest_{name}");
        tests.push(Test::new(name, HOSTS, move |lab| perftest(lab, program)).only_on_demand(true));
    }
    for (name, how) in [("wait", WAIT), ("pause", PAUSE)] {
        let name = format!("gids::both_in_one_instance_{name}");
        let test = Test::new(name, HOSTS, move |lab| {
            both_in_one_instance(lab, GLOBAL.index, how)
        });
        tests.push(test.only_on_demand(true));
    }
    tests.push(Test::new("gids::operators_pause", HOSTS, operators_pause));
    tests.push(Test::new(
        "gids::connected_after_a_move",
        FOUR_HOSTS,
        connected_after_a_move,
    ));
    tests.push(Test::new(
        "gids::none_at_the_destination",
        HOSTS,
        none_at_the_destination,
    ));
    tests
}

#[derive(Debug, Deserialize)]
struct Statistics {
    qps: Vec<Qp>,
}

#[derive(Debug, Deserialize)]
struct Qp {
    state: String,
    remote: Option<Remote>,
}

#[derive(Debug, Deserialize)]
struct Remote {
    gid: String,
}

/// All connections at the RNIC of `host`, so many, lead to GIDs of that kind.
fn uses(lab: &TestLab, host: &str, kind: Kind, connections: usize) -> anyhow::Result<()> {
    let verbatim = lab.tools().verbatim.display().to_string();
    let told = lab
        .start_plain(host, &[&verbatim, "nic", "stat", "--json"])?
        .succeed(LIMIT)?;
    let Statistics { qps } = serde_json::from_str(&told.stdout)?;
    let mut remotes = Vec::new();
    for qp in qps.into_iter().filter(|qp| qp.state == "RTS") {
        remotes.push(qp.remote.context("a queue pair without another end")?.gid);
    }
    ensure!(
        remotes.len() == connections && remotes.iter().all(|gid| gid.starts_with(kind.prefix)),
        "on {host}: {remotes:?}"
    );
    Ok(())
}

fn moves(instance: &Instance<'_>, to: &str, how: &[&str]) -> anyhow::Result<Migration> {
    let migration = instance.migrate_with(to, how)?;
    migration.must_be_committed()?;
    ensure!(migration.method == how[1], "{migration:?}");
    Ok(migration)
}

/// Either end moves there and back.
fn both_ends(lab: &TestLab, kind: Kind, how: &[&str]) -> anyhow::Result<()> {
    let both = ["-x", kind.index];
    let check = Check::start_with(lab, "", &both, OPTIONS)?;
    let (client, server) = (&check.client, &check.server);
    for (moved, to) in [
        (client, "dst"),
        (server, "spare"),
        (client, "src"),
        (client, "spare"),
        (server, "peer"),
        (client, "dst"),
    ] {
        plausible(&moves(moved, to, how).with_context(|| check.words())?, 4)?;
        check.flows(to)?;
        for host in [client.row()?.host, server.row()?.host] {
            let connections = if client.row()?.host == server.row()?.host {
                8
            } else {
                4
            };
            uses(lab, &host, kind, connections)?;
        }
    }
    check.end()?;
    Ok(())
}

/// Other transports; either side moves.
fn perftest(lab: &TestLab, program: &[&str]) -> anyhow::Result<()> {
    let argv = [program, &["-x", GLOBAL.index]].concat();
    let test = Bandwidth::start(lab, &argv)?;
    Traffic::of(lab, "src")?
        .packets_flow(PACKETS, LIMIT)
        .with_context(|| test.words())?;
    for (moved, to) in [(&test.client, "dst"), (&test.server, "src")] {
        moves(moved, to, WAIT).with_context(|| test.words())?;
        Traffic::of(lab, to)?
            .packets_flow(PACKETS, LIMIT)
            .with_context(|| test.words())?;
    }
    test.end()?;
    Ok(())
}

/// An operator's pause finds the other ends, also after one has moved.
fn operators_pause(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start_with(lab, "", &["-x", GLOBAL.index], OPTIONS)?;
    for to in ["src", "dst"] {
        if to == "dst" {
            moves(&check.client, to, WAIT).with_context(|| check.words())?;
            check.flows(to)?;
        }
        for name in ["client", "server"] {
            lab.ask(&["pause", name])?;
            let paused = [check.client.row()?.paused, check.server.row()?.paused];
            ensure!(paused == [4, 4], "{paused:?}");
            let bytes = Traffic::of(lab, to)?.payload_bytes();
            lab.ask(&["resume", name])?;
            check.flows(to)?;
            ensure!(Traffic::of(lab, to)?.payload_bytes() >= bytes + SOME_BYTES);
        }
    }
    check.end()?;
    Ok(())
}

/// A program that has moved makes new queue pairs, under the GIDs that it knows, and is found by them.
fn connected_after_a_move(lab: &TestLab) -> anyhow::Result<()> {
    let program = lab.tools().vcheck.display().to_string();
    let argv = [program.as_str(), "-x", GLOBAL.index];
    let server = lab.instance("peer", "server", &argv)?;
    server.listens(VCHECK_PORT)?;
    let address = server.address()?;
    let client = [&argv[..], OPTIONS, &["-D", "600", &address]].concat();
    moves(&server, "dst", WAIT)?;
    let client = lab.instance("src", "client", &client)?;
    let flows = Traffic::of(lab, "dst")?.flows(SOME_BYTES, LIMIT);
    flows.with_context(|| client.output().unwrap_or_default())?;
    uses(lab, "src", GLOBAL, 4)?;
    moves(&client, "spare", PAUSE)?;
    let flows = Traffic::of(lab, "spare")?.flows(SOME_BYTES, LIMIT);
    flows.with_context(|| client.output().unwrap_or_default())?;
    client.interrupt()?;
    let client = client.succeed(LIMIT)?;
    verbatim_e2e::CheckReport::both_clean(&client, &server.succeed(LIMIT)?)?;
    Ok(())
}

/// A destination without such an address is refused before anything is touched, and says what to do.
fn none_at_the_destination(lab: &TestLab) -> anyhow::Result<()> {
    const WORDS: &[&str] = &[
        "global IPv6 address, and the RNIC of dst has none of that kind",
        "give its interface one and start the RNIC there again, or move to a host that has one",
    ];
    let off = "echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6";
    lab.start_plain("dst", &["sh", "-c", off])?.succeed(LIMIT)?;
    lab.lab().kill("dst", "nic")?;
    lab.lab().start("dst", "nic")?;
    let check = Check::start_with(lab, "", &["-x", GLOBAL.index], OPTIONS)?;
    for instance in [&check.client, &check.server] {
        let told = lab
            .verbatim(&["check", instance.name(), "--to", "dst"])?
            .wait(LIMIT)?;
        ensure!(told.code == 1, "{}", told.output());
        for words in WORDS {
            ensure!(told.output().contains(words), "{}", told.output());
        }
        for how in [WAIT, PAUSE] {
            instance.migrate_with("dst", how)?.must_be_rolled_back(WORDS)?;
            check.flows("src")?;
        }
    }
    // Where there is one, all is well.
    moves(&check.client, "peer", PAUSE).with_context(|| check.words())?;
    check.flows("peer")?;
    check.end()?;
    Ok(())
}
