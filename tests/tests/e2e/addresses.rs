//! What an instance may send over its link. The frames come from its network namespace, as those of a container with
//! `CAP_NET_RAW` and `CAP_NET_ADMIN` do.

use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{Instance, Running, TestLab, eventually};

use crate::Test;

const HOSTS: &[&str] = &["src", "dst"];
const LIMIT: Duration = Duration::from_secs(60);
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2e/addresses.py");
const FURTHER: &str = "10.77.250.5";

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("addresses::are_kept_apart", HOSTS, are_kept_apart),
        Test::new("addresses::further", HOSTS, further),
        Test::new("addresses::users", HOSTS, users),
    ]
}

/// A command of this machine's in an instance's network namespace.
fn in_network(lab: &TestLab, instance: &Instance<'_>, argv: &[&str]) -> anyhow::Result<Running> {
    let row = instance.row()?;
    let pid = row.pid.context("it has ended")?;
    let network = format!("--net=/proc/{pid}/ns/net");
    lab.start_plain(&row.host, &[&["nsenter", &network], argv].concat())
}

fn script(lab: &TestLab, instance: &Instance<'_>, arguments: &[&str]) -> anyhow::Result<Running> {
    in_network(
        lab,
        instance,
        &[&["/usr/bin/python3", SCRIPT], arguments].concat(),
    )
}

/// The frames of `from` that arrive at `at`.
fn arrived(lab: &TestLab, from: &Instance<'_>, at: &Instance<'_>) -> anyhow::Result<Vec<String>> {
    let listener = script(lab, at, &["listen", "eth0"])?;
    eventually("a listener", LIMIT, || {
        Ok(listener.stdout()?.contains("listening").then_some(()))
    })?;
    let (own, other) = (from.address()?, at.address()?);
    let octets: std::net::Ipv4Addr = own.parse()?;
    let [a, b, c, d] = octets.octets();
    let mac = format!("02:76:{a:02x}:{b:02x}:{c:02x}:{d:02x}");
    script(lab, from, &["send", "eth0", &own, &mac, &other, FURTHER])?.succeed(LIMIT)?;
    let heard = listener.succeed(LIMIT)?.stdout;
    Ok(heard.lines().skip(1).map(ToOwned::to_owned).collect())
}

const OWN: [&str; 5] = ["first", "own-arp", "own-ipv6", "own-advertisement", "last"];

/// Frames that `addresses.py` sends.
const FRAMES: usize = 17;

/// Nothing passes but frames with the instance's own addresses, and no packet to an RNIC: here, at the next host, after an agent's restart.
fn are_kept_apart(lab: &TestLab) -> anyhow::Result<()> {
    let evil = lab.instance("src", "evil", &["sleep", "1000"])?;
    let other = lab.instance("src", "other", &["sleep", "1000"])?;
    ensure!(arrived(lab, &evil, &other)? == OWN);
    evil.migrate("dst")?.must_be_committed()?;
    let heard = arrived(lab, &evil, &other)?;
    ensure!(heard == OWN, "{heard:?}");
    lab.restart("dst", "agent")?;
    let heard = arrived(lab, &evil, &other)?;
    ensure!(heard == OWN, "{heard:?}");
    // Without the filter all of them arrive.
    let third = lab.instance("dst", "third", &["sleep", "1000"])?;
    let table = ["nft", "delete", "table", "netdev", "verbatim"];
    lab.start_plain("dst", &table)?.succeed(LIMIT)?;
    let heard = arrived(lab, &evil, &third)?;
    ensure!(heard.len() == FRAMES, "{heard:?}");
    lab.restart("dst", "agent")?;
    ensure!(arrived(lab, &evil, &third)? == OWN);
    // Nothing stays behind.
    lab.ask(&["stop", "third"])?;
    lab.ask(&["stop", "evil"])?;
    let left = lab
        .start_plain("dst", &["nft", "list", "table", "netdev", "verbatim"])?
        .succeed(LIMIT)?;
    ensure!(!left.stdout.contains("chain"), "{}", left.stdout);
    Ok(())
}

/// An address that an instance was allowed passes, before and after a move. `check` names one that it gave itself.
fn further(lab: &TestLab) -> anyhow::Result<()> {
    let options = ["--name", "two", "--allow-address", FURTHER, "--"];
    let two = Instance::run(lab, "src", &options, &["sleep", "1000"])?;
    let other = lab.instance("src", "other", &["sleep", "1000"])?;
    let expected = [
        "first",
        "own-arp",
        "own-ipv6",
        "own-advertisement",
        "further",
        "last",
    ];
    let heard = arrived(lab, &two, &other)?;
    ensure!(heard == expected, "{heard:?}");

    for address in [FURTHER, "10.77.250.6"] {
        let address = format!("{address}/16");
        in_network(lab, &two, &["ip", "address", "add", &address, "dev", "eth0"])?.succeed(LIMIT)?;
    }
    let said = lab.verbatim(&["check", "two", "--to", "dst"])?.wait(LIMIT)?;
    let named = |address: &str| said.output().contains(&format!("its address {address}"));
    ensure!(named("10.77.250.6") && !named(FURTHER), "{}", said.output());

    two.migrate("dst")?.must_be_committed()?;
    let heard = arrived(lab, &two, &other)?;
    ensure!(heard == expected, "{heard:?}");

    // It is the instance's alone.
    let again = [
        "run",
        "--host",
        "dst",
        "--name",
        "third",
        "--allow-address",
        FURTHER,
        "--",
        "true",
    ];
    let refused = lab.refused(&again)?;
    ensure!(refused.contains("is taken by two"), "{refused}");
    let wrong = [
        "run",
        "--host",
        "dst",
        "--name",
        "third",
        "--allow-address",
        "127.0.0.1",
        "--",
        "true",
    ];
    let refused = lab.refused(&wrong)?;
    ensure!(refused.contains("127.0.0.1 is no address"), "{refused}");
    Ok(())
}

/// A user of the host sends nothing to RNICs, root does. The rules come again with the next RNIC.
fn users(lab: &TestLab) -> anyhow::Result<()> {
    let target = lab.address("dst")?;
    let send = format!(
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x' * 64, ('{target}', 4791))"
    );
    let nobody = [
        "setpriv",
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
    ];
    let python = ["/usr/bin/python3", "-c", &send];
    let refused = |lab: &TestLab| -> anyhow::Result<()> {
        let said = lab
            .start_plain("src", &[&nobody[..], &python].concat())?
            .wait(LIMIT)?;
        ensure!(
            said.code == 1 && said.stderr.contains("Operation not permitted"),
            "{}",
            said.output()
        );
        lab.start_plain("src", &python)?.succeed(LIMIT)?;
        Ok(())
    };
    refused(lab)?;
    // Other ports are theirs.
    let other = send.replace("4791", "9999");
    lab.start_plain(
        "src",
        &[&nobody[..], &["/usr/bin/python3", "-c", &other]].concat(),
    )?
    .succeed(LIMIT)?;
    lab.restart("src", "nic")?;
    refused(lab)
}
