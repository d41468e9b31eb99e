//! The clocks of a container: CRIU restores it in a time namespace, so that its monotonic clock and its uptime go on
//! (`man 7 time_namespaces`).
//!
//! runc knows of no such namespace, and does not enter it for what is added to the container. So runc itself is started there. What it sees
//! then of the first process's start, by which it knows that process again, is by the namespace's clock, too: it is given
//! a copy of the container's state with that number.

use std::fs::{self, File};
use std::io::{self, Error, ErrorKind};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::Value;
use tokio::process::Command;

/// What runc calls the first process's number and its start (`libcontainer/container.go`, `BaseState`).
const PID: &str = "init_process_pid";
const START: &str = "init_process_start";

/// The field of `/proc/PID/stat` with a process's start, counted from the first behind the name (`man 5 proc_pid_stat`).
const START_FIELD: usize = 22 - 3;

/// A time namespace that is not this process's.
pub(crate) struct Clocks(File);

impl Clocks {
    /// Those of a container whose state runc keeps in `state`; `None` where they are this process's own. Else a copy of the state, for a runc
    /// that is started there, is put at `copy`.
    pub fn of_container(state: &Path, copy: &Path) -> io::Result<Option<Self>> {
        let mut state: Value = serde_json::from_slice(&fs::read(state)?)?;
        let pid = state[PID].as_i64().ok_or_else(|| malformed(PID))?;
        let Some(clocks) = Self::of_process(pid)? else {
            return Ok(None);
        };
        if state[START].as_u64().is_none() {
            return Err(malformed(START));
        }
        state[START] = clocks.start_of(pid)?.into();
        fs::create_dir_all(copy.parent().ok_or(ErrorKind::InvalidInput)?)?;
        fs::write(copy, serde_json::to_vec(&state)?)?;
        Ok(Some(clocks))
    }

    fn of_process(pid: i64) -> io::Result<Option<Self>> {
        let theirs = format!("/proc/{pid}/ns/time");
        match (fs::read_link("/proc/self/ns/time"), fs::read_link(&theirs)) {
            (Ok(own), Ok(their)) if own != their => Ok(Some(Self(File::open(theirs)?))),
            (Ok(_), Ok(_)) => Ok(None),
            // A kernel without time namespaces.
            (Err(error), _) if error.kind() == ErrorKind::NotFound => Ok(None),
            (Err(error), _) | (_, Err(error)) => Err(error),
        }
    }

    /// When a process has begun, as those see it who are in the namespace.
    fn start_of(&self, pid: i64) -> io::Result<u64> {
        use std::os::unix::process::CommandExt;

        let mut reader = std::process::Command::new("cat");
        reader.arg(format!("/proc/{pid}/stat"));
        let namespace = self.0.try_clone()?;
        // SAFETY: `setns` is async-signal-safe, and the descriptor is open in the child.
        unsafe {
            reader.pre_exec(move || join(&namespace));
        }
        let read = reader.output()?;
        let start = String::from_utf8_lossy(&read.stdout);
        // The name may hold anything.
        let (_, fields) = start
            .rsplit_once(')')
            .ok_or_else(|| malformed("/proc/PID/stat"))?;
        let start = fields.split_ascii_whitespace().nth(START_FIELD);
        start
            .and_then(|start| start.parse().ok())
            .ok_or_else(|| malformed("/proc/PID/stat"))
    }

    /// Has a command, and what it starts, run there.
    pub fn enter(self, command: &mut Command) {
        // SAFETY: as above.
        unsafe {
            command.pre_exec(move || join(&self.0));
        }
    }
}

/// Only for a process with one thread (`man 2 setns`).
fn join(namespace: &File) -> io::Result<()> {
    Ok(move_into_link_name_space(
        namespace.as_fd(),
        Some(LinkNameSpaceType::Time),
    )?)
}

fn malformed(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, format!("{what} is not as expected"))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Stdio};

    use super::*;

    /// unshare(1), whose child is in a time namespace of its own, 1,000 s ahead.
    fn ahead() -> Child {
        let mut command = std::process::Command::new("unshare");
        command.args(["-T", "--boottime", "1000", "--fork", "cat"]);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }

    #[test]
    fn the_own_clocks_are_nothing_to_enter() {
        let folder = tempfile::tempdir().unwrap();
        let (state, copy) = (
            folder.path().join("state.json"),
            folder.path().join("c/state.json"),
        );
        let own = serde_json::json!({PID: std::process::id(), START: 5, "id": "web"});
        fs::write(&state, own.to_string()).unwrap();
        assert!(Clocks::of_container(&state, &copy).unwrap().is_none());
        assert!(!copy.exists());
        fs::write(&state, "{}").unwrap();
        assert!(Clocks::of_container(&state, &copy).is_err());
    }

    #[test]
    fn a_start_is_told_by_the_clock_of_the_namespace() {
        use std::io::{Read, Write};

        let mut child = ahead();
        let mut line = [0; 1];
        // What it gives back says that it runs; it fails where namespaces are forbidden.
        let wrote = child.stdin.as_mut().unwrap().write_all(b"x");
        if wrote.is_err() || child.stdout.as_mut().unwrap().read_exact(&mut line).is_err() {
            let _ = child.wait();
            eprintln!("skipped: no time namespace can be made here");
            return;
        }
        let of = fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).unwrap();
        let pid: i64 = of.trim().parse().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let (state, copy) = (
            folder.path().join("state.json"),
            folder.path().join("web/state.json"),
        );
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let here: u64 = stat
            .rsplit_once(')')
            .unwrap()
            .1
            .split_whitespace()
            .nth(START_FIELD)
            .unwrap()
            .parse()
            .unwrap();
        fs::write(
            &state,
            serde_json::json!({PID: pid, START: here, "id": "web"}).to_string(),
        )
        .unwrap();
        assert!(Clocks::of_container(&state, &copy).unwrap().is_some());
        let copied: Value = serde_json::from_slice(&fs::read(&copy).unwrap()).unwrap();
        let there = copied[START].as_u64().unwrap();
        // Of ticks there are 100 in a second.
        assert!((99_999..=100_001).contains(&(there - here)), "{here} {there}");
        assert_eq!(copied["id"], "web");
        drop(child.stdin.take());
        child.wait().unwrap();
    }
}
