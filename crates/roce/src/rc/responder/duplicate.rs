//! Requests that were executed before (IBA §9.7.5.1.4): an answer was lost, or the network doubled a packet.

use super::Responder;
use super::answers::ReadAnswer;
use crate::link::Link;
use crate::wire::opcode::Kind;
use crate::{AccessFlags, Counters, Host, Packet, Psn, RemoteAccess};

/// READs and atomics that were asked for again, beyond `max_dest_rd_atomic`, that may wait for being answered.
const MAX_EXTRA_READS: usize = 16;

impl Responder {
    /// Answers again, and executes only a READ again: an atomic is answered with what was saved.
    pub(super) fn handle_duplicate(
        &mut self,
        packet: &Packet<'_>,
        link: &Link,
        host: &mut impl Host,
        counters: &mut Counters,
    ) {
        counters.duplicate_request += 1;
        match packet.info.kind {
            Kind::Send | Kind::Write => self.acknowledge_again(packet.bth.psn),
            Kind::ReadRequest => self.read_again(packet, link, host),
            Kind::Atomic | Kind::AtomicWrite => self.atomic_again(packet.bth.psn),
            _ => {}
        }
    }

    /// Says how far things are, which spares the partner to send the rest again. But not beyond a later READ or atomic:
    /// the partner may be without its data, and would take such an acknowledgement for an implied NAK.
    fn acknowledge_again(&mut self, psn: Psn) {
        let read_since = self.last_data.is_some_and(|read| psn.distance_from(read) < 0);
        self.answers
            .acknowledge(if read_since { psn } else { self.expected.sub(1) });
    }

    /// What is not found is too old to be asked for rightly, or never was an atomic: dropped (IBA §9.9.3, class D).
    ///
    /// The latest counts: with few atomics, results from before the PSNs went round are still here.
    fn atomic_again(&mut self, psn: Psn) {
        let saved = self.atomics.iter().rev().find(|saved| saved.psn == psn).copied();
        if let Some(saved) = saved
            && self.has_room_for_again()
        {
            self.answers.atomic_again(psn, saved.value);
        }
    }

    fn has_room_for_again(&self) -> bool {
        self.answers.reads_and_atomics() < usize::from(self.max_dest_rd_atomic) + MAX_EXTRA_READS
    }

    /// The partner is without this data, or a part of what it asked for: what waits to be sent of the same is forgotten.
    fn read_again(&mut self, packet: &Packet<'_>, link: &Link, host: &mut impl Host) {
        let Some(reth) = packet.reth else { return };
        let packets = link.mtu.packets(reth.dma_len);
        let within = packets <= self.expected.offset_from(packet.bth.psn);
        let allowed = self.access.contains(AccessFlags::REMOTE_READ)
            && (reth.dma_len == 0
                || host
                    .check_remote(reth.rkey, reth.virtual_addr, reth.dma_len, RemoteAccess::Read)
                    .is_ok());
        if !within || !allowed {
            return;
        }
        if self.has_room_for_again() {
            self.answers.read_again(ReadAnswer {
                psn: packet.bth.psn,
                packets,
                addr: reth.virtual_addr,
                rkey: reth.rkey,
                len: reth.dma_len,
                started: false,
                again: true,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::answers::{Answer, AtomicAnswer};
    use super::*;
    use crate::QpAttributes;

    /// A partner that rarely sends an atomic: between two of them its PSNs have gone round, and the numbers are the same.
    #[test]
    fn an_atomic_is_answered_with_its_own_result_and_not_with_one_of_the_same_psn_before() {
        let mut responder = Responder::default();
        responder.configure(&QpAttributes {
            max_dest_rd_atomic: Some(4),
            ..QpAttributes::default()
        });
        let psn = Psn::new(5);
        for (at, value) in [(psn, 1), (psn.sub(1), 2), (psn, 3), (psn.next(), 4)] {
            responder.keep_atomic(AtomicAnswer {
                psn: at,
                value: Some(value),
                again: false,
            });
        }
        responder.atomic_again(psn);
        let again = AtomicAnswer {
            psn,
            value: Some(3),
            again: true,
        };
        assert_eq!(responder.answers.front(), Some(&Answer::Atomic(again)));
    }
}
