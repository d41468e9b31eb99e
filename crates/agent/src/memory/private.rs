//! How much memory of an instance is its processes' own: no round sends it, CRIU takes it.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

/// Anonymous memory, resident or swapped out, of a process and all that descend from it, in bytes. What ends meanwhile counts 0.
/// Registered memory is not part of it: it lies in files.
pub fn bytes_of_tree(root: i32) -> u64 {
    let statuses = tree(root).into_iter().map(|process| {
        let status = std::fs::read_to_string(process.join("status"));
        anonymous_bytes(&status.unwrap_or_default())
    });
    statuses.sum()
}

/// Why the kernel does not see everything that is written to the private memory of a process and all that descend from it, in
/// words for an operator; `None` if it does. What asynchronous reads bring goes to pages that are pinned, and so does what an RNIC of the
/// kernel's writes: to registered memory that is private, and to queues that its provider has allocated.
pub fn untracked(root: i32) -> Option<&'static str> {
    let maps = tree(root)
        .into_iter()
        .map(|process| std::fs::read_to_string(process.join("maps")).unwrap_or_default());
    let words = |maps: String| {
        if has_rings(&maps) {
            Some("a process has asynchronous reads and writes (io_setup), which the kernel does not track")
        } else if has_rnics(&maps) {
            Some("a process has an RNIC of this host's open, whose writes the kernel does not track")
        } else {
            None
        }
    };
    maps.into_iter().find_map(words)
}

/// Whether a process has a mapping of an RNIC of the kernel's.
pub fn has_rnic(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| has_rnics(&maps))
}

/// Whether a proc_pid_maps(5) has a mapping of an RNIC. Who has queues on one has a mapping, of a queue or of a doorbell.
fn has_rnics(maps: &str) -> bool {
    maps.lines().any(|line| line.contains("/infiniband/uverbs"))
}

/// Whether a proc_pid_maps(5) has the rings of io_setup(2).
fn has_rings(maps: &str) -> bool {
    maps.lines()
        .any(|line| line.ends_with(" /[aio]") || line.ends_with(" /[aio] (deleted)"))
}

/// The numbers of a process and all that descend from it, parents first. Those that have ended and wait for their parent have no
/// memory, and are not among them.
pub fn processes(root: i32) -> Vec<u32> {
    let with_memory = tree(root).into_iter().filter(|process| {
        let maps = std::fs::read(process.join("maps"));
        maps.is_ok_and(|maps| !maps.is_empty())
    });
    let numbers = with_memory.filter_map(|process| process.file_name()?.to_str()?.parse().ok());
    numbers.collect()
}

/// The folders in `/proc` of a process and all that descend from it, parents first.
pub(super) fn tree(root: i32) -> Vec<PathBuf> {
    let mut waiting = VecDeque::from([root]);
    let mut found = Vec::new();
    while let Some(pid) = waiting.pop_front() {
        let process = Path::new("/proc").join(pid.to_string());
        let tasks = std::fs::read_dir(process.join("task"))
            .into_iter()
            .flatten()
            .flatten();
        for task in tasks {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            waiting.extend(
                children
                    .split_ascii_whitespace()
                    .filter_map(|pid| pid.parse::<i32>().ok()),
            );
        }
        found.push(process);
    }
    found
}

/// Why the images of that much memory do not fit into the folder's file system, if they do not: better known before the
/// instance is frozen than from CRIU's log.
pub fn lack_of_room(folder: &Path, bytes: u64) -> Option<String> {
    let folder_name = folder.display();
    match rustix::fs::statvfs(folder) {
        Ok(space) => {
            let free = space.f_bavail * space.f_frsize;
            (free < bytes).then(|| {
                format!(
                    "{folder_name} here has {} MiB free, and the images of the program's own memory take {} MiB; enlarge \
                     that tmpfs",
                    free >> 20,
                    bytes >> 20
                )
            })
        }
        Err(errno) => Some(format!("the free memory of {folder_name} is unknown: {errno}")),
    }
}

/// Why that much memory is more than this machine can give, if it is: the kernel would end programs instead.
pub fn lack_of_memory(bytes: u64) -> Option<String> {
    let available = std::fs::read_to_string("/proc/meminfo");
    let available = available.ok().and_then(|text| available_bytes(&text))?;
    (available < bytes).then(|| {
        format!(
            "the machine there has {} MiB of memory available, and the instance takes {} MiB; end something there, or add \
             memory or swap",
            available >> 20,
            bytes >> 20
        )
    })
}

/// `MemAvailable` and `SwapFree` of proc_meminfo(5).
fn available_bytes(meminfo: &str) -> Option<u64> {
    let kib = |name: &str| {
        let value = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    Some((kib("MemAvailable:")? + kib("SwapFree:").unwrap_or(0)) * 1024)
}

/// `RssAnon` and `VmSwap` of proc_pid_status(5).
fn anonymous_bytes(status: &str) -> u64 {
    let kib = status.lines().filter_map(|line| {
        let value = line
            .strip_prefix("RssAnon:")
            .or_else(|| line.strip_prefix("VmSwap:"))?;
        value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    kib.sum::<u64>() * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anonymous_memory_of_a_process_and_its_children_counts() {
        let text =
            "Name:\tx\nVmRSS:\t  900 kB\nRssAnon:\t     100 kB\nRssFile:\t 800 kB\nVmSwap:\t      5 kB\n";
        assert_eq!(anonymous_bytes(text), 105 * 1024);
        let own = std::process::id().cast_signed();
        let before = bytes_of_tree(own);
        assert!(before > 0);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let alone = anonymous_bytes(&std::fs::read_to_string("/proc/self/status").unwrap());
        let all = bytes_of_tree(own);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(all > alone, "{all} {alone}");
        assert_eq!(bytes_of_tree(i32::MAX), 0);
    }

    #[test]
    fn a_machine_says_what_it_can_give() {
        let text = "MemTotal: 100 kB\nMemAvailable:   60 kB\nSwapFree:  4 kB\n";
        assert_eq!(available_bytes(text), Some(64 * 1024));
        assert_eq!(available_bytes("MemTotal: 1 kB\n"), None);
        assert_eq!(lack_of_memory(1), None);
        assert!(
            lack_of_memory(u64::MAX)
                .unwrap()
                .contains("MiB of memory available")
        );
    }

    #[test]
    fn the_rings_of_asynchronous_input_are_seen() {
        let ordinary =
            "7f00-7f01 rw-p 0 00:00 0 \n7f01-7f02 rw-s 0 00:01 99 /memfd:verbatim-arena (deleted)\n";
        assert!(!has_rings(ordinary));
        assert!(!has_rnics(ordinary));
        assert!(has_rnics(&format!(
            "{ordinary}7f0000200000-7f0000201000 rw-s 00000000 00:2f 9  /dev/infiniband/uverbs3\n"
        )));
        assert!(has_rings(&format!(
            "{ordinary}7f02-7f03 rw-s 0 00:0f 17 /[aio] (deleted)\n"
        )));
        assert_eq!(untracked(std::process::id().cast_signed()), None);
    }

    #[test]
    fn images_that_do_not_fit_are_told_of_in_advance() {
        let folder = Path::new("/dev/shm");
        assert_eq!(lack_of_room(folder, 4096), None);
        let lack = lack_of_room(folder, u64::MAX).unwrap();
        assert!(
            lack.starts_with("/dev/shm here has ") && lack.ends_with("enlarge that tmpfs"),
            "{lack}"
        );
    }
}
