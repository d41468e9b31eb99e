//! Disks of virtual machines that are block devices of the host's: a LUN, a multipath device, a logical volume on shared storage.
//!
//! No file can be made beside one. That it is the same disk on two hosts is told by what it is known by everywhere, as the kernel has it in sysfs.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, bail};
use verbatim_container::Workload;

use crate::instances::record::Record;
use crate::proto::BlockDevice;

/// Where devices are.
const DEV: &str = "/dev";

/// Where the kernel says what a block device is.
const SYSFS: &str = "/sys/dev/block";

/// Which boot of which kernel this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// How an identity begins that no other machine can have: the number of the device in this kernel.
const ALONE: &str = "kernel ";

/// What tells which disk it is, in the folder of a device in sysfs: WWN of SCSI, of NVMe, the serial number that a hypervisor gives.
const KNOWN_BY: [&str; 3] = ["device/wwid", "wwid", "serial"];

/// Its name in `/dev`, if a path is that of a block device there.
pub fn name(path: &Path) -> Option<String> {
    let inside = path.strip_prefix(DEV).ok()?;
    let is_plain = inside
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    let is_device = fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device());
    (is_plain && is_device).then(|| inside.to_str().map(str::to_owned))?
}

/// The names of those that a container is given.
pub fn names(workload: &Workload) -> Vec<String> {
    let Workload::Command { binds, .. } = workload else {
        return Vec::new();
    };
    binds.iter().filter_map(|bind| name(&bind.path)).collect()
}

/// What a container is given beside them.
pub fn without(workload: &Workload) -> Workload {
    let mut workload = workload.clone();
    if let Workload::Command { binds, .. } = &mut workload {
        binds.retain(|bind| name(&bind.path).is_none());
    }
    workload
}

/// Those of a virtual machine, as another host must have them.
pub fn of(record: &Record) -> anyhow::Result<Vec<BlockDevice>> {
    let (Some(_), Workload::Command { binds, .. }) = (&record.machine, &record.workload) else {
        return Ok(Vec::new());
    };
    let disks = binds.iter().filter(|bind| name(&bind.path).is_some());
    let described = disks.map(|bind| {
        let path = bind.path.to_str().context("a path that is not UTF-8")?.to_owned();
        let identity = identity(&bind.path)?;
        Ok(BlockDevice { path, identity })
    });
    described.collect()
}

/// Why a virtual machine that has these cannot come to this host.
pub fn others(wanted: &[BlockDevice]) -> Vec<String> {
    wanted.iter().filter_map(other).collect()
}

fn other(wanted: &BlockDevice) -> Option<String> {
    let path = Path::new(&wanted.path);
    if name(path).is_none() {
        return Some(format!("{} there is no block device", wanted.path));
    }
    match identity(path) {
        Ok(here) if here == wanted.identity => None,
        Ok(_) if wanted.identity.starts_with(ALONE) => Some(format!(
            "{} has nothing by which two hosts could tell that it is the same disk (a WWN, a UUID of the device mapper, a serial number)",
            wanted.path
        )),
        Ok(here) => Some(format!(
            "{} there is another disk ({here}) than on the source ({}); disks must be where both hosts reach them",
            wanted.path, wanted.identity
        )),
        Err(error) => Some(format!("{error:#} there")),
    }
}

/// By what a block device is known.
fn identity(path: &Path) -> anyhow::Result<String> {
    let metadata = fs::metadata(path).with_context(|| format!("cannot look at {}", path.display()))?;
    if !metadata.file_type().is_block_device() {
        bail!("{} is no block device", path.display());
    }
    let number = metadata.rdev();
    let number = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    let boot = fs::read_to_string(BOOT_ID).with_context(|| format!("cannot read {BOOT_ID}"))?;
    let folder = Path::new(SYSFS).join(&number);
    let known = fs::canonicalize(&folder)
        .ok()
        .and_then(|folder| known_by(&folder));
    Ok(known.unwrap_or_else(|| format!("{ALONE}{} {number}", boot.trim())))
}

/// What sysfs says that is the same on every host.
fn known_by(folder: &Path) -> Option<String> {
    if let Some(number) = text(folder.join("partition")) {
        return Some(format!("partition {number} of {}", known_by(folder.parent()?)?));
    }
    let Some(mapped) = text(folder.join("dm/uuid")) else {
        return KNOWN_BY.iter().find_map(|name| text(folder.join(name)));
    };
    // The UUID of a multipath device has the WWN of its disk. That of LVM or LUKS (LVM-…, CRYPT-…) lies on the disk, and a copy of the disk has it, too.
    if mapped.starts_with("mpath-") {
        return Some(mapped);
    }
    let disks: Vec<_> = disks_below(folder)?.into_iter().collect();
    match disks.is_empty() {
        true => Some(mapped),
        false => Some(format!("{mapped} on {}", disks.join(", "))),
    }
}

/// The identities of the disks at the bottom of a mapped device. `None` if one of them has none.
fn disks_below(folder: &Path) -> Option<BTreeSet<String>> {
    let mut disks = BTreeSet::new();
    for entry in fs::read_dir(folder.join("slaves")).into_iter().flatten() {
        let below = fs::canonicalize(entry.ok()?.path()).ok()?;
        // A disk has one identity by all its paths, with and without multipath.
        let deeper = disks_below(&below)?;
        match deeper.is_empty() {
            true => _ = disks.insert(known_by(&below)?),
            false => disks.extend(deeper),
        }
    }
    Some(disks)
}

/// What a file says, if it is there and says something.
fn text(path: PathBuf) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_sysfs_says_is_taken_and_of_the_most_special_first() {
        let folder = tempfile::tempdir().unwrap();
        let sysfs = |device: &str, file: &str, text: &str| {
            let path = folder.path().join(device).join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        sysfs("sda", "device/wwid", "naa.5000c500a1b2c3d4\n");
        sysfs("sda/sda2", "partition", "2\n");
        sysfs("nvme0n1", "wwid", "eui.0025385b71b0a0f3\n");
        sysfs("dm-3", "dm/uuid", "LVM-abc\n");
        sysfs("dm-3", "serial", "x\n");
        sysfs("vda", "serial", "\n");
        sysfs("loop0/loop0p1", "partition", "1\n");
        let known = |device: &str| known_by(&folder.path().join(device));
        assert_eq!(known("sda").unwrap(), "naa.5000c500a1b2c3d4");
        assert_eq!(known("sda/sda2").unwrap(), "partition 2 of naa.5000c500a1b2c3d4");
        assert_eq!(known("nvme0n1").unwrap(), "eui.0025385b71b0a0f3");
        assert_eq!(known("dm-3").unwrap(), "LVM-abc");
        // A copy of a disk has the same logical volumes.
        sysfs("dm-4", "dm/uuid", "LVM-abc\n");
        sysfs("dm-5", "dm/uuid", "LVM-abc\n");
        sysfs("dm-6", "dm/uuid", "mpath-3600\n");
        sysfs("dm-7", "dm/uuid", "LVM-abc\n");
        let lies_on = |device: &str, disk: &str| {
            let slaves = folder.path().join(device).join("slaves");
            fs::create_dir_all(&slaves).unwrap();
            let name = disk.replace('/', "-");
            std::os::unix::fs::symlink(folder.path().join(disk), slaves.join(name)).unwrap();
        };
        lies_on("dm-4", "nvme0n1");
        lies_on("dm-4", "sda/sda2");
        lies_on("dm-5", "vda");
        lies_on("dm-6", "nvme0n1");
        lies_on("dm-7", "dm-6");
        lies_on("dm-7", "sda/sda2");
        let both = "LVM-abc on eui.0025385b71b0a0f3, partition 2 of naa.5000c500a1b2c3d4";
        assert_eq!(known("dm-4").unwrap(), both);
        assert_eq!(known("dm-7").unwrap(), both, "by another path");
        assert_eq!(known("dm-6").unwrap(), "mpath-3600");
        for unknown in ["vda", "loop0", "loop0/loop0p1", "dm-5"] {
            assert_eq!(known(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn what_is_no_disk_is_none() {
        for path in [
            "/dev/null",
            "/dev/../dev/null",
            "/dev",
            "/etc/passwd",
            "/dev/no-such-device",
        ] {
            assert_eq!(name(Path::new(path)), None, "{path}");
        }
        let wanted = BlockDevice {
            path: "/dev/null".to_owned(),
            identity: "naa.5".to_owned(),
        };
        assert!(others(&[wanted])[0].contains("is no block device"));
    }
}
