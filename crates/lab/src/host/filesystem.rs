//! The mounts of a host: all of the machine's files, but with its own `/run`, `/proc`, `/sys`, `/dev` and `/dev/shm`.

mod devices;

use super::{RUNTIME_DIR, STATE_DIR};
use crate::cgroup;
use crate::config::LabConfig;
use crate::error::{Error, Result};
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount, mount_bind,
    mount_change, move_mount, open_tree, unmount,
};
use serde::Serialize;
use std::ffi::CStr;
use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

const CGROUPS: &str = "/sys/fs/cgroup";

/// Makes the host's view of the file system. `host_dir` lies on the machine, in what `/run` hides afterwards.
pub(super) fn prepare(config: &LabConfig, host_dir: &Path) -> Result<()> {
    let mut identity = Vec::new();
    for (file, mode) in [("ca.pem", 0o644), ("cert.pem", 0o644), ("key.pem", 0o600)] {
        let path = host_dir.join("tls").join(file);
        identity.push((
            file,
            mode,
            fs::read(&path).map_err(Error::io(format!("read {}", path.display())))?,
        ));
    }

    let state = host_dir.join("state");
    fs::create_dir_all(&state)
        .and_then(|()| fs::set_permissions(&state, fs::Permissions::from_mode(0o700)))
        .map_err(Error::io(format!("make {}", state.display())))?;

    // Before anything else: what is mounted here must not show up on the machine. What the machine mounts later shows up here, as on
    // any host.
    mount_change(
        "/",
        MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC,
    )
    .map_err(Error::io("keep the host's mounts from the machine"))?;
    // What outlives the host's programs, as a disk does. From here on the machine's `/run` goes out of sight.
    let what = "take the host's state along";
    let tree = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let state = open_tree(CWD, &state, tree).map_err(Error::io(what))?;
    let table = fs::read_to_string("/proc/self/mountinfo").map_err(Error::io("read /proc/self/mountinfo"))?;
    let plain = MountFlags::NOSUID | MountFlags::NODEV;
    detach(&table, "/proc")?;
    mount_new("proc", "/proc", plain | MountFlags::NOEXEC, None)?;
    mount_sys(&table, plain | MountFlags::NOEXEC)?;
    // No size is set: half of the machine's memory. Instances' registered memory lives here.
    detach(&table, "/run")?;
    mount_new("tmpfs", "/run", plain, Some(c"mode=0755"))?;
    devices::prepare()?;
    mount_new("tmpfs", "/dev/shm", plain, Some(c"mode=1777"))?;

    let fill = || {
        fs::DirBuilder::new().mode(0o700).create(STATE_DIR)?;
        move_mount(
            &state,
            "",
            CWD,
            STATE_DIR,
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
        )?;
        let runtime = Path::new(RUNTIME_DIR);
        let tls = runtime.join("tls");
        fs::DirBuilder::new().mode(0o755).create(runtime)?;
        fs::DirBuilder::new().mode(0o755).create(&tls)?;
        for (file, mode, content) in &identity {
            let mut to = fs::OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(*mode)
                .open(tls.join(file))?;
            io::Write::write_all(&mut to, content)?;
        }
        let mut hosts = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o644)
            .open(runtime.join("hosts.json"))?;
        io::Write::write_all(&mut hosts, &serde_json::to_vec_pretty(&directory(config))?)?;
        name_hosts(config)
    };
    fill().map_err(Error::io(format!("fill {RUNTIME_DIR}")))
}

/// An entry of `hosts.json`, where agents look up each other's addresses.
#[derive(Serialize)]
struct Entry<'a> {
    name: &'a str,
    address: Ipv4Addr,
    /// It is this machine's own.
    trusted_network: bool,
}

fn directory(config: &LabConfig) -> Vec<Entry<'_>> {
    let hosts = config.hosts.iter().enumerate();
    hosts
        .map(|(index, host)| Entry {
            name: &host.name,
            address: config.address(index),
            trusted_network: true,
        })
        .collect()
}

/// The hosts' names for every program in the host, over the machine's own /etc/hosts.
fn name_hosts(config: &LabConfig) -> io::Result<()> {
    let mut text = "127.0.0.1 localhost\n::1 localhost\n".to_owned();
    for Entry { name, address, .. } in directory(config) {
        text.push_str(&format!("{address} {name}\n"));
    }
    let names = Path::new("/run/hosts");
    fs::write(names, text)?;
    if Path::new("/etc/hosts").exists() {
        mount_bind(names, "/etc/hosts")?;
    }
    Ok(())
}

/// A `/sys` that shows this network namespace, with the machine's cgroups in it, which runc needs.
fn mount_sys(table: &str, flags: MountFlags) -> Result<()> {
    let what = "take the machine's cgroup mounts along";
    let tree =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    let cgroups = open_tree(CWD, CGROUPS, tree).map_err(Error::io(what))?;
    detach(table, "/sys")?;
    mount_new("sysfs", "/sys", flags, None)?;
    move_mount(cgroups, "", CWD, CGROUPS, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(Error::io(what))?;
    // Their containers would make groups there: see `cgroup`.
    let hierarchies = cgroup::mounted(table).into_iter();
    for hierarchy in hierarchies.filter(|found| found.shares_cpu && found.point.starts_with(CGROUPS)) {
        unmount(hierarchy.point.as_path(), UnmountFlags::DETACH)
            .map_err(Error::io(format!("hide {}", hierarchy.point.display())))?;
    }
    // Where v1 and v2 are mounted side by side, runc makes a container's v2 group at the root of the hierarchy whatever
    // group it is in itself, so containers of one name on two hosts would share it. It does without.
    match unmount("/sys/fs/cgroup/unified", UnmountFlags::DETACH) {
        Ok(()) | Err(Errno::NOENT | Errno::INVAL) => Ok(()),
        Err(errno) => Err(Error::io("hide the v2 cgroups beside v1")(errno)),
    }
}

/// Unmounts, for this host alone, what the machine has mounted at or below `top`: out of sight it would still be held,
/// for example network namespaces that somebody has named and wants to be rid of.
fn detach(table: &str, top: &str) -> Result<()> {
    // The table is in the order of mounting, and what is on top goes first.
    for point in mount_points(table)
        .rev()
        .filter(|point| Path::new(point).starts_with(top))
    {
        match unmount(&*point, UnmountFlags::DETACH) {
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
            Err(errno) => return Err(Error::io(format!("unmount {point} in the host"))(errno)),
        }
    }
    Ok(())
}

/// The fifth field of each line of a mountinfo file, with its escapes undone: proc_pid_mountinfo(5).
fn mount_points(table: &str) -> impl DoubleEndedIterator<Item = String> {
    let fields = table.lines().filter_map(|line| line.split(' ').nth(4));
    fields.map(|field| {
        let escapes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
        escapes.iter().fold(field.to_owned(), |text, (escape, plain)| {
            text.replace(escape, plain)
        })
    })
}

fn mount_new(kind: &str, target: &str, flags: MountFlags, data: Option<&CStr>) -> Result<()> {
    mount(kind, target, kind, flags, data).map_err(Error::io(format!("mount {kind} on {target}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_may_have_any_name() {
        let table =
            "24 1 0:22 / /sys rw - sysfs sysfs rw\n30 24 0:26 / /run/a\\040b rw shared:3 - tmpfs none rw\n";
        assert_eq!(mount_points(table).collect::<Vec<_>>(), ["/sys", "/run/a b"]);
    }
}
