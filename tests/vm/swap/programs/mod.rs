//! Programs that swap: what they lose by it, with another host's memory, a local disk and compressed memory as swap, beside enough memory. As in the
//! paper, "Remote swap by RDMA" (RACS 2012), section 5: a sort of 1.2 times the memory, a Fourier transformation of 1.1 times, and bonnie++ on the same
//! disks.
//!
//! `make swap-bench`. All is measured by turns in one machine, of whose memory as much is taken away as is too much.

mod machine;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Parser;
use serde::{Deserialize, Serialize};

use machine::{Site, Way};

/// The first argument where programs are to be measured.
pub const ASKED_FOR: &str = "--programs";

/// So many times what there is for programs the sort has, and the transformation: the paper's has 1.3 GB in a machine of 1.25, of which the kernel has a part.
const SORT: f64 = 1.2;
const FFT: f64 = 1.1;

/// How long a program may take while most of what it has is swapped.
const LIMIT: Duration = Duration::from_secs(1200);

/// What a program ends with that the kernel has killed.
const KILLED: i32 = 128 + 9;

/// Measures programs in a virtual machine whose memory is too small for them, and writes JSON.
#[derive(Debug, Parser)]
#[command(
    name = "make swap-bench, or cargo test --release --workspace --test swap -- --programs",
    after_help = "Example:\n  make swap-bench ROUNDS=3\n\nNothing else should run on the machine meanwhile. Without KVM the machine's processor is emulated: a \
                  sort takes three times as long as by a real one, a transformation forty times, and the kernel's own work on the way of a page \
                  many times, too."
)]
struct Arguments {
    /// This bench, in place of the tests.
    #[arg(long, required = true)]
    programs: bool,
    /// How often each program runs with each kind of swap.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// What the transformation has, in MiB: a power of two, and at least 64. The machine's memory and the sort follow from it.
    #[arg(long, default_value_t = 128, value_parser = power_of_two)]
    mib: u32,
    /// Leave bonnie++ out.
    #[arg(long)]
    without_bonnie: bool,
    /// The file for the JSON.
    #[arg(long, default_value = "out/swap-programs.json")]
    out: PathBuf,
}

fn power_of_two(text: &str) -> Result<u32, String> {
    let number: u32 = text.parse().map_err(|_| "not a number".to_owned())?;
    match number.is_power_of_two() && (64..=4096).contains(&number) {
        true => Ok(number),
        false => Err("not a power of two from 64 to 4096".to_owned()),
    }
}

/// What a program has said.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Timed {
    seconds: f64,
    /// Pages that the kernel has swapped meanwhile.
    pages_out: u64,
    pages_in: u64,
}

/// A run of a program.
#[derive(Debug, Serialize)]
struct Run {
    /// What there was for programs before it began, the kernel's reserve with it.
    free_mib: u64,
    /// Nothing where the kernel has killed it, since all memory and all swap were used.
    timed: Option<Timed>,
}

/// A program with one kind of swap.
#[derive(Debug, Serialize)]
struct Row {
    program: &'static str,
    way: Way,
    /// Of the runs that came to their end; nothing if one did not.
    median_seconds: Option<f64>,
    /// Of the speed with enough memory.
    part_of_speed: Option<f64>,
    asked: f64,
    runs: Vec<Run>,
}

/// bonnie++ on one disk: KiB a second, and seeks a second. Nothing where it was done too fast to be timed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Bonnie {
    write: Option<f64>,
    rewrite: Option<f64>,
    read: Option<f64>,
    seeks: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Files {
    way: Way,
    runs: Vec<Bonnie>,
}

#[derive(Debug, Serialize)]
struct Report {
    /// The machine's.
    processor: String,
    kernel: String,
    /// Runnable processes on the host in the minute before: above 0.5 something else was running.
    load_before: f64,
    /// What is left for programs.
    memory_mib: u32,
    sort_mib: u32,
    fft_mib: u32,
    rows: Vec<Row>,
    /// On ext4, with a file of twice the memory.
    bonnie: Vec<Files>,
}

/// Measures, prints and writes.
pub fn tell() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let load = std::fs::read_to_string("/proc/loadavg")?;
    let load_before = load.split(' ').next().and_then(|load| load.parse().ok());
    let (memory, sort) = sizes(arguments.mib);
    let site = Site::up(sort)?;
    let programs = [
        (
            "sort",
            SORT_ASKED,
            vec![site.program("sort"), sort.to_string(), "1".to_owned()],
        ),
        (
            "fft",
            FFT_ASKED,
            // A plane of 256 by 256 points of 16 bytes is a MiB.
            vec![
                site.program("fft"),
                "256".to_owned(),
                "256".to_owned(),
                arguments.mib.to_string(),
                "1".to_owned(),
            ],
        ),
    ];
    println!(
        "{memory} MiB for programs: a sort of {sort} MiB, a transformation of {} MiB",
        arguments.mib
    );
    let mut runs = [Way::ALL.map(|_| Vec::new()), Way::ALL.map(|_| Vec::new())];
    let mut bonnie = Way::DISKS.map(|way| Files {
        way,
        runs: Vec::new(),
    });
    for round in 1..=arguments.rounds {
        for (index, way) in Way::ALL.into_iter().enumerate() {
            for ((name, _, argv), runs) in programs.iter().zip(&mut runs) {
                let run = run(&site, way, memory, argv).with_context(|| format!("{name}, {}", way.name()))?;
                println!("round {round}: {name}, {}: {run:?}", way.name());
                runs[index].push(run);
            }
        }
        for files in bonnie.iter_mut().filter(|_| !arguments.without_bonnie) {
            let said = site.bonnie(files.way, memory)?;
            let found = read_bonnie(&said).with_context(|| format!("bonnie++ says {said:?}"))?;
            println!("round {round}: bonnie++, {}: {found:?}", files.way.name());
            files.runs.push(found);
        }
    }
    let rows = programs.iter().zip(runs);
    let rows = rows.flat_map(|((program, asked, _), runs)| rows_of(program, *asked, runs));
    let report = Report {
        processor: site.processor()?,
        kernel: site.kernel()?,
        load_before: load_before.context("no load average")?,
        memory_mib: memory,
        sort_mib: sort,
        fft_mib: arguments.mib,
        rows: rows.collect(),
        bonnie: bonnie.into(),
    };
    if let Some(folder) = arguments.out.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(&arguments.out, serde_json::to_vec_pretty(&report)?)
        .with_context(|| format!("cannot write {}", arguments.out.display()))?;
    println!("{}", arguments.out.display());
    Ok(())
}

/// What is asked: so much of the speed with enough memory. The paper has 0.70 and 0.46.
const SORT_ASKED: f64 = 0.8;
const FFT_ASKED: f64 = 0.55;

/// What there is for programs, and what is sorted, in MiB.
fn sizes(fft: u32) -> (u32, u32) {
    let memory = (f64::from(fft) / FFT).round();
    (memory as u32, (memory * SORT).round() as u32)
}

fn run(site: &Site, way: Way, memory: u32, argv: &[String]) -> anyhow::Result<Run> {
    let swap = site.swap(way, memory)?;
    let free_mib = site.free_mib()?;
    let ended = site.run(argv, LIMIT)?;
    swap.off()?;
    let (said, errors) = (&ended.stdout, String::from_utf8_lossy(&ended.stderr));
    let timed = match ended.code {
        0 => Some(serde_json::from_slice(said).with_context(|| format!("it says {said:?}"))?),
        KILLED if site.has_run_out()? => None,
        code => anyhow::bail!("{argv:?} ends with {code}: {errors}\n{}", site.console()),
    };
    let swapped = timed.is_some_and(|timed: Timed| timed.pages_out > 0);
    ensure!(
        timed.is_none() || swapped == (way != Way::Memory),
        "it was swapped or not as it should be: {timed:?}"
    );
    Ok(Run { free_mib, timed })
}

fn rows_of(program: &'static str, asked: f64, runs: [Vec<Run>; 4]) -> Vec<Row> {
    let mut in_memory = None;
    let rows = Way::ALL.into_iter().zip(runs).map(|(way, runs)| {
        let seconds: Option<Vec<f64>> = runs
            .iter()
            .map(|run| run.timed.map(|timed| timed.seconds))
            .collect();
        let median_seconds = seconds.map(median);
        if way == Way::Memory {
            in_memory = median_seconds;
        }
        let part_of_speed = median_seconds
            .zip(in_memory)
            .map(|(seconds, memory)| memory / seconds);
        let number = |number: Option<f64>, unit| {
            number.map_or("out of memory".to_owned(), |number| format!("{number:.2}{unit}"))
        };
        println!(
            "{program:>6} {:>32} {:>16} {:>16} (asked {asked})",
            way.name(),
            number(median_seconds, " s"),
            number(part_of_speed, ""),
        );
        Row {
            program,
            way,
            median_seconds,
            part_of_speed,
            asked,
            runs,
        }
    });
    rows.collect()
}

/// Of at least one.
fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    f64::midpoint(of[(of.len() - 1) / 2], of[of.len() / 2])
}

/// Reads the line for programs: bon_csv2html(1). What was too fast is some `+`.
fn read_bonnie(said: &str) -> Option<Bonnie> {
    let line = said.lines().rev().find(|line| line.contains(','))?;
    let fields: Vec<&str> = line.split(',').collect();
    let number = |index: usize| fields[index].parse().ok();
    (fields.len() > 20).then(|| Bonnie {
        write: number(11),
        rewrite: number(13),
        read: number(17),
        seeks: number(19),
    })
}
