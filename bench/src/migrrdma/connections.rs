//! The blackout by phase against the number of queue pairs (MigrRDMA §5.2, figure 3), sender and receiver moved.
//!
//! The paper compares with a MigrRDMA that makes the objects while everything stands still. Ours always makes them before,
//! so what it would be without is computed: the blackout, and besides what making the objects and connecting them took
//! while the program ran (the phase `PreSetup`; it holds the start of runc and CRIU too, so that this is an upper bound).

use std::path::Path;

use serde::Serialize;
use verbatim_e2e::{PHASES, Tools};

use super::pair::{self, Move, Moved};
use super::write;
use crate::context::Context;
use crate::soft_rnic::plot::{Axes, Line, Scale, draw};
use crate::summary::Summary;

/// As in the paper, and up to its 4,096.
const QUEUE_PAIRS: [u32; 7] = [1, 4, 16, 64, 256, 1024, 4096];
const BYTES: &str = "4096";
/// Few requests each, so that not the drain is measured: figure 4 has that.
const DEPTH: &str = "2";

/// From the paper's figure 3: with pre-setup the blackout is shorter by up to so much.
const PAPER_GAIN: f64 = 0.58;

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    program: &'static str,
    unit: &'static str,
    paper_gain_of_pre_setup: f64,
    rows: Vec<Row>,
    growth: Vec<Growth>,
}

#[derive(Debug, Serialize)]
struct Row {
    moved: Moved,
    queue_pairs: u32,
    service_blackout: Summary,
    communication_blackout: Summary,
    /// Computed, see above.
    without_pre_setup: Summary,
    phases: Vec<(&'static str, Summary)>,
    moves: Vec<Move>,
}

/// How much longer the blackouts of the largest number are than those of the smallest.
#[derive(Debug, Serialize)]
struct Growth {
    moved: Moved,
    from_queue_pairs: u32,
    to_queue_pairs: u32,
    service_blackout: f64,
    communication_blackout: f64,
}

/// Measures, prints and writes.
pub fn run(tools: &Tools, moves: u32, most: u32, out: &Path) -> anyhow::Result<()> {
    let context = Context::now();
    println!("blackout by number of queue pairs, ms, medians of {moves} moves");
    println!(
        "{:9} {:>5} {:>8} {:>8} {:>9}  phases",
        "moved", "QPs", "service", "commun.", "no pre-s."
    );
    let mut rows = Vec::new();
    for moved in Moved::BOTH {
        for queue_pairs in QUEUE_PAIRS.into_iter().filter(|count| *count <= most) {
            let row = measure(tools, moved, queue_pairs, moves)?;
            print(&row);
            rows.push(row);
        }
    }
    let growth = Moved::BOTH
        .into_iter()
        .filter_map(|moved| growth(&rows, moved))
        .collect();
    plot(&rows, &out.with_extension("svg"))?;
    let report = Report {
        context,
        program: "ib_write_bw",
        unit: "ms",
        paper_gain_of_pre_setup: PAPER_GAIN,
        rows,
        growth,
    };
    for Growth {
        moved,
        from_queue_pairs,
        to_queue_pairs,
        service_blackout,
        communication_blackout,
    } in &report.growth
    {
        println!(
            "{} moved, from {from_queue_pairs} to {to_queue_pairs} queue pairs: service blackout × {service_blackout:.2}, \
             communication blackout × {communication_blackout:.2}",
            moved.name()
        );
    }
    write(&report, out)
}

fn measure(tools: &Tools, moved: Moved, queue_pairs: u32, moves: u32) -> anyhow::Result<Row> {
    let count = queue_pairs.to_string();
    // It ends with the lab, long before its time is over.
    let argv = [
        "ib_write_bw",
        "-F",
        "-q",
        &count,
        "-s",
        BYTES,
        "-t",
        DEPTH,
        "-Q",
        "1",
        "-D",
        "3600",
    ];
    let moves = pair::moves(tools, &argv, moved, moves)?;
    let of = |get: &dyn Fn(&Move) -> f64| Summary::of(moves.iter().map(get));
    Ok(Row {
        moved,
        queue_pairs,
        service_blackout: of(&|of| of.migration.service_blackout_ms),
        communication_blackout: of(&|of| of.migration.communication_blackout_ms),
        without_pre_setup: of(&|of| {
            of.migration.communication_blackout_ms + of.migration.phases_ms["PreSetup"]
        }),
        phases: PHASES
            .map(|phase| (phase, of(&|of| of.migration.phases_ms[phase])))
            .to_vec(),
        moves,
    })
}

fn print(row: &Row) {
    let phases: Vec<_> = row
        .phases
        .iter()
        .map(|(phase, summary)| format!("{phase} {:.1}", summary.median))
        .collect();
    println!(
        "{:9} {:>5} {:>8.1} {:>8.1} {:>9.1}  {}",
        row.moved.name(),
        row.queue_pairs,
        row.service_blackout.median,
        row.communication_blackout.median,
        row.without_pre_setup.median,
        phases.join(", ")
    );
}

/// Up to 1,024, for which there is a target: less than 1.5.
fn growth(rows: &[Row], moved: Moved) -> Option<Growth> {
    let mut mine = rows
        .iter()
        .filter(|row| row.moved == moved && row.queue_pairs <= 1024);
    let (first, last) = (mine.next()?, mine.next_back()?);
    Some(Growth {
        moved,
        from_queue_pairs: first.queue_pairs,
        to_queue_pairs: last.queue_pairs,
        service_blackout: last.service_blackout.median / first.service_blackout.median,
        communication_blackout: last.communication_blackout.median / first.communication_blackout.median,
    })
}

fn plot(rows: &[Row], path: &Path) -> anyhow::Result<()> {
    let axes = Axes {
        title: "blackout by number of queue pairs",
        x: "queue pairs",
        y: "ms",
        scale: Scale::Counts,
    };
    let line = |moved: Moved, name: &str, peer, get: fn(&Row) -> &Summary| Line {
        name: format!("{name}, {} moved", moved.name()),
        points: rows
            .iter()
            .filter(|row| row.moved == moved)
            .map(|row| (f64::from(row.queue_pairs), get(row).median))
            .collect(),
        peer,
    };
    let lines: Vec<_> = Moved::BOTH
        .into_iter()
        .flat_map(|moved| {
            [
                line(moved, "service blackout", false, |row| &row.service_blackout),
                line(moved, "communication blackout", false, |row| {
                    &row.communication_blackout
                }),
                line(moved, "without pre-setup (computed)", true, |row| {
                    &row.without_pre_setup
                }),
            ]
        })
        .collect();
    draw(path, &axes, &lines)
}
