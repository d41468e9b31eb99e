//! Killing everything.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::freezer::ASK_AGAIN;
use super::{Cgroup, CgroupVersion, gone_means, is_gone, too_late};

impl Cgroup {
    /// Kills all tasks, and returns when none is left. Frozen ones do not execute another instruction of their program.
    ///
    /// It is an error if some are left after `limit`; they are killed and may still be frozen.
    pub fn kill(&self, limit: Duration) -> io::Result<()> {
        let deadline = Instant::now() + limit;
        match self.version {
            CgroupVersion::V1 => self.kill_v1(deadline),
            CgroupVersion::V2 => gone_means(self.kill_v2(deadline), ()),
        }
    }

    /// Waits until somebody else has sent each process a SIGKILL, or `ended` says that nobody will any more. With version 1 what is
    /// frozen does not die of it, and who waits for their deaths waits for a thaw: then it is time for [`Self::kill`].
    pub(crate) fn await_kills(&self, mut ended: impl FnMut() -> bool, limit: Duration) -> io::Result<()> {
        let deadline = Instant::now() + limit;
        while !ended() && !self.are_killed()? {
            if Instant::now() >= deadline {
                return Err(too_late(&self.path, "are not killed"));
            }
            // Nobody is told of another's pending signals.
            std::thread::sleep(ASK_AGAIN);
        }
        Ok(())
    }

    /// Whether a SIGKILL is pending for each process: proc_pid_status(5), `ShdPnd`.
    fn are_killed(&self) -> io::Result<bool> {
        for pid in self.list("cgroup.procs")? {
            let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else {
                // It has ended.
                continue;
            };
            let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
            let pending = pending.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
            if pending.is_none_or(|mask| mask & 1 << (libc::SIGKILL - 1) == 0) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn kill_v2(&self, deadline: Instant) -> io::Result<()> {
        match self.write("cgroup.kill", "1") {
            // Linux before 5.14 has no such file.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => self.kill_each(deadline),
            killed => killed.and_then(|()| self.await_event("populated", false, deadline)),
        }?;
        // runc takes no cgroup for a container that is frozen, be it empty.
        self.order_thaw()
    }

    fn kill_v1(&self, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        match self.freeze(left / 2) {
            Err(error) if is_gone(&error) => return Ok(()),
            // Some task is in a system call that does not end. The others are killed all the same, as often as new ones
            // appear.
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {}
            frozen => frozen?,
        }
        self.kill_each(deadline)
    }

    /// Kills process by process, and thaws when each that is there is killed: what is frozen makes no new ones, and what
    /// is killed does not run again when it is thawed.
    fn kill_each(&self, deadline: Instant) -> io::Result<()> {
        let mut killed: Vec<(i32, OwnedFd)> = Vec::new();
        loop {
            let mut fresh = false;
            for pid in self.list("cgroup.procs")? {
                if killed.iter().any(|(known, _)| *known == pid) {
                    continue;
                }
                if let Some(process) = kill_process(pid)? {
                    killed.push((pid, process));
                    fresh = true;
                }
            }
            if fresh && Instant::now() < deadline {
                // Until a look finds nobody new.
                continue;
            }
            gone_means(self.order_thaw(), ())?;
            for (_, process) in killed.drain(..) {
                await_end(&process, deadline)?;
            }
            if self.list("cgroup.procs")?.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(too_late(&self.path, "are killed and do not end"));
            }
            std::thread::yield_now();
        }
    }
}

/// Kills a process, and returns what its end can be waited for with; `None` if it has ended.
fn kill_process(pid: i32) -> io::Result<Option<OwnedFd>> {
    // The kernel lists processes that our PID namespace does not know as 0.
    let pid = Pid::from_raw(pid).ok_or_else(|| {
        io::Error::other("a process of another PID namespace is in the container's cgroup; who put it there?")
    })?;
    let process = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(Errno::SRCH) => return Ok(None),
        process => process?,
    };
    match pidfd_send_signal(&process, Signal::KILL) {
        Err(Errno::SRCH) => Ok(None),
        sent => Ok(sent.map(|()| Some(process))?),
    }
}

fn await_end(process: &OwnedFd, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => {}
            // Whether it was in time, the list says.
            ended => return Ok(ended.map(drop)?),
        }
    }
}
