//! For how long this thread was able to run and did not: the scheduler counts it (`/proc/PID/task/TID/schedstat`, proc(5)).

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use rustix::io::pread;

/// Three numbers in decimal, and what is between them.
const LONGEST: usize = 64;

/// A thread's file.
#[derive(Debug)]
pub struct RunQueue(File);

impl RunQueue {
    /// Of the calling thread. `None`: the kernel does not count (`CONFIG_SCHED_INFO`), or `/proc` is not there.
    pub fn of_this_thread() -> Option<Self> {
        Self::open(Path::new(&verbatim_jail::procfs::path_of_this_thread(
            "schedstat",
        )))
    }

    pub fn open(path: &Path) -> Option<Self> {
        let queue = Self(File::open(path).ok()?);
        queue.waited().map(|_| queue)
    }

    /// Since the thread began.
    pub fn waited(&self) -> Option<Duration> {
        let mut text = [0; LONGEST];
        let length = pread(&self.0, &mut text, 0).ok()?;
        second_number(&text[..length]).map(Duration::from_nanos)
    }
}

fn second_number(text: &[u8]) -> Option<u64> {
    str::from_utf8(text)
        .ok()?
        .split_ascii_whitespace()
        .nth(1)?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::Relaxed;
    use std::time::Instant;

    use super::*;

    /// Longer than any thread has to wait.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// Computes on a core until both of two threads have had to wait for it. Whether this one has.
    fn compete(core: usize, have_waited: &AtomicU32) -> bool {
        crate::priority::keep_to(core).unwrap();
        let queue = RunQueue::of_this_thread().unwrap();
        let before = queue.waited().unwrap();
        let start = Instant::now();
        while queue.waited().unwrap() <= before {
            if start.elapsed() > PATIENCE {
                return false;
            }
        }
        have_waited.fetch_add(1, Relaxed);
        while have_waited.load(Relaxed) < 2 && start.elapsed() < PATIENCE {}
        true
    }

    #[test]
    fn a_thread_that_another_keeps_from_its_core_has_waited() {
        let core = rustix::thread::sched_getcpu();
        let have_waited = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let threads = [0, 1].map(|_| scope.spawn(|| compete(core, &have_waited)));
            assert!(threads.into_iter().all(|thread| thread.join().unwrap()));
        });
    }

    #[test]
    fn the_second_number_counts() {
        assert_eq!(second_number(b"1203 57095 7\n"), Some(57_095));
        for other in ["", "12\n", "12 x 7\n", "0 18446744073709551616 0\n"] {
            assert_eq!(second_number(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn a_kernel_that_does_not_count_is_seen_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("schedstat");
        assert!(RunQueue::open(&path).is_none());
        std::fs::write(&path, "").unwrap();
        assert!(RunQueue::open(&path).is_none());
    }
}
