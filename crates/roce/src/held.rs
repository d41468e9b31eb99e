//! Packets that came too early: one before them is missing.
//!
//! The standard has the responder drop such requests, and the requester send them again after the NAK (IBA §9.7.4.1.2,
//! §9.7.5.2.8). Here some are kept, and executed as soon as the missing one has come. On the wire that is nothing new:
//! the partner gets the same NAK, and when it sends again from the gap, an acknowledgement of what it sent before, as if
//! that were late. A partner that knows it can repair the gap with one packet (see the requester's `repair`). The
//! requester keeps early answers likewise, and asks again for those alone that are missing.
//!
//! The memory for it is bounded by [`crate::QpConfig::hold_bytes`], and gone when the gap is.

use crate::{Packet, Psn};

/// What one packet counts for beside its payload.
const PACKET_BYTES: usize = 256;

#[derive(Debug)]
struct HeldPacket {
    head: Packet<'static>,
    payload: Box<[u8]>,
}

/// Packets that wait for an earlier one, by PSN.
#[derive(Debug, Default)]
pub(crate) struct Held {
    packets: Vec<HeldPacket>,
    bytes: usize,
}

/// A packet that waits no more.
#[derive(Debug)]
pub(crate) struct Released(HeldPacket);

impl Released {
    pub fn packet(&self) -> Packet<'_> {
        Packet {
            payload: &self.0.payload,
            ..self.0.head
        }
    }
}

impl Held {
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Keeps a packet behind `expected`, if there is room.
    pub fn keep(&mut self, packet: &Packet<'_>, expected: Psn, most_bytes: usize) {
        let bytes = PACKET_BYTES + packet.payload.len();
        if self.bytes + bytes > most_bytes {
            return;
        }
        let distance = packet.bth.psn.offset_from(expected);
        let offset = |held: &HeldPacket| held.head.bth.psn.offset_from(expected);
        // They mostly come in order, so the place is mostly at the end: the list is in falling order of PSNs, so that
        // the next one to be released is at the end of the memory, and this is found by bisection.
        let at = self.packets.partition_point(|held| offset(held) > distance);
        if self.packets.get(at).is_some_and(|held| offset(held) == distance) {
            return;
        }
        let head = Packet {
            bth: packet.bth,
            info: packet.info,
            deth: packet.deth,
            reth: packet.reth,
            atomic_eth: packet.atomic_eth,
            aeth: packet.aeth,
            atomic_ack: packet.atomic_ack,
            imm: packet.imm,
            invalidate: packet.invalidate,
            payload: &[],
            grh: None,
        };
        let payload = packet.payload.into();
        self.packets.insert(at, HeldPacket { head, payload });
        self.bytes += bytes;
    }

    /// Takes the packet with this PSN; those before it are not needed any more.
    pub fn release(&mut self, expected: Psn) -> Option<Released> {
        while let Some(held) = self.packets.pop() {
            self.bytes -= PACKET_BYTES + held.payload.len();
            let distance = held.head.bth.psn.distance_from(expected);
            if distance == 0 {
                return Some(Released(held));
            }
            if distance > 0 {
                self.bytes += PACKET_BYTES + held.payload.len();
                self.packets.push(held);
                return None;
            }
        }
        // Nothing is missing: neither is the memory.
        self.packets = Vec::new();
        None
    }

    /// The earliest PSN that there is.
    pub fn first(&self) -> Option<Psn> {
        self.packets.last().map(|held| held.head.bth.psn)
    }

    pub fn clear(&mut self) {
        *self = Held::default();
    }
}
