//! What is known of a container's tasks on this host, and the evidence that they never ran.
//!
//! It is found out from what outlives agents: runc's state, the restore's marker and the kernel's list of the tasks. What
//! cannot be read is [`Fact::Unknown`] and decides nothing.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::blocking::blocking;
use crate::cgroup::{Cgroup, LIMIT};
use crate::error::Error;
use crate::host::Host;
use crate::marker::{self, Marker, released};
use crate::name::ContainerName;
use crate::operation::{go_on, outlast};

/// What is known of a container's tasks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fact {
    /// They may execute instructions of the program.
    Running,
    /// They are there and execute none: their cgroup is frozen, or they are restored and not released.
    Frozen,
    /// None is left.
    Gone {
        /// Whether they may ever have run on this host. It is `false` only where a restore was prepared here and not
        /// released.
        ran: bool,
    },
    /// It cannot be found out now; nothing may be concluded from this.
    Unknown {
        /// Why.
        reason: String,
    },
}

/// Evidence that a restore's tasks have not executed an instruction of the program on this host and will not: they were not
/// released, they are killed, and none is left. Only [`Tasks::end_unreleased`] gives it.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NotRun;

/// What [`Tasks::end_unreleased`] has found.
#[derive(Debug, PartialEq, Eq)]
pub enum Ended {
    /// They never ran and never will.
    NotRun(NotRun),
    /// They were released, and may have run; nothing was done to them.
    Released,
}

/// The tasks of one container on this host, whoever has started them and whether they are there or not.
#[derive(Clone)]
pub struct Tasks {
    name: ContainerName,
    state: PathBuf,
    work: PathBuf,
}

pub(crate) fn put_back(pid: u32, to: &Cgroup, threads: &[(u32, Cgroup)]) -> io::Result<()> {
    to.take_in(pid)?;
    let is_there = |thread: u32| Path::new(&format!("/proc/{pid}/task/{thread}")).exists();
    for (thread, cgroup) in threads {
        match cgroup.take_thread_in(*thread) {
            Err(error) if is_there(*thread) => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

impl fmt::Debug for Tasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the tasks of {}", self.name)
    }
}

impl Tasks {
    /// Those of container `name`. `work` is the directory of its restores
    /// ([`RestoreConfig::work`](crate::RestoreConfig::work)).
    pub fn of(host: &Host, name: &ContainerName, work: &Path) -> Self {
        Self {
            name: name.clone(),
            state: host.runc().state_file(name),
            work: work.to_owned(),
        }
    }

    /// What is known of them now.
    pub async fn fact(&self) -> Fact {
        self.blocking(|tasks| Ok(tasks.look()))
            .await
            .unwrap_or_else(|error| Fact::Unknown {
                reason: error.to_string(),
            })
    }

    /// Freezes them; see [`Cgroup::freeze`]. There must be some.
    pub async fn freeze(&self) -> Result<(), Error> {
        self.blocking(|tasks| {
            let cgroup = tasks.cgroup()?.ok_or(io::ErrorKind::NotFound)?;
            cgroup.freeze(LIMIT)
        })
        .await
        .map_err(|source| self.failed("freeze", source))
    }

    /// Lets frozen tasks go on; see [`Cgroup::thaw`]. Where there are none it does nothing. What a dump whose CRIU was lost has left
    /// of their TCP connections is undone first.
    ///
    /// Whoever holds them by another hand still does: CRIU, until its proxy has let go of it.
    pub async fn thaw(&self) -> Result<(), Error> {
        self.blocking(|tasks| tasks.cgroup()?.map_or(Ok(()), |cgroup| go_on(&cgroup)))
            .await
            .map_err(|source| self.failed("thaw", source))
    }

    /// Kills them, and returns when none is left; see [`Cgroup::kill`]. Frozen ones do not run again. The container is
    /// runc's to forget afterwards ([`Runc::delete`](crate::Runc::delete)).
    pub async fn kill(&self) -> Result<(), Error> {
        self.blocking(|tasks| tasks.cgroup()?.map_or(Ok(()), |cgroup| cgroup.kill(LIMIT)))
            .await
            .map_err(|source| self.failed("kill", source))
    }

    /// Where a process of this host's is that runc has not started, in the hierarchy that they are in; for [`Tasks::let_out`].
    pub async fn cgroup_of(&self, pid: u32) -> Result<Cgroup, Error> {
        self.blocking(move |tasks| {
            let cgroup = tasks.cgroup()?.ok_or(io::ErrorKind::NotFound)?;
            cgroup.of_process(pid)
        })
        .await
        .map_err(|source| self.failed("find a process beside", source))
    }

    /// Threads of such a process that are elsewhere than its first one, and where; likewise. libvirt puts those that run a guest into cgroups of their own.
    pub async fn cgroups_of_threads(&self, pid: u32) -> Result<Vec<(u32, Cgroup)>, Error> {
        self.blocking(move |tasks| {
            let cgroup = tasks.cgroup()?.ok_or(io::ErrorKind::NotFound)?;
            cgroup.of_threads(pid)
        })
        .await
        .map_err(|source| self.failed("find the threads of a process beside", source))
    }

    /// Counts such a process among them: from now on it is frozen and killed with them.
    pub async fn take_in(&self, pid: u32) -> Result<(), Error> {
        self.blocking(move |tasks| {
            let cgroup = tasks.cgroup()?.ok_or(io::ErrorKind::NotFound)?;
            cgroup.take_in(pid)
        })
        .await
        .map_err(|source| self.failed("count a process among", source))
    }

    /// Puts a process back that [`Tasks::take_in`] has taken, and those of its threads that were apart and are there still.
    pub async fn let_out(&self, pid: u32, to: &Cgroup, threads: &[(u32, Cgroup)]) -> Result<(), Error> {
        let (to, threads) = (to.clone(), threads.to_vec());
        self.blocking(move |_| put_back(pid, &to, &threads))
            .await
            .map_err(|source| self.failed("let a process out of", source))
    }

    /// They were started, and their program waits by itself for what makes it go on: says that they have not run
    /// ([`Tasks::end_unreleased`]), until [`Tasks::release`]. Of a restore its proxy says so.
    pub async fn keep_unreleased(&self) -> Result<(), Error> {
        self.blocking(|tasks| {
            marker::clear(&tasks.work)?;
            let cgroup = Cgroup::of_container(&tasks.state)?.ok_or(io::ErrorKind::NotFound)?;
            marker::prepare(std::fs::File::open(&tasks.work)?, &cgroup)
        })
        .await
        .map_err(|source| self.failed("mark", source))
    }

    /// From now on they may run: to be called before their program is told to.
    pub async fn release(&self) -> Result<(), Error> {
        self.blocking(|tasks| marker::release(std::fs::File::open(&tasks.work)?))
            .await
            .map_err(|source| self.failed("release", source))
    }

    /// Ends a restore whose tasks were not released: kills them, with CRIU and its proxy, which are in the same cgroup, sees
    /// that none is left, and waits for runc's end. Tasks that were released are left alone.
    ///
    /// Nobody may be preparing a restore of the container meanwhile. An error says that it is not known, and that it is to be
    /// asked again; what is killed stays dead.
    pub async fn end_unreleased(&self) -> Result<Ended, Error> {
        let failed = |source| self.failed("end the restore of", source);
        let mut ended = self.blocking(Self::kill_unreleased).await.map_err(failed)?;
        if matches!(ended, Some(Ended::Released)) {
            return Ok(Ended::Released);
        }
        // Its proxy is dead, or never got to CRIU, and gives up as soon as it misses its agent.
        let outlasted = match tokio::time::timeout(LIMIT, outlast(&self.work)).await {
            Ok(outlasted) => outlasted,
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "runc does not end")),
        };
        outlasted.map_err(failed)?;
        if ended.is_none() {
            ended = self.blocking(Self::kill_unreleased).await.map_err(failed)?;
        }
        Ok(ended.unwrap_or(Ended::NotRun(NotRun)))
    }

    /// `None` where nothing was restored so far.
    fn kill_unreleased(&self) -> io::Result<Option<Ended>> {
        let cgroup = match marker::read(&self.work)? {
            Marker::None => return Ok(None),
            Marker::Released(_) => return Ok(Some(Ended::Released)),
            Marker::Unreleased(cgroup) => cgroup,
        };
        // The proxy is in there, too: when all are frozen, what the marker says does not change any more.
        match cgroup.freeze(LIMIT) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        if released(&self.work)? {
            cgroup.thaw(LIMIT)?;
            return Ok(Some(Ended::Released));
        }
        cgroup.kill(LIMIT)?;
        Ok(Some(Ended::NotRun(NotRun)))
    }

    fn look(&self) -> Fact {
        let found = || {
            let unreleased = match marker::read(&self.work) {
                Ok(marker) => matches!(marker, Marker::Unreleased(_)),
                // Nothing was ever restored here, or it is cleared away.
                Err(error) if error.kind() == io::ErrorKind::NotFound => false,
                Err(error) => return Err(error),
            };
            let Some(cgroup) = self.cgroup()? else {
                return Ok(Fact::Gone { ran: !unreleased });
            };
            if !cgroup.is_populated()? {
                return Ok(Fact::Gone { ran: !unreleased });
            }
            match unreleased || cgroup.is_frozen()? {
                true => Ok(Fact::Frozen),
                false => Ok(Fact::Running),
            }
        };
        found().unwrap_or_else(|error: io::Error| Fact::Unknown {
            reason: error.to_string(),
        })
    }

    /// Their cgroup, as runc knows it, or a restore that is not done; `None` if neither does.
    fn cgroup(&self) -> io::Result<Option<Cgroup>> {
        if let Some(cgroup) = Cgroup::of_container(&self.state)? {
            return Ok(Some(cgroup));
        }
        match marker::read(&self.work) {
            Ok(Marker::Unreleased(cgroup) | Marker::Released(cgroup)) => Ok(Some(cgroup)),
            Ok(Marker::None) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let tasks = self.clone();
        blocking(move || work(&tasks)).await
    }

    fn failed(&self, action: &'static str, source: io::Error) -> Error {
        Error::Tasks {
            action,
            container: self.name.to_string(),
            source,
        }
    }
}
