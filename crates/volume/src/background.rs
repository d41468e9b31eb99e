//! Threads for what is copied, which run when no tenant's do.
//!
//! A copy takes processors, not disks and networks alone: both hosts encrypt it, or look whether it is what was sent. Linux gives a thread of a lower
//! priority what the others leave, and never nothing (`setpriority(2)`: there a priority is a thread's).

/// 68 times less than what a thread gets by default, where both want a processor.
const NICE: i32 = 19;

/// Nine times less. Whoever reads or writes a file has its lock in the kernel meanwhile, and those of the daemon when it has done so: where such a thread is put
/// off, tenants may wait for it.
const NICE_WITH_LOCKS: i32 = 10;

/// The calling thread is one of them from now on, and takes no lock for which tenants wait.
pub fn enter() {
    lower(NICE);
}

/// The same for one that takes such locks.
pub fn enter_with_locks() {
    lower(NICE_WITH_LOCKS);
}

fn lower(nice: i32) {
    // Lower is always allowed. Where it is not, copies take what tenants take.
    let _ = rustix::process::setpriority_process(None, nice);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_its_own_threads_have_a_lower_priority() {
        let own = || rustix::process::getpriority_process(None).expect("it can be read");
        let before = own();
        let there = [enter, enter_with_locks].map(|enter| {
            let there = std::thread::spawn(move || {
                enter();
                own()
            });
            there.join().expect("it does not panic")
        });
        assert_eq!(own(), before);
        assert_eq!(there, [NICE, NICE_WITH_LOCKS].map(|nice| before.max(nice)));
    }
}
