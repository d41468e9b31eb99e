//! The lab's cgroups: `verbatim/LAB/HOST/services` in every hierarchy that is mounted, v1 and v2.
//!
//! A host's processes are in the leaf `services` because on v2 a group with members cannot hand controllers down
//! (cgroups(7), "no internal processes"); runc takes that into account and puts containers beside it on v2, below it on
//! v1. Either way they are below the host's group, and two hosts may have containers of the same name.
//!
//! One hierarchy is left out: that of the controller `cpu` where it is of v1. Linux 6.13 to 6.19 lets a group with members on
//! several cores starve everybody else for seconds: each change of the group's weight on a core where it runs puts the group
//! back by what it is behind already (`reweight_entity` calls `place_entity`, whose average has the group in it). A lab
//! changes these weights thousands of times a second, since its programs and RNICs wake each other. Without a group
//! its sessions share the cores by the scheduler's autogroups: sched(7).

use crate::error::{Error, Result};
use rustix::io::Errno;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The group of all labs.
const TOP: &str = "verbatim";

/// The path, in every hierarchy, of the group that holds all of a host's processes.
pub(crate) fn parent(lab: &str, host: &str) -> String {
    format!("/{TOP}/{lab}/{host}")
}

/// Makes the groups of a host and moves this process there.
pub(crate) fn join(lab: &str, host: &str) -> Result<()> {
    for hierarchy in hierarchies()? {
        let group = make(&hierarchy, &[TOP, lab, host, "services"])?;
        // 0 is whoever writes.
        fs::write(group.join("cgroup.procs"), "0")
            .map_err(Error::io(format!("join cgroup {}", group.display())))?;
    }
    Ok(())
}

/// Removes all groups of a lab, whose processes are dead or dying. Gives up at `deadline`.
pub(crate) fn remove(lab: &str, deadline: Instant) -> Result<()> {
    for hierarchy in hierarchies()? {
        let group = hierarchy.join(TOP).join(lab);
        loop {
            match remove_tree(&group) {
                Ok(()) => break,
                // The last members have not left yet, and v1 has no event for that.
                Err(error)
                    if error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
                        && Instant::now() < deadline =>
                {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(error) => return Err(Error::io(format!("remove cgroup {}", group.display()))(error)),
            }
        }
        // Other labs may be in it.
        let _ = fs::remove_dir(hierarchy.join(TOP));
    }
    Ok(())
}

fn remove_tree(group: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(group) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    match fs::remove_dir(group) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn make(hierarchy: &Path, names: &[&str]) -> Result<PathBuf> {
    // Another lab may remove the common group between two steps.
    for attempt in 1.. {
        match try_make(hierarchy, names) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && attempt < 10 => {}
            other => return other.map_err(Error::io(format!("make a cgroup in {}", hierarchy.display()))),
        }
    }
    unreachable!("the tenth attempt returns")
}

fn try_make(hierarchy: &Path, names: &[&str]) -> io::Result<PathBuf> {
    let mut group = hierarchy.to_owned();
    for name in names {
        let parent = group.clone();
        group.push(name);
        match fs::create_dir(&group) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        // A new v1 cpuset has neither CPUs nor memory nodes, and takes no process until it has: cpuset(7).
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let (from, to) = (parent.join(file), group.join(file));
            if hierarchy.join("cgroup.controllers").exists() || !to.exists() {
                continue;
            }
            if fs::read_to_string(&to)?.trim().is_empty() {
                fs::write(&to, fs::read(&from)?)?;
            }
        }
    }
    Ok(group)
}

/// Where the cgroup hierarchies are mounted that a lab uses.
fn hierarchies() -> Result<Vec<PathBuf>> {
    let mounts =
        fs::read_to_string("/proc/self/mountinfo").map_err(Error::io("read /proc/self/mountinfo"))?;
    Ok(mounted(&mounts)
        .into_iter()
        .filter(|hierarchy| !hierarchy.shares_cpu)
        .map(|hierarchy| hierarchy.point)
        .collect())
}

/// A cgroup hierarchy, as it is mounted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Hierarchy {
    pub(crate) point: PathBuf,
    /// It is of version 1 and has the controller `cpu`. A lab keeps out of it: see [the module](self).
    pub(crate) shares_cpu: bool,
}

/// Every hierarchy in a table of mounts, once.
pub(crate) fn mounted(mounts: &str) -> Vec<Hierarchy> {
    let mut found: Vec<(&str, Hierarchy)> = Vec::new();
    for line in mounts.lines() {
        // 36 35 98:0 ROOT MOUNT_POINT OPTIONS [tags] - TYPE SOURCE SUPER_OPTIONS: proc_pid_mountinfo(5)
        let Some((mount, filesystem)) = line.split_once(" - ") else {
            continue;
        };
        let mut about = filesystem.split(' ');
        let (kind, options) = (about.next().unwrap_or_default(), about.nth(1).unwrap_or_default());
        let mut fields = mount.split(' ').skip(2);
        let (Some(device), Some(point)) = (fields.next(), fields.nth(1)) else {
            continue;
        };
        // One device number per hierarchy: a second mount of it shows the same groups.
        if kind.starts_with("cgroup") && !found.iter().any(|(known, _)| *known == device) {
            let hierarchy = Hierarchy {
                point: PathBuf::from(point),
                shares_cpu: kind == "cgroup" && options.split(',').any(|option| option == "cpu"),
            };
            found.push((device, hierarchy));
        }
    }
    found.into_iter().map(|(_, hierarchy)| hierarchy).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_hierarchy_is_found_once() {
        let mounts = "\
24 1 0:22 / /sys rw,nosuid - sysfs sysfs rw
30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs ro
31 30 0:27 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw
32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpu,cpuacct
33 30 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
34 30 0:29 / /elsewhere rw - cgroup cgroup rw,memory
";
        let expected = [
            ("/sys/fs/cgroup/unified", false),
            ("/sys/fs/cgroup/cpu,cpuacct", true),
            ("/sys/fs/cgroup/memory", false),
        ];
        let expected = expected.map(|(point, shares_cpu)| Hierarchy {
            point: PathBuf::from(point),
            shares_cpu,
        });
        assert_eq!(mounted(mounts), expected);
    }
}
