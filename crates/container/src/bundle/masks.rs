//! What a container's root must not reach in `/proc` and `/sys`: its number is that of the host's root, to whom the kernel
//! gives files such as `/proc/sys/kernel/core_pattern` by that number alone.
//!
//! The lists are the ones that container engines use. runc puts the mounts in place when it starts a container. When one
//! moves, what a path stands for may differ: another kernel has other files. So CRIU leaves out the masks
//! ([`MASKED`]; it would pack each masked folder with `tar` besides, some 40 ms in the blackout), and takes along what is
//! made read-only, since programs may hold files open there. Before the restored tasks run, [`complete`] puts in
//! place whatever this host's kernel has and the container lacks.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, StatVfsMountFlags, StatxAttributes, StatxFlags};
use rustix::mount::{MountFlags, mount, mount_bind, mount_remount};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
use serde_json::{Map, Value};

use super::spec::{TERMINALS, TERMINALS_OPTIONS};
use crate::error::Error;

/// What is hidden: it tells of other users, of the machine, or of when other programs run. A file reads as empty, a folder
/// has nothing in it.
pub(crate) const MASKED: [&str; 12] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
];

/// What can be read and not written: settings of the whole machine. `/proc/sys/net` is the container's own, and is read-only
/// all the same, as container engines have it.
pub(crate) const READ_ONLY: [&str; 6] = [
    "/proc/bus",
    "/proc/dynamic_debug",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// The names of the two lists in the `linux` object of a configuration (OCI runtime specification, `config-linux.md`).
pub(super) const LISTS: [(&str, &[&str]); 2] = [("maskedPaths", &MASKED), ("readonlyPaths", &READ_ONLY)];

/// Adds our paths to the lists of a configuration's `linux` object; what its author listed stays.
pub(super) fn insert(linux: &mut Map<String, Value>) {
    for (field, ours) in LISTS {
        let mut paths = match linux.remove(field) {
            Some(Value::Array(theirs)) => theirs,
            _ => Vec::new(),
        };
        paths.retain(Value::is_string);
        for path in ours {
            if !paths.iter().any(|theirs| theirs == path) {
                paths.push((*path).into());
            }
        }
        linux.insert(field.to_owned(), Value::Array(paths));
    }
}

/// Puts in place what a restored container lacks of the lists in its bundle's configuration. `pid` is its first process;
/// none of its tasks may run. Takes some 400 µs.
pub(crate) fn complete(bundle: &Path, pid: i32) -> Result<(), Error> {
    let file = bundle.join("config.json");
    let config = std::fs::read(&file).map_err(|source| Error::file("read", &file, source))?;
    let config: Value = serde_json::from_slice(&config).map_err(|error| Error::Config {
        path: file.clone(),
        reason: format!("not JSON: {error}"),
    })?;
    let namespace = Path::new("/proc").join(pid.to_string()).join("ns/mnt");
    let namespace =
        File::open(&namespace).map_err(|source| Error::file("open the namespace", &namespace, source))?;
    // A thread of its own, which ends in the container's namespace.
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| complete_inside(&namespace, &config));
        thread.join().expect("mounting does not panic")
    })
}

fn complete_inside(namespace: &File, config: &Value) -> Result<(), Error> {
    enter(namespace).map_err(|source| Error::file("enter the mount namespace", Path::new("/"), source))?;
    give_terminals(config)
        .map_err(|source| Error::file("mount terminals at", Path::new(TERMINALS), source))?;
    for (field, _) in LISTS {
        let paths = config["linux"][field].as_array().into_iter().flatten();
        for path in paths.filter_map(Value::as_str).map(Path::new) {
            let done = match field {
                "maskedPaths" => mask(path).map_err(|source| ("mask", source)),
                _ => make_read_only(path).map_err(|source| ("make read-only", source)),
            };
            done.map_err(|(action, source)| Error::file(action, path, source))?;
        }
    }
    Ok(())
}

/// Moves this thread into a mount namespace, whose root becomes its root.
fn enter(namespace: &File) -> io::Result<()> {
    // Who shares its root with other threads may not enter a mount namespace (`man 2 setns`).
    // SAFETY: only descriptors (`FILES`) and signal state are unsafe to unshare; root and working directory are neither.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))?;
    Ok(())
}

/// Mounts a file system of terminals where the container's configuration has one and its images had none: those of an instance that
/// comes from a host whose agent knows of none.
fn give_terminals(config: &Value) -> io::Result<()> {
    let mounts = config["mounts"].as_array().into_iter().flatten();
    let is_meant = |mount: &Value| mount["destination"] == TERMINALS && mount["type"] == "devpts";
    let path = Path::new(TERMINALS);
    let Some(place) = mounts
        .into_iter()
        .any(is_meant)
        .then(|| open(path))
        .transpose()?
        .flatten()
    else {
        return Ok(());
    };
    if is_mount_point(&place)? {
        return Ok(());
    }
    let options = CString::new(format!("newinstance,{}", TERMINALS_OPTIONS.join(",")))?;
    mount(
        "devpts",
        path,
        "devpts",
        MountFlags::NOSUID | MountFlags::NOEXEC,
        options.as_c_str(),
    )?;
    Ok(())
}

fn is_mount_point(file: &OwnedFd) -> io::Result<bool> {
    let status = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::TYPE)?;
    Ok(status.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// Opens a path of the container, if it is there. The container's tasks do not run, but may have laid links before.
fn open(path: &Path) -> io::Result<Option<OwnedFd>> {
    use rustix::fs::{ResolveFlags, openat2};

    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
        Ok(file) => Ok(Some(file)),
        // Nothing there; or only by way of a link, which none of the paths in a `/proc` or `/sys` of the kernel's has.
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Hides a path, unless something is mounted there.
fn mask(path: &Path) -> io::Result<()> {
    let Some(file) = open(path)? else {
        return Ok(());
    };
    let status = rustix::fs::statx(&file, c"", AtFlags::EMPTY_PATH, StatxFlags::TYPE)?;
    if status.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        return Ok(());
    }
    if FileType::from_raw_mode(status.stx_mode.into()) == FileType::Directory {
        let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount("tmpfs", path, "tmpfs", flags, c"mode=555,size=4k")?;
    } else {
        mount_bind("/dev/null", path)?;
    }
    Ok(())
}

/// Makes a path read-only, unless it is.
fn make_read_only(path: &Path) -> io::Result<()> {
    let Some(file) = open(path)? else {
        return Ok(());
    };
    let flags = rustix::fs::fstatvfs(&file)?.f_flag;
    if flags.contains(StatVfsMountFlags::RDONLY) {
        return Ok(());
    }
    mount_bind(path, path)?;
    let mut ours = MountFlags::BIND | MountFlags::RDONLY;
    for (theirs, flag) in [
        (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
        (StatVfsMountFlags::NODEV, MountFlags::NODEV),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
    ] {
        if flags.contains(theirs) {
            ours |= flag;
        }
    }
    mount_remount(path, ours, c"")?;
    Ok(())
}
