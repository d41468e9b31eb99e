//! `verbatim demo`: unmodified RDMA programs move between the hosts of a lab of their own, while they run.
//!
//! ```text
//!  preflight   what the demo needs of this machine
//!  scenario    the three runs: who talks to whom, and who moves where
//!  stage       the lab, its agents and its RNICs' counters; taken down in every case
//!  play        one run: start, wait for traffic, move, wait for the end
//!    listening   when a server accepts connections
//!    sampler     the partner's byte counter, every 5 ms
//!    timeline    when the phases of a migration were, on the sampler's clock
//!  verdict     what each program said, and whether all is well
//!  record      report.json, and what the report crate shows
//! ```

mod listening;
mod play;
mod preflight;
mod progress;
mod record;
mod sampler;
mod scenario;
mod stage;
mod timeline;
mod verdict;

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};
use verbatim_report::{Report, Terminal};

use crate::args::DemoArguments;
use preflight::Machine;
use progress::Progress;
use record::Record;
use stage::Stage;

/// Runs the demo and writes its report.
pub fn run(arguments: DemoArguments) -> anyhow::Result<ExitCode> {
    let machine = Machine::inspect().context("this machine cannot run the demo")?;
    super::in_runtime(async {
        // Taken before anything is started: from here on a signal ends the demo by the way that cleans up.
        let mut signals = Signals::new()?;
        let progress = Progress::new();
        let records = tokio::select! {
            records = perform(&machine, &arguments, &progress) => records?,
            name = signals.next() => {
                progress.finish();
                anyhow::bail!("ended by {name}; the lab has been taken down");
            }
        };
        progress.finish();
        publish(&machine, &arguments.out, &records)
    })
}

/// All runs. Dropping this takes the lab down.
async fn perform(
    machine: &Machine,
    arguments: &DemoArguments,
    progress: &Progress,
) -> anyhow::Result<Vec<Record>> {
    let stage = Stage::open(progress).await?;
    let mut records = Vec::new();
    for scenario in scenario::all(machine, arguments.seconds) {
        if arguments.only.is_empty() || arguments.only.contains(&scenario.number) {
            let played = play::play(&stage, &scenario, progress).await;
            records.push(Record::new(scenario, played));
        }
    }
    progress.now("taking the lab down");
    stage.close().await?;
    Ok(records)
}

/// Shows the report and writes it to the folder `out`.
fn publish(machine: &Machine, out: &Path, records: &[Record]) -> anyhow::Result<ExitCode> {
    let report = Report {
        machine: machine.describe(),
        runs: records.iter().map(Record::show).collect(),
        problems: Vec::new(),
    };
    let width = rustix::termios::tcgetwinsize(std::io::stdout()).map_or(100, |size| usize::from(size.ws_col));
    let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    print!(
        "{}",
        verbatim_report::terminal(&report, Terminal { width, colour })
    );
    std::fs::create_dir_all(out).with_context(|| format!("cannot make the folder {}", out.display()))?;
    let write = |name: &str, text: &str| {
        let path = out.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    write("report.html", &verbatim_report::html(&report))?;
    write("report.json", &record::json(records, report.is_ok())?)?;
    eprintln!("the report is in {}", out.join("report.html").display());
    Ok(if report.is_ok() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
}

/// The signals that end the demo.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let take = |kind| signal(kind).context("cannot take signals");
        Ok(Self {
            interrupt: take(SignalKind::interrupt())?,
            terminate: take(SignalKind::terminate())?,
            hangup: take(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.hangup.recv() => "SIGHUP",
        }
    }
}
