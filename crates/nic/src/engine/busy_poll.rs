//! Staying awake between the bursts of a stream.
//!
//! Whoever sends to an RNIC that sleeps wakes it, and on few processors that is a good part of what sending costs: a fifth was
//! measured. While a large message or many of them arrive, the next burst is microseconds away, and it is cheaper to look
//! for it than to sleep. But whoever looks keeps the core from the program that may wait for just what has come. So the RNIC
//! looks for no longer than a part of the time for which the stream has lasted, and never for long: a message that comes
//! alone is late by that part of its own time at most. (KVM's halt polling weighs the same two things.)

use std::time::Duration;

use verbatim_roce::Time;

/// So many packets in a turn are a burst,
const PACKETS: u64 = 8;

/// or so many bytes: a packet of the largest MTU.
const BYTES: u64 = 4096;

/// What comes so long after the end of the last burst is another stream.
const GAP: Duration = Duration::from_micros(50);

/// The RNIC looks for that part of the time for which the stream has lasted,
const PART: u32 = 8;

/// and for so long at most.
const MOST: Duration = Duration::from_micros(100);

/// Packets, and their bytes.
#[derive(Debug, Default, Clone, Copy)]
pub struct Amount {
    pub packets: u64,
    pub bytes: u64,
}

impl Amount {
    /// Whether it is part of a stream, if it came or went in one turn.
    pub fn is_burst(self) -> bool {
        self.packets >= PACKETS || self.bytes >= BYTES
    }
}

/// The stream that arrives.
#[derive(Debug, Default)]
pub struct BusyPoll {
    /// When its first burst was taken.
    began: Time,
    /// When the latest had been worked off.
    ended: Time,
}

impl BusyPoll {
    /// A turn that began then has received something; `now` is asked after a burst only.
    #[inline]
    pub fn follow(&mut self, began: Time, arrivals: Amount, now: impl FnOnce() -> Time) {
        if !arrivals.is_burst() {
            return;
        }
        if began - self.ended > GAP {
            self.began = began;
        }
        self.ended = now();
    }

    /// Whether to look for the next burst rather than to sleep.
    #[inline]
    pub fn is_on(&self, now: Time) -> bool {
        now - self.ended < ((self.ended - self.began) / PART).min(MOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BURST: Amount = Amount {
        packets: 15,
        bytes: 60_000,
    };

    fn at(micros: u64) -> Time {
        Time::from_nanos(1_000_000_000 + micros * 1000)
    }

    /// Bursts of 10 µs each, every 20 µs, for so long.
    fn stream(micros: u64) -> BusyPoll {
        let mut poll = BusyPoll::default();
        for begin in (0..micros).step_by(20) {
            poll.follow(at(begin), BURST, || at(begin + 10));
        }
        poll
    }

    /// For how many whole µs after `end` the RNIC looks.
    fn looks_for(poll: &BusyPoll, end: u64) -> u64 {
        (0..1000)
            .take_while(|micros| poll.is_on(at(end + micros)))
            .count() as u64
    }

    #[test]
    fn the_longer_a_stream_the_longer_its_next_burst_is_looked_for() {
        assert_eq!(looks_for(&stream(20), 10), 2, "an eighth of 10 µs, rounded up");
        assert_eq!(looks_for(&stream(400), 390), 49);
        assert_eq!(looks_for(&stream(10_000), 9_990), 100);
    }

    #[test]
    fn after_a_rest_it_begins_anew() {
        let mut poll = stream(10_000);
        poll.follow(at(10_050), BURST, || at(10_060));
        assert_eq!(looks_for(&poll, 10_060), 2);
    }

    #[test]
    fn lone_messages_are_no_stream() {
        let mut poll = BusyPoll::default();
        for message in 0..1000 {
            let begin = 20 * message;
            let small = Amount {
                packets: 2,
                bytes: 100,
            };
            poll.follow(at(begin), small, || unreachable!("no clock is read for it"));
            assert!(!poll.is_on(at(begin)));
        }
    }

    #[test]
    fn a_dialogue_of_large_messages_is_late_by_an_eighth_at_most() {
        let mut poll = BusyPoll::default();
        for round in 0..100 {
            let begin = 100 * round;
            poll.follow(at(begin), BURST, || at(begin + 16));
            assert_eq!(looks_for(&poll, begin + 16), 2);
        }
    }
}
