//! How often something may be asked for.

use std::time::{Duration, Instant};

use crate::quotas::{RESOLVES, RESOLVES_PER_SECOND};

/// Nobody waits longer: a guest library gives up after a minute.
const PATIENCE: Duration = Duration::from_secs(30);

/// Questions of one tenant. Each takes a while to be forgotten; [`RESOLVES`] may be remembered, and more wait.
#[derive(Debug, Default)]
pub struct Rate {
    /// When all are forgotten.
    empty_at: Option<Instant>,
}

impl Rate {
    /// One more. How long it has to wait; `None` if that would be too long, and it does not count.
    pub fn take(&mut self, now: Instant) -> Option<Duration> {
        let each = Duration::from_secs(1) / RESOLVES_PER_SECOND;
        let empty_at = self.empty_at.filter(|at| *at > now).unwrap_or(now) + each;
        let wait = (empty_at - now).saturating_sub(each * RESOLVES);
        if wait > PATIENCE {
            return None;
        }
        self.empty_at = Some(empty_at);
        Some(wait)
    }

    /// Whether all are forgotten.
    pub fn is_forgotten(&self, now: Instant) -> bool {
        self.empty_at.is_none_or(|at| at <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_may_ask_at_once_and_more_wait_and_too_many_are_refused() {
        let (mut rate, now) = (Rate::default(), Instant::now());
        for _ in 0..RESOLVES {
            assert_eq!(rate.take(now), Some(Duration::ZERO));
        }
        assert!(!rate.is_forgotten(now));
        let mut waits = 0;
        let mut last = Duration::ZERO;
        while let Some(wait) = rate.take(now) {
            assert!(wait > last);
            (waits, last) = (waits + 1, wait);
        }
        let most = PATIENCE.as_secs() as u32 * RESOLVES_PER_SECOND;
        assert!((most..=most + 1).contains(&waits), "{waits}");
        // What waits has been counted, and nothing else.
        let later = now + PATIENCE + Duration::from_secs(1);
        assert_eq!(rate.take(later), Some(Duration::ZERO));
        let forgotten = Duration::from_secs(1) / RESOLVES_PER_SECOND * (RESOLVES + 2);
        assert!(rate.is_forgotten(later + forgotten));
        for _ in 0..RESOLVES {
            assert_eq!(rate.take(later + forgotten), Some(Duration::ZERO));
        }
    }
}
