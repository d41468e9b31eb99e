//! Which queue pairs wait until their other end is known to name them, and when to ask.
//!
//! A reliable connection to another host sends nothing before the other host has confirmed it. From then on it sends, and the other host is
//! asked again now and then whether that still holds: only a no ends it. No I/O here: [`crate::engine`] asks, and tells the results.

use std::collections::{BTreeMap, BTreeSet, HashMap};
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

/// Limit of all questions about confirmed connections, which are counted by themselves: a host that does not answer holds up many of them.
const MOST_CONFIRMED: usize = 1024;

/// A confirmed connection is asked about again after this time and at most so much more, another time for each queue pair: the other RNIC may have been
/// started anew, and its number may be another queue pair's. Thousands of them come in rows of those of one second, so that an agent
/// asks about many at once.
const CONFIRMED_PAUSE: Duration = Duration::from_secs(45);
const CONFIRMED_SPREAD: Duration = Duration::from_secs(30);
const ROW: Duration = Duration::from_secs(1);

/// Confirmed connections are asked about again within this time where there is a reason: a new agent, or a confirmed queue pair at the same host that
/// names its other end no more. A host is doubted so often at most: a tenant with ends at both hosts can be the reason as often as it likes,
/// and all others' connections there are asked about.
const DOUBT_SPREAD: Duration = Duration::from_secs(4);
const DOUBT_PAUSE: Duration = CONFIRMED_PAUSE;

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
    /// The other end names it, and is asked again now and then whether it still does.
    confirmed: bool,
    /// Whose question is under way.
    asked: Option<Asker>,
    /// The last question.
    number: u64,
    /// The asker for a turn of which it waits, and its place in [`Confirming::waiting`].
    waits: Option<(Asker, u64)>,
    /// There was a no.
    refused: bool,
    /// When a packet from the other end was last a reason to ask.
    sign: Option<Time>,
}

/// A tenant's questions of one kind, which are counted together. Those about confirmed connections wait for none about new ones, nor the
/// other way round.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Asker {
    tenant: String,
    confirmed: bool,
}

impl Asker {
    /// So many questions of that kind are under way in all.
    fn most(&self) -> usize {
        match self.confirmed {
            true => MOST_CONFIRMED,
            false => MOST,
        }
    }
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
    under_way: HashMap<Asker, usize>,
    /// The same in all: about new connections, and about confirmed ones.
    in_all: [usize; 2],
    /// Those of tenants that have as many under way as they may, in the order in which they came.
    waiting: HashMap<Asker, BTreeMap<u64, u32>>,
    /// The last place among those that wait.
    place: u64,
    /// How many of the queue pairs are confirmed, and only asked about again.
    settled: usize,
    /// Hosts whose confirmations are all asked again, and since when.
    doubted: HashMap<IpAddr, Time>,
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
        self.in_all = [0; 2];
        self.waiting.clear();
        self.due.clear();
        for (qpn, open) in &mut self.open {
            let mut at = now;
            if open.confirmed {
                // It holds meanwhile, and takes no part in the rush.
                at = row(now + spread(DOUBT_SPREAD, *qpn, open.number));
                open.pause = FIRST_LATE_PAUSE;
            }
            (open.asked, open.waits, open.due) = (None, None, Some(at));
            self.due.insert((at, *qpn));
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
            confirmed: false,
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
        if open.confirmed || open.asked.is_some() || open.waits.is_some() || open.sign.is_some_and(lately) {
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
        if let Some((asker, place)) = open.waits {
            self.waits_no_more(&asker, place);
        }
        self.settled -= usize::from(open.confirmed);
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

    /// Cannot be asked now: it comes up again after this pause. A confirmed connection holds meanwhile, and comes up more and more rarely, however
    /// many there are.
    pub fn put_off(&mut self, qpn: u32, pause: Duration, now: Time) {
        let Some(open) = self.open.get_mut(&qpn) else {
            return;
        };
        let mut at = now + pause;
        if open.confirmed {
            at = row(now + open.pause);
            open.pause = (open.pause * 2).min(LONGEST_LATE_PAUSE);
        }
        self.schedule(qpn, at);
    }

    /// The number of a question of a tenant's, if it may be asked now; if not, its turn comes when another one of that tenant's is
    /// answered, or soon.
    pub fn take_turn(&mut self, qpn: u32, tenant: &str, now: Time) -> Option<u64> {
        let open = self.open.get_mut(&qpn)?;
        let asker = Asker {
            tenant: tenant.to_owned(),
            confirmed: open.confirmed,
        };
        let of_tenant = self.under_way.get(&asker).copied().unwrap_or(0);
        let (in_all, most) = (&mut self.in_all[usize::from(asker.confirmed)], asker.most());
        if of_tenant >= LEAST_OF_TENANT && *in_all >= most {
            self.put_off(qpn, LONGEST_PAUSE, now);
            return None;
        }
        if of_tenant >= MOST_OF_TENANT {
            if open.waits.is_none() {
                self.place += 1;
                open.waits = Some((asker.clone(), self.place));
                self.waiting.entry(asker).or_default().insert(self.place, qpn);
            }
            // Whoever was to pass the turn on may be gone.
            self.put_off(qpn, FIRST_LATE_PAUSE, now);
            return None;
        }
        *in_all += 1;
        self.number += 1;
        (open.asked, open.number) = (Some(asker.clone()), self.number);
        if let Some((waited, place)) = open.waits.take() {
            self.waits_no_more(&waited, place);
        }
        self.under_way.insert(asker, of_tenant + 1);
        self.schedule(qpn, now + ANSWER_LIMIT);
        Some(self.number)
    }

    fn waits_no_more(&mut self, asker: &Asker, place: u64) {
        if let Some(waiting) = self.waiting.get_mut(asker) {
            waiting.remove(&place);
            if waiting.is_empty() {
                self.waiting.remove(asker);
            }
        }
    }

    /// A question could not be asked: it is to be after this pause, or later where it is about a confirmed connection.
    pub fn give_back(&mut self, qpn: u32, pause: Duration, now: Time) {
        self.release(qpn, now);
        self.put_off(qpn, pause, now);
    }

    /// A question is not under way any more: the next of its tenant's has its turn.
    fn release(&mut self, qpn: u32, now: Time) {
        let asked = self.open.get_mut(&qpn).and_then(|open| open.asked.take());
        let Some(asker) = asked else { return };
        self.in_all[usize::from(asker.confirmed)] -= 1;
        if let Some(count) = self.under_way.get_mut(&asker) {
            *count -= 1;
            if *count == 0 {
                self.under_way.remove(&asker);
            }
        }
        let next = self.waiting.get_mut(&asker).and_then(BTreeMap::pop_first);
        if self.waiting.get(&asker).is_some_and(BTreeMap::is_empty) {
            self.waiting.remove(&asker);
        }
        let Some((_, next)) = next else { return };
        if let Some(open) = self.open.get_mut(&next) {
            open.waits = None;
            self.schedule(next, now);
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
        let waited = self.open.get_mut(&qpn).and_then(|open| open.waits.take());
        if let Some((asker, place)) = waited {
            self.waits_no_more(&asker, place);
        }
        let Some(open) = self.open.get_mut(&qpn) else {
            return Then::Wait;
        };
        let is_late = confirmation == Confirmation::Awaited && now - open.since >= PATIENCE;
        let mut longest_pause = LONGEST_LATE_PAUSE;
        match verdict {
            PeerVerdict::Confirmed => {
                self.settle(qpn, now);
                return Then::Open;
            }
            // Nobody has said no: a connection in use goes on while an agent or an RNIC is away, and it is asked again soon.
            PeerVerdict::NotYet if open.confirmed => {
                self.put_off(qpn, FIRST_LATE_PAUSE, now);
                return Then::Wait;
            }
            PeerVerdict::Refused if !open.refused => {
                self.refused += 1;
                (open.refused, open.pause) = (true, FIRST_LATE_PAUSE);
                if std::mem::take(&mut open.confirmed) {
                    let host = open.other.address;
                    self.settled -= 1;
                    self.doubt(host, now);
                }
            }
            PeerVerdict::NotYet if is_late => open.pause = FIRST_LATE_PAUSE,
            PeerVerdict::Refused | PeerVerdict::NotYet => {
                if confirmation == Confirmation::Awaited {
                    longest_pause = LONGEST_PAUSE;
                }
            }
        }
        let Some(open) = self.open.get_mut(&qpn) else {
            return Then::Wait;
        };
        let (pause, refused) = (open.pause, open.refused);
        open.pause = (pause * 2).min(longest_pause);
        self.schedule(qpn, now + pause);
        match refused || is_late {
            true => Then::Deny,
            false => Then::Wait,
        }
    }

    /// The other end names it. Whether it still does is asked again, late.
    fn settle(&mut self, qpn: u32, now: Time) {
        let Some(open) = self.open.get_mut(&qpn) else {
            return;
        };
        self.patience.remove(&(open.since + PATIENCE, qpn));
        if !std::mem::replace(&mut open.confirmed, true) {
            self.confirmed += 1;
            self.settled += 1;
        }
        (open.refused, open.sign, open.pause) = (false, None, FIRST_LATE_PAUSE);
        let at = row(now + CONFIRMED_PAUSE + spread(CONFIRMED_SPREAD, qpn, open.number));
        self.schedule(qpn, at);
    }

    /// A host has said no to a connection that it had confirmed, and had not told before. Its RNIC may have been started anew: all confirmed
    /// connections to it are asked about again soon.
    fn doubt(&mut self, host: IpAddr, now: Time) {
        self.doubted.retain(|_, since| now - *since < DOUBT_PAUSE);
        if self.doubted.contains_key(&host) {
            return;
        }
        self.doubted.insert(host, now);
        let there = |open: &Open| open.confirmed && open.asked.is_none() && open.other.address == host;
        for (qpn, open) in self.open.iter_mut().filter(|(_, open)| there(open)) {
            let at = row(now + spread(DOUBT_SPREAD, *qpn, open.number));
            if open.due.is_none_or(|due| due > at) {
                if let Some(due) = open.due.replace(at) {
                    self.due.remove(&(due, *qpn));
                }
                self.due.insert((at, *qpn));
            }
        }
    }

    /// For statistics.
    pub fn counters(&self) -> [(&'static str, u64); 4] {
        [
            ("peers_asked_about", (self.open.len() - self.settled) as u64),
            ("peers_confirmed", self.confirmed),
            ("peers_refused", self.refused),
            ("unconfirmed_packets", self.withheld),
        ]
    }
}

/// A part of that time, another one for each queue pair and each question.
fn spread(most: Duration, qpn: u32, number: u64) -> Duration {
    let mixed = (number << 32 ^ u64::from(qpn)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    most * mixed as u32 / u32::MAX
}

/// The end of the row that a time belongs to.
fn row(time: Time) -> Time {
    let row = ROW.as_nanos() as u64;
    Time::from_nanos(time.as_nanos().next_multiple_of(row))
}

/// Where an end is.
pub fn location(address: IpAddr, qpn: u32) -> Location {
    Location {
        address,
        qpn: verbatim_roce::Qpn::new(qpn),
    }
}

#[cfg(test)]
mod tests;
