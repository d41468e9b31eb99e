//! Objects of every kind, in every state, that move with their instances: by small programs of `tests/programs`.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde::Deserialize;
use verbatim_e2e::{ENDS_PORT, Finished, Instance, PYTHON, TestLab, Traffic, eventually, text_of};

use crate::Test;

const HOSTS: &[&str] = &["src", "dst", "peer"];
const FOUR_HOSTS: &[&str] = &["src", "dst", "peer", "spare"];
const LIMIT: Duration = Duration::from_secs(60);
/// What must pass for messages to be said to flow.
const PACKETS: u64 = 500;

/// All of them.
pub fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for options in [&["ud"][..], &["uc"], &["ud", "--srq"], &["uc", "--srq"]] {
        for side in [Side::Client, Side::Server] {
            let kind = options.concat().replace("--", "_");
            let name = format!("objects::messages_{kind}_{}", side.name());
            tests.push(Test::new(name, HOSTS, move |lab| messages(lab, options, side)));
        }
    }
    for side in [Side::Client, Side::Server] {
        let name = format!("objects::windows_{}", side.name());
        tests.push(Test::new(name, HOSTS, move |lab| windows(lab, side)));
        let name = format!("objects::set_up_while_moved_{}", side.name());
        tests.push(Test::new(name, HOSTS, move |lab| set_up(lab, side)));
        let name = format!("objects::changes_all_the_time_{}", side.name());
        tests.push(Test::new(name, HOSTS, move |lab| changes(lab, side)));
    }
    tests.push(Test::new("objects::newcomers", FOUR_HOSTS, newcomers));
    tests
}

/// Which end moves.
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

/// A program of `tests/programs` that runs between two instances.
struct Pair<'a> {
    lab: &'a TestLab,
    client: Instance<'a>,
    server: Instance<'a>,
}

impl<'a> Pair<'a> {
    /// Starts the server in an instance on `peer` and the client in one on `src`.
    fn start(lab: &'a TestLab, program: &str, options: &[&str]) -> anyhow::Result<Self> {
        let text = text_of(program);
        let argv = [&[PYTHON, "-c", text.as_str()], options].concat();
        let server = lab.instance("peer", "server", &argv)?;
        server.listens(ENDS_PORT)?;
        let address = server.address()?;
        let client = lab.instance("src", "client", &[&argv[..], &[&address]].concat())?;
        Ok(Self { lab, client, server })
    }

    /// The one that moves, and where it is at home.
    fn moving(&self, side: Side) -> (&Instance<'a>, &'static str) {
        match side {
            Side::Client => (&self.client, "src"),
            Side::Server => (&self.server, "peer"),
        }
    }

    fn flows(&self, host: &str) -> anyhow::Result<()> {
        let traffic = Traffic::of(self.lab, host)?;
        traffic.packets_flow(PACKETS, LIMIT).with_context(|| self.words())
    }

    /// Lets the client go on with its next part, or end.
    fn go_on(&self) -> anyhow::Result<()> {
        self.client.interrupt()
    }

    /// Waits for the good end of both.
    fn succeed(&self) -> anyhow::Result<(Finished, Finished)> {
        let client = self.client.succeed(LIMIT).with_context(|| self.words())?;
        let server = self.server.succeed(LIMIT).with_context(|| self.words())?;
        Ok((client, server))
    }

    /// What both sides have said so far.
    fn words(&self) -> String {
        let words = |instance: &Instance| instance.output().unwrap_or_else(|error| format!("{error:#}"));
        format!(
            "the client wrote {:?}, the server {:?}",
            words(&self.client),
            words(&self.server)
        )
    }
}

/// What `messages.py` prints.
#[derive(Debug, Deserialize)]
struct Messages {
    sent: u64,
    received: u64,
    lost: u64,
    duplicated: u64,
    out_of_order: u64,
    corrupted: u64,
    wrong_source: u64,
    longest_gap_ms: f64,
}

/// Messages that may be lost, on one queue pair: those of the blackout are, and nothing else is wrong.
fn messages(lab: &TestLab, options: &[&str], side: Side) -> anyhow::Result<()> {
    let pair = Pair::start(lab, "messages.py", options)?;
    pair.flows("src")?;
    let (moved, home) = pair.moving(side);
    for to in ["dst", home] {
        moved.moves(to).with_context(|| pair.words())?;
        pair.flows(to)?;
    }
    pair.go_on()?;
    let (client, server) = pair.succeed()?;
    for finished in [client, server] {
        let report = finished.stdout.lines().last().unwrap_or_default();
        let report: Messages = serde_json::from_str(report).context("not a report of messages.py")?;
        let wrong = [report.duplicated, report.corrupted, report.wrong_source];
        ensure!(wrong == [0; 3], "{report:?}");
        ensure!(report.received > 2 * PACKETS / 4, "{report:?}");
        if options.contains(&"uc") {
            ensure!(report.out_of_order == 0, "{report:?}");
        }
        eprintln!(
            "{}: {} sent, {} received, {} lost, longest gap {:.0} ms",
            finished.what, report.sent, report.received, report.lost, report.longest_gap_ms
        );
    }
    Ok(())
}

/// Windows that stay bound, are invalidated and are bound again, on the side that moves or on the other.
fn windows(lab: &TestLab, side: Side) -> anyhow::Result<()> {
    let pair = Pair::start(lab, "windows.py", &[])?;
    pair.flows("src")?;
    let (moved, home) = pair.moving(side);
    for to in ["dst", home] {
        moved.moves(to).with_context(|| pair.words())?;
        pair.flows(to)?;
    }
    pair.go_on()?;
    pair.succeed()?;
    Ok(())
}

/// Queue pairs in every state, of either side, when one of the two moves; and again when it moves twice before they are set up.
fn set_up(lab: &TestLab, side: Side) -> anyhow::Result<()> {
    let pair = Pair::start(lab, "halves.py", &[])?;
    let said = |what: &str| {
        eventually(what, LIMIT, || {
            let both = pair.client.output()?.contains(what) && pair.server.output()?.contains(what);
            Ok(both.then_some(()))
        })
        .with_context(|| pair.words())
    };
    said("halfway")?;
    let (moved, home) = pair.moving(side);
    for to in ["dst", home, "dst"] {
        moved.moves(to).with_context(|| pair.words())?;
    }
    pair.go_on()?;
    said("connected")?;
    moved.moves(home).with_context(|| pair.words())?;
    pair.go_on()?;
    said("again")?;
    pair.go_on()?;
    pair.succeed()?;
    Ok(())
}

/// Both sides make and destroy objects all the time, with connections that live for a moment only.
fn changes(lab: &TestLab, side: Side) -> anyhow::Result<()> {
    let pair = Pair::start(lab, "churn.py", &[])?;
    pair.flows("src")?;
    let (moved, home) = pair.moving(side);
    for to in ["dst", home] {
        moved.moves(to).with_context(|| pair.words())?;
        pair.flows(to)?;
    }
    pair.go_on()?;
    pair.succeed()?;
    Ok(())
}

/// A server that has moved makes queue pairs for those who come later. They find it by what it tells them: its old GID and
/// numbers that it was given after the move, also if it moves once more before they connect.
fn newcomers(lab: &TestLab) -> anyhow::Result<()> {
    let text = text_of("newcomers.py");
    let server = lab.instance("peer", "server", &[PYTHON, "-c", &text])?;
    server.listens(ENDS_PORT)?;
    let address = server.address()?;
    let mut visits = 0;
    let mut visit = |moves_to: Option<&str>| {
        for kind in ["rc", "uc", "ud"] {
            visits += 1;
            let name = format!("client{visits}");
            let client = lab.instance("src", &name, &[PYTHON, "-c", &text, kind, &address])?;
            let words = || format!("{:?} {:?}", client.output(), server.output());
            eventually("the two to meet", LIMIT, || {
                Ok(client.output()?.contains("met").then_some(()))
            })
            .with_context(words)?;
            if let Some(to) = moves_to.filter(|_| kind == "rc") {
                server.moves(to).with_context(words)?;
            }
            client.interrupt()?;
            client.succeed(LIMIT).with_context(words)?;
        }
        anyhow::Ok(())
    };
    visit(None)?;
    for (to, meanwhile) in [("dst", None), ("spare", Some("dst")), ("peer", Some("spare"))] {
        server.moves(to)?;
        visit(meanwhile)?;
    }
    // Where its clients are.
    server.moves("src")?;
    visit(Some("peer"))?;
    let end = lab.instance("src", "end", &[PYTHON, "-c", &text, "end", &address])?;
    end.succeed(LIMIT)?;
    server.succeed(LIMIT)?;
    Ok(())
}
