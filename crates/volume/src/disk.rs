//! The threads that wait for disks.
//!
//! Threads, not io_uring: a request costs two hand-overs more (which is why `Volume::request_here` keeps from them what need not wait), but the calls are the plain ones, their errors are those of the manual pages, zeroing
//! and flushing need no kernel of a certain age, and hosts that forbid io_uring (as many container runtimes do) work the same. What the tenant
//! wants goes before what is copied: both have threads of their own, and those of copies have a lower priority.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};

use crate::background;

type Job = Box<dyn FnOnce() + Send>;

struct Queue {
    jobs: Mutex<VecDeque<Job>>,
    /// One more.
    more: Condvar,
}

/// Whom a job is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Somebody waits for it.
    Tenant,
    /// Later will do.
    Copy,
}

/// The threads of a daemon.
#[derive(Clone)]
pub struct Disks {
    tenant: Arc<Queue>,
    copy: Arc<Queue>,
}

impl Disks {
    /// So many threads for tenants, and half as many, in the background, for copies. They end with the process.
    pub fn new(threads: usize) -> Self {
        Self {
            tenant: Queue::start("disk", threads, || ()),
            copy: Queue::start("copy", (threads / 2).max(1), background::enter_with_locks),
        }
    }

    /// Has it done, soon.
    pub fn submit(&self, class: Class, job: impl FnOnce() + Send + 'static) {
        let queue = match class {
            Class::Tenant => &self.tenant,
            Class::Copy => &self.copy,
        };
        let mut jobs = queue.jobs.lock().expect("no panic under this lock");
        jobs.push_back(Box::new(job));
        drop(jobs);
        queue.more.notify_one();
    }
}

impl Queue {
    fn start(name: &str, threads: usize, enter: fn()) -> Arc<Self> {
        let queue = Arc::new(Self {
            jobs: Mutex::default(),
            more: Condvar::new(),
        });
        for number in 0..threads {
            let queue = queue.clone();
            std::thread::Builder::new()
                .name(format!("{name} {number}"))
                .spawn(move || {
                    enter();
                    queue.work();
                })
                .expect("a thread can be started");
        }
        queue
    }

    fn work(&self) {
        let mut jobs = self.jobs.lock().expect("no panic under this lock");
        loop {
            match jobs.pop_front() {
                Some(job) => {
                    drop(jobs);
                    job();
                    jobs = self.jobs.lock().expect("no panic under this lock");
                }
                None => jobs = self.more.wait(jobs).expect("no panic under this lock"),
            }
        }
    }
}
