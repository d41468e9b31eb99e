//! How long a virtual machine's processors were taken away from it, which no program in it notices but by the clock.

use std::time::{Duration, Instant};

/// Fields of a processor's line before the one of what was stolen (proc_stat(5)).
const BEFORE: usize = 8;

/// The unit of those fields, `USER_HZ`, is this on all architectures of today.
const TICK: Duration = Duration::from_millis(10);

/// A look at the clocks.
pub struct Stolen {
    at: Instant,
    ticks: Vec<u64>,
}

impl Stolen {
    /// Looks now.
    pub fn now() -> Self {
        Self {
            at: Instant::now(),
            ticks: stolen(&std::fs::read_to_string("/proc/stat").unwrap_or_default()),
        }
    }

    /// Which part of all processors' time was taken since, in percent.
    pub fn percent_since(&self) -> f64 {
        let now = Self::now();
        let taken = now.ticks.iter().zip(&self.ticks);
        let taken: u64 = taken.map(|(now, before)| now.saturating_sub(*before)).sum();
        let all = (now.at - self.at).as_secs_f64() * now.ticks.len() as f64;
        100.0 * TICK.as_secs_f64() * taken as f64 / all.max(TICK.as_secs_f64())
    }

    /// What was taken since, of each processor.
    pub fn since(&self) -> String {
        let now = Self::now();
        let taken = now.ticks.iter().zip(&self.ticks);
        let taken: Vec<_> = taken
            .map(|(now, before)| {
                format!(
                    "{:.1} s",
                    (TICK * now.saturating_sub(*before) as u32).as_secs_f64()
                )
            })
            .collect();
        format!(
            "in {:.1} s the machine was without its processors for {}",
            (now.at - self.at).as_secs_f64(),
            taken.join(", ")
        )
    }
}

/// The ticks stolen from each processor.
fn stolen(stat: &str) -> Vec<u64> {
    let processors = stat
        .lines()
        .filter(|line| line.starts_with("cpu") && !line.starts_with("cpu "));
    processors
        .filter_map(|line| line.split_ascii_whitespace().nth(BEFORE)?.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_stolen_is_found_for_each_processor() {
        let stat =
            "cpu  3 0 3 3 0 0 0 30 0 0\ncpu0 1 0 1 1 0 0 0 10 0 0\ncpu1 2 0 2 2 0 0 0 20 0 0\nintr 7\n";
        assert_eq!(stolen(stat), [10, 20]);
        assert!(stolen("nothing\n").is_empty());
    }
}
