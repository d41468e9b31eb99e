//! What a process needs that pages go through: it must never wait for what it carries itself.
//!
//! A process that is on the way of swap pages and touches a page of its own that was swapped out waits for itself; one that allocates
//! memory under pressure may have the kernel write pages out through itself. So it is locked into memory, tells the kernel that it is on the
//! way of I/O, and is the last that is killed for memory.

use rustix::mm::MlockAllFlags;

/// `PR_SET_IO_FLUSHER` of prctl(2), Linux 5.6: allocations do not wait for I/O, and throttling does not hold it up.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Takes all of it that this process may; for each that it may not, a line that says what follows from it.
pub fn enter() -> Vec<String> {
    let mut lacking = Vec::new();
    // What it has touched stays. Without ONFAULT all addresses that are merely reserved, many GiB of them, would be filled.
    let all = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    if let Err(error) = rustix::mm::mlockall(all) {
        lacking.push(format!(
            "its memory is not locked ({error}): with swap on this machine it may wait for itself; it needs CAP_IPC_LOCK, or a larger \
             limit of locked memory"
        ));
    }
    // SAFETY: four plain numbers, which the call reads as such.
    if unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) } != 0 {
        let error = std::io::Error::last_os_error();
        lacking.push(format!(
            "the kernel is not told that it is on the way of I/O ({error}): its own allocations may wait for pages that it carries; it \
             needs CAP_SYS_RESOURCE"
        ));
    }
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-1000") {
        lacking.push(format!(
            "it may be killed when memory runs out ({error}): it needs CAP_SYS_RESOURCE"
        ));
    }
    lacking
}
