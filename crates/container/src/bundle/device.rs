//! The device nodes of a container.

use std::borrow::Cow;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::mount::MountFlags;

use crate::error::{Error, make_open_dir};
use crate::rnic::Node;

/// A device that containers get. CRIU can restore a descriptor of it, unless it is an RNIC's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Device {
    /// Its name in `/dev`.
    pub name: Cow<'static, str>,
    /// A disk, and no character device.
    pub is_block: bool,
    pub major: u32,
    pub minor: u32,
}

/// The devices that every container gets (OCI runtime specification, "Default Devices"; numbers from the kernel's
/// `Documentation/admin-guide/devices.txt`).
const DEFAULT: [Device; 6] = [
    Device {
        name: Cow::Borrowed("null"),
        is_block: false,
        major: 1,
        minor: 3,
    },
    Device {
        name: Cow::Borrowed("zero"),
        is_block: false,
        major: 1,
        minor: 5,
    },
    Device {
        name: Cow::Borrowed("full"),
        is_block: false,
        major: 1,
        minor: 7,
    },
    Device {
        name: Cow::Borrowed("random"),
        is_block: false,
        major: 1,
        minor: 8,
    },
    Device {
        name: Cow::Borrowed("urandom"),
        is_block: false,
        major: 1,
        minor: 9,
    },
    Device {
        name: Cow::Borrowed("tty"),
        is_block: false,
        major: 5,
        minor: 0,
    },
];

/// The software RNIC's device, a second `null`: programs that bring their own idea of what an RNIC looks like, UCX among
/// them, use only RNICs with such a device that they may read and write, although they never open it.
const UVERBS: &str = "infiniband/uverbs0";

/// `/dev/userfaultfd` (Linux 6.1), whose minor number the kernel chooses.
const USERFAULTFD: &str = "userfaultfd";

/// Mounts the small tmpfs that holds the nodes: the file system of the bundle may be mounted `nodev`.
pub(super) fn make_tmpfs(dir: &Path) -> Result<(), Error> {
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    rustix::mount::mount("tmpfs", dir, "tmpfs", flags, c"mode=755,size=64k")
        .map_err(|errno| Error::file("mount a tmpfs at", dir, errno.into()))
}

/// Makes the nodes in `dir`, those of `rnics` and of the host's own `more` among them, and returns them.
pub(super) fn populate(dir: &Path, rnics: &[Node], more: &[String]) -> Result<Vec<Device>, Error> {
    make_open_dir(&dir.join("infiniband"))?;
    let nodes = rnics.iter().map(|node| Device {
        name: format!("infiniband/{}", node.name).into(),
        is_block: false,
        major: node.major,
        minor: node.minor,
    });
    let more = more.iter().filter_map(|name| of_host(name.clone()));
    let devices: Vec<_> = DEFAULT
        .into_iter()
        .chain(of_host(USERFAULTFD))
        .chain(more)
        .chain(nodes)
        .collect();
    for device in &devices {
        let path = dir.join(&*device.name);
        make_open_dir(path.parent().expect("it lies in `dir`"))?;
        make_node(&path, device)?;
    }
    for (name, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
        ("ptmx", "pts/ptmx"),
    ] {
        let path = dir.join(name);
        std::os::unix::fs::symlink(target, &path).map_err(|source| Error::file("link", &path, source))?;
    }
    for mount_point in ["shm", "pts"] {
        make_open_dir(&dir.join(mount_point))?;
    }
    if rnics.is_empty() {
        make_node(&dir.join(UVERBS), &DEFAULT[0])?;
    }
    Ok(devices)
}

/// Makes a node of a device that everybody may read and write.
fn make_node(path: &Path, device: &Device) -> Result<(), Error> {
    let mode = Mode::from_raw_mode(0o666);
    let kind = match device.is_block {
        true => FileType::BlockDevice,
        false => FileType::CharacterDevice,
    };
    mknodat(CWD, path, kind, mode, makedev(device.major, device.minor))
        .and_then(|()| rustix::fs::chmod(path, mode))
        .map_err(|errno| Error::file("make the device", path, errno.into()))
}

/// A device of the host's, by its name in `/dev`, which may be a link to another name.
fn of_host(name: impl Into<Cow<'static, str>>) -> Option<Device> {
    let name = name.into();
    let status = rustix::fs::stat(Path::new("/dev").join(&*name)).ok()?;
    let number = status.st_rdev;
    let is_block = match FileType::from_raw_mode(status.st_mode) {
        FileType::BlockDevice => true,
        FileType::CharacterDevice => false,
        _ => return None,
    };
    Some(Device {
        name,
        is_block,
        major: rustix::fs::major(number),
        minor: rustix::fs::minor(number),
    })
}

/// The major number of terminals' other ends (`Documentation/admin-guide/devices.txt`); more of them have those behind it.
const TERMINALS: std::ops::RangeInclusive<u32> = 136..=143;

/// `/dev/tty`.
const OWN_TERMINAL: (u32, u32) = (5, 0);

/// `/dev/ptmx`, by which a terminal is made.
const TERMINAL_MAKER: (u32, u32) = (5, 2);

/// What device rules allow beside the nodes of [`populate`]: terminals of the container's own, which have no nodes of ours.
pub(super) fn terminal_rules() -> Vec<serde_json::Value> {
    let rule = |major: u32, minor: Option<u32>| {
        let mut rule = serde_json::json!({"allow": true, "type": "c", "major": major, "access": "rw"});
        if let Some(minor) = minor {
            rule["minor"] = minor.into();
        }
        rule
    };
    let (major, minor) = TERMINAL_MAKER;
    vec![rule(major, Some(minor)), rule(*TERMINALS.start(), None)]
}

/// Whether character devices with this major number are terminals.
pub(super) fn are_terminals(major: u32) -> bool {
    TERMINALS.contains(&major)
}

/// Whether the character device with this number is a terminal, or makes them.
pub(crate) fn is_terminal(number: u64) -> bool {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    are_terminals(major) || (major, minor) == TERMINAL_MAKER
}

/// Whether each container may use the character device with this number.
pub(super) fn is_every_instances(major: u32, minor: u32) -> bool {
    let of_default = DEFAULT
        .iter()
        .any(|device| (device.major, device.minor) == (major, minor));
    of_default || (major, minor) == TERMINAL_MAKER || are_terminals(major)
}

/// Whether each container has the device at this path, as a node of its own: `/dev/urandom`, for one.
pub fn has(path: &Path) -> bool {
    let name = path.strip_prefix("/dev").ok();
    name.is_some_and(|name| DEFAULT.iter().any(|device| Path::new(&*device.name) == name))
}

/// Whether CRIU restores a descriptor of the device with this number, where it lies on the container's own mounts.
pub(crate) fn is_harmless(number: u64) -> bool {
    !is_own_terminal(number) && is_every_instances(rustix::fs::major(number), rustix::fs::minor(number))
}

/// Whether this is `/dev/tty`: whichever terminal the one who opens it has.
pub(crate) fn is_own_terminal(number: u64) -> bool {
    (rustix::fs::major(number), rustix::fs::minor(number)) == OWN_TERMINAL
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_each_container_has_is_known_by_its_path() {
        for path in ["/dev/urandom", "/dev/random", "/dev/null"] {
            assert!(has(Path::new(path)), "{path}");
        }
        for path in [
            "/dev/sda",
            "/dev",
            "/srv/urandom",
            "urandom",
            "/dev/infiniband/urandom",
        ] {
            assert!(!has(Path::new(path)), "{path}");
        }
    }
}
