//! A `/dev` with the machine's devices, and one of the software RNIC's.
//!
//! Programs that bring their own idea of what an RNIC looks like, UCX among them, use only RNICs with a character device
//! `/dev/infiniband/uverbsN` that they may read and write, although they never open it. The software RNIC has no kernel
//! driver, so its device is one that does nothing: that of `/dev/null`.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, chmod, makedev, mknodat};
use rustix::mount::{MountFlags, MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use super::mount_new;
use crate::error::{Error, Result};

const DEV: &str = "/dev";

/// The number of `/dev/null` (the kernel's `Documentation/admin-guide/devices.txt`).
const NULL: (u32, u32) = (1, 3);

/// Puts a `/dev` of this host's own in the place of the machine's.
pub(super) fn prepare() -> Result<()> {
    let tree =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    let entries: Vec<_> = fs::read_dir(DEV)
        .and_then(Iterator::collect)
        .map_err(Error::io("read /dev"))?;
    let mut folders = Vec::new();
    let mut others = Vec::new();
    for entry in entries {
        let path = entry.path();
        let metadata = entry
            .metadata()
            .map_err(Error::io(format!("look at {}", path.display())))?;
        if metadata.is_dir() {
            let mounts =
                open_tree(CWD, &path, tree).map_err(Error::io(format!("clone {}", path.display())))?;
            folders.push((path, mounts));
        } else {
            let link = metadata.is_symlink().then(|| fs::read_link(&path)).transpose();
            others.push((path, metadata, link.map_err(Error::io("read a link of /dev"))?));
        }
    }
    mount_new(
        "tmpfs",
        DEV,
        MountFlags::NOSUID | MountFlags::NOEXEC,
        Some(c"mode=0755"),
    )?;
    for (path, mounts) in folders {
        let place = || -> io::Result<()> {
            fs::create_dir(&path)?;
            move_mount(mounts, "", CWD, &path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
            Ok(())
        };
        place().map_err(Error::io(format!("place {}", path.display())))?;
    }
    for (path, metadata, link) in &others {
        copy(path, metadata, link.as_deref()).map_err(Error::io(format!("make {}", path.display())))?;
    }
    make_uverbs().map_err(Error::io("make the device of the software RNIC"))
}

/// Makes an entry as it was. Sockets and files that somebody has put there stay the machine's.
fn copy(path: &Path, metadata: &fs::Metadata, link: Option<&Path>) -> io::Result<()> {
    if let Some(target) = link {
        return std::os::unix::fs::symlink(target, path);
    }
    let kind = metadata.file_type();
    let kind = if kind.is_char_device() {
        FileType::CharacterDevice
    } else if kind.is_block_device() {
        FileType::BlockDevice
    } else {
        return Ok(());
    };
    let mode = Mode::from_raw_mode(metadata.permissions().mode() & 0o7777);
    mknodat(CWD, path, kind, mode, metadata.rdev())?;
    chmod(path, mode)?;
    std::os::unix::fs::chown(path, Some(metadata.uid()), Some(metadata.gid()))
}

/// Makes the software RNIC's device. Where the machine has RNICs of its own the folder is the machine's, and stays as it
/// is: there is an `uverbs0` in it.
fn make_uverbs() -> io::Result<()> {
    let folder = Path::new(DEV).join("infiniband");
    if folder.exists() {
        return Ok(());
    }
    fs::create_dir(&folder)?;
    let path = folder.join("uverbs0");
    let mode = Mode::from_raw_mode(0o666);
    mknodat(
        CWD,
        &path,
        FileType::CharacterDevice,
        mode,
        makedev(NULL.0, NULL.1),
    )?;
    chmod(&path, mode)?;
    Ok(())
}
