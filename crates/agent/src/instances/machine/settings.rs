//! How QEMU was set before a move, written down until it is so again: also by an agent that comes after the one that has changed it.
//!
//! ```text
//!  criu/NAME/settings    on both hosts
//!  images/NAME/settings  by this they go along: the machine that arrives is set as it was at its source
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

/// They are some hundred bytes long.
const LONGEST: u64 = 64 << 10;

/// Writes them down, before anything is changed.
pub(super) fn note(paths: &Paths, settings: &Settings) -> anyhow::Result<()> {
    for folder in [&paths.work, &paths.images] {
        write(folder, FILE, &serde_json::to_vec(settings)?)?;
    }
    Ok(())
}

/// Writes a file in one piece, or not at all.
pub(super) fn write(folder: &Path, name: &str, content: &[u8]) -> anyhow::Result<()> {
    let (written, path) = (folder.join(format!(".{name}")), folder.join(name));
    std::fs::write(&written, content)
        .and_then(|()| std::fs::rename(&written, &path))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Those of one that arrives: its source's, or its QEMU's own if the source's agent is an earlier one and has sent none.
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

/// How it is to be set; `None`: it is as it was.
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

/// Sets QEMU so, if it is not, while others go on. Where that fails it is done before the next move, or by the next agent.
pub(super) fn put_back_beside(paths: &Paths, machine: &Arc<Machine>) {
    let (paths, machine) = (paths.clone(), Arc::clone(machine));
    tokio::spawn(async move {
        if let Err(error) = put_back(&paths, &machine).await {
            let error = format!("{error:#}");
            tracing::warn!(folder = %paths.folder.display(), error, "QEMU is not set yet as it was before the move");
        }
    });
}

/// Sets QEMU so, if it is not; then nothing is noted any more.
pub(super) async fn put_back(paths: &Paths, machine: &Machine) -> anyhow::Result<()> {
    let Some(settings) = noted(paths)? else {
        return Ok(());
    };
    match machine.put_back(&settings).await {
        // It is not asked for ever for what it says no to. The guest is not concerned.
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

/// It is so again.
fn forget(paths: &Paths) -> anyhow::Result<()> {
    let path = paths.work.join(FILE);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
