//! The partner's throughput around a move, in samples of 5 ms (MigrRDMA §5.5.2, figure 5): `ib_write_bw`, 16 queue pairs,
//! 2 MiB messages, sender and receiver moved, with memory sent ahead as fast as can be and at a limited rate. The paper's blackout
//! there is about 150 ms.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use serde::Serialize;
use verbatim_e2e::{Migration, TestLab, Tools, Traffic};

use super::pair::{self, Moved};
use super::write;
use crate::context::Context;
use crate::soft_rnic::plot::{Axes, Line, Scale, draw};
use crate::summary::Summary;

const SAMPLE: Duration = Duration::from_millis(5);
/// Before the move is asked for, and after its end.
const AROUND: Duration = Duration::from_millis(500);
const PAPER_BLACKOUT_MS: f64 = 150.0;
/// Of `verbatim migrate --max-bandwidth`.
const LIMITS_MIB: [Option<u32>; 2] = [None, Some(32)];
/// A sample below this part of the mean before the move belongs to the blackout.
const SILENT: f64 = 0.05;

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    program: String,
    sample_ms: f64,
    paper_blackout_ms: f64,
    /// The first run of each side and limit is the one that is drawn.
    runs: Vec<Run>,
    silence: Vec<(Moved, Summary)>,
}

#[derive(Debug, Serialize)]
struct Run {
    moved: Moved,
    /// MiB/s.
    max_bandwidth: Option<u32>,
    /// Milliseconds since the move was asked for, and Gbit/s since the sample before.
    samples: Vec<(f64, f64)>,
    /// When the command that moves it had ended.
    end_ms: f64,
    /// The longest time without data that the partner saw.
    silence_ms: f64,
    /// Gbit/s before the move was asked for.
    before: f64,
    /// Gbit/s from then on until the silence: what pre-copy and pre-setup leave of it.
    meanwhile: f64,
    migration: Migration,
}

/// Measures, prints and writes.
pub fn run(tools: &Tools, repeats: u32, out: &Path) -> anyhow::Result<()> {
    let context = Context::now();
    // Two requests each are enough to keep the link busy; perftest's 128 would be 4 GiB to drain.
    let program = "ib_write_bw -F -q 16 -s 2097152 -t 2 -Q 1 -D 3600";
    println!("throughput of the partner in samples of 5 ms, {program}");
    println!(
        "{:9} {:>8} {:>12} {:>12} {:>8} {:>12} {:>12}",
        "moved", "MiB/s", "before Gb/s", "meanwhile", "less %", "silence ms", "blackout ms"
    );
    let argv: Vec<_> = program.split(' ').collect();
    let mut runs = Vec::new();
    for _ in 0..repeats {
        let moves = LIMITS_MIB
            .into_iter()
            .flat_map(|limit| Moved::BOTH.map(|moved| (moved, limit)));
        for (moved, limit) in moves {
            let run = measure(tools, &argv, moved, limit)?;
            println!(
                "{:9} {:>8} {:>12.1} {:>12.1} {:>8.1} {:>12.1} {:>12.1}",
                moved.name(),
                limit.map_or_else(|| "any".to_owned(), |limit| limit.to_string()),
                run.before,
                run.meanwhile,
                100.0 * (1.0 - run.meanwhile / run.before),
                run.silence_ms,
                run.migration.communication_blackout_ms
            );
            runs.push(run);
        }
    }
    plot(&runs, &out.with_extension("svg"))?;
    let silence = Moved::BOTH.map(|moved| {
        let mine = runs.iter().filter(|run| run.moved == moved);
        (moved, Summary::of(mine.map(|run| run.silence_ms)))
    });
    let report = Report {
        context,
        program: program.to_owned(),
        sample_ms: SAMPLE.as_secs_f64() * 1000.0,
        paper_blackout_ms: PAPER_BLACKOUT_MS,
        silence: silence.to_vec(),
        runs,
    };
    write(&report, out)
}

fn measure(tools: &Tools, argv: &[&str], moved: Moved, max_bandwidth: Option<u32>) -> anyhow::Result<Run> {
    let limit = max_bandwidth.map(|limit| limit.to_string());
    let options: Vec<_> = limit
        .iter()
        .flat_map(|limit| ["--max-bandwidth", limit])
        .collect();
    let lab = TestLab::up(tools, &["one", "other", "peer"])?;
    let run = pair::with_pair(&lab, argv, moved, |lab, instance| {
        pair::flows(lab)?;
        let traffic = Traffic::of(lab, "peer")?;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let sampler = scope.spawn(|| sample(&traffic, &stop));
            std::thread::sleep(AROUND);
            let start = Instant::now();
            let migration = instance.migrate_with("other", &options);
            let end = Instant::now();
            std::thread::sleep(AROUND);
            stop.store(true, Ordering::Relaxed);
            let counts = sampler.join().map_err(|_| anyhow!("the sampler has panicked"))?;
            let migration = migration?;
            migration.must_be_committed()?;
            Ok(summarise((moved, max_bandwidth), &counts, start, end, migration))
        })
    })?;
    lab.down()?;
    Ok(run)
}

/// Payload bytes so far, every 5 ms by the clock, however late the thread is woken.
fn sample(traffic: &Traffic, stop: &AtomicBool) -> Vec<(Instant, u64)> {
    let mut counts = Vec::new();
    let mut next = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        counts.push((Instant::now(), traffic.payload_bytes()));
        next += SAMPLE;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    counts
}

fn summarise(
    (moved, max_bandwidth): (Moved, Option<u32>),
    counts: &[(Instant, u64)],
    start: Instant,
    end: Instant,
    migration: Migration,
) -> Run {
    let since = |time: Instant| match time.checked_duration_since(start) {
        Some(after) => after.as_secs_f64() * 1000.0,
        None => -(start - time).as_secs_f64() * 1000.0,
    };
    let samples: Vec<(f64, f64)> = counts
        .windows(2)
        .map(|pair| {
            let seconds = (pair[1].0 - pair[0].0).as_secs_f64();
            let bits = 8.0 * (pair[1].1 - pair[0].1) as f64;
            (since(pair[1].0), bits / seconds / 1e9)
        })
        .collect();
    let before = mean(&samples, f64::MIN, 0.0);
    let (silence, silence_ms) = longest_silence(&samples, SILENT * before);
    Run {
        moved,
        max_bandwidth,
        silence_ms,
        meanwhile: mean(&samples, 0.0, silence),
        samples,
        end_ms: since(end),
        before,
        migration,
    }
}

/// The mean rate of the samples that end after `from` and by `to`. On a busy machine most samples of so short a time may be
/// empty.
fn mean(samples: &[(f64, f64)], from: f64, to: f64) -> f64 {
    let rates = samples.iter().filter(|(at, _)| *at > from && *at <= to);
    let (sum, count) = rates.fold((0.0, 0u32), |(sum, count), (_, rate)| (sum + rate, count + 1));
    sum / f64::from(count.max(1))
}

/// The longest time in a row whose samples are at most `most`: when it begins, and how long it is.
fn longest_silence(samples: &[(f64, f64)], most: f64) -> (f64, f64) {
    let mut longest = (0.0, 0.0);
    let mut loud = samples.first().map_or(0.0, |(at, _)| *at);
    for (at, rate) in samples {
        if *rate > most {
            loud = *at;
        }
        if at - loud > longest.1 {
            longest = (loud, at - loud);
        }
    }
    longest
}

fn plot(runs: &[Run], path: &Path) -> anyhow::Result<()> {
    let axes = Axes {
        title: "throughput of the partner while the other side is moved",
        x: "ms since the move was asked for",
        y: "Gbit/s",
        scale: Scale::Linear,
    };
    let lines: Vec<_> = runs
        .iter()
        .take(Moved::BOTH.len() * LIMITS_MIB.len())
        .map(|run| Line {
            name: match run.max_bandwidth {
                None => format!("{} moved", run.moved.name()),
                Some(limit) => format!("{} moved, {limit} MiB/s", run.moved.name()),
            },
            points: run.samples.clone(),
            peer: false,
        })
        .collect();
    draw(path, &axes, &lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_silence_is_between_two_loud_samples() {
        let samples = [
            (0.0, 9.0),
            (5.0, 0.0),
            (10.0, 9.0),
            (15.0, 0.1),
            (20.0, 0.0),
            (26.0, 0.0),
            (30.0, 8.0),
        ];
        assert_eq!(longest_silence(&samples, 0.5), (10.0, 16.0));
        assert_eq!(longest_silence(&samples[..1], 0.5).1, 0.0);
        assert_eq!(longest_silence(&[], 0.5).1, 0.0);
        assert_eq!(mean(&samples, 0.0, 10.0), 4.5);
        assert_eq!(mean(&samples, 30.0, 40.0), 0.0);
    }
}
