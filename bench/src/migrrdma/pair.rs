//! A sender and a receiver of perftest's, one of which moves to and fro between two hosts while its partner stays.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde::Serialize;
use verbatim_e2e::{Instance, Migration, PERFTEST_PORT, TestLab, Tools, Traffic};

/// Where the moved side is at first, where it goes, and where its partner is.
pub const HOSTS: [&str; 3] = ["one", "other", "peer"];
/// How long connecting thousands of queue pairs may take.
const FLOW_LIMIT: Duration = Duration::from_secs(180);
/// How long the rate before a move is measured.
const RATE_TIME: Duration = Duration::from_millis(300);
/// What must pass before a move.
const BYTES_BETWEEN: u64 = 16 << 20;

/// Which side moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Moved {
    Sender,
    Receiver,
}

impl Moved {
    pub const BOTH: [Self; 2] = [Self::Sender, Self::Receiver];

    pub fn name(self) -> &'static str {
        match self {
            Self::Sender => "sender",
            Self::Receiver => "receiver",
        }
    }
}

/// A move, and what the RNICs of the hosts did.
#[derive(Debug, Clone, Serialize)]
pub struct Move {
    pub migration: Migration,
    /// Payload bytes a second through the partner's before the move.
    pub rate_before: f64,
    /// From the command that moves it to its end.
    pub packets: Packets,
}

/// Packets that the RNICs of all hosts have sent.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Packets {
    pub sent: u64,
    /// Of them, requests that had been sent before.
    pub retransmitted: u64,
}

impl Packets {
    /// Until now.
    pub fn of(lab: &TestLab) -> anyhow::Result<Self> {
        let (mut sent, mut retransmitted) = (0, 0);
        for host in lab.lab().hosts() {
            let counters = Traffic::of(lab, host)?.counters();
            sent += counters.tx_packets;
            retransmitted += counters.retransmitted_packets;
        }
        Ok(Self { sent, retransmitted })
    }

    /// Since `earlier`.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            sent: self.sent - earlier.sent,
            retransmitted: self.retransmitted - earlier.retransmitted,
        }
    }
}

/// Runs the program on both sides and moves one of them.
pub fn moves(tools: &Tools, argv: &[&str], moved: Moved, count: u32) -> anyhow::Result<Vec<Move>> {
    moves_by(tools, argv, moved, count, |_| "wait-before-stop")
}

/// The same, each move by the method that `method` says for its number, from 0.
pub fn moves_by(
    tools: &Tools,
    argv: &[&str],
    moved: Moved,
    count: u32,
    method: impl Fn(u32) -> &'static str,
) -> anyhow::Result<Vec<Move>> {
    moves_in(tools, argv, moved, count, method, |_| Ok(()))
}

/// The same, in a lab that was prepared before the programs start; what that gives is kept until they have ended.
pub fn moves_in<T>(
    tools: &Tools,
    argv: &[&str],
    moved: Moved,
    count: u32,
    method: impl Fn(u32) -> &'static str,
    prepare: impl FnOnce(&TestLab) -> anyhow::Result<T>,
) -> anyhow::Result<Vec<Move>> {
    let lab = TestLab::up(tools, &HOSTS)?;
    let _prepared = prepare(&lab)?;
    let result = with_pair(&lab, argv, moved, |lab, instance| {
        to_and_fro(lab, instance, count, method)
    })
    .with_context(|| lab.logs());
    lab.down()?;
    result
}

/// Runs the program on both sides, and does `what` with the one that moves.
pub fn with_pair<T>(
    lab: &TestLab,
    argv: &[&str],
    moved: Moved,
    what: impl FnOnce(&TestLab, &Instance<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let [one, _, peer] = HOSTS;
    let (sender_host, receiver_host) = match moved {
        Moved::Sender => (one, peer),
        Moved::Receiver => (peer, one),
    };
    let receiver = lab.instance(receiver_host, "receiver", argv)?;
    receiver.listens(PERFTEST_PORT)?;
    let address = receiver.address()?;
    let sender = lab.instance(sender_host, "sender", &[argv, &[&address]].concat())?;
    let instance = match moved {
        Moved::Sender => &sender,
        Moved::Receiver => &receiver,
    };
    what(lab, instance).with_context(|| last_lines(&sender.output().unwrap_or_default()))
}

/// perftest prints two lines for each queue pair before it says what is wrong.
fn last_lines(output: &str) -> String {
    const LINES: usize = 10;
    let lines: Vec<_> = output.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

fn to_and_fro(
    lab: &TestLab,
    instance: &Instance<'_>,
    count: u32,
    method: impl Fn(u32) -> &'static str,
) -> anyhow::Result<Vec<Move>> {
    let [mut here, mut there, _] = HOSTS;
    let mut moves = Vec::new();
    for number in 0..count {
        let rate_before = rate(lab)?;
        let method = method(number);
        let before = Packets::of(lab)?;
        let migration = instance
            .migrate_with(there, &["--method", method])
            .and_then(|migration| migration.must_be_committed().map(|()| migration))
            .with_context(|| format!("move {}", number + 1))?;
        ensure!(migration.method == method, "{}", migration.method_reason);
        std::mem::swap(&mut here, &mut there);
        moves.push(Move {
            migration,
            rate_before,
            packets: Packets::of(lab)?.since(before),
        });
    }
    flows(lab)?;
    Ok(moves)
}

/// Waits until data flows at the partner.
pub fn flows(lab: &TestLab) -> anyhow::Result<()> {
    Traffic::of(lab, HOSTS[2])?.flows(BYTES_BETWEEN, FLOW_LIMIT)
}

/// Payload bytes a second through the partner's RNIC, once they flow.
pub fn rate(lab: &TestLab) -> anyhow::Result<f64> {
    flows(lab)?;
    let traffic = Traffic::of(lab, HOSTS[2])?;
    let (start, before) = (Instant::now(), traffic.payload_bytes());
    std::thread::sleep(RATE_TIME);
    Ok((traffic.payload_bytes() - before) as f64 / start.elapsed().as_secs_f64())
}
