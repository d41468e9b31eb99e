//! The two methods side by side: wait-before-stop (MigrRDMA §3.4) and pause-resume (MigrOS §3.2), by turns in the same run.
//!
//! Nobody could compare them fairly, since one needs an RNIC that is made for it. Ours is both. In each cell one pair of
//! `ib_write_bw` runs all the time, and one side is moved to and fro, by one method and by the other.

use std::path::Path;

use serde::Serialize;
use verbatim_e2e::{Migration, Tools};

use crate::context::Context;
use crate::migrrdma::pair::{self, Move, Moved};
use crate::migrrdma::write;
use crate::summary::Summary;

/// Queue pairs, bytes of a message, messages in each queue.
const CELLS: [(u32, u32, u32); 9] = [
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

const METHODS: [&str; 2] = ["wait-before-stop", "pause-resume"];

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
    /// Content that was sent while the instance was frozen, in bytes.
    stop_and_copy: Summary,
    moves: Vec<Move>,
}

/// Measures, prints and writes: so many moves by each method in each cell with no more than `most` queue pairs.
pub fn run(tools: &Tools, repeats: u32, most: u32, out: &Path) -> anyhow::Result<()> {
    let context = Context::now();
    println!("both methods by turns, ms, medians of {repeats} moves each: wait-before-stop / pause-resume");
    println!(
        "{:9} {:>5} {:>8} {:>5} {:>15} {:>15} {:>15} {:>13}",
        "moved", "QPs", "bytes", "depth", "service", "communication", "until quiet", "intercepted"
    );
    let mut cells = Vec::new();
    for moved in Moved::BOTH {
        for (queue_pairs, message_bytes, depth) in CELLS {
            if queue_pairs <= most {
                let cell = measure(tools, moved, (queue_pairs, message_bytes, depth), repeats)?;
                print(&cell);
                cells.push(cell);
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

fn measure(
    tools: &Tools,
    moved: Moved,
    (queue_pairs, message_bytes, depth): (u32, u32, u32),
    repeats: u32,
) -> anyhow::Result<Cell> {
    // It ends with the lab, long before its time is over.
    let line = format!("ib_write_bw -F -u 19 -q {queue_pairs} -s {message_bytes} -t {depth} -Q 1 -D 3600");
    let argv: Vec<_> = line.split(' ').collect();
    let moves = pair::moves_by(tools, &argv, moved, 2 * repeats, |number| {
        METHODS[number as usize % METHODS.len()]
    })?;
    let methods = METHODS.map(|method| {
        let by_it = |one: &&Move| one.migration.method == method;
        summarise(method, moves.iter().filter(by_it).cloned().collect())
    });
    Ok(Cell {
        moved,
        queue_pairs,
        message_bytes,
        depth,
        methods: methods.into(),
    })
}

fn summarise(method: &'static str, moves: Vec<Move>) -> Measured {
    let of = |get: &dyn Fn(&Migration) -> f64| Summary::of(moves.iter().map(|one| get(&one.migration)));
    Measured {
        method,
        service_blackout: of(&|of| of.service_blackout_ms),
        communication_blackout: of(&|of| of.communication_blackout_ms),
        until_quiet: of(&|of| of.phases_ms["WaitBeforeStop"] + of.phases_ms["Pause"]),
        intercepted: of(&|of| of.intercepted_wrs as f64),
        stop_and_copy: of(&|of| of.bytes.stop_and_copy as f64),
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
    println!(
        "{:9} {:>5} {:>8} {:>5} {:>15} {:>15} {:>15} {:>13}",
        cell.moved.name(),
        cell.queue_pairs,
        cell.message_bytes,
        cell.depth,
        both(&|of| of.service_blackout.median, 1),
        both(&|of| of.communication_blackout.median, 1),
        both(&|of| of.until_quiet.median, 1),
        both(&|of| of.intercepted.median, 0),
    );
}
