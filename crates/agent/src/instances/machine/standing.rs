//! A guest that the decision made this host's, and that QEMU has not let run yet.
//!
//! A later failure cannot undo the decision, and must not keep the source from hearing of it. The source then
//! kills its QEMU, which frees that QEMU's locks. So QEMU here is asked again for a while. If it still
//! refuses, the guest stands still, and `verbatim ps` shows the reason. The operator removes that reason, and
//! then starts the next move or the agent, or lets the guest run in QEMU's monitor.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::time::Instant;
use verbatim_vm::{Error, Machine};

use super::qemu::connect;
use super::{domain, leaving, locks, settings};
use crate::instances::home::Paths;
use crate::whole;

/// File with the reason, in the folder of CRIU's logs.
const FILE: &str = "stands";

/// Pause between two questions: the first, and the longest.
const AGAIN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// Time after which a refusal is final.
const LIMIT: Duration = Duration::from_secs(60);

/// Lets the guest run, if it should, by an existing connection. The guest stood still until now. QEMU's
/// settings are put back in the background.
pub(super) async fn let_run(paths: &Paths, machine: &Arc<Machine>, runs: bool) -> anyhow::Result<()> {
    if runs {
        machine.go_on().await?;
        machine.announce().await?;
        locks::say_unprotected(paths, machine);
    }
    is_well(paths, machine).await
}

/// Cleans up when the guest runs, or stands still as it should.
async fn is_well(paths: &Paths, machine: &Arc<Machine>) -> anyhow::Result<()> {
    domain::settle(paths).await;
    forget(paths)?;
    leaving::forget_ran(paths)?;
    settings::put_back_beside(paths, machine);
    Ok(())
}

/// The same for a later caller, which does not know how far the last one got.
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

/// QEMU has refused, or has not answered: notes the reason, and asks again later.
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
            // QEMU has ended, and so has the instance.
            Err(_) if !is_there(init_pid) || !paths.work.exists() => return,
            Err(error) => error,
        };
        say(&paths, &format!("{error:#}"));
        // A QEMU that does not answer may still do so.
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

/// The reason why it stands still; `None`: it does not have to be let run.
pub fn why(paths: &Paths) -> Option<String> {
    std::fs::read_to_string(paths.work.join(FILE)).ok()
}

/// Whether it runs by now, for example by an operator's `cont`; then the note is removed.
pub(super) async fn runs_already(paths: &Paths, init_pid: i32) -> anyhow::Result<bool> {
    let machine = connect(paths, init_pid).await?;
    if !machine.status().await?.running {
        return Ok(false);
    }
    is_well(paths, &machine).await?;
    Ok(true)
}

/// Asks QEMU once more, before the next move.
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
