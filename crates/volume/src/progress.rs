//! Progress of a copy. A copy without progress may go on forever, so a lack of progress is reported.

use std::time::Duration;

use verbatim_mirror::{Link, Status};

/// Time without progress before it is reported.
const LONG: Duration = Duration::from_secs(15);

/// Time between two reports.
const AGAIN: Duration = Duration::from_secs(60);

/// Observations of a copy, by a monotonic clock.
#[derive(Debug, Default)]
pub struct Progress {
    /// The least number of bytes lacking so far.
    least: Option<u64>,
    interruptions: u32,
    since: Duration,
    said: Option<Duration>,
}

impl Progress {
    /// Looks at it. Returns whether a lack of progress has to be reported now.
    pub fn look(&mut self, now: Duration, status: &Status) -> bool {
        let lacking = status.lacking_bytes;
        match self.least {
            None => (self.least, self.interruptions, self.since) = (Some(lacking), status.interruptions, now),
            // Everything is compared again.
            Some(_) if self.interruptions != status.interruptions => {
                (self.least, self.interruptions) = (Some(lacking), status.interruptions);
            }
            Some(least) if lacking < least => {
                (self.least, self.since, self.said) = (Some(lacking), now, None);
            }
            Some(_) => {}
        }
        let is_due = self.said.is_none_or(|said| now - said >= AGAIN);
        let says = now - self.since >= LONG && is_due;
        if says {
            self.said = Some(now);
        }
        says
    }

    /// The reason why it makes no progress, if it does not.
    pub fn stalled(&self, now: Duration, status: &Status) -> Option<String> {
        let long = now.saturating_sub(self.since);
        if self.least.is_none() || long < LONG {
            return None;
        }
        let lacking = status.lacking_bytes as f64 / f64::from(1 << 20);
        let why = match status.link {
            Link::Up if status.is_mirrored => {
                "the destination has everything, and its clients leave no moment in which it could be held"
                    .to_owned()
            }
            Link::Up => format!(
                "{lacking:.1} MiB are lacking, and its clients, or the disks, leave the copy no room: let them do less, or give it up"
            ),
            Link::Slow => format!(
                "{lacking:.1} MiB are lacking, and the destination does not answer in time: look after its disk"
            ),
            Link::Down => format!(
                "{lacking:.1} MiB are lacking, and the destination does not answer: there is no connection to it"
            ),
        };
        Some(format!(
            "the copy has come no further for {} s: {why}",
            long.as_secs()
        ))
    }
}

#[cfg(test)]
mod tests {
    use verbatim_mirror::Pointers;

    use super::*;

    fn status(lacking_bytes: u64, interruptions: u32) -> Status {
        Status {
            link: Link::Up,
            is_mirrored: lacking_bytes == 0,
            passes: 1,
            pointers: Pointers {
                read_head: 0,
                read_tail: 0,
                write_head: 0,
                write_tail: 0,
            },
            lacking_bytes,
            copied_bytes: 0,
            interruptions,
            depth: 1,
        }
    }

    #[test]
    fn a_copy_that_comes_no_further_is_told_of_now_and_then() {
        let mut progress = Progress::default();
        let at = Duration::from_secs;
        let mut said = Vec::new();
        // The number falls, then only goes up and down, also after an interruption, and falls again at last.
        for second in 0..200 {
            let lacking = match second {
                0..10 => 1_000 - 10 * second,
                10..180 => 910 + second % 7,
                _ => 900 - second,
            };
            let status = status(lacking, u32::from(second >= 49));
            if progress.look(at(second), &status) {
                said.push(second);
            }
            let is_stalled = progress.stalled(at(second), &status).is_some();
            assert_eq!(is_stalled, (24..180).contains(&second), "{second}");
        }
        assert_eq!(said, [24, 84, 144]);
    }

    #[test]
    fn one_that_cannot_be_held_is_told_of_as_well() {
        let mut progress = Progress::default();
        let done = status(0, 0);
        assert!(!progress.look(Duration::ZERO, &done));
        assert!(progress.look(LONG, &done));
        let why = progress.stalled(LONG, &done).expect("it is stalled");
        assert!(why.contains("15 s") && why.contains("no moment"), "{why}");
    }
}
