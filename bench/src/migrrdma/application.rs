//! A real application moved in the middle of its work, against killing it and starting it again (MigrRDMA §5.6, figure 6:
//! the paper's is Hadoop over RDMA).
//!
//! Ours is Debian's LAMMPS on Open MPI over UCX ([`Simulation`]): two ranks in two instances, of which one is moved, or killed
//! with the other, when half of the steps are done. It keeps no checkpoint here, so that it starts at the beginning. The time is
//! that from the start of the instances to the end of the job; what it finds must be the same to the last digit each time.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, ensure};
use serde::Serialize;
use verbatim_e2e::{Found, Instance, Migration, Simulation, TestLab, Tools, eventually};

use super::write;
use crate::context::Context;
use crate::soft_rnic::plot::{Axes, Line, Scale, draw};
use crate::summary::Summary;

/// Where the moved rank is, where it goes, and where the other one is.
const HOSTS: [&str; 3] = ["one", "other", "peer"];
const STEPS: u32 = 1000;
/// How often the program's output is looked at.
const SAMPLE: Duration = Duration::from_millis(200);
const LIMIT: Duration = Duration::from_secs(300);
/// What the job's throughput lost, by the paper: with MigrRDMA, and with Hadoop's own failover.
const PAPER_LOSS: [f64; 2] = [0.125, 0.658];
/// And how much longer it took with MigrRDMA.
const PAPER_EXTRA_S: f64 = 3.0;

/// What happens when half of the work is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Event {
    Nothing,
    WorkerMoves,
    HeadMoves,
    Restart,
}

const EVENTS: [Event; 4] = [
    Event::Nothing,
    Event::WorkerMoves,
    Event::HeadMoves,
    Event::Restart,
];

impl Event {
    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "undisturbed",
            Self::WorkerMoves => "rank 1 moved",
            Self::HeadMoves => "mpirun and rank 0 moved",
            Self::Restart => "killed and started again",
        }
    }

    fn paper_loss(self) -> Option<f64> {
        match self {
            Self::Nothing => None,
            Self::WorkerMoves | Self::HeadMoves => Some(PAPER_LOSS[0]),
            Self::Restart => Some(PAPER_LOSS[1]),
        }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    context: Context,
    program: String,
    steps: u32,
    rows: Vec<Row>,
    paper_extra_s_moved: f64,
    /// The first of each event is the one that is drawn.
    runs: Vec<Run>,
}

#[derive(Debug, Serialize)]
struct Row {
    event: Event,
    seconds: Summary,
    /// Seconds more than undisturbed, by the medians.
    extra_s: f64,
    /// Part of the undisturbed throughput, steps a second over the whole job, that is lost.
    throughput_loss: f64,
    paper_throughput_loss: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Run {
    event: Event,
    seconds: f64,
    /// Seconds since the start, and the last step that was written then.
    samples: Vec<(f64, f64)>,
    migration: Option<Migration>,
    #[serde(skip)]
    found: Found,
}

/// Measures, prints and writes.
pub fn run(tools: &Tools, repeats: u32, out: &Path) -> anyhow::Result<()> {
    if let Some(obstacle) = Simulation::obstacle() {
        bail!(obstacle);
    }
    let context = Context::now();
    println!("{} steps of {}, in s", STEPS, Simulation::program());
    let mut runs: Vec<Run> = Vec::new();
    for _ in 0..repeats {
        for event in EVENTS {
            let run = measure(tools, event)?;
            let blackout = run.migration.as_ref().map_or_else(String::new, |migration| {
                format!("   service blackout {:.0} ms", migration.service_blackout_ms)
            });
            println!("{:26} {:>8.2}{blackout}", event.name(), run.seconds);
            runs.push(run);
            ensure!(
                runs[0].found == runs[runs.len() - 1].found,
                "it has not found the same as undisturbed:\n{}",
                runs[runs.len() - 1].found.lines.join("\n")
            );
        }
    }
    plot(&runs, &out.with_extension("svg"))?;
    let rows = rows(&runs);
    println!(
        "{:26} {:>8} {:>9} {:>18} {:>8}",
        "", "median s", "extra s", "throughput lost", "paper"
    );
    for row in &rows {
        println!(
            "{:26} {:>8.2} {:>9.2} {:>17.1}% {:>8}",
            row.event.name(),
            row.seconds.median,
            row.extra_s,
            100.0 * row.throughput_loss,
            row.paper_throughput_loss
                .map_or_else(|| "-".to_owned(), |loss| format!("{:.1}%", 100.0 * loss))
        );
    }
    let report = Report {
        context,
        program: Simulation::program(),
        steps: STEPS,
        rows,
        paper_extra_s_moved: PAPER_EXTRA_S,
        runs,
    };
    write(&report, out)
}

fn rows(runs: &[Run]) -> Vec<Row> {
    let seconds = EVENTS.map(|event| {
        let mine = runs.iter().filter(|run| run.event == event);
        Summary::of(mine.map(|run| run.seconds))
    });
    let undisturbed = seconds[0].median;
    let row = |(event, seconds): (Event, Summary)| Row {
        event,
        seconds,
        extra_s: seconds.median - undisturbed,
        throughput_loss: 1.0 - undisturbed / seconds.median,
        paper_throughput_loss: event.paper_loss(),
    };
    EVENTS.into_iter().zip(seconds).map(row).collect()
}

fn measure(tools: &Tools, event: Event) -> anyhow::Result<Run> {
    let lab = TestLab::up(tools, &HOSTS)?;
    let told = job(&lab, event).map_err(|error| error.context(lab.logs()));
    lab.down()?;
    told
}

/// One job from its start to its end.
fn job(lab: &TestLab, event: Event) -> anyhow::Result<Run> {
    let [one, other, peer] = HOSTS;
    let [head_host, worker_host] = match event {
        Event::HeadMoves => [one, peer],
        _ => [peer, one],
    };
    let mut watch = Watch {
        start: Instant::now(),
        samples: Vec::new(),
        step: AtomicU32::new(0),
    };
    let mut simulation = Simulation::start(lab, head_host, worker_host, "", STEPS)?;
    let migration = watch.during(&simulation, |step| {
        if event == Event::Nothing {
            return Ok(None);
        }
        eventually("half of the steps", LIMIT, || {
            Ok((step.load(Ordering::Relaxed) >= STEPS / 2).then_some(()))
        })?;
        match event {
            Event::Nothing => Ok(None),
            Event::WorkerMoves => simulation.worker.moves(other).map(Some),
            Event::HeadMoves => simulation.head.moves(other).map(Some),
            Event::Restart => {
                // The worker's host goes; what the head holds of the job is worth nothing without it.
                end(&simulation.worker)?;
                end(&simulation.head)?;
                Ok(None)
            }
        }
    })?;
    if event == Event::Restart {
        simulation = Simulation::start(lab, peer, other, "-again", STEPS)?;
    }
    let (found, seconds) = watch.during(&simulation, |_| {
        let found = simulation.found(STEPS, LIMIT)?;
        Ok((found, Instant::now()))
    })?;
    Ok(Run {
        event,
        seconds: (seconds - watch.start).as_secs_f64(),
        samples: watch.samples,
        migration,
        found,
    })
}

/// How far the work is over time.
struct Watch {
    start: Instant,
    samples: Vec<(f64, f64)>,
    step: AtomicU32,
}

impl Watch {
    /// Samples while `what` goes on, which is told the last step.
    fn during<T: Send>(
        &mut self,
        simulation: &Simulation<'_>,
        what: impl FnOnce(&AtomicU32) -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<T> {
        self.step.store(0, Ordering::Relaxed);
        let (step, samples, start) = (&self.step, &mut self.samples, self.start);
        std::thread::scope(|scope| {
            let goes_on = scope.spawn(move || what(step));
            while !goes_on.is_finished() {
                // While its instance moves, nobody may know.
                if let Ok(Some(now)) = simulation.step() {
                    step.store(now, Ordering::Relaxed);
                    samples.push((start.elapsed().as_secs_f64(), f64::from(now)));
                }
                std::thread::sleep(SAMPLE);
            }
            goes_on
                .join()
                .map_err(|_| anyhow!("the job's thread has panicked"))?
        })
    }
}

/// Kills an instance, if it has not ended by itself, and waits for its end.
fn end(instance: &Instance<'_>) -> anyhow::Result<()> {
    // It may end between the two by itself: each rank does when the other one is gone. What counts is that it has ended.
    let killed = instance.row()?.pid.map_or(Ok(()), |_| instance.kill());
    let ended = eventually(&format!("the end of {}", instance.name()), LIMIT, || {
        Ok(instance.row()?.pid.is_none().then_some(()))
    });
    ended.map_err(|error| killed.err().unwrap_or(error))
}

fn plot(runs: &[Run], path: &Path) -> anyhow::Result<()> {
    let axes = Axes {
        title: "work done over time: nothing, a move, or a kill at half of it",
        x: "s since the start",
        y: "steps",
        scale: Scale::Linear,
    };
    let lines: Vec<_> = EVENTS
        .into_iter()
        .filter_map(|event| runs.iter().find(|run| run.event == event))
        .map(|run| Line {
            name: run.event.name().to_owned(),
            points: run.samples.clone(),
            peer: run.event == Event::Nothing,
        })
        .collect();
    draw(path, &axes, &lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_is_told_from_the_undisturbed_median() {
        let run = |event, seconds| Run {
            event,
            seconds,
            samples: Vec::new(),
            migration: None,
            found: Found { lines: Vec::new() },
        };
        let seconds = [10.0, 12.5, 16.0, 20.0];
        let runs: Vec<_> = EVENTS
            .into_iter()
            .zip(seconds)
            .map(|(event, s)| run(event, s))
            .collect();
        let losses: Vec<_> = rows(&runs).iter().map(|row| row.throughput_loss).collect();
        for (loss, expected) in losses.iter().zip([0.0, 0.2, 0.375, 0.5]) {
            assert!((loss - expected).abs() < 1e-9, "{losses:?}");
        }
    }
}
