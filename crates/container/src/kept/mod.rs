//! What CRIU does not write down, or not right, and is put back after it: read while the tasks stand still, kept in a file beside
//! CRIU's images, put into the restored tasks before they run.
//!
//! - [`timers`]: when timerfds expire, what nobody has read of them, and counts of eventfds;
//! - [`options`]: options of sockets, where they differ from those of a new one ([`fresh`]);
//! - [`threads`]: on which processors a thread may run, and its timer slack;
//! - [`unaccepted`]: connections that go, and whose clients are told so.
//!
//! A descriptor is known by its number and that of its process within the container. Sockets and the like are reached by a duplicate
//! (`pidfd_getfd(2)`), which is the same object.

mod fresh;
mod options;
mod room;
mod threads;
mod timers;
pub(crate) mod unaccepted;

use std::collections::HashSet;
use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::Path;

use anyhow::{Context, bail};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::check::read_text;
use crate::descriptors::Descriptors;
use crate::fdinfo::line;

use fresh::Fresh;
pub use unaccepted::Connection;

/// The file beside CRIU's images.
const NAME: &str = "verbatim-kept.json";

/// How long it may be, and how many things it may name.
const MAX_BYTES: u64 = 64 << 20;
const MAX_THINGS: usize = 1 << 18;

pub(crate) use room::lack_of_room;

/// What is kept.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Kept {
    /// Connections that no process has: those that were not accepted, and those that were closed before all was sent.
    pub lost: Vec<Connection>,
    timers: Vec<At<timers::Timer>>,
    counts: Vec<At<timers::Count>>,
    sockets: Vec<At<options::Options>>,
    /// Those that have something of their own; `None` where nobody has looked.
    threads: Option<Vec<threads::Thread>>,
}

/// Something of a descriptor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct At<T> {
    /// The process, by its number within the container.
    process: i32,
    descriptor: RawFd,
    what: T,
}

impl Kept {
    /// Reads it from the tasks of the container with this first process. They should stand still, and be cut off from the network.
    pub fn read(init: i32, descriptors: &Descriptors) -> anyhow::Result<Self> {
        let mut kept = Self {
            lost: unaccepted::all(init)?,
            ..Self::default()
        };
        let mut seen = HashSet::new();
        let mut of_threads = Vec::new();
        let mut fresh = Fresh::of_process(init);
        for process in tasks_of(init)? {
            let numbers = descriptors.of_process(process.pid);
            process.each_descriptor(numbers, |duplicate, number, target| {
                let at = |what| At {
                    process: process.inner,
                    descriptor: number,
                    what,
                };
                match target {
                    "anon_inode:[timerfd]" => {
                        let fdinfo = process.fdinfo(number)?;
                        let timer = timers::Timer::read(&duplicate()?, &fdinfo, process.pid)?;
                        kept.timers.push(At {
                            process: process.inner,
                            descriptor: number,
                            what: timer,
                        });
                    }
                    "anon_inode:[eventfd]" => {
                        let count = timers::Count::of(&process.fdinfo(number)?);
                        kept.counts
                            .extend(count.filter(timers::Count::is_lost).map(|what| At {
                                process: process.inner,
                                descriptor: number,
                                what,
                            }));
                    }
                    socket if socket.starts_with("socket:") && seen.insert(socket.to_owned()) => {
                        let options = options::Options::read(duplicate()?.as_fd(), &mut fresh)?;
                        kept.sockets.extend(options.map(at));
                    }
                    _ => {}
                }
                Ok(())
            })?;
            of_threads.extend(threads::read(process.pid)?);
        }
        kept.threads = Some(of_threads);
        Ok(kept)
    }

    /// Writes it into the folder of CRIU's images.
    pub fn write(&self, images: &Path) -> anyhow::Result<()> {
        let path = images.join(NAME);
        let text = serde_json::to_vec(self)?;
        if let Some(lack) = room::lack(self.things(), text.len() as u64) {
            bail!("{lack}");
        }
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    fn things(&self) -> usize {
        let threads = self.threads.as_ref().map_or(0, Vec::len);
        self.lost.len() + self.timers.len() + self.counts.len() + self.sockets.len() + threads
    }

    /// What a source has written; nothing where it is of a release that writes none.
    pub(crate) fn of(images: &Path) -> anyhow::Result<Self> {
        let path = images.join(NAME);
        let read = || -> anyhow::Result<Self> {
            let mut text = Vec::new();
            fs::File::open(&path)?
                .take(MAX_BYTES + 1)
                .read_to_end(&mut text)?;
            if text.len() as u64 > MAX_BYTES {
                bail!("it has more than {MAX_BYTES} bytes");
            }
            Ok(serde_json::from_slice(&text)?)
        };
        match read() {
            Err(error) if is_missing(&error) => Ok(Self::default()),
            read => read.with_context(|| format!("{} cannot be read", path.display())),
        }
    }

    /// Puts it into restored tasks, which do not run yet. An error says what is not as it was.
    pub(crate) fn put_back(&self, init: i32) -> anyhow::Result<()> {
        let things = self.timers.len() + self.counts.len() + self.sockets.len();
        if things == 0 && self.threads.is_none() {
            return Ok(());
        }
        for process in tasks_of(init)? {
            let of = |at: i32| at == process.inner;
            for At { descriptor, what, .. } in self.timers.iter().filter(|at| of(at.process)) {
                let put = process
                    .duplicate(*descriptor)
                    .and_then(|timer| Ok(what.put_back(timer.as_fd(), process.pid)?));
                put.with_context(|| process.cannot("the timer", *descriptor))?;
            }
            for At { descriptor, what, .. } in self.counts.iter().filter(|at| of(at.process)) {
                let put = process.duplicate(*descriptor).and_then(|event| {
                    let now = timers::Count::of(&process.fdinfo(*descriptor)?);
                    Ok(what.put_back(&event, now.as_ref())?)
                });
                put.with_context(|| process.cannot("the counter", *descriptor))?;
            }
            for At { descriptor, what, .. } in self.sockets.iter().filter(|at| of(at.process)) {
                let put = process
                    .duplicate(*descriptor)
                    .and_then(|socket| what.put_back(socket.as_fd()));
                put.with_context(|| process.cannot("the socket", *descriptor))?;
            }
            if let Some(kept) = &self.threads {
                threads::put_back(process.pid, process.inner, kept)
                    .with_context(|| format!("threads of process {} are not as they were", process.inner))?;
            }
        }
        Ok(())
    }
}

fn is_missing(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<io::Error>();
    error.is_some_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// A process of a container.
struct Task {
    pid: i32,
    /// Its number within the container.
    inner: i32,
    pidfd: OwnedFd,
}

impl Task {
    fn duplicate(&self, descriptor: RawFd) -> anyhow::Result<OwnedFd> {
        Ok(pidfd_getfd(&self.pidfd, descriptor, PidfdGetfdFlags::empty())?)
    }

    fn fdinfo(&self, descriptor: RawFd) -> anyhow::Result<String> {
        Ok(fs::read_to_string(format!(
            "/proc/{}/fdinfo/{descriptor}",
            self.pid
        ))?)
    }

    fn cannot(&self, what: &str, descriptor: RawFd) -> String {
        format!(
            "{what} at descriptor {descriptor} of process {} cannot be made as it was",
            self.inner
        )
    }

    fn each_descriptor(
        &self,
        numbers: &[RawFd],
        mut each: impl FnMut(&dyn Fn() -> anyhow::Result<OwnedFd>, RawFd, &str) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        for number in numbers {
            let path = format!("/proc/{}/fd/{number}", self.pid);
            let target = fs::read_link(&path).with_context(|| path.clone())?;
            each(&|| self.duplicate(*number), *number, &target.to_string_lossy()).context(path)?;
        }
        Ok(())
    }
}

/// The processes of a container, without those that have ended.
fn tasks_of(init: i32) -> anyhow::Result<Vec<Task>> {
    let mut tasks = Vec::new();
    for pid in crate::check::processes_of(init)?.into_keys() {
        let status = read_text(format!("/proc/{pid}/status"))?;
        if line(&status, "State:").is_some_and(|state| state.starts_with(['Z', 'X'])) {
            continue;
        }
        let pidfd = pidfd_open(
            Pid::from_raw(pid).context("no process has such a number")?,
            PidfdFlags::empty(),
        )?;
        tasks.push(Task {
            pid,
            inner: innermost(&status)?,
            pidfd,
        });
    }
    Ok(tasks)
}

/// The number of a task within its PID namespace, from its `status`.
fn innermost(status: &str) -> anyhow::Result<i32> {
    let inner = line(status, "NSpid:").and_then(|numbers| numbers.split_ascii_whitespace().next_back());
    Ok(inner
        .context("the kernel does not say a task's number")?
        .parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_keeps_nothing_is_understood_and_damage_is_an_error() {
        let images = tempfile::tempdir().unwrap();
        assert_eq!(Kept::of(images.path()).unwrap(), Kept::default());
        let kept = Kept {
            lost: vec![Connection {
                local: "10.0.0.1:80".parse().unwrap(),
                remote: "10.0.0.2:4000".parse().unwrap(),
            }],
            ..Kept::default()
        };
        kept.write(images.path()).unwrap();
        assert_eq!(Kept::of(images.path()).unwrap(), kept);
        fs::write(images.path().join(NAME), "{}").unwrap();
        assert_eq!(Kept::of(images.path()).unwrap(), Kept::default());
        fs::write(images.path().join(NAME), "{").unwrap();
        assert!(Kept::of(images.path()).is_err());
    }

    #[test]
    fn lines_of_proc_are_found() {
        let status = "Name:\tcat\nNSpid:\t4711\t12\n";
        assert_eq!(innermost(status).unwrap(), 12);
        assert!(innermost("Name:\tcat\n").is_err());
    }
}
