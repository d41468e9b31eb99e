//! Stopping, waiting and going on.

use super::counter::Counter;
use super::messages::{Message, Own, Received, Unverified};
use super::{LONGEST_RESUME_INTERVAL, Migration, RESUME_INTERVAL, Secret, Standing};
use crate::link::{Outlet, SendError};
use crate::rc::RcQp;
use crate::shell::{Phase, Shell};
use crate::verbs::{VENDOR_ERR_PAUSED, VENDOR_ERR_RESUMING};
use crate::{Event, Host, Location, MigrationCounters, Packet, Psn, QpState, Time, Transmit, TxBatch};

impl RcQp {
    /// Sets the secret that this RNIC shares with the partner's, or takes it away. Another one begins its counters anew, so
    /// both ends change it together. It ends with the connection (RESET).
    pub fn set_secret(&mut self, secret: Option<Secret>) {
        if self.migration.secret != secret {
            let (mut sent, accepted): (Counter, Counter) = Default::default();
            if self.migration.standing == Standing::Resuming {
                // The partner does not know yet where this end is: what it hears under this secret says so first.
                sent = sent.next_epoch().unwrap_or(sent);
            }
            self.migration = Migration {
                secret,
                sent,
                accepted,
                ..std::mem::take(&mut self.migration)
            };
        }
    }

    /// Does it share a secret with the partner's RNIC?
    pub fn has_secret(&self) -> bool {
        self.migration.secret.is_some()
    }

    /// Where the partner is, if it has gone on elsewhere: the attributes do not tell.
    pub fn peer(&self) -> Option<Location> {
        self.shell.peer
    }

    /// Where it is between stop and resume.
    pub fn standing(&self) -> Standing {
        self.migration.standing
    }

    /// Stops, in the middle of whatever is under way: sends nothing but NAK "stopped", takes nothing in, completes nothing,
    /// and no time passes. Says whether it is stopped: only what may send or receive can be (RTR, RTS, SQD).
    ///
    /// It may then be saved ([`RcQp::save`]), and [`RcQp::resume`] lets it go on.
    pub fn halt(&mut self, now: Time) -> bool {
        if !matches!(self.shell.state, QpState::Rtr | QpState::Rts | QpState::Sqd) {
            return false;
        }
        self.send_acknowledgement();
        self.migration.run();
        self.migration.acknowledge = None;
        self.migration.standing = Standing::Stopped;
        self.requester.freeze(now, None);
        self.refresh_phase();
        true
    }

    /// Once it is stopped: at that time it goes on by itself, as by [`RcQp::resume`]; with `None` it does not. An image says
    /// nothing of it.
    pub fn limit_halt(&mut self, now: Time, limit: Option<Time>) {
        if self.migration.standing == Standing::Stopped {
            self.migration.limit = limit;
            self.requester.freeze(now, self.migration.alarm());
        }
    }

    /// Time has passed while it is stopped.
    #[cold]
    pub(in crate::rc) fn halted(&mut self, now: Time) {
        if self.migration.limit.is_some_and(|limit| limit <= now) {
            self.resume(now);
        }
    }

    /// A queue pair that was restored is stopped, if it is live at all.
    pub(in crate::rc) fn stand_still(&mut self) {
        if matches!(self.shell.state, QpState::Rtr | QpState::Rts | QpState::Sqd) {
            self.migration.standing = Standing::Stopped;
        }
        self.refresh_phase();
    }

    /// Goes on after [`RcQp::halt`], here or where it was restored, and tells its partner so until that knows. Nothing
    /// else is sent before. Without a secret it goes on at once, as if what was under way had been lost.
    pub fn resume(&mut self, now: Time) {
        if self.migration.standing != Standing::Stopped {
            return;
        }
        self.migration.run();
        let next_epoch = self.migration.sent.next_epoch();
        match (self.migration.secret, next_epoch) {
            (Some(_), Some(counter)) => {
                self.migration.sent = counter;
                self.migration.standing = Standing::Resuming;
                self.migration.resume_at = Some(now);
                self.migration.resume_interval = RESUME_INTERVAL;
                self.wait(now);
            }
            _ => self.requester.restart(now),
        }
        self.refresh_phase();
    }

    /// Sets the limit of the waiting that begins.
    fn wait(&mut self, now: Time) {
        self.migration.limit = Some(now + self.shell.config.pause_limit);
        self.requester.freeze(now, self.migration.alarm());
    }

    /// The phase that follows from the state and all this.
    pub(in crate::rc) fn refresh_phase(&mut self) {
        let migration = &self.migration;
        let live = matches!(self.shell.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        self.shell.phase = match (live, migration.standing) {
            (false, _) => Phase::of(self.shell.state),
            (true, Standing::Stopped) => Phase::Stopped,
            (true, Standing::Paused | Standing::Resuming) => Phase::Waiting,
            (true, Standing::Running) if migration.acknowledge.is_some() => Phase::Waiting,
            (true, Standing::Running) => Phase::of(self.shell.state),
        };
    }

    /// A packet was not let in: a request is told why, if it is that the queue pair is stopped.
    #[cold]
    pub(in crate::rc) fn turn_away(&mut self, packet: &Packet<'_>) {
        if self.shell.phase == Phase::Stopped && packet.info.is_request() && self.shell.is_addressed(packet) {
            self.migration.nak_due = true;
        }
    }

    /// A response has come while something is waited for. What comes while the requester stands still is dropped, as if it
    /// had been lost: it is asked for again.
    #[cold]
    pub(in crate::rc) fn takes_responses(&self) -> bool {
        self.shell.state != QpState::Rtr && !self.migration.is_waiting()
    }

    /// What it has counted of pause and resume.
    pub fn migration_counters(&self) -> &MigrationCounters {
        &self.migration.counters
    }

    /// Does something, and tells the host what was counted meanwhile.
    fn counted<H: Host, T>(&mut self, host: &mut H, act: impl FnOnce(&mut Self, &mut H) -> T) -> T {
        let before = self.migration.counters;
        let done = act(self, host);
        let counted = self.migration.counters.since(&before);
        if counted != MigrationCounters::default() {
            host.count_migration(&counted);
        }
        done
    }

    /// A message of the extension has come.
    #[cold]
    pub(in crate::rc) fn handle_migration(&mut self, now: Time, packet: &Packet<'_>, host: &mut impl Host) {
        self.counted(host, |qp, host| qp.take_message(now, packet, host));
        self.refresh_phase();
        self.settle(host);
    }

    fn take_message(&mut self, now: Time, packet: &Packet<'_>, host: &mut impl Host) {
        let received = match self.migration.open(packet) {
            Ok(received) => received,
            Err(Unverified) => {
                self.migration.counters.migration_forged += 1;
                return;
            }
        };
        if received.counter <= self.migration.accepted {
            self.migration.counters.migration_replayed += 1;
            return;
        }
        match received.message {
            Message::Stopped => {
                self.migration.accepted = received.counter;
                self.migration.counters.rcvd_stop_naks += 1;
                if self.migration.standing == Standing::Running {
                    self.migration.counters.pauses += 1;
                    self.migration.standing = Standing::Paused;
                    self.wait(now);
                }
            }
            Message::Resume { acknowledged } => {
                if self.meet(now, &received, acknowledged, host) {
                    self.migration.counters.rcvd_resumes += 1;
                    self.migration.acknowledge = Some(received.counter);
                }
            }
            Message::Resumed { about } => {
                if !self.migration.awaits(about) {
                    // To a RESUME of an earlier stay.
                    self.migration.counters.migration_replayed += 1;
                } else if self.meet(now, &received, None, host) {
                    self.migration.counters.rcvd_resume_acks += 1;
                    self.migration.run();
                    self.requester.restart(now);
                }
            }
        }
    }

    /// Takes over where the partner goes on, and what it says of the PSNs, with its first message since it does. Says
    /// whether all of that can be.
    fn meet(
        &mut self,
        now: Time,
        received: &Received,
        acknowledged: Option<Psn>,
        host: &mut impl Host,
    ) -> bool {
        let begun = matches!(self.shell.state, QpState::Rts | QpState::Sqd);
        if self.migration.is_new_epoch(received.counter) {
            // The partner knows of nothing that was not executed here, and of nothing that was not sent from here.
            let executed = acknowledged.is_none_or(|psn| psn.distance_from(self.responder.expected()) <= 0);
            let sent = !begun || self.requester.has_sent(received.expected);
            let plausible = received.source.is_plausible() && executed && sent;
            if !plausible || !host.peer_moved(&received.source) {
                self.migration.counters.migration_refused += 1;
                return false;
            }
            self.shell.set_peer(received.source);
            if begun {
                let counters = &mut self.shell.counters;
                self.requester.note_executed(received.expected, host, counters);
            }
            if self.migration.standing == Standing::Paused {
                self.migration.run();
            }
            if self.migration.standing == Standing::Running {
                self.requester.restart(now);
            }
        }
        self.migration.accepted = received.counter;
        host.partner_is_at(&received.source, received.is_direct);
        true
    }

    /// Time has passed while something is waited for.
    #[cold]
    pub(in crate::rc) fn waited(&mut self, now: Time, host: &mut impl Host) {
        if !self.migration.is_waiting() {
            return;
        }
        if self.migration.limit.is_none_or(|limit| now < limit) {
            return;
        }
        self.counted(host, |qp, host| qp.waited_too_long(now, host));
    }

    fn waited_too_long(&mut self, now: Time, host: &mut impl Host) {
        self.migration.counters.pause_limit_exceeded += 1;
        let resuming = self.migration.standing == Standing::Resuming;
        let vendor_err = match resuming {
            true => VENDOR_ERR_RESUMING,
            false => VENDOR_ERR_PAUSED,
        };
        let may_send = self.shell.state == QpState::Rts;
        let link = &self.shell.link;
        if self.requester.give_up(vendor_err, may_send, link, host) {
            self.shell.counters.retry_exceeded_err += 1;
        } else if resuming {
            // The partner may have failed, or be gone, for long: who has nothing to say to it need not know, moved or not.
            self.migration.run();
            self.requester.restart(now);
            self.refresh_phase();
        } else {
            // There is no request that could tell.
            self.shell.counters.retry_exceeded_err += 1;
            host.event(Event::Fatal);
            self.enter_error(self.shell.state, host);
        }
    }

    /// What is sent while something is waited for: the messages of the extension; and behind them all the rest, if it is
    /// only an acknowledgement that kept it.
    #[cold]
    pub(in crate::rc) fn transmit_waiting(
        &mut self,
        now: Time,
        host: &mut impl Host,
        batch: &mut TxBatch,
        budget: usize,
    ) -> Transmit {
        match self.counted(host, |qp, _| qp.send_messages(now, batch)) {
            Ok(()) => {}
            Err(SendError::Full | SendError::Access) => return Transmit::Full,
        }
        self.refresh_phase();
        match self.migration.standing {
            Standing::Running => self.transmit(now, host, batch, budget),
            _ => Transmit::Idle,
        }
    }

    /// In the place of [`RcQp::poll_transmit`], for a NIC that does not know yet whether the partner names this queue pair: sends
    /// nothing but messages about stop and resume, which the partner's RNIC believes by their secret only.
    #[cold]
    pub fn poll_messages(&mut self, now: Time, host: &mut impl Host, batch: &mut TxBatch) -> Transmit {
        if !matches!(self.shell.phase, Phase::Stopped | Phase::Waiting) {
            return Transmit::Idle;
        }
        let sent = self.counted(host, |qp, _| qp.send_messages(now, batch));
        self.refresh_phase();
        match sent {
            Ok(()) => Transmit::Idle,
            Err(SendError::Full | SendError::Access) => Transmit::Full,
        }
    }

    fn send_messages(&mut self, now: Time, batch: &mut TxBatch) -> Result<(), SendError> {
        let begun = matches!(self.shell.state, QpState::Rts | QpState::Sqd);
        let own = Own {
            qpn: self.shell.qpn,
            acknowledged: begun.then(|| self.requester.progress().0),
            expected: self.responder.expected(),
            msn: self.responder.msn(),
        };
        let Shell { link, counters, .. } = &mut self.shell;
        let mut outlet = Outlet {
            link,
            batch,
            counters,
            budget: 1,
        };
        let migration = &mut self.migration;
        if std::mem::take(&mut migration.nak_due) && migration.standing == Standing::Stopped {
            if let Err(full) = migration.send(Message::Stopped, &own, &mut outlet) {
                migration.nak_due = true;
                return Err(full);
            }
            migration.counters.sent_stop_naks += 1;
        }
        if let Some(about) = migration.acknowledge {
            migration.send(Message::Resumed { about }, &own, &mut outlet)?;
            migration.acknowledge = None;
            migration.counters.sent_resume_acks += 1;
        }
        if migration.standing == Standing::Resuming && migration.resume_at.is_none_or(|at| at <= now) {
            let acknowledged = own.acknowledged;
            migration.send(Message::Resume { acknowledged }, &own, &mut outlet)?;
            migration.counters.sent_resumes += 1;
            migration.resume_at = Some(now + migration.resume_interval);
            migration.resume_interval = (migration.resume_interval * 2).min(LONGEST_RESUME_INTERVAL);
            self.requester.freeze(now, migration.alarm());
        }
        Ok(())
    }
}
