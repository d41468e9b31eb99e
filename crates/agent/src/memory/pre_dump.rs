//! When private memory is sent ahead, and when further pre-dumps are of no use.
//!
//! Each pre-dump of CRIU has what was written since the one before ([`verbatim_container::pre_dump()`]), and the dump in the
//! blackout what was written since the last. Unlike a round of [`super::convergence`] each stops the program for a moment, so
//! that they end earlier.

use std::time::Duration;

use serde::{Serialize, Serializer};

use super::convergence::{Limits, Verdict};
use crate::report::milliseconds;

/// Less private memory than this goes in one piece. A pre-dump stops a small program for some 20 ms, as long as a dump of
/// it does (`bench/run blackout`), and that much memory takes 35 ms of the blackout: less would cost about what it gains.
pub const WORTH_BYTES: u64 = 32 << 20;

/// A pre-dump that has less than this leaves nothing to gain: 4 MiB take 4 ms of the blackout.
const LITTLE_BYTES: u64 = 4 << 20;

/// The most pre-dumps before the pre-setup.
pub const MAX_PRE_DUMPS: usize = 8;

/// One pre-dump.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PreDump {
    /// Memory that was written down and sent.
    pub bytes: u64,
    /// How long it took, sending included.
    #[serde(rename = "ms", serialize_with = "as_milliseconds")]
    pub time: Duration,
    /// How long the program stood still for it; `None` if CRIU did not say.
    #[serde(rename = "frozen_ms", serialize_with = "perhaps_as_milliseconds")]
    pub frozen: Option<Duration>,
}

fn as_milliseconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(milliseconds(*time))
}

fn perhaps_as_milliseconds<S: Serializer>(time: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    time.map(milliseconds).serialize(serializer)
}

/// The pre-dumps so far, each the parent of the next.
#[derive(Debug, Clone, Default)]
pub struct Chain(Vec<PreDump>);

impl Chain {
    /// One more.
    pub fn note(&mut self, pre_dump: PreDump) {
        self.0.push(pre_dump);
    }

    /// All of them.
    pub fn all(&self) -> &[PreDump] {
        &self.0
    }

    /// How much of `private_bytes` the dump is to have: by the last pre-dump, all of it if there is none.
    pub fn left(&self, private_bytes: u64) -> u64 {
        self.0
            .last()
            .map_or(private_bytes, |last| last.bytes.min(private_bytes))
    }

    /// What to do, `elapsed` after the first one began.
    pub fn verdict(&self, limits: &Limits, elapsed: Duration) -> Verdict {
        let Some(last) = self.0.last() else {
            return Verdict::Again;
        };
        if last.bytes < LITTLE_BYTES {
            return Verdict::Converged;
        }
        let before = self.0.len().checked_sub(2).map(|index| self.0[index].bytes);
        let gains = before.is_none_or(|before| last.bytes <= before / 2);
        if !gains || self.0.len() >= MAX_PRE_DUMPS || elapsed >= limits.max_time {
            return Verdict::DoesNotConverge;
        }
        Verdict::Again
    }

    /// Whether another one is worth it before the connections are suspended, `elapsed` after the last one: if the program goes on
    /// writing as it did. Waiting for another migration, say, may have taken long.
    pub fn is_stale(&self, elapsed: Duration) -> bool {
        self.0.last().is_some_and(|last| {
            let rounds = elapsed.as_secs_f64() / last.time.as_secs_f64().max(1e-3);
            last.bytes as f64 * rounds >= LITTLE_BYTES as f64
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(1);

    fn chain(mebibytes: &[u64]) -> Chain {
        let mut chain = Chain::default();
        for mebibytes in mebibytes {
            chain.note(PreDump {
                bytes: mebibytes << 20,
                time: Duration::from_millis(200),
                frozen: Some(Duration::from_micros(12_500)),
            });
        }
        chain
    }

    #[test]
    fn pre_dumps_go_on_while_each_is_half_of_the_one_before_and_not_little() {
        let verdict = |mebibytes: &[u64]| chain(mebibytes).verdict(&Limits::default(), SOON);
        assert_eq!(verdict(&[]), Verdict::Again);
        assert_eq!(verdict(&[64]), Verdict::Again);
        assert_eq!(verdict(&[64, 32]), Verdict::Again);
        assert_eq!(verdict(&[64, 33]), Verdict::DoesNotConverge);
        assert_eq!(verdict(&[64, 4]), Verdict::Again);
        assert_eq!(verdict(&[64, 3]), Verdict::Converged);
    }

    #[test]
    fn their_number_and_time_are_bounded() {
        let halves: Vec<_> = (0..MAX_PRE_DUMPS as u32).map(|step| (4 << 20) >> step).collect();
        let verdict = |count: usize, elapsed| chain(&halves[..count]).verdict(&Limits::default(), elapsed);
        assert_eq!(verdict(MAX_PRE_DUMPS - 1, SOON), Verdict::Again);
        assert_eq!(verdict(MAX_PRE_DUMPS, SOON), Verdict::DoesNotConverge);
        assert_eq!(verdict(1, Limits::default().max_time), Verdict::DoesNotConverge);
    }

    #[test]
    fn the_dump_is_predicted_by_the_last_one() {
        assert_eq!(chain(&[]).left(100 << 20), 100 << 20);
        assert_eq!(chain(&[100, 6]).left(100 << 20), 6 << 20);
        assert_eq!(chain(&[100]).left(50 << 20), 50 << 20);
    }

    #[test]
    fn what_was_written_since_the_last_one_decides_whether_another_is_worth_it() {
        let idle = chain(&[64, 0]);
        assert!(!idle.is_stale(Duration::from_secs(3600)));
        // 1 MiB in each 200 ms.
        let slow = chain(&[64, 1]);
        assert!(!slow.is_stale(Duration::from_millis(700)));
        assert!(slow.is_stale(Duration::from_millis(800)));
        assert!(!Chain::default().is_stale(SOON));
    }

    #[test]
    fn a_report_has_milliseconds() {
        let json = serde_json::to_value(chain(&[1]).all()).unwrap();
        assert_eq!(
            json,
            serde_json::json!([{"bytes": 1 << 20, "ms": 200.0, "frozen_ms": 12.5}])
        );
    }
}
