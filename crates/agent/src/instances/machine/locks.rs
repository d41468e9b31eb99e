//! Locks that the guest's last QEMU had on its images, for the next QEMU, which is to have the same
//! (`verbatim_vm::Held`).
//!
//! ```text
//!  images/NAME/locks  by this they go along
//!  criu/NAME/locks    on the host that the guest has come to, as long as it is there
//! ```

use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::time::Instant;
use verbatim_vm::{Held, Machine};

use super::settings::arrived;
use crate::instances::home::Paths;
use crate::whole;

const FILE: &str = "locks";

/// Limit of the wait for another process's lock. At that time the source's QEMU has released its locks, and
/// could not take them again, either. Most such locks last for a moment (`qemu-img info`).
const PATIENCE: Duration = Duration::from_secs(1);

/// Pause between two looks.
const LOOK: Duration = Duration::from_millis(10);

/// Sends the locks along: those that QEMU has now, and those that it was to have here. QEMU has fewer if the
/// guest has not run here, or if another process had a lock in conflict.
pub(super) fn send(paths: &Paths, mut held: Vec<Held>) -> anyhow::Result<()> {
    for known in noted(paths)? {
        let same = held
            .iter_mut()
            .find(|held| held.path == known.path && held.used & known.used == known.used);
        if let Some(same) = same {
            same.denied |= known.denied;
        }
    }
    whole::write_json(&paths.images.join(FILE), &held)
}

/// Locks of the guest's last QEMU; none if the guest did not come from another host.
fn noted(paths: &Paths) -> anyhow::Result<Vec<Held>> {
    let held = whole::read_json(
        &paths.work.join(FILE),
        "which images the guest's last QEMU had locked",
    )?;
    Ok(held.unwrap_or_default())
}

/// Reasons why the guest cannot leave: another process has a lock in conflict with those that this QEMU has, or
/// was to have here. Once QEMU has released its images, it would not get them back.
pub(super) fn obstacles(paths: &Paths, machine: &Machine) -> anyhow::Result<Vec<String>> {
    Ok(machine.taken(&noted(paths)?)?)
}

/// An error if there is such an obstacle.
pub(super) fn may_leave(paths: &Paths, machine: &Machine) -> anyhow::Result<()> {
    let taken = obstacles(paths, machine)?;
    ensure!(taken.is_empty(), "{}", taken.join("; "));
    Ok(())
}

/// Looks until there is no error, for a limited time.
pub(super) async fn looked_at(look: impl Fn() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        match look() {
            Err(_) if Instant::now() < end => tokio::time::sleep(LOOK).await,
            answer => return answer,
        }
    }
}

/// Notes the locks after the guest has been loaded. An error if its QEMU would not get them: the guest does
/// not come here then.
pub(super) async fn must_be_free(paths: &Paths, machine: &Machine) -> anyhow::Result<()> {
    // An agent of an earlier release sends no locks.
    let held: Vec<Held> = arrived(paths, FILE)
        .context("what the source says of its locks is damaged")?
        .unwrap_or_default();
    whole::write_json(&paths.work.join(FILE), &held)?;
    let look = || -> anyhow::Result<()> {
        let taken = machine.taken(&held)?;
        ensure!(taken.is_empty(), "{}", taken.join("; "));
        Ok(())
    };
    looked_at(look).await
}

/// Images of a running guest that other processes may write to, in words.
pub(super) fn unprotected(paths: &Paths, machine: &Machine) -> anyhow::Result<Vec<String>> {
    let images = machine.unprotected(&noted(paths)?)?;
    let words = images.iter().map(|image| {
        format!(
            "{} is not locked against others, since another process had a lock on it when the guest began to run here: end that process (a second QEMU, qemu-img, \
             qemu-nbd, a backup); QEMU locks the image where the guest moves to next, or is started anew",
            image.display()
        )
    });
    Ok(words.collect())
}

/// Logs such images, when the guest has begun to run.
pub(super) fn say_unprotected(paths: &Paths, machine: &Machine) {
    let folder = paths.folder.display();
    match unprotected(paths, machine) {
        Ok(troubles) => troubles
            .iter()
            .for_each(|trouble| tracing::error!(%folder, "{trouble}")),
        Err(error) => {
            let error = format!("{error:#}");
            tracing::warn!(%folder, error, "whether others may write to the guest's images is not known");
        }
    }
}
