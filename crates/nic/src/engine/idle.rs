//! What to do when there is nothing to do: spin, or sleep at once.
//!
//! Spinning saves the next packet or doorbell a wake-up, and costs nothing on a core that nobody else wants. On a core that
//! somebody wants it is the worst choice: a thread that has yielded is still runnable, so that an arrival does not
//! preempt whoever runs now, and a program that polls its memory keeps the core for a whole slice of the scheduler,
//! milliseconds. A thread that sleeps is woken by the arrival and preempts. So the RNIC looks how long a yield takes: one
//! that lets another run shows that the core is shared, and from then on the RNIC sleeps at once, for a while. The while
//! doubles each time that the next look confirms it.

use std::time::Duration;

use verbatim_roce::Time;

/// A yield that takes longer has let another thread run.
const ALONE: Duration = Duration::from_micros(3);

/// How long a core counts as shared after one look, and after many.
const FIRST_HOLD: Duration = Duration::from_millis(20);
const LONGEST_HOLD: Duration = Duration::from_secs(2);

/// So many short yields in a row show that the core is not shared any more.
const CONVINCING: u32 = 256;

/// What is known of the core.
#[derive(Debug)]
pub struct Idle {
    shared_until: Option<Time>,
    hold: Duration,
    short_yields: u32,
}

impl Default for Idle {
    fn default() -> Self {
        Self {
            shared_until: None,
            hold: FIRST_HOLD,
            short_yields: 0,
        }
    }
}

impl Idle {
    /// Whether to spin, for lack of a competitor.
    pub fn may_spin(&mut self, now: Time) -> bool {
        match self.shared_until {
            Some(until) if now < until => false,
            _ => {
                self.shared_until = None;
                true
            }
        }
    }

    /// A yield began at `before` and has ended at `after`.
    pub fn yielded(&mut self, before: Time, after: Time) {
        if after - before > ALONE {
            self.shared_until = Some(after + self.hold);
            self.hold = (self.hold * 2).min(LONGEST_HOLD);
            self.short_yields = 0;
            return;
        }
        self.short_yields += 1;
        if self.short_yields == CONVINCING {
            self.hold = FIRST_HOLD;
        }
    }
}
