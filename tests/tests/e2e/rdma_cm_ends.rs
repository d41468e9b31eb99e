//! Programs of librdmacm that have so much to do and end then: their servers move in the middle of it, and both sides end well.
//!
//! None of them can be told when to end, and none says how far it is. What is too little for a machine is done before the last move;
//! so more of it is tried.

use anyhow::{Context, bail, ensure};
use rustix::process::Signal;
use verbatim_e2e::{Instance, PYTHON, TestLab, Traffic, Turns, eventually, text_of};

use crate::Test;
use crate::rdma_cm_moves::{HOSTS, LIMIT, LISTENS_WITHIN, client_of, listener_of};

/// Where a server goes while its client is at it.
const WAY: [&str; 2] = ["dst", "src"];
/// So often there is four times as much to do.
const ATTEMPTS: u32 = 4;
/// So many connections a server of many has. The RNIC has 16,384 queue pairs, of which those of one attempt are all given back before the next. What is too little for a
/// machine at its most is tried again: a move may have waited for something else.
const CONNECTIONS: [u32; 5] = [1000, 4000, 12_000, 12_000, 12_000];

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new("rdma_cm::moves_rsockets", HOSTS, |lab| rsockets(lab, "rstream")),
        Test::new("rdma_cm::moves_iomapped", HOSTS, |lab| rsockets(lab, "riostream")),
        Test::new("rdma_cm::moves_rcopy", HOSTS, rcopy),
        Test::new("rdma_cm::moves_cmtime", HOSTS, cmtime),
        Test::new("rdma_cm::moves_group", HOSTS, group),
        Test::new("rdma_cm::numbers_are_given_again", HOSTS, given_again),
        Test::new("rdma_cm::numbers_are_given_to_listeners", HOSTS, |lab| {
            given_by_address(lab, "src", "peer")
        }),
        Test::new("rdma_cm::numbers_are_given_to_clients", HOSTS, |lab| {
            given_by_address(lab, "peer", "src")
        }),
    ]
}

/// Whether it moved all the way before its client had ended. A program that makes connections all the time may be refused, and is asked
/// again as the refusal says.
fn moves_before_the_end(server: &Instance<'_>, client: &Instance<'_>) -> anyhow::Result<bool> {
    for to in WAY {
        loop {
            let report = server.migrate(to)?;
            if client.row()?.state == "exited" {
                return Ok(false);
            }
            let busy = |error: &String| error.contains("changed its verbs objects during each");
            if !report.error.as_ref().is_some_and(busy) {
                report.must_be_committed()?;
                break;
            }
        }
    }
    Ok(true)
}

/// Tries it with more and more, until it takes longer than the moves.
pub fn with_enough(first: u32, mut attempt: impl FnMut(u32) -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let all = (0..ATTEMPTS).map(|exponent| first * 4_u32.pow(exponent));
    with_each(all, |_, much| attempt(much))
}

/// The same with so much each time; each attempt has a number.
fn with_each(
    all: impl IntoIterator<Item = u32>,
    mut attempt: impl FnMut(usize, u32) -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    for (number, much) in all.into_iter().enumerate() {
        if attempt(number, much)? {
            return Ok(());
        }
    }
    bail!("it always ends before its last move")
}

/// A stream in both directions, each side of which looks at what it gets (`-T v`).
fn rsockets(lab: &TestLab, program: &str) -> anyhow::Result<()> {
    let address = lab.address("src")?;
    with_enough(5000, |messages| {
        let count = messages.to_string();
        let argv = [program, "-S", "65536", "-C", &count, "-I", "1", "-T", "v"];
        let server = lab.instance("src", &format!("server{count}"), &argv)?;
        let name = format!("client{count}-");
        let client = client_of(lab, &name, &[&argv[..], &["-s", &address]].concat())?;
        let in_time = moves_before_the_end(&server, &client)?;
        for side in [&client, &server] {
            let said = side.succeed(LIMIT)?.stdout;
            // The line of a test that has ended.
            ensure!(said.contains("custom"), "{said}");
        }
        Ok(in_time)
    })
}

/// A server of many connections moves while most of them are asked for.
fn cmtime(lab: &TestLab) -> anyhow::Result<()> {
    let address = lab.address("src")?;
    let turns = Turns::of(1)?;
    let server = listener_of(lab, &turns, "server", &["cmtime"])?;
    with_each(CONNECTIONS, |number, connections| {
        let count = connections.to_string();
        let argv = ["cmtime", "-s", &address, "-c", &count];
        let client = lab.instance("peer", &format!("client{number}"), &argv)?;
        let asks = eventually("that the first connection stands", LIMIT, || {
            if server.row()?.connections > 0 {
                return Ok(Some(true));
            }
            Ok((client.row()?.state == "exited").then_some(false))
        })?;
        let in_time = asks && moves_before_the_end(&server, &client)?;
        let said = client.succeed(LIMIT)?.stdout;
        // It ends with 0 whatever becomes of its connections, and names each event that it does not like.
        ensure!(!said.contains("event") && !said.contains("fail"), "{said}");
        ensure!(
            said.contains("connect      :") && said.contains("destroy      :"),
            "{said}"
        );
        eventually("that the server has given its queue pairs back", LIMIT, || {
            Ok((server.row()?.connections == 0).then_some(()))
        })?;
        let row = server.row()?;
        ensure!(row.state == "running", "{}", server.output()?);
        // It outlives its clients. The next of them asks for it where it began, and it moves from there.
        if !in_time && row.host != "src" {
            server.moves("src")?;
        }
        Ok(in_time)
    })
}

/// A server whose connections have moved from `src`, its client on `peer`, and the numbers of its queue pairs at `src` about to be given
/// to others.
fn moved_and_freed<'a>(lab: &'a TestLab) -> anyhow::Result<[Instance<'a>; 2]> {
    /// So many numbers are freed before one of them is given again, and some more.
    const FREED: &str = "1200";
    let address = lab.address("src")?;
    let text = text_of("connections.py");
    let argv = [PYTHON, "-c", &text, "64"];
    let server = lab.instance("src", "server", &argv)?;
    let client = client_of(lab, "client", &[&argv[..], &[&address]].concat())?;
    server.moves("dst")?;

    let turns = Turns::of(1)?;
    let freer = turns.start(lab, "src", &["cmtime"])?;
    let frees = ["cmtime", "-s", &address, "-c", FREED];
    turns.start(lab, "peer", &frees)?.succeed(LIMIT)?;
    drop(freer);
    Ok([client, server])
}

/// Both go on until the client is told to end, and all that they have sent has come.
fn both_end(sides: [Instance<'_>; 2]) -> anyhow::Result<()> {
    sides[0].interrupt()?;
    for side in &sides {
        side.succeed(LIMIT)?;
    }
    Ok(())
}

/// The RNIC gives the numbers of queue pairs that have left it to others one day: whoever connects to those gets them, and not who had
/// their numbers before.
fn given_again(lab: &TestLab) -> anyhow::Result<()> {
    let address = lab.address("src")?;
    let moved = moved_and_freed(lab)?;
    // They tell each other their numbers by TCP, and fail if what they send comes to nobody.
    let newcomers = ["ib_write_bw", "-F", "-q", "64", "-n", "64", "-s", "4096"];
    let listener = lab.start("src", &newcomers)?;
    let argv = [&newcomers[..], &[&address]].concat();
    let served = eventually("that newcomers are served", LISTENS_WITHIN, || {
        Ok((lab.start("peer", &argv)?.wait(LIMIT)?.code == 0).then_some(()))
    });
    if served.is_err() {
        listener.signal(Signal::KILL)?;
    }
    let listened = listener.succeed(LIMIT);
    served?;
    listened?;
    both_end(moved)
}

/// The same for newcomers that connect by address and port to where the connections' other ends are: they are not taken for those that
/// have moved, which then would be ended as stale.
fn given_by_address(lab: &TestLab, listens: &str, asks: &str) -> anyhow::Result<()> {
    /// How it says that it was taken for stale.
    const STALE: &str = "RDMA_CM_EVENT_REJECTED, error: 10";
    let moved = moved_and_freed(lab)?;
    let newcomers = ["ucmatose", "-c", "64", "-C", "4", "-S", "1000"];
    let address = lab.address(listens)?;
    let argv = [&newcomers[..], &["-s", &address]].concat();
    let (client, server) = Turns::of(1)?.meet(lab, (listens, &newcomers), (asks, &argv))?;
    for side in [client, server] {
        ensure!(!side.output().contains(STALE), "{}", side.output());
    }
    both_end(moved)
}

/// A server that goes on for ever takes a file at each place.
fn rcopy(lab: &TestLab) -> anyhow::Result<()> {
    const FILE: &str = "/usr/bin/ib_write_bw";
    let address = lab.address("src")?;
    let server = lab.instance("src", "server", &["rcopy"])?;
    for (copy, to) in [None, Some("dst"), Some("src")].into_iter().enumerate() {
        if let Some(to) = to {
            server.moves(to)?;
        }
        let name = format!("/tmp/copy{copy}");
        let argv = ["rcopy", FILE, &format!("{address}:{name}")];
        let ends_well = || Ok((lab.start("peer", &argv)?.wait(LIMIT)?.code == 0).then_some(()));
        match to {
            // It may not listen yet.
            None => eventually("that the first copy ends well", LISTENS_WITHIN, ends_well)?,
            Some(_) => ends_well()?.with_context(|| format!("copy {copy} fails"))?,
        }
        let row = server.row()?;
        let pid = row.pid.context("the server has ended")?;
        let copied = std::fs::read(lab.path(&row.host, &format!("/proc/{pid}/root{name}"))?)?;
        ensure!(copied == std::fs::read(FILE)?, "{name} is not {FILE}");
    }
    Ok(())
}

/// A member of a multicast group gets what is sent to the group, wherever it is.
fn group(lab: &TestLab) -> anyhow::Result<()> {
    const MESSAGES: u64 = 10;
    const BYTES: u64 = 100;
    let messages = |count: u64| count.to_string();
    let (here, there) = (lab.address("src")?, lab.address("peer")?);
    let argv = |count| ["mckey", "-m", "239.77.0.1", "-C", count, "-b"];
    let (all, some) = (messages(MESSAGES * 3), messages(MESSAGES));
    let member = lab.instance("src", "member", &[&argv(&all)[..], &[&here]].concat())?;
    for at in ["src", "dst", "src"] {
        if member.row()?.host != at {
            member.moves(at)?;
        }
        is_member(lab, at)?;
        let traffic = Traffic::of(lab, at)?;
        let before = traffic.counters().rx_payload_bytes;
        lab.start("peer", &[&argv(&some)[..], &[&there, "-s"]].concat())?
            .succeed(LIMIT)?;
        eventually(&format!("{MESSAGES} messages at {at}"), LIMIT, || {
            let come = traffic.counters().rx_payload_bytes - before;
            Ok((come >= MESSAGES * BYTES).then_some(()))
        })?;
    }
    let said = member.succeed(LIMIT)?.stdout;
    ensure!(said.contains("data transfers complete"), "{said}");
    Ok(())
}

/// Waits until the kernel has a member of 239.77.0.1 at a host: what is sent before is lost.
fn is_member(lab: &TestLab, host: &str) -> anyhow::Result<()> {
    let groups = lab.path(host, &format!("/proc/{}/net/igmp", lab.service_pid(host, "nic")?))?;
    eventually(&format!("that {host} has joined"), LISTENS_WITHIN, || {
        Ok(std::fs::read_to_string(&groups)?
            .contains("01004DEF")
            .then_some(()))
    })
}
