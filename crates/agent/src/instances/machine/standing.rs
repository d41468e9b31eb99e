//! A guest that is this host's by the decision, and that QEMU has not let run yet.
//!
//! The decision has been made: what fails from then on cannot undo it, and must not keep the source from hearing of it. The source kills its QEMU then, and
//! whatever that one had still locked is free. So QEMU is asked again for a while. What it says no to for so long is an answer: the guest stands still,
//! `verbatim ps` says why, and whoever has mended that starts the move, or the agent, again, or lets it run in QEMU's monitor.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::time::Instant;
use verbatim_vm::{Error, Machine};

use super::qemu::connect;
use super::{domain, leaving, locks, settings};
use crate::instances::home::Paths;
use crate::whole;

/// Why it stands still, in the folder of CRIU's logs.
const FILE: &str = "stands";

/// From one question to the next, at first and at most.
const AGAIN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// How long a QEMU is asked again that says no.
const LIMIT: Duration = Duration::from_secs(60);

/// Lets the guest run, if it is to, by a connection that is there. The guest stood still until now. What else QEMU is to be it becomes behind this.
pub(super) async fn let_run(paths: &Paths, machine: &Arc<Machine>, runs: bool) -> anyhow::Result<()> {
    if runs {
        machine.go_on().await?;
        machine.announce().await?;
        locks::say_unprotected(paths, machine);
    }
    is_well(paths, machine).await
}

/// The guest is as it is to be.
async fn is_well(paths: &Paths, machine: &Arc<Machine>) -> anyhow::Result<()> {
    domain::settle(paths).await;
    forget(paths)?;
    leaving::forget_ran(paths)?;
    settings::put_back_beside(paths, machine);
    Ok(())
}

/// The same for whoever comes later, and does not know how far it came.
async fn once(paths: &Paths, init_pid: i32) -> anyhow::Result<()> {
    let Some(runs) = leaving::ran(paths)? else {
        domain::settle(paths).await;
        if settings::noted(paths)?.is_some() {
            settings::put_back_beside(paths, &connect(paths, init_pid).await?);
        }
        return forget(paths);
    };
    let machine = connect(paths, init_pid).await?;
    let runs = runs && !machine.status().await?.running;
    let_run(paths, &machine, runs).await
}

/// Lets the guest of this host run, now or later; returns when QEMU was asked once.
pub async fn make_run(paths: &Paths, init_pid: i32) {
    if let Err(error) = once(paths, init_pid).await {
        later(paths, init_pid, &error);
    }
}

/// QEMU has refused, or said nothing: it is asked again.
pub(super) fn later(paths: &Paths, init_pid: i32, error: &anyhow::Error) {
    let why = format!("{error:#}");
    tracing::error!(
        folder = %paths.folder.display(),
        error = why,
        "the guest is this host's, and stands still; QEMU is asked again"
    );
    say(paths, &why);
    tokio::spawn(ask_again(paths.clone(), init_pid));
}

async fn ask_again(paths: Paths, init_pid: i32) {
    let (begun, mut pause) = (Instant::now(), AGAIN.0);
    loop {
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(AGAIN.1);
        let error = match once(&paths, init_pid).await {
            Ok(()) => {
                tracing::info!(folder = %paths.folder.display(), "the guest runs");
                return;
            }
            // Its end is the instance's.
            Err(_) if !is_there(init_pid) || !paths.work.exists() => return,
            Err(error) => error,
        };
        say(&paths, &format!("{error:#}"));
        // One that is silent may answer yet.
        let is_answer = matches!(
            error.downcast_ref(),
            Some(Error::Refused { .. } | Error::Libvirt(_))
        );
        if is_answer && begun.elapsed() > LIMIT {
            tracing::error!(
                folder = %paths.folder.display(),
                error = format!("{error:#}"),
                "QEMU is not asked any more to let the guest run"
            );
            return;
        }
    }
}

fn is_there(init_pid: i32) -> bool {
    std::path::Path::new("/proc").join(init_pid.to_string()).exists()
}

fn say(paths: &Paths, why: &str) {
    if let Err(error) = whole::write(&paths.work.join(FILE), why.as_bytes()) {
        tracing::warn!(
            error = format!("{error:#}"),
            "why a guest stands still is not shown"
        );
    }
}

/// Why it stands still; `None`: nobody has to let it run.
pub fn why(paths: &Paths) -> Option<String> {
    std::fs::read_to_string(paths.work.join(FILE)).ok()
}

/// Whether it runs by now, because of somebody else: then there is nothing left to say.
pub(super) async fn runs_already(paths: &Paths, init_pid: i32) -> anyhow::Result<bool> {
    let machine = connect(paths, init_pid).await?;
    if !machine.status().await?.running {
        return Ok(false);
    }
    is_well(paths, &machine).await?;
    Ok(true)
}

/// One more question, before it moves on.
pub(super) async fn may_have_been_mended(paths: &Paths, init_pid: i32) -> anyhow::Result<()> {
    match why(paths) {
        Some(_) => once(paths, init_pid)
            .await
            .context("its guest stands still here, and QEMU does not let it run"),
        None => Ok(()),
    }
}

fn forget(paths: &Paths) -> anyhow::Result<()> {
    whole::remove(&paths.work.join(FILE))
}
