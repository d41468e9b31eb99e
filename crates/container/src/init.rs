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
    /// Takes hold of process `pid`.
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

    /// Kills it.
    pub(crate) fn kill(&self) -> io::Result<()> {
        Ok(rustix::process::pidfd_send_signal(
            self.pidfd.as_fd(),
            rustix::process::Signal::KILL,
        )?)
    }

    /// Waits until it ends, and reaps it if it is our child: the agent is a child subreaper, and runc, which started the
    /// container, has ended. Cancel safe.
    ///
    /// Of another's child (the container was started by an agent before this one) the kernel tells the status when it
    /// is reaped, from Linux 6.15 on; before that it is an error of the kind [`io::ErrorKind::Unsupported`].
    pub async fn wait_exit(&mut self) -> io::Result<Exit> {
        let _ready = self.pidfd.readable().await?;
        if let Some(settled) = &mut self.settled {
            // Until runc and the proxy have ended, the process is still the proxy's child.
            let _ = settled.await;
            self.settled = None;
        }
        let status = match waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED) {
            Err(rustix::io::Errno::CHILD) => return self.reaped_by_another().await,
            status => status?.ok_or(io::ErrorKind::WouldBlock)?,
        };
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Ok(Exit::Code(code)),
            (None, Some(signal)) => Ok(Exit::Signal(signal)),
            (None, None) => Err(io::Error::other("waitid reported a process that has not ended")),
        }
    }

    /// The status of a process that is not our child, when its parent has reaped it.
    async fn reaped_by_another(&self) -> io::Result<Exit> {
        loop {
            // Readable at its end, and once more when it is reaped.
            let mut ready = self.pidfd.readable().await?;
            if let Some(exit) = pidfd_info::exit(self.pidfd.as_fd())? {
                return Ok(exit);
            }
            ready.clear_ready();
        }
    }
}

/// What the kernel says of a process by its pidfd: ioctl `PIDFD_GET_INFO` (`linux/pidfd.h`).
mod pidfd_info {
    use std::io;
    use std::os::fd::{AsRawFd, BorrowedFd};

    use super::Exit;

    /// `struct pidfd_info` as of Linux 6.13, 64 bytes; later ones are longer, and the kernel takes this length, too.
    #[repr(C)]
    #[derive(Default)]
    struct PidfdInfo {
        mask: u64,
        cgroup_id: u64,
        pid: u32,
        tgid: u32,
        ppid: u32,
        users_and_groups: [u32; 8],
        exit_code: i32,
    }

    const _: () = assert!(size_of::<PidfdInfo>() == 64);

    /// `PIDFD_INFO_EXIT`, Linux 6.15.
    const INFO_EXIT: u64 = 1 << 3;

    /// `_IOWR(0xFF, 11, struct pidfd_info)`.
    const GET_INFO: libc::c_ulong = (3 << 30) | (64 << 16) | (0xff << 8) | 11;

    /// How a process ended; `None` while it has not been reaped.
    pub fn exit(pidfd: BorrowedFd<'_>) -> io::Result<Option<Exit>> {
        let answer = match ask(pidfd) {
            // The kernel looks first for the status and then for the process. One that is reaped in between has neither for it;
            // the status is there by now, if this kernel keeps it.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => ask(pidfd),
            answer => answer,
        };
        let info = answer.map_err(|error| match error.raw_os_error() {
            // Reaped, and this kernel has kept nothing; or it does not know the call.
            Some(libc::ESRCH | libc::ENOTTY | libc::EINVAL) => io::Error::new(
                io::ErrorKind::Unsupported,
                "it was not this agent's child, and the kernel tells its status only from Linux 6.15 on",
            ),
            _ => error,
        })?;
        if info.mask & INFO_EXIT == 0 {
            return Ok(None);
        }
        Ok(Some(match libc::WIFSIGNALED(info.exit_code) {
            true => Exit::Signal(libc::WTERMSIG(info.exit_code)),
            false => Exit::Code(libc::WEXITSTATUS(info.exit_code)),
        }))
    }

    fn ask(pidfd: BorrowedFd<'_>) -> io::Result<PidfdInfo> {
        let mut info = PidfdInfo {
            mask: INFO_EXIT,
            ..PidfdInfo::default()
        };
        // SAFETY: the descriptor is open, and the kernel writes at most the 64 bytes that the number of the call names.
        match unsafe { libc::ioctl(pidfd.as_raw_fd(), GET_INFO, &raw mut info) } {
            0 => Ok(info),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A grandchild of ours: its parent, a shell, reaps it.
    #[tokio::test]
    async fn the_status_of_anothers_child_is_told_when_it_is_reaped() {
        use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
        for (ends, expected) in [("exit 7", Exit::Code(7)), ("kill -9 $$", Exit::Signal(9))] {
            // What runs in the background has nothing on standard input, unless by another number.
            let script = format!("exec 3<&0; sh -c 'read x; {ends}' <&3 & echo $!; wait");
            let mut shell = tokio::process::Command::new("sh")
                .args(["-c", &script])
                .stdin(std::process::Stdio::piped())
                .stdout(std::process::Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(shell.stdout.take().unwrap()).lines();
            let pid = lines.next_line().await.unwrap().unwrap().parse().unwrap();
            let mut init = Init::open(pid).unwrap();
            shell.stdin.take().unwrap().write_all(b"go\n").await.unwrap();
            match init.wait_exit().await {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                    eprintln!("skipped: {error}");
                }
                exit => assert_eq!(exit.unwrap(), expected),
            }
            shell.wait().await.unwrap();
        }
    }

    /// Asked again and again, so that some are asked at the very moment.
    #[test]
    fn a_status_is_told_though_the_process_is_reaped_while_it_is_asked_for() {
        for _ in 0..2000 {
            let mut child = std::process::Command::new("true").spawn().unwrap();
            let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
            let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
            let reaped = std::thread::spawn(move || child.wait().unwrap());
            let told = loop {
                if let Some(told) = pidfd_info::exit(pidfd.as_fd()).transpose() {
                    break told;
                }
            };
            reaped.join().unwrap();
            match told {
                // Also after it is reaped: this kernel keeps none.
                Err(_) if pidfd_info::exit(pidfd.as_fd()).is_err() => return eprintln!("skipped"),
                told => assert_eq!(told.unwrap(), Exit::Code(0)),
            }
        }
    }
}
