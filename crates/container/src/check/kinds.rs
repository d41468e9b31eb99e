//! Processes and descriptors of kinds that CRIU refuses, or would lose something of.

use std::collections::BTreeMap;
use std::fs;

use super::Process;
use super::watches::Watches;
use crate::fdinfo::{is_semaphore, line};

/// Namespaces of a process of which CRIU takes one for the container (`criu/namespaces.c`): further ones for mounts it takes.
const NAMESPACES: [(&str, &str); 9] = [
    ("uts", "UTS (host names)"),
    ("ipc", "IPC"),
    ("pid", "PID"),
    ("pid_for_children", "PID, for its children,"),
    ("net", "network"),
    ("cgroup", "cgroup"),
    ("time", "time"),
    ("time_for_children", "time, for its children,"),
    ("user", "user"),
];

/// What stands in the way of a process, in words that follow its name. `all`: the processes of the container.
///
/// `has_rdma`: its semaphores are no blockers.
pub(super) fn problems(
    init: i32,
    pid: i32,
    all: &BTreeMap<i32, Process>,
    has_rdma: bool,
    watches: &Watches,
) -> Vec<String> {
    let mut problems = Vec::new();
    problems.extend(nested(init, pid));
    problems.extend(dead_leader(pid));
    problems.extend(lost_session(pid, all));
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten();
    for entry in entries {
        let Ok(target) = fs::read_link(entry.path()) else {
            continue;
        };
        let number = entry.file_name().to_string_lossy().into_owned();
        let fdinfo = || fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap_or_default();
        let found = match &*target.to_string_lossy() {
            "anon_inode:[eventfd]" if !has_rdma && is_semaphore(&fdinfo()) => Some(
                "is an eventfd that is a semaphore (EFD_SEMAPHORE), which CRIU would restore as a counter; \
                 have the program use a semaphore of another kind"
                    .to_owned(),
            ),
            "anon_inode:bpf-map" => bpf_map(&fdinfo()),
            "anon_inode:[pidfd]" => pidfd(&fdinfo(), all),
            "anon_inode:inotify" => watches.problem(&fdinfo()),
            _ => None,
        };
        problems.extend(found.map(|found| format!("descriptor {number} {found}")));
    }
    problems
}

/// Descriptors of a process that are semaphores of eventfd.
pub(super) fn semaphores(pid: i32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fdinfo"));
    let entries = entries.into_iter().flatten().flatten();
    let semaphores =
        entries.filter(|entry| fs::read_to_string(entry.path()).is_ok_and(|text| is_semaphore(&text)));
    semaphores
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// Namespaces of its own.
fn nested(init: i32, pid: i32) -> Vec<String> {
    let of = |pid: i32, kind: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok();
    let differs = |kind: &&(&str, &str)| {
        let (first, own) = (of(init, kind.0), of(pid, kind.0));
        first.is_some() && own.is_some() && first != own
    };
    let found: Vec<_> = NAMESPACES.iter().filter(differs).map(|kind| kind.1).collect();
    match found.as_slice() {
        [] => Vec::new(),
        found => vec![format!(
            "is in a namespace of its own ({}), which CRIU cannot write down within a container; end it before the move, or start it without \
             (`unshare`, systemd's Protect… and Private…)",
            found.join(", ").replace(",,", ",")
        )],
    }
}

/// Its first thread has ended, and others have not.
fn dead_leader(pid: i32) -> Option<String> {
    let status = super::read_text(format!("/proc/{pid}/status")).ok()?;
    let threads: u32 = line(&status, "Threads:")?.parse().ok()?;
    // A process that ends has such a moment, too.
    let is_dead = line(&status, "State:")?.starts_with('Z') && threads > 1;
    is_dead.then(|| {
        "has threads, but its first one has ended (pthread_exit in main), which CRIU cannot write down; have the program wait in its first thread (pthread_join)"
            .to_owned()
    })
}

/// The leader of its session has ended.
fn lost_session(pid: i32, all: &BTreeMap<i32, Process>) -> Option<String> {
    let stat = super::read_text(format!("/proc/{pid}/stat")).ok()?;
    let session = session_of(&stat)?;
    // 0: it is of outside of the container.
    let is_lost = session != 0 && !all.contains_key(&session) && is_of_container(pid);
    is_lost.then(|| {
        format!("is in session {session}, whose leader has ended, which CRIU cannot write down; end it before the move, or start it by `setsid`")
    })
}

/// Whether the session of a process has a number within its container.
fn is_of_container(pid: i32) -> bool {
    let status = super::read_text(format!("/proc/{pid}/status")).unwrap_or_default();
    let inner = line(&status, "NSsid:").and_then(|numbers| numbers.split_ascii_whitespace().next_back());
    inner.is_some_and(|inner| inner != "0")
}

/// The sixth field of a `stat`.
fn session_of(stat: &str) -> Option<i32> {
    // The name, in parentheses, may have spaces and parentheses.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(3)?.parse().ok()
}

fn bpf_map(fdinfo: &str) -> Option<String> {
    /// `linux/bpf.h`: `BPF_MAP_TYPE_HASH`, `BPF_MAP_TYPE_ARRAY`.
    const TAKEN: [&str; 2] = ["1", "2"];
    let kind = line(fdinfo, "map_type:")?;
    (!TAKEN.contains(&kind)).then(|| {
        "is a map of BPF of a kind that CRIU cannot write down (it takes hashes and arrays); end the process before the move".to_owned()
    })
}

/// A pidfd of a thread, or of a process that does not move.
fn pidfd(fdinfo: &str, all: &BTreeMap<i32, Process>) -> Option<String> {
    let flags = line(fdinfo, "flags:").and_then(|flags| i32::from_str_radix(flags, 8).ok())?;
    /// `linux/pidfd.h`: the same bit as `O_EXCL`.
    const PIDFD_THREAD: i32 = libc::O_EXCL;
    if flags & PIDFD_THREAD != 0 {
        return Some("is a pidfd of a thread (PIDFD_THREAD), which CRIU cannot write down; have the program close it before the move".to_owned());
    }
    let pid: i32 = line(fdinfo, "Pid:")?.parse().ok()?;
    (pid > 0 && !all.contains_key(&pid)).then(|| {
        format!("is a pidfd of process {pid}, which is not of the container; have the program close it before the move")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_read_behind_any_name() {
        assert_eq!(session_of("7 (a) b) ) S 1 7 5 0 -1 4"), Some(5));
        assert_eq!(session_of("7"), None);
    }

    #[test]
    fn maps_and_pidfds_are_judged() {
        assert_eq!(bpf_map("map_type:\t1\n"), None);
        assert!(bpf_map("map_type:\t9\n").is_some());
        let all = BTreeMap::new();
        assert_eq!(pidfd("flags:\t02000002\nPid:\t-1\n", &all), None);
        assert!(
            pidfd("flags:\t02000002\nPid:\t7\n", &all)
                .unwrap()
                .contains("process 7")
        );
        assert!(
            pidfd("flags:\t02000202\nPid:\t7\n", &all)
                .unwrap()
                .contains("thread")
        );
    }

    #[test]
    fn a_process_in_a_namespace_of_its_own_is_found() {
        let own = std::process::id() as i32;
        assert_eq!(nested(own, own), Vec::<String>::new());
        let child = std::process::Command::new("unshare")
            .args(["--uts", "--ipc", "sleep", "1000"])
            .spawn();
        let Ok(mut child) = child else {
            return eprintln!("skipped: there is no unshare");
        };
        let pid = child.id() as i32;
        // It is there when the program is.
        let is_there = || {
            let command = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
            command.starts_with(b"sleep")
        };
        while !is_there() && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        let found = nested(own, pid);
        let ended = child.try_wait().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        match ended {
            Some(_) => eprintln!("skipped: it needs CAP_SYS_ADMIN"),
            None => assert!(found[0].contains("UTS") && found[0].contains("IPC"), "{found:?}"),
        }
    }
}
