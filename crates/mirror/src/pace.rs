//! How much is copied beside the tenant.
//!
//! The paper copies a chunk if `head − tail + inflight_user < TH`, with TH the depth that just saturates the disk. Here TH is found while it
//! runs: it grows by one in each window in which the tenant's latency is what it was without a copy beside it, and is halved in
//! one in which it is not. It is halved, too, in one in which chunks stand in a queue on their way to the destination's disk: they take longer than the quickest by more than what
//! is copied then needs, and a change to a chunk that is on its way waits for it. A tenant that fills its disk all the time would let no copy through for ever: one chunk goes all the same
//! when none has gone for [`FLOOR`].

use std::time::Duration;

/// The largest TH.
pub const MAX_DEPTH: u32 = 32;

/// Over which time the latency is judged.
pub const WINDOW: Duration = Duration::from_millis(50);

/// At the latest after this time one chunk is copied.
pub const FLOOR: Duration = Duration::from_millis(50);

/// What the tenant's requests may take longer: by this ratio, and [`SLACK`] on top.
const RATIO: f64 = 1.25;
const SLACK: Duration = Duration::from_micros(50);

/// What chunks may take longer on their way than the quickest has: by this ratio, and [`QUEUE_SLACK`] on top. The quickest may have been zeros, which are not
/// carried: so much is what a full chunk takes on a link of 1 Gbit/s, twice.
const QUEUE_RATIO: f64 = 2.0;
const QUEUE_SLACK: Duration = Duration::from_millis(4);

/// How much one sample counts in the mean.
const WEIGHT: f64 = 1.0 / 16.0;

/// TH, and the latencies that it follows.
#[derive(Debug, Clone)]
pub struct Pace {
    depth: u32,
    bytes_per_second: Option<u64>,
    /// The tenant's mean latency in seconds while nothing was copied, and while something was.
    alone: Option<f64>,
    beside: Option<f64>,
    /// In seconds, of chunks from when they leave until they are on the destination's disk: the quickest, and the mean of this window.
    quickest: Option<f64>,
    way: Option<f64>,
    window_began: Duration,
    last_chunk: Option<Duration>,
    /// Before this no chunk may begin, by the limit of bytes.
    not_before: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            depth: 2,
            bytes_per_second: None,
            alone: None,
            beside: None,
            quickest: None,
            way: None,
            window_began: Duration::ZERO,
            last_chunk: None,
            not_before: Duration::ZERO,
        }
    }
}

impl Pace {
    /// No more than so many bytes of copies a second from now on.
    pub fn limit(&mut self, bytes_per_second: Option<u64>) {
        self.bytes_per_second = bytes_per_second;
    }

    /// TH.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// A request of the tenant has taken `took` at the local disk, with copies beside it or not.
    pub fn sample(&mut self, now: Duration, took: Duration, is_beside: bool) {
        let latency = if is_beside {
            &mut self.beside
        } else {
            &mut self.alone
        };
        *latency = Some(mean(*latency, took.as_secs_f64()));
        self.adapt(now);
    }

    /// There is a new connection, which may go another way.
    pub fn connected(&mut self) {
        (self.quickest, self.way) = (None, None);
    }

    /// A chunk has taken `took` from when it left until it was on the destination's disk.
    pub fn carried(&mut self, now: Duration, took: Duration) {
        let took = took.as_secs_f64();
        self.quickest = Some(self.quickest.map_or(took, |quickest| quickest.min(took)));
        self.way = Some(mean(self.way, took));
        self.adapt(now);
    }

    /// Whether one more chunk may begin beside `copies` and `tenant` that are in flight.
    pub fn allows(&mut self, now: Duration, copies: usize, tenant: usize) -> bool {
        self.adapt(now);
        if now < self.not_before {
            return false;
        }
        let starved = self.last_chunk.is_none_or(|last| now >= last + FLOOR);
        copies + tenant < self.depth as usize || copies == 0 && starved
    }

    /// One begins.
    pub fn begun(&mut self, now: Duration, bytes: u64) {
        self.last_chunk = Some(now);
        if let Some(limit) = self.bytes_per_second {
            let took = Duration::from_secs_f64(bytes as f64 / limit.max(1) as f64);
            self.not_before = self.not_before.max(now.saturating_sub(WINDOW)) + took;
        }
    }

    fn adapt(&mut self, now: Duration) {
        if now < self.window_began + WINDOW {
            return;
        }
        self.window_began = now;
        let is_slower = match (self.alone, self.beside) {
            (Some(alone), Some(beside)) => beside > alone * RATIO + SLACK.as_secs_f64(),
            _ => false,
        };
        let stands_in_queue = match (self.quickest, self.way) {
            (Some(quickest), Some(way)) => way > quickest * QUEUE_RATIO + QUEUE_SLACK.as_secs_f64(),
            _ => false,
        };
        self.depth = match is_slower || stands_in_queue {
            true => (self.depth / 2).max(1),
            false => (self.depth + 1).min(MAX_DEPTH),
        };
        // What is judged next is what the new depth does.
        self.beside = None;
        self.way = None;
    }
}

fn mean(before: Option<f64>, sample: f64) -> f64 {
    before.map_or(sample, |before| before + (sample - before) * WEIGHT)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_depth_grows_while_the_tenant_is_as_fast_as_alone_and_halves_when_it_is_not() {
        let mut pace = Pace::default();
        pace.sample(MS, MS, false);
        let mut now = MS;
        for _ in 0..10 {
            now += WINDOW;
            pace.sample(now, MS, true);
        }
        let before = pace.depth();
        assert!(before > 8, "{before}");
        now += WINDOW;
        pace.sample(now, 10 * MS, true);
        assert_eq!(pace.depth(), before / 2);
    }

    #[test]
    fn chunks_do_not_stand_in_a_queue() {
        // A way on which each chunk takes a millisecond, one after the other, and two besides.
        let mut pace = Pace::default();
        let mut now = Duration::ZERO;
        let mut deepest = 0;
        for _ in 0..200 {
            now += WINDOW;
            pace.carried(now, MS * (2 + pace.depth()));
            deepest = deepest.max(pace.depth());
        }
        assert!((3..=12).contains(&deepest), "{deepest}");
        // A longer way, on which they do not wait for each other.
        pace.connected();
        for _ in 0..40 {
            now += WINDOW;
            pace.carried(now, 50 * MS);
        }
        assert_eq!(pace.depth(), MAX_DEPTH);
    }

    #[test]
    fn a_busy_tenant_does_not_starve_the_copy() {
        let mut pace = Pace::default();
        assert!(pace.allows(MS, 0, 1000), "the first chunk");
        pace.begun(MS, 1);
        assert!(!pace.allows(MS, 0, 1000));
        assert!(pace.allows(MS + FLOOR, 0, 1000));
        assert!(!pace.allows(MS + FLOOR, 1, 1000));
    }

    #[test]
    fn the_limit_of_bytes_is_kept() {
        let mut pace = Pace::default();
        pace.limit(Some(1_000_000));
        let (mut now, mut bytes) = (Duration::ZERO, 0);
        while now < Duration::from_secs(5) {
            if pace.allows(now, 0, 0) {
                pace.begun(now, 100_000);
                bytes += 100_000;
            }
            now += MS;
        }
        assert!((4_800_000..5_300_000).contains(&bytes), "{bytes}");
    }
}
