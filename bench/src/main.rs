//! Measures what the papers measured, between hosts of a lab on this machine, and writes it to `out/bench/`.
//!
//! One module per table: [`bandwidth`] and [`blackout`]. Each prints a table for people and writes a JSON file for
//! programs, with every single measurement and what it was measured on.

mod bandwidth;
mod blackout;
mod context;
mod summary;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use verbatim_e2e::Tools;

/// Measures bandwidth and blackouts between virtual hosts on this machine.
#[derive(Debug, Parser)]
#[command(
    after_help = "Example:\n  bench/run blackout --moves 20\n\nNothing else should run on the machine meanwhile."
)]
struct Arguments {
    /// What to measure; everything if nothing is named.
    what: Vec<Bench>,
    /// Rounds of the bandwidth measurement.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Seconds of each single bandwidth measurement.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Moves of the sender, and as many of the receiver.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..))]
    moves: u32,
    /// The folder for the JSON files.
    #[arg(long, default_value = "out/bench")]
    out: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Bench {
    /// `ib_write_bw` against one TCP stream.
    Bandwidth,
    /// Moves of `ib_write_bw` with 16 queue pairs.
    Blackout,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if let Some(obstacle) = Tools::obstacle() {
        anyhow::bail!(obstacle);
    }
    let tools = Tools::find()?;
    std::fs::create_dir_all(&arguments.out)?;
    let wanted = |bench| arguments.what.is_empty() || arguments.what.contains(&bench);
    if wanted(Bench::Bandwidth) {
        bandwidth::run(
            &tools,
            arguments.rounds,
            arguments.seconds,
            &arguments.out.join("bandwidth.json"),
        )?;
    }
    if wanted(Bench::Blackout) {
        blackout::run(&tools, arguments.moves, &arguments.out.join("blackout.json"))?;
    }
    Ok(())
}
