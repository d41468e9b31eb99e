//! File systems mounted below its host's root that an instance over that root sees: only those that its user
//! names.
//!
//! A mount in a container must exist at each host that the container moves to, and its host cannot unmount
//! it. So the agent shows only the paths that the user names (`--bind`), and notes the mounts that stay
//! hidden.

use std::path::{Component, Path, PathBuf};

use anyhow::{Context, ensure};
use verbatim_container::Bind;

/// Folders in which an instance has file systems of its own, or container engines keep theirs.
const APART: [&str; 9] = [
    "/proc",
    "/sys",
    "/dev",
    "/run",
    "/tmp",
    "/var/lib/docker",
    "/var/lib/containers",
    "/var/lib/containerd",
    "/var/lib/kubelet",
];

/// Types of file systems without files of the host.
const NO_FILES: [&str; 12] = [
    "autofs",
    "binfmt_misc",
    "bpf",
    "cgroup",
    "cgroup2",
    "debugfs",
    "devpts",
    "devtmpfs",
    "mqueue",
    "nsfs",
    "proc",
    "sysfs",
];

/// Limit of the mounts that a note names.
const NAMED: usize = 6;

/// Parses the paths to be shown: `PATH`, or `PATH:rw`.
pub fn parse(wanted: &[String]) -> anyhow::Result<Vec<Bind>> {
    let parse = |text: &String| {
        let (path, writable) = match text.strip_suffix(":rw") {
            Some(path) => (path, true),
            None => (text.strip_suffix(":ro").unwrap_or(text), false),
        };
        let path = PathBuf::from(path);
        let is_plain = path.is_absolute()
            && path.parent().is_some()
            && path
                .components()
                .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        ensure!(
            is_plain,
            "{text:?} is not an absolute path below /, optionally followed by :rw"
        );
        for own in ["/proc", "/sys", "/dev", "/run/verbatim"] {
            ensure!(
                !path.starts_with(own),
                "{}: the instance has its own {own}",
                path.display()
            );
        }
        let found = path.metadata();
        found.with_context(|| format!("cannot show {} to the instance", path.display()))?;
        Ok(Bind { path, writable })
    };
    wanted.iter().map(parse).collect()
}

/// A note for the user who starts an instance: mounts below the host's root that it does not see.
pub fn unseen(own: &[&Path], binds: &[Bind]) -> Option<String> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let is_folder = |path: &PathBuf| path.is_dir();
    let paths: Vec<_> = mounted(&table, own, binds)
        .into_iter()
        .filter(is_folder)
        .collect();
    let (named, rest) = paths.split_at(paths.len().min(NAMED));
    let mut names: Vec<_> = named.iter().map(|path| path.display().to_string()).collect();
    if !rest.is_empty() {
        names.push(format!("{} more", rest.len()));
    }
    (!names.is_empty()).then(|| {
        format!(
            "not seen in it, since mounted below the host's root: {}; --bind PATH shows one, which must then \
             exist at each host that it moves to",
            names.join(", ")
        )
    })
}

/// The topmost mount points of a proc_pid_mountinfo(5) that have files of the host and are not shown.
fn mounted(table: &str, own: &[&Path], binds: &[Bind]) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for line in table.lines() {
        let Some((mount, file_system)) = line.split_once(" - ") else {
            continue;
        };
        let kind = file_system.split(' ').next().unwrap_or_default();
        let Some(path) = mount.split(' ').nth(4).map(unescaped) else {
            continue;
        };
        let is_apart = path == Path::new("/")
            || APART.iter().any(|apart| path.starts_with(apart))
            || own.iter().any(|own| path.starts_with(own));
        let is_shown = binds
            .iter()
            .any(|bind| bind.path.starts_with(&path) || path == bind.path);
        if !is_apart && !is_shown && !NO_FILES.contains(&kind) {
            found.push(path);
        }
    }
    found.sort();
    found.dedup_by(|later, earlier| later.starts_with(&*earlier));
    found
}

/// Decodes octal escapes: a space is written as `\040`.
fn unescaped(text: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((first, behind)) = rest.split_first() {
        let octal = behind
            .get(..3)
            .and_then(|digits| std::str::from_utf8(digits).ok());
        let number = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match (first, number) {
            (b'\\', Some(number)) => {
                bytes.push(number);
                rest = &behind[3..];
            }
            _ => {
                bytes.push(*first);
                rest = behind;
            }
        }
    }
    std::ffi::OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mounted_below_the_root_is_found_once() {
        let table = "\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 0:5 / /proc rw - proc proc rw
24 22 0:6 / /sys/fs/cgroup rw - cgroup2 cgroup rw
25 22 8:2 / /home rw,relatime shared:3 - ext4 /dev/sda2 rw
26 25 8:3 / /home/a rw - ext4 /dev/sda3 rw
27 22 0:9 / /mnt/two\\040words rw - tmpfs tmpfs rw
28 22 0:9 / /var/lib/docker/overlay2/x/merged rw - overlay overlay rw
29 22 0:9 / /srv rw - xfs /dev/sdb rw
30 22 0:9 / /var/lib/verbatim/own rw - tmpfs tmpfs rw
31 22 0:9 / /efi rw - autofs autofs rw
";
        let binds = parse(&["/usr".to_owned()]).unwrap();
        let own = [Path::new("/var/lib/verbatim")];
        let found = mounted(table, &own, &binds);
        let expected = ["/home", "/mnt/two words", "/srv"].map(PathBuf::from);
        assert_eq!(found, expected);
        let shown = |path: &str| Bind {
            path: path.into(),
            writable: false,
        };
        let rest = mounted(table, &own, &[shown("/srv"), shown("/home/a")]);
        assert_eq!(rest, [PathBuf::from("/mnt/two words")]);
    }

    #[test]
    fn what_is_to_be_shown_is_a_path_of_the_hosts() {
        let bind = parse(&["/usr:rw".to_owned(), "/etc".to_owned()]).unwrap();
        assert_eq!((bind[0].writable, bind[1].writable), (true, false));
        for wrong in [
            "/",
            "usr",
            "/usr/../etc",
            "/proc/self",
            "/run/verbatim/x",
            "/nonexistent",
        ] {
            assert!(parse(&[wrong.to_owned()]).is_err(), "{wrong}");
        }
    }
}
