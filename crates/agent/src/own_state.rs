//! What the agent keeps for itself is nobody else's of the host: key tables of processes, sessions, sockets of helpers.
//!
//! Each folder is made for root alone where it is made. An agent of an earlier release, or somebody's `chmod`, may have left one
//! open: before an agent serves anybody, it looks, and closes what is open.

use std::fs::{DirEntry, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::config::Config;

/// Rights of the group and of others.
const OTHERS: u32 = 0o077;

/// Folders of the agent's own, beside those of instances ([`crate::instances::recovery`]).
fn folders(config: &Config) -> Vec<PathBuf> {
    let in_memory = ["partners", "keepers", "behind"].map(|name| config.runtime_dir.join(name));
    let on_disk = ["journal", "volumes-that-move"].map(|name| config.state_dir.join(name));
    in_memory.into_iter().chain(on_disk).collect()
}

/// Takes what others may do with the agent's own folders, and with the files in them. An error if that cannot be done.
pub fn close(config: &Config) -> anyhow::Result<()> {
    for folder in folders(config) {
        close_folder(&folder)?;
    }
    close_one(&config.runtime_dir.join("forwarding"))
}

fn close_folder(folder: &Path) -> anyhow::Result<()> {
    // The folder first: nobody else can put anything into it after that.
    close_one(folder)?;
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.with_context(|| format!("cannot read {}", folder.display()))?,
    };
    let is_file = |entry: &DirEntry| entry.file_type().is_ok_and(|kind| kind.is_file());
    for entry in entries.flatten().filter(is_file) {
        close_one(&entry.path())?;
    }
    Ok(())
}

fn close_one(path: &Path) -> anyhow::Result<()> {
    let located = || format!("cannot look at {}", path.display());
    let found = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found.with_context(located)?,
    };
    let own = rustix::process::geteuid().as_raw();
    if found.is_symlink() || found.uid() != own {
        bail!(
            "{} is not the agent's own: secrets of programs would lie there; remove it and start the agent again",
            path.display()
        );
    }
    let mode = found.mode() & 0o7777;
    if mode & OTHERS == 0 {
        return Ok(());
    }
    std::fs::set_permissions(path, Permissions::from_mode(mode & !OTHERS))
        .with_context(|| format!("cannot take others' rights of {}", path.display()))?;
    tracing::warn!(path = %path.display(), mode = format!("{mode:o}"), "others had rights there, and have none now");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn what_others_may_read_is_closed() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("partners");
        std::fs::create_dir(&folder).unwrap();
        std::fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
        let kept = folder.join("0123");
        std::fs::write(&kept, "keys").unwrap();
        std::fs::set_permissions(&kept, Permissions::from_mode(0o644)).unwrap();
        close_folder(&folder).unwrap();
        assert_eq!((mode(&folder), mode(&kept)), (0o700, 0o600));
        close_folder(&folder).unwrap();
        close_folder(&root.path().join("none")).unwrap();
    }

    #[test]
    fn what_leads_elsewhere_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let link = root.path().join("keepers");
        std::os::unix::fs::symlink("/tmp", &link).unwrap();
        let refused = close_folder(&link).unwrap_err().to_string();
        assert!(refused.contains("not the agent's own"), "{refused}");
    }
}
