//! Who transmits next: a line of users' queue pairs, and one of those in the background.
//!
//! In each turn of the loop users' queue pairs transmit one after the other, and then at most one in the background, few
//! packets, so that the next doorbell of a user is seen soon. It transmits only if all of this holds:
//!
//! - no user's queue pair waits for its turn, or could not send what it had;
//! - all that has arrived was taken;
//! - for [`QUIET`] no burst of a user's has come or gone. A stream that waits for its next acknowledgement is not over: what
//!   is sent into such a gap keeps the partner from the stream. A lone small message holds nobody up.
//!
//! A user's stream also pauses where its partner waits for a core. What is sent then lies before the stream when the partner goes on. So for
//! [`BESIDE`] after a user's last burst no queue pair in the background has more under way than [`WINDOW_BESIDE_BYTES`].
//!
//! The class is of the queue pair that sends, so answers of one in the background wait, too: who streams to a host that is busy
//! with users' traffic is acknowledged slowly, and slows down. But a connection must not fail because one end waits in
//! line. So whoever has waited for [`STARVED`] has its turn before users do. The partner gives up after its ACK timeout at the earliest,
//! of which a software RNIC makes 50 ms or more (`MIN_ACK_TIMEOUT`), times its retries.

use std::collections::VecDeque;
use std::time::Duration;

use verbatim_device::control::QpClass;
use verbatim_roce::Time;

use super::busy_poll::Amount;

/// The background is quiet for so long after a burst of a user's.
const QUIET: Duration = Duration::from_micros(100);

/// Users that had a burst so recently may have the next one soon.
const BESIDE: Duration = Duration::from_millis(5);

/// What one in the background may have under way beside users: two turns' packets of the largest MTU.
const WINDOW_BESIDE_BYTES: u32 = 64 << 10;

/// One in the background that has waited so long has its turn. If several have, they do one by one, in a turn of the loop each.
pub const STARVED: Duration = Duration::from_millis(5);

/// Packets of a user's queue pair before the next has its turn: two full batches of the largest MTU.
const USER_PACKETS: usize = 32;

/// The same in the background: some 20 µs of work.
const BACKGROUND_PACKETS: usize = 8;

/// The same where no user has sent or received anything for [`BESIDE`]: two full batches of MTU 4096, some 60 µs of work. Half a
/// batch costs nearly as much processor time as a whole one.
const ALONE_PACKETS: usize = 30;

/// A queue pair's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    pub qpn: u32,
    /// The line that it stood in.
    pub class: QpClass,
    /// How many packets it may send.
    pub packets: usize,
    /// It has waited for too long to care for users.
    pub starved: bool,
    /// Since when it has waited.
    since: Time,
}

/// The two lines. A queue pair knows in which it is (`QueuePair::line`); a number that stands in another is out of date, and passed
/// over by whoever takes it.
#[derive(Debug, Default)]
pub struct Lineup {
    users: VecDeque<u32>,
    /// With the time at which each began to wait, the earliest first.
    background: VecDeque<(Time, u32)>,
    /// What users' queue pairs have sent and received in this turn of the loop.
    of_users: Amount,
    quiet_until: Time,
    /// From then on those in the background are alone.
    alone_from: Time,
    /// One in the background had its turn in this turn of the loop.
    served: bool,
}

impl Lineup {
    /// A turn of the loop begins.
    #[inline]
    pub fn begin(&mut self) {
        self.of_users = Amount::default();
        self.served = false;
    }

    /// A turn of the loop that began at `begun` has ended; `now` is asked after a burst only.
    #[inline]
    pub fn end(&mut self, begun: Time, now: impl FnOnce() -> Time) {
        if self.of_users.packets > 0 {
            self.alone_from = begun + BESIDE;
        }
        if self.of_users.is_burst() {
            self.quiet_until = now() + QUIET;
        }
    }

    /// A queue pair has sent or received something.
    #[inline]
    pub fn note(&mut self, class: QpClass, packets: usize, bytes: usize) {
        if class == QpClass::User {
            self.of_users.packets += packets as u64;
            self.of_users.bytes += bytes as u64;
        }
    }

    /// A queue pair may have something to send: it goes to the end of its line, unless it is in there.
    #[inline]
    pub fn join(&mut self, qpn: u32, line: &mut Option<QpClass>, class: QpClass, now: Time) {
        if *line == Some(class) {
            return;
        }
        if line.is_some() {
            self.forget(qpn);
        }
        *line = Some(class);
        match class {
            QpClass::User => self.users.push_back(qpn),
            QpClass::Background => self.background.push_back((now, qpn)),
        }
    }

    /// It has another class now.
    #[cold]
    fn forget(&mut self, qpn: u32) {
        self.users.retain(|other| *other != qpn);
        self.background.retain(|(_, other)| *other != qpn);
    }

    /// Whose turn it is. `all`: all that has arrived was taken.
    #[inline]
    pub fn take(&mut self, now: Time, all: bool) -> Option<Turn> {
        let first = self.background.front().filter(|_| !self.served);
        let starved = first.is_some_and(|(since, _)| *since + STARVED <= now);
        if let Some(qpn) = self.users.front().copied().filter(|_| !starved) {
            self.users.pop_front();
            return Some(Turn {
                qpn,
                class: QpClass::User,
                packets: USER_PACKETS,
                starved,
                since: now,
            });
        }
        let (since, qpn) = *first?;
        let quiet = all && !self.of_users.is_burst() && self.quiet_until <= now;
        if !(starved || quiet) {
            return None;
        }
        self.background.pop_front();
        self.served = true;
        Some(Turn {
            qpn,
            class: QpClass::Background,
            packets: match !starved && self.of_users.packets == 0 && self.alone_from <= now {
                true => ALONE_PACKETS,
                false => BACKGROUND_PACKETS,
            },
            starved,
            since,
        })
    }

    /// It could not send: its turn comes again.
    pub fn put_back(&mut self, turn: Turn) {
        match turn.class {
            QpClass::User => self.users.push_front(turn.qpn),
            QpClass::Background => self.background.push_front((turn.since, turn.qpn)),
        }
    }

    /// It has more to send than one turn is for.
    #[inline]
    pub fn queue_again(&mut self, turn: Turn, now: Time) {
        match turn.class {
            QpClass::User => self.users.push_back(turn.qpn),
            QpClass::Background => self.background.push_back((now, turn.qpn)),
        }
    }

    /// The most bytes that a queue pair may have under way, of those that are its share.
    #[inline]
    pub fn window(&self, class: QpClass, share_bytes: u32, now: Time) -> u32 {
        let beside = self.of_users.is_burst() || now < self.quiet_until + BESIDE;
        match class {
            QpClass::Background if beside => share_bytes.min(WINDOW_BESIDE_BYTES),
            QpClass::User | QpClass::Background => share_bytes,
        }
    }

    /// When somebody's turn comes if nothing happens before; a time that has passed if it has come.
    #[inline]
    pub fn next(&self) -> Option<Time> {
        if !self.users.is_empty() {
            return Some(Time::ZERO);
        }
        let (since, _) = self.background.front()?;
        Some((*since + STARVED).min(self.quiet_until))
    }

    /// Those that wait in the background.
    pub fn in_background(&self) -> impl Iterator<Item = u32> {
        self.background.iter().map(|(_, qpn)| *qpn)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const USER: QpClass = QpClass::User;
    const BACKGROUND: QpClass = QpClass::Background;

    fn at(micros: u64) -> Time {
        Time::from_nanos(1_000_000_000 + micros * 1000)
    }

    /// A turn of the loop: the queue pairs that have their turns, each with nothing left to send.
    fn turn(lineup: &mut Lineup, micros: u64) -> Vec<u32> {
        lineup.begin();
        let taken = std::iter::from_fn(|| lineup.take(at(micros), true));
        taken.map(|turn| turn.qpn).collect()
    }

    fn join(lineup: &mut Lineup, qpn: u32, class: QpClass, micros: u64) {
        lineup.join(qpn, &mut None, class, at(micros));
    }

    #[test]
    fn users_go_first_and_the_background_one_by_one() {
        let mut lineup = Lineup::default();
        for (qpn, class) in [(1, BACKGROUND), (2, USER), (3, BACKGROUND), (4, USER)] {
            join(&mut lineup, qpn, class, 0);
        }
        assert_eq!(turn(&mut lineup, 1), [2, 4, 1]);
        assert_eq!(turn(&mut lineup, 2), [3]);
        assert_eq!((turn(&mut lineup, 3), lineup.next()), (vec![], None));
    }

    #[test]
    fn a_burst_of_users_keeps_the_background_quiet_for_a_while() {
        let quiet = QUIET.as_micros() as u64;
        let mut lineup = Lineup::default();
        join(&mut lineup, 1, BACKGROUND, 0);
        lineup.begin();
        lineup.note(USER, 1, 64);
        lineup.note(BACKGROUND, 100, 1 << 20);
        lineup.note(USER, 2, 4096);
        assert_eq!(lineup.take(at(0), true), None, "in the turn of the burst itself");
        lineup.end(at(0), || at(10));
        assert_eq!(lineup.next(), Some(at(10) + QUIET));
        assert_eq!(turn(&mut lineup, 9 + quiet), []);
        assert_eq!(turn(&mut lineup, 10 + quiet), [1]);
        // A lone message holds nobody up.
        join(&mut lineup, 1, BACKGROUND, 1000);
        lineup.begin();
        lineup.note(USER, 1, 64);
        assert!(lineup.take(at(1000), true).is_some());
        lineup.end(at(1000), || unreachable!("no clock is read for it"));
    }

    #[test]
    fn the_background_waits_until_all_that_has_arrived_was_taken() {
        let mut lineup = Lineup::default();
        join(&mut lineup, 1, BACKGROUND, 0);
        lineup.begin();
        assert_eq!(lineup.take(at(1), false), None);
        assert!(lineup.take(at(1), true).is_some());
    }

    #[test]
    fn who_has_waited_too_long_goes_before_users() {
        let starved = STARVED.as_micros() as u64;
        let mut lineup = Lineup::default();
        join(&mut lineup, 1, BACKGROUND, 0);
        join(&mut lineup, 2, BACKGROUND, 1);
        for micros in (0..starved).step_by(50) {
            join(&mut lineup, 3, USER, micros);
            lineup.begin();
            lineup.note(USER, 32, 1 << 17);
            assert_eq!(lineup.take(at(micros), true).map(|turn| turn.qpn), Some(3));
            assert_eq!(lineup.take(at(micros), true), None);
            lineup.end(at(micros), || at(micros));
        }
        join(&mut lineup, 3, USER, starved);
        lineup.begin();
        let first = lineup.take(at(starved), false).unwrap();
        assert_eq!((first.qpn, first.starved), (1, true));
        // Blocked: it keeps its place.
        lineup.put_back(first);
        assert_eq!(lineup.next(), Some(Time::ZERO));
        assert_eq!(turn(&mut lineup, starved + 5), [1, 3], "one in a turn");
        assert_eq!(turn(&mut lineup, starved + 6), [2]);
    }

    #[test]
    fn who_changes_its_class_changes_lines() {
        let mut lineup = Lineup::default();
        let mut line = None;
        lineup.join(1, &mut line, BACKGROUND, at(0));
        lineup.join(1, &mut line, BACKGROUND, at(1));
        assert_eq!((line, lineup.background.len()), (Some(BACKGROUND), 1));
        lineup.join(1, &mut line, USER, at(2));
        assert_eq!((line, turn(&mut lineup, 3)), (Some(USER), vec![1]));
    }

    #[test]
    fn beside_users_little_is_under_way_in_the_background() {
        const SHARE: u32 = 1 << 20;
        let mut lineup = Lineup::default();
        assert_eq!(lineup.window(BACKGROUND, SHARE, at(0)), SHARE);
        lineup.begin();
        lineup.note(USER, 8, 0);
        assert_eq!(lineup.window(BACKGROUND, SHARE, at(0)), WINDOW_BESIDE_BYTES);
        lineup.end(at(0), || at(0));
        lineup.begin();
        assert_eq!(lineup.window(USER, SHARE, at(1)), SHARE);
        assert_eq!(lineup.window(BACKGROUND, SHARE, at(1)), WINDOW_BESIDE_BYTES);
        assert_eq!(lineup.window(BACKGROUND, 4096, at(1)), 4096);
        let later = at(0) + QUIET + BESIDE;
        assert_eq!(lineup.window(BACKGROUND, SHARE, later), SHARE);
    }

    #[test]
    fn turns_in_the_background_are_long_only_without_users() {
        let mut lineup = Lineup::default();
        let mut packets = |micros: u64, of_users: usize| {
            join(&mut lineup, 1, BACKGROUND, micros);
            lineup.begin();
            lineup.note(USER, of_users, 64 * of_users);
            let turn = lineup.take(at(micros), true).unwrap();
            lineup.end(at(micros), || unreachable!("no clock is read for a lone message"));
            turn.packets
        };
        assert_eq!(packets(0, 0), ALONE_PACKETS);
        assert_eq!(
            packets(1, 1),
            BACKGROUND_PACKETS,
            "in the turn of the message itself"
        );
        let beside = BESIDE.as_micros() as u64;
        assert_eq!(packets(beside, 0), BACKGROUND_PACKETS);
        assert_eq!(packets(1 + beside, 0), ALONE_PACKETS);
    }

    /// What a queue pair does at its turn.
    #[derive(Debug, Clone, Copy)]
    enum Outcome {
        Idle,
        More,
        Blocked,
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Touch(u32),
        Class(u32, QpClass),
        /// A turn of the loop, so many microseconds after the last one, with so many turns and what comes of them.
        Turn {
            micros: u64,
            most: usize,
            all: bool,
            outcome: Outcome,
        },
    }

    fn step() -> impl Strategy<Value = Step> {
        let qpn = 1u32..7;
        let class = prop_oneof![Just(USER), Just(BACKGROUND)];
        let outcome = prop_oneof![Just(Outcome::Idle), Just(Outcome::More), Just(Outcome::Blocked)];
        let turn = (0u64..2000, 0usize..8, any::<bool>(), outcome);
        let turn = turn.prop_map(|(micros, most, all, outcome)| Step::Turn {
            micros,
            most,
            all,
            outcome,
        });
        prop_oneof![
            3 => qpn.clone().prop_map(Step::Touch),
            1 => (qpn, class).prop_map(|(qpn, class)| Step::Class(qpn, class)),
            4 => turn,
        ]
    }

    #[derive(Debug, Default, Clone, Copy)]
    struct Model {
        class: QpClass,
        line: Option<QpClass>,
    }

    proptest! {
        #[test]
        fn nobody_is_forgotten_or_in_two_lines_and_users_go_first(steps in proptest::collection::vec(step(), 1..200)) {
            let mut lineup = Lineup::default();
            let mut qps: BTreeMap<u32, Model> = (1..7).map(|qpn| (qpn, Model::default())).collect();
            let mut time = 0;
            for step in steps {
                match step {
                    Step::Touch(qpn) => {
                        let qp = qps.get_mut(&qpn).unwrap();
                        lineup.join(qpn, &mut qp.line, qp.class, at(time));
                    }
                    Step::Class(qpn, class) => {
                        // As the engine does: it counts as touched.
                        let qp = qps.get_mut(&qpn).unwrap();
                        qp.class = class;
                        lineup.join(qpn, &mut qp.line, class, at(time));
                    }
                    Step::Turn { micros, most, all, outcome } => {
                        time += micros;
                        lineup.begin();
                        let mut in_background = 0;
                        for _ in 0..most {
                            let waits = lineup.background.front().map(|(since, _)| *since);
                            let users = lineup.users.len();
                            let Some(turn) = lineup.take(at(time), all) else {
                                let due = waits.is_some_and(|since| since + STARVED <= at(time));
                                prop_assert!(users == 0 && (!due || in_background == 1), "somebody is kept waiting");
                                break;
                            };
                            let qp = qps.get_mut(&turn.qpn).unwrap();
                            prop_assert_eq!(qp.line, Some(turn.class));
                            prop_assert_eq!(qp.class, turn.class);
                            if turn.class == BACKGROUND {
                                in_background += 1;
                                let due = waits.is_some_and(|since| since + STARVED <= at(time));
                                prop_assert_eq!(turn.starved, due);
                                prop_assert!(due || (users == 0 && all), "users go first");
                                prop_assert!(turn.packets < USER_PACKETS);
                            }
                            prop_assert!(in_background <= 1);
                            match outcome {
                                Outcome::Idle => qp.line = None,
                                Outcome::More => lineup.queue_again(turn, at(time)),
                                Outcome::Blocked => {
                                    lineup.put_back(turn);
                                    break;
                                }
                            }
                        }
                        lineup.end(at(time), || at(time));
                    }
                }
                for (qpn, qp) in &qps {
                    let places = [
                        lineup.users.iter().filter(|other| *other == qpn).count(),
                        lineup.in_background().filter(|other| other == qpn).count(),
                    ];
                    let wanted = match qp.line {
                        None => [0, 0],
                        Some(USER) => [1, 0],
                        Some(BACKGROUND) => [0, 1],
                    };
                    prop_assert_eq!(places, wanted, "queue pair {}", qpn);
                }
                prop_assert!(lineup.background.iter().is_sorted_by_key(|(since, _)| *since));
            }
            // Left alone, each has its turn.
            let waiting = qps.values().filter(|qp| qp.line.is_some()).count();
            let served: Vec<_> = (1..8).flat_map(|round| turn(&mut lineup, time + 6000 * round)).collect();
            prop_assert_eq!(served.len(), waiting);
        }
    }
}
