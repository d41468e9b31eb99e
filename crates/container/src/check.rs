//! What CRIU will refuse, found without freezing anything.
//!
//! Best effort, from `/proc` (`man 5 proc`): CRIU itself looks closer, but only while the container is frozen. The
//! list of what it takes is in `criu/files.c`, `dump_one_file`.

mod kinds;
mod memory;
mod nameless;
mod sockets;

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::bundle::{is_harmless_device, is_own_terminal, is_terminal};
use crate::rnic::is_rnic;

pub use memory::{Pages, huge_pages, lack_of_huge_pages, memory_policies};
pub(crate) use nameless::GHOST_LIMIT_BYTES;

/// Files without a name that CRIU knows, as `/proc/PID/fd` shows them.
const KNOWN_ANONYMOUS: [&str; 7] = [
    "anon_inode:[eventfd]",
    "anon_inode:[eventpoll]",
    "anon_inode:inotify",
    "anon_inode:[timerfd]",
    "anon_inode:[signalfd]",
    "anon_inode:[pidfd]",
    "anon_inode:bpf-map",
];

/// As what `/proc/PID/fd` shows events of an RNIC of the kernel's.
const RNIC_EVENTS: &str = "anon_inode:[infinibandevent]";

/// What the guest library has open for a moment while it takes memory over that is registered, as `/proc/PID/fd` shows it: a
/// userfaultfd, and the device by which it makes one.
const OPEN_FOR_A_MOMENT: [&str; 2] = ["anon_inode:[userfaultfd]", "/dev/userfaultfd"];

/// Where a container has the nodes of its RNICs.
const RNIC_NODES: &str = "/dev/infiniband/uverbs";

/// What stands in the way of a checkpoint of the container with this first process, in words for an operator. `rnics`: that it has RNICs
/// of the kernel's open does not ([`CheckpointConfig::rnics`](crate::CheckpointConfig::rnics)).
///
/// `guests`: processes with RDMA, whose guest library of an earlier release has a semaphore that may become a counter. `carried` is the
/// device number of the file system that moves along, if there is one.
pub fn blockers(init_pid: i32, rnics: bool, guests: &[i32], carried: Option<u64>) -> io::Result<Vec<String>> {
    let processes = processes_of(init_pid)?;
    let mut found = added_to(init_pid, &processes);
    let processes = with_nested(init_pid, processes)?;
    let mounts = mounts_of(processes.keys().copied());
    for (pid, process) in &processes {
        let who = format!("process {pid} ({})", process.command);
        if process.tracer != 0 {
            found.push(format!(
                "{who} is traced by process {}; detach the debugger first",
                process.tracer
            ));
        }
        // A process that ends while we look is no blocker.
        found.extend(
            kinds::problems(init_pid, *pid, &processes, guests.contains(pid))
                .into_iter()
                .map(|problem| format!("{who}: {problem}")),
        );
        for problem in descriptor_problems(*pid, &mounts, (rnics, carried, guests.contains(pid)))
            .and_then(|mut problems| {
                problems.extend(mapping_problems(*pid, rnics)?);
                problems.extend(nameless::mapping_problems(*pid, carried)?);
                problems.extend(memory::problems(*pid)?);
                Ok(problems)
            })
            .unwrap_or_default()
        {
            found.push(format!("{who}: {problem}"));
        }
    }
    found.extend(sockets::problems(init_pid, &processes));
    Ok(found)
}

/// What changes at a move, in words for an operator. `guests`: as of [`blockers`].
pub fn notes(init_pid: i32, guests: &[i32]) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for (pid, process) in processes_of(init_pid)? {
        if guests.contains(&pid) {
            let semaphores = kinds::semaphores(pid).into_iter();
            found.extend(semaphores.map(|number| {
                format!(
                    "process {pid} ({}): descriptor {number} is an eventfd that is a semaphore (EFD_SEMAPHORE), of the program or of an earlier \
                     release's guest library; after the move one read takes all of its count",
                    process.command
                )
            }));
        }
    }
    Ok(found)
}

/// Processes of the container that have an RNIC of the kernel's open, with their names.
pub fn with_rnics(init_pid: i32) -> io::Result<Vec<(i32, String)>> {
    let processes = processes_of(init_pid)?;
    let has = |pid: &i32| {
        // Those of a process that ends while we look are closed.
        let entries = fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten()
            .flatten();
        entries.map(|entry| entry.path()).any(|link| {
            let of_rnic = |meta: fs::Metadata| meta.file_type().is_char_device() && is_rnic(meta.rdev());
            fs::read_link(&link).is_ok_and(|target| target.to_string_lossy() == RNIC_EVENTS)
                || fs::metadata(&link).is_ok_and(of_rnic)
        })
    };
    let found = processes.into_iter().filter(|(pid, _)| has(pid));
    Ok(found.map(|(pid, process)| (pid, process.command)).collect())
}

/// Processes of the container that are another user's than root's, in words for an operator.
pub fn of_users(init_pid: i32) -> io::Result<Vec<String>> {
    let is_of_user = |pid: &i32| {
        let status = read_text(Path::new(&format!("/proc/{pid}/status")));
        status.is_ok_and(|status| {
            let ids = status
                .lines()
                .filter_map(|line| line.strip_prefix("Uid:").or_else(|| line.strip_prefix("Gid:")));
            ids.flat_map(str::split_ascii_whitespace).any(|id| id != "0")
        })
    };
    let processes = processes_of(init_pid)?.into_iter();
    let found = processes.filter(|(pid, _)| is_of_user(pid));
    Ok(found
        .map(|(pid, process)| format!("process {pid} ({}) is not root's", process.command))
        .collect())
}

/// Processes of the container that have a terminal of its own open, with their names.
pub fn with_terminals(init_pid: i32) -> io::Result<Vec<(i32, String)>> {
    let processes = processes_of(init_pid)?;
    let has = |pid: &i32| {
        let entries = fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten()
            .flatten();
        entries.map(|entry| entry.path()).any(|link| {
            fs::metadata(&link)
                .is_ok_and(|meta| meta.file_type().is_char_device() && is_terminal(meta.rdev()))
        })
    };
    let found = processes.into_iter().filter(|(pid, _)| has(pid));
    Ok(found.map(|(pid, process)| (pid, process.command)).collect())
}

/// Processes of the container that do not descend from its first one, in words for an operator. CRIU takes a tree, so
/// that these would be left behind, and killed with what is left.
pub fn added(init_pid: i32) -> io::Result<Vec<String>> {
    Ok(added_to(init_pid, &processes_of(init_pid)?))
}

fn added_to(init_pid: i32, processes: &BTreeMap<i32, Process>) -> Vec<String> {
    let tree = descendants(init_pid, processes);
    let added = processes.iter().filter(|(pid, _)| !tree.contains(pid));
    let words = added.map(|(pid, process)| {
        format!(
            "process {pid} ({}) was started from outside (runc exec); CRIU would leave it behind, so end it, and start it with `verbatim exec`",
            process.command
        )
    });
    words.collect()
}

/// What is known of a process.
pub(crate) struct Process {
    parent: i32,
    tracer: i32,
    /// Its name.
    pub command: String,
}

/// The processes in the PID namespace of `init_pid`.
pub(crate) fn processes_of(init_pid: i32) -> io::Result<BTreeMap<i32, Process>> {
    let namespace = fs::read_link(format!("/proc/{init_pid}/ns/pid"))?;
    let mut processes = BTreeMap::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        if fs::read_link(entry.path().join("ns/pid")).is_ok_and(|theirs| theirs == namespace)
            && let Ok(status) = read_text(entry.path().join("status"))
        {
            processes.insert(pid, parse_status(&status));
        }
    }
    Ok(processes)
}

/// These, and those of them that are in PID namespaces within the container's.
fn with_nested(init_pid: i32, mut processes: BTreeMap<i32, Process>) -> io::Result<BTreeMap<i32, Process>> {
    let mut others = BTreeMap::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        if let Ok(status) = read_text(entry.path().join("status")) {
            others.insert(pid, parse_status(&status));
        }
    }
    let tree = descendants(init_pid, &others);
    for (pid, process) in others {
        if tree.contains(&pid) {
            processes.entry(pid).or_insert(process);
        }
    }
    Ok(processes)
}

/// Reads a file of `/proc`. Programs and files may have names that are not UTF-8: what is not is replaced, in words for an
/// operator and in nothing else.
pub(crate) fn read_text(path: impl AsRef<Path>) -> io::Result<String> {
    let bytes = fs::read(path)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn parse_status(status: &str) -> Process {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map(str::trim).unwrap_or_default()
    };
    Process {
        parent: field("PPid:").parse().unwrap_or(0),
        tracer: field("TracerPid:").parse().unwrap_or(0),
        command: field("Name:").to_owned(),
    }
}

/// Who descends from `root`, itself included.
fn descendants(root: i32, processes: &BTreeMap<i32, Process>) -> HashSet<i32> {
    let mut tree = HashSet::from([root]);
    loop {
        let before = tree.len();
        let children = processes
            .iter()
            .filter(|(_, process)| tree.contains(&process.parent));
        let children: Vec<_> = children.map(|(pid, _)| *pid).collect();
        tree.extend(children);
        if tree.len() == before {
            return tree;
        }
    }
}

/// `mounts`: those that processes of the container see.
fn descriptor_problems(
    pid: i32,
    mounts: &HashSet<u32>,
    (rnics, carried, is_guest): (bool, Option<u64>, bool),
) -> io::Result<Vec<String>> {
    let mut problems = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let Ok(target) = fs::read_link(entry.path()) else {
            continue;
        };
        let number = entry.file_name();
        let number = number.to_string_lossy();
        let problem = descriptor_problem(pid, &number, &target, &entry.path(), mounts, (rnics, carried));
        let may_go = is_guest && OPEN_FOR_A_MOMENT.iter().any(|name| target == Path::new(name));
        if let Some(problem) = problem
            && !(may_go && is_closed_soon(&entry.path(), &target))
        {
            problems.push(format!("descriptor {number} ({}) {problem}", target.display()));
        }
    }
    Ok(problems)
}

/// Whether a descriptor of `target` is closed within a moment.
fn is_closed_soon(link: &Path, target: &Path) -> bool {
    const LIMIT: Duration = Duration::from_secs(1);
    // Nobody tells when a descriptor is closed.
    const LOOK: Duration = Duration::from_millis(2);
    let begun = Instant::now();
    while begun.elapsed() < LIMIT {
        if fs::read_link(link).map_or(true, |now| now != target) {
            return true;
        }
        std::thread::sleep(LOOK);
    }
    false
}

fn descriptor_problem(
    pid: i32,
    number: &str,
    target: &Path,
    link: &Path,
    mounts: &HashSet<u32>,
    (rnics, carried): (bool, Option<u64>),
) -> Option<String> {
    let text = target.to_string_lossy();
    if text.starts_with("anon_inode:") {
        let known = KNOWN_ANONYMOUS.contains(&text.as_ref()) || rnics && text == RNIC_EVENTS;
        return (!known).then(|| "is of a kind that CRIU cannot write down".to_owned());
    }
    if !text.starts_with('/') || text.starts_with("/memfd:") {
        return None;
    }
    let meta = fs::metadata(link).ok()?;
    let kind = meta.file_type();
    if let Some(problem) = nameless::descriptor_problem(&text, &meta, carried) {
        return Some(problem);
    }
    if rnics && kind.is_char_device() && is_rnic(meta.rdev()) {
        return None;
    }
    if kind.is_char_device() && is_own_terminal(meta.rdev()) {
        // `criu/tty.c`, `tty_verify_ctty`: it looks for the terminal in the same process alone.
        return Some(
            "is its terminal by another name, which CRIU cannot write down; end the process, or have it open the terminal by its own name (tty(1))"
                .to_owned(),
        );
    }
    if kind.is_char_device() && !is_harmless_device(meta.rdev()) || kind.is_block_device() {
        return Some("is a device that CRIU cannot write down".to_owned());
    }
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok()?;
    let mount = info
        .lines()
        .find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    if mount.is_some_and(|mount| !mounts.contains(&mount)) {
        return Some("lies outside the container's own mounts".to_owned());
    }
    None
}

/// The mounts of all mount namespaces that these processes are in: who unshares its own has files open on those of the one before,
/// and CRIU takes both.
fn mounts_of(processes: impl Iterator<Item = i32>) -> HashSet<u32> {
    let mut seen = HashSet::new();
    let mut mounts = HashSet::new();
    for pid in processes {
        // One that ends while we look has nothing to say.
        let Ok(namespace) = fs::read_link(format!("/proc/{pid}/ns/mnt")) else {
            continue;
        };
        if seen.insert(namespace)
            && let Ok(mountinfo) = read_text(Path::new(&format!("/proc/{pid}/mountinfo")))
        {
            mounts.extend(mount_ids(&mountinfo));
        }
    }
    mounts
}

/// The ids in a `mountinfo`.
fn mount_ids(mountinfo: &str) -> HashSet<u32> {
    mountinfo
        .lines()
        .filter_map(|line| line.split(' ').next()?.parse().ok())
        .collect()
}

fn mapping_problems(pid: i32, rnics: bool) -> io::Result<Vec<String>> {
    let maps = read_text(Path::new(&format!("/proc/{pid}/maps")))?;
    let mut seen = HashSet::new();
    let mapped = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .map(PathBuf::from);
    Ok(mapped
        .filter(|path| {
            let text = path.to_string_lossy();
            let device = text.starts_with("/dev/") && !text.starts_with("/dev/shm/") && text != "/dev/zero";
            (device || text.starts_with("anon_inode:")) && !(rnics && text.starts_with(RNIC_NODES))
        })
        .filter(|path| seen.insert(path.clone()))
        .map(|path| format!("a mapping of {} cannot be written down by CRIU", path.display()))
        .collect())
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    use super::*;

    /// The guest library's userfaultfd comes and goes; a program's own stays.
    #[test]
    fn a_descriptor_that_goes_is_told_from_one_that_stays() {
        // SAFETY: makes a descriptor, which is ours.
        let raw = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1) };
        if raw < 0 {
            eprintln!("skipped: no userfaultfd");
            return;
        }
        // SAFETY: just made.
        let userfaultfd = unsafe { OwnedFd::from_raw_fd(i32::try_from(raw).unwrap()) };
        let link = PathBuf::from(format!("/proc/self/fd/{}", userfaultfd.as_raw_fd()));
        assert!(!is_closed_soon(&link, Path::new(OPEN_FOR_A_MOMENT[0])));
        let closes = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(userfaultfd);
        });
        assert!(is_closed_soon(&link, Path::new(OPEN_FOR_A_MOMENT[0])));
        closes.join().unwrap();
    }

    #[test]
    fn what_a_process_holds_open_is_judged() {
        let own = std::process::id() as i32;
        let mounts = mount_ids(&fs::read_to_string("/proc/self/mountinfo").unwrap());
        let judge = |file: &fs::File, mounts: &HashSet<u32>| {
            let number = file.as_raw_fd().to_string();
            let link = PathBuf::from(format!("/proc/self/fd/{number}"));
            descriptor_problem(
                own,
                &number,
                &fs::read_link(&link).unwrap(),
                &link,
                mounts,
                (false, None),
            )
        };
        let null = fs::File::open("/dev/null").unwrap();
        assert_eq!(judge(&null, &mounts), None);
        let outside = judge(&null, &HashSet::new()).unwrap();
        assert!(outside.contains("outside"), "{outside}");
        let deleted = tempfile::tempfile().unwrap();
        assert_eq!(judge(&deleted, &mounts), None);
    }

    #[test]
    fn names_that_are_not_text_hide_nothing() {
        use std::os::unix::ffi::OsStrExt;

        let own = std::process::id() as i32;
        let dir = tempfile::tempdir().unwrap();
        let odd = dir.path().join(std::ffi::OsStr::from_bytes(b"sl\xffep"));
        fs::copy("/bin/sleep", &odd).unwrap();
        let mut child = std::process::Command::new(&odd).arg("1000").spawn().unwrap();
        let pid = child.id() as i32;
        let found = processes_of(own).map(|processes| processes.get(&pid).map(|child| child.parent));
        let (mapped, opened) = (
            mapping_problems(pid, false),
            descriptor_problems(pid, &mounts_of([pid].into_iter()), (false, None, false)),
        );
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found.unwrap(), Some(own), "it is one of the processes here");
        assert_eq!(mapped.unwrap(), Vec::<String>::new());
        opened.unwrap();
    }

    #[test]
    fn a_process_that_does_not_descend_from_the_first_one_is_found() {
        let process = |parent| Process {
            parent,
            tracer: 0,
            command: String::new(),
        };
        let processes = BTreeMap::from([(5, process(1)), (6, process(5)), (9, process(6)), (7, process(2))]);
        assert_eq!(descendants(5, &processes), HashSet::from([5, 6, 9]));
    }
}
