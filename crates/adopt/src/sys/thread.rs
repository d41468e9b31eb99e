//! Addresses that belong to threads.

use std::ops::Range;

/// How far from the current frame the window's own frames may be, in bytes, rounded up generously.
const FRAMES_BYTES: usize = 64 * 1024;

/// The stack around the caller.
pub fn current_stack() -> Range<usize> {
    let here = 0u8;
    let here = (&raw const here).addr();
    here.saturating_sub(FRAMES_BYTES)..here.saturating_add(FRAMES_BYTES)
}

/// `struct pthread` of glibc, in bytes; that of musl is smaller.
const DESCRIPTOR_BYTES: usize = 2304;

/// How far into that the list of robust futexes may start.
const ROBUST_LIST_BYTES: usize = 1024;

/// The descriptor of a thread of this process. libc keeps the thread's list of robust futexes in it, whose address the
/// kernel knows (get_robust_list(2)).
pub fn descriptor(tid: i32) -> Option<Range<usize>> {
    let mut head = 0usize;
    let mut length = 0usize;
    // SAFETY: the kernel writes one pointer and one size to the two places.
    let result = unsafe { libc::syscall(libc::SYS_get_robust_list, tid, &raw mut head, &raw mut length) };
    let known = result == 0 && head != 0;
    known.then(|| {
        head.saturating_sub(ROBUST_LIST_BYTES)..head.saturating_add(DESCRIPTOR_BYTES - ROBUST_LIST_BYTES)
    })
}

/// The calling thread's descriptor and its errno.
pub fn own_descriptor() -> [Range<usize>; 2] {
    // SAFETY: neither function has preconditions; the addresses are not dereferenced.
    let (own, errno) = unsafe { (libc::pthread_self() as usize, libc::__errno_location().addr()) };
    [
        own..own.saturating_add(DESCRIPTOR_BYTES),
        errno..errno.saturating_add(size_of::<i32>()),
    ]
}
