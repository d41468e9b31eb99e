//! What is mounted below the folders of a bundle: its root file system, and what it binds with all that is below (`rbind`).
//!
//! CRIU wants each bind mount named, and runc names those of the configuration alone. So a configuration is written anew when it is
//! run: what is mounted there on this host becomes a mount of the configuration, and `rbind` becomes `bind`. At another host the
//! same paths are bound, whether something is mounted there or not.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use serde_json::{Value, json};

use super::lookup::{is_bind, options};
use super::spec;

/// Options for how mounts follow others, which those below take over as they are.
const PROPAGATION: [&str; 8] = [
    "private",
    "rprivate",
    "slave",
    "rslave",
    "shared",
    "rshared",
    "unbindable",
    "runbindable",
];

/// Options for all that is below, and what they are for one mount.
const RECURSIVE: [(&str, &str); 4] = [
    ("rro", "ro"),
    ("rnosuid", "nosuid"),
    ("rnodev", "nodev"),
    ("rnoexec", "noexec"),
];

/// A mount of this host.
struct Mounted {
    id: u64,
    at: PathBuf,
}

/// The configuration of the bundle in a folder, with each mount named, by an absolute path. An error is a reason.
pub(super) fn expanded(bundle: &Path, mut spec: Value) -> Result<Value, String> {
    let table = fs::read("/proc/self/mountinfo").map_err(|error| format!("/proc/self/mountinfo: {error}"))?;
    let table = parse(&table);
    let mut mounts = Vec::new();
    let root = spec::root_of(bundle, &spec);
    for (source, rest) in below(&table, &root) {
        mounts.push(json!({
            "destination": text(&Path::new("/").join(rest))?, "type": "bind", "source": text(&source)?, "options": ["bind"],
        }));
    }
    let users = spec["mounts"].as_array().cloned().unwrap_or_default();
    for mut mount in users {
        let Some(source) = mount["source"].as_str().filter(|_| is_bind(&mount)) else {
            mounts.push(mount);
            continue;
        };
        let source = bundle.join(source);
        let inside = Path::new("/").join(mount["destination"].as_str().unwrap_or_default());
        let is_recursive = options(&mount).any(|option| option == "rbind") && !spec::is_replaced(&inside);
        mount["source"] = text(&source)?.into();
        let more: Vec<_> = options(&mount)
            .filter_map(for_those_below)
            .map(str::to_owned)
            .collect();
        if is_recursive {
            let alone = options(&mount).map(|option| if option == "rbind" { "bind" } else { option });
            mount["options"] = alone.map(Value::from).collect();
        }
        mounts.push(mount);
        if !is_recursive {
            continue;
        }
        for (source, rest) in below(&table, &source) {
            let inside = inside.join(rest);
            if spec::is_replaced(&inside) {
                continue;
            }
            let options: Vec<_> = ["bind"]
                .into_iter()
                .chain(more.iter().map(String::as_str))
                .collect();
            mounts.push(json!({
                "destination": text(&inside)?, "type": "bind", "source": text(&source)?, "options": options,
            }));
        }
    }
    if !mounts.is_empty() {
        spec["mounts"] = Value::Array(mounts);
    }
    Ok(spec)
}

fn for_those_below(option: &str) -> Option<&str> {
    if PROPAGATION.contains(&option) {
        return Some(option);
    }
    let (_, one) = RECURSIVE.iter().find(|(recursive, _)| *recursive == option)?;
    Some(one)
}

/// What is mounted and seen below a folder, parents first: where, and its path from the folder on.
fn below(table: &[Mounted], folder: &Path) -> Vec<(PathBuf, PathBuf)> {
    let Ok(folder) = fs::canonicalize(folder) else {
        return Vec::new();
    };
    let found = table.iter().filter_map(|mounted| {
        let rest = mounted.at.strip_prefix(&folder).ok()?;
        let is_below = !rest.as_os_str().is_empty();
        (is_below && mounted.is_seen()).then(|| (mounted.at.clone(), rest.to_owned()))
    });
    found.collect()
}

impl Mounted {
    /// Whether nothing else is mounted over it.
    fn is_seen(&self) -> bool {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        statx(CWD, &self.at, flags, StatxFlags::MNT_ID).is_ok_and(|status| status.stx_mnt_id == self.id)
    }
}

/// Reads a `mountinfo` (`man 5 proc`): each line begins with the mount's number, and its fifth field is where it is.
fn parse(table: &[u8]) -> Vec<Mounted> {
    let lines = table.split(|byte| *byte == b'\n');
    let mounts = lines.filter_map(|line| {
        let mut fields = line.split(|byte| *byte == b' ');
        let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
        Some(Mounted {
            id,
            at: unescaped(fields.nth(3)?).into(),
        })
    });
    mounts.collect()
}

/// A path in which space, tab, newline and backslash are written as octal numbers.
fn unescaped(path: &[u8]) -> OsString {
    let (mut bytes, mut left) = (Vec::with_capacity(path.len()), path);
    while let Some((first, rest)) = left.split_first() {
        let octal = || u8::from_str_radix(std::str::from_utf8(rest.get(..3)?).ok()?, 8).ok();
        match (*first == b'\\').then(octal).flatten() {
            Some(byte) => {
                bytes.push(byte);
                left = &rest[3..];
            }
            None => {
                bytes.push(*first);
                left = rest;
            }
        }
    }
    OsString::from_vec(bytes)
}

fn text(path: &Path) -> Result<&str, String> {
    path.to_str().ok_or_else(|| {
        format!("the mount at {path:?} has a name that is not UTF-8: unmount it, or rename the folder")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_read_with_their_names() {
        let table =
            b"24 1 8:1 / / rw - ext4 /dev/sda rw\n30 24 0:5 / /a\\040b\\134c rw shared:2 - tmpfs x rw\nodd\n";
        let read = parse(table);
        let read: Vec<_> = read
            .iter()
            .map(|mounted| (mounted.id, mounted.at.to_str().unwrap()))
            .collect();
        assert_eq!(read, [(24, "/"), (30, "/a b\\c")]);
    }

    #[test]
    fn what_is_mounted_below_is_found_where_it_is_seen() {
        let table = parse(&fs::read("/proc/self/mountinfo").unwrap());
        let found = below(&table, Path::new("/"));
        assert!(
            found
                .iter()
                .any(|(at, rest)| at == Path::new("/proc") && rest == Path::new("proc"))
        );
        let hidden = Mounted {
            id: u64::MAX,
            at: "/proc".into(),
        };
        assert!(
            below(&[hidden], Path::new("/")).is_empty(),
            "something else is seen there"
        );
    }

    #[test]
    fn a_recursive_bind_becomes_one_for_each_mount() {
        let spec = json!({"root": {"path": "/nonexistent"}, "mounts": [
            {"destination": "/data", "source": "data", "type": "bind", "options": ["bind"]},
            {"destination": "/host", "source": "/", "options": ["rbind", "ro", "rslave", "rnosuid"]},
            {"destination": "/sys/fs/cgroup", "source": "/", "options": ["rbind"]},
        ]});
        let spec = expanded(Path::new("/bundle"), spec).unwrap();
        let mounts = spec["mounts"].as_array().unwrap();
        assert_eq!(mounts[0]["source"], "/bundle/data", "by the bundle's folder");
        assert_eq!(mounts[1]["options"], json!(["bind", "ro", "rslave", "rnosuid"]));
        let proc = mounts
            .iter()
            .find(|mount| mount["destination"] == "/host/proc")
            .unwrap();
        assert_eq!(proc["source"], "/proc");
        assert_eq!(proc["options"], json!(["bind", "rslave", "nosuid"]));
        let cgroup = |mount: &&Value| {
            mount["destination"]
                .as_str()
                .unwrap()
                .starts_with("/sys/fs/cgroup")
        };
        assert_eq!(
            mounts.iter().filter(cgroup).count(),
            1,
            "an instance does not get it"
        );
    }
}
