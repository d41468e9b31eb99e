//! The proxy's and CRIU's place in the queue for the processors.
//!
//! While a container is frozen, nothing on the host is more urgent than CRIU: on busy processors every wait for its
//! turn is added to the blackout. It works for some ten ms and sleeps otherwise.

use std::process::Child;

/// Lets CRIU, what it starts, and us run before ordinary processes. CRIU gives each restored task its own policy back.
///
/// Best effort: in a cgroup without a real-time budget (version 1 with `CONFIG_RT_GROUP_SCHED`) it is a better place
/// among ordinary processes, and without `CAP_SYS_NICE` things stay as they are. Not to be called before runc has moved
/// us to the container's cgroup, which might refuse a real-time process.
pub(super) fn hurry(criu: &Child) {
    let lowest_real_time = libc::sched_param { sched_priority: 1 };
    let criu = i32::try_from(criu.id()).expect("a process id is a positive i32");
    for pid in [0, criu] {
        // SAFETY: the pointer is to a parameter that lives across the call; our own child cannot have been replaced
        // by another process, since we have not waited for it.
        let refused = unsafe { libc::sched_setscheduler(pid, libc::SCHED_RR, &lowest_real_time) } != 0;
        if refused {
            // SAFETY: plain numbers, and the child is ours as above.
            unsafe { libc::setpriority(libc::PRIO_PROCESS, pid.unsigned_abs(), -20) };
        }
    }
}
