//! Which cgroup is a container's.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{Cgroup, CgroupVersion, in_file, unexpected};

/// What runc writes down of a container (`state.json` in its state directory; `libcontainer.BaseState`).
#[derive(Deserialize)]
struct RuncState {
    /// By controller; the unified hierarchy has no name.
    cgroup_paths: BTreeMap<String, PathBuf>,
}

impl Cgroup {
    /// That of a container which runc knows by `state`, its `state.json`; `None` if there is no such file: runc writes it
    /// before a container runs, and removes it when its tasks are gone.
    pub(crate) fn of_container(state: &Path) -> io::Result<Option<Self>> {
        let text = match std::fs::read(state) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(|error| in_file(state, &error))?,
        };
        let read: RuncState =
            serde_json::from_slice(&text).map_err(|error| unexpected(state, &error.to_string()))?;
        for (controller, version) in [("freezer", CgroupVersion::V1), ("", CgroupVersion::V2)] {
            if let Some(path) = read
                .cgroup_paths
                .get(controller)
                .filter(|path| path.is_absolute())
            {
                let path = path.clone();
                return Ok(Some(Self { version, path }));
            }
        }
        Err(unexpected(
            state,
            "nothing of a cgroup with a freezer; Verbatim needs the unified hierarchy or version 1's freezer",
        ))
    }

    /// That of process `pid`, if it is another one than `other`'s, where both are looked up in the same hierarchy.
    pub(crate) fn apart(pid: u32, other: u32) -> io::Result<Self> {
        let read =
            |path: String| std::fs::read_to_string(&path).map_err(|error| in_file(Path::new(&path), &error));
        let mounts = read("/proc/self/mountinfo".to_owned())?;
        let [own, others] = [pid, other].map(|pid| read(format!("/proc/{pid}/cgroup")));
        apart(&mounts, &own?, &others?).ok_or_else(|| {
            io::Error::other(format!(
                "process {pid} is in no cgroup of its own with a freezer; runc should have moved it to the container's"
            ))
        })
    }
}

impl Cgroup {
    /// That of process `pid` in the hierarchy that this one is in.
    pub(crate) fn of_process(&self, pid: u32) -> io::Result<Self> {
        self.said_by(&format!("/proc/{pid}/cgroup"))
    }

    /// Threads of process `pid` that are in another cgroup than its first one (a threaded subtree of the unified hierarchy), and in which.
    pub(crate) fn of_threads(&self, pid: u32) -> io::Result<Vec<(u32, Self)>> {
        let first = self.of_process(pid)?;
        let folder = PathBuf::from(format!("/proc/{pid}/task"));
        let mut apart = Vec::new();
        for thread in std::fs::read_dir(&folder).map_err(|error| in_file(&folder, &error))? {
            let name = thread?.file_name();
            let Some(number) = name.to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            match self.said_by(&format!("/proc/{pid}/task/{number}/cgroup")) {
                Ok(cgroup) if cgroup != first => apart.push((number, cgroup)),
                // Or it has ended.
                Ok(_) | Err(_) => {}
            }
        }
        Ok(apart)
    }

    fn said_by(&self, cgroups: &str) -> io::Result<Self> {
        let read =
            |path: &str| std::fs::read_to_string(path).map_err(|error| in_file(Path::new(path), &error));
        let (mounts, own) = (read("/proc/self/mountinfo")?, read(cgroups)?);
        let found = member(&own, self.version).and_then(|inner| mounted(&mounts, self.version, inner));
        let path = found.ok_or_else(|| unexpected(Path::new(cgroups), &own))?;
        Ok(Self {
            version: self.version,
            path,
        })
    }
}

fn apart(mounts: &str, own: &str, others: &str) -> Option<Cgroup> {
    [CgroupVersion::V1, CgroupVersion::V2]
        .into_iter()
        .find_map(|version| {
            let inner = member(own, version)?;
            if member(others, version)? == inner {
                return None;
            }
            let path = mounted(mounts, version, inner)?;
            Some(Cgroup { version, path })
        })
}

/// Which cgroup a process is in: cgroups(7), `/proc/PID/cgroup`.
fn member(cgroups: &str, version: CgroupVersion) -> Option<&str> {
    cgroups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let is_it = match version {
            CgroupVersion::V1 => controllers.split(',').any(|name| name == "freezer"),
            CgroupVersion::V2 => controllers.is_empty(),
        };
        is_it.then_some(path)
    })
}

/// The directory of a cgroup: proc_pid_mountinfo(5).
fn mounted(mounts: &str, version: CgroupVersion, inner: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        // 36 35 98:0 ROOT MOUNT_POINT OPTIONS [tags] - TYPE SOURCE SUPER_OPTIONS
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut kind = filesystem.split(' ');
        let (kind, options) = (kind.next()?, kind.nth(1)?);
        let is_it = match version {
            CgroupVersion::V1 => kind == "cgroup" && options.split(',').any(|name| name == "freezer"),
            CgroupVersion::V2 => kind == "cgroup2",
        };
        if !is_it {
            return None;
        }
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        let below = Path::new(inner).strip_prefix(root).ok()?;
        Some(Path::new(point).join(below))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs ro
31 30 0:27 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw
32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpu,cpuacct
33 30 0:29 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
";
    const UNIFIED: &str = "31 30 0:27 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn the_cgroup_that_runc_moved_a_process_to_is_found_by_either_version() {
        let found = apart(
            HYBRID,
            "6:freezer:/h1/web\n4:memory:/x\n0::/\n",
            "6:freezer:/h1\n0::/\n",
        )
        .unwrap();
        assert_eq!(found.version, CgroupVersion::V1);
        assert_eq!(found.path, Path::new("/sys/fs/cgroup/freezer/h1/web"));
        let found = apart(UNIFIED, "0::/h1/web\n", "0::/h1/services\n").unwrap();
        assert_eq!(found.version, CgroupVersion::V2);
        assert_eq!(found.path, Path::new("/sys/fs/cgroup/h1/web"));
    }

    #[test]
    fn a_process_that_was_not_moved_has_no_cgroup_of_its_own() {
        assert_eq!(apart(UNIFIED, "0::/h1\n", "0::/h1\n"), None);
        assert_eq!(apart(HYBRID, "6:freezer:/\n0::/\n", "6:freezer:/\n0::/\n"), None);
    }

    #[test]
    fn a_mount_of_a_part_shows_only_what_is_below_it() {
        let part = "31 30 0:27 /h1 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let found = mounted(part, CgroupVersion::V2, "/h1/web");
        assert_eq!(found.as_deref(), Some(Path::new("/sys/fs/cgroup/web")));
        assert_eq!(mounted(part, CgroupVersion::V2, "/h2/web"), None);
    }

    #[test]
    fn runcs_own_word_is_taken_and_anything_unclear_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("state.json");
        assert_eq!(Cgroup::of_container(&file).unwrap(), None);
        let read = |text: &str| {
            std::fs::write(&file, text).unwrap();
            Cgroup::of_container(&file).map(Option::unwrap)
        };
        let v1 = read(r#"{"cgroup_paths": {"": "/u/web", "freezer": "/f/web", "cpu": "/c/web"}}"#).unwrap();
        assert_eq!((v1.version, v1.path()), (CgroupVersion::V1, Path::new("/f/web")));
        let v2 = read(r#"{"cgroup_paths": {"": "/u/web"}, "more": 1}"#).unwrap();
        assert_eq!((v2.version, v2.path()), (CgroupVersion::V2, Path::new("/u/web")));
        for unclear in [
            "",
            "{",
            r#"{"cgroup_paths": {"cpu": "/c/web"}}"#,
            r#"{"cgroup_paths": {"": "x"}}"#,
        ] {
            assert!(read(unclear).is_err(), "{unclear}");
        }
    }
}
