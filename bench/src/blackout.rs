//! Blackouts of `ib_write_bw` with 16 queue pairs and messages of 2 MiB (MigrRDMA §5.2, figure "blackout time"), sender and receiver moved.
//!
//! One run per side: it is moved to and fro between two hosts while its partner stays, at full speed all the time. Once what is in
//! flight is waited for, as in the paper; once it is cut off and posted again at the new place; and once the connections pause
//! within the protocol (MigrOS) and take along what is in flight.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use verbatim_e2e::{Migration, PERFTEST_PORT, PHASES, TestLab, Tools, Traffic};

use crate::context::Context;
use crate::stock;
use crate::summary::Summary;

/// What must pass between two moves.
const BYTES_BETWEEN: u64 = 64 << 20;
const FLOW_LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    program: String,
    unit: &'static str,
    /// CRIU alone, of a small program without RDMA, by turns with the moves.
    stock_criu_gap: Summary,
    sides: Vec<Side>,
}

/// What becomes of what is in flight.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
enum InFlight {
    WaitedFor,
    CutOff,
    Paused,
}

impl InFlight {
    const ALL: [Self; 3] = [Self::WaitedFor, Self::CutOff, Self::Paused];

    fn options(self) -> &'static [&'static str] {
        match self {
            Self::WaitedFor => &[],
            Self::CutOff => &["--drain-timeout", "0"],
            Self::Paused => &["--method", "pause-resume"],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::WaitedFor => "what is in flight is waited for",
            Self::CutOff => "what is in flight is cut off",
            Self::Paused => "the connections pause",
        }
    }
}

#[derive(Debug, Serialize)]
struct Side {
    moved: &'static str,
    in_flight: InFlight,
    service_blackout: Summary,
    communication_blackout: Summary,
    total: Summary,
    phases: Vec<(&'static str, Summary)>,
    migrations: Vec<Migration>,
}

/// Measures, prints and writes.
pub fn run(tools: &Tools, moves: u32, out: &Path) -> anyhow::Result<()> {
    let context = Context::now();
    // It ends with the lab, long before its time is over.
    let seconds = (moves * 20 + 60).to_string();
    // Two requests each keep the link busy; perftest's 128 would be 4 GiB to drain.
    let all = format!("ib_write_bw -F -q 16 -s 2097152 -t 2 -Q 1 -D {seconds}");
    let argv: Vec<_> = all.split(' ').collect();
    let (mut sides, mut stock) = (Vec::new(), Vec::new());
    for in_flight in InFlight::ALL {
        for moved in ["sender", "receiver"] {
            let migrations = measure(tools, &argv, moved, in_flight, moves, &mut stock)?;
            let side = summarise(moved, in_flight, migrations);
            print(&side);
            sides.push(side);
        }
    }
    let stock_criu_gap = Summary::of(stock);
    println!(
        "CRIU alone takes {:.1} ms ({:.1} to {:.1}) for a small program without RDMA; service blackouts over it:",
        stock_criu_gap.median, stock_criu_gap.least, stock_criu_gap.most
    );
    for side in &sides {
        let (median, worst) = (side.service_blackout.median, side.service_blackout.most);
        println!(
            "  {} of the {}: median {:.2}, worst {:.2}",
            side.in_flight.name(),
            side.moved,
            median / stock_criu_gap.median,
            worst / stock_criu_gap.median
        );
    }
    let report = Report {
        context,
        program: argv.join(" "),
        unit: "ms",
        stock_criu_gap,
        sides,
    };
    std::fs::write(out, serde_json::to_vec_pretty(&report)?)
        .with_context(|| format!("cannot write {}", out.display()))?;
    println!("{}", out.display());
    Ok(())
}

fn measure(
    tools: &Tools,
    argv: &[&str],
    moved: &str,
    in_flight: InFlight,
    moves: u32,
    stock: &mut Vec<f64>,
) -> anyhow::Result<Vec<Migration>> {
    let lab = TestLab::up(tools, &["one", "other", "peer"])?;
    let (sender_host, receiver_host) = if moved == "sender" {
        ("one", "peer")
    } else {
        ("peer", "one")
    };
    let receiver = lab.instance(receiver_host, "receiver", argv)?;
    receiver.listens(PERFTEST_PORT)?;
    let address = receiver.address()?;
    let sender = lab.instance(sender_host, "sender", &[argv, &[&address]].concat())?;
    let instance = if moved == "sender" { &sender } else { &receiver };
    let mut migrations = Vec::new();
    let mut here = "one";
    for number in 1..=moves {
        Traffic::of(&lab, here)?
            .flows(BYTES_BETWEEN, FLOW_LIMIT)
            .with_context(|| sender.output().unwrap_or_default())?;
        here = if here == "one" { "other" } else { "one" };
        let moved = instance
            .migrate_with(here, in_flight.options())
            .and_then(|moved| moved.must_be_committed().map(|()| moved))
            .with_context(|| format!("move {number}{}", lab.logs()))?;
        migrations.push(moved);
        // While the partner is as busy as it is during a move.
        stock.push(stock::gap(0)?);
    }
    Traffic::of(&lab, here)?.flows(BYTES_BETWEEN, FLOW_LIMIT)?;
    lab.down()?;
    Ok(migrations)
}

fn summarise(moved: &'static str, in_flight: InFlight, migrations: Vec<Migration>) -> Side {
    let of = |get: &dyn Fn(&Migration) -> f64| Summary::of(migrations.iter().map(get));
    Side {
        moved,
        in_flight,
        service_blackout: of(&|migration| migration.service_blackout_ms),
        communication_blackout: of(&|migration| migration.communication_blackout_ms),
        total: of(&|migration| migration.total_ms),
        phases: PHASES
            .map(|phase| (phase, of(&|migration| migration.phases_ms[phase])))
            .to_vec(),
        migrations,
    }
}

fn print(side: &Side) {
    let way = side.in_flight.name();
    println!("{} moves of the {}, {way}, ms", side.migrations.len(), side.moved);
    println!("{:24} {:>9} {:>9} {:>9}", "", "median", "least", "worst");
    let line = |name: &str, summary: &Summary| {
        println!(
            "{name:24} {:>9.1} {:>9.1} {:>9.1}",
            summary.median, summary.least, summary.most
        );
    };
    for (phase, summary) in &side.phases {
        line(phase, summary);
    }
    line("service blackout", &side.service_blackout);
    line("communication blackout", &side.communication_blackout);
    line("total", &side.total);
    println!();
}
