//! On which processors a thread may run, and how late the kernel may wake it (`man 2 sched_setaffinity`, `PR_SET_TIMERSLACK`).

use std::collections::HashMap;
use std::fs;
use std::io;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

use super::innermost;
use crate::cgroup::processors_of;
use crate::check::read_text;

/// A thread that has something of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Thread {
    /// Its process and itself, by their numbers within the container.
    process: i32,
    thread: i32,
    /// The processors, if it may not run on all that this agent may.
    #[serde(default)]
    processors: Option<Vec<u32>>,
    /// In nanoseconds, if it is not the usual one.
    #[serde(default)]
    slack: Option<u64>,
}

/// What a thread has that nobody has told otherwise (`init/init_task.c`).
const USUAL_SLACK: u64 = 50_000;

/// The threads of a process that have something of their own.
pub(super) fn read(pid: i32) -> anyhow::Result<Vec<Thread>> {
    let usual = allowed(pid)?;
    let mut found = Vec::new();
    let process = innermost(&read_text(format!("/proc/{pid}/status"))?)?;
    for thread in threads(pid)? {
        let own = processors(Some(thread))?;
        let slack = slack(thread)?.filter(|slack| *slack != USUAL_SLACK);
        let own = (own != usual).then_some(own);
        if own.is_none() && slack.is_none() {
            continue;
        }
        let status = read_text(format!("/proc/{pid}/task/{thread}/status"))?;
        found.push(Thread {
            process,
            thread: innermost(&status)?,
            processors: own,
            slack,
        });
    }
    Ok(found)
}

/// Puts it into the threads of a process. Processors that this host lacks are left out; where it has none of them, the thread may run on
/// all.
///
/// Threads that are not named have the usual slack: CRIU runs in real time, which has none, and the kernel gives that to what it makes.
pub(super) fn put_back(pid: i32, process: i32, kept: &[Thread]) -> anyhow::Result<()> {
    let of_it: HashMap<i32, &Thread> = kept
        .iter()
        .filter(|kept| kept.process == process)
        .map(|kept| (kept.thread, kept))
        .collect();
    let here = allowed(pid)?;
    for thread in threads(pid)? {
        let mut wanted_slack = USUAL_SLACK;
        let kept = match of_it.is_empty() {
            true => None,
            false => {
                let status = read_text(format!("/proc/{pid}/task/{thread}/status"))?;
                of_it.get(&innermost(&status)?)
            }
        };
        if let Some(own) = kept.and_then(|kept| kept.slack) {
            wanted_slack = own;
        }
        set_slack(thread, wanted_slack)?;
        let Some(kept) = kept else {
            continue;
        };
        if let Some(wanted) = &kept.processors {
            let mut set = CpuSet::new();
            let is_here = |number: &&u32| here.contains(number);
            for number in wanted.iter().filter(is_here) {
                set.set(*number as usize);
            }
            if set.count() == 0 {
                tracing::warn!(
                    process,
                    thread = kept.thread,
                    "a thread ran on processors that this host does not have, and may run on all of them"
                );
            } else {
                match sched_setaffinity(Pid::from_raw(thread), &set) {
                    Err(rustix::io::Errno::INVAL) => tracing::warn!(
                        process,
                        thread = kept.thread,
                        "a thread ran on processors that its cgroup does not have here, and may run on all of them"
                    ),
                    set => set?,
                }
            }
        }
    }
    Ok(())
}

/// Gives a thread its slack, if it has another one.
fn set_slack(thread: i32, wanted: u64) -> io::Result<()> {
    if slack(thread)?.is_none_or(|now| now == wanted) {
        return Ok(());
    }
    match fs::write(format!("/proc/{thread}/timerslack_ns"), wanted.to_string()) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            tracing::warn!(thread, %error, "a thread's timers may be less exact, or wake it more often");
            Ok(())
        }
        result => result,
    }
}

fn threads(pid: i32) -> io::Result<Vec<i32>> {
    let mut threads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        threads.extend(entry?.file_name().to_string_lossy().parse::<i32>());
    }
    Ok(threads)
}

/// The processors that threads of a process may ask for: those of its cgroup, or of this thread where nobody says.
fn allowed(pid: i32) -> io::Result<Vec<u32>> {
    processors_of(pid).map_or_else(|| processors(None), Ok)
}

/// The processors of a thread, or of this one.
fn processors(thread: Option<i32>) -> io::Result<Vec<u32>> {
    let set = sched_getaffinity(thread.and_then(Pid::from_raw))?;
    let all = 0..CpuSet::MAX_CPU;
    Ok(all
        .filter(|number| set.is_set(*number))
        .map(|number| number as u32)
        .collect())
}

/// `None` where it cannot be read.
fn slack(thread: i32) -> io::Result<Option<u64>> {
    match fs::read_to_string(format!("/proc/{thread}/timerslack_ns")) {
        Ok(text) => Ok(text.trim().parse().ok()),
        // Of others only who may set their priority.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_thread_gets_its_processors_and_its_slack_again() {
        let own = std::process::id() as i32;
        let (say, hear) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            say.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            let _ = ended.recv();
        });
        let thread = hear.recv().unwrap();
        let usual = processors(Some(thread)).unwrap();
        let kept = Thread {
            process: own,
            thread,
            processors: Some(vec![usual[0]]),
            slack: Some(123_456),
        };
        put_back(own, own, std::slice::from_ref(&kept)).unwrap();
        assert_eq!(processors(Some(thread)).unwrap(), [usual[0]]);
        assert_eq!(slack(thread).unwrap(), Some(123_456));
        let nowhere = Thread {
            processors: Some(vec![CpuSet::MAX_CPU as u32 - 1]),
            ..kept.clone()
        };
        put_back(own, own, &[nowhere]).unwrap();
        let found = read(own).unwrap();
        assert_eq!(
            found.iter().find(|found| found.thread == thread).unwrap().slack,
            Some(123_456)
        );
        drop(end);
        other.join().unwrap();
    }
}
