//! Acknowledgements that travel with the answer.
//!
//! Where two programs answer each other's messages one by one, a packet with nothing but an acknowledgement costs as much as
//! the answer that follows it a few microseconds later. A responder may gather acknowledgements (IBA Vol 1 §9.7.5.1.2), so
//! in such a dialogue this one waits for the answer, for a bounded time. TCP does the same and calls it ping-pong mode.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::Time;

/// So many messages in a row must have been answered in time before an acknowledgement waits; twice as many after each that
/// has waited in vain, up to the largest number.
const ANSWERS_IN_A_ROW: RangeInclusive<u8> = 4..=128;

/// Whether the two programs are in a dialogue.
#[derive(Debug)]
pub(super) struct Dialogue {
    /// Messages in a row that were answered in time.
    answers: u8,
    /// How many it takes.
    needed: u8,
    /// Since when a message waits for the program's answer.
    waiting: Option<Time>,
}

impl Default for Dialogue {
    fn default() -> Dialogue {
        Dialogue {
            answers: 0,
            needed: *ANSWERS_IN_A_ROW.start(),
            waiting: None,
        }
    }
}

impl Dialogue {
    /// A message that asks for an acknowledgement was executed.
    pub fn hear(&mut self, now: Time) {
        // The partner says more before it has heard an answer.
        if self.waiting.is_some() {
            self.answers = 0;
        }
        self.waiting = Some(now);
    }

    /// The program has said something, `patience` being how long it may take to.
    pub fn say(&mut self, now: Time, patience: Duration) {
        let Some(heard) = self.waiting.take() else { return };
        self.answers = match now - heard <= patience {
            true => self.answers.saturating_add(1),
            false => 0,
        };
    }

    /// Until when an acknowledgement may wait for the program's answer.
    pub fn until(&self, patience: Duration) -> Option<Time> {
        let waits = self.answers >= self.needed && !patience.is_zero();
        self.waiting.filter(|_| waits).map(|heard| heard + patience)
    }

    /// No answer has come in time.
    pub fn give_up(&mut self) {
        self.answers = 0;
        self.needed = self.needed.saturating_mul(2).min(*ANSWERS_IN_A_ROW.end());
        self.waiting = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_micros(30);

    fn at(micros: u64) -> Time {
        Time::from_nanos(micros * 1000)
    }

    /// Messages at 100 µs, 200 µs …, each answered after 5 µs.
    fn in_dialogue() -> Dialogue {
        let mut dialogue = Dialogue::default();
        for round in 1..=u64::from(*ANSWERS_IN_A_ROW.start()) {
            dialogue.hear(at(100 * round));
            assert_eq!(dialogue.until(PATIENCE), None);
            dialogue.say(at(100 * round + 5), PATIENCE);
        }
        dialogue
    }

    #[test]
    fn it_takes_several_answers_and_two_messages_end_it() {
        let mut dialogue = in_dialogue();
        dialogue.hear(at(1000));
        assert_eq!(dialogue.until(PATIENCE), Some(at(1030)));
        assert_eq!(dialogue.until(Duration::ZERO), None);
        dialogue.hear(at(1001));
        assert_eq!(dialogue.until(PATIENCE), None);
    }

    #[test]
    fn a_late_answer_ends_it() {
        let mut dialogue = in_dialogue();
        dialogue.hear(at(1000));
        dialogue.say(at(1031), PATIENCE);
        dialogue.hear(at(1100));
        assert_eq!(dialogue.until(PATIENCE), None);
    }

    #[test]
    fn who_has_waited_in_vain_is_slower_to_wait_again() {
        let mut dialogue = Dialogue::default();
        let mut waited = Vec::new();
        for message in 1..200 {
            dialogue.hear(at(100 * message));
            if dialogue.until(PATIENCE).is_some() {
                dialogue.give_up();
                waited.push(message);
            } else {
                dialogue.say(at(100 * message + 5), PATIENCE);
            }
        }
        assert_eq!(waited, [5, 14, 31, 64, 129]);
    }

    #[test]
    fn nothing_waits_without_a_message() {
        let mut dialogue = in_dialogue();
        dialogue.say(at(900), PATIENCE);
        assert_eq!(dialogue.until(PATIENCE), None);
    }
}
