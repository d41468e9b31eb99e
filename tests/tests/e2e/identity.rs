//! Programs that say that other programs' queue pairs are their own.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;
use verbatim_channel::{
    Answer, ContextRecord, Endpoint, Greeting, Order, QpRecord, RUNTIME_DIR, RoadMap, SOCKET_NAME, VERSION,
};
use verbatim_device::control::{QpAttr, QpCap, QpState, QpType};
use verbatim_e2e::{Running, TestLab, Traffic, VCHECK_PORT, eventually};
use verbatim_seqpacket::Socket;

use crate::Test;
use crate::migration::Check;

/// The first argument of this program when it is to pretend: `pretend PID QPN GID QPN`, its PID in its own namespace (0:
/// the right one), the queue pair that it claims, and the other end of that.
pub const PRETENDER: &str = "pretend";

const HOSTS: &[&str] = &["src", "dst", "peer"];
const LIMIT: Duration = Duration::from_secs(60);
const OPTIONS: &[&str] = &["--op", "all", "-q", "1", "-s", "4096", "--random-size"];

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new(
            "identity::a_partner_that_pretends_gets_nothing",
            HOSTS,
            partner_pretends,
        ),
        Test::new(
            "identity::an_instance_that_pretends_does_not_move",
            HOSTS,
            instance_pretends,
        ),
        Test::new(
            "identity::nobody_greets_in_anothers_name",
            HOSTS,
            greets_as_another,
        ),
    ]
}

/// What a pretender does: greets, says that a queue pair is its own whenever it is asked, and tells what else it is
/// ordered.
pub fn pretend() -> ExitCode {
    match pretends() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("over: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn pretends() -> anyhow::Result<()> {
    let arguments: Vec<_> = std::env::args().skip(2).collect();
    let [pid, qpn, gid, remote_qpn] = &arguments[..] else {
        bail!("pretend PID QPN GID QPN");
    };
    let pid = match pid.parse()? {
        0 => std::process::id(),
        pid => pid,
    };
    let remote = Endpoint {
        gid: gid.parse::<std::net::Ipv6Addr>()?.octets(),
        qpn: remote_qpn.parse()?,
    };
    let own = claimed(qpn.parse()?, remote);
    let socket = Socket::connect(&Path::new(RUNTIME_DIR).join(SOCKET_NAME))?;
    let greeting = Greeting::Process {
        version: VERSION,
        pid,
        program: PRETENDER.to_owned(),
        generation: 0,
        quiesced: false,
    };
    verbatim_channel::send(&socket, &greeting, &[])?;
    println!("greeted");
    loop {
        let (order, _) = verbatim_channel::recv::<Order>(&socket)?;
        println!("ordered: {order:?}");
        let road_map = RoadMap {
            pid,
            version: 1,
            contexts: vec![ContextRecord {
                id: 1,
                qps: vec![own.clone()],
                ..ContextRecord::default()
            }],
            blockers: Vec::new(),
        };
        let answer = match order {
            Order::Describe => Answer::Described(road_map),
            Order::DescribeAll => Answer::DescribedAll {
                road_map,
                made_again: Vec::new(),
            },
            _ => Answer::Error {
                message: "it only pretends".to_owned(),
            },
        };
        verbatim_channel::send(&socket, &answer, &[])?;
    }
}

fn claimed(qpn: u32, remote: Endpoint) -> QpRecord {
    QpRecord {
        qpn,
        pd: 1,
        send_cq: 1,
        recv_cq: 1,
        srq: None,
        qp_type: QpType::Rc,
        cap: QpCap::default(),
        attr: QpAttr {
            state: QpState::Rts,
            ..QpAttr::default()
        },
        physical_qpn: qpn,
        paused: false,
        local_gid: None,
        remote: Some(remote),
        groups: Vec::new(),
    }
}

/// One end of a connection, as its RNIC tells.
#[derive(Debug, Deserialize)]
struct Qp {
    qpn: u32,
    state: String,
    remote: Option<Remote>,
}

#[derive(Debug, Deserialize)]
struct Remote {
    gid: String,
    qpn: u32,
}

/// The arguments with which a pretender claims the only connected queue pair of a host.
fn claim_of(lab: &TestLab, host: &str) -> anyhow::Result<[String; 3]> {
    #[derive(Deserialize)]
    struct Statistics {
        qps: Vec<Qp>,
    }
    let verbatim = lab.tools().verbatim.display().to_string();
    let told = lab
        .start_plain(host, &[&verbatim, "nic", "stat", "--json"])?
        .succeed(LIMIT)?;
    let Statistics { qps } = serde_json::from_str(&told.stdout)?;
    let mut connected = qps.into_iter().filter(|qp| qp.state == "RTS");
    let qp = connected.next().context("no queue pair is connected")?;
    let remote = qp.remote.context("a queue pair without another end")?;
    Ok([qp.qpn.to_string(), remote.gid, remote.qpn.to_string()])
}

fn pretender(lab: &TestLab, host: &str, pid: &str, claim: &[String; 3]) -> anyhow::Result<Running> {
    let program = std::env::current_exe()?.display().to_string();
    let [qpn, gid, remote] = claim;
    lab.start_plain(host, &[&program, PRETENDER, pid, qpn, gid, remote])
}

fn has_greeted(pretender: &Running) -> anyhow::Result<()> {
    eventually("a pretender that has greeted", LIMIT, || {
        Ok(pretender.stdout()?.contains("greeted").then_some(()))
    })
}

/// It tells the very connection that is looked for. The agent takes the RNIC's word on whose it is.
fn partner_pretends(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let claim = claim_of(lab, "peer")?;
    let pretender_on_peer = pretender(lab, "peer", "0", &claim)?;
    has_greeted(&pretender_on_peer)?;
    for to in ["dst", "src"] {
        check.client.moves(to)?;
        check.flows(to)?;
    }
    check.end()?;
    let heard = pretender_on_peer.stdout()?;
    ensure!(!heard.contains("ordered"), "it was asked: {heard}");

    // Nor where nobody else tells it: the other end does not use the guest library's channel.
    let alone = "mkdir /run/alone && ln -s /run/verbatim/nic.sock /run/alone/nic.sock";
    lab.start_plain("peer", &["sh", "-c", alone])?.succeed(LIMIT)?;
    let program = lab.tools().vcheck.display().to_string();
    let server = lab.start("peer", &["env", "VERBATIM_RUNTIME=/run/alone", &program])?;
    lab.listens("peer", 1, VCHECK_PORT)?;
    let address = lab.address("peer")?;
    let argv = [&[program.as_str(), "-D", "600"], OPTIONS, &[&address]].concat();
    let client = lab.instance("src", "lonely", &argv)?;
    Traffic::of(lab, "src")?.flows(1 << 20, LIMIT)?;
    let claim = claim_of(lab, "peer")?;
    let again = pretender(lab, "peer", "0", &claim)?;
    has_greeted(&again)?;
    client
        .migrate("dst")?
        .must_be_rolled_back(&["do not use the guest library"])?;
    let heard = again.stdout()?;
    ensure!(!heard.contains("ordered"), "it was asked: {heard}");
    Traffic::of(lab, "src")?.flows(1 << 20, LIMIT)?;
    client.interrupt()?;
    client.succeed(LIMIT)?;
    server.succeed(LIMIT)?;
    Ok(())
}

/// Were it moved, another program's connection would come along.
fn instance_pretends(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let [qpn, gid, remote] = claim_of(lab, "src")?;
    let program = std::env::current_exe()?.display().to_string();
    let hostile = lab.instance("src", "hostile", &[&program, PRETENDER, "0", &qpn, &gid, &remote])?;
    eventually("a pretender that has greeted", LIMIT, || {
        Ok(hostile.output()?.contains("greeted").then_some(()))
    })?;
    let refused = hostile.migrate("dst")?;
    refused.must_be_rolled_back(&["describes queue pair", "as its own, which is that of process"])?;
    check.flows("src")?;
    check.client.moves("dst")?;
    check.flows("dst")?;
    check.end()?;
    Ok(())
}

/// The number that a process tells must be its own.
fn greets_as_another(lab: &TestLab) -> anyhow::Result<()> {
    let check = Check::start(lab, OPTIONS)?;
    let claim = claim_of(lab, "peer")?;
    // The first process of the host, which is not it.
    let pretender = pretender(lab, "peer", "1", &claim)?.wait(LIMIT)?;
    ensure!(pretender.stdout.contains("over:"), "{}", pretender.output());
    check.client.moves("dst")?;
    check.flows("dst")?;
    check.end()?;
    Ok(())
}
