//! What CRIU says when it cannot write a container down, in words for an operator.
//!
//! CRIU's log names its own sources and the kernel's numbers. [`KNOWN`] maps the lines by which a dump fails to one sentence each: the process,
//! the object, what to do. The first line of a log that is known counts: CRIU goes on complaining on its way back. Lines are those of CRIU 4.2
//! (`criu/`, `compel/`); one that changes is not known any more, and is then cited as it is.

/// A line of CRIU's, and what it means.
struct Known {
    /// The line, or a part of it. `{x}` stands for whatever is there; `{pid}` is a number that this host knows.
    says: &'static str,
    /// `{process}` is the process with that number, by its name.
    means: &'static str,
}

const fn known(says: &'static str, means: &'static str) -> Known {
    Known { says, means }
}

/// The table.
const KNOWN: &[Known] = &[
    // compel/src/lib/infect.c
    known(
        "Can't dump the {pid} thread with a pending SIGTRAP",
        "{process}: a signal SIGTRAP is pending, and blocked, which CRIU cannot write down; have the program take it (sigwait, signalfd) or unblock it",
    ),
    known(
        "SEIZE {pid}: can't seize task",
        "{process}: it is traced already; detach the debugger first",
    ),
    // criu/seize.c
    known(
        "Zombies with threads are not supported",
        "a process has threads, but its first one has ended (pthread_exit in main); have the program wait in its first thread (pthread_join)",
    ),
    known(
        "Individually stopped threads not supported",
        "a process has a thread that is stopped alone, by a debugger or a sandbox; let it go on first",
    ),
    known(
        "Unseizable non-zombie {pid} (comm {x}) found, state {state}",
        "{process}: it does not stop when it is asked to (state {state}): it waits within the kernel, for a disk, for NFS, or for a child by vfork; try again when it runs",
    ),
    known(
        "Unseizable non-zombie {pid} found, state {state}",
        "{process}: it does not stop when it is asked to (state {state}): it waits within the kernel, for a disk, for NFS, or for a child by vfork; try again when it runs",
    ),
    known(
        "Timeout reached. Try to interrupt",
        "a process does not stop when it is asked to: it waits within the kernel, for a disk, for NFS, or for a child by vfork; try again when it runs",
    ),
    // criu/pstree.c
    known(
        "Can't find a session leader for {number}",
        "a process is in session {number} (by the container's numbers), whose leader has ended; end it before the move, or start it by `setsid`",
    ),
    known(
        "Can't find a parent for {number}",
        "process {number} (by the container's numbers) has a parent outside of the container; end it before the move",
    ),
    // criu/namespaces.c, criu/net.c
    known(
        "Can't dump nested {kind} namespace for {pid}",
        "{process}: it is in a namespace of its own ({kind}); end it before the move, or start it without (`unshare`)",
    ),
    known(
        "Unable to dump more than one netns",
        "a process is in a network namespace of its own; end it before the move, or start it without (`unshare -n`)",
    ),
    known(
        "Unable to dump a socket from an external network namespace",
        "a process has a socket of another network namespace open; have the program close it before the move",
    ),
    // criu/sk-unix.c
    known(
        "unix: Non-empty write queue on an in-flight socket",
        "a connection by AF_UNIX is not accepted yet and has data; have the program accept it before the move",
    ),
    known(
        "unix: Found a closed in-flight socket",
        "a connection by AF_UNIX is closed by its client and not accepted yet; have the program accept it before the move",
    ),
    known(
        "unix: External socket is used",
        "a process is connected by AF_UNIX with one outside of the container; have the program close that connection before the move",
    ),
    known(
        "unix: Unix socket {inode} without peer",
        "socket:[{inode}] is an AF_UNIX socket whose other end is outside of the container; have the program close it before the move",
    ),
    known(
        "unix: Can't dump half of stream unix connection",
        "a process is connected by AF_UNIX with one outside of the container; have the program close that connection before the move",
    ),
    known(
        "unix: Can't dump name-less external socket",
        "a process is connected by AF_UNIX with one outside of the container; have the program close that connection before the move",
    ),
    // criu/sk-inet.c, criu/sk-netlink.c, criu/sk-packet.c, criu/sk-queue.c
    known(
        "inet: Can't dump corked dgram socket",
        "a UDP socket holds back a datagram (UDP_CORK, MSG_MORE); have the program send it before the move",
    ),
    known(
        "inet: Unsupported proto {protocol} for socket",
        "a socket is of protocol {protocol}, which CRIU cannot write down (262 is MPTCP: GODEBUG=multipathtcp=0 for Go); have the program use another one",
    ),
    known(
        "netlink: Groups above 32 are not supported",
        "a netlink socket listens to a group above 32; have the program close it before the move",
    ),
    known(
        "packet: Multiple MC membership not supported",
        "a packet socket is a member of several multicast groups; have the program close it before the move",
    ),
    known(
        "skqueue: Control messages in queue, not supported",
        "a datagram with control data (credentials, descriptors) waits in a socket; have the program read it before the move",
    ),
    // criu/files-reg.c, criu/files-ext.c, criu/pipes.c
    known(
        "Can't dump ghost file {path} of {size} size, increase limit",
        "the file {path} is deleted, still used and {size} bytes long; have the program close it, or keep its name, before the move",
    ),
    known(
        "Can't create link remap for {path}. Use link-remap",
        "the file {path} is open by a name that is gone while it has others; have the program open it by one of those before the move",
    ),
    known(
        "Can't link remap to {path}:",
        "the file {path} is open by a name that is gone while it has others, and cannot get one for the move; have the program open it by one of those",
    ),
    known(
        "Can't lookup mount={mount} for fd={descriptor} path={path}",
        "{path} is open as descriptor {descriptor} and lies outside of the container's mounts; have the program close it before the move",
    ),
    known(
        "Open files on overmounted mounts are not supported yet; mount={mount} fd={descriptor} path={path}",
        "{path} is open as descriptor {descriptor}, and another mount hides it; unmount that, or have the program close the file, before the move",
    ),
    known(
        "Can't dump file {descriptor} of that type [{mode}] ({kind} {x})",
        "descriptor {descriptor} is of a kind that CRIU cannot write down ({kind}); have the program close it before the move",
    ),
    known(
        "The packetized mode for pipes is not supported",
        "a pipe is in packet mode (O_DIRECT); have the program use another one",
    ),
    // criu/fsnotify.c, criu/pidfd.c, criu/bpfmap.c, criu/tty.c
    known(
        "fsnotify: Can't find suitable path for handle (dev {device} ino {inode})",
        "a watch (inotify) is on inode {inode} of device {device}, which has no name any more; have the program end that watch before the move",
    ),
    known(
        "fsnotify: Can't dump that handle",
        "a watch (inotify) is on a file that the kernel gives no handle for, as of a lower layer of an overlay; have the program end that watch before the move",
    ),
    known(
        "PIDFD_THREAD flag is currently not supported",
        "a descriptor is a pidfd of a thread (PIDFD_THREAD); have the program close it before the move",
    ),
    known(
        "CRIU does not currently support dumping BPF map type {kind}!",
        "a descriptor is a map of BPF of kind {kind}; have the program close it before the move",
    ),
    known(
        "tty: Found dangling tty with sid {session} pgid {group} ({name}) on peer fd {descriptor}",
        "descriptor {descriptor} is a terminal ({name}) of session {session}, whose leader is gone or outside of the container; have the program close it",
    ),
    known(
        "The tty ({name} {x}) queued data overflow",
        "a terminal ({name}) has more unread data than CRIU takes; have the program read it before the move",
    ),
    // criu/proc_parse.c, criu/mem.c
    known(
        "Unknown shit {mode} ({path}",
        "a mapping of {path} is of a kind that CRIU cannot write down; have the program unmap it before the move",
    ),
    known(
        "Unsupported mapping found {from}-{to}",
        "the mapping at {from} is of a kind that CRIU cannot write down; have the program unmap it before the move",
    ),
    // criu/mount.c
    known(
        "mnt: FS mnt {path} dev {device} root {root} unsupported id",
        "the mount at {path} is of a file system that CRIU cannot write down; unmount it before the move",
    ),
    known(
        "mnt: Mount {number}:{path} is autodetected external mount",
        "the mount at {path} was made from outside of the container; unmount it, or add it to the bundle",
    ),
    // criu/cr-dump.c
    known(
        "Can't get rlimit {number}: Operation not permitted",
        "a process is another user's than root's, and this host's agent may not read its limits; give the agent CAP_SYS_RESOURCE, or CRIU's plugin (--criu-plugin)",
    ),
];

/// Lines that CRIU prints where nothing is wrong, or that only say that something before them was.
const HARMLESS: [&str; 5] = [
    "RLIMIT_NOFILE",
    "Dumping FAILED",
    "Dump files (pid:",
    "Unlock network failed",
    "timens",
];

/// The one line of a log of CRIU that says why a dump failed, in words; its cause as CRIU says it, if it is not known. `name_of` says the name
/// of a process that runs. `None` of an empty log.
pub(crate) fn explain(log: &[String], name_of: impl Fn(i32) -> Option<String>) -> Option<String> {
    log.iter()
        .find_map(|line| KNOWN.iter().find_map(|known| known.explain(line, &name_of)))
        .or_else(|| {
            let says = log
                .iter()
                .find(|line| !HARMLESS.iter().any(|part| line.contains(part)))
                .or(log.first())?;
            Some(format!(
                "CRIU cannot write it down, for a reason that is not known here: {}",
                bare(says)
            ))
        })
}

/// Whether such a text is about something that is over by itself.
pub(crate) fn passes(text: &str) -> bool {
    text.ends_with("try again when it runs")
}

impl Known {
    fn explain(&self, line: &str, name_of: &impl Fn(i32) -> Option<String>) -> Option<String> {
        let found = captures(self.says, line)?;
        let mut text = self.means.to_owned();
        if let Some((_, pid)) = found.iter().find(|(name, _)| *name == "pid") {
            let name = pid.parse().ok().and_then(name_of);
            let process = match name {
                Some(name) => format!("process {pid} ({name})"),
                None => format!("process {pid}"),
            };
            text = text.replace("{process}", &process);
        }
        for (name, value) in found {
            text = text.replace(&format!("{{{name}}}"), value);
        }
        Some(text)
    }
}

/// What stands in `line` for each `{name}` of `pattern`; `None` if the line is another one. A value ends where what follows it begins, or at
/// the next space if nothing does.
fn captures<'l>(pattern: &'static str, line: &'l str) -> Option<Vec<(&'static str, &'l str)>> {
    let mut parts = pattern.split('{');
    let first = parts.next()?;
    let mut rest = &line[line.find(first)? + first.len()..];
    let mut found = Vec::new();
    for part in parts {
        let (name, literal) = part.split_once('}')?;
        let end = match literal {
            "" => rest.find(char::is_whitespace).unwrap_or(rest.len()),
            literal => rest.find(literal)?,
        };
        let value = rest[..end].trim_end_matches([',', '.', ')']);
        if value.is_empty() || name == "pid" && value.parse::<i32>().is_err() {
            return None;
        }
        found.push((name, value));
        rest = &rest[end + literal.len()..];
    }
    Some(found)
}

/// A line without its time and the place in CRIU's sources.
fn bare(line: &str) -> &str {
    match line.split_once("): ") {
        Some((place, text)) if place.contains("Error (") || place.contains("Warn") => text.trim(),
        _ => line.trim(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> String {
        let named = |pid| (pid == 28941).then(|| "web".to_owned());
        explain(&[line.to_owned()], named).unwrap()
    }

    /// Lines that CRIU 4.2.1 has written, as its log has them.
    #[test]
    fn recorded_lines_become_sentences() {
        for (line, expected) in [
            (
                "(00.004412) Error (compel/src/lib/infect.c:323): Can't dump the 28941 thread with a pending SIGTRAP.",
                "process 28941 (web): a signal SIGTRAP is pending",
            ),
            (
                "(00.003117) Error (criu/seize.c:882): Zombies with threads are not supported",
                "its first one has ended (pthread_exit in main)",
            ),
            (
                "(10.003504) Error (criu/cr-dump.c:1655): Timeout reached. Try to interrupt: 0",
                "a process does not stop when it is asked to",
            ),
            (
                "(00.005510) Error (criu/pstree.c:801): Can't find a session leader for 15",
                "is in session 15 (by the container's numbers)",
            ),
            (
                "(00.005022) Error (criu/namespaces.c:460): Can't dump nested uts namespace for 28941",
                "process 28941 (web): it is in a namespace of its own (uts)",
            ),
            (
                "(00.009213) Error (criu/net.c:3009): Unable to dump more than one netns if the --emptyns is set",
                "in a network namespace of its own",
            ),
            (
                "(00.006012) Error (criu/sk-unix.c:506): unix: Non-empty write queue on an in-flight socket 0x101da",
                "not accepted yet and has data",
            ),
            (
                "(00.006012) Error (criu/sk-unix.c:525): unix: Found a closed in-flight socket to 0x101da",
                "closed by its client and not accepted yet",
            ),
            (
                "(00.006012) Error (criu/sk-unix.c:874): unix: External socket is used. Consider using --ext-unix-sk option.",
                "outside of the container",
            ),
            (
                "(00.006012) Error (criu/sk-unix.c:418): unix: Unix socket 1021388 without peer 1018122",
                "socket:[1021388] is an AF_UNIX socket",
            ),
            (
                "(00.006650) Error (criu/sk-inet.c:137): inet: Unsupported proto 262 for socket dd540",
                "a socket is of protocol 262",
            ),
            (
                "(00.006650) Error (criu/sk-inet.c:504): inet: Can't dump corked dgram socket dde9e5",
                "holds back a datagram (UDP_CORK, MSG_MORE)",
            ),
            (
                "(00.006777) Error (criu/files-reg.c:1031): Can't dump ghost file /dev/shm/x of 67108864 size, increase limit",
                "the file /dev/shm/x is deleted, still used and 67108864 bytes long",
            ),
            (
                "(00.006777) Error (criu/files-reg.c:1122): Can't create link remap for /tmp/hl. Use link-remap option.",
                "the file /tmp/hl is open by a name that is gone",
            ),
            (
                "(00.006777) Error (criu/fsnotify.c:263): fsnotify: Can't find suitable path for handle (dev 0x2d ino 0x15e): -2",
                "on inode 0x15e of device 0x2d",
            ),
            (
                "(00.006777) Error (criu/fsnotify.c:304): fsnotify: Can't dump that handle",
                "of a lower layer of an overlay",
            ),
            (
                "(00.005555) Error (criu/proc_parse.c:502): Unknown shit 100600 (/secretmem (deleted))",
                "a mapping of /secretmem is",
            ),
            (
                "(00.003101) Error (criu/cr-dump.c:389): Can't get rlimit 0: Operation not permitted",
                "give the agent CAP_SYS_RESOURCE",
            ),
            (
                "(00.006777) Error (criu/files-reg.c:1790): Can't lookup mount=18 for fd=-3 path=/anon_hugepage (deleted)",
                "/anon_hugepage is open as descriptor -3",
            ),
        ] {
            let said = words(line);
            assert!(said.contains(expected), "{line}: {said}");
            assert!(!said.contains('{') && !said.contains("criu/"), "{said}");
        }
    }

    #[test]
    fn a_process_that_is_gone_is_told_by_its_number() {
        let said =
            words("Error (compel/src/lib/infect.c:323): Can't dump the 7 thread with a pending SIGTRAP.");
        assert!(said.starts_with("process 7: "), "{said}");
    }

    #[test]
    fn the_first_known_line_counts_and_an_unknown_one_is_cited() {
        let log = [
            "(00.000001) Error (criu/util.c:1200): Can't raise RLIMIT_NOFILE: Operation not permitted",
            "(00.000020) Error (criu/odd.c:1): Something else is odd (really): 5",
            "(00.000022) Error (criu/cr-dump.c:2000): Dumping FAILED.",
        ];
        let log: Vec<String> = log.iter().map(|line| (*line).to_owned()).collect();
        let said = explain(&log, |_| None).unwrap();
        assert!(said.ends_with(": Something else is odd (really): 5"), "{said}");
        let more = [
            log,
            vec!["Error (criu/seize.c:882): Zombies with threads are not supported".to_owned()],
        ]
        .concat();
        let said = explain(&more, |_| None).unwrap();
        assert!(said.contains("pthread_exit"), "{said}");
        assert_eq!(explain(&[], |_| None), None);
    }

    /// A sentence names what it has captured and nothing else, so that no brace is left.
    #[test]
    fn the_table_is_well_formed() {
        for Known { says, means } in KNOWN {
            let names =
                |text: &'static str| text.split('{').skip(1).filter_map(|part| part.split('}').next());
            let captured: Vec<_> = names(says).collect();
            for name in names(means) {
                let name = if name == "process" { "pid" } else { name };
                assert!(captured.contains(&name), "{says}: {name}");
            }
            assert!(means.contains("; "), "{says} has no way out");
        }
    }
}
