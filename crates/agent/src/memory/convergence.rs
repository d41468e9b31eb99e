//! When pre-copy has done what it can.
//!
//! Each round sends what was written since the one before. While the instance is frozen one more is needed, which takes
//! about as long as the last: the same memory is read, and about as much of it was written meanwhile. With what CRIU needs that
//! is the prediction of the service blackout, to which a limit can be set.

use std::time::Duration;

use serde::Serialize;

use crate::report::milliseconds;

/// A round that sends less than this leaves nothing to gain.
const LITTLE_BYTES: u64 = 1 << 20;

/// The most rounds.
pub const MAX_ROUNDS: usize = 30;

/// With a limit of the blackout, further rounds are tried as long as one of so many sends a tenth less.
const PATIENCE_ROUNDS: usize = 4;

/// What the service blackout has beside memory: CRIU's dump and restore of a small program (`bench/run blackout`).
const FIXED: Duration = Duration::from_millis(50);

/// Private memory goes through CRIU's images while the instance is frozen: 1 GiB in 1.2 s.
const IMAGE_BYTES_PER_SECOND: f64 = 0.9e9;

/// Shared memory is written page by page through a pipe, and read back likewise: 256 MiB in 1.3 to 2.1 s.
const SHARED_BYTES_PER_SECOND: f64 = 0.16e9;

/// How long an instance stands still for so many bytes of shared memory that no round sends.
pub fn time_of_shared(bytes: u64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / SHARED_BYTES_PER_SECOND)
}

/// What the operator asks of pre-copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The longest service blackout, by prediction.
    pub max_blackout: Option<Duration>,
    /// How long rounds may go on; looked at after each.
    pub max_time: Duration,
    /// Rather roll back than exceed `max_blackout`.
    pub strict: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_blackout: None,
            max_time: Duration::from_secs(300),
            strict: false,
        }
    }
}

/// One round.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Round {
    /// What it sent.
    pub bytes: u64,
    /// How long it took.
    #[serde(rename = "ms", serialize_with = "as_milliseconds")]
    pub time: Duration,
}

fn as_milliseconds<S: serde::Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(milliseconds(*time))
}

/// What to do after a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Another round is worth it.
    Again,
    /// Nothing is left to gain, or the limit is kept.
    Converged,
    /// The program writes too fast for more rounds to help, or there were too many, or they took too long.
    DoesNotConverge,
}

/// The rounds so far.
#[derive(Debug, Clone, Default)]
pub struct Convergence {
    rounds: Vec<Round>,
    /// Private memory that is left for the blackout.
    private_bytes: u64,
    /// Shared memory that is left for the blackout.
    shared_bytes: u64,
    /// How long the last look at private memory takes, if nothing of it is left.
    look_time: Duration,
}

impl Convergence {
    /// One more round, and how much private memory is left for the blackout now.
    pub fn note(&mut self, round: Round, private_bytes: u64) {
        self.rounds.push(round);
        self.private_bytes = private_bytes;
    }

    /// So much shared memory goes with CRIU's dump.
    pub fn shares(&mut self, bytes: u64) {
        self.shared_bytes = bytes;
    }

    /// Shared memory that goes with CRIU's dump, in bytes.
    pub fn shared_bytes(&self) -> u64 {
        self.shared_bytes
    }

    /// Each look at private memory takes so long, whatever it finds.
    pub fn looks_for(&mut self, time: Duration) {
        self.look_time = time;
    }

    /// All rounds.
    pub fn rounds(&self) -> &[Round] {
        &self.rounds
    }

    /// Memory that goes with CRIU's dump, in bytes.
    pub fn private_bytes(&self) -> u64 {
        self.private_bytes
    }

    /// What the last round sent.
    pub fn dirty_bytes(&self) -> u64 {
        self.rounds.last().map_or(0, |round| round.bytes)
    }

    /// By the round that sent most: that measures the way, reading included.
    pub fn bytes_per_second(&self) -> f64 {
        let largest = self.rounds.iter().max_by_key(|round| round.bytes);
        largest.map_or(0.0, |round| {
            round.bytes as f64 / round.time.as_secs_f64().max(1e-6)
        })
    }

    /// The service blackout if the instance were frozen now; `None` before the first round.
    pub fn predicted_blackout(&self) -> Option<Duration> {
        let last = self.rounds.last()?;
        let images = Duration::from_secs_f64(self.private_bytes as f64 / IMAGE_BYTES_PER_SECOND);
        Some(FIXED + images + time_of_shared(self.shared_bytes) + self.look_time + last.time)
    }

    /// By how much the prediction is more than asked for.
    pub fn exceeds(&self, limits: &Limits) -> Option<Duration> {
        let excess = self.predicted_blackout()?.saturating_sub(limits.max_blackout?);
        (!excess.is_zero()).then_some(excess)
    }

    /// What to do, `elapsed` after the first round began.
    pub fn verdict(&self, limits: &Limits, elapsed: Duration) -> Verdict {
        let Some(last) = self.rounds.last() else {
            return Verdict::Again;
        };
        let fits = self.exceeds(limits).is_none();
        if fits && (last.bytes < LITTLE_BYTES || limits.max_blackout.is_some()) {
            return Verdict::Converged;
        }
        let over = self.rounds.len() >= MAX_ROUNDS || elapsed >= limits.max_time;
        if over || last.bytes < LITTLE_BYTES || !self.gains(limits) {
            return Verdict::DoesNotConverge;
        }
        Verdict::Again
    }

    /// Whether rounds become smaller.
    fn gains(&self, limits: &Limits) -> bool {
        let before = |rounds: usize| {
            let index = self.rounds.len().checked_sub(rounds + 1)?;
            Some(self.rounds.get(index)?.bytes)
        };
        let last = self.dirty_bytes();
        match limits.max_blackout {
            None => before(1).is_none_or(|before| last <= before / 2),
            Some(_) => before(PATIENCE_ROUNDS).is_none_or(|before| last <= before / 10 * 9),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(rounds: &[(u64, u64)]) -> Convergence {
        let mut convergence = Convergence::default();
        for (mebibytes, ms) in rounds {
            convergence.note(
                Round {
                    bytes: mebibytes << 20,
                    time: Duration::from_millis(*ms),
                },
                0,
            );
        }
        convergence
    }

    fn limits(ms: u64) -> Limits {
        Limits {
            max_blackout: Some(Duration::from_millis(ms)),
            ..Limits::default()
        }
    }

    const SOON: Duration = Duration::from_secs(1);

    #[test]
    fn without_a_limit_rounds_go_on_while_each_is_half_of_the_one_before() {
        let verdict = |rounds: &[(u64, u64)]| after(rounds).verdict(&Limits::default(), SOON);
        assert_eq!(verdict(&[]), Verdict::Again);
        assert_eq!(verdict(&[(1000, 1000)]), Verdict::Again);
        assert_eq!(verdict(&[(1000, 1000), (500, 500)]), Verdict::Again);
        assert_eq!(verdict(&[(1000, 1000), (501, 500)]), Verdict::DoesNotConverge);
        assert_eq!(verdict(&[(1000, 1000), (0, 300)]), Verdict::Converged);
    }

    #[test]
    fn with_a_limit_they_end_when_it_is_kept() {
        let first = after(&[(1000, 1000)]);
        assert_eq!(first.predicted_blackout(), Some(Duration::from_millis(1050)));
        assert_eq!(first.verdict(&limits(1050), SOON), Verdict::Converged);
        assert_eq!(first.verdict(&limits(1049), SOON), Verdict::Again);
        assert_eq!(first.exceeds(&limits(1000)), Some(Duration::from_millis(50)));
        // The program writes as much as ever: not given up at once, since that may pass.
        let busy: Vec<_> = (0..PATIENCE_ROUNDS).map(|_| (900, 900)).collect();
        assert_eq!(after(&busy).verdict(&limits(100), SOON), Verdict::Again);
        let busy: Vec<_> = (0..=PATIENCE_ROUNDS).map(|_| (900, 900)).collect();
        assert_eq!(after(&busy).verdict(&limits(100), SOON), Verdict::DoesNotConverge);
    }

    #[test]
    fn rounds_and_time_are_bounded() {
        let rounds: Vec<_> = (0..MAX_ROUNDS as u64)
            .map(|round| (9000 - round * 250, 900))
            .collect();
        let (less, all) = (after(&rounds[..MAX_ROUNDS - 1]), after(&rounds));
        assert_eq!(less.verdict(&limits(100), SOON), Verdict::Again);
        assert_eq!(all.verdict(&limits(100), SOON), Verdict::DoesNotConverge);
        let late = Limits::default().max_time;
        assert_eq!(less.verdict(&limits(100), late), Verdict::DoesNotConverge);
    }

    #[test]
    fn what_no_round_sends_is_told_and_no_reason_for_more_rounds() {
        let mut convergence = after(&[(100, 100)]);
        convergence.note(
            Round {
                bytes: 0,
                time: Duration::from_millis(10),
            },
            900_000_000,
        );
        let second = Duration::from_millis(1060);
        assert_eq!(convergence.predicted_blackout(), Some(second));
        assert_eq!(convergence.verdict(&limits(500), SOON), Verdict::DoesNotConverge);
        assert_eq!(convergence.verdict(&Limits::default(), SOON), Verdict::Converged);
        assert!((convergence.bytes_per_second() - 1048.576e6).abs() < 1.0);
    }

    #[test]
    fn shared_memory_is_part_of_the_prediction_and_no_reason_for_more_rounds() {
        let mut convergence = after(&[(0, 10)]);
        convergence.shares(160_000_000);
        assert_eq!(
            convergence.predicted_blackout(),
            Some(Duration::from_millis(1060))
        );
        assert_eq!(
            convergence.exceeds(&limits(1000)),
            Some(Duration::from_millis(60))
        );
        assert_eq!(convergence.verdict(&limits(1000), SOON), Verdict::DoesNotConverge);
        assert_eq!(convergence.verdict(&limits(1060), SOON), Verdict::Converged);
    }
}
