//! The first process of a container.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions, pidfd_open, waitid};
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

use crate::watch::{Raw, watch};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It returned this status.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
}

/// The first process of a running container, held by a pidfd: its number cannot come to mean another process.
#[derive(Debug)]
pub struct Init {
    pid: Pid,
    pidfd: AsyncFd<Raw<OwnedFd>>,
    settled: Option<oneshot::Receiver<()>>,
}

impl Init {
    /// Takes hold of process `pid`, a child of ours.
    pub fn open(pid: i32) -> io::Result<Self> {
        let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        let pidfd = pidfd_open(pid, PidfdFlags::NONBLOCK)?;
        Ok(Self {
            pid,
            pidfd: watch(pidfd)?,
            settled: None,
        })
    }

    /// Takes hold of `pid`, which becomes our child when `settled` says so.
    pub(crate) fn open_early(pid: i32, settled: oneshot::Receiver<()>) -> io::Result<Self> {
        Ok(Self {
            settled: Some(settled),
            ..Self::open(pid)?
        })
    }

    /// Its number in our PID namespace.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Waits until it ends, and reaps it. Cancel safe.
    ///
    /// It must be our child: the agent is a child subreaper, and runc, which started the container, has ended.
    pub async fn wait_exit(&mut self) -> io::Result<Exit> {
        let _ready = self.pidfd.readable().await?;
        if let Some(settled) = &mut self.settled {
            // Until runc and the proxy have ended, the process is still the proxy's child.
            let _ = settled.await;
            self.settled = None;
        }
        let status = waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED)?
            .ok_or(io::ErrorKind::WouldBlock)?;
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Ok(Exit::Code(code)),
            (None, Some(signal)) => Ok(Exit::Signal(signal)),
            (None, None) => Err(io::Error::other("waitid reported a process that has not ended")),
        }
    }
}
