//! A request that came before its turn: one before it is missing, or it is forged.
//!
//! The partner is told of a gap by one NAK for each PSN that is expected (IBA §9.7.5.1.1): when the first packet behind the
//! gap comes, and while the gap is filled and several packets behind it are held ([`crate::held`]) after 1, 3, 7 … packets,
//! which are the repairs of a partner of our kind. So a packet that is held far ahead of a connection in which nothing is
//! missing costs one NAK, and a row of them a few, and not one for each packet that the partner sends.
//!
//! Once the gap is filled, what is behind it waits for the next packet: a partner of our kind sends its latest one again
//! behind each repair, or new ones. Others begin again at the gap, and each packet of theirs is executed as it comes.

use super::{PendingNak, Responder};
use crate::held::{Early, Keeping, Sight};
use crate::link::Link;
use crate::wire::aeth::{NakCode, Syndrome};
use crate::wire::opcode::Kind;
use crate::{Counters, Host, Packet, Time};

/// Packets behind a gap until a partner that repairs singly is told of it again.
const EARLY_PER_NAK: u32 = 8;

impl Responder {
    /// A packet that comes too early.
    pub(super) fn handle_early(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        link: &Link,
        host: &mut impl Host,
        counters: &mut Counters,
    ) {
        let psn = packet.bth.psn;
        let sight = match self.held.is_empty() {
            true => Sight::Nothing,
            false => self.held.see(packet, self.expected),
        };
        if sight != Sight::Nothing {
            // What is expected waited for nothing but this.
            self.forget_gap();
            self.execute_held(true, link, host, counters);
            if sight == Sight::Past && !self.ending {
                self.take(now, packet, link, host, counters);
            }
            return;
        }
        counters.out_of_sequence += 1;
        if psn.distance_from(self.expected) > self.hold_psns {
            counters.early_dropped += 1;
            // A partner with so much under way (a long READ) goes on from there.
            let far = self.far.replace(psn);
            let goes_on = far.is_some_and(|far| (1..=self.hold_psns).contains(&psn.distance_from(far)));
            if goes_on {
                self.give_nak(Syndrome::Nak(NakCode::PsnSequenceError));
            }
            return;
        }
        // A step back: the partner has begun again, and what is missing was lost once more. And a partner that
        // repairs singly never steps back, so it is told again from time to time, in case the NAK was lost, or
        // the repair.
        let steps_back = self.early.is_some_and(|early| psn.distance_from(early) < 0);
        self.early_count += 1;
        if steps_back || self.repairs_singly && self.early_count >= EARLY_PER_NAK {
            self.nak_given = false;
            self.early_count = 0;
        }
        self.early = Some(psn);
        self.keep(now, packet, link, host, counters);
        self.give_nak(Syndrome::Nak(NakCode::PsnSequenceError));
    }

    fn keep(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        link: &Link,
        host: &mut impl Host,
        counters: &mut Counters,
    ) {
        if self.held.is_empty() {
            self.filled = 0;
        }
        let span = match packet.reth {
            Some(reth) if packet.info.kind == Kind::ReadRequest => link.mtu.packets(reth.dma_len),
            _ => 1,
        };
        let early = Early { packet, span, now };
        let keeping = self
            .held
            .keep(&early, self.expected, self.hold_bytes, host.hold_budget());
        match keeping {
            Keeping::Kept => counters.early_kept += 1,
            Keeping::Known => {}
            Keeping::Dropped => counters.early_dropped += 1,
            Keeping::Conflict => counters.early_conflicts += 1,
        }
    }

    /// What has waited, and in which the partner was seen. The partner is told of what is missing then, if it does not send
    /// that anyway.
    pub(super) fn execute_held(
        &mut self,
        tell: bool,
        link: &Link,
        host: &mut impl Host,
        counters: &mut Counters,
    ) {
        self.filled += 1;
        while let Some(released) = self.held.release_seen(self.expected) {
            self.released = true;
            self.filled = 0;
            if let Err(refusal) = self.execute(&released.packet(), link, host, counters) {
                return self.refuse(refusal, host, counters);
            }
        }
        let Some(first) = self.held.first() else { return };
        // Nothing is missing before it: what the partner sends next shows whether it is the partner's.
        let waits = first.psn == self.expected && first.follows;
        // One packet alone, behind more than one that is missing, may be forged: it is told of once, when it comes.
        let is_gap = first.follows || first.passed;
        if tell && !waits && is_gap && (self.filled + 1).is_power_of_two() {
            self.give_nak(Syndrome::Nak(NakCode::PsnSequenceError));
        }
    }

    /// The packet that was expected is there.
    pub(super) fn forget_gap(&mut self) {
        self.nak_given = false;
        self.nak = None;
        self.early = None;
        self.early_count = 0;
    }

    /// Asks for the expected packet (again), once.
    pub(super) fn give_nak(&mut self, syndrome: Syndrome) {
        if !self.nak_given {
            self.nak_given = true;
            self.nak = Some(PendingNak {
                psn: self.expected,
                syndrome,
            });
        }
    }
}
