//! How the guest's last QEMU had locked its images, for the next one, which is to have them so (`verbatim_vm::Held`).
//!
//! ```text
//!  images/NAME/locks  by this they go along
//!  criu/NAME/locks    on the host that the guest has come to, as long as it is there
//! ```

use anyhow::{Context, ensure};
use verbatim_vm::{Held, Machine};

use super::settings::arrived;
use crate::instances::home::Paths;
use crate::whole;

const FILE: &str = "locks";

/// Has them go along.
pub(super) fn send(paths: &Paths, held: &[Held]) -> anyhow::Result<()> {
    whole::write_json(&paths.images.join(FILE), &held)
}

/// Takes them where the guest has been loaded. An error if its QEMU would not have its images so: the guest does not come here then.
pub(super) fn must_be_free(paths: &Paths, machine: &Machine) -> anyhow::Result<()> {
    // An agent of an earlier release sends none.
    let held: Vec<Held> = arrived(paths, FILE)
        .context("what the source says of its locks is damaged")?
        .unwrap_or_default();
    whole::write_json(&paths.work.join(FILE), &held)?;
    let taken = machine.taken(&held)?;
    ensure!(taken.is_empty(), "{}", taken.join("; "));
    Ok(())
}

/// Which images of a guest that runs others may write to, in words.
pub(super) fn unprotected(paths: &Paths, machine: &Machine) -> anyhow::Result<Vec<String>> {
    let held: Option<Vec<Held>> = whole::read_json(
        &paths.work.join(FILE),
        "which images the guest's last QEMU had locked",
    )?;
    let images = machine.unprotected(&held.unwrap_or_default())?;
    let words = images.iter().map(|image| {
        format!(
            "{} is not locked against others, since another process had a lock on it when the guest began to run here: end that process (a second QEMU, qemu-img, \
             qemu-nbd, a backup); QEMU locks the image where the guest moves to next, or is started anew",
            image.display()
        )
    });
    Ok(words.collect())
}

/// Says so for the log, when the guest has begun to run.
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
