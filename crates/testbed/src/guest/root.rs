//! The machine's file system: the host's files by 9p, read-only, under a tmpfs that takes what is written.

use crate::error::{Error, Result};
use crate::image::MODULES_DIR;
use crate::names::{MODULES_PARAMETER, NAME_PARAMETER, ROOT_TAG};
use rustix::mount::{MountFlags, mount, mount_bind, mount_move};
use rustix::process::{chdir, chroot};
use rustix::system::{finit_module, sethostname};
use std::ffi::CStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// MODULE_INIT_COMPRESSED_FILE of the kernel's `include/uapi/linux/module.h`: the kernel unpacks it.
const COMPRESSED: i32 = 4;

/// cache=loose: nobody else writes what we read, as far as a test is concerned, and each look at the host costs a trip
/// through an emulated device. msize is the largest that virtio's ring takes.
const ROOT_OPTIONS: &CStr = c"trans=virtio,version=9p2000.L,cache=loose,msize=512000";

/// Makes the root and moves there.
pub(super) fn enter() -> Result<()> {
    let plain = MountFlags::NOSUID | MountFlags::NOEXEC;
    new("devtmpfs", "/dev", MountFlags::NOSUID, None)?;
    new("proc", "/proc", plain, None)?;
    let line = fs::read_to_string("/proc/cmdline").map_err(Error::file("read", "/proc/cmdline"))?;
    load_modules()?;

    mount(ROOT_TAG, "/lower", "9p", MountFlags::RDONLY, Some(ROOT_OPTIONS))
        .map_err(Error::io("mount the host's files"))?;
    new("tmpfs", "/layer", MountFlags::empty(), Some(c"mode=0755"))?;
    for dir in ["/layer/upper", "/layer/work"] {
        fs::create_dir(dir).map_err(Error::file("make", dir))?;
    }
    let layers = c"lowerdir=/lower,upperdir=/layer/upper,workdir=/layer/work";
    new("overlay", "/root", MountFlags::empty(), Some(layers))?;

    chdir("/root").map_err(Error::io("enter the root"))?;
    mount_move(".", "/").map_err(Error::io("move the root to /"))?;
    chroot(".").map_err(Error::io("take the root"))?;
    chdir("/").map_err(Error::io("enter /"))?;
    fill(&line)
}

/// Mounts what a system has besides files, and what this machine has in the place of the host's.
fn fill(line: &str) -> Result<()> {
    let plain = MountFlags::NOSUID | MountFlags::NOEXEC;
    new("devtmpfs", "/dev", MountFlags::NOSUID, None)?;
    new("proc", "/proc", plain, None)?;
    new("sysfs", "/sys", plain, None)?;
    new("cgroup2", "/sys/fs/cgroup", plain, None)?;
    // The host's sockets and locks mean nothing here.
    new("tmpfs", "/run", MountFlags::NOSUID, Some(c"mode=0755"))?;
    for (kind, dir, options) in [
        ("devpts", "/dev/pts", c"mode=620,ptmxmode=666"),
        ("tmpfs", "/dev/shm", c"mode=1777"),
    ] {
        fs::create_dir_all(dir).map_err(Error::file("make", dir))?;
        new(kind, dir, MountFlags::NOSUID, Some(options))?;
    }
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "fd/0"),
        ("/dev/stdout", "fd/1"),
        ("/dev/stderr", "fd/2"),
    ] {
        symlink(target, link).map_err(Error::file("make", link))?;
    }
    let modules = parameter(line, MODULES_PARAMETER)?;
    fs::create_dir_all("/lib/modules").map_err(Error::file("make", "/lib/modules"))?;
    mount_bind(modules, "/lib/modules").map_err(Error::file("show the modules at", modules))?;
    let name = parameter(line, NAME_PARAMETER)?;
    sethostname(name.as_bytes()).map_err(Error::io("set the host name"))
}

/// Loads the modules of the image in the order of their names.
fn load_modules() -> Result<()> {
    let dir = Path::new("/").join(MODULES_DIR);
    let list = || {
        let entries = fs::read_dir(&dir)?;
        entries
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<Vec<_>, _>>()
    };
    let mut modules = list().map_err(Error::file("read", &dir))?;
    modules.sort();
    for module in modules {
        let file = fs::File::open(&module).map_err(Error::file("open", &module))?;
        let compressed = module.extension().is_some_and(|extension| extension != "ko");
        finit_module(file, c"", if compressed { COMPRESSED } else { 0 })
            .map_err(Error::file("load the module", &module))?;
    }
    Ok(())
}

fn new(kind: &str, target: &str, flags: MountFlags, options: Option<&CStr>) -> Result<()> {
    mount(kind, target, kind, flags, options).map_err(Error::io(format!("mount {kind} on {target}")))
}

fn parameter<'a>(line: &'a str, name: &str) -> Result<&'a str> {
    line.split_ascii_whitespace()
        .find_map(|word| word.strip_prefix(name))
        .ok_or_else(|| Error::Config(format!("the kernel's command line lacks {name}: {line}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_found_among_others() {
        let line = "quiet testbed.name=a testbed.modules=/m";
        assert_eq!(parameter(line, MODULES_PARAMETER).unwrap(), "/m");
        assert!(parameter("quiet", NAME_PARAMETER).is_err());
    }
}
