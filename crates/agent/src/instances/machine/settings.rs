//! QEMU's settings from before a move, noted until they are put back, if need be by a later agent.
//!
//! ```text
//!  criu/NAME/settings    on both hosts
//!  images/NAME/settings  sent along: the machine that arrives gets the settings of its source
//! ```

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use rustix::fs::OFlags;
use serde::de::DeserializeOwned;
use verbatim_vm::{Error, Machine, Settings};

use crate::beneath;
use crate::instances::home::Paths;
use crate::whole;

const FILE: &str = "settings";

/// Limit of a record's size in bytes. A record has some hundred bytes, or some thousand for a machine with
/// many disks.
const LONGEST: u64 = 256 << 10;

/// Notes the settings, before any change.
pub(super) fn note(paths: &Paths, settings: &Settings) -> anyhow::Result<()> {
    for folder in [&paths.work, &paths.images] {
        whole::write_json(&folder.join(FILE), settings)?;
    }
    Ok(())
}

/// Notes the settings for a machine that arrives: those of its source, or its QEMU's own if the source's
/// agent is an earlier release and has sent none.
pub(super) fn arrive(paths: &Paths, own: &Settings) -> anyhow::Result<()> {
    let sent = arrived(paths, FILE).context("how QEMU was set at the source is damaged")?;
    whole::write_json(&paths.work.join(FILE), sent.as_ref().unwrap_or(own))
}

/// A record that the source has sent for a guest that arrives, as JSON; `None` if it has sent none of that
/// name.
pub(super) fn arrived<T: DeserializeOwned>(paths: &Paths, name: &str) -> anyhow::Result<Option<T>> {
    let Some(file) = beneath::open(&paths.images, Path::new(name), OFlags::RDONLY)? else {
        return Ok(None);
    };
    let mut text = Vec::new();
    file.take(LONGEST).read_to_end(&mut text)?;
    Ok(Some(serde_json::from_slice(&text)?))
}

/// The settings to put back; `None`: they are as before.
pub(super) fn noted(paths: &Paths) -> anyhow::Result<Option<Settings>> {
    whole::read_json(&paths.work.join(FILE), "how QEMU was set")
}

/// Puts the settings back in the background. If that fails it is done before the next move, or by the next
/// agent.
pub(super) fn put_back_beside(paths: &Paths, machine: &Arc<Machine>) {
    let (paths, machine) = (paths.clone(), Arc::clone(machine));
    tokio::spawn(async move {
        if let Err(error) = put_back(&paths, &machine).await {
            let error = format!("{error:#}");
            tracing::warn!(folder = %paths.folder.display(), error, "QEMU is not set yet as it was before the move");
        }
    });
}

/// Puts the settings back, and removes the note.
pub(super) async fn put_back(paths: &Paths, machine: &Machine) -> anyhow::Result<()> {
    let Some(settings) = noted(paths)? else {
        return Ok(());
    };
    match machine.put_back(&settings).await {
        // A refusal is final: QEMU is not asked again. The guest is not affected.
        Err(error @ Error::Refused { .. }) => {
            tracing::error!(
                folder = %paths.folder.display(),
                %error,
                "QEMU is not set as it was before the move: `migrate_set_capability` and `migrate_set_parameter` in its monitor do that"
            );
        }
        other => other?,
    }
    // QEMU has its settings from before the move again.
    whole::remove(&paths.work.join(FILE))
}
