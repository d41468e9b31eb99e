//! `make sim`: the simulated world, by seeds or exhaustively.

use std::ops::Range;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use strum::IntoEnumIterator;
use verbatim_simulation::coverage;
use verbatim_simulation::explore::{self, Found};
use verbatim_simulation::seeds::{self, Story, Tally};
use verbatim_simulation::world::{Quirk, Quirks};

/// Moves instances in a simulated world in which everything fails, and looks whether two copies ever run.
#[derive(Parser)]
#[command(after_help = "Example: verbatim-simulation seeds 0..1000000")]
struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Walks by these seeds; a failing one is shrunk and told.
    #[command(after_help = "Example: verbatim-simulation seeds 0..1000000 --threads 2")]
    Seeds {
        /// FIRST..END; the last one is not walked.
        #[arg(value_parser = range)]
        seeds: Range<u64>,
        /// How many walk side by side.
        #[arg(long, default_value_t = 1)]
        threads: u64,
    },
    /// Tells what happens in one walk.
    #[command(after_help = "Example: verbatim-simulation story 4711")]
    Story {
        /// The seed.
        seed: u64,
    },
    /// Looks at every world with at most so many faults.
    #[command(after_help = "Example: verbatim-simulation explore 2")]
    Explore {
        /// How many.
        faults: u8,
    },
    /// Puts each old fault back, and looks whether it is found: within so many seeds, and exhaustively with two faults.
    #[command(after_help = "Example: verbatim-simulation quirks")]
    Quirks {
        /// How many seeds.
        #[arg(long, default_value_t = 10_000)]
        seeds: u64,
    },
    /// Prints which machine has met which event in which state, after walking by these seeds.
    #[command(after_help = "Example: verbatim-simulation coverage 0..100000")]
    Coverage {
        /// FIRST..END.
        #[arg(value_parser = range)]
        seeds: Range<u64>,
    },
}

fn range(text: &str) -> Result<Range<u64>, String> {
    let (first, end) = text.split_once("..").ok_or("a range is FIRST..END")?;
    let number = |text: &str| {
        text.parse::<u64>()
            .map_err(|error| format!("{text:?} is no number: {error}"))
    };
    Ok(number(first)?..number(end)?)
}

fn main() -> ExitCode {
    match Args::parse().what {
        What::Seeds { seeds, threads } => walk(seeds, threads.max(1)),
        What::Story { seed } => {
            print!("{}", seeds::shrink(seed, Quirks::NONE, seeds::faults(seed)));
            ExitCode::SUCCESS
        }
        What::Explore { faults } => show(Quirks::NONE, faults),
        What::Quirks { seeds } => quirks(seeds),
        What::Coverage { seeds } => {
            seeds::run(seeds, Quirks::NONE);
            print!("{}", coverage::tables(&coverage::met()));
            ExitCode::SUCCESS
        }
    }
}

fn walk(seeds: Range<u64>, threads: u64) -> ExitCode {
    let began = Instant::now();
    let each = (seeds.end - seeds.start).div_ceil(threads);
    let parts: Vec<(Tally, Option<Story>)> = std::thread::scope(|scope| {
        let parts: Vec<_> = (0..threads)
            .map(|part| {
                let first = seeds.start + part * each;
                let part = first..(first + each).min(seeds.end);
                scope.spawn(move || seeds::run(part, Quirks::NONE))
            })
            .collect();
        parts
            .into_iter()
            .map(|part| part.join().expect("a walk does not panic"))
            .collect()
    });
    let mut all = Tally::default();
    let mut failed = false;
    for (tally, story) in parts {
        all.walks += tally.walks;
        all.steps += tally.steps;
        all.faults += tally.faults;
        all.moved += tally.moved;
        if let Some(story) = story {
            failed = true;
            print!("{story}");
        }
    }
    let took = began.elapsed();
    println!(
        "seeds {}..{}: {} walks, {} steps, {:.2} faults a walk, {} moved; {:.0} walks a second",
        seeds.start,
        seeds.end,
        all.walks,
        all.steps,
        all.faults as f64 / all.walks.max(1) as f64,
        all.moved,
        all.walks as f64 / took.max(Duration::from_millis(1)).as_secs_f64(),
    );
    if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

fn show(quirks: Quirks, faults: u8) -> ExitCode {
    let began = Instant::now();
    let report = explore::explore(quirks, faults);
    println!(
        "up to {faults} faults: {} worlds, {} steps, {:.1?}",
        report.worlds,
        report.steps,
        began.elapsed()
    );
    let way = match report.found {
        Found::Safe => {
            println!("nothing that must not happen; every world can end well");
            return ExitCode::SUCCESS;
        }
        Found::Violation(violation, way) => {
            println!("{violation:?}");
            way
        }
        Found::NeverEnds(way, world) => {
            println!("from here no end is good: {world:#?}");
            way
        }
    };
    for step in way {
        println!("  {step}");
    }
    ExitCode::FAILURE
}

fn quirks(within: u64) -> ExitCode {
    let mut failed = false;
    for quirk in Quirk::iter() {
        let name: &str = quirk.into();
        let (tally, story) = seeds::run(0..within, Quirks::only(quirk));
        match story {
            Some(story) => print!("{name} is found after {} walks by {story}", tally.walks),
            None => {
                failed = true;
                println!("{name} is NOT found within {within} seeds");
            }
        }
    }
    if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}
