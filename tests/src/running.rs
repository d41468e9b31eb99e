//! A program that was started, what it writes, and its end.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// A running program. It is killed when this is dropped.
///
/// Its output goes to unlinked files, not to pipes: nothing blocks when nobody reads, and a grandchild that lives on
/// holds nobody up.
pub struct Running {
    what: String,
    child: Child,
    pidfd: OwnedFd,
    stdout: File,
    stderr: File,
}

/// How a program ended.
#[derive(Debug, Clone)]
pub struct Finished {
    /// The command line, shortened to the program and its arguments.
    pub what: String,
    /// Exit status; 128 + N after signal N.
    pub code: i32,
    /// What it wrote to standard output.
    pub stdout: String,
    /// What it wrote to standard error.
    pub stderr: String,
}

impl Running {
    /// Starts `command`, called `what` in messages.
    pub fn start(what: impl Into<String>, mut command: Command) -> anyhow::Result<Self> {
        let what = what.into();
        let (stdout, stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
        let child = command
            .stdin(Stdio::null())
            .stdout(stdout.try_clone()?)
            .stderr(stderr.try_clone()?)
            .spawn()
            .with_context(|| format!("cannot start `{what}`"))?;
        let pid = Pid::from_raw(child.id().cast_signed()).context("pid 0")?;
        // The child is not reaped before `wait`, so the pid is still its own.
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        Ok(Self {
            what,
            child,
            pidfd,
            stdout,
            stderr,
        })
    }

    /// What it has written to standard output so far.
    pub fn stdout(&self) -> anyhow::Result<String> {
        Ok(read_all(&self.stdout)?)
    }

    /// What it has written to standard error so far.
    pub fn stderr(&self) -> anyhow::Result<String> {
        Ok(read_all(&self.stderr)?)
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        pidfd_send_signal(&self.pidfd, signal)
            .with_context(|| format!("cannot send {signal:?} to `{}`", self.what))
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> anyhow::Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Waits for its end; a program that takes longer than `limit` is killed, and that is an error.
    pub fn wait(mut self, limit: Duration) -> anyhow::Result<Finished> {
        if !self.ends_within(limit)? {
            self.child.kill()?;
            let status = self.child.wait()?;
            let finished = self.finished(status)?;
            bail!(
                "`{}` did not end within {limit:?}{}",
                self.what,
                finished.output()
            );
        }
        let status = self.child.wait()?;
        self.finished(status)
    }

    /// As [`Self::wait`]; another exit status than 0 is an error.
    pub fn succeed(self, limit: Duration) -> anyhow::Result<Finished> {
        let finished = self.wait(limit)?;
        if finished.code != 0 {
            bail!(
                "`{}` ended with status {}{}",
                finished.what,
                finished.code,
                finished.output()
            );
        }
        Ok(finished)
    }

    fn ends_within(&self, limit: Duration) -> anyhow::Result<bool> {
        let deadline = Instant::now() + limit;
        loop {
            let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now()))?;
            match poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&left)) {
                Ok(count) => return Ok(count > 0),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn finished(&self, status: ExitStatus) -> anyhow::Result<Finished> {
        Ok(Finished {
            what: self.what.clone(),
            code: status
                .code()
                .unwrap_or_else(|| 128 + status.signal().unwrap_or(0)),
            stdout: read_all(&self.stdout)?,
            stderr: read_all(&self.stderr)?,
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail if it was waited for already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Finished {
    /// All that it wrote, for an error message.
    pub fn output(&self) -> String {
        let mut text = String::new();
        for (name, content) in [("stdout", &self.stdout), ("stderr", &self.stderr)] {
            if !content.trim().is_empty() {
                text.push_str(&format!(
                    "\n  {name}:\n    {}",
                    content.trim_end().replace('\n', "\n    ")
                ));
            }
        }
        text
    }
}

/// How a program ended, for an error message.
pub fn told(ended: anyhow::Result<Finished>) -> String {
    match ended {
        Ok(finished) => format!(
            "`{}` ended with status {}{}",
            finished.what,
            finished.code,
            finished.output()
        ),
        Err(error) => format!("{error:#}"),
    }
}

/// The whole file, wherever the writer's offset is.
fn read_all(file: &File) -> io::Result<String> {
    let length = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Running {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Running::start(script, command).unwrap()
    }

    #[test]
    fn the_end_and_the_output_are_told() {
        let finished = shell("echo out; echo err >&2; exit 3")
            .wait(Duration::from_secs(10))
            .unwrap();
        assert_eq!(
            (finished.code, finished.stdout.as_str(), finished.stderr.as_str()),
            (3, "out\n", "err\n")
        );
        assert_eq!(
            shell("kill -9 $$").wait(Duration::from_secs(10)).unwrap().code,
            137
        );
        let error = shell("echo why >&2; exit 3")
            .succeed(Duration::from_secs(10))
            .unwrap_err()
            .to_string();
        assert!(error.contains("status 3") && error.contains("why"), "{error}");
    }

    #[test]
    fn who_takes_too_long_is_killed() {
        let error = shell("echo before; exec sleep 1000")
            .wait(Duration::from_millis(200))
            .unwrap_err()
            .to_string();
        assert!(error.contains("did not end"), "{error}");
    }
}
