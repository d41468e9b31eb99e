//! On which processors a cgroup's threads may run (cpuset(7), `Documentation/admin-guide/cgroup-v2.rst`).

use std::path::{Path, PathBuf};

/// Those of the cgroup of a process; `None` where the host does not say.
pub(crate) fn processors_of(pid: i32) -> Option<Vec<u32>> {
    let cgroups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    folders(&cgroups, &mounts).iter().find_map(|(root, inner)| {
        // A cgroup in which nobody has switched the controller on has what those above it have.
        inner.ancestors().find_map(|inner| {
            let folder = root.join(inner.strip_prefix("/").unwrap_or(inner));
            let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
            let text = read("cpuset.cpus.effective").or_else(|| read("cpuset.effective_cpus"))?;
            numbers(text.trim())
        })
    })
}

/// Where hierarchies with processors are mounted, and which cgroup the process is in there.
fn folders(cgroups: &str, mounts: &str) -> Vec<(PathBuf, PathBuf)> {
    let mounted = |is_it: &dyn Fn(&str, &str) -> bool| {
        mounts.lines().find_map(|line| {
            let (mount, filesystem) = line.split_once(" - ")?;
            let mut kind = filesystem.split(' ');
            let (kind, options) = (kind.next()?, kind.nth(1)?);
            let mut fields = mount.split(' ').skip(3);
            let (root, point) = (fields.next()?, fields.next()?);
            (root == "/" && is_it(kind, options)).then(|| PathBuf::from(point))
        })
    };
    let of_line = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, inner) = (fields.next()?, fields.next()?);
        let point = match controllers {
            "" => mounted(&|kind, _| kind == "cgroup2"),
            _ if controllers.split(',').any(|name| name == "cpuset") => {
                mounted(&|kind, options| kind == "cgroup" && options.split(',').any(|name| name == "cpuset"))
            }
            _ => None,
        };
        Some((point?, Path::new(inner).to_owned()))
    };
    cgroups.lines().filter_map(of_line).collect()
}

/// `0-3,8`.
fn numbers(list: &str) -> Option<Vec<u32>> {
    const MOST: u32 = 1 << 16;
    let mut all = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last >= MOST {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read() {
        assert_eq!(numbers("0-2,5"), Some(vec![0, 1, 2, 5]));
        assert_eq!(numbers("7"), Some(vec![7]));
        assert_eq!(numbers(""), None);
        assert_eq!(numbers("0-4294967295"), None);
    }

    #[test]
    fn both_hierarchies_are_found() {
        let mounts = "36 35 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n\
                      37 35 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n";
        let found = folders("4:cpuset:/a/b\n3:freezer:/c\n0::/d\n", mounts);
        assert_eq!(
            found,
            [
                ("/sys/fs/cgroup/cpuset".into(), "/a/b".into()),
                ("/sys/fs/cgroup".into(), "/d".into())
            ]
        );
    }
}
