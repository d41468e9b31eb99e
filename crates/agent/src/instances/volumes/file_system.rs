//! File systems on volumes: what is on a disk, and what is mounted where.

use std::io;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::instances::freeze;

/// The file system that is mounted, and made where there is nothing.
const FILE_SYSTEM: &str = "ext4";

/// A container that ends lets go of its mounts a moment later.
const RELEASE_LIMIT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);

/// Mounts what is on a block device, which is the volume of this name.
pub fn mount(device: &Path, folder: &Path, volume: &str, writable: bool) -> anyhow::Result<()> {
    let mode = match writable {
        true => MountFlags::empty(),
        false => MountFlags::RDONLY,
    };
    let flags = MountFlags::NOSUID | MountFlags::NODEV | mode;
    rustix::mount::mount(device, folder, FILE_SYSTEM, flags, None)
        .map_err(io::Error::from)
        .with_context(|| format!("cannot mount the volume {volume} ({})", device.display()))
}

/// Whether something is mounted on a folder.
pub fn is_mount_point(folder: &Path) -> bool {
    let device = |path: &Path| Some(rustix::fs::lstat(path).ok()?.st_dev);
    folder
        .parent()
        .is_some_and(|parent| device(parent) != device(folder))
}

/// Lets a file system go on, if it was brought to rest.
pub fn thaw(folder: &Path) -> anyhow::Result<()> {
    if is_mount_point(folder) {
        freeze::thaw(folder).with_context(|| format!("{} stays frozen", folder.display()))?;
    }
    Ok(())
}

/// Takes away whatever is mounted on a folder.
pub fn unmount(folder: &Path) -> anyhow::Result<()> {
    let begun = Instant::now();
    loop {
        match rustix::mount::unmount(folder, UnmountFlags::NOFOLLOW) {
            // There may be another one below it.
            Ok(()) => {}
            // Nothing is mounted.
            Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
            // Nor for somebody who may not even try.
            Err(Errno::PERM) if !is_mount_point(folder) => return Ok(()),
            // Somebody looks into it.
            Err(Errno::BUSY) if begun.elapsed() < RELEASE_LIMIT => std::thread::sleep(PAUSE),
            Err(errno) => {
                return Err(io::Error::from(errno))
                    .with_context(|| format!("cannot unmount {}", folder.display()));
            }
        }
    }
}

/// Makes a file system on a device that has no data at all; an error unless the device then has ours.
/// `is_new`: nothing was ever written to the volume. On a volume that was written to and where blkid finds
/// nothing, the data may be damaged, and no file system is made over it.
pub fn make(device: &Path, volume: &str, is_new: bool) -> anyhow::Result<()> {
    let probed = run(Command::new("blkid").args(["-p", "-o", "export"]).arg(device))?;
    // `man blkid`: 0 something was found, 2 nothing, 8 more than one thing.
    match probed.status.code() {
        Some(0) => {
            let text = String::from_utf8_lossy(&probed.stdout);
            let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
            match value("TYPE=").or(value("PTTYPE=")) {
                Some(FILE_SYSTEM) => Ok(()),
                Some(other) => bail!(
                    "there is {other} on the volume {volume}: an instance has volumes with {FILE_SYSTEM}, or with nothing at all"
                ),
                None => {
                    bail!("it is not known what is on the volume {volume}; blkid says {text:?}")
                }
            }
        }
        Some(2) if probed.stderr.is_empty() && !is_new => bail!(
            "no file system is found on the volume {volume}, which was used before: none is made, since its data may be damaged \
             (`verbatim volume attach {volume} --device` shows it; `mkfs.ext4` there makes a new one)"
        ),
        Some(2) if probed.stderr.is_empty() => {
            let made = run(Command::new("mkfs.ext4").arg("-q").arg(device))?;
            if !made.status.success() {
                bail!(
                    "no file system can be made on the volume {volume}: mkfs.ext4: {}",
                    String::from_utf8_lossy(&made.stderr).trim()
                );
            }
            tracing::info!(volume, "a new {FILE_SYSTEM} is made on it");
            Ok(())
        }
        _ => bail!(
            "it is not known what is on the volume {volume}: blkid: {} {}",
            probed.status,
            String::from_utf8_lossy(&probed.stderr).trim()
        ),
    }
}

fn run(command: &mut Command) -> anyhow::Result<Output> {
    let output = command.output();
    output.with_context(|| format!("cannot start {}", command.get_program().to_string_lossy()))
}

/// The loop devices that are mounted, by the third field of each line (proc_pid_mountinfo(5)).
pub fn loop_devices(table: &str) -> Vec<String> {
    let fields = table.lines().filter_map(|line| line.split(' ').nth(2));
    let numbers = fields.filter_map(|field| field.strip_prefix("7:"));
    numbers.map(|number| format!("/dev/loop{number}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounted_loop_devices_are_found() {
        let table = "29 1 253:0 / / rw - ext4 /dev/vda rw\n31 29 7:3 / /srv rw,nosuid - ext4 /dev/loop3 rw\n\
                     32 29 0:7 / /run rw - tmpfs tmpfs rw\n";
        assert_eq!(loop_devices(table), ["/dev/loop3"]);
    }
}
