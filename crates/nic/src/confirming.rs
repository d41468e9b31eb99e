//! Which queue pairs wait until their other end is known to name them, and when to ask.
//!
//! A reliable connection to another host sends nothing before the other host has confirmed it; from then on it costs nothing, until its
//! other end is another one. No I/O here: [`crate::engine`] asks, and says what came of it.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use verbatim_device::control::PeerVerdict;
use verbatim_roce::{Location, Time};

/// The first pause before a question is asked again, and the longest while the other program may connect any moment.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// For so long nothing is sent and no time passes for the program. Then its own timeouts begin, whether or not anybody answers: who has
/// died, or never comes, is to be noticed, and an agent that hangs keeps nobody waiting for ever.
const PATIENCE: Duration = Duration::from_secs(10);

/// The pauses once a queue pair gets no answers. The other end's host tells when that end changes, so this is for what was lost.
const FIRST_LATE_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_LATE_PAUSE: Duration = Duration::from_secs(30);

/// An agent answers a question sooner than this, or it has lost it.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// Questions under way: of one tenant, and in all. A tenant with fewer than the least may always ask, whoever else is waited for.
const MOST_OF_TENANT: usize = 256;
const LEAST_OF_TENANT: usize = 16;
const MOST: usize = 4096;

/// A packet from the other end is a sign that it names this one: one question more, at most so often.
const SIGN_PAUSE: Duration = Duration::from_millis(100);

/// Whether a queue pair may send to its other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Confirmation {
    /// Nobody is asked about it: it sends.
    #[default]
    Exempt,
    /// It is asked about, and neither sends nor counts time.
    Awaited,
    /// The other end names it: it sends.
    Confirmed,
    /// The other end does not name it: what it sends goes nowhere.
    Denied,
}

impl Confirmation {
    /// It sends.
    #[inline]
    pub fn is_open(self) -> bool {
        matches!(self, Self::Exempt | Self::Confirmed)
    }
}

/// A queue pair that is asked about.
#[derive(Debug)]
struct Open {
    other: Location,
    since: Time,
    pause: Duration,
    /// When it comes up in [`Confirming::due`].
    due: Option<Time>,
    /// Whose question is under way.
    asked: Option<String>,
    /// The last question.
    number: u64,
    /// The tenant for whose turn it waits.
    waits: Option<String>,
    /// There was a no.
    refused: bool,
    /// When a packet from the other end was last a reason to ask.
    sign: Option<Time>,
}

/// What to do after an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// The queue pair stays as it is.
    Wait,
    /// It sends from now on.
    Open,
    /// It gets no answers from now on.
    Deny,
}

/// All queue pairs that are asked about, by number.
#[derive(Debug, Default)]
pub struct Confirming {
    /// Somebody answers, or has until it went away.
    on: bool,
    open: HashMap<u32, Open>,
    due: BTreeSet<(Time, u32)>,
    /// When the patience with each that waits ends, whether or not anybody answers.
    patience: BTreeSet<(Time, u32)>,
    /// How many questions of each tenant are under way.
    under_way: HashMap<String, usize>,
    /// Those of tenants that have as many under way as they may.
    waiting: HashMap<String, VecDeque<u32>>,
    /// Questions that were ever asked.
    number: u64,
    confirmed: u64,
    refused: u64,
    /// Packets that went nowhere.
    pub withheld: u64,
}

impl Confirming {
    /// Is anybody asked at all?
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Somebody takes questions, instead of whoever did before: what was under way is asked again.
    pub fn begin(&mut self, now: Time) {
        self.on = true;
        self.under_way.clear();
        self.waiting.clear();
        self.due.clear();
        for (qpn, open) in &mut self.open {
            (open.asked, open.waits, open.due) = (None, None, Some(now));
            self.due.insert((now, *qpn));
        }
    }

    /// A queue pair has this other end from now on, and it is to be asked whether that names it.
    pub fn insert(&mut self, qpn: u32, other: Location, now: Time) {
        self.remove(qpn, now);
        let open = Open {
            other,
            since: now,
            pause: FIRST_PAUSE,
            due: None,
            asked: None,
            number: 0,
            waits: None,
            refused: false,
            sign: None,
        };
        self.open.insert(qpn, open);
        self.patience.insert((now + PATIENCE, qpn));
        self.schedule(qpn, now);
    }

    /// The other end of this queue pair names it no more. It may again, some time: that is asked as after a no.
    pub fn insert_refused(&mut self, qpn: u32, other: Location, now: Time) {
        self.insert(qpn, other, now);
        if let Some(open) = self.open.get_mut(&qpn) {
            (open.refused, open.pause) = (true, FIRST_LATE_PAUSE);
        }
        self.patience.remove(&(now + PATIENCE, qpn));
    }

    /// A packet has come from the other end of a queue pair that may not send. Whoever sends it may name this one by now.
    pub fn note_sign(&mut self, qpn: u32, now: Time) {
        let Some(open) = self.open.get_mut(&qpn) else {
            return;
        };
        let lately = |sign: Time| now - sign < SIGN_PAUSE;
        if open.asked.is_some() || open.waits.is_some() || open.sign.is_some_and(lately) {
            return;
        }
        open.sign = Some(now);
        if open.due.is_none_or(|due| due > now) {
            self.schedule(qpn, now);
        }
    }

    /// It need not be asked about any more.
    pub fn remove(&mut self, qpn: u32, now: Time) {
        self.release(qpn, now);
        let Some(open) = self.open.remove(&qpn) else {
            return;
        };
        if let Some(tenant) = open.waits {
            self.waits_no_more(qpn, &tenant);
        }
        self.patience.remove(&(open.since + PATIENCE, qpn));
        if let Some(due) = open.due {
            self.due.remove(&(due, qpn));
        }
    }

    /// Whether it is asked about with this other end.
    pub fn is_about(&self, qpn: u32, other: Location) -> bool {
        self.open.get(&qpn).is_some_and(|open| open.other == other)
    }

    /// There was a no to this one.
    pub fn was_refused(&self, qpn: u32) -> bool {
        self.open.get(&qpn).is_some_and(|open| open.refused)
    }

    /// When to ask next.
    #[inline]
    pub fn next_question(&self) -> Option<Time> {
        self.due.first().map(|(time, _)| *time)
    }

    /// When the patience with somebody ends.
    #[inline]
    pub fn next_late(&self) -> Option<Time> {
        self.patience.first().map(|(time, _)| *time)
    }

    /// The earlier of both.
    #[cfg(test)]
    fn next(&self) -> Option<Time> {
        [self.next_question(), self.next_late()]
            .into_iter()
            .flatten()
            .min()
    }

    /// A queue pair that was asked about for so long that its program's own timeouts are to begin.
    pub fn pop_late(&mut self, now: Time) -> Option<u32> {
        let (time, qpn) = *self.patience.first().filter(|(time, _)| *time <= now)?;
        self.patience.remove(&(time, qpn));
        Some(qpn)
    }

    /// A queue pair whose time has come, and the other end that it is asked about.
    pub fn pop_due(&mut self, now: Time) -> Option<(u32, Location)> {
        let (time, qpn) = *self.due.first().filter(|(time, _)| *time <= now)?;
        self.due.remove(&(time, qpn));
        // An answer that was due by now does not come.
        self.release(qpn, now);
        let open = self.open.get_mut(&qpn)?;
        open.due = None;
        Some((qpn, open.other))
    }

    /// To be asked at that time, and not before.
    pub fn schedule(&mut self, qpn: u32, at: Time) {
        let Some(open) = self.open.get_mut(&qpn) else {
            return;
        };
        if let Some(due) = open.due.replace(at) {
            self.due.remove(&(due, qpn));
        }
        self.due.insert((at, qpn));
    }

    /// The number of a question of a tenant's, if it may be asked now; if not, its turn comes when another one of that tenant's is
    /// answered, or soon.
    pub fn take_turn(&mut self, qpn: u32, tenant: &str, now: Time) -> Option<u64> {
        let of_tenant = self.under_way.get(tenant).copied().unwrap_or(0);
        if of_tenant >= LEAST_OF_TENANT && self.under_way.values().sum::<usize>() >= MOST {
            self.schedule(qpn, now + LONGEST_PAUSE);
            return None;
        }
        let open = self.open.get_mut(&qpn)?;
        if of_tenant >= MOST_OF_TENANT {
            if open.waits.is_none() {
                open.waits = Some(tenant.to_owned());
                let waiting = self.waiting.entry(tenant.to_owned()).or_default();
                waiting.push_back(qpn);
            }
            // Whoever was to pass the turn on may be gone.
            self.schedule(qpn, now + FIRST_LATE_PAUSE);
            return None;
        }
        self.number += 1;
        (open.asked, open.number) = (Some(tenant.to_owned()), self.number);
        if open.waits.take().is_some() {
            self.waits_no_more(qpn, tenant);
        }
        self.under_way.insert(tenant.to_owned(), of_tenant + 1);
        self.schedule(qpn, now + ANSWER_LIMIT);
        Some(self.number)
    }

    fn waits_no_more(&mut self, qpn: u32, tenant: &str) {
        if let Some(waiting) = self.waiting.get_mut(tenant) {
            waiting.retain(|other| *other != qpn);
            if waiting.is_empty() {
                self.waiting.remove(tenant);
            }
        }
    }

    /// A question could not be asked: it is to be at that time.
    pub fn give_back(&mut self, qpn: u32, at: Time, now: Time) {
        self.release(qpn, now);
        self.schedule(qpn, at);
    }

    /// A question is not under way any more: the next of its tenant's has its turn.
    fn release(&mut self, qpn: u32, now: Time) {
        let asked = self.open.get_mut(&qpn).and_then(|open| open.asked.take());
        let Some(tenant) = asked else { return };
        if let Some(count) = self.under_way.get_mut(&tenant) {
            *count -= 1;
            if *count == 0 {
                self.under_way.remove(&tenant);
            }
        }
        while let Some(waiting) = self.waiting.get_mut(&tenant) {
            let next = waiting.pop_front();
            if waiting.is_empty() {
                self.waiting.remove(&tenant);
            }
            let Some((next, open)) = next.and_then(|next| Some((next, self.open.get_mut(&next)?))) else {
                continue;
            };
            if open.waits.take().is_some() {
                return self.schedule(next, now);
            }
        }
    }

    /// Whether an answer is one to the question that stands.
    pub fn is_answer(&self, qpn: u32, other: Location, number: u64) -> bool {
        let open = self.open.get(&qpn);
        open.is_some_and(|open| open.other == other && open.number == number && open.asked.is_some())
    }

    /// What came of a question. `confirmation` is what holds for the queue pair so far.
    pub fn judge(&mut self, qpn: u32, verdict: PeerVerdict, confirmation: Confirmation, now: Time) -> Then {
        self.release(qpn, now);
        let Some(open) = self.open.get_mut(&qpn) else {
            return Then::Wait;
        };
        let is_late = confirmation == Confirmation::Awaited && now - open.since >= PATIENCE;
        let mut longest_pause = LONGEST_LATE_PAUSE;
        match verdict {
            PeerVerdict::Confirmed => {
                self.confirmed += 1;
                self.remove(qpn, now);
                return Then::Open;
            }
            PeerVerdict::Refused if !open.refused => {
                self.refused += 1;
                (open.refused, open.pause) = (true, FIRST_LATE_PAUSE);
            }
            PeerVerdict::NotYet if is_late => open.pause = FIRST_LATE_PAUSE,
            PeerVerdict::Refused | PeerVerdict::NotYet => {
                if confirmation == Confirmation::Awaited {
                    longest_pause = LONGEST_PAUSE;
                }
            }
        }
        let (pause, refused) = (open.pause, open.refused);
        open.pause = (pause * 2).min(longest_pause);
        self.schedule(qpn, now + pause);
        match refused || is_late {
            true => Then::Deny,
            false => Then::Wait,
        }
    }

    /// For statistics.
    pub fn counters(&self) -> [(&'static str, u64); 4] {
        [
            ("peers_asked_about", self.open.len() as u64),
            ("peers_confirmed", self.confirmed),
            ("peers_refused", self.refused),
            ("unconfirmed_packets", self.withheld),
        ]
    }
}

/// Where an end is.
pub fn location(address: IpAddr, qpn: u32) -> Location {
    Location {
        address,
        qpn: verbatim_roce::Qpn::new(qpn),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OTHER: [u8; 4] = [10, 0, 0, 2];

    fn at(millis: u64) -> Time {
        Time::from_nanos(1_000_000_000 + millis * 1_000_000)
    }

    fn other(qpn: u32) -> Location {
        location(OTHER.into(), qpn)
    }

    fn asked(confirming: &mut Confirming, now: Time, tenant: &str) -> Vec<u32> {
        let mut asked = Vec::new();
        while let Some((qpn, _)) = confirming.pop_due(now) {
            if confirming.take_turn(qpn, tenant, now).is_some() {
                asked.push(qpn);
            }
        }
        asked
    }

    #[test]
    fn a_question_is_asked_again_in_growing_steps_until_the_program_s_own_time_begins() {
        let mut confirming = Confirming::default();
        confirming.begin(at(0));
        confirming.insert(7, other(9), at(0));
        let (mut now, mut pauses) = (at(0), Vec::new());
        assert_eq!(confirming.pop_late(at(9_999)), None);
        let given_up = loop {
            assert_eq!(asked(&mut confirming, now, "a"), [7]);
            let then = confirming.judge(7, PeerVerdict::NotYet, Confirmation::Awaited, now);
            let next = confirming.due.first().expect("it is asked again").0;
            if then == Then::Deny {
                break now;
            }
            pauses.push((next - now).as_millis());
            now = next;
        };
        assert_eq!(pauses[..9], [1, 2, 4, 8, 16, 32, 64, 100, 100]);
        assert!(given_up >= at(10_000) && given_up < at(10_200));
        assert_eq!(
            confirming.judge(7, PeerVerdict::Confirmed, Confirmation::Denied, now),
            Then::Open
        );
        assert_eq!(
            (confirming.next(), confirming.is_about(7, other(9))),
            (None, false)
        );
    }

    #[test]
    fn a_no_holds_and_is_asked_again_rarely() {
        let mut confirming = Confirming::default();
        confirming.begin(at(0));
        confirming.insert(7, other(9), at(0));
        assert_eq!(asked(&mut confirming, at(0), "a"), [7]);
        assert_eq!(
            confirming.judge(7, PeerVerdict::Refused, Confirmation::Awaited, at(1)),
            Then::Deny
        );
        assert!(confirming.was_refused(7));
        assert_eq!(confirming.next(), Some(at(1001)));
        // Not connected any more, say, is no yes.
        assert_eq!(asked(&mut confirming, at(1001), "a"), [7]);
        assert_eq!(
            confirming.judge(7, PeerVerdict::NotYet, Confirmation::Denied, at(1001)),
            Then::Deny
        );
        assert_eq!(confirming.next(), Some(at(3001)));
    }

    #[test]
    fn a_tenant_has_so_many_under_way_and_keeps_nobody_else_waiting() {
        let mut confirming = Confirming::default();
        confirming.begin(at(0));
        for qpn in 0..1000 {
            confirming.insert(qpn, other(9), at(0));
        }
        let first = asked(&mut confirming, at(0), "greedy");
        assert_eq!(first.len(), MOST_OF_TENANT);
        confirming.insert(5000, other(9), at(0));
        assert_eq!(asked(&mut confirming, at(0), "other"), [5000]);
        // Each answer lets one more ask.
        confirming.judge(first[0], PeerVerdict::Confirmed, Confirmation::Awaited, at(0));
        assert_eq!(asked(&mut confirming, at(0), "greedy").len(), 1);
        // Those that end make room, too.
        for qpn in &first[1..11] {
            confirming.remove(*qpn, at(0));
        }
        assert_eq!(asked(&mut confirming, at(0), "greedy").len(), 10);
        // Whoever takes questions next is asked anew.
        confirming.begin(at(1));
        assert_eq!(asked(&mut confirming, at(1), "greedy").len(), MOST_OF_TENANT);
    }

    #[test]
    fn tenants_whose_answers_never_come_leave_room_for_others() {
        let mut confirming = Confirming::default();
        confirming.begin(at(0));
        for tenant in 0..20 {
            for qpn in 0..300 {
                confirming.insert(tenant * 1000 + qpn, other(9), at(0));
            }
            asked(&mut confirming, at(0), &tenant.to_string());
        }
        let under_way: usize = confirming.under_way.values().sum();
        assert!(under_way <= MOST + 20 * LEAST_OF_TENANT, "{under_way}");
        for qpn in 50_000..50_100 {
            confirming.insert(qpn, other(9), at(1));
        }
        let mut late = Vec::new();
        while let Some((qpn, _)) = confirming.pop_due(at(1)) {
            if qpn >= 50_000 && confirming.take_turn(qpn, "late", at(1)).is_some() {
                late.push(qpn);
            }
        }
        assert_eq!(late.len(), LEAST_OF_TENANT);
        let waiting: usize = confirming.waiting.values().map(VecDeque::len).sum();
        assert!(waiting <= confirming.open.len(), "each waits once");
    }

    #[test]
    fn whoever_waits_is_on_the_list_once() {
        let mut confirming = Confirming::default();
        confirming.begin(at(0));
        for qpn in 0..=MOST_OF_TENANT as u32 {
            confirming.insert(qpn, other(9), at(0));
        }
        let first = asked(&mut confirming, at(0), "a");
        let last = (0..=MOST_OF_TENANT as u32)
            .find(|qpn| !first.contains(qpn))
            .unwrap();
        for _ in 0..100 {
            confirming.schedule(last, at(1));
            assert_eq!(asked(&mut confirming, at(1), "a"), []);
        }
        assert_eq!(confirming.waiting["a"].len(), 1);
        confirming.judge(first[0], PeerVerdict::Confirmed, Confirmation::Awaited, at(2));
        assert_eq!(asked(&mut confirming, at(2), "a"), [last]);
    }

    #[test]
    fn whoever_waits_does_not_depend_on_another_that_ends() {
        let mut confirming = Confirming::default();
        confirming.begin(at(0));
        let all = 2 * MOST_OF_TENANT as u32 + 10;
        for qpn in 0..all {
            confirming.insert(qpn, other(9), at(0));
        }
        asked(&mut confirming, at(0), "a");
        // One program ends, with those that were asked about and those that had the next turns.
        for qpn in 0..all - 10 {
            confirming.remove(qpn, at(1));
        }
        assert_eq!(asked(&mut confirming, at(1001), "a").len(), 10);
        assert!(confirming.waiting.is_empty());
    }

    #[test]
    fn a_late_answer_counts_for_nothing() {
        let mut confirming = Confirming::default();
        confirming.begin(at(0));
        confirming.insert(7, other(9), at(0));
        confirming.pop_due(at(0)).unwrap();
        let first = confirming.take_turn(7, "a", at(0)).unwrap();
        assert!(confirming.is_answer(7, other(9), first));
        assert!(!confirming.is_answer(7, other(8), first) && !confirming.is_answer(8, other(9), first));
        // The other end has told meanwhile that it names this one no more.
        confirming.insert_refused(7, other(9), at(1));
        assert!(!confirming.is_answer(7, other(9), first));
        assert_eq!(
            (confirming.was_refused(7), confirming.next()),
            (true, Some(at(1)))
        );
        confirming.pop_due(at(1)).unwrap();
        let second = confirming.take_turn(7, "a", at(1)).unwrap();
        assert!(second != first && confirming.is_answer(7, other(9), second));
    }

    #[test]
    fn a_packet_from_the_other_end_is_a_reason_to_ask_again_now_and_then() {
        let mut confirming = Confirming::default();
        confirming.begin(at(0));
        confirming.insert_refused(7, other(9), at(0));
        assert_eq!(asked(&mut confirming, at(0), "a"), [7]);
        confirming.judge(7, PeerVerdict::Refused, Confirmation::Denied, at(0));
        assert_eq!(confirming.next_question(), Some(at(1000)));
        confirming.note_sign(7, at(10));
        assert_eq!(asked(&mut confirming, at(10), "a"), [7]);
        confirming.note_sign(7, at(200));
        assert_eq!(asked(&mut confirming, at(200), "a"), [], "it is asked already");
        confirming.judge(7, PeerVerdict::Refused, Confirmation::Denied, at(201));
        for now in [202, 210, 250] {
            confirming.note_sign(7, at(now));
        }
        assert_eq!(asked(&mut confirming, at(250), "a"), [7]);
        confirming.judge(7, PeerVerdict::Refused, Confirmation::Denied, at(251));
        confirming.note_sign(7, at(260));
        assert_eq!(asked(&mut confirming, at(300), "a"), [], "not so soon");
        confirming.note_sign(7, at(310));
        assert_eq!(asked(&mut confirming, at(310), "a"), [7]);
    }

    #[test]
    fn patience_ends_without_an_answer_too() {
        let mut confirming = Confirming::default();
        confirming.begin(at(0));
        confirming.insert(7, other(9), at(0));
        confirming.insert(8, other(9), at(5));
        assert_eq!(asked(&mut confirming, at(5), "a"), [7, 8]);
        assert_eq!(confirming.next(), Some(at(10_000)));
        assert_eq!(
            [10_000, 10_000, 10_005].map(|time| confirming.pop_late(at(time))),
            [Some(7), None, Some(8)]
        );
        // Once for each; whoever is not asked about any more, or about another end, has none, or its own.
        confirming.insert(7, other(9), at(20_000));
        confirming.insert(7, other(10), at(20_001));
        confirming.remove(8, at(20_001));
        assert_eq!(confirming.pop_late(at(30_000)), None);
        assert_eq!(confirming.pop_late(at(30_001)), Some(7));
        confirming.remove(7, at(30_001));
        assert_eq!(confirming.next(), None);
    }

    #[test]
    fn a_lost_answer_is_asked_for_again() {
        let mut confirming = Confirming::default();
        confirming.begin(at(0));
        confirming.insert(7, other(9), at(0));
        assert_eq!(asked(&mut confirming, at(0), "a"), [7]);
        assert_eq!(asked(&mut confirming, at(29_999), "a"), []);
        assert_eq!(asked(&mut confirming, at(30_000), "a"), [7]);
    }
}
