//! A processor when there is something to do, even on a busy machine.
//!
//! A NIC does not wait for the programs that use it. A software one does, if it is one process among others on a machine
//! with few cores: programs poll, and each of them looks as busy to the scheduler as the RNIC that they wait for.
//!
//! Two things help. A shorter slice than others have lets a thread that wakes up take the core at once (EEVDF, Linux 6.12;
//! sched(7)): without it whoever runs may go on for milliseconds. Anybody may ask for it. A nice value below 0 gives more of
//! the core, and needs the right to it.
//!
//! Where several RNICs share a machine, as those of a lab's hosts do, each should have a core: the scheduler likes to wake
//! a receiver on the core of its sender, and there each waits for the other.

use std::io;

use rustix::thread::{CpuSet, sched_setaffinity};

use crate::error::NicError;

/// The shortest slice that the kernel gives, in ns; 3 ms are usual.
const SLICE_NS: u64 = 100_000;

/// `struct sched_attr` as of its first version (sched_setattr(2)).
#[repr(C)]
#[derive(Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    /// For `SCHED_OTHER`: the slice.
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Keeps this process on one core of the machine.
pub fn keep_to(core: usize) -> Result<(), NicError> {
    let mut set = CpuSet::new();
    if core < CpuSet::MAX_CPU {
        set.set(core);
    }
    sched_setaffinity(None, &set).map_err(|errno| NicError::Core {
        core,
        source: errno.into(),
    })
}

/// Asks the scheduler for this nice value and a short slice, and for timers that go off when they should instead of up to 50 µs later. Where something
/// of it is not allowed, nothing changes.
pub fn raise(nice: i32) {
    // SAFETY: it takes two numbers. It cannot fail: the kernel has had this since 2.6.28.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1);
    }
    if let Err(error) = schedule(nice) {
        tracing::info!("the software RNIC runs with ordinary priority ({error}): slower on busy machines");
        // The slice alone. Kernels that do not know it take the rest, which is what there is already.
        let _ = schedule(0);
    }
}

fn schedule(nice: i32) -> io::Result<()> {
    let attr = SchedAttr {
        size: size_of::<SchedAttr>() as u32,
        policy: libc::SCHED_OTHER as u32,
        nice,
        runtime: SLICE_NS,
        ..SchedAttr::default()
    };
    // SAFETY: the structure lives through the call, which reads as much of it as its first member says.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_is_kept_to_and_one_that_is_not_there_is_named() {
        std::thread::spawn(|| {
            let own = rustix::thread::sched_getcpu();
            keep_to(own).unwrap();
            let set = rustix::thread::sched_getaffinity(None).unwrap();
            assert!(set.count() == 1 && set.is_set(own));
            for missing in [CpuSet::MAX_CPU - 1, CpuSet::MAX_CPU] {
                let error = keep_to(missing).unwrap_err().to_string();
                assert!(error.contains(&missing.to_string()), "{error}");
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn the_shortest_slice_is_anybodys() {
        // Of a thread of its own, which ends with it.
        let scheduled = std::thread::spawn(|| schedule(0)).join().unwrap();
        assert!(scheduled.is_ok(), "{scheduled:?}");
    }
}
