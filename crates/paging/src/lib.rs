//! What a process needs that pages go through: it must never wait for what it carries itself.
//!
//! A process that is on the way of swap pages and touches a page of its own that was swapped out waits for itself; one that allocates
//! memory under pressure may have the kernel write pages out through itself. So it is locked into memory, tells the kernel that it is on the
//! way of I/O, is the last that is killed for memory, and has real-time priority: what little the kernel still allocates for it, for packets and
//! for answers, may then come from the reserve (`vm.min_free_kbytes`) that nobody else may touch.

use std::ffi::c_void;
use std::io;
use std::path::{Path, PathBuf};

use rustix::mm::{Advice, MlockAllFlags, madvise};

/// `PR_SET_IO_FLUSHER` of prctl(2), Linux 5.6: allocations do not wait for I/O, and throttling does not hold it up.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// The lowest real-time priority: above every ordinary process, below the kernel's own threads.
const PRIORITY: libc::c_int = 1;

/// More of the stack than is used.
const STACK_BYTES: usize = 128 << 10;

/// A mapping that is larger is address space, not memory.
const MAPPING_BYTES: usize = 256 << 20;

/// Whom the scheduler serves first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Urgency {
    /// The lowest real-time priority, by which the kernel's reserve of memory may be used.
    RealTime,
    /// As everybody. For who looks for work without a pause: by real-time priority nobody else would get that core.
    Ordinary,
}

/// Takes what this thread, and so those that it starts, may; for each that it may not, a line that says what follows from it.
pub fn enter(urgency: Urgency) -> Vec<String> {
    let mut lacking = Vec::new();
    // SAFETY: four plain numbers, which the call reads as such.
    if unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) } != 0 {
        let error = io::Error::last_os_error();
        lacking.push(format!(
            "the kernel is not told that it is on the way of I/O ({error}): its own allocations may wait for pages that it carries; it \
             needs CAP_SYS_RESOURCE"
        ));
    }
    if urgency == Urgency::RealTime
        && let Err(error) = be_real_time()
    {
        lacking.push(format!(
            "it has no real-time priority ({error}): when memory is short it may not use the kernel's reserve, and its pages may wait; it \
             needs CAP_SYS_NICE"
        ));
    }
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-1000") {
        lacking.push(format!(
            "it may be killed when memory runs out ({error}): it needs CAP_SYS_RESOURCE"
        ));
    }
    if let Some(limit) = limit() {
        lacking.push(format!(
            "its cgroup has a limit of memory ({}): there it may wait for pages that it carries; start it in a cgroup without one",
            limit.display()
        ));
    }
    lacking
}

fn be_real_time() -> io::Result<()> {
    let scheduled = libc::sched_param {
        sched_priority: PRIORITY,
    };
    // SAFETY: the structure lives through the call, which only reads it.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_RR, &raw const scheduled) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Locks what there is, and what comes. What is mapped now is in memory from here on, so that nothing of it is read from a disk, or allocated, on the
/// way of a page: what a process runs when a server dies it has not run before. Shared memory is only locked where it is touched, or by
/// [`populate`]. If that may not be, a line that says what follows.
pub fn lock() -> Option<String> {
    // What it touches stays. Without ONFAULT all addresses that are merely reserved, many GiB of them, would be filled.
    let all = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    if let Err(error) = rustix::mm::mlockall(all) {
        return Some(format!(
            "its memory is not locked ({error}): with swap on this machine it may wait for itself; it needs CAP_IPC_LOCK, or a larger \
             limit of locked memory"
        ));
    }
    grow_stack();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    for (start, length, is_writable) in maps.lines().filter_map(private_mapping) {
        // A mapping that has gone meanwhile is not missed.
        let _ = populate(start, length, is_writable);
    }
    None
}

/// Has these pages in memory, which stay there after [`lock`].
pub fn populate(start: usize, length: usize, is_writable: bool) -> io::Result<()> {
    let advice = match is_writable {
        true => Advice::LinuxPopulateWrite,
        false => Advice::LinuxPopulateRead,
    };
    // SAFETY: it changes no content, whatever is mapped there, and is an error where nothing is.
    Ok(unsafe { madvise(start as *mut c_void, length, advice) }?)
}

#[inline(never)]
fn grow_stack() {
    std::hint::black_box([0u8; STACK_BYTES]);
}

/// Start, length, and whether it is writable, of a line of `/proc/self/maps` (proc_pid_maps(5)) that is of private, readable memory.
fn private_mapping(line: &str) -> Option<(usize, usize, bool)> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?;
    if !rights.starts_with('r')
        || !rights.ends_with('p')
        || line.ends_with("[vvar]")
        || line.ends_with("[vsyscall]")
    {
        return None;
    }
    let start = usize::from_str_radix(start, 16).ok()?;
    let length = usize::from_str_radix(end, 16).ok()?.checked_sub(start)?;
    (length <= MAPPING_BYTES).then_some((start, length, rights.as_bytes()[1] == b'w'))
}

/// The file with the limit of memory of this process's cgroup (version 2), or of one above it.
fn limit() -> Option<PathBuf> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let top = Path::new("/sys/fs/cgroup");
    top.join(own)
        .ancestors()
        .take_while(|folder| folder.starts_with(top))
        .flat_map(|folder| ["memory.max", "memory.high"].map(|name| folder.join(name)))
        .find(|file| std::fs::read_to_string(file).is_ok_and(|limit| limit.trim() != "max"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_memory_is_filled_and_no_other() {
        let wanted = |line| private_mapping(line);
        assert_eq!(
            wanted("7f00000000-7f00002000 rw-p 00000000 00:00 0 "),
            Some((0x7f_0000_0000, 0x2000, true))
        );
        assert_eq!(
            wanted("400000-500000 r-xp 00000000 fe:00 12 /usr/bin/verbatim"),
            Some((0x40_0000, 0x10_0000, false))
        );
        for other in [
            "7f00000000-7f00002000 rw-s 00000000 00:01 7 /memfd:verbatim-arena (deleted)",
            "7f00000000-7f00002000 ---p 00000000 00:00 0 ",
            "7f00000000-8f00000000 rw-p 00000000 00:00 0 ",
            "7fff000-7fff400 r--p 00000000 00:00 0 [vvar]",
            "",
        ] {
            assert_eq!(wanted(other), None, "{other}");
        }
        // Of this process: nothing of it is changed.
        let own = vec![7u8; 3 << 20];
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        for (start, length, is_writable) in maps.lines().filter_map(private_mapping) {
            let _ = populate(start, length, is_writable);
        }
        assert!(own.iter().all(|byte| *byte == 7));
    }
}
