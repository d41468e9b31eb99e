//! Numbers that other RNICs send to because this one has confirmed them.
//!
//! An RNIC that was told that a queue pair names its own sends to that number until it hears otherwise. So the number is given to nobody
//! else before: a queue pair that is destroyed leaves its number here, the other RNICs are told, and each one's word that it has heard
//! takes an end off the list. No I/O here: [`crate::engine`] tells, and says who has heard.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use verbatim_device::control::PeerPair;
use verbatim_roce::Time;

/// Other ends that one queue pair may have named and that have not heard otherwise.
const MOST_OF_NUMBER: usize = 16;

/// Numbers on the list.
const MOST: usize = 1 << 18;

/// The first pause before an RNIC is told again, and the longest.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// A number is kept back for an RNIC that does not answer for so long. Whoever gets it after that is one of all to whom it could go.
const KEPT_BACK: Duration = Duration::from_secs(3600);

#[derive(Debug)]
struct Number {
    ends: Vec<End>,
    /// The queue pair is gone since then.
    gone: Option<Time>,
    /// When the other RNICs are told, and how long after that again.
    due: Option<Time>,
    pause: Duration,
}

/// An end of another RNIC that was told that this one names it.
#[derive(Debug)]
struct End {
    pair: PeerPair,
    /// It was told since that this one does so no more. It may have been confirmed anew after that.
    is_told: bool,
}

/// All numbers that were confirmed to another RNIC.
#[derive(Debug, Default)]
pub struct Named {
    numbers: HashMap<u32, Number>,
    due: BTreeSet<(Time, u32)>,
    gone: usize,
}

impl Named {
    /// This end is about to be confirmed to another RNIC. False: not now, too many others have not heard yet that it names them no more.
    pub fn note(&mut self, pair: PeerPair, now: Time) -> bool {
        let qpn = pair.own.qpn;
        if !self.numbers.contains_key(&qpn) && self.numbers.len() >= MOST {
            return false;
        }
        let number = self.numbers.entry(qpn).or_insert_with(|| Number {
            ends: Vec::new(),
            gone: None,
            due: None,
            pause: FIRST_PAUSE,
        });
        if let Some(end) = number.ends.iter_mut().find(|end| end.pair == pair) {
            end.is_told = false;
            return true;
        }
        if number.ends.len() < MOST_OF_NUMBER {
            number.ends.push(End { pair, is_told: false });
            return true;
        }
        if number.due.is_none() {
            self.schedule(qpn, now);
        }
        false
    }

    /// A queue pair is gone. Says whether its number must be kept back.
    pub fn leave(&mut self, qpn: u32, now: Time) -> bool {
        let Some(number) = self.numbers.get_mut(&qpn) else {
            return false;
        };
        if number.gone.replace(now).is_none() {
            self.gone += 1;
        }
        number.pause = FIRST_PAUSE;
        self.schedule(qpn, now);
        true
    }

    /// A number that was kept back has a queue pair again, which was asked for by that number.
    pub fn take_back(&mut self, qpn: u32) {
        if let Some(number) = self.numbers.get_mut(&qpn)
            && number.gone.take().is_some()
        {
            self.gone -= 1;
        }
    }

    /// When somebody is to be told next.
    #[inline]
    pub fn next(&self) -> Option<Time> {
        self.due.first().map(|(time, _)| *time)
    }

    /// All that were not told are to be told now.
    pub fn begin(&mut self, now: Time) {
        let due: Vec<u32> = std::mem::take(&mut self.due)
            .into_iter()
            .map(|(_, qpn)| qpn)
            .collect();
        for qpn in due {
            if let Some(number) = self.numbers.get_mut(&qpn) {
                (number.due, number.pause) = (None, FIRST_PAUSE);
            }
            self.schedule(qpn, now);
        }
    }

    /// A number whose time has come, and the ends to tell: those that are not `current`, what the queue pair names now. They are told
    /// again unless they are heard of.
    pub fn pop_due(&mut self, now: Time, current: impl FnOnce(u32) -> Option<PeerPair>) -> Option<Told> {
        let (time, qpn) = *self.due.first().filter(|(time, _)| *time <= now)?;
        self.due.remove(&(time, qpn));
        let number = self.numbers.get_mut(&qpn)?;
        number.due = None;
        if number.gone.is_some_and(|gone| now - gone >= KEPT_BACK) {
            tracing::warn!(
                qpn,
                "a number was kept back for another host that has not answered for an hour; it can be given again"
            );
            self.forget(qpn);
            return Some(Told::Free(qpn));
        }
        let current = match number.gone {
            Some(_) => None,
            None => current(qpn),
        };
        let mut tell = Vec::new();
        for end in number.ends.iter_mut().filter(|end| Some(end.pair) != current) {
            end.is_told = true;
            tell.push(end.pair);
        }
        if !tell.is_empty() {
            let pause = number.pause;
            number.pause = (pause * 2).min(LONGEST_PAUSE);
            self.schedule(qpn, now + pause);
        }
        Some(Told::Ends(tell))
    }

    /// An RNIC could not be told: again at that time.
    pub fn schedule(&mut self, qpn: u32, at: Time) {
        let Some(number) = self.numbers.get_mut(&qpn) else {
            return;
        };
        if let Some(due) = number.due.replace(at) {
            self.due.remove(&(due, qpn));
        }
        self.due.insert((at, qpn));
    }

    /// An RNIC has heard that this end names that one no more. Says whether the number need not be kept back any more.
    pub fn heard(&mut self, pair: &PeerPair) -> bool {
        let qpn = pair.own.qpn;
        let Some(number) = self.numbers.get_mut(&qpn) else {
            return false;
        };
        number.ends.retain(|end| end.pair != *pair || !end.is_told);
        if !number.ends.is_empty() {
            return false;
        }
        let was_gone = number.gone.is_some();
        self.forget(qpn);
        was_gone
    }

    fn forget(&mut self, qpn: u32) {
        let Some(number) = self.numbers.remove(&qpn) else {
            return;
        };
        if let Some(due) = number.due {
            self.due.remove(&(due, qpn));
        }
        self.gone -= usize::from(number.gone.is_some());
    }

    /// Gives up the number that was kept back for the longest time, where no other is left.
    pub fn give_up_oldest(&mut self) -> Option<u32> {
        let kept = self
            .numbers
            .iter()
            .filter_map(|(qpn, number)| Some((number.gone?, *qpn)));
        let (_, qpn) = kept.min()?;
        self.forget(qpn);
        Some(qpn)
    }

    /// Numbers that are kept back.
    pub fn kept_back(&self) -> usize {
        self.gone
    }
}

/// What is due for a number.
#[derive(Debug, PartialEq, Eq)]
pub enum Told {
    /// These ends are to be told.
    Ends(Vec<PeerPair>),
    /// It is kept back no longer.
    Free(u32),
}

#[cfg(test)]
mod tests {
    use verbatim_device::control::QpEnd;

    use super::*;

    fn at(seconds: u64) -> Time {
        Time::from_nanos((1000 + seconds) * 1_000_000_000)
    }

    fn pair(own: u32, other: u32) -> PeerPair {
        let end = |host, qpn| QpEnd { gid: [host; 16], qpn };
        PeerPair {
            own: end(1, own),
            other: end(2, other),
        }
    }

    fn due(named: &mut Named, now: Time, current: Option<PeerPair>) -> Option<Told> {
        named.pop_due(now, |_| current)
    }

    #[test]
    fn a_number_is_kept_back_until_each_end_has_heard() {
        let mut named = Named::default();
        assert!(!named.leave(7, at(0)), "nobody was told that it names theirs");
        assert!(named.note(pair(7, 20), at(0)) && named.note(pair(7, 21), at(0)));
        assert_eq!(named.next(), None);
        assert!(named.leave(7, at(1)));
        assert_eq!((named.kept_back(), named.next()), (1, Some(at(1))));
        let both = Told::Ends(vec![pair(7, 20), pair(7, 21)]);
        assert_eq!(due(&mut named, at(1), None), Some(both));
        assert!(!named.heard(&pair(7, 20)));
        assert!(!named.heard(&pair(7, 99)), "never told");
        // Who has not heard is told again, in growing steps.
        assert_eq!(due(&mut named, at(1), None), None);
        for seconds in [2, 4, 8, 16, 32, 62, 92] {
            assert_eq!(named.next(), Some(at(seconds)));
            let one = Told::Ends(vec![pair(7, 21)]);
            assert_eq!(due(&mut named, at(seconds), None), Some(one));
        }
        // And at once when there is a new agent.
        named.begin(at(93));
        assert_eq!(named.next(), Some(at(93)));
        assert!(named.heard(&pair(7, 21)));
        assert_eq!((named.kept_back(), named.next()), (0, None));
    }

    #[test]
    fn a_number_is_given_again_after_an_hour() {
        let mut named = Named::default();
        assert!(named.note(pair(7, 20), at(0)) && named.leave(7, at(0)));
        let mut now = at(0);
        let freed = loop {
            match due(&mut named, now, None) {
                Some(Told::Free(qpn)) => break qpn,
                _ => now = named.next().expect("it is told again"),
            }
        };
        assert!(freed == 7 && now >= at(3600) && now < at(3640));
        assert_eq!((named.kept_back(), named.next()), (0, None));
    }

    #[test]
    fn a_queue_pair_that_names_many_in_turn_waits_until_they_have_heard() {
        let mut named = Named::default();
        for other in 0..MOST_OF_NUMBER as u32 {
            assert!(named.note(pair(7, other), at(0)));
        }
        assert!(named.note(pair(7, 3), at(0)), "it is on the list");
        assert!(!named.note(pair(7, 99), at(0)));
        // It names 3 at present: that one need not hear.
        let Some(Told::Ends(told)) = due(&mut named, at(0), Some(pair(7, 3))) else {
            panic!("nobody is told");
        };
        assert_eq!(told.len(), MOST_OF_NUMBER - 1);
        assert!(!told.contains(&pair(7, 3)));
        assert!(!named.heard(&pair(7, 0)), "the queue pair is there");
        assert!(named.note(pair(7, 99), at(0)));
    }

    #[test]
    fn an_end_that_was_confirmed_anew_has_not_heard() {
        let mut named = Named::default();
        assert!(named.note(pair(7, 20), at(0)) && named.leave(7, at(0)));
        assert!(!named.heard(&pair(7, 20)), "it was not told yet");
        assert!(due(&mut named, at(0), None).is_some());
        // The same two ends are there again, and the word that the other one had heard comes late.
        named.take_back(7);
        assert!(named.note(pair(7, 20), at(1)));
        assert!(!named.heard(&pair(7, 20)));
        assert!(named.leave(7, at(2)), "the other end sends to it");
    }

    #[test]
    fn the_oldest_number_is_given_up_where_no_other_is_left() {
        let mut named = Named::default();
        for (qpn, second) in [(7, 5), (8, 3), (9, 4)] {
            assert!(named.note(pair(qpn, 20), at(0)) && named.leave(qpn, at(second)));
        }
        assert!(named.note(pair(10, 20), at(0)), "a queue pair has it");
        let given_up: Vec<_> = std::iter::from_fn(|| named.give_up_oldest()).collect();
        assert_eq!((given_up, named.kept_back()), (vec![8, 9, 7], 0));
    }

    #[test]
    fn a_number_that_is_asked_for_is_not_kept_back_any_more() {
        let mut named = Named::default();
        assert!(named.note(pair(7, 20), at(0)) && named.leave(7, at(0)));
        assert!(due(&mut named, at(0), None).is_some());
        named.take_back(7);
        assert_eq!(named.kept_back(), 0);
        assert!(!named.heard(&pair(7, 20)), "a queue pair has it");
        assert!(!named.leave(7, at(9)), "nobody names it");
    }
}
