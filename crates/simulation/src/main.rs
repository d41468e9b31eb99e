//! `make sim`: the simulated worlds, by seeds or exhaustively.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand, ValueEnum};
use strum::IntoEnumIterator;
use verbatim_simulation::coverage;
use verbatim_simulation::explore::{self, Found};
use verbatim_simulation::seeds::{self, Story, Tally};
use verbatim_simulation::simulated::{Quirks, Simulated};
use verbatim_simulation::walked::{self, Walked};
use verbatim_simulation::{fill, history, post_copy, turns, world};

/// Moves instances in simulated worlds in which everything fails, and looks whether anything happens that must not.
#[derive(Parser)]
#[command(after_help = "Example: verbatim-simulation seeds 0..1000000")]
struct Args {
    /// Which world.
    #[arg(long, global = true, value_enum, default_value_t = Which::Decision)]
    world: Which,
    #[command(subcommand)]
    what: What,
}

#[derive(Clone, Copy, ValueEnum)]
enum Which {
    /// One session, its hosts, and who decides: two copies must never run.
    Decision,
    /// Several sessions that meet: both ends of a connection must never be moved at once.
    Turns,
    /// Memory that comes to an instance when it runs: none must be missing that nobody gives.
    Fill,
    /// The same where the source keeps it: it must not be given away while it is needed.
    PostCopy,
    /// Several sessions of one instance, one after the other: an earlier one must do nothing to what a later one has brought.
    History,
}

#[derive(Subcommand)]
enum What {
    /// Walks by these seeds; a failing one is shrunk and told.
    #[command(after_help = "Example: verbatim-simulation seeds 0..1000000 --threads 2")]
    Seeds {
        /// FIRST..END; the last one is not walked.
        #[arg(value_parser = walked::range)]
        seeds: Range<u64>,
        /// How many walk side by side.
        #[arg(long, default_value_t = 1)]
        threads: u64,
        /// A file of seeds that were walked before with the same sources; they are left out, and these are added to it.
        #[arg(long)]
        walked: Option<PathBuf>,
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
    /// Puts each fault back, and looks whether it is found within so many seeds.
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
        #[arg(value_parser = walked::range)]
        seeds: Range<u64>,
    },
}

fn main() -> ExitCode {
    let args = Args::parse();
    let is_good = match args.world {
        Which::Decision => run::<world::World>(args.what, "decision", &[world::World::new()]),
        Which::Turns => run::<turns::World>(args.what, "turns", &turns::small()),
        Which::Fill => run::<fill::World>(args.what, "fill", &[fill::World::new()]),
        Which::History => run::<history::World>(args.what, "history", &history::small()),
        Which::PostCopy => run::<post_copy::World>(args.what, "post-copy", &[post_copy::World::new()]),
    };
    match is_good {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// `firsts`: where exhaustive searches begin. Says whether all is as it should be.
fn run<W: Simulated>(what: What, name: &str, firsts: &[W]) -> Result<bool, String>
where
    W::Who: Send,
    W::Quirk: Send,
    W::Violation: Send,
{
    Ok(match what {
        What::Seeds {
            seeds,
            threads,
            walked: None,
        } => walk::<W>(seeds, threads.max(1)),
        What::Seeds {
            seeds,
            threads,
            walked: Some(file),
        } => walk_what_is_left::<W>(seeds, threads.max(1), name, &file)?,
        What::Story { seed } => {
            print!(
                "{}",
                seeds::shrink::<W>(seed, Quirks::NONE, seeds::faults::<W>(seed))
            );
            true
        }
        What::Explore { faults } => firsts.iter().all(|first| explore(first, faults)),
        What::Quirks { seeds } => quirks::<W>(seeds),
        What::Coverage { seeds } => {
            seeds::run::<W>(seeds, Quirks::NONE);
            print!("{}", coverage::tables(&coverage::met()));
            true
        }
    })
}

/// Walks by those seeds that were not walked before, and notes them.
fn walk_what_is_left<W: Simulated>(
    seeds: Range<u64>,
    threads: u64,
    name: &str,
    file: &Path,
) -> Result<bool, String>
where
    W::Who: Send,
    W::Quirk: Send,
    W::Violation: Send,
{
    let cannot =
        |what: &str, error: &dyn std::fmt::Display| format!("cannot {what} {}: {error}", file.display());
    let text = match std::fs::read_to_string(file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        text => text.map_err(|error| cannot("read", &error))?,
    };
    let mut walked = Walked::read(&text, walked::DIGEST).map_err(|error| cannot("read", &error))?;
    for seeds in walked.left(name, seeds) {
        if !walk::<W>(seeds.clone(), threads) {
            return Ok(false);
        }
        walked.add(name, seeds);
        std::fs::write(file, walked.to_string()).map_err(|error| cannot("write", &error))?;
    }
    println!(
        "{} seeds of this world were walked with these sources",
        walked.count(name)
    );
    Ok(true)
}

fn walk<W: Simulated>(seeds: Range<u64>, threads: u64) -> bool
where
    W::Who: Send,
    W::Quirk: Send,
    W::Violation: Send,
{
    let began = Instant::now();
    let each = (seeds.end.saturating_sub(seeds.start)).div_ceil(threads);
    let parts: Vec<(Tally, Option<Story<W>>)> = std::thread::scope(|scope| {
        let parts: Vec<_> = (0..threads)
            .map(|part| {
                let first = seeds.start + part * each;
                let part = first..(first + each).min(seeds.end);
                scope.spawn(move || seeds::run::<W>(part, Quirks::NONE))
            })
            .collect();
        parts
            .into_iter()
            .map(|part| part.join().expect("a walk does not panic"))
            .collect()
    });
    let mut all = Tally::default();
    let mut is_good = true;
    for (tally, story) in parts {
        all.walks += tally.walks;
        all.steps += tally.steps;
        all.faults += tally.faults;
        all.moved += tally.moved;
        if let Some(story) = story {
            is_good = false;
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
    is_good
}

fn explore<W: Simulated>(first: &W, faults: u8) -> bool {
    let began = Instant::now();
    let report = explore::explore(first.clone(), Quirks::NONE, faults);
    println!(
        "up to {faults} faults: {} worlds, {} steps, {:.1?}",
        report.worlds,
        report.steps,
        began.elapsed()
    );
    let way = match report.found {
        Found::Safe => {
            println!("nothing that must not happen; every world can end well");
            return true;
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
    false
}

fn quirks<W: Simulated>(within: u64) -> bool {
    let mut is_good = true;
    for quirk in W::Quirk::iter() {
        let name: &str = quirk.into();
        let (tally, story) = seeds::run::<W>(0..within, Quirks::only(quirk));
        match story {
            Some(story) => print!("{name} is found after {} walks by {story}", tally.walks),
            None => {
                is_good = false;
                println!("{name} is NOT found within {within} seeds");
            }
        }
    }
    is_good
}
