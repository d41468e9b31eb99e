//! QEMU's settings from before a move, noted until they are put back, if need be by a later agent.
//!
//! ```text
//!  criu/NAME/settings    on both hosts
//!  images/NAME/settings  sent along: the machine that arrives gets the settings of its source
//! ```

use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use rustix::fs::OFlags;
use verbatim_vm::{Error, Machine, Settings};

use crate::beneath;
use crate::instances::home::Paths;

const FILE: &str = "settings";

/// Limit of the file, which has a few hundred bytes.
const LONGEST: u64 = 64 << 10;

/// Notes them, before anything is changed.
pub(super) fn note(paths: &Paths, settings: &Settings) -> anyhow::Result<()> {
    for folder in [&paths.work, &paths.images] {
        write(folder, FILE, &serde_json::to_vec(settings)?)?;
    }
    Ok(())
}

/// Writes a file atomically.
pub(super) fn write(folder: &Path, name: &str, content: &[u8]) -> anyhow::Result<()> {
    let (written, path) = (folder.join(format!(".{name}")), folder.join(name));
    std::fs::write(&written, content)
        .and_then(|()| std::fs::rename(&written, &path))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Notes those of a machine that arrives: its source's, or its QEMU's own if the source's agent is of an
/// earlier release and has sent none.
pub(super) fn arrive(paths: &Paths, own: &Settings) -> anyhow::Result<()> {
    let sent = beneath::open(&paths.images, Path::new(FILE), OFlags::RDONLY)?;
    let sent = sent.map(|file| {
        let mut text = Vec::new();
        file.take(LONGEST).read_to_end(&mut text)?;
        Ok::<Settings, io::Error>(serde_json::from_slice(&text)?)
    });
    let settings = sent
        .transpose()
        .context("how QEMU was set at the source is damaged")?;
    let settings = settings.as_ref().unwrap_or(own);
    write(&paths.work, FILE, &serde_json::to_vec(settings)?)
}

/// The settings to put back; `None`: they are as before.
pub(super) fn noted(paths: &Paths) -> anyhow::Result<Option<Settings>> {
    let path = paths.work.join(FILE);
    match std::fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        text => text
            .and_then(|text| Ok(serde_json::from_slice(&text)?))
            .map(Some)
            .with_context(|| format!("{} does not say how QEMU was set", path.display())),
    }
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
    forget(paths)
}

/// Removes the note.
fn forget(paths: &Paths) -> anyhow::Result<()> {
    let path = paths.work.join(FILE);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
