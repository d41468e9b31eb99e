//! Programs that connect by address and port, with Debian's own librdmacm, move in the middle of it: there and back.

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use verbatim_e2e::{Bandwidth, Instance, Migration, PYTHON, TestLab, Traffic, Turns, eventually, text_of};

use crate::Test;
use crate::rdma_cm::PERFTEST_LISTENS;

pub const HOSTS: &[&str] = &["src", "dst", "peer"];
pub const LIMIT: Duration = Duration::from_secs(90);
/// How long a server may take until it listens, which nothing tells: connections are refused until then.
pub const LISTENS_WITHIN: Duration = Duration::from_secs(20);
/// Packets of a connection that works.
const SOME: u64 = 100;
/// Packets of many that work: some of each.
const MANY: u64 = 2000;

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("rdma_cm::moves_server", HOSTS, |lab| pings(lab, &["server"])),
        Test::new("rdma_cm::moves_client", HOSTS, |lab| pings(lab, &["client"])),
        Test::new("rdma_cm::moves_both", HOSTS, |lab| {
            pings(lab, &["server", "client"])
        }),
        Test::new("rdma_cm::moves_paused", HOSTS, paused),
        Test::new("rdma_cm::moves_listener", HOSTS, listener),
        Test::new("rdma_cm::moves_asking", HOSTS, asking),
        Test::new("rdma_cm::moves_many", HOSTS, many),
        Test::new("rdma_cm::moves_datagrams", HOSTS, datagrams),
        Test::new("rdma_cm::moves_perftest", HOSTS, perftest),
        Test::new("rdma_cm::moves_back_undone", HOSTS, undone).injecting_faults(),
        Test::new("rdma_cm::port_is_taken", HOSTS, port_is_taken),
    ]
}

/// A client on `peer` that is connected: of a server that may not listen yet, so that it is started again while it ends.
pub fn client_of<'a>(lab: &'a TestLab, name: &str, argv: &[&str]) -> anyhow::Result<Instance<'a>> {
    let traffic = Traffic::of(lab, "peer")?;
    let (begun, mut attempts) = (Instant::now(), 0..);
    while begun.elapsed() < LISTENS_WITHIN {
        let before = traffic.packets();
        let client = lab.instance("peer", &format!("{name}{}", attempts.next().unwrap_or(0)), argv)?;
        let connected = eventually("that the client is connected, or ends", LIMIT, || {
            if traffic.packets() > before + SOME {
                return Ok(Some(true));
            }
            Ok((client.row()?.state == "exited").then_some(false))
        })?;
        if connected {
            return Ok(client);
        }
    }
    bail!("`{argv:?}` does not connect");
}

/// Two programs that send each other what both look at, until one of them is told to end.
fn both_ping<'a>(lab: &'a TestLab) -> anyhow::Result<(Instance<'a>, Instance<'a>)> {
    let server = lab.instance(
        "src",
        "server",
        &["rping", "-s", "-a", "0.0.0.0", "-V", "-S", "1000"],
    )?;
    let address = lab.address("src")?;
    let client = client_of(
        lab,
        "client",
        &["rping", "-c", "-a", &address, "-V", "-S", "1000"],
    )?;
    Ok((server, client))
}

/// The client ends, and the server is told, wherever both are.
fn end_well(server: &Instance<'_>, client: &Instance<'_>) -> anyhow::Result<()> {
    client.kill()?;
    eventually("that the server is told", LIMIT, || {
        Ok(server.output()?.contains("DISCONNECT EVENT").then_some(()))
    })?;
    for side in [server, client] {
        let output = side.output()?;
        ensure!(
            !output.contains("mismatch") && !output.contains("failed"),
            "{output}"
        );
    }
    Ok(())
}

fn pings(lab: &TestLab, movers: &[&str]) -> anyhow::Result<()> {
    let (server, client) = both_ping(lab)?;
    let traffic = |host| -> anyhow::Result<()> { Traffic::of(lab, host)?.packets_flow(SOME, LIMIT) };
    for mover in movers {
        let (instance, home) = match *mover {
            "server" => (&server, "src"),
            _ => (&client, "peer"),
        };
        for to in ["dst", home, "dst"] {
            instance.moves(to)?;
            traffic(to)?;
        }
        if movers.len() > 1 {
            instance.moves(home)?;
            traffic(home)?;
        }
    }
    end_well(&server, &client)
}

/// By the other method, too.
fn paused(lab: &TestLab) -> anyhow::Result<()> {
    let (server, client) = both_ping(lab)?;
    for to in ["dst", "src"] {
        let report = server.migrate_with(to, &["--method", "pause-resume"])?;
        report.must_be_committed()?;
        Traffic::of(lab, to)?.packets_flow(SOME, LIMIT)?;
    }
    end_well(&server, &client)
}

/// Who waits for connections gets them at the address that it has always had.
fn listener(lab: &TestLab) -> anyhow::Result<()> {
    let address = lab.address("src")?;
    let turns = Turns::of(1)?;
    for (name, moves) in [
        ("once", &["dst"][..]),
        ("twice", &["dst", "src"]),
        ("on", &["dst", "peer"]),
    ] {
        let server = listener_of(
            lab,
            &turns,
            name,
            &["rping", "-s", "-a", "0.0.0.0", "-C", "100", "-V"],
        )?;
        for to in moves {
            server.moves(to)?;
        }
        let argv = ["rping", "-c", "-a", &address, "-C", "100", "-V"];
        lab.start("peer", &argv)?.succeed(LIMIT)?;
        server.succeed(LIMIT)?;
    }
    Ok(())
}

/// A server on `src`, once it listens. The turns are to be there as long as it is.
pub fn listener_of<'a>(
    lab: &'a TestLab,
    turns: &Turns,
    name: &str,
    argv: &[&str],
) -> anyhow::Result<Instance<'a>> {
    let server = turns.instance(lab, "src", name, argv)?;
    Turns::listens(&server, 1)?;
    Ok(server)
}

/// Who has asked for a connection and is not answered yet.
fn asking(lab: &TestLab) -> anyhow::Result<()> {
    let address = lab.address("peer")?;
    let server = lab.instance("peer", "server", &["rping", "-s", "-P", "-a", "0.0.0.0"])?;
    let signal = |signal: &str| -> anyhow::Result<()> {
        let pid = server.row()?.pid.context("the server has ended")?.to_string();
        lab.start_plain("peer", &["kill", signal, &pid])?.succeed(LIMIT)?;
        Ok(())
    };
    eventually("that the server listens", LISTENS_WITHIN, || {
        let probe = ["rping", "-c", "-a", &address, "-C", "1"];
        Ok((lab.start("src", &probe)?.wait(LIMIT)?.code == 0).then_some(()))
    })?;
    signal("-STOP")?;
    let traffic = Traffic::of(lab, "peer")?;
    let before = traffic.packets();
    let client = lab.instance(
        "src",
        "client",
        &["rping", "-c", "-a", &address, "-C", "100", "-V"],
    )?;
    // The request. What has come before is counted from, since the next one would be the request's repetition.
    traffic.has_had(before + 1, LIMIT)?;
    for to in ["dst", "src", "dst"] {
        client.moves(to)?;
    }
    signal("-CONT")?;
    client.succeed(LIMIT)?;
    Ok(())
}

/// It moves there and back while it and its client are at it. What it is connected by must not end by itself.
fn there_and_back(lab: &TestLab, server: &Instance<'_>, client: &Instance<'_>) -> anyhow::Result<()> {
    for to in ["dst", "src"] {
        let words = || verbatim_e2e::words(client, server);
        server.moves(to).with_context(words)?;
        Traffic::of(lab, to)?
            .packets_flow(MANY, LIMIT)
            .with_context(words)?;
    }
    Ok(())
}

/// They go on until the client is told to end; each looks at each message that it gets.
fn many(lab: &TestLab) -> anyhow::Result<()> {
    let text = text_of("connections.py");
    let argv = [PYTHON, "-c", &text, "64"];
    let server = lab.instance("src", "server", &argv)?;
    let address = lab.address("src")?;
    let client = client_of(lab, "client", &[&argv[..], &[&address]].concat())?;
    there_and_back(lab, &server, &client)?;
    client.interrupt()?;
    for side in [&client, &server] {
        let said = side.succeed(LIMIT)?.stdout;
        ensure!(
            said.contains("\"connections\": 64") && said.contains("\"verdict\": \"ok\""),
            "{said}"
        );
    }
    Ok(())
}

fn perftest(lab: &TestLab) -> anyhow::Result<()> {
    let address = lab.address("src")?;
    let argv = [&["ib_write_bw", "-R", "-u", "21"], &Bandwidth::ENDLESS[..]].concat();
    let turns = Turns::of(PERFTEST_LISTENS)?;
    let server = turns.instance(lab, "src", "server", &argv)?;
    let client = turns.instance(lab, "peer", "client", &[&argv[..], &[&address]].concat())?;
    turns.take(&server, &client)?;
    let test = Bandwidth::of(lab, client, server, true)?;
    there_and_back(lab, &test.server, &test.client)?;
    test.end()?;
    Ok(())
}

/// Who waits for questions after a queue pair of datagrams is asked where it was.
fn datagrams(lab: &TestLab) -> anyhow::Result<()> {
    let address = lab.address("src")?;
    let argv = ["udaddy", "-c", "4", "-C", "20"];
    let turns = Turns::of(1)?;
    for (name, moves) in [("once", &["dst"][..]), ("twice", &["dst", "src"])] {
        // A client that finds half of it would take connections that the next one lacks.
        let server = listener_of(lab, &turns, name, &argv)?;
        for to in moves {
            server.moves(to)?;
        }
        let client = [&argv[..], &["-s", &address]].concat();
        eventually("that the client ends well", LIMIT, || {
            Ok((lab.start("peer", &client)?.wait(LIMIT)?.code == 0).then_some(()))
        })?;
        server.succeed(LIMIT)?;
    }
    Ok(())
}

/// A move that fails in its last step before the decision leaves all as it was: a connection, and who waits for more.
fn undone(lab: &TestLab) -> anyhow::Result<()> {
    let (server, client) = both_ping(lab)?;
    let waiting = lab.instance(
        "src",
        "waiting",
        &["rping", "-s", "-P", "-a", "0.0.0.0", "-p", "7999"],
    )?;
    let address = lab.address("src")?;
    let probe = ["rping", "-c", "-a", &address, "-p", "7999", "-C", "10", "-V"];
    let works = || {
        eventually("that the listener answers", LISTENS_WITHIN, || {
            Ok((lab.start("peer", &probe)?.wait(LIMIT)?.code == 0).then_some(()))
        })
    };
    works()?;
    for (host, order) in [
        ("src", "source-freeze damage\n"),
        ("dst", "destination-restore damage\n"),
        ("dst", "destination-commit fail\n"),
    ] {
        lab.order_faults(host, order)?;
        for instance in [&server, &waiting] {
            let report: Migration = instance.migrate("dst")?;
            report.must_be_rolled_back(&[])?;
        }
        lab.order_faults(host, "")?;
        Traffic::of(lab, "peer")?.packets_flow(SOME, LIMIT)?;
        works()?;
    }
    server.moves("dst")?;
    waiting.moves("dst")?;
    Traffic::of(lab, "dst")?.packets_flow(SOME, LIMIT)?;
    works()?;
    end_well(&server, &client)
}

/// Somebody else has the port there: it is said before anything is touched.
fn port_is_taken(lab: &TestLab) -> anyhow::Result<()> {
    let turns = Turns::of(1)?;
    let server = listener_of(
        lab,
        &turns,
        "server",
        &["rping", "-s", "-a", "0.0.0.0", "-C", "100", "-V"],
    )?;
    let mut other = lab.start("dst", &["rping", "-s", "-a", "0.0.0.0"])?;
    let report = eventually("that the port is taken", LISTENS_WITHIN, || {
        ensure!(!other.has_ended()?, "it has ended");
        let report = server.migrate("dst")?;
        if report.must_be_committed().is_ok() {
            // The other was not there yet.
            server.moves("src")?;
            return Ok(None);
        }
        Ok(Some(report))
    })?;
    report.must_be_rolled_back(&["another program's here"])?;
    let address = lab.address("src")?;
    let argv = ["rping", "-c", "-a", &address, "-C", "100", "-V"];
    lab.start("peer", &argv)?.succeed(LIMIT)?;
    server.succeed(LIMIT)?;
    Ok(())
}
