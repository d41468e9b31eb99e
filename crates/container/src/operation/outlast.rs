//! runc and the proxy of an earlier agent, which may still be at work.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::gate::Kind;
use crate::watch::watch;

/// Where the process `who` is noted, for [`outlast`].
fn note_of(work: &Path, kind: Kind, who: &str) -> PathBuf {
    work.join(format!("{who}-{}.process", kind.subcommand()))
}

/// Notes which process runc or the proxy is. Best effort: it only spares an agent that comes after this one a race.
pub(super) fn note(work: &Path, kind: Kind, who: &str, pid: u32) {
    let Some(started) = started_at(pid) else { return };
    if let Err(error) = std::fs::write(note_of(work, kind, who), format!("{pid} {started}")) {
        tracing::warn!(work = %work.display(), %error, "the process of {who} cannot be noted");
    }
}

/// When a process was started, in clock ticks since the machine was: field 22 of proc_pid_stat(5). With it a number
/// cannot come to mean another process.
pub fn started_at(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Field 2 may hold spaces and parentheses.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(22 - 3)?.parse().ok()
}

pub(super) fn open_process(pid: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::NONBLOCK)?)
}

/// Waits until runc and the proxy, which an earlier agent may have started for a checkpoint or restore in `work`, are gone.
/// Without their agent they abort, unless the decision was taken, or is held.
pub async fn outlast(work: &Path) -> io::Result<()> {
    for kind in [Kind::PreDump, Kind::Dump, Kind::Restore] {
        for who in ["runc", "proxy"] {
            let Ok(note) = std::fs::read_to_string(note_of(work, kind, who)) else {
                continue;
            };
            let mut numbers = note.split(' ').map(str::parse::<u64>);
            let (Some(Ok(pid)), Some(Ok(started))) = (numbers.next(), numbers.next()) else {
                continue;
            };
            let Ok(pid) = i32::try_from(pid) else { continue };
            // Opened before it is looked at: what is looked at is what is waited for.
            let Ok(pidfd) = open_process(pid) else { continue };
            if started_at(pid.unsigned_abs()) == Some(started) {
                let _gone = watch(pidfd)?.readable().await?;
            }
        }
    }
    Ok(())
}
