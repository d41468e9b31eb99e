//! What mappings have that CRIU does not put back, and pages of which a host has few.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::path::Path;

use super::{processes_of, read_text};

/// Pages by their size in KiB.
pub type Pages = BTreeMap<u64, u64>;

/// Protection keys of a process's memory, in words for an operator.
pub(super) fn problems(pid: i32) -> io::Result<Vec<String>> {
    // Reading it takes the kernel a while.
    if !has_protection_keys() {
        return Ok(Vec::new());
    }
    let smaps = read_text(Path::new(&format!("/proc/{pid}/smaps")))?;
    Ok(keys(&smaps))
}

fn has_protection_keys() -> bool {
    read_text(Path::new("/proc/cpuinfo")).is_ok_and(|text| {
        let flags = text.lines().find(|line| line.starts_with("flags"));
        flags.is_some_and(|flags| flags.split(' ').any(|flag| flag == "ospke"))
    })
}

/// The first mapping of each key in a proc_pid_smaps(5).
fn keys(smaps: &str) -> Vec<String> {
    let (mut seen, mut found) = (HashSet::new(), Vec::new());
    let mut at = "";
    for line in smaps.lines() {
        if let Some(key) = line.strip_prefix("ProtectionKey:") {
            let key = key.trim();
            // What can only be executed has a key of the kernel's.
            let is_own = at.split(' ').nth(1).is_some_and(|bits| !bits.starts_with("--x"));
            if key != "0" && is_own && seen.insert(key) {
                let start = at.split('-').next().unwrap_or_default();
                found.push(format!(
                    "memory at 0x{start} has the protection key {key} (pkey_mprotect), which CRIU does not put back; free the key \
                     first"
                ));
            }
        } else if is_head(line) {
            at = line;
        }
    }
    found
}

/// Whether a line begins a mapping.
fn is_head(line: &str) -> bool {
    let address = line.split(['-', ' ']).next().unwrap_or_default();
    !address.is_empty() && address.bytes().all(|byte| byte.is_ascii_hexdigit()) && line.contains('-')
}

/// Huge pages that the container's processes have, or have reserved.
pub fn huge_pages(init_pid: i32) -> io::Result<Pages> {
    let mut pages = Pages::new();
    let mut seen = HashSet::new();
    for pid in processes_of(init_pid)?.keys() {
        let read = |name: &str| read_text(Path::new(&format!("/proc/{pid}/{name}"))).unwrap_or_default();
        // Each is of a file without a name. Reading the other one takes the kernel a while.
        if read("maps").lines().any(|line| line.ends_with(" (deleted)")) {
            count_huge(&read("smaps"), &mut pages, &mut seen);
        }
    }
    Ok(pages)
}

fn count_huge(smaps: &str, pages: &mut Pages, seen: &mut HashSet<(String, u64)>) {
    let own = rustix::param::page_size() as u64 / 1024;
    let (mut at, mut size) = ("", 0);
    for line in smaps.lines() {
        let kib = |name: &str| -> Option<u64> {
            let value = line.strip_prefix(name)?.trim().strip_suffix("kB")?;
            value.trim().parse().ok()
        };
        if let Some(kib) = kib("Size:") {
            size = kib;
        } else if let Some(kib) = kib("KernelPageSize:") {
            let mut words = at.split_ascii_whitespace().skip(1);
            let is_shared = words.next().is_some_and(|bits| bits.ends_with('s'));
            let offset = words.next().and_then(|text| u64::from_str_radix(text, 16).ok());
            let inode = words.nth(1).unwrap_or_default().to_owned();
            let is_new = !is_shared || seen.insert((inode, offset.unwrap_or(0)));
            if kib > own && is_new {
                *pages.entry(kib).or_default() += size.div_ceil(kib);
            }
        } else if is_head(line) {
            at = line;
        }
    }
}

/// Why this host has not so many huge pages, if it has not.
pub fn lack_of_huge_pages(wanted: &Pages) -> Option<String> {
    lack_in(Path::new("/sys/kernel/mm/hugepages"), wanted)
}

fn lack_in(folder: &Path, wanted: &Pages) -> Option<String> {
    wanted.iter().find_map(|(kib, pages)| {
        let folder = folder.join(format!("hugepages-{kib}kB"));
        let number = |name: &str| -> u64 {
            let text = read_text(folder.join(name)).unwrap_or_default();
            text.trim().parse().unwrap_or(0)
        };
        let reserved = number("resv_hugepages");
        let more = number("nr_overcommit_hugepages").saturating_sub(number("surplus_hugepages"));
        let free = number("free_hugepages").saturating_sub(reserved) + more;
        (free < *pages).then(|| {
            format!(
                "there are {free} huge pages of {kib} KiB free, and the instance takes {pages}: raise {} there",
                folder.join("nr_hugepages").display()
            )
        })
    })
}

/// Memory policies of the container's processes (`set_mempolicy`, `mbind`), which are those of the destination afterwards.
pub fn memory_policies(init_pid: i32) -> io::Result<Vec<String>> {
    let mut notes = Vec::new();
    for (pid, process) in processes_of(init_pid)? {
        // A kernel without NUMA has no such file.
        let Ok(maps) = read_text(Path::new(&format!("/proc/{pid}/numa_maps"))) else {
            continue;
        };
        if let Some(policy) = policy(&maps) {
            notes.push(format!(
                "process {pid} ({}) has memory with the policy {policy} (mbind, set_mempolicy), which CRIU does not put back: after the \
                 move it is the default",
                process.command
            ));
        }
    }
    Ok(notes)
}

/// The first policy in a numa_maps(5) that is not the default.
fn policy(numa_maps: &str) -> Option<&str> {
    let policies = numa_maps.lines().filter_map(|line| line.split(' ').nth(1));
    policies.into_iter().find(|policy| *policy != "default")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0000400000 rw-p 00000000 00:0f 77                         /anon_hugepage (deleted)
Size:               4096 kB
KernelPageSize:     2048 kB
ProtectionKey:         0
7f0000400000-7f0000800000 rw-s 00000000 00:0f 78                         /memfd:huge (deleted)
Size:               4096 kB
KernelPageSize:     2048 kB
ProtectionKey:         3
VmFlags: rd wr sh ht
7f0000800000-7f0000801000 --xp 00000000 00:00 0
Size:                  4 kB
KernelPageSize:        4 kB
ProtectionKey:         1
7f0000801000-7f0000802000 rw-p 00000000 00:00 0
Size:                  4 kB
KernelPageSize:        4 kB
ProtectionKey:         3
";

    #[test]
    fn keys_of_a_program_s_own_are_named_once() {
        let found = keys(SMAPS);
        assert!(
            found.len() == 1 && found[0].starts_with("memory at 0x7f0000400000 has the protection key 3"),
            "{found:?}"
        );
    }

    #[test]
    fn huge_pages_that_are_shared_count_once() {
        let (mut pages, mut seen) = (Pages::new(), HashSet::new());
        for _ in 0..2 {
            count_huge(SMAPS, &mut pages, &mut seen);
        }
        assert_eq!(pages, Pages::from([(2048, 2 + 2 + 2)]));
    }

    #[test]
    fn free_huge_pages_are_those_that_nobody_has_reserved() {
        let folder = tempfile::tempdir().unwrap();
        let of_size = folder.path().join("hugepages-2048kB");
        std::fs::create_dir(&of_size).unwrap();
        for (name, value) in [
            ("free_hugepages", "6\n"),
            ("resv_hugepages", "2\n"),
            ("nr_overcommit_hugepages", "3\n"),
            ("surplus_hugepages", "1\n"),
        ] {
            std::fs::write(of_size.join(name), value).unwrap();
        }
        let lack = |kib, pages| lack_in(folder.path(), &Pages::from([(kib, pages)]));
        assert_eq!(lack(2048, 6), None);
        assert!(lack(2048, 7).unwrap().contains("6 huge pages of 2048 KiB free"));
        assert!(lack(1 << 20, 1).is_some());
        assert_eq!(lack_in(folder.path(), &Pages::new()), None);
    }

    #[test]
    fn policies_are_those_that_are_not_the_default() {
        assert_eq!(
            policy("7f00 default anon=1\n7f01 interleave:0-1 anon=1\n"),
            Some("interleave:0-1")
        );
        assert_eq!(policy("7f00 default file=/x\n"), None);
    }
}
