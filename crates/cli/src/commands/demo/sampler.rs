//! Reads a byte counter every 5 ms in a thread of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use verbatim_report::Trace;

/// The distance of two readings.
pub const INTERVAL: Duration = Duration::from_millis(5);
/// The thread's niceness: it runs for microseconds, and all cores are busy while it measures. Taken where it is allowed.
const NICENESS: i32 = -15;
/// How many readings make up the rate that is told meanwhile.
const TELL: usize = 50;

/// A running sampler.
pub struct Sampler {
    begun: Instant,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Trace>,
}

impl Sampler {
    /// Starts to read `counter`, and to tell the rate in bits per second every now and then.
    pub fn start(
        counter: impl Fn() -> u64 + Send + 'static,
        tell: impl Fn(f64) + Send + 'static,
    ) -> anyhow::Result<Self> {
        let begun = Instant::now();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("sampler".to_owned())
            .spawn(move || sample(begun, &stopped, &counter, &tell))
            .context("cannot start the sampler")?;
        Ok(Self { begun, stop, thread })
    }

    /// The beginning of the trace's clock.
    pub fn begun(&self) -> Instant {
        self.begun
    }

    /// Ends it.
    pub fn finish(self) -> Trace {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

fn sample(begun: Instant, stop: &AtomicBool, counter: &impl Fn() -> u64, tell: &impl Fn(f64)) -> Trace {
    // On Linux it holds for the calling thread alone: setpriority(2), "C library/kernel differences".
    let _ = rustix::process::setpriority_process(None, NICENESS);
    let mut trace = Trace::default();
    let mut told = (Duration::ZERO, counter());
    let mut due = begun;
    while !stop.load(Ordering::Relaxed) {
        // The time is that of the reading, however late the thread was woken; the next one is due as planned.
        let bytes = counter();
        let at = begun.elapsed();
        trace.push(at, bytes);
        if trace.len().is_multiple_of(TELL) {
            tell(bytes.saturating_sub(told.1) as f64 * 8.0 / (at - told.0).as_secs_f64());
            told = (at, bytes);
        }
        while due <= Instant::now() {
            due += INTERVAL;
        }
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    trace
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;
    use std::sync::mpsc;

    #[test]
    fn readings_are_of_the_counter_and_the_rate_is_told() {
        let counter = AtomicU64::new(0);
        let (sender, rates) = mpsc::channel();
        let sampler = Sampler::start(
            move || counter.fetch_add(1000, Ordering::Relaxed),
            move |rate| sender.send(rate).unwrap_or_default(),
        )
        .unwrap();
        let rate = rates.recv().unwrap();
        let trace = sampler.finish();
        assert!(
            rate > 0.0 && rate <= 1000.0 * 8.0 / INTERVAL.as_secs_f64() * 2.0,
            "{rate}"
        );
        assert!(trace.len() >= TELL);
        assert!(trace.rates(0.0, 1e9).iter().all(|rate| rate.bits > 0.0));
    }
}
