//! Asking whether the other ends of connections name these, and what comes of it ([`crate::confirming`]).

use std::net::IpAddr;
use std::time::Duration;

use verbatim_device::control::{
    MAX_PEER_PAIRS, PeerAnswer, PeerNews, PeerPair, PeerQuestion, PeerStanding, PeerVerdict, QpEnd, Reply,
};
use verbatim_roce::{Location, QpState, Standing, Time};

use super::Nic;
use crate::confirming::{Confirmation, Then, location};
use crate::device::gid;
use crate::error::Refused;
use crate::named::Told;
use crate::objects::Objects;
use crate::qp::{Heard, QueuePair};
use crate::requests::address_of;

/// A connection that is between two RNICs is asked about when it runs again.
const WHILE_MOVING: Duration = Duration::from_millis(100);

/// So many come up in one turn of the data path, which others wait for: the rest with the next.
const MOST_OF_TURN: usize = 256;

/// The socket of who takes the questions is full for so long.
const WHILE_FULL: Duration = Duration::from_millis(1);

impl Nic {
    /// This connection takes the questions from now on.
    pub(super) fn take_peer_questions(&mut self, id: u32, now: Time) -> Reply {
        let is_first = !self.objects.confirming.is_on();
        self.asked = Some(id);
        self.objects.confirming.begin(now);
        self.objects.named.begin(now);
        if is_first {
            // They go on meanwhile.
            let connected = self.objects.qps.iter();
            let connected = connected.filter(|(_, qp)| !qp.serves_host);
            let connected = connected.filter_map(|(qpn, qp)| Some((qpn, qp.other_end()?)));
            for (qpn, other) in connected.collect::<Vec<_>>() {
                self.objects.confirming.insert(qpn, other, now);
            }
        }
        Reply::Done
    }

    /// Asks what is to be asked by now.
    #[inline]
    pub(super) fn ask_peers(&mut self, now: Time) {
        if self
            .objects
            .confirming
            .next_late()
            .is_some_and(|next| next <= now)
        {
            self.lose_patience(now);
        }
        if self.asked_full_until.is_some_and(|until| until > now) {
            return;
        }
        self.asked_full_until = None;
        if self
            .objects
            .confirming
            .next_question()
            .is_some_and(|next| next <= now)
        {
            self.ask_due(now);
        }
        if self.objects.named.next().is_some_and(|next| next <= now) {
            self.tell_due(now);
        }
    }

    /// When something is to be asked or told next.
    #[inline]
    pub(super) fn next_of_peers(&self) -> Option<Time> {
        let Objects {
            confirming, named, ..
        } = &self.objects;
        let due = [confirming.next_question(), named.next()]
            .into_iter()
            .flatten()
            .min();
        // Nothing is asked while the socket is full, whatever is due.
        let due = due.map(|due| self.asked_full_until.map_or(due, |until| until.max(due)));
        [due, confirming.next_late()].into_iter().flatten().min()
    }

    #[cold]
    fn lose_patience(&mut self, now: Time) {
        while let Some(qpn) = self.objects.confirming.pop_late(now) {
            let qp = self.objects.qps.get(qpn);
            if qp.is_some_and(|qp| qp.confirmation == Confirmation::Awaited) {
                self.confirm(qpn, Confirmation::Denied, now);
            }
        }
    }

    #[cold]
    fn ask_due(&mut self, now: Time) {
        for _ in 0..MOST_OF_TURN {
            let Some((qpn, other)) = self.objects.confirming.pop_due(now) else {
                return;
            };
            let found = self.objects.qps.get(qpn);
            let is_so =
                |qp: &&QueuePair| qp.other_end() == Some(other) && qp.transport.state() != QpState::Err;
            let Some(qp) = found.filter(is_so) else {
                self.objects.confirming.remove(qpn, now);
                continue;
            };
            if qp.is_between_rnics() {
                self.objects.confirming.put_off(qpn, WHILE_MOVING, now);
                continue;
            }
            let Some(pair) = qp.pair(qpn) else {
                self.objects.confirming.remove(qpn, now);
                continue;
            };
            if self.gids.contains(&pair.other.gid) {
                let verdict = match self.standing(&pair.turned(), now) {
                    PeerStanding::Named => PeerVerdict::Confirmed,
                    PeerStanding::Unconnected => PeerVerdict::NotYet,
                    _ => PeerVerdict::Refused,
                };
                self.judge_peer(qpn, verdict, now);
                continue;
            }
            let context = qp.context;
            let Some(socket) = self.asked.and_then(|id| self.clients.socket(id)) else {
                self.judge_peer(qpn, PeerVerdict::NotYet, now);
                continue;
            };
            let tenant = self.clients.tenant(context);
            let Some(number) = self.objects.confirming.take_turn(qpn, &tenant, now) else {
                continue;
            };
            let question = PeerQuestion {
                number,
                pair,
                tenant,
                again: self.objects.confirming.was_refused(qpn),
            };
            if socket.send_now(&PeerNews::Question(question)).is_err() {
                // Full; or closed, which the control path notices.
                self.objects.confirming.give_back(qpn, WHILE_FULL, now);
                self.asked_full_until = Some(now + WHILE_FULL);
                return;
            }
        }
    }

    /// Tells other RNICs, by the agent, that ends of this one name theirs no more.
    #[cold]
    fn tell_due(&mut self, now: Time) {
        loop {
            let Objects { named, qps, .. } = &mut self.objects;
            let current = |qpn| qps.get(qpn).and_then(|qp| qp.pair(qpn));
            match named.pop_due(now, current) {
                None => return,
                Some(Told::Free(qpn)) => self.objects.qps.give_again(qpn),
                Some(Told::Ends(ends)) => {
                    for end in ends {
                        if !self.tell(end, now) {
                            return;
                        }
                    }
                }
            }
        }
    }

    /// False: not now.
    fn tell(&mut self, end: PeerPair, now: Time) -> bool {
        if self.gids.contains(&end.other.gid) {
            self.peer_is_gone(&end.turned(), now);
            self.peer_has_heard(&end);
            return true;
        }
        // Without an agent the next one has it.
        let Some(socket) = self.asked.and_then(|id| self.clients.socket(id)) else {
            return true;
        };
        let is_sent = socket.send_now(&PeerNews::Gone(end)).is_ok();
        if !is_sent {
            self.objects.named.schedule(end.own.qpn, now + WHILE_FULL);
            self.asked_full_until = Some(now + WHILE_FULL);
        }
        is_sent
    }

    /// Another host says that these of its queue pairs name these of this RNIC no more.
    pub(super) fn peers_gone(&mut self, pairs: &[PeerPair], now: Time) -> Result<Reply, Refused> {
        within(pairs.len())?;
        for pair in pairs {
            self.peer_is_gone(pair, now);
        }
        Ok(Reply::Done)
    }

    fn peer_is_gone(&mut self, pair: &PeerPair, now: Time) {
        let (qpn, other) = (pair.own.qpn, location(address_of(pair.other.gid), pair.other.qpn));
        let Objects { qps, confirming, .. } = &mut self.objects;
        let Some(qp) = qps.get(qpn).filter(|qp| qp.other_end() == Some(other)) else {
            return;
        };
        if qp.confirmation != Confirmation::Exempt || confirming.is_about(qpn, other) {
            confirming.insert_refused(qpn, other, now);
            self.confirm(qpn, Confirmation::Denied, now);
        }
    }

    /// The RNICs of other hosts know that these of this RNIC name theirs no more.
    pub(super) fn peers_heard(&mut self, pairs: &[PeerPair]) -> Result<Reply, Refused> {
        within(pairs.len())?;
        for pair in pairs {
            self.peer_has_heard(pair);
        }
        Ok(Reply::Done)
    }

    fn peer_has_heard(&mut self, pair: &PeerPair) {
        if self.objects.named.heard(pair) {
            self.objects.qps.give_again(pair.own.qpn);
        }
    }

    /// The agent has answered.
    pub(super) fn answer_peer_questions(
        &mut self,
        answers: &[PeerAnswer],
        now: Time,
    ) -> Result<Reply, Refused> {
        within(answers.len())?;
        for PeerAnswer {
            number,
            pair,
            verdict,
        } in answers
        {
            let other = location(address_of(pair.other.gid), pair.other.qpn);
            if self.objects.confirming.is_answer(pair.own.qpn, other, *number) {
                self.judge_peer(pair.own.qpn, *verdict, now);
            }
        }
        Ok(Reply::Done)
    }

    /// Another host says that these of its queue pairs name these of this RNIC. That is no reason to believe it, since it may be over
    /// by now, but one to ask.
    pub(super) fn meet_peers(&mut self, pairs: &[PeerPair], now: Time) -> Result<Reply, Refused> {
        within(pairs.len())?;
        let meet = |pair: &PeerPair| {
            let standing = self.standing(pair, now);
            let other = location(address_of(pair.other.gid), pair.other.qpn);
            if standing == PeerStanding::Named && self.objects.confirming.is_about(pair.own.qpn, other) {
                self.objects.confirming.note_sign(pair.own.qpn, now);
            }
            standing
        };
        Ok(Reply::PeerStandings(pairs.iter().map(meet).collect()))
    }

    /// How a queue pair of this RNIC stands to one that names it. One that is named is sent to from then on.
    fn standing(&mut self, pair: &PeerPair, now: Time) -> PeerStanding {
        if !self.gids.contains(&pair.own.gid) {
            return PeerStanding::Foreign;
        }
        let Some(qp) = self.objects.qps.get(pair.own.qpn) else {
            return PeerStanding::Missing;
        };
        if qp.transport.as_rc().is_none() {
            return PeerStanding::Elsewhere;
        }
        if matches!(qp.transport.state(), QpState::Reset | QpState::Init) {
            return PeerStanding::Unconnected;
        }
        if qp.pair(pair.own.qpn) != Some(*pair) {
            return PeerStanding::Elsewhere;
        }
        // Nobody is here who could tell the other one that it is over.
        if !self.objects.confirming.is_on() {
            return PeerStanding::Named;
        }
        match self.objects.named.note(*pair, now) {
            true => PeerStanding::Named,
            false => PeerStanding::Unconnected,
        }
    }

    /// Before anybody has a turn to send: what waits in a queue pair's rings goes with that turn, and no timer or doorbell would bring another.
    #[inline]
    pub(super) fn hear_peers(&mut self, now: Time) {
        for heard in std::mem::take(&mut self.effects.heard_peers) {
            self.heard_of_peer(&heard, now);
        }
    }

    /// A partner's RNIC has told, by the secret of both, that it is there and knows this queue pair. A program knows its secret, too: so that
    /// is enough to go on only if the message has come from where the partner says that it is, straight from that RNIC, which speaks of its own
    /// queue pairs alone. In either case it is asked whether the other end names this one.
    fn heard_of_peer(&mut self, heard: &Heard, now: Time) {
        let Heard {
            qpn,
            partner,
            is_direct,
        } = *heard;
        let found = self.objects.qps.get_mut(qpn);
        let Some(qp) = found.filter(|qp| qp.other_end() == Some(partner) && !qp.serves_host) else {
            return;
        };
        if !self.objects.confirming.is_on() {
            return;
        }
        let confirmation = match is_direct {
            true => Confirmation::Confirmed,
            false => Confirmation::Awaited,
        };
        let before = std::mem::replace(&mut qp.confirmation, confirmation);
        if is_direct && !before.is_open() {
            qp.transport.restart(now);
        }
        self.touched.add(qpn, qp);
        self.objects.confirming.insert(qpn, partner, now);
    }

    fn judge_peer(&mut self, qpn: u32, verdict: PeerVerdict, now: Time) {
        let Objects { qps, confirming, .. } = &mut self.objects;
        let Some(qp) = qps.get(qpn) else {
            return confirming.remove(qpn, now);
        };
        match confirming.judge(qpn, verdict, qp.confirmation, now) {
            Then::Wait => {}
            Then::Open => self.confirm(qpn, Confirmation::Confirmed, now),
            Then::Deny => self.confirm(qpn, Confirmation::Denied, now),
        }
    }

    /// Before anybody has a turn to send, as for whoever was heard.
    fn confirm(&mut self, qpn: u32, confirmation: Confirmation, now: Time) {
        let Self { objects, touched, .. } = self;
        let Some(qp) = objects.qps.get_mut(qpn) else {
            return;
        };
        let before = std::mem::replace(&mut qp.confirmation, confirmation);
        if before == confirmation || before.is_open() && confirmation.is_open() {
            return;
        }
        tracing::debug!(
            qpn,
            ?before,
            ?confirmation,
            "whether the other end names a queue pair"
        );
        if !before.is_open() && !qp.stopped {
            // What time there was, was none for it.
            qp.transport.restart(now);
        }
        touched.add(qpn, qp);
    }
}

impl Objects {
    /// A queue pair tells its partner's RNIC that it goes on here. That one sends to it from then on.
    pub fn names_its_partner(&mut self, qpn: u32, now: Time) {
        let pair = self.qps.get(qpn).and_then(|qp| qp.pair(qpn));
        if let Some(pair) = pair.filter(|_| self.confirming.is_on()) {
            // With too many others on the list the partner asks, and waits.
            self.named.note(pair, now);
        }
    }

    /// A queue pair has been given another other end, or none.
    pub fn other_end_changed(&mut self, qpn: u32, before: Option<Location>, now: Time) {
        let Some(qp) = self.qps.get_mut(qpn) else {
            return self.confirming.remove(qpn, now);
        };
        let other = qp.other_end();
        if other == before {
            return;
        }
        qp.confirmation = Confirmation::Exempt;
        let is_asked_about = self.confirming.is_on() && !qp.serves_host;
        self.confirming.remove(qpn, now);
        let Some(other) = other.filter(|_| is_asked_about) else {
            return;
        };
        if let Some(qp) = self.qps.get_mut(qpn) {
            qp.confirmation = Confirmation::Awaited;
        }
        self.confirming.insert(qpn, other, now);
        // The other end may be here, and wait for this one.
        let own = self.qps.get(qpn).and_then(QueuePair::own_address);
        let own = own.map(|address| location(address, qpn));
        let there = other.qpn.get();
        if own.is_some_and(|own| self.confirming.is_about(there, own)) {
            self.confirming.schedule(there, now);
        }
    }
}

impl QueuePair {
    /// The other end of a reliable connection, as far as it is set.
    pub fn other_end(&self) -> Option<Location> {
        let rc = self.transport.as_rc()?;
        let qpn = match rc.peer() {
            Some(peer) => peer.qpn,
            None => rc.query().dest_qpn?,
        };
        let address = self.route?.remote;
        Some(Location { address, qpn })
    }

    /// Both ends of a reliable connection, as far as they are set.
    fn pair(&self, qpn: u32) -> Option<PeerPair> {
        let other = self.other_end()?;
        Some(PeerPair {
            own: QpEnd {
                gid: gid(self.own_address()?),
                qpn,
            },
            other: QpEnd {
                gid: gid(other.address),
                qpn: other.qpn.get(),
            },
        })
    }

    fn own_address(&self) -> Option<IpAddr> {
        Some(self.route?.flow.source().ip())
    }

    /// It is stopped to go on elsewhere, or its partner is, and it cannot be said where it will be.
    pub fn is_between_rnics(&self) -> bool {
        let transport = self.transport.as_rc();
        transport.is_some_and(|transport| transport.standing() != Standing::Running)
    }

    /// It may not send yet, and no time passes for it.
    #[inline]
    pub fn is_awaiting(&self) -> bool {
        self.confirmation == Confirmation::Awaited && self.is_kept_from_sending() && !self.is_between_rnics()
    }

    /// It is in a state in which it sends to its other end, and may not.
    #[inline]
    pub fn is_kept_from_sending(&self) -> bool {
        !self.confirmation.is_open()
            && matches!(self.transport.state(), QpState::Rtr | QpState::Rts | QpState::Sqd)
    }
}

fn within(pairs: usize) -> Result<(), Refused> {
    match pairs <= MAX_PEER_PAIRS {
        true => Ok(()),
        false => Err(Refused::invalid(format!(
            "one request names at most {MAX_PEER_PAIRS} pairs of queue pairs"
        ))),
    }
}
