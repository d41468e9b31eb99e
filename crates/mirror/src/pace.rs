//! The pace of the copy beside the tenant.
//!
//! The paper copies a chunk if `head − tail + inflight_user < TH`, with TH the depth that just saturates the
//! disk. Here TH is found at run time. It grows by one in each window in which the tenant's latency is the
//! same as without a copy, and is halved in a window in which it is longer. If even one chunk at a time is
//! too much, the number of chunks in a window is limited: it grows by an eighth, and is halved, by the same
//! rule. TH is also halved in a window in which chunks queue on their way to the destination's disk, that is,
//! take much longer than the quickest chunk: a change to a chunk on its way waits for that chunk. A tenant
//! that fills its disk all the time would stop the copy forever: one chunk goes in any case when none has
//! gone for [`FLOOR`].

use std::time::Duration;

/// The largest TH.
pub const MAX_DEPTH: u32 = 32;

/// Time over which the latency is judged.
pub const WINDOW: Duration = Duration::from_millis(50);

/// Time after which one chunk is copied in any case.
pub const FLOOR: Duration = Duration::from_millis(50);

/// Allowed ratio of the tenant's latency with a copy to that without, and [`SLACK`] on top.
const RATIO: f64 = 1.05;
const SLACK: Duration = Duration::from_micros(1);

/// The fewest requests for a judgement of their latency.
const FEWEST: u32 = 16;

/// Number of windows that are judged together, unless fewer suffice.
const TOGETHER: u32 = 8;

/// Number of chunks in a window that amounts to one at a time without pauses.
const MOST_ONE_BY_ONE: u32 = 128;

/// Allowed ratio of a chunk's way to the quickest chunk's, and [`QUEUE_SLACK`] on top. The quickest chunk may
/// have been zeros, which are not carried: the slack is twice the time of a full chunk on a link of 1 Gbit/s.
const QUEUE_RATIO: f64 = 2.0;
const QUEUE_SLACK: Duration = Duration::from_millis(4);

/// Weight of one chunk in the mean of their ways, and of one request in the mean latency without a copy.
const WEIGHT: f64 = 1.0 / 16.0;
const WEIGHT_ALONE: f64 = 1.0 / 256.0;

/// TH, and the latencies that it follows.
#[derive(Debug, Clone)]
pub struct Pace {
    depth: u32,
    /// Limit of chunks in a window.
    chunks: u32,
    /// Most chunks beside each other since the last judgement.
    most: usize,
    bytes_per_second: Option<u64>,
    /// The tenant's mean latency in seconds while nothing was copied.
    alone: Option<f64>,
    /// Number of requests in the windows that are judged together; and those of them that were beside chunks.
    requests: u32,
    beside: Beside,
    windows: u32,
    /// Times from a chunk's departure until it is on the destination's disk, in seconds: the quickest, and
    /// the mean of this window.
    quickest: Option<f64>,
    way: Option<f64>,
    window_began: Duration,
    last_chunk: Option<Duration>,
    /// Time before which no chunk may begin, by the limit of bytes.
    not_before: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            depth: 2,
            chunks: MOST_ONE_BY_ONE,
            most: 0,
            bytes_per_second: None,
            alone: None,
            requests: 0,
            beside: Beside::default(),
            windows: 0,
            quickest: None,
            way: None,
            window_began: Duration::ZERO,
            last_chunk: None,
            not_before: Duration::ZERO,
        }
    }
}

impl Pace {
    /// Limits copies to this many bytes a second.
    pub fn limit(&mut self, bytes_per_second: Option<u64>) {
        self.bytes_per_second = bytes_per_second;
    }

    /// The present TH.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// A request of the tenant has taken `took` at the local disk, with copies beside it or not.
    pub fn sample(&mut self, now: Duration, took: Duration, is_beside: bool) {
        let took = took.as_secs_f64();
        self.requests += 1;
        match is_beside {
            true => self.beside.add(took),
            false => self.alone = Some(mean(self.alone, took, WEIGHT_ALONE)),
        }
        self.adapt(now);
    }

    /// There is a new connection, perhaps over another network path.
    pub fn connected(&mut self) {
        (self.quickest, self.way) = (None, None);
    }

    /// A chunk has taken `took` from its departure until it was on the destination's disk.
    pub fn carried(&mut self, now: Duration, took: Duration) {
        let took = took.as_secs_f64();
        self.quickest = Some(self.quickest.map_or(took, |quickest| quickest.min(took)));
        self.way = Some(mean(self.way, took, WEIGHT));
        self.adapt(now);
    }

    /// Whether one more chunk may begin beside `copies` and `tenant` that are in flight.
    pub fn allows(&mut self, now: Duration, copies: usize, tenant: usize) -> bool {
        self.adapt(now);
        if now < self.not_before {
            return false;
        }
        let since = |pause: Duration| self.last_chunk.is_none_or(|last| now >= last + pause);
        let is_its_turn = self.chunks == MOST_ONE_BY_ONE || since(WINDOW / self.chunks);
        let may = copies + tenant < self.depth as usize && is_its_turn || copies == 0 && since(FLOOR);
        if may {
            self.most = self.most.max(copies + 1);
        }
        may
    }

    /// A chunk begins.
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
        self.windows += 1;
        let is_judged = self.requests >= FEWEST;
        let is_slower = self.alone.is_some_and(|alone| {
            // The mean is over all requests, including those without a chunk beside them.
            let longer = self.beside.longer(alone) / f64::from(self.requests);
            is_judged && longer > alone * (RATIO - 1.0) + SLACK.as_secs_f64()
        });
        let stands_in_queue = match (self.quickest, self.way) {
            (Some(quickest), Some(way)) => way > quickest * QUEUE_RATIO + QUEUE_SLACK.as_secs_f64(),
            _ => false,
        };
        if stands_in_queue || is_slower && self.most > 1 {
            self.depth = (self.depth / 2).max(1);
        } else if is_slower {
            self.chunks = (self.chunks / 2).max(1);
        } else if self.chunks < MOST_ONE_BY_ONE {
            self.chunks = (self.chunks + 1 + self.chunks / 8).min(MOST_ONE_BY_ONE);
        } else {
            self.depth = (self.depth + 1).min(MAX_DEPTH);
        }
        // The next judgement covers the effect of this one.
        if is_slower || is_judged && self.windows >= TOGETHER {
            (self.requests, self.beside, self.windows, self.most) = (0, Beside::default(), 0, 0);
        }
        self.way = None;
    }
}

/// Latencies in seconds of requests beside chunks.
#[derive(Debug, Clone, Copy, Default)]
struct Beside {
    requests: u32,
    sum: f64,
    squares: f64,
}

impl Beside {
    fn add(&mut self, took: f64) {
        self.requests += 1;
        self.sum += took;
        self.squares += took * took;
    }

    /// Extra time of these requests, in total, over as many that take `alone` each, less the standard error.
    /// Latencies of a disk vary by far more than the effect that is looked for.
    fn longer(&self, alone: f64) -> f64 {
        let requests = f64::from(self.requests.max(1));
        let mean = self.sum / requests;
        let variance = (self.squares / requests - mean * mean).max(0.0);
        self.sum - alone * f64::from(self.requests) - (requests * variance).sqrt()
    }
}

fn mean(before: Option<f64>, sample: f64, weight: f64) -> f64 {
    before.map_or(sample, |before| before + (sample - before) * weight)
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
        // Too few of them are not judged.
        now += WINDOW;
        assert!(pace.allows(now, 1, 0));
        for _ in 0..FEWEST {
            assert!(pace.depth() >= before);
            pace.sample(now, 10 * MS, true);
        }
        pace.sample(now + WINDOW, MS, true);
        assert_eq!(pace.depth(), before.div_ceil(2));
    }

    /// A disk on which a request takes twice as long while a chunk is in flight; a chunk takes a millisecond.
    #[test]
    fn where_one_chunk_at_a_time_is_too_much_there_are_pauses() {
        let mut pace = Pace::default();
        let (mut now, mut under_way_until) = (Duration::ZERO, Duration::ZERO);
        let (mut requests, mut took, mut chunks) = (0, Duration::ZERO, 0);
        while now < 20_000 * MS {
            now += MS / 4;
            let is_beside = now < under_way_until;
            let this = if is_beside { 2 * MS } else { MS };
            pace.sample(now, this, is_beside);
            if !is_beside && pace.allows(now, 0, 3) {
                pace.begun(now, 1);
                under_way_until = now + MS;
                chunks += 1;
            }
            if now > 2_000 * MS {
                (requests, took) = (requests + 1, took + this);
            }
        }
        let mean = took / requests;
        assert!(mean < MS * 11 / 10, "{mean:?}");
        assert!(
            chunks > 2 * 400,
            "more than one in each pause that is always allowed: {chunks}"
        );
    }

    /// Latencies that differ by a factor of a hundred, and have nothing to do with chunks.
    #[test]
    fn chance_does_not_slow_a_copy_down() {
        let mut pace = Pace::default();
        let mut now = Duration::ZERO;
        let mut random = 1u32;
        let mut took = || {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            MS / 10 * 100u32.pow(random >> 31)
        };
        for _ in 0..1000 {
            pace.sample(now, took(), false);
        }
        let mut depths = 0;
        for _ in 0..400 {
            now += WINDOW;
            assert!(pace.allows(now, 1, 0) || pace.depth() == 1);
            for _ in 0..50 {
                pace.sample(now, took(), true);
            }
            depths += pace.depth();
        }
        assert!(depths / 400 > MAX_DEPTH / 2, "{}", depths / 400);
    }

    #[test]
    fn chunks_do_not_stand_in_a_queue() {
        // A way on which each chunk takes a millisecond, one after the other, and two more.
        let mut pace = Pace::default();
        let mut now = Duration::ZERO;
        let mut deepest = 0;
        for _ in 0..200 {
            now += WINDOW;
            pace.carried(now, MS * (2 + pace.depth()));
            deepest = deepest.max(pace.depth());
        }
        assert!((3..=12).contains(&deepest), "{deepest}");
        // A longer way, on which chunks do not wait for each other.
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
