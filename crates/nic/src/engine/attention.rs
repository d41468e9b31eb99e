//! Whether a socket is worth a system call.
//!
//! Under load one call follows the other until nothing is left. A small message that comes alone is the other case: the
//! vain second call after it costs as much as handling it. After a few such messages the second call is left out; if there
//! was more after all, epoll says so at once.

use std::time::Duration;

use verbatim_roce::Time;

/// An arrival of up to so many bytes may be a lone message.
const SMALL_BYTES: usize = 512;

/// So many lone messages in a row, and the next is believed to be one.
const LONE_IN_A_ROW: u8 = 4;

/// A message so soon after the last one is not alone.
const CLOSE: Duration = Duration::from_micros(5);

/// A socket without arrivals is asked so many more times before it is left to epoll, by a loop that does not sleep.
pub const ASKED_AGAIN: u32 = 256;

/// What is known of a socket's arrivals.
#[derive(Debug, Default)]
pub struct Attention {
    /// epoll has announced something, and it has not all been taken.
    readable: bool,
    /// How often it was asked in vain since something came.
    in_vain: u32,
    /// Lone messages in a row.
    lone: u8,
    /// Arrivals taken in this turn.
    taken: u32,
    /// The last of them was small.
    small: bool,
    last: Time,
}

impl Attention {
    /// epoll announces arrivals.
    pub fn announce(&mut self) {
        self.readable = true;
        self.in_vain = 0;
    }

    /// A turn begins: is the socket worth asking? `polls`: the loop would ask in vain rather than sleep.
    #[inline]
    pub fn begin(&mut self, polls: bool) -> bool {
        self.taken = 0;
        self.readable || (polls && self.in_vain < ASKED_AGAIN)
    }

    /// Something was taken; says whether to ask again.
    #[inline]
    pub fn take(&mut self, now: Time, bytes: usize) -> bool {
        self.taken += 1;
        self.in_vain = 0;
        self.small = bytes <= SMALL_BYTES;
        if now - self.last < CLOSE {
            self.lone = 0;
        }
        self.last = now;
        let alone = self.small && self.taken == 1 && self.lone >= LONE_IN_A_ROW;
        self.readable = !alone;
        !alone
    }

    /// Nothing was there.
    #[inline]
    pub fn miss(&mut self) {
        self.readable = false;
        self.in_vain += 1;
        match (self.taken, self.small) {
            (0, _) => {}
            (1, true) => self.lone = self.lone.saturating_add(1),
            _ => self.lone = 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Time {
        Time::from_nanos(micros * 1000)
    }

    /// Has seen lone messages at 100 µs, 200 µs ….
    fn used_to_lone_messages() -> Attention {
        let mut socket = Attention::default();
        for round in 1..=u64::from(LONE_IN_A_ROW) {
            socket.announce();
            assert!(socket.begin(false));
            assert!(socket.take(at(100 * round), 64));
            socket.miss();
            assert!(!socket.begin(false), "left to epoll");
        }
        socket
    }

    #[test]
    fn a_lone_message_is_not_asked_after() {
        let mut socket = used_to_lone_messages();
        socket.announce();
        assert!(socket.begin(false));
        assert!(!socket.take(at(1000), 64));
        assert!(!socket.begin(false));
        assert!(socket.begin(true));
    }

    #[test]
    fn messages_close_together_or_large_are_asked_after() {
        let mut socket = used_to_lone_messages();
        socket.announce();
        socket.begin(false);
        assert!(!socket.take(at(1000), 64));
        socket.announce();
        socket.begin(false);
        assert!(socket.take(at(1002), 64));
        let mut socket = used_to_lone_messages();
        socket.announce();
        socket.begin(false);
        assert!(socket.take(at(1000), 4096));
    }

    #[test]
    fn a_loop_that_polls_gives_up_in_the_end() {
        let mut socket = Attention::default();
        for _ in 0..ASKED_AGAIN {
            assert!(socket.begin(true));
            socket.miss();
        }
        assert!(!socket.begin(true));
        socket.announce();
        assert!(socket.begin(true));
    }
}
