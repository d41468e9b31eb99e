//! A process that is remembered across runs of the program, without mistaking another one for it.

use crate::error::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// A process by its pid and the time at which it started, which together are unique until the next boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// The pid, as the machine numbers it.
    pub pid: u32,
    /// Clock ticks from boot to its start: field 22 of `/proc/PID/stat`.
    pub start_time: u64,
}

impl ProcessId {
    /// The process that has `pid` now.
    pub fn of(pid: u32) -> Result<Self> {
        match read_stat(pid) {
            Some((_, start_time)) => Ok(Self { pid, start_time }),
            None => Err(Error::Refused(format!("process {pid} has ended"))),
        }
    }

    /// Whether it runs. A zombie does not.
    pub fn is_alive(self) -> bool {
        matches!(read_stat(self.pid), Some((state, start)) if start == self.start_time && state != 'Z' && state != 'X')
    }

    /// Sends it a signal; nothing happens if it has ended.
    pub fn kill(self, signal: Signal) -> Result<()> {
        let Some(pidfd) = self.open()? else { return Ok(()) };
        match pidfd_send_signal(pidfd, signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(errno) => Err(Error::io(format!("send a signal to process {}", self.pid))(errno)),
        }
    }

    /// Waits until it has ended; `false` if it has not when `timeout` is over.
    pub fn wait(self, timeout: Duration) -> Result<bool> {
        match self.open()? {
            Some(pidfd) => poll_readable(&pidfd, timeout),
            None => Ok(true),
        }
    }

    fn open(self) -> Result<Option<OwnedFd>> {
        let Some(pid) = Pid::from_raw(self.pid.cast_signed()) else {
            return Ok(None);
        };
        match pidfd_open(pid, PidfdFlags::empty()) {
            // Checked after the descriptor is held: from here on the pid cannot pass to another process unseen.
            Ok(pidfd) => Ok(self.is_alive().then_some(pidfd)),
            Err(Errno::SRCH) => Ok(None),
            Err(errno) => Err(Error::io(format!("open process {}", self.pid))(errno)),
        }
    }
}

/// Waits until `fd` is readable (or hung up); `false` on timeout.
pub(crate) fn poll_readable(fd: impl std::os::fd::AsFd, timeout: Duration) -> Result<bool> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now()))
            .map_err(|_| Error::Config(format!("a timeout of {timeout:?} is too long")))?;
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&left)) {
            Ok(count) => return Ok(count > 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::io("wait for an event")(errno)),
        }
    }
}

/// State letter and start time of a process: proc_pid_stat(5).
fn read_stat(pid: u32) -> Option<(char, u64)> {
    parse_stat(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse_stat(stat: &str) -> Option<(char, u64)> {
    // The command name (field 2) is in parentheses and may hold anything, parentheses too.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let start_time = fields.nth(22 - 4)?.parse().ok()?;
    Some((state, start_time))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn stat_is_read_whatever_the_command_is_called() {
        let stat = "17 (a) b) S 1 17 17 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 1 2 3";
        assert_eq!(parse_stat(stat), Some(('S', 4711)));
    }

    #[test]
    fn a_zombie_is_dead_and_a_reused_pid_is_another() {
        let mut child = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let id = ProcessId::of(child.id()).unwrap();
        assert!(id.is_alive());
        let other = ProcessId {
            start_time: id.start_time + 1,
            ..id
        };
        assert!(!other.is_alive());
        other.kill(Signal::KILL).unwrap();
        assert!(id.is_alive(), "the wrong process was killed");
        id.kill(Signal::KILL).unwrap();
        assert!(id.wait(Duration::from_secs(5)).unwrap());
        assert!(!id.is_alive());
        child.wait().unwrap();
        assert!(id.wait(Duration::ZERO).unwrap());
    }
}
