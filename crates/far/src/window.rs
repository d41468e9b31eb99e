//! What is in flight, without I/O: requests complete in the order in which they were posted (IBA Vol 1 §9.7.3.1 for RC).

use std::collections::VecDeque;

/// The requests of one connection.
#[derive(Debug)]
pub struct Window {
    most_bytes: u64,
    most_requests: u32,
    /// Lengths of those in flight, oldest first.
    in_flight: VecDeque<u64>,
    bytes: u64,
    posted: u64,
    done_bytes: u64,
}

impl Window {
    pub fn new(most_bytes: u64, most_requests: u32) -> Self {
        Self {
            most_bytes,
            most_requests: most_requests.max(1),
            in_flight: VecDeque::new(),
            bytes: 0,
            posted: 0,
            done_bytes: 0,
        }
    }

    /// Whether a request of that length may be posted now. One that is longer than the window goes alone.
    pub fn has_room(&self, length: u64) -> bool {
        self.in_flight.is_empty()
            || self.in_flight.len() < self.most_requests as usize && self.bytes + length <= self.most_bytes
    }

    /// A request was posted; its number, from 1 on.
    pub fn posted(&mut self, length: u64) -> u64 {
        self.in_flight.push_back(length);
        self.bytes += length;
        self.posted += 1;
        self.posted
    }

    /// The oldest has completed; its length, `None` if there is none.
    pub fn completed(&mut self) -> Option<u64> {
        let length = self.in_flight.pop_front()?;
        self.bytes -= length;
        self.done_bytes += length;
        Some(length)
    }

    /// How many were posted.
    pub fn count(&self) -> u64 {
        self.posted
    }

    /// How many have completed: all with numbers up to this.
    pub fn done(&self) -> u64 {
        self.posted - self.in_flight.len() as u64
    }

    /// The bytes of those.
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes
    }

    /// The length of the oldest in flight.
    pub fn oldest(&self) -> Option<u64> {
        self.in_flight.front().copied()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_request_longer_than_the_window_goes_alone() {
        let mut window = Window::new(10, 4);
        assert!(window.has_room(100));
        window.posted(100);
        assert!(!window.has_room(0) || window.oldest() != Some(100));
        assert_eq!(window.completed(), Some(100));
        assert!(window.has_room(4));
        window.posted(4);
        assert!(window.has_room(6) && !window.has_room(7));
    }

    proptest! {
        #[test]
        fn no_more_is_in_flight_than_may_be(steps in prop::collection::vec((any::<bool>(), 0u64..2000), 1..200)) {
            let mut window = Window::new(4096, 7);
            let (mut posted, mut done, mut bytes) = (0, 0, 0);
            for (post, length) in steps {
                if post {
                    if window.has_room(length) {
                        posted += 1;
                        prop_assert_eq!(window.posted(length), posted);
                    }
                } else if let Some(length) = window.completed() {
                    done += 1;
                    bytes += length;
                }
                let in_flight: u64 = window.in_flight.iter().sum();
                prop_assert!(in_flight <= 4096 && posted - done <= 7);
                prop_assert_eq!((window.done(), window.done_bytes(), window.count()), (done, bytes, posted));
            }
        }
    }
}
