//! How far the queues of a queue pair are, from completions.
//!
//! A request carries its position in the queue as `wr_id`; positions rise by one, and a queue completes in order (IBA Vol
//! 1 §10.8.3.1). So a completion tells that all up to its position are done, those that were not signaled included. No
//! request is signaled that the program did not ask for: its completion would take room in a completion queue that the
//! program has sized for its own. So what is posted behind the last signaled request counts as unfinished until a later
//! one completes, which is the rule that verbs have for the room of a queue too (ibv_post_send(3)), or until somebody has
//! asked for a marker ([`super::markers`]).
//!
//! RECVs of a shared queue complete in any order; these are counted.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::markers::{MARK_BIT, Marks};
use crate::work::RECV_BIT;
use crate::work::Wc;

/// One queue.
#[derive(Debug, Default)]
pub struct Progress {
    /// Requests given to the library, as a position: that of the next.
    posted: AtomicU64,
    /// Requests done, likewise.
    done: AtomicU64,
}

impl Progress {
    /// The first request of this queue is about to be posted, at `position`: what the program has posted before went to the queue
    /// whose place this one has taken. Of one that was used already nothing changes.
    pub fn start_at(&self, position: u64) {
        if self.posted.load(Relaxed) == 0 {
            self.done.store(position, Relaxed);
            self.posted.store(position, Relaxed);
        }
    }

    /// The library has taken all up to `position`.
    pub fn posted_up_to(&self, position: u64) {
        self.posted.store(position + 1, Relaxed);
    }

    /// The library has taken so many more, whichever.
    pub fn posted_more(&self, count: u32) {
        self.posted.fetch_add(count.into(), Relaxed);
    }

    /// Requests that were posted and are not known to be done.
    #[inline]
    pub fn outstanding(&self) -> u32 {
        let done = self.done.load(Acquire);
        // A completion may come before its request is counted.
        self.posted.load(Relaxed).saturating_sub(done) as u32
    }

    /// All up to `position` are done.
    #[inline]
    fn done_up_to(&self, position: u64) {
        self.done.store(position + 1, Release);
    }

    /// Those before `position` are done.
    fn done_before(&self, position: u64) {
        self.done.store(position, Release);
    }

    /// The position of the next.
    pub fn posted(&self) -> u64 {
        self.posted.load(Relaxed)
    }

    /// One is done, whichever.
    fn done_one(&self) {
        self.done.fetch_add(1, Release);
    }

    /// Nothing is outstanding any more.
    pub fn reset(&self) {
        self.done.store(self.posted.load(Relaxed), Release);
    }
}

/// The queues of one queue pair.
#[derive(Debug)]
pub struct QpProgress {
    pub send: Progress,
    /// Its own receive queue, or the shared one.
    pub recv: Arc<Progress>,
    pub recv_is_shared: bool,
    pub marks: Marks,
}

impl QpProgress {
    /// Takes a completion of this queue pair into account.
    #[inline]
    pub fn note(&self, wc: &Wc) {
        match (wc.wr_id & RECV_BIT != 0, self.recv_is_shared) {
            (false, _) => self.send.done_up_to(wc.wr_id),
            (true, false) => self.recv.done_up_to(wc.wr_id & !RECV_BIT),
            (true, true) => self.recv.done_one(),
        }
    }

    /// Takes the completion of a marker into account; false if it is not the one under way.
    pub fn note_mark(&self, wr_id: u64, succeeded: bool) -> bool {
        let ended = self.marks.end(wr_id, succeeded);
        if ended {
            self.send.done_before(wr_id & !MARK_BIT);
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(wr_id: u64) -> Wc {
        Wc {
            wr_id,
            ..Wc::default()
        }
    }

    #[test]
    fn a_completion_finishes_all_before_it() {
        let progress = QpProgress {
            send: Progress::default(),
            recv: Arc::default(),
            recv_is_shared: false,
            marks: Marks::new(8, 9),
        };
        progress.send.posted_up_to(4);
        progress.recv.posted_up_to(1);
        progress.note(&completion(2));
        assert_eq!(progress.send.outstanding(), 2);
        progress.note(&completion(RECV_BIT));
        assert_eq!((progress.send.outstanding(), progress.recv.outstanding()), (2, 1));
        progress.send.reset();
        assert_eq!(progress.send.outstanding(), 0);
    }

    #[test]
    fn a_queue_that_takes_the_place_of_another_goes_on_at_its_positions() {
        let progress = Progress::default();
        progress.start_at(5000);
        assert_eq!(progress.outstanding(), 0);
        progress.posted_up_to(5001);
        assert_eq!(progress.outstanding(), 2, "none of which is known to be done");
        progress.start_at(5002);
        assert_eq!(progress.outstanding(), 2);
        progress.done_up_to(5001);
        assert_eq!(progress.outstanding(), 0);
    }

    #[test]
    fn those_of_a_shared_queue_are_counted() {
        let shared: Arc<Progress> = Arc::default();
        let qps = [0, 1].map(|_| QpProgress {
            send: Progress::default(),
            recv: shared.clone(),
            recv_is_shared: true,
            marks: Marks::new(8, 9),
        });
        shared.posted_more(10);
        qps[0].note(&completion(RECV_BIT | 9));
        qps[1].note(&completion(RECV_BIT));
        assert_eq!(shared.outstanding(), 8);
    }
}
