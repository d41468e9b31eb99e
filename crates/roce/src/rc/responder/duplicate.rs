//! Requests that were executed before (IBA §9.7.5.1.4): an answer was lost, or the network doubled a packet.

use super::super::link::Link;
use super::Responder;
use super::answers::ReadAnswer;
use crate::wire::opcode::Kind;
use crate::{AccessFlags, Counters, Host, Packet, Psn, RemoteAccess};

/// READs that were asked for again, beyond `max_dest_rd_atomic`, that may wait for being answered.
const MAX_EXTRA_READS: usize = 16;

impl Responder {
    /// Answers again, and executes only a READ again.
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
            _ => {}
        }
    }

    /// Says how far things are, which spares the partner to send the rest again. But not beyond a later READ: the partner
    /// may be without its data, and would take such an acknowledgement for an implied NAK.
    fn acknowledge_again(&mut self, psn: Psn) {
        let read_since = self.last_read.is_some_and(|read| psn.distance_from(read) < 0);
        self.answers
            .acknowledge(if read_since { psn } else { self.expected.sub(1) });
    }

    /// The partner goes back to this READ, so it asks again for everything after it too: answers that wait and are for
    /// the same PSNs or later ones are forgotten. If it was the network that doubled the packet, the partner will find
    /// an answer missing and ask again.
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
        self.answers.forget_from(packet.bth.psn);
        if self.answers.reads() < usize::from(self.max_dest_rd_atomic) + MAX_EXTRA_READS {
            self.answers.read(ReadAnswer {
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
