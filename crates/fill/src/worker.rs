//! The worker: one loop that reads events, answers faults and fills in between.
//!
//! It can be killed at any instruction. The next worker takes up the latest snapshot and the events since then
//! ([`crate::state`]); what was filled after the snapshot is filled again, which the kernel refuses page by page (`EEXIST`).
//! A cache's page is given back only when no snapshot that could be taken up needs it. All threads that wait for a page are
//! woken then, and fault again, so that no fault is lost.

mod control;
mod criu;
mod events;
mod faults;
mod fill;
mod wait;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::numbers::Numbers;
use crate::protocol::{Phase, Status};
use crate::source::Source;
use crate::state::State;
use crate::sys::descriptors;
use crate::sys::region::Region;
use crate::sys::uffd;
use control::Control;
use wait::{Ready, Waiter};

/// Helpers that have no task's memory end by themselves if nobody has asked them anything for so long.
const UNASKED: Duration = Duration::from_secs(3600);

/// How often it is looked whether somebody still can ask.
const LOOK: Duration = Duration::from_secs(60);

/// Why [`Worker::run`] returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// There is nothing more to do.
    Over,
    /// The worker needs another guardian.
    GuardianDied,
}

/// One worker.
#[derive(Debug)]
pub struct Worker<'a> {
    config: &'a Config,
    region: &'a Region,
    numbers: Numbers,
    say: fn(&str),
    waiter: Waiter,
    control: Control,
    state: State,
    sources: BTreeMap<u32, Source>,
    /// Faults that are still to be answered: task and address.
    faults: VecDeque<(u32, u64)>,
    /// When the fill of a task goes on that cannot be filled now.
    paused: BTreeMap<u32, Instant>,
    /// Memory could not be had: the latest pause, why, and until when.
    stalled: Option<(Duration, String, Instant)>,
    /// What was filled or dropped since the last snapshot, by cache, and how many bytes.
    done: BTreeMap<u32, Vec<Range<u64>>>,
    done_bytes: u64,
    /// What can be given back now.
    free: Vec<(u32, Range<u64>)>,
    /// From where on the log is not in the latest snapshot.
    log_start: u64,
    /// The phase that watchers know.
    told: Option<Phase>,
    /// Until then pieces are small, so that faults need not wait for long.
    quiet_from: Instant,
    asked: Instant,
    looked: Instant,
}

impl<'a> Worker<'a> {
    /// A worker that goes on where the one before it was.
    pub fn new(config: &'a Config, region: &'a Region, numbers: Numbers, say: fn(&str)) -> Self {
        region.lock();
        let now = Instant::now();
        let mut worker = Self {
            config,
            region,
            numbers,
            say,
            waiter: Waiter::nothing(),
            control: Control::default(),
            state: State::default(),
            sources: BTreeMap::new(),
            faults: VecDeque::new(),
            paused: BTreeMap::new(),
            stalled: None,
            done: BTreeMap::new(),
            done_bytes: 0,
            free: Vec::new(),
            log_start: 0,
            told: None,
            quiet_from: now,
            asked: now,
            looked: now,
        };
        worker.take_up();
        worker
    }

    /// The order matters: what a low number stands for is known until the low ones are closed.
    fn take_up(&mut self) {
        self.replay();
        self.take_up_criu();
        let numbers = self.numbers;
        descriptors::close_range(3, numbers.low() - 1);
        let mut next = 0;
        for index in self.state.tasks.keys().copied().chain([numbers.room]) {
            descriptors::close_range(numbers.task(next), numbers.task(index) - 1);
            next = index + 1;
        }
        self.waiter = Waiter::new(numbers);
        for index in self.state.tasks.keys() {
            self.waiter.add_task(*index);
            uffd::wake_all(descriptors::at(numbers.task(*index)));
        }
        self.watch_criu();
    }

    /// Serves until there is nothing more to do, or `guardian`, a process's descriptor, is readable.
    pub fn run(&mut self, guardian: BorrowedFd<'_>) -> End {
        self.waiter.add_guardian(guardian);
        loop {
            let progress = self.step();
            self.tell_phase();
            if self.is_over() {
                return End::Over;
            }
            for ready in self.waiter.wait(self.pause(progress)) {
                match ready {
                    Ready::Guardian => return End::GuardianDied,
                    Ready::Control => self.accept(),
                    Ready::Client(fd) => self.serve(fd),
                    Ready::Listener => self.accept_criu(),
                    Ready::Criu => self.hear_criu(),
                    Ready::Task(index) => self.read_events(index),
                }
            }
        }
    }

    /// Faults first, then one piece of the rest. Whether anything came of it.
    fn step(&mut self) -> bool {
        if self.is_refused() {
            self.faults.clear();
            return false;
        }
        let answered = self.answer_faults();
        let filled = self.fill_next();
        let given_back = self.give_back();
        self.close_finished();
        answered || filled || given_back
    }

    /// How long nothing need be done unless something happens; `None` for no time at all.
    fn pause(&self, progress: bool) -> Option<Duration> {
        if progress || !self.free.is_empty() {
            return None;
        }
        let now = Instant::now();
        let retry = self
            .paused
            .values()
            .chain(self.stalled.as_ref().map(|(.., until)| until))
            .min();
        let retry = retry.map(|at| at.saturating_duration_since(now));
        let faults = (!self.faults.is_empty() && !self.is_stalled()).then_some(fill::AGAIN);
        Some(
            [retry, faults, Some(LOOK)]
                .into_iter()
                .flatten()
                .min()
                .unwrap_or(LOOK),
        )
    }

    fn is_refused(&self) -> bool {
        self.region.header().refused.load(Ordering::SeqCst) != 0
    }

    fn refuse(&self, why: &str) {
        (self.say)(&format!("the restore is refused: {why}"));
        self.region.header().set_text(why);
        self.region.header().refused.store(1, Ordering::SeqCst);
    }

    fn phase(&self) -> Phase {
        if self.is_refused() {
            Phase::Refused(self.region.header().text())
        } else if self.state.filling && self.state.tasks.is_empty() {
            Phase::Filled
        } else if self.state.filling {
            Phase::Filling
        } else if self.state.arrived.is_empty() {
            Phase::Waiting
        } else {
            Phase::Restoring
        }
    }

    fn status(&self) -> Status {
        let header = self.region.header();
        let page = rustix::param::page_size() as u64;
        Status {
            phase: self.phase(),
            tasks: self.state.tasks.len() as u32,
            pages: self.state.bytes / page,
            pages_left: self.state.left() / page,
            faults: header.faults.load(Ordering::Relaxed),
            zero_faults: header.zeros.load(Ordering::Relaxed),
            unplaced: header.unplaced.load(Ordering::Relaxed),
            worker_restarts: header.restarts.load(Ordering::Relaxed),
            stalled: self.stalled.as_ref().map(|(_, why, _)| why.clone()),
            processes: [&header.guardian, &header.worker].map(|pid| pid.load(Ordering::Relaxed)),
        }
    }

    /// Whether the processes should end: they were told to, or hold nothing and nobody asks.
    fn is_over(&mut self) -> bool {
        if self.region.header().ending.load(Ordering::SeqCst) != 0 {
            return true;
        }
        if !self.state.tasks.is_empty() || !matches!(self.phase(), Phase::Waiting | Phase::Filled) {
            return false;
        }
        if self.asked.elapsed() > UNASKED {
            (self.say)("nobody has asked anything for an hour");
            return true;
        }
        if self.looked.elapsed() > LOOK {
            self.looked = Instant::now();
            return !self.config.control.exists();
        }
        false
    }

    /// Takes away what stands in folders.
    pub fn clear(&self) {
        let mark = Config::filled_mark(&self.config.control);
        for path in [&self.config.lazy_pages_socket(), &self.config.control, &mark] {
            let _ = std::fs::remove_file(path);
        }
    }
}
