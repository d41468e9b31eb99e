//! Threads for what is copied, which run when no tenant's do.
//!
//! A copy takes processors, not disks and networks alone: both hosts encrypt it, or look whether it is what was sent. Linux gives a thread of a lower
//! priority what the others leave, and never nothing (`setpriority(2)`: there a priority is a thread's).

use std::sync::LazyLock;

use tokio::runtime::{Builder, Handle, Runtime};

/// Nine times less than what a thread gets by default, where both want a processor.
const NICE: i32 = 10;

/// Threads that carry copies, at most: one encrypts 1 to 2 GB/s.
const MOST: usize = 4;

/// The calling thread is one of them from now on.
pub fn enter() {
    // Lower is always allowed. Where it is not, copies take what tenants take, as before.
    let _ = rustix::process::setpriority_process(None, NICE);
}

/// Where tasks run that carry copies.
pub fn runtime() -> &'static Handle {
    static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Builder::new_multi_thread()
            .worker_threads((processors / 2).clamp(1, MOST))
            .thread_name("copy")
            .on_thread_start(enter)
            .enable_all()
            .build()
            .expect("a thread can be started")
    });
    RUNTIME.handle()
}

#[cfg(test)]
mod tests {
    #[test]
    fn only_its_own_threads_have_a_lower_priority() {
        let own = || rustix::process::getpriority_process(None).expect("it can be read");
        let before = own();
        let there = super::runtime().spawn(async move { own() });
        let there = super::runtime().block_on(there).expect("it runs");
        assert_eq!((own(), there), (before, before.max(super::NICE)));
    }
}
