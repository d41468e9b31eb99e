//! Programs that connect by address and port, with Debian's own librdmacm, between two hosts.

use std::time::Duration;

use anyhow::ensure;
use rustix::process::Signal;
use verbatim_e2e::{Finished, Running, TestLab, Turns, eventually};

use crate::Test;

const HOSTS: &[&str] = &["src", "peer"];
const LIMIT: Duration = Duration::from_secs(60);
/// How long a server may take until it listens, which nothing tells: connections are refused until then.
const LISTENS_WITHIN: Duration = Duration::from_secs(20);
/// A second, and what a busy machine adds. Without a word of the other host it is a hundred seconds.
const GIVES_UP_WITHIN: Duration = Duration::from_secs(20);
/// With `-R` perftest's server listens for the connection by which the two sides agree, and again for those that are measured.
pub const PERFTEST_LISTENS: u32 = 2;

/// All of them.
pub fn tests() -> Vec<Test> {
    // Both sides' arguments, without the client's of where the server is.
    let both_end_well: &[(&str, &[&str])] = &[
        ("ucmatose", &["ucmatose", "-c", "8", "-C", "20", "-S", "2000"]),
        ("ucmatose_migrates_ids", &["ucmatose", "-c", "4", "-m"]),
        ("udaddy", &["udaddy", "-c", "4", "-C", "20"]),
        ("rdma_client", &["rdma_client"]),
        (
            "rstream",
            &["rstream", "-S", "65536", "-C", "50", "-I", "4", "-T", "v"],
        ),
        (
            "riostream",
            &["riostream", "-S", "65536", "-C", "50", "-I", "4", "-T", "v"],
        ),
    ];
    let mut tests = vec![
        Test::new("rdma_cm::rping", HOSTS, rping),
        Test::new("rdma_cm::perftest", HOSTS, perftest),
        Test::new("rdma_cm::nobody_listens", HOSTS, nobody_listens),
        Test::new("rdma_cm::nobody_is_there", HOSTS, nobody_is_there),
        Test::new("rdma_cm::server_is_killed", HOSTS, server_is_killed),
        Test::new("rdma_cm::rnic_is_killed", HOSTS, rnic_is_killed),
    ];
    for (name, argv) in both_end_well {
        tests.push(Test::new(format!("rdma_cm::{name}"), HOSTS, move |lab| {
            let server = match argv[0] {
                "rdma_client" => &["rdma_server"],
                _ => *argv,
            };
            let address = lab.address("peer")?;
            meet(lab, server, &[*argv, &["-s", &address]].concat()).map(drop)
        }));
    }
    tests
}

/// Runs a server in `peer` and a client in `src`, which asks once the server listens. Both must end well.
fn meet(lab: &TestLab, server: &[&str], client: &[&str]) -> anyhow::Result<(Finished, Finished)> {
    Turns::of(1)?.meet(lab, ("peer", server), ("src", client))
}

/// Each side looks at the content that it gets (`-V`).
fn rping(lab: &TestLab) -> anyhow::Result<()> {
    let address = lab.address("peer")?;
    let common = ["-C", "200", "-S", "1000", "-V"];
    for own_queue_pair in [&[][..], &["-q"]] {
        let server = [&["rping", "-s", "-a", "0.0.0.0"], &common[..], own_queue_pair].concat();
        let client = [&["rping", "-c", "-a", &address], &common[..], own_queue_pair].concat();
        let (client, server) = meet(lab, &server, &client)?;
        for side in [client, server] {
            ensure!(!side.stderr.contains("data mismatch"), "{}", side.output());
        }
    }
    Ok(())
}

fn perftest(lab: &TestLab) -> anyhow::Result<()> {
    let address = lab.address("peer")?;
    for argv in [
        &["ib_write_bw", "-R", "-n", "2000"][..],
        &["ib_read_bw", "-R", "-n", "2000", "-q", "4"],
        &["ib_send_lat", "-R", "-n", "2000", "-c", "UD"],
    ] {
        let asks = [argv, &[&address]].concat();
        let (client, _) = Turns::of(PERFTEST_LISTENS)?.meet(lab, ("peer", argv), ("src", &asks))?;
        let counted = |line: &str| {
            line.split_ascii_whitespace()
                .nth(1)
                .is_some_and(|n| n == "2000" || n == "8000")
        };
        ensure!(client.stdout.lines().any(counted), "no result{}", client.output());
    }
    Ok(())
}

fn nobody_listens(lab: &TestLab) -> anyhow::Result<()> {
    let address = lab.address("peer")?;
    let refused = lab.start("src", &["rping", "-c", "-a", &address])?.wait(LIMIT)?;
    ensure!(refused.code != 0, "{}", refused.output());
    // IBA Vol 1 table 111: invalid service id.
    ensure!(
        refused.stderr.contains("RDMA_CM_EVENT_REJECTED, error 8"),
        "{}",
        refused.output()
    );
    Ok(())
}

/// An instance's own address has no RNIC: a request there ends soon, from another host and from an instance.
fn nobody_is_there(lab: &TestLab) -> anyhow::Result<()> {
    let server = lab.instance("peer", "server", &["rping", "-s", "-a", "0.0.0.0"])?;
    let address = server.address()?;
    let unreachable = |output: &str| -> anyhow::Result<()> {
        ensure!(output.contains("RDMA_CM_EVENT_UNREACHABLE"), "{output}");
        Ok(())
    };
    let asks = ["rping", "-c", "-a", address.as_str()];
    let client = lab.start("src", &asks)?.wait(GIVES_UP_WITHIN)?;
    unreachable(&client.stderr)?;

    let client = lab.instance("src", "client", &asks)?;
    let waited = lab.verbatim(&["wait", client.name()])?.wait(GIVES_UP_WITHIN)?;
    ensure!(waited.code != 0, "{}", client.output()?);
    unreachable(&client.output()?)
}

/// A client that pings without an end, once it does.
fn endless_pings(lab: &TestLab) -> anyhow::Result<(Running, Running)> {
    let address = lab.address("peer")?;
    let mut server = lab.start("peer", &["rping", "-s", "-a", "0.0.0.0"])?;
    let mut client = lab.start("src", &["rping", "-c", "-a", &address, "-v"])?;
    eventually("a ping", LISTENS_WITHIN, || {
        if client.has_ended()? {
            ensure!(!server.has_ended()?, "the server has ended");
            client = lab.start("src", &["rping", "-c", "-a", &address, "-v"])?;
        }
        Ok(client.stdout()?.contains("ping data").then_some(()))
    })?;
    Ok((server, client))
}

/// Whose program is gone, whose connections are: its RNIC says so.
fn server_is_killed(lab: &TestLab) -> anyhow::Result<()> {
    let (server, client) = endless_pings(lab)?;
    server.signal(Signal::KILL)?;
    let client = client.wait(LIMIT)?;
    ensure!(client.stderr.contains("DISCONNECT EVENT"), "{}", client.output());
    drop(server);
    Ok(())
}

/// A program whose RNIC is gone gets an error from its channel, and does not wait for ever.
fn rnic_is_killed(lab: &TestLab) -> anyhow::Result<()> {
    let (server, _client) = endless_pings(lab)?;
    lab.restart("peer", "nic")?;
    let server = server.wait(LIMIT)?;
    ensure!(server.code != 0, "{}", server.output());
    Ok(())
}
