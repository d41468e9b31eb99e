//! Whether a program has moved pages within its address space.
//!
//! mremap(2) that moves by whole page tables (2 MiB and aligned, as glibc's `realloc` of large blocks does) takes the pages along
//! with their soft-dirty bits, and does not set them (`mm/mremap.c`, `move_normal_pmd`; seen on Linux 6.12). A page that
//! comes to where another one was at the last pre-dump would count as that one, unchanged. So its calls are counted, and
//! what was written down before one is good for nothing.
//!
//! The kernel counts: an event of perf_event_open(2) on a kernel probe at the system call's entry, for each thread and all
//! that these start. It costs nothing but where mremap is called.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{FromRawFd, OwnedFd};

/// Where the kernel tells the type of events on its probes.
const PROBE_TYPE: &str = "/sys/bus/event_source/devices/kprobe/type";

/// The system call's entries: a program may make it as one of 32 bits.
const ENTRIES: &[&std::ffi::CStr] = if cfg!(target_arch = "x86_64") {
    &[c"__x64_sys_mremap", c"__ia32_sys_mremap"]
} else if cfg!(target_arch = "aarch64") {
    &[c"__arm64_sys_mremap"]
} else {
    &[]
};

/// `struct perf_event_attr` of `linux/perf_event.h` up to version 1 (72 bytes), as far as it is used.
#[repr(C)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    /// `kprobe_func`: a pointer to the name.
    probe: u64,
    /// `probe_offset`.
    offset: u64,
}

const _: () = assert!(size_of::<Attributes>() == 72 && offset_of!(Attributes, probe) == 56);

/// `inherit`: what the thread starts counts, too.
const INHERIT: u64 = 1 << 1;

/// `PERF_FLAG_FD_CLOEXEC`.
const CLOSE_ON_EXEC: libc::c_ulong = 1 << 3;

/// Counts the moves of a process and all that descend from it.
#[derive(Debug)]
pub struct Moves(Vec<OwnedFd>);

impl Moves {
    /// Begins to count. An error if this kernel cannot.
    pub fn watch(root: i32) -> io::Result<Self> {
        let kind = std::fs::read_to_string(PROBE_TYPE)?;
        let kind = kind.trim().parse().map_err(|_| io::ErrorKind::InvalidData)?;
        if ENTRIES.is_empty() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let (mut events, mut watched) = (Vec::new(), HashSet::new());
        // Until none is new: one that is not watched yet may have started another.
        loop {
            let new: Vec<_> = threads_of_tree(root)
                .into_iter()
                .filter(|thread| watched.insert(*thread))
                .collect();
            if new.is_empty() {
                return Ok(Self(events));
            }
            for (thread, entry) in new
                .into_iter()
                .flat_map(|thread| ENTRIES.iter().map(move |entry| (thread, entry)))
            {
                match open(kind, entry, thread) {
                    Ok(event) => events.push(event),
                    // It has ended.
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                    Err(error) => return Err(error),
                }
            }
        }
    }

    /// How many there were.
    pub fn count(&self) -> io::Result<u64> {
        self.0.iter().try_fold(0, |count, event| {
            let mut bytes = [0; size_of::<u64>()];
            match rustix::io::read(event, &mut bytes)? {
                8 => Ok(count + u64::from_ne_bytes(bytes)),
                _ => Err(io::ErrorKind::UnexpectedEof.into()),
            }
        })
    }
}

fn open(kind: u32, entry: &std::ffi::CStr, thread: i32) -> io::Result<OwnedFd> {
    let attributes = Attributes {
        kind,
        size: size_of::<Attributes>() as u32,
        config: 0,
        sample_period: 0,
        sample_type: 0,
        read_format: 0,
        flags: INHERIT,
        wakeup_events: 0,
        breakpoint_type: 0,
        probe: entry.as_ptr().addr() as u64,
        offset: 0,
    };
    // On every processor, in no group.
    let (processor, group) = (-1, -1);
    // SAFETY: the kernel reads `size` bytes at the pointer, all of which are there, and the name that they point to, which
    // is static; it keeps neither.
    let opened = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attributes,
            thread,
            processor,
            group,
            CLOSE_ON_EXEC,
        )
    };
    match i32::try_from(opened) {
        // SAFETY: the kernel made it just now, and nobody else knows it.
        Ok(descriptor) if descriptor >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The threads of a process and all that descend from it.
fn threads_of_tree(root: i32) -> Vec<i32> {
    let mut waiting = VecDeque::from([root]);
    let mut threads = Vec::new();
    while let Some(pid) = waiting.pop_front() {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
        for task in tasks.into_iter().flatten().flatten() {
            threads.extend(
                task.file_name()
                    .to_str()
                    .and_then(|thread| thread.parse::<i32>().ok()),
            );
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            waiting.extend(
                children
                    .split_ascii_whitespace()
                    .filter_map(|pid| pid.parse::<i32>().ok()),
            );
        }
    }
    threads
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mapping that moves, since what is asked for does not fit where it is.
    fn move_something() {
        // SAFETY: new mappings of nobody else's, which are given back.
        unsafe {
            let (old, new) = (4096, 64 << 20);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let at = libc::mmap(std::ptr::null_mut(), old, libc::PROT_READ, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            let at = libc::mremap(at, old, new, libc::MREMAP_MAYMOVE);
            assert_ne!(at, libc::MAP_FAILED);
            assert_eq!(libc::munmap(at, new), 0);
        }
    }

    /// Where the kernel has no such events (`tests/vm` has), not being able to watch is said, and not taken for no moves.
    #[test]
    fn moves_of_all_threads_are_counted_or_refused() {
        let watched = Moves::watch(std::process::id().cast_signed());
        if !std::path::Path::new(PROBE_TYPE).exists() {
            assert!(watched.is_err());
            return;
        }
        let moves = match watched {
            // Only root may.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return,
            watched => watched.unwrap(),
        };
        let before = moves.count().unwrap();
        move_something();
        std::thread::spawn(move_something).join().unwrap();
        assert!(moves.count().unwrap() >= before + 2);
    }

    #[test]
    fn all_threads_are_found() {
        let own = std::process::id().cast_signed();
        let (inside, wait) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || wait.recv());
        assert!(threads_of_tree(own).len() >= 2);
        drop(inside);
        let _ = thread.join();
        assert!(threads_of_tree(i32::MAX).is_empty());
    }
}
