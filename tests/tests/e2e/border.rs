//! What a host's users, tenants and containers cannot send to a neighbour's queue pair on another host, whose partner is on theirs.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::Deserialize;
use tempfile::TempDir;
use verbatim_e2e::{Running, TestLab, Traffic, VCHECK_PORT, eventually};
use verbatim_nic::NicCounters;

use crate::Test;

const HOSTS: &[&str] = &["src", "peer"];
const LIMIT: Duration = Duration::from_secs(120);
const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2e/forger.c");
const SOME_BYTES: u64 = 8 << 20;

/// Packets that are forged by sockets.
const FORGED: u32 = 1 << 20;

/// Messages that queue pairs of a tenant's are given, in at most half a minute.
const MESSAGES: u32 = 1 << 16;

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("border::sockets", HOSTS, sockets),
        Test::new("border::queue_pairs", HOSTS, queue_pairs),
    ]
}

/// The program that forges packets.
struct Forger(TempDir);

/// What it says.
#[derive(Debug, Deserialize)]
struct Said {
    tried: u32,
    refused: u32,
}

impl Forger {
    fn build() -> anyhow::Result<Self> {
        // Not `/tmp`, of which hosts have their own, and readable by every user.
        let mode = std::fs::Permissions::from_mode(0o755);
        let forger = Self(
            tempfile::Builder::new()
                .permissions(mode)
                .tempdir_in("/var/tmp")?,
        );
        let mut cc = Command::new("cc");
        cc.args([
            "-Wall",
            "-Werror",
            "-O1",
            "-o",
            &forger.path(),
            SOURCE,
            "-libverbs",
        ]);
        Running::start("cc forger.c", cc)?.succeed(LIMIT)?;
        Ok(forger)
    }

    fn path(&self) -> String {
        self.0.path().join("forger").display().to_string()
    }
}

fn said(running: Running) -> anyhow::Result<Said> {
    let finished = running.succeed(LIMIT)?;
    serde_json::from_str(&finished.stdout).with_context(|| finished.output())
}

/// What the RNIC of a host tells.
#[derive(Debug, Deserialize)]
struct Statistics {
    device: BTreeMap<String, u64>,
    qps: Vec<Qp>,
}

#[derive(Debug, Deserialize)]
struct Qp {
    qpn: u32,
    state: String,
}

impl Statistics {
    fn of(lab: &TestLab, host: &str) -> anyhow::Result<Self> {
        let program = lab.tools().verbatim.display().to_string();
        let told = lab
            .start_plain(host, &[&program, "nic", "stat", "--json"])?
            .succeed(LIMIT)?;
        serde_json::from_str(&told.stdout).with_context(|| told.output())
    }
}

/// A connection of two programs, and the number of the queue pair at `peer`.
struct Victim {
    _ends: [Running; 2],
    qpn: u32,
}

impl Victim {
    fn start(lab: &TestLab) -> anyhow::Result<Self> {
        let program = lab.tools().vcheck.display().to_string();
        let server = lab.start("peer", &[&program, "--stall-timeout", "100"])?;
        lab.listens("peer", 1, VCHECK_PORT)?;
        let address = lab.address("peer")?;
        let options = ["--stall-timeout", "100", "--op", "write", "-q", "1", "-D", "600"];
        let client = lab.start(
            "src",
            &[&[program.as_str()], &options[..], &[address.as_str()]].concat(),
        )?;
        Traffic::of(lab, "peer")?.flows(SOME_BYTES, LIMIT)?;
        let qps = Statistics::of(lab, "peer")?.qps;
        let connected: Vec<_> = qps
            .iter()
            .filter(|qp| qp.state.eq_ignore_ascii_case("rts"))
            .collect();
        ensure!(connected.len() == 1, "{connected:?}");
        Ok(Self {
            _ends: [client, server],
            qpn: connected[0].qpn,
        })
    }

    /// Gives both programs a signal.
    fn signal(lab: &TestLab, signal: &str) -> anyhow::Result<()> {
        for host in HOSTS {
            let kill = format!("kill -{signal} $(pidof vcheck)");
            lab.start_plain(host, &["sh", "-ec", &kill])?.succeed(LIMIT)?;
        }
        Ok(())
    }

    /// Nothing is under way.
    fn rest(&self, lab: &TestLab, traffic: &Traffic) -> anyhow::Result<()> {
        Self::signal(lab, "STOP")?;
        let mut before = traffic.packets();
        eventually("a connection at rest", LIMIT, || {
            std::thread::sleep(Duration::from_millis(300));
            let now = traffic.packets();
            Ok((std::mem::replace(&mut before, now) == now).then_some(()))
        })
    }

    fn go_on(&self, lab: &TestLab, traffic: &Traffic) -> anyhow::Result<()> {
        Self::signal(lab, "CONT")?;
        traffic.flows(SOME_BYTES, LIMIT)
    }
}

/// What an RNIC has counted of packets that were nobody's, or not as they must be.
fn strange(counters: NicCounters) -> [u64; 5] {
    let NicCounters {
        rx_icrc_errors,
        rx_malformed,
        rx_unknown_qp,
        rx_wrong_source,
        rx_dropped,
        ..
    } = counters;
    [
        rx_icrc_errors,
        rx_malformed,
        rx_unknown_qp,
        rx_wrong_source,
        rx_dropped,
    ]
}

/// A user's process by a UDP and by a raw socket, a container with `CAP_NET_RAW` by a packet socket. The packets have a wrong ICRC: one that
/// passed would be counted. Root's do pass.
fn sockets(lab: &TestLab) -> anyhow::Result<()> {
    let forger = Forger::build()?;
    let victim = Victim::start(lab)?;
    let traffic = Traffic::of(lab, "peer")?;
    let before = strange(traffic.counters());
    let (program, address) = (forger.path(), lab.address("peer")?);
    let (qpn, count) = (victim.qpn.to_string(), FORGED.to_string());
    let nobody = [
        "setpriv",
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
    ];
    for way in ["udp", "raw"] {
        let forge = [program.as_str(), way, &address, &qpn, &count];
        let said = said(lab.start_plain("src", &[&nobody[..], &forge].concat())?)?;
        ensure!((said.tried, said.refused) == (FORGED, FORGED), "{way}: {said:?}");
    }
    traffic.flows(SOME_BYTES, LIMIT)?;

    let container = lab.instance("src", "evil", &["sleep", "1000"])?;
    let pid = container.row()?.pid.context("it has ended")?;
    let network = format!("--net=/proc/{pid}/ns/net");
    let source = lab.address("src")?;
    let forge = [
        program.as_str(),
        "frames",
        "eth0",
        &source,
        &address,
        &qpn,
        &count,
    ];
    let said_of_frames = said(lab.start_plain("src", &[&["nsenter", &network], &forge[..]].concat())?)?;
    ensure!(said_of_frames.tried == FORGED, "{said_of_frames:?}");
    traffic.flows(SOME_BYTES, LIMIT)?;
    let after = strange(traffic.counters());
    ensure!(after == before, "{after:?} after {before:?}");

    // Whoever may send is seen.
    let passed = said(lab.start_plain("src", &[&program, "udp", &address, &qpn, "1000"])?)?;
    ensure!((passed.tried, passed.refused) == (1000, 0), "{passed:?}");
    eventually("packets with a wrong ICRC", LIMIT, || {
        Ok((traffic.counters().rx_icrc_errors > before[0]).then_some(()))
    })?;
    traffic.flows(SOME_BYTES, LIMIT)
}

/// A tenant's queue pairs name the neighbour's. Not a packet of them arrives, and each gets no answer. Without an agent there is nobody to
/// ask, and they do arrive.
fn queue_pairs(lab: &TestLab) -> anyhow::Result<()> {
    let forger = Forger::build()?;
    let gid = |address: &str| format!("::ffff:{address}");
    let forge = |victim: &Victim, messages: u32| -> anyhow::Result<Said> {
        let (gid, qpn) = (gid(&lab.address("peer")?), victim.qpn.to_string());
        said(lab.start("src", &[&forger.path(), "qp", &gid, &qpn, &messages.to_string()])?)
    };
    let victim = Victim::start(lab)?;
    let traffic = Traffic::of(lab, "peer")?;
    victim.rest(lab, &traffic)?;
    let before = traffic.packets();
    let denied = forge(&victim, MESSAGES)?;
    ensure!(
        denied.tried > 1000 && denied.refused == denied.tried,
        "{denied:?}"
    );
    ensure!(
        traffic.packets() == before,
        "{} packets of {} messages have arrived",
        traffic.packets() - before,
        denied.tried
    );
    victim.go_on(lab, &traffic)?;
    let device = Statistics::of(lab, "src")?.device;
    let counted = |name: &str| device.get(name).copied().unwrap_or(0);
    ensure!(
        counted("peers_refused") > 0 && counted("unconfirmed_packets") > 0,
        "{device:?}"
    );
    drop(victim);

    for host in HOSTS {
        lab.lab().kill(host, "agent")?;
        lab.restart(host, "nic")?;
    }
    let victim = Victim::start(lab)?;
    let traffic = Traffic::of(lab, "peer")?;
    victim.rest(lab, &traffic)?;
    let before = traffic.packets();
    forge(&victim, 1024)?;
    ensure!(
        traffic.packets() > before,
        "nothing has arrived without an agent either"
    );
    Ok(())
}
