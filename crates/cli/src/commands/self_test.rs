//! `verbatim check --self-test`: whether a program that has an RNIC of this machine open can be moved, by moving one.
//!
//! ```text
//!  facts    what the machine and the device are; what is missing
//!  stage    two hosts on this machine, an agent each
//!  play     program starts, sends to itself, is moved, sends to itself
//!  result   each step's outcome, and what to do; the file
//! ```
//!
//! The program is this one in another role, with the guest library preloaded ([`run_role`], `verbatim_verbs::loopback`). What moves it are
//! the agents, as anything else: CRIU with its plugin, objects on trial, made again, connected to each other.

mod facts;
mod play;
mod result;
mod stage;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::CheckArguments;
use facts::Facts;
use result::{Outcome, SelfTest};
use stage::Stage;

/// The first argument of the program that is moved; the device follows.
const ROLE: &str = "--self-test-program";

/// How often that sends.
const PACE: Duration = Duration::from_millis(200);

/// Runs as the program that is moved, if it is to be that.
pub fn run_role() {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() != Some(ROLE) {
        return;
    }
    let device = arguments.next().unwrap_or_default();
    let Err(error) = talk(&device);
    println!("failed: {error}");
    std::process::exit(1);
}

fn talk(device: &str) -> Result<std::convert::Infallible, verbatim_verbs::loopback::RoundError> {
    let mut program = verbatim_verbs::loopback::Loopback::open(device)?;
    println!("opened {device}: {}", program.given());
    for round in 1.. {
        program.round()?;
        println!("{}{round}", play::ROUND);
        std::thread::sleep(PACE);
    }
    unreachable!("it is moved or ended before it can count no further")
}

/// Does the test. Status 0: the program has been moved and goes on.
pub async fn run(arguments: CheckArguments) -> anyhow::Result<ExitCode> {
    let device = facts::choose(arguments.self_test.as_deref().unwrap_or_default())?;
    let mut test = SelfTest::new(&device, !arguments.json);
    let facts = test.step("machine", facts::REMEDY, async { Facts::gather(&device) });
    let facts = facts.await;
    if let Some(facts) = facts {
        test.facts = facts;
        perform(&mut test, arguments.limit).await?;
    }
    let out = arguments
        .out
        .unwrap_or_else(|| PathBuf::from(format!("self-test-{device}.json")));
    let text = test.json()?;
    std::fs::write(&out, &text).with_context(|| format!("cannot write {}", out.display()))?;
    if arguments.json {
        print!("{text}");
    } else {
        eprintln!("{}; the result is in {}", test.verdict(), out.display());
    }
    Ok(match test.outcome() {
        Outcome::Works => ExitCode::SUCCESS,
        Outcome::Fails => ExitCode::from(1),
    })
}

/// Everything that leaves traces on the machine, which are gone when this returns.
async fn perform(test: &mut SelfTest, limit: Duration) -> anyhow::Result<()> {
    // Taken before anything is started: from here on a signal ends the test by the way that cleans up.
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let begun = Instant::now();
    let up = test.step("hosts", stage::REMEDY, Stage::open(limit));
    let Some(stage) = up.await else { return Ok(()) };
    let broken_off = tokio::select! {
        () = play::play(&stage, test) => None,
        () = tokio::time::sleep(limit.saturating_sub(begun.elapsed())) => Some(format!("it took longer than {limit:?} (--limit)")),
        _ = interrupt.recv() => Some("ended by SIGINT".to_owned()),
        _ = hangup.recv() => Some("ended by SIGHUP".to_owned()),
        _ = terminate.recv() => Some("ended by SIGTERM".to_owned()),
    };
    if let Some(why) = broken_off {
        test.broken_off(why);
    }
    if test.outcome() == Outcome::Fails {
        test.logs = stage.logs().await;
    }
    test.step("clean-up", stage::REMEDY, stage.close()).await;
    Ok(())
}
