//! The threads that wait for disks.
//!
//! Threads, not io_uring: a request costs two hand-overs more (which is why `Volume::request_here` keeps from them what need not wait), but the calls are the plain ones, their errors are those of the manual pages, zeroing
//! and flushing need no kernel of a certain age, and hosts that forbid io_uring (as many container runtimes do) work the same. What the tenant
//! wants goes before what is copied.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queues {
    tenant: VecDeque<Job>,
    copy: VecDeque<Job>,
    /// Copies that run.
    copies: usize,
}

struct Shared {
    queues: Mutex<Queues>,
    /// One more job.
    more: Condvar,
    threads: usize,
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
    shared: Arc<Shared>,
}

impl Disks {
    /// So many threads. They end with the process.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            queues: Mutex::default(),
            more: Condvar::new(),
            threads,
        });
        for number in 0..threads {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name(format!("disk {number}"))
                .spawn(move || work(&shared))
                .expect("a thread can be started");
        }
        Self { shared }
    }

    /// Has it done, soon.
    pub fn submit(&self, class: Class, job: impl FnOnce() + Send + 'static) {
        let mut queues = self.shared.queues.lock().expect("no panic under this lock");
        match class {
            Class::Tenant => queues.tenant.push_back(Box::new(job)),
            Class::Copy => queues.copy.push_back(Box::new(job)),
        }
        drop(queues);
        self.shared.more.notify_one();
    }
}

fn work(shared: &Shared) {
    let mut queues = shared.queues.lock().expect("no panic under this lock");
    loop {
        // At least half of the threads are there for tenants.
        let may_copy = queues.copies < (shared.threads / 2).max(1);
        let (job, is_copy) = match queues.tenant.pop_front() {
            Some(job) => (job, false),
            None => match may_copy.then(|| queues.copy.pop_front()).flatten() {
                Some(job) => (job, true),
                None => {
                    queues = shared.more.wait(queues).expect("no panic under this lock");
                    continue;
                }
            },
        };
        queues.copies += usize::from(is_copy);
        drop(queues);
        job();
        queues = shared.queues.lock().expect("no panic under this lock");
        queues.copies -= usize::from(is_copy);
        if is_copy && !queues.copy.is_empty() {
            shared.more.notify_one();
        }
    }
}
