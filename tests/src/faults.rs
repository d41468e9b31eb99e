//! Failures that a test orders at the agents' points ([`Point`]).
//!
//! The file `faults` in a host's runtime folder has one `POINT ACTION` per line; it is read at each point, and missing where
//! nothing is ordered. What happened is appended to `faults.reached`. Only the program `verbatim-with-faults` reads it.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::io::unix::AsyncFd;
use verbatim_agent::faults::{Inject, Passed, Point, Time};
use verbatim_seqpacket::Socket;

/// What can happen at a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr, strum::EnumIter)]
#[strum(serialize_all = "kebab-case")]
pub enum Action {
    /// The step fails.
    Fail,
    /// The agent dies, as by SIGKILL.
    Exit,
    /// The step waits until the file says something else, and then does that.
    Hang,
    /// The host's RNIC dies; the step goes on.
    KillNic,
    /// The caller damages what it works with.
    Damage,
}

impl Action {
    /// As it is ordered.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The failures ordered on a host.
#[derive(Debug)]
pub struct OrderedFaults {
    file: PathBuf,
    nic: PathBuf,
}

impl OrderedFaults {
    /// Those in `file`, now and later; `nic` is the RNIC's socket.
    pub fn new(file: PathBuf, nic: PathBuf) -> Self {
        Self { file, nic }
    }

    fn action(&self, point: Point) -> anyhow::Result<Option<Action>> {
        let Ok(text) = std::fs::read_to_string(&self.file) else {
            return Ok(None);
        };
        let ordered = text
            .lines()
            .filter_map(|line| line.split_once(' '))
            .find_map(|(name, action)| (name == point.name()).then_some(action.trim()));
        let Some(ordered) = ordered else {
            return Ok(None);
        };
        let action = ordered.parse();
        action
            .map(Some)
            .with_context(|| format!("{} orders {ordered:?}, which is no action", self.file.display()))
    }

    /// Passes a point: goes on, fails, waits, or ends this process. `Damage` is the caller's to carry out; true tells
    /// it to. Where nothing can be refused any more ([`Time::AtCommit`]) a failure is none.
    async fn carry_out(&self, point: Point) -> anyhow::Result<bool> {
        let mut told_to_hang = false;
        loop {
            let Some(action) = self.action(point)? else {
                return Ok(false);
            };
            if action != Action::Hang || !told_to_hang {
                self.note(point, action)?;
            }
            match action {
                Action::Fail if point.time() == Time::AtCommit => return Ok(false),
                Action::Fail => bail!("refused at {}, as ordered", point.name()),
                Action::Exit => {
                    tracing::error!(point = point.name(), "ordered to die");
                    rustix::process::kill_process(rustix::process::getpid(), Signal::KILL)?;
                    std::future::pending().await
                }
                Action::Damage => return Ok(true),
                Action::KillNic => {
                    let Ok(socket) = Socket::connect(&self.nic) else {
                        // It is dead already: the step is tried again.
                        return Ok(false);
                    };
                    let pid = Pid::from_raw(socket.peer()?.pid).context("no RNIC")?;
                    kill(pid).await.context("the RNIC does not die")?;
                    return Ok(false);
                }
                Action::Hang => {
                    told_to_hang = true;
                    self.changed(point).await?;
                }
            }
        }
    }

    /// Waits until the file no longer orders to hang at `point`.
    async fn changed(&self, point: Point) -> anyhow::Result<()> {
        let folder = self.file.parent().context("the file has a folder")?;
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let flags = WatchFlags::CLOSE_WRITE | WatchFlags::MOVED_TO | WatchFlags::DELETE;
        // Before the file is read, so that no change is missed.
        inotify::add_watch(&inotify, folder, flags)?;
        // SAFETY: an owned descriptor stays open and the same until the registration, which is dropped first, is gone.
        let watched = unsafe { AsyncFd::register(inotify) }?;
        while self.action(point)? == Some(Action::Hang) {
            let mut ready = watched.readable().await?;
            let mut events = [0; 4096];
            while rustix::io::read(watched.get_ref(), &mut events).is_ok_and(|length| length > 0) {}
            ready.clear_ready();
        }
        Ok(())
    }

    fn note(&self, point: Point, action: Action) -> anyhow::Result<()> {
        let mut file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.file.with_extension("reached"))?;
        writeln!(file, "{} {action:?}", point.name())?;
        Ok(())
    }
}

impl Inject for OrderedFaults {
    fn pass(&self, point: Point) -> Passed<'_> {
        Box::pin(self.carry_out(point))
    }
}

/// Kills a process, and waits until all its descriptors are closed: those who hold the other ends know of its death. The kernel
/// closes them one after the other, and then says that it has ended.
async fn kill(pid: Pid) -> anyhow::Result<()> {
    let process = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    rustix::process::pidfd_send_signal(&process, Signal::KILL)?;
    let ended = tokio::task::spawn_blocking(move || {
        let mut ends = [PollFd::new(&process, PollFlags::IN)];
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut ends, None))
    });
    ended.await??;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(folder: &std::path::Path) -> (PathBuf, OrderedFaults) {
        let file = folder.join("faults");
        (file.clone(), OrderedFaults::new(file, folder.join("nic.sock")))
    }

    #[tokio::test]
    async fn only_the_named_point_fails_and_only_while_it_is_ordered() {
        let folder = tempfile::tempdir().unwrap();
        let (file, faults) = faults(folder.path());
        assert!(!faults.pass(Point::PartnerPrepare).await.unwrap());
        std::fs::write(&file, "partner-prepare fail\ndestination-restore damage\n").unwrap();
        assert!(faults.pass(Point::PartnerPrepare).await.is_err());
        // Its name is the beginning of no other's.
        assert!(!faults.pass(Point::PartnerDrain).await.unwrap());
        assert!(faults.pass(Point::DestinationRestore).await.unwrap());
        std::fs::write(&file, "partner-prepare explode\n").unwrap();
        let error = faults.pass(Point::PartnerPrepare).await.unwrap_err().to_string();
        assert!(error.contains("explode"), "{error}");
        std::fs::remove_file(&file).unwrap();
        assert!(!faults.pass(Point::PartnerPrepare).await.unwrap());
        let reached = std::fs::read_to_string(folder.path().join("faults.reached")).unwrap();
        assert_eq!(reached, "partner-prepare Fail\ndestination-restore Damage\n");
    }

    #[tokio::test]
    async fn who_hangs_goes_on_when_told_and_does_what_he_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let (file, faults) = faults(folder.path());
        for (then, fails) in [("", false), ("source-freeze fail\n", true)] {
            std::fs::write(&file, "source-freeze hang\n").unwrap();
            let hanging = faults.pass(Point::SourceFreeze);
            tokio::pin!(hanging);
            tokio::select! {
                biased;
                _ = &mut hanging => panic!("it went on by itself"),
                () = tokio::task::yield_now() => {}
            }
            std::fs::write(&file, then).unwrap();
            assert_eq!(hanging.await.is_err(), fails);
        }
    }
}
