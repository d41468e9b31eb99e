//! Requests that gather.
//!
//! To wake an RNIC that sleeps costs a system call of the program and a change of what the core does. A program that keeps
//! many small requests under way would pay it for each of them, and on few cores it is interrupted each time: it never gets
//! to post a second one. The RNIC need not hear of each, since the next answer wakes it anyway, and what was posted until
//! then leaves in one batch (RFC 896 has the idea; network cards moderate their interrupts so). A message that comes alone
//! must not wait, nor the answer in a dialogue. So requests gather only for a bounded time, only while the queue pair has
//! more than one under way, and only once it has shown that it streams. A context has one flag
//! for all its queue pairs: the requests of its others gather meanwhile, too.

use std::time::Duration;

use verbatim_roce::Time;

/// Requests gather for so long at most. Answers of a partner on the same busy machine take about that long.
pub const GATHER: Duration = Duration::from_micros(50);

/// It takes so many sends in a row,
const SENDS_IN_A_ROW: u8 = 4;

/// each so soon after the last one, with nothing from the partner's program between.
const CLOSE: Duration = Duration::from_micros(200);

/// With so many requests under way there is no doubt.
const MANY: u32 = 8;

/// Whether a queue pair streams.
#[derive(Debug, Default)]
pub struct Stream {
    /// Turns in a row with new requests, close together.
    sends: u8,
    last: Time,
}

/// What a turn did to a queue pair.
#[derive(Debug, Clone, Copy)]
pub struct Turn {
    /// Requests were sent.
    pub sent: bool,
    /// The partner's requests came.
    pub heard: bool,
    /// Requests taken and not completed.
    pub under_way: u32,
}

impl Stream {
    /// A turn has ended: until when the program's requests may gather.
    #[inline]
    pub fn follow(&mut self, now: Time, turn: Turn) -> Option<Time> {
        if turn.heard {
            self.sends = 0;
        }
        if turn.sent {
            self.sends = match now - self.last <= CLOSE {
                true => self.sends.saturating_add(1),
                false => 1,
            };
            self.last = now;
        }
        let streams = turn.under_way >= MANY || (turn.under_way > 1 && self.sends >= SENDS_IN_A_ROW);
        streams.then(|| self.last + GATHER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn turn(sent: bool, heard: bool, under_way: u32) -> Turn {
        Turn {
            sent,
            heard,
            under_way,
        }
    }

    fn at(micros: u64) -> Time {
        Time::from_nanos(1_000_000_000 + micros * 1000)
    }

    #[test]
    fn a_stream_gathers_for_a_bounded_time_after_each_send() {
        let mut stream = Stream::default();
        for send in 1..u64::from(SENDS_IN_A_ROW) {
            assert_eq!(stream.follow(at(40 * send), turn(true, false, 2)), None);
        }
        assert_eq!(
            stream.follow(at(200), turn(true, false, 2)),
            Some(at(200) + GATHER)
        );
        // An answer alone does not make it longer, and nothing is left to wait for when all is answered.
        assert_eq!(
            stream.follow(at(230), turn(false, false, 2)),
            Some(at(200) + GATHER)
        );
        assert_eq!(stream.follow(at(240), turn(false, false, 1)), None);
        assert_eq!(
            stream.follow(at(250), turn(true, false, 2)),
            Some(at(250) + GATHER)
        );
        // After a rest it begins anew.
        assert_eq!(stream.follow(at(1000), turn(true, false, 2)), None);
    }

    #[test]
    fn many_requests_at_once_are_a_stream() {
        let mut stream = Stream::default();
        assert_eq!(stream.follow(at(0), turn(true, true, MANY)), Some(at(0) + GATHER));
    }

    #[test]
    fn a_dialogue_is_none_however_many_messages_an_answer_has() {
        let mut stream = Stream::default();
        for round in 0..100 {
            let begin = 60 * round;
            for message in 0..3 {
                let sent = stream.follow(at(begin + message), turn(true, false, message as u32 + 1));
                assert_eq!(sent, None, "message {message} of round {round}");
            }
            assert_eq!(stream.follow(at(begin + 30), turn(false, true, 0)), None);
        }
    }

    #[test]
    fn who_waits_for_each_request_does_not_stream() {
        let mut stream = Stream::default();
        for send in 0..100 {
            assert_eq!(stream.follow(at(20 * send), turn(true, false, 1)), None);
            assert_eq!(stream.follow(at(20 * send + 10), turn(false, false, 0)), None);
        }
    }
}
