//! Threads that stand still for a moment.

use std::collections::HashSet;
use std::io;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::sys::ptrace::{Seized, Stop};

/// How long threads may take to come out of the kernel.
const LIMIT: Duration = Duration::from_secs(2);

/// Has each thread of these processes stand still once, and returns when all have: no system call that any of them was in is
/// still in the middle of it. Processes and threads that have ended are passed over; those that were made meanwhile
/// were in no system call before.
pub fn stand_still_once(pids: &[u32]) -> Result<(), Error> {
    alone(|| {
        let mut seized = Vec::new();
        for pid in pids {
            seized.extend(interrupt(threads(*pid)?)?);
        }
        let until = Instant::now() + LIMIT;
        for (tid, mut thread) in seized {
            if has_stopped(tid, &mut thread, until)? {
                let _ = thread.detach();
            }
        }
        Ok(())
    })
}

/// Does this while all threads of a process stand still. An error, and nothing is done, if they do not within this time.
pub fn while_still<T: Send>(
    pid: u32,
    limit: Duration,
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> Result<T, Error> {
    alone(|| {
        let (mut seen, mut stopped) = (HashSet::new(), Vec::new());
        let until = Instant::now() + limit;
        // Until those that still run have made no further thread.
        loop {
            let new: Vec<u32> = threads(pid)?
                .into_iter()
                .filter(|tid| seen.insert(*tid))
                .collect();
            if new.is_empty() {
                break;
            }
            for (tid, mut thread) in interrupt(new)? {
                if has_stopped(tid, &mut thread, until)? {
                    stopped.push(thread);
                }
            }
        }
        let done = work();
        for mut thread in stopped {
            let _ = thread.detach();
        }
        done
    })
}

/// Seizes threads, and asks them to stop.
fn interrupt(threads: Vec<u32>) -> Result<Vec<(u32, Seized)>, Error> {
    let mut seized = Vec::new();
    for tid in threads {
        match Seized::seize(tid, false) {
            Ok(thread) => {
                // It may have ended since.
                let _ = thread.interrupt();
                seized.push((tid, thread));
            }
            Err(error) if has_ended(&error) => {}
            Err(error) => match refusal(tid, error) {
                // It waits for its parent.
                Err(Error::Gone) => {}
                refused => return Err(refused?),
            },
        }
    }
    Ok(seized)
}

/// Waits until a thread has stopped. False if it has ended.
fn has_stopped(tid: u32, thread: &mut Seized, until: Instant) -> Result<bool, Error> {
    match thread.wait(until) {
        // With a signal it has stopped, too, and gets it when it is let go.
        Ok(Stop::Event | Stop::Signal | Stop::SystemCall) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(Error::Busy { tid }),
        Err(error) if has_ended(&error) => Ok(false),
        Err(error) => Err(Error::io("wait for a thread")(error)),
    }
}

/// Runs this in a thread of its own, with whose end every thread that it has seized and not let go is let go.
pub fn alone<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("ptrace".to_owned());
        let thread = thread.spawn_scoped(scope, work);
        let thread = thread.map_err(|source| Error::Io {
            what: "start a thread",
            source,
        })?;
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// The threads of a process; none if it has ended.
fn threads(pid: u32) -> Result<Vec<u32>, Error> {
    let entries = match std::fs::read_dir(format!("/proc/{pid}/task")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound || has_ended(&error) => return Ok(Vec::new()),
        entries => entries.map_err(Error::io("look at the threads of a process"))?,
    };
    let names = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Ok(names.collect())
}

pub fn has_ended(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESRCH)
}

/// Why a thread cannot be seized. Of one that has ended and is not reaped the kernel says EPERM, too: then the outer error.
pub fn refusal(tid: u32, error: io::Error) -> Result<Error, Error> {
    let status = std::fs::read_to_string(format!("/proc/{tid}/status")).unwrap_or_default();
    let field = |name: &str| {
        status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .map(str::trim)
    };
    match error.raw_os_error() {
        Some(libc::EPERM) if field("TracerPid:").is_some_and(|tracer| tracer != "0") => Ok(Error::Traced),
        Some(libc::EPERM) if field("State:").is_none_or(|state| state.starts_with(['Z', 'X'])) => {
            Err(Error::Gone)
        }
        _ => Ok(Error::Io {
            what: "seize a thread",
            source: error,
        }),
    }
}
