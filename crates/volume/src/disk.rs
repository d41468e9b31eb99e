//! The threads that wait for disks.
//!
//! Threads, not io_uring: a request costs two more hand-overs (avoided by `Volume::request_here` for requests
//! that need not wait), but the calls are the plain ones, their errors are those of the manual pages, zeroing
//! and flushing need no recent kernel, and hosts that forbid io_uring (as many container runtimes do) work
//! the same. Tenants' requests go before copies: both have threads of their own, and those of copies have a
//! lower priority.
//!
//! Each volume has threads of its own, so that a hanging disk does not affect other volumes: none before the
//! first job, and one more whenever a job comes while all are busy, up to the volume's limit and the
//! daemon's. Beyond the daemon's limit each volume still has one of either kind. Idle threads end after a
//! while, except one.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use crate::background;
use crate::room::{Room, Total};

type Job = Box<dyn FnOnce() + Send>;

/// The most threads of all volumes together, as a multiple of those of one; besides one of either kind for each volume.
const VOLUMES: usize = 32;

/// A thread that is idle for this time ends, if there is another.
const IDLE: Duration = Duration::from_secs(20);

/// Pause after a thread that could not be started.
const AGAIN: Duration = Duration::from_millis(100);

/// The origin of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// A tenant waits for it.
    Tenant,
    /// A copy; it can wait.
    Copy,
}

/// Limits that the volumes of a daemon share: threads that wait for disks, and memory of requests in flight.
#[derive(Clone)]
pub struct Disks {
    threads: usize,
    /// Threads that may still be started, over all volumes.
    left: Arc<AtomicUsize>,
    /// Queues that need another thread. A new thread inherits the priority of its creator, so one thread with
    /// the usual priority creates all.
    starter: Sender<Arc<Queue>>,
    total: Arc<Total>,
}

impl Disks {
    /// At most `threads` threads for the tenant of a volume, and half as many, in the background, for copies.
    pub fn new(threads: usize) -> Self {
        let (starter, wanted) = channel::<Arc<Queue>>();
        std::thread::Builder::new()
            .name("disk starter".into())
            .spawn(move || wanted.iter().for_each(|queue| queue.start_one()))
            .expect("a thread can be started");
        Self {
            threads,
            left: Arc::new(AtomicUsize::new(VOLUMES * threads)),
            starter,
            total: Arc::default(),
        }
    }

    /// The threads of one volume.
    pub fn own(&self) -> OwnDisks {
        let queue = |name: &'static str, threads: usize, enter: fn()| {
            Arc::new(Queue {
                name,
                most: threads,
                enter,
                left: self.left.clone(),
                state: Mutex::default(),
                more: Condvar::new(),
            })
        };
        OwnDisks {
            tenant: queue("disk", self.threads, || ()),
            copy: queue("copy", (self.threads / 2).max(1), background::enter_with_locks),
            starter: self.starter.clone(),
        }
    }

    /// The room of one volume.
    pub fn room(&self) -> Room {
        Room::new(self.total.clone())
    }
}

/// The threads of one volume. They end with it, after their last job.
pub struct OwnDisks {
    tenant: Arc<Queue>,
    copy: Arc<Queue>,
    starter: Sender<Arc<Queue>>,
}

impl OwnDisks {
    /// Runs the job on one of the threads.
    pub fn submit(&self, class: Class, job: impl FnOnce() + Send + 'static) {
        let queue = match class {
            Class::Tenant => &self.tenant,
            Class::Copy => &self.copy,
        };
        if queue.push(Box::new(job)) {
            // The starter lives as long as there is a sender.
            let _ = self.starter.send(queue.clone());
        }
    }
}

impl Drop for OwnDisks {
    fn drop(&mut self) {
        for queue in [&self.tenant, &self.copy] {
            queue.lock().is_over = true;
            queue.more.notify_all();
        }
    }
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Threads, with those that are being started.
    threads: usize,
    /// Threads that are being started.
    starting: usize,
    /// Threads that are idle, or were woken and do not run yet.
    waiting: usize,
    is_over: bool,
}

struct Queue {
    name: &'static str,
    most: usize,
    enter: fn(),
    left: Arc<AtomicUsize>,
    state: Mutex<State>,
    /// Notified of one more job.
    more: Condvar,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    /// Returns whether a thread has to be started for it.
    fn push(&self, job: Job) -> bool {
        let mut state = self.lock();
        state.jobs.push_back(job);
        let is_short = state.jobs.len() > state.waiting + state.starting && state.threads < self.most;
        let grows = is_short && (state.threads == 0 || self.take_one());
        if grows {
            state.threads += 1;
            state.starting += 1;
        }
        let wakes = state.waiting > 0;
        drop(state);
        if wakes {
            self.more.notify_one();
        }
        grows
    }

    /// Takes one of the threads that all volumes share.
    fn take_one(&self) -> bool {
        let take = |left: usize| left.checked_sub(1);
        self.left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .is_ok()
    }

    fn start_one(self: Arc<Self>) {
        loop {
            let queue = self.clone();
            let started = std::thread::Builder::new()
                .name(self.name.to_owned())
                .spawn(move || {
                    (queue.enter)();
                    queue.work();
                });
            let Err(error) = started else { return };
            let mut state = self.lock();
            if state.threads > 1 {
                // The other threads do the job later.
                state.starting -= 1;
                self.ends(state);
                return;
            }
            drop(state);
            tracing::error!("a thread for a disk cannot be started: {error}; it is tried again");
            std::thread::sleep(AGAIN);
        }
    }

    /// Counts a thread less. All but the first are shared ones.
    fn ends(&self, mut state: MutexGuard<'_, State>) {
        state.threads -= 1;
        if state.threads > 0 {
            self.left.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn work(&self) {
        let mut state = self.lock();
        state.starting -= 1;
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                background::look();
                state = self.lock();
                continue;
            }
            if state.is_over {
                return self.ends(state);
            }
            state.waiting += 1;
            let is_last = state.threads == 1;
            let (next, is_idle) = if is_last {
                let woken = self.more.wait(state).expect("no panic under this lock");
                (woken, false)
            } else {
                let waited = self.more.wait_timeout(state, IDLE);
                let (woken, waited) = waited.expect("no panic under this lock");
                (woken, waited.timed_out())
            };
            state = next;
            state.waiting -= 1;
            if is_idle && state.jobs.is_empty() && state.threads > 1 {
                return self.ends(state);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Occupies all threads that a volume may have, until the sender is dropped.
    fn hang(disks: &OwnDisks, class: Class, jobs: usize) -> mpsc::Sender<()> {
        let (lives, ends) = mpsc::channel::<()>();
        let ends = Arc::new(Mutex::new(ends));
        for _ in 0..jobs {
            let ends = ends.clone();
            disks.submit(class, move || {
                let _ = ends.lock().expect("nobody panics").recv();
            });
        }
        lives
    }

    fn is_done(disks: &OwnDisks, class: Class) -> bool {
        let (sender, done) = mpsc::channel();
        disks.submit(class, move || sender.send(()).expect("it is waited for"));
        done.recv_timeout(PATIENCE).is_ok()
    }

    #[test]
    fn a_disk_that_hangs_is_its_own_volumes_trouble_even_when_there_are_no_more_threads() {
        let all = Disks::new(2);
        let hung: Vec<_> = (0..2 * VOLUMES)
            .map(|_| {
                let disks = all.own();
                let lives = [Class::Tenant, Class::Copy].map(|class| hang(&disks, class, 8));
                (disks, lives)
            })
            .collect();
        let threads = |disks: &OwnDisks| disks.tenant.lock().threads + disks.copy.lock().threads;
        let in_all: usize = hung.iter().map(|(disks, _)| threads(disks)).sum();
        assert!(in_all <= 2 * 2 * VOLUMES + 2 * VOLUMES, "{in_all} threads");
        let fine = all.own();
        for class in [Class::Tenant, Class::Copy, Class::Tenant, Class::Copy] {
            assert!(is_done(&fine, class), "{class:?}");
        }
        drop(hung);
    }

    #[test]
    fn threads_are_started_when_all_are_stuck_and_end_with_their_volume() {
        let all = Disks::new(4);
        let disks = all.own();
        assert_eq!(disks.tenant.lock().threads, 0, "a volume that is idle has none");
        let lives = hang(&disks, Class::Tenant, 3);
        assert!(is_done(&disks, Class::Tenant), "the fourth");
        assert_eq!(disks.tenant.lock().threads, 4);
        let last = hang(&disks, Class::Tenant, 3);
        assert_eq!(disks.tenant.lock().threads, 4, "no more than it may have");
        drop((lives, last));
        let queue = disks.tenant.clone();
        drop(disks);
        let end = std::time::Instant::now() + PATIENCE;
        while queue.lock().threads > 0 {
            assert!(std::time::Instant::now() < end, "they do not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(
            all.left.load(Ordering::Relaxed),
            VOLUMES * 4,
            "all were given back"
        );
    }
}
