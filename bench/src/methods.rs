//! The two methods side by side: wait-before-stop (MigrRDMA §3.4) and pause-resume (MigrOS §3.2), by turns in the same run.
//!
//! Nobody could compare them fairly, since one needs an RNIC that is made for it. Ours is both. In each cell one pair of
//! `ib_write_bw` runs all the time, and one side is moved to and fro, by one method and by the other: against queue pairs, message
//! size and depth over the links as they are, and for a few of these against loss and round-trip time.

use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use verbatim_e2e::{Migration, Tools};

use crate::context::Context;
use crate::migros::link;
use crate::migrrdma::pair::{self, HOSTS, Move, Moved};
use crate::migrrdma::write;
use crate::summary::Summary;

/// Queue pairs, bytes of a message, messages in each queue.
type Load = (u32, u32, u32);

const LOADS: [Load; 9] = [
    (1, 65536, 64),
    (16, 4096, 64),
    (16, 65536, 16),
    (16, 65536, 64),
    (16, 1 << 21, 2),
    (64, 65536, 16),
    (256, 65536, 4),
    (1024, 4096, 2),
    (4096, 4096, 2),
];
/// Those that are also measured over links that lose packets, or are long.
const LINK_LOADS: [Load; 2] = [(16, 4096, 64), (16, 65536, 16)];

const METHODS: [&str; 2] = ["wait-before-stop", "pause-resume"];

/// What a link does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Link {
    /// Percent of the packets, in each direction.
    pub loss_percent: f64,
    /// What a packet and its answer take longer, in milliseconds.
    pub round_trip_ms: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    program: &'static str,
    unit: &'static str,
    cells: Vec<Cell>,
}

#[derive(Debug, Serialize)]
struct Cell {
    moved: Moved,
    queue_pairs: u32,
    message_bytes: u32,
    depth: u32,
    /// Absent: as it is, with batches whole.
    link: Option<Link>,
    /// Of a longer link, as it is: what a datagram and its answer take, in milliseconds.
    measured_round_trip_ms: Option<f64>,
    methods: Vec<Measured>,
}

#[derive(Debug, Serialize)]
struct Measured {
    method: &'static str,
    service_blackout: Summary,
    communication_blackout: Summary,
    /// From the suspension until nothing has to be waited for any more.
    until_quiet: Summary,
    /// Requests that were intercepted, at both ends.
    intercepted: Summary,
    /// Content that was sent, in bytes, and what of it while the instance was frozen.
    content: Summary,
    stop_and_copy: Summary,
    /// Request packets that were sent again by any RNIC, from the command to its end, and all packets of that time.
    retransmitted: Summary,
    sent: Summary,
    /// Image of a connection, in bytes; 0 where there is none.
    image_per_connection: Summary,
    moves: Vec<Move>,
}

/// Measures, prints and writes: so many moves by each method in each cell with so many queue pairs; over the links as they
/// are, over such as lose these parts of the packets, and over such with these round-trip times.
pub fn run(
    tools: &Tools,
    repeats: u32,
    queue_pairs: RangeInclusive<u32>,
    loss_percent: &[f64],
    round_trip_ms: &[f64],
    out: &Path,
) -> anyhow::Result<()> {
    let context = Context::now();
    println!("both methods by turns, ms, medians of {repeats} moves each: wait-before-stop / pause-resume");
    println!(
        "{:9} {:>5} {:>8} {:>5} {:>6} {:>6} {:>15} {:>15} {:>15} {:>13} {:>17} {:>15} {:>7}",
        "moved",
        "QPs",
        "bytes",
        "depth",
        "loss %",
        "RTT",
        "service",
        "communication",
        "until quiet",
        "intercepted",
        "sent KiB",
        "retransmitted",
        "image B"
    );
    let mut cells = Vec::new();
    for moved in Moved::BOTH {
        for load in LOADS
            .into_iter()
            .filter(|(count, ..)| queue_pairs.contains(count))
        {
            cells.push(measure(tools, moved, load, None, repeats)?);
        }
    }
    for link in links(loss_percent, round_trip_ms) {
        for moved in Moved::BOTH {
            for load in LINK_LOADS
                .into_iter()
                .filter(|(count, ..)| queue_pairs.contains(count))
            {
                cells.push(measure(tools, moved, load, Some(link), repeats)?);
            }
        }
    }
    let report = Report {
        context,
        program: "ib_write_bw",
        unit: "ms",
        cells,
    };
    write(&report, out)
}

/// The links of the table.
fn links(loss_percent: &[f64], round_trip_ms: &[f64]) -> Vec<Link> {
    let lossy = loss_percent.iter().map(|loss_percent| Link {
        loss_percent: *loss_percent,
        ..Link::default()
    });
    let long = round_trip_ms
        .iter()
        .filter(|round_trip_ms| **round_trip_ms > 0.0)
        .map(|round_trip_ms| Link {
            round_trip_ms: *round_trip_ms,
            ..Link::default()
        });
    lossy.chain(long).collect()
}

fn measure(
    tools: &Tools,
    moved: Moved,
    (queue_pairs, message_bytes, depth): Load,
    link: Option<Link>,
    repeats: u32,
) -> anyhow::Result<Cell> {
    // It ends with the lab, long before its time is over.
    let line = format!("ib_write_bw -F -u 19 -q {queue_pairs} -s {message_bytes} -t {depth} -Q 1 -D 3600");
    let argv: Vec<_> = line.split(' ').collect();
    let method = |number: u32| METHODS[number as usize % METHODS.len()];
    let mut measured_round_trip_ms = None;
    let moves = pair::moves_in(tools, &argv, moved, 2 * repeats, method, |lab| {
        let Some(link) = link else { return Ok(Vec::new()) };
        link::lose(lab, &HOSTS, (10.0 * link.loss_percent).round() as u32)?;
        if link.round_trip_ms == 0.0 {
            return Ok(Vec::new());
        }
        let round_trip = Duration::from_secs_f64(link.round_trip_ms / 1000.0);
        let lines = link::delay(lab, &HOSTS, round_trip)?;
        let [one, _, peer] = HOSTS;
        let measured = link::round_trip(lab, [one, peer])?;
        measured_round_trip_ms = Some(1000.0 * measured.as_secs_f64());
        Ok(lines)
    })?;
    let methods = METHODS.map(|method| {
        let by_it = |one: &&Move| one.migration.method == method;
        summarise(method, moves.iter().filter(by_it).cloned().collect())
    });
    let cell = Cell {
        moved,
        queue_pairs,
        message_bytes,
        depth,
        link,
        measured_round_trip_ms,
        methods: methods.into(),
    };
    print(&cell);
    Ok(cell)
}

fn summarise(method: &'static str, moves: Vec<Move>) -> Measured {
    let of_moves = |get: &dyn Fn(&Move) -> f64| Summary::of(moves.iter().map(get));
    let of = |get: &dyn Fn(&Migration) -> f64| of_moves(&|one| get(&one.migration));
    Measured {
        method,
        service_blackout: of(&|of| of.service_blackout_ms),
        communication_blackout: of(&|of| of.communication_blackout_ms),
        until_quiet: of(&|of| of.phases_ms["WaitBeforeStop"] + of.phases_ms["Pause"]),
        intercepted: of(&|of| of.intercepted_wrs as f64),
        content: of(&|of| (of.bytes.pre_copy + of.bytes.stop_and_copy) as f64),
        stop_and_copy: of(&|of| of.bytes.stop_and_copy as f64),
        retransmitted: of_moves(&|of| of.packets.retransmitted as f64),
        sent: of_moves(&|of| of.packets.sent as f64),
        image_per_connection: of(&|of| of.paused.image_bytes as f64 / of.connections.max(1) as f64),
        moves,
    }
}

fn print(cell: &Cell) {
    let both = |get: &dyn Fn(&Measured) -> f64, decimals: usize| {
        let values: Vec<_> = cell
            .methods
            .iter()
            .map(|of| format!("{:.decimals$}", get(of)))
            .collect();
        values.join(" / ")
    };
    let link = |get: fn(&Link) -> f64| {
        cell.link
            .as_ref()
            .map_or_else(|| "-".to_owned(), |link| get(link).to_string())
    };
    println!(
        "{:9} {:>5} {:>8} {:>5} {:>6} {:>6} {:>15} {:>15} {:>15} {:>13} {:>17} {:>15} {:>7.0}",
        cell.moved.name(),
        cell.queue_pairs,
        cell.message_bytes,
        cell.depth,
        link(|link| link.loss_percent),
        link(|link| link.round_trip_ms),
        both(&|of| of.service_blackout.median, 1),
        both(&|of| of.communication_blackout.median, 1),
        both(&|of| of.until_quiet.median, 1),
        both(&|of| of.intercepted.median, 0),
        both(&|of| of.content.median / 1024.0, 0),
        both(&|of| of.retransmitted.median, 0),
        cell.methods[1].image_per_connection.median,
    );
}
