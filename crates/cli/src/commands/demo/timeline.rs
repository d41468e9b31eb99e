//! When the phases of a migration were, on the clock of the sampler.
//!
//! The report has how long each phase took, by the source's agent, but not when. This command hears of each phase when it
//! begins, sooner or later afterwards, the later the busier the machine is. The phases follow each other without a gap, so
//! each of the news gives a guess of when the first phase began, and none of them can be too early: the earliest is the
//! best.

use std::time::Duration;

use serde_json::Value;
use verbatim_report::{Blackout, Phase};

/// The first phase of an attempt.
const FIRST: &str = "PreCopy";
/// The first one of the communication blackout.
const SUSPENDS: &str = "WaitBeforeStop";
/// The first one of the service blackout.
const FREEZES: &str = "DumpOthers";
/// The last one, with which the communication blackout ends.
const LAST: &str = "Replay";

/// The phases that passed, in their order, and both blackouts.
#[derive(Debug, Default, PartialEq)]
pub struct Timeline {
    /// The phases.
    pub phases: Vec<Phase>,
    /// The threads did not run.
    pub service: Blackout,
    /// The connections carried no data.
    pub communication: Blackout,
}

/// From a migration's report and from when this command heard of each phase.
pub fn timeline(report: &Value, heard: &[(String, Duration)]) -> Timeline {
    // An attempt that was given up for another one does not count.
    let begin = heard.iter().rposition(|(name, _)| name == FIRST).unwrap_or(0);
    let heard = &heard[begin..];
    let mut passed = Duration::ZERO;
    let mut starts: Vec<(&str, Duration, Duration)> = Vec::new();
    let mut earliest = None;
    for (name, at) in heard {
        let time = milliseconds(&report["phases_ms"][name]);
        let guess = at.saturating_sub(passed);
        earliest = Some(earliest.map_or(guess, |best: Duration| best.min(guess)));
        starts.push((name, passed, time));
        passed += time;
    }
    let base = earliest.unwrap_or_default();
    let start = |phase: &str| {
        starts
            .iter()
            .find(|(name, ..)| *name == phase)
            .map(|(_, start, time)| (base + *start, *time))
    };

    let service = milliseconds(&report["service_blackout_ms"]);
    let communication = milliseconds(&report["communication_blackout_ms"]);
    // Its end is known better than its beginning: the last changes are sent ahead within the phase that suspends.
    let resumed = start(LAST).map(|(start, time)| (start + time).saturating_sub(communication));
    let suspends = heard
        .iter()
        .position(|(name, _)| name == SUSPENDS)
        .unwrap_or(heard.len());
    Timeline {
        service: Blackout {
            begun: start(FREEZES).map(|(start, _)| start),
            time: service,
        },
        communication: Blackout {
            begun: resumed.or_else(|| start(SUSPENDS).map(|(start, _)| start)),
            time: communication,
        },
        phases: starts
            .iter()
            .enumerate()
            .map(|(index, (name, _, time))| Phase {
                name: (*name).to_owned(),
                time: *time,
                in_blackout: index >= suspends,
            })
            .collect(),
    }
}

/// A JSON number of milliseconds.
pub fn milliseconds(value: &Value) -> Duration {
    Duration::try_from_secs_f64(value.as_f64().unwrap_or_default() / 1e3).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    fn heard(news: &[(&str, u64)]) -> Vec<(String, Duration)> {
        news.iter()
            .map(|(name, at)| ((*name).to_owned(), ms(*at)))
            .collect()
    }

    fn report() -> Value {
        json!({
            "phases_ms": {"PreCopy": 100, "WaitBeforeStop": 10, "DumpOthers": 30, "Replay": 5},
            "service_blackout_ms": 35, "communication_blackout_ms": 43,
        })
    }

    #[test]
    fn the_news_that_came_soonest_sets_the_clock() {
        // Truly PreCopy began at 1000; the news of DumpOthers was the quickest, 1 ms late.
        let news = heard(&[
            ("PreCopy", 1020),
            ("WaitBeforeStop", 1107),
            ("DumpOthers", 1111),
            ("Replay", 1160),
        ]);
        let timeline = timeline(&report(), &news);
        assert_eq!(
            timeline.service,
            Blackout {
                begun: Some(ms(1111)),
                time: ms(35)
            }
        );
        assert_eq!(
            timeline.communication,
            Blackout {
                begun: Some(ms(1146 - 43)),
                time: ms(43)
            }
        );
        let inside: Vec<_> = timeline.phases.iter().map(|phase| phase.in_blackout).collect();
        assert_eq!(inside, [false, true, true, true]);
    }

    #[test]
    fn an_attempt_that_was_given_up_is_left_out() {
        let news = heard(&[
            ("PreCopy", 10),
            ("WaitBeforeStop", 20),
            ("PreCopy", 1000),
            ("WaitBeforeStop", 1100),
        ]);
        let timeline = timeline(&report(), &news);
        assert_eq!(timeline.phases.len(), 2);
        assert_eq!(timeline.communication.begun, Some(ms(1100)));
        assert_eq!(timeline.service.begun, None);
    }

    #[test]
    fn nothing_heard_nothing_placed() {
        let timeline = timeline(&json!({}), &[]);
        assert_eq!(timeline, Timeline::default());
    }
}
