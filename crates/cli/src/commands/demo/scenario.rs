//! The runs of the demo.

use std::path::Path;
use std::time::Duration;

use super::preflight::Machine;

/// Queue pairs of perftest.
const QUEUE_PAIRS: u32 = 16;
/// Bytes of each of perftest's messages.
const MESSAGE_BYTES: u32 = 65_536;
/// Where perftest's server listens (perftest's default).
const PERFTEST_PORT: u16 = 18_515;
/// Where vcheck's server listens (vcheck's default).
const VCHECK_PORT: u16 = 18_516;
/// How much longer than perftest the check program runs, for its four moves.
const CHECK_EXTRA_SECONDS: u32 = 10;

/// The two programs of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The client; it posts the requests.
    Sender,
    /// The server.
    Receiver,
}

impl Side {
    /// Both, in the order of every pair in this command.
    pub const BOTH: [Self; 2] = [Self::Sender, Self::Receiver];

    /// Its name in report.json.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sender => "sender",
            Self::Receiver => "receiver",
        }
    }
}

/// What a run's programs print, and how it is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A table with the bandwidth.
    Perftest,
    /// A line of JSON with counts of defects.
    Vcheck,
}

/// A run: a server, a client, and the moves of one of them.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Its number, from 1.
    pub number: u32,
    /// What it shows.
    pub title: String,
    /// What happens in it.
    pub story: String,
    /// The program's name.
    pub program: &'static str,
    /// How its output is read.
    pub kind: Kind,
    /// The command of both sides; the sender's lacks the server's address, which comes last.
    pub command: Vec<String>,
    /// The server's TCP port.
    pub port: u16,
    /// Who moves.
    pub moved: Side,
    /// The hosts where sender and receiver start.
    pub hosts: [&'static str; 2],
    /// Where it moves, one after the other.
    pub destinations: Vec<&'static str>,
    /// How long the programs run.
    pub duration: Duration,
    /// How long data flows before the first move, and between moves.
    pub lead: Duration,
}

impl Scenario {
    /// The host of the side that stays.
    pub fn partner(&self) -> &'static str {
        match self.moved {
            Side::Sender => self.hosts[1],
            Side::Receiver => self.hosts[0],
        }
    }

    /// The name of a side's instance.
    pub fn instance(&self, side: Side) -> String {
        format!("run{}-{}", self.number, side.name())
    }

    /// The command of a side; the sender's with the server's address.
    pub fn command(&self, server: Option<&str>) -> Vec<String> {
        self.command
            .iter()
            .map(String::as_str)
            .chain(server)
            .map(str::to_owned)
            .collect()
    }
}

/// All runs; perftest measures for `seconds`.
pub fn all(machine: &Machine, seconds: u32) -> Vec<Scenario> {
    let text = |path: &Path| path.display().to_string();
    let perftest = |number, moved| {
        let (hosts, title, story) = match moved {
            Side::Sender => (
                ["src", "peer"],
                "the sender moves",
                "client runs on src, its server on peer. The client",
            ),
            Side::Receiver => (
                ["peer", "src"],
                "the receiver moves",
                "client runs on peer, its server on src. The server",
            ),
        };
        let command = [
            text(&machine.ib_write_bw),
            format!("-q{QUEUE_PAIRS}"),
            format!("-s{MESSAGE_BYTES}"),
            format!("-D{seconds}"),
            format!("-p{PERFTEST_PORT}"),
            "--report_gbits".to_owned(),
            // Without it perftest also prints a warning about the CPU's frequency.
            "-F".to_owned(),
        ];
        Scenario {
            number,
            title: format!("ib_write_bw, {title}"),
            story: format!(
                "Debian’s own ib_write_bw in two containers, {QUEUE_PAIRS} queue pairs at full speed: the {story} \
                 moves to dst while data flow."
            ),
            program: "ib_write_bw",
            kind: Kind::Perftest,
            command: command.to_vec(),
            port: PERFTEST_PORT,
            moved,
            hosts,
            destinations: vec!["dst"],
            duration: Duration::from_secs(seconds.into()),
            lead: Duration::from_secs(seconds.into()).mul_f64(0.35),
        }
    };
    let check_seconds = seconds + CHECK_EXTRA_SECONDS;
    let vcheck = Scenario {
        number: 3,
        title: "vcheck, mixed operations, four moves".to_owned(),
        story: "A check program sends a seeded mix of SEND, WRITE, WRITE with immediate and READ from src to peer. It \
                moves to dst, back, and again, and verifies that every message arrives once, in order and unchanged."
            .to_owned(),
        program: "vcheck",
        kind: Kind::Vcheck,
        command: [
            text(&machine.vcheck),
            format!("--port={VCHECK_PORT}"),
            "--op=mix".to_owned(),
            "--qps=4".to_owned(),
            format!("--size={MESSAGE_BYTES}"),
            "--random-size".to_owned(),
            "--seed=7".to_owned(),
            format!("--duration={check_seconds}"),
        ]
        .to_vec(),
        port: VCHECK_PORT,
        moved: Side::Sender,
        hosts: ["src", "peer"],
        destinations: vec!["dst", "src", "dst", "src"],
        duration: Duration::from_secs(check_seconds.into()),
        lead: Duration::from_secs(check_seconds.into()) / 12,
    };
    vec![perftest(1, Side::Sender), perftest(2, Side::Receiver), vcheck]
}
