//! A container's cgroup: which one it is, what is in it, and how its tasks are frozen and killed.
//!
//! runc makes one for each container, at `cgroupsPath` of its bundle, and puts every task of the container there. It
//! is the kernel's own list of a container's tasks: no task leaves it, and it can be frozen and killed as a whole.
//!
//! Two versions of the freezer are in use. Where cgroups of version 1 are mounted, also beside a unified hierarchy
//! ("hybrid"), runc uses its controller `freezer`; where there is only the unified hierarchy (Docker's hosts of today),
//! that one's own files.
//!
//! | | version 2 | version 1 |
//! | --- | --- | --- |
//! | freeze | `cgroup.freeze` 1 | `freezer.state` FROZEN |
//! | it is done | event: `cgroup.events`, `frozen 1` | FREEZING becomes FROZEN when the file is read; no event |
//! | SIGKILL of a frozen task | dies at once | dies when it is thawed, before it executes another instruction |
//! | empty | event: `cgroup.events`, `populated 0` | no event; the processes' pidfds are waited for |
//!
//! A task that CRIU holds by ptrace is frozen all the same: it stays still when the tracer is gone. But what is frozen
//! *before* CRIU seizes it makes CRIU hang, since it waits for a stop that does not come.
//!
//! **What runc does to the freezer**, as far as it matters here (docs/assumptions.md): a checkpoint does not
//! touch it, since the proxy takes `freeze_cgroup` out of runc's request, neither does its end. `runc state` says
//! `paused` of a frozen container. `runc kill` and `runc delete` refuse nothing: with version 1 `runc kill NAME KILL` and
//! `runc delete --force` kill the *first process and thaw*, and what else is in the container may run until the kernel
//! has killed it, too. So a frozen container is killed by [`Cgroup::kill`], and only then runc is told to forget it.

mod beside;
mod find;
mod freezer;
mod kill;
mod processors;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use beside::CgroupBeside;
pub(crate) use processors::processors_of;

/// Where cgroups are mounted: one hierarchy, or, with version 1, one in each subdirectory.
const MOUNTED: &str = "/sys/fs/cgroup";

/// How long the kernel may take to freeze, thaw or kill. It takes microseconds; more than this is a task that hangs in a
/// system call, and the caller asks again.
pub(crate) const LIMIT: Duration = Duration::from_secs(5);

/// Which files a cgroup has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CgroupVersion {
    /// The controller `freezer` of version 1 (`Documentation/admin-guide/cgroup-v1/freezer-subsystem.rst`).
    V1,
    /// The unified hierarchy (`Documentation/admin-guide/cgroup-v2.rst`, "Core Interface Files").
    V2,
}

/// The cgroup of one container, in the hierarchy that can freeze it. Another copy of it is the same cgroup.
///
/// Its functions are a few system calls each. Those with a `limit` may wait for the kernel as long; they block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cgroup {
    version: CgroupVersion,
    path: PathBuf,
}

impl Cgroup {
    /// As the value of an environment variable, for another process of this host.
    pub(crate) fn to_variable(&self) -> String {
        serde_json::to_string(self).expect("a version and a path that was read as text are JSON")
    }

    /// What [`Self::to_variable`] has made.
    pub(crate) fn from_variable(text: &str) -> io::Result<Self> {
        Ok(serde_json::from_str(text)?)
    }

    /// Which files it has.
    pub fn version(&self) -> CgroupVersion {
        self.version
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The threads in it and in cgroups below it, by their numbers in our PID namespace; none if it is not there any
    /// more. A thread that has ended is not listed, also before its parent has waited for it.
    pub fn tasks(&self) -> io::Result<Vec<i32>> {
        self.list(match self.version {
            CgroupVersion::V1 => "tasks",
            CgroupVersion::V2 => "cgroup.threads",
        })
    }

    /// The processes in it and in cgroups below it, likewise.
    pub(crate) fn processes(&self) -> io::Result<Vec<i32>> {
        self.list("cgroup.procs")
    }

    /// Whether there is a task in it or below it. A cgroup that is not there has none.
    pub fn is_populated(&self) -> io::Result<bool> {
        match self.version {
            CgroupVersion::V1 => Ok(!self.tasks()?.is_empty()),
            CgroupVersion::V2 => gone_means(self.event("populated"), false),
        }
    }

    /// Puts a process in it, with all of its threads.
    pub(crate) fn take_in(&self, pid: u32) -> io::Result<()> {
        self.write("cgroup.procs", &pid.to_string())
    }

    /// Puts a thread in it, whose process is in the same threaded subtree.
    pub(crate) fn take_thread_in(&self, thread: u32) -> io::Result<()> {
        self.write("cgroup.threads", &thread.to_string())
    }

    /// Removes it if there is nothing in it; one that is not there is fine.
    #[cfg(test)]
    fn remove(&self) -> io::Result<()> {
        gone_means(std::fs::remove_dir(&self.path), ())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes a file of this cgroup; the error names it.
    fn write(&self, name: &str, value: &str) -> io::Result<()> {
        let path = self.file(name);
        std::fs::write(&path, value).map_err(|error| in_file(&path, &error))
    }

    /// The numbers in the file `name` of this cgroup and of those below it.
    fn list(&self, name: &str) -> io::Result<Vec<i32>> {
        let mut found = Vec::new();
        list_below(&self.path, name, &mut found)?;
        Ok(found)
    }

    /// The value of a key of `cgroup.events`: 0 or 1.
    fn event(&self, key: &str) -> io::Result<bool> {
        let path = self.file("cgroup.events");
        let text = std::fs::read_to_string(&path).map_err(|error| in_file(&path, &error))?;
        flag(&text, key).ok_or_else(|| unexpected(&path, &text))
    }
}

fn list_below(directory: &Path, name: &str, found: &mut Vec<i32>) -> io::Result<()> {
    let path = directory.join(name);
    let text = gone_means(
        std::fs::read_to_string(&path).map_err(|error| in_file(&path, &error)),
        String::new(),
    )?;
    for line in text.lines() {
        found.push(line.parse().map_err(|_| unexpected(&path, line))?);
    }
    let entries = match std::fs::read_dir(directory) {
        Err(error) if is_gone(&error) => return Ok(()),
        entries => entries.map_err(|error| in_file(directory, &error))?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            list_below(&entry.path(), name, found)?;
        }
    }
    Ok(())
}

/// The value of `key` in a file of lines `KEY 0` or `KEY 1`.
fn flag(text: &str, key: &str) -> Option<bool> {
    let mut values = text.lines().filter_map(|line| line.split_once(' '));
    match values.find(|(found, _)| *found == key)?.1 {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

/// The cgroup is not there, or was removed while a file of it was open (ENODEV; see [`in_file`]).
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}

/// Takes a cgroup that is not there for `value`.
fn gone_means<T>(result: io::Result<T>, value: T) -> io::Result<T> {
    match result {
        Err(error) if is_gone(&error) => Ok(value),
        result => result,
    }
}

/// The same error, with the file in it, for [`is_gone`]: a file that is missing where its directory is there is another matter
/// than a cgroup that is gone.
fn in_file(path: &Path, error: &io::Error) -> io::Error {
    let kind = match error.kind() {
        _ if error.raw_os_error() == Some(libc::ENODEV) => io::ErrorKind::NotFound,
        io::ErrorKind::NotFound if path.parent().is_some_and(Path::exists) => io::ErrorKind::Unsupported,
        kind => kind,
    };
    io::Error::new(kind, format!("{}: {error}", path.display()))
}

fn unexpected(path: &Path, text: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{} says {text:?}", path.display()),
    )
}

fn too_late(path: &Path, what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::TimedOut,
        format!("the tasks of {} {what}", path.display()),
    )
}

/// Removes the cgroup above a host's containers ([`BundleConfig::cgroup_parent`](crate::BundleConfig)) where it is
/// empty. runc makes it with the first container and removes only the containers' own.
pub fn remove_cgroup_parent(parent: &Path) -> io::Result<()> {
    let relative = parent.strip_prefix("/").unwrap_or(parent);
    // Without a name it would be the root of them all.
    if relative.as_os_str().is_empty() {
        return Ok(());
    }
    let root = Path::new(MOUNTED);
    let hierarchies = std::fs::read_dir(root)?.flatten().map(|entry| entry.path());
    for hierarchy in hierarchies.filter(|path| path.is_dir()).chain([root.to_owned()]) {
        match std::fs::remove_dir(hierarchy.join(relative)) {
            Err(error)
                if !matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ResourceBusy
                ) =>
            {
                return Err(error);
            }
            _ => {}
        }
    }
    Ok(())
}
