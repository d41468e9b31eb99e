//! How long wait-before-stop takes (MigrRDMA §5.4, figure 4), against the number of queue pairs, the message size and the
//! number of partners, beside the time that the link needs for what may be in flight.
//!
//! That time is requests × size ÷ rate, as in the paper; the rate is not a link's but what the two programs got through
//! their RNICs just before the move, since here RNICs and programs share the processors.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use verbatim_e2e::{PERFTEST_PORT, TestLab, Tools};

use super::pair::{self, Move, Moved, Packets};
use super::write;
use crate::context::Context;
use crate::soft_rnic::plot::{Axes, Line, Scale, draw};
use crate::summary::Summary;

/// The paper's.
const DEPTH: u32 = 64;
const QUEUE_PAIRS: [u32; 5] = [1, 4, 16, 64, 256];
/// By message size and by partners the number of queue pairs is that.
const FEW: u32 = 16;
const SIZES: [u32; 6] = [512, 2048, 4096, 16384, 65536, 262_144];
/// By queue pairs and by partners the size is the paper's.
const SIZE: u32 = 4096;
const PARTNERS: [u32; 3] = [1, 2, 4];
const LISTEN_LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    unit: &'static str,
    depth: u32,
    by_queue_pairs: Vec<Row>,
    by_message_size: Vec<Row>,
    by_partners: Vec<Row>,
    /// What the paper says of 512 B, the worst of its figure 4.
    paper_worst_ratio: f64,
}

#[derive(Debug, Serialize)]
struct Row {
    moved: Moved,
    queue_pairs: u32,
    bytes: u32,
    partners: u32,
    wait_before_stop: Summary,
    /// What the link needs for all that may be in flight.
    in_theory: Summary,
    communication_blackout: Summary,
    moves: Vec<Move>,
}

/// Measures, prints and writes.
pub fn run(tools: &Tools, moves: u32, most: u32, out: &Path) -> anyhow::Result<()> {
    let context = Context::now();
    println!("wait-before-stop, ms, medians of {moves} moves, {DEPTH} requests in each queue");
    println!(
        "{:9} {:>5} {:>8} {:>8} {:>9} {:>9} {:>9}",
        "moved", "QPs", "bytes", "partners", "measured", "in theory", "blackout"
    );
    let (mut by_queue_pairs, mut by_message_size, mut by_partners) = (Vec::new(), Vec::new(), Vec::new());
    for moved in Moved::BOTH {
        for queue_pairs in QUEUE_PAIRS.into_iter().filter(|count| *count <= most) {
            by_queue_pairs.push(measure(tools, moved, queue_pairs, SIZE, moves)?);
        }
        for bytes in SIZES {
            by_message_size.push(measure(tools, moved, FEW.min(most), bytes, moves)?);
        }
    }
    for partners in PARTNERS {
        by_partners.push(from_many(tools, partners, moves)?);
    }
    plot(
        &by_queue_pairs,
        "queue pairs",
        Scale::Counts,
        &suffixed(out, "queue-pairs"),
        |row| row.queue_pairs,
    )?;
    plot(
        &by_message_size,
        "message size",
        Scale::Sizes,
        &suffixed(out, "message-size"),
        |row| row.bytes,
    )?;
    plot(
        &by_partners,
        "partners",
        Scale::Counts,
        &suffixed(out, "partners"),
        |row| row.partners,
    )?;
    let report = Report {
        context,
        unit: "ms",
        depth: DEPTH,
        by_queue_pairs,
        by_message_size,
        by_partners,
        paper_worst_ratio: 6.0,
    };
    write(&report, out)
}

fn suffixed(out: &Path, what: &str) -> std::path::PathBuf {
    let stem = out.file_stem().unwrap_or_default().to_string_lossy();
    out.with_file_name(format!("{stem}-{what}.svg"))
}

fn arguments(queue_pairs: u32, bytes: u32) -> Vec<String> {
    let all = format!("ib_write_bw -F -q {queue_pairs} -s {bytes} -t {DEPTH} -Q 1 -D 3600");
    all.split(' ').map(str::to_owned).collect()
}

fn measure(tools: &Tools, moved: Moved, queue_pairs: u32, bytes: u32, moves: u32) -> anyhow::Result<Row> {
    let argv = arguments(queue_pairs, bytes);
    let argv: Vec<_> = argv.iter().map(String::as_str).collect();
    let moves = pair::moves(tools, &argv, moved, moves)?;
    Ok(row(moved, queue_pairs, bytes, 1, moves))
}

/// A container with a receiver for each partner is moved: one queue pair each, as in the paper.
fn from_many(tools: &Tools, partners: u32, moves: u32) -> anyhow::Result<Row> {
    let hosts: Vec<String> = (1..partners).map(|number| format!("peer{number}")).collect();
    let hosts: Vec<&str> = ["one", "other", "peer"]
        .into_iter()
        .chain(hosts.iter().map(String::as_str))
        .collect();
    let lab = TestLab::up(tools, &hosts)?;
    let argv = arguments(1, SIZE).join(" ");
    let ports: Vec<u16> = (0..partners as u16)
        .map(|number| PERFTEST_PORT + number)
        .collect();
    let servers: String = ports.iter().map(|port| format!("{argv} -p {port} & ")).collect();
    let receiver = lab.instance("one", "receiver", &["sh", "-c", &format!("{servers} wait")])?;
    let address = receiver.address()?;
    let mut senders = Vec::new();
    for (host, port) in hosts[2..].iter().zip(&ports) {
        receiver.listens(*port)?;
        let client = format!("{argv} -p {port} {address}");
        let client: Vec<_> = client.split(' ').collect();
        senders.push(lab.instance(host, &format!("sender-{port}"), &client)?);
    }
    verbatim_e2e::eventually("connected queue pairs of all partners", LISTEN_LIMIT, || {
        Ok((receiver.row()?.connections >= partners).then_some(()))
    })?;
    let (mut here, mut there) = ("one", "other");
    let mut measured = Vec::new();
    for number in 1..=moves {
        // Each partner has the same share.
        let rate_before = f64::from(partners) * pair::rate(&lab)?;
        let before = Packets::of(&lab)?;
        let migration = receiver
            .moves(there)
            .with_context(|| format!("move {number}{}", lab.logs()))?;
        std::mem::swap(&mut here, &mut there);
        measured.push(Move {
            migration,
            rate_before,
            packets: Packets::of(&lab)?.since(before),
        });
    }
    pair::flows(&lab)?;
    lab.down()?;
    Ok(row(Moved::Receiver, partners, SIZE, partners, measured))
}

fn row(moved: Moved, queue_pairs: u32, bytes: u32, partners: u32, moves: Vec<Move>) -> Row {
    let in_flight = f64::from(queue_pairs) * f64::from(DEPTH) * f64::from(bytes);
    let of = |get: &dyn Fn(&Move) -> f64| Summary::of(moves.iter().map(get));
    let row = Row {
        moved,
        queue_pairs,
        bytes,
        partners,
        wait_before_stop: of(&|of| of.migration.phases_ms["WaitBeforeStop"]),
        in_theory: of(&|of| 1000.0 * in_flight / of.rate_before),
        communication_blackout: of(&|of| of.migration.communication_blackout_ms),
        moves,
    };
    println!(
        "{:9} {:>5} {:>8} {:>8} {:>9.2} {:>9.2} {:>9.1}",
        row.moved.name(),
        row.queue_pairs,
        row.bytes,
        row.partners,
        row.wait_before_stop.median,
        row.in_theory.median,
        row.communication_blackout.median
    );
    row
}

fn plot(rows: &[Row], x: &str, scale: Scale, path: &Path, place: fn(&Row) -> u32) -> anyhow::Result<()> {
    let axes = Axes {
        title: "wait-before-stop",
        x,
        y: "ms",
        scale,
    };
    let mut lines = Vec::new();
    for moved in Moved::BOTH {
        let mine = || rows.iter().filter(move |row| row.moved == moved);
        if mine().next().is_none() {
            continue;
        }
        let points = |get: fn(&Row) -> &Summary| {
            mine()
                .map(|row| (f64::from(place(row)), get(row).median))
                .collect()
        };
        lines.push(Line {
            name: format!("measured, {} moved", moved.name()),
            points: points(|row| &row.wait_before_stop),
            peer: false,
        });
        lines.push(Line {
            name: format!("in theory, {} moved", moved.name()),
            points: points(|row| &row.in_theory),
            peer: true,
        });
    }
    draw(path, &axes, &lines)
}
