//! The kernel's RNICs: which device node each has, and what of it must be alike on two hosts.
//!
//! `/sys/class/infiniband_verbs/uverbsN` is there for each (kernel documentation, `stable/sysfs-class-infiniband`). With the RDMA
//! subsystem's default, one for all network namespaces (`rdma system`), containers see them all, and open those whose node they have.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Where the kernel lists the nodes.
const CLASS: &str = "/sys/class/infiniband_verbs";

/// An RNIC that the kernel drives, as far as it can be compared with that of another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rnic {
    /// Its name: `rxe0`, `mlx5_0`.
    pub name: String,
    /// What drives it: `mlx5_core`; for a software RNIC its kind, `rxe`.
    pub driver: String,
    /// The version of the driver's commands, which its half of libibverbs must know.
    pub abi: u32,
}

/// The device node of one, on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    /// Whose it is.
    pub rnic: Rnic,
    /// Its name in `/dev/infiniband`: `uverbs0`.
    pub name: String,
    pub major: u32,
    pub minor: u32,
}

/// The RNIC of this name on this host.
pub fn find_rnic(name: &str) -> Result<Rnic, Error> {
    let mut found = nodes_of(&[name.to_owned()])?;
    Ok(found.remove(0).rnic)
}

/// The nodes of the RNICs of these names, in their order.
pub(crate) fn nodes_of(names: &[String]) -> Result<Vec<Node>, Error> {
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let class = Path::new(CLASS);
    let all = in_class(class).map_err(|source| Error::file("read", class, source))?;
    let find = |name: &String| {
        let found = all.iter().find(|node| node.rnic.name == *name);
        found.cloned().ok_or_else(|| Error::NoRnic { name: name.clone() })
    };
    names.iter().map(find).collect()
}

/// Whether the device with this number is the node of an RNIC.
pub(crate) fn is_rnic(number: u64) -> bool {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    Path::new(&format!("/sys/dev/char/{major}:{minor}/ibdev")).exists()
}

/// The nodes of RNICs that a process has open by a mount which it does not see: somebody else has opened them, and handed them over. By number
/// of the mount and of the inode, each once.
pub fn handed_over(pid: i32) -> io::Result<BTreeSet<(u64, u64)>> {
    let process = Path::new("/proc").join(pid.to_string());
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(process.join("fd"))? {
        let path = entry?.path();
        // It may be closed meanwhile.
        let Ok(file) = fs::metadata(&path) else { continue };
        if file.file_type().is_char_device() && is_rnic(file.rdev()) {
            let number = path.file_name().unwrap_or_default();
            let Ok(info) = fs::read_to_string(process.join("fdinfo").join(number)) else {
                continue;
            };
            found.extend(mount_in(&info).map(|mount| (mount, file.ino())));
        }
    }
    if !found.is_empty() {
        let seen = fs::read_to_string(process.join("mountinfo"))?;
        let seen = seen
            .lines()
            .filter_map(|line| line.split(' ').next()?.parse().ok());
        let seen: BTreeSet<u64> = seen.collect();
        found.retain(|(mount, _)| !seen.contains(mount));
    }
    Ok(found)
}

/// The mount in a `/proc/PID/fdinfo/N`.
fn mount_in(info: &str) -> Option<u64> {
    let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:"))?;
    mount.trim().parse().ok()
}

fn in_class(class: &Path) -> io::Result<Vec<Node>> {
    let entries = match fs::read_dir(class) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        let folder = entry?.path();
        // The class has files of its own beside the nodes' folders.
        if let (true, Some(node)) = (folder.is_dir(), folder.file_name().and_then(|name| name.to_str()))
            && let Some(node) = read(&folder, node)
        {
            found.push(node);
        }
    }
    found.sort_by(|a, b| a.rnic.name.cmp(&b.rnic.name));
    Ok(found)
}

/// One of them; `None` if it has gone meanwhile.
fn read(folder: &Path, node: &str) -> Option<Node> {
    let text = |file: &str| Some(fs::read_to_string(folder.join(file)).ok()?.trim().to_owned());
    let number = text("dev")?;
    let (major, minor) = number.split_once(':')?;
    let name = text("ibdev")?;
    Some(Node {
        rnic: Rnic {
            driver: driver(folder, &name),
            abi: text("abi_version")?.parse().ok()?,
            name,
        },
        name: node.to_owned(),
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
    })
}

/// A software RNIC has no device beneath, and so no driver there: by custom its name says what it is.
fn driver(folder: &Path, name: &str) -> String {
    let link = fs::read_link(folder.join("device/driver")).ok();
    let driver = link
        .as_deref()
        .and_then(Path::file_name)
        .map(|name| name.to_string_lossy().into_owned());
    driver.unwrap_or_else(|| name.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_an_rnic_was_handed_none() {
        assert!(handed_over(std::process::id() as i32).unwrap().is_empty());
        assert_eq!(mount_in("pos:\t0\nflags:\t02\nmnt_id:\t30\nino:\t5\n"), Some(30));
        assert_eq!(mount_in(""), None);
        assert!(handed_over(-1).is_err());
    }

    #[test]
    fn rnics_are_read_from_the_class() {
        let class = tempfile::tempdir().unwrap();
        fs::write(class.path().join("abi_version"), "6\n").unwrap();
        for (node, minor, ibdev, driver) in [
            ("uverbs1", 193, "mlx5_0", Some("mlx5_core")),
            ("uverbs0", 192, "rxe0", None),
        ] {
            let folder = class.path().join(node);
            fs::create_dir_all(folder.join("device")).unwrap();
            fs::write(folder.join("dev"), format!("231:{minor}\n")).unwrap();
            fs::write(folder.join("ibdev"), format!("{ibdev}\n")).unwrap();
            fs::write(folder.join("abi_version"), "2\n").unwrap();
            if let Some(driver) = driver {
                std::os::unix::fs::symlink(format!("../drivers/{driver}"), folder.join("device/driver"))
                    .unwrap();
            }
        }
        let found = in_class(class.path()).unwrap();
        let seen: Vec<_> = found
            .iter()
            .map(|node| {
                let rnic = &node.rnic;
                (
                    rnic.name.as_str(),
                    node.name.as_str(),
                    node.minor,
                    rnic.driver.as_str(),
                    rnic.abi,
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                ("mlx5_0", "uverbs1", 193, "mlx5_core", 2),
                ("rxe0", "uverbs0", 192, "rxe", 2)
            ]
        );
        assert_eq!(in_class(&class.path().join("none")).unwrap(), []);
    }
}
