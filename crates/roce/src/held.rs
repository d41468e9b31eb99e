//! Answers with data that came too early: some before them are missing.
//!
//! The standard has the requester drop them, and ask again for all from the gap on (IBA §9.7.5.1.2). Here some are kept, and
//! taken as soon as the missing ones have come; only those are asked for again. On the wire that is nothing new. Requests
//! that come early are dropped (see the responder's `early`).
//!
//! Packets do not say that they are the partner's, so a forged one could be kept and taken in the place of the partner's own.
//! So one that came alone is not taken. It must have come directly behind the data before it, or those behind it directly
//! after it: a forger has to guess an exact PSN for either. Two of one PSN that differ are both dropped. What is dropped is
//! asked for again.
//!
//! The memory for it is bounded by [`crate::QpConfig::hold_bytes`] for each queue pair and by a [`HoldBudget`] for all of
//! them, and gone when the gap is. What does not fit is dropped.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use crate::{Packet, Psn};

/// What one packet counts for beside its payload.
const PACKET_BYTES: usize = 256;

/// Memory for packets that came too early, shared by queue pairs: a partner of many could make each of them hold some.
#[derive(Clone, Debug)]
pub struct HoldBudget(Arc<AtomicUsize>);

impl HoldBudget {
    /// So many bytes.
    pub fn new(bytes: usize) -> HoldBudget {
        HoldBudget(Arc::new(AtomicUsize::new(bytes)))
    }

    /// Bytes that are left.
    pub fn left_bytes(&self) -> usize {
        self.0.load(Relaxed)
    }

    fn take(&self, bytes: usize) -> bool {
        let less = |left: usize| left.checked_sub(bytes);
        self.0.fetch_update(Relaxed, Relaxed, less).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.0.fetch_add(bytes, Relaxed);
    }
}

#[derive(Debug)]
struct HeldPacket {
    head: Packet<'static>,
    payload: Box<[u8]>,
    /// It came in a row with another one.
    in_row: bool,
}

impl HeldPacket {
    fn bytes(&self) -> usize {
        PACKET_BYTES + self.payload.len()
    }

    /// Does it say the same? Which of several packets of one answer it is may differ if it was asked for again.
    fn is_same(&self, packet: &Packet<'_>) -> bool {
        self.head.info.kind == packet.info.kind
            && self.head.atomic_ack == packet.atomic_ack
            && *self.payload == *packet.payload
    }
}

/// Packets that wait for an earlier one, by PSN.
#[derive(Debug, Default)]
pub(crate) struct Held {
    packets: Vec<HeldPacket>,
    bytes: usize,
    /// The PSN behind the data that came last.
    row_end: Psn,
    /// Where the bytes were taken from.
    budget: Option<HoldBudget>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(budget) = &self.budget {
            budget.give_back(self.bytes);
        }
    }
}

/// What there is at a PSN.
#[derive(Debug)]
pub(crate) enum Release {
    Packet(Released),
    /// There was one that came alone.
    Dropped,
    Nothing,
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

    /// The data of this PSN have come in time.
    pub fn note_in_time(&mut self, psn: Psn) {
        self.row_end = psn.next();
    }

    /// Keeps a packet behind `expected`, if there is room. The budget is the same each time.
    pub fn keep(
        &mut self,
        packet: &Packet<'_>,
        expected: Psn,
        most_bytes: usize,
        budget: Option<&HoldBudget>,
    ) {
        let psn = packet.bth.psn;
        let distance = psn.offset_from(expected);
        let offset = |held: &HeldPacket| held.head.bth.psn.offset_from(expected);
        let in_row = std::mem::replace(&mut self.row_end, psn.next()) == psn;
        // They mostly come in order, so the place is mostly at the end: the list is in falling order of PSNs, so that
        // the next one to be released is at the end of the memory, and this is found by bisection.
        let at = self.packets.partition_point(|held| offset(held) > distance);
        if let Some(held) = self.packets.get_mut(at).filter(|held| offset(held) == distance) {
            held.in_row |= in_row;
            if !held.is_same(packet) {
                self.take_out(at);
            }
            return;
        }
        if in_row
            && let Some(before) = self
                .packets
                .get_mut(at)
                .filter(|held| offset(held) + 1 == distance)
        {
            before.in_row = true;
        }
        let bytes = PACKET_BYTES + packet.payload.len();
        if self.bytes + bytes > most_bytes || !budget.is_none_or(|budget| budget.take(bytes)) {
            return;
        }
        if self.budget.is_none() {
            self.budget = budget.cloned();
        }
        let held = HeldPacket {
            head: Packet {
                payload: &[],
                grh: None,
                ..*packet
            },
            payload: packet.payload.into(),
            in_row,
        };
        self.packets.insert(at, held);
        self.bytes += bytes;
    }

    fn take_out(&mut self, at: usize) -> HeldPacket {
        let held = self.packets.remove(at);
        self.bytes -= held.bytes();
        if let Some(budget) = &self.budget {
            budget.give_back(held.bytes());
        }
        held
    }

    /// Takes the packet with this PSN, unless it came alone; those before it are not needed any more.
    pub fn release(&mut self, expected: Psn) -> Release {
        while let Some(held) = self.packets.last() {
            let distance = held.head.bth.psn.distance_from(expected);
            if distance > 0 {
                return Release::Nothing;
            }
            let held = self.take_out(self.packets.len() - 1);
            match distance {
                0 if held.in_row => return Release::Packet(Released(held)),
                0 => return Release::Dropped,
                _ => {}
            }
        }
        // Nothing is missing: neither is the memory.
        self.packets = Vec::new();
        Release::Nothing
    }

    /// The earliest PSN that there is.
    pub fn first(&self) -> Option<Psn> {
        self.packets.last().map(|held| held.head.bth.psn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::bth::{BTH_BYTES, Bth};
    use crate::wire::opcode::Opcode;

    const BYTES: usize = 1 << 16;

    fn keep(held: &mut Held, psn: u32, content: u8, expected: u32) {
        let mut bytes = vec![content; BTH_BYTES + 8 + 4];
        let bth = Bth {
            opcode: Opcode::RC_READ_RESPONSE_MIDDLE,
            solicited: false,
            migrated: true,
            pad_count: 0,
            version: 0,
            pkey: 0xffff,
            fecn: false,
            becn: false,
            dest_qpn: crate::Qpn::new(1),
            ack_request: false,
            psn: Psn::new(psn),
        };
        bth.emit(bytes.first_chunk_mut().expect("as long as a BTH"));
        let packet = Packet::parse(&bytes).expect("it is a packet");
        held.keep(&packet, Psn::new(expected), BYTES, None);
    }

    /// The content of what is released from a PSN on, and the PSN where that ends.
    fn released(held: &mut Held, from: u32) -> (Vec<u8>, u32) {
        let (mut content, mut at) = (Vec::new(), from);
        while let Release::Packet(released) = held.release(Psn::new(at)) {
            content.push(released.packet().payload[0]);
            at += 1;
        }
        (content, at)
    }

    #[test]
    fn a_row_is_taken() {
        let mut held = Held::default();
        held.note_in_time(Psn::new(9));
        for psn in [11, 12, 13, 15, 16] {
            keep(&mut held, psn, psn as u8, 10);
        }
        held.note_in_time(Psn::new(10));
        assert_eq!(released(&mut held, 11), (vec![11, 12, 13], 14));
        assert_eq!(held.first(), Some(Psn::new(15)));
        assert_eq!(released(&mut held, 15), (vec![15, 16], 17));
        assert_eq!(held.bytes, 0);
    }

    #[test]
    fn what_came_alone_is_dropped() {
        let mut held = Held::default();
        held.note_in_time(Psn::new(9));
        keep(&mut held, 14, 0xee, 10);
        for psn in [10, 11, 12, 13] {
            held.note_in_time(Psn::new(psn));
        }
        assert!(matches!(held.release(Psn::new(14)), Release::Dropped));
        // The partner's own was lost, and more of its data come.
        for psn in [15, 16] {
            keep(&mut held, psn, psn as u8, 14);
        }
        assert!(matches!(held.release(Psn::new(14)), Release::Nothing));
        assert_eq!(released(&mut held, 15), (vec![15, 16], 17));
        assert_eq!(held.bytes, 0);
    }

    #[test]
    fn of_two_that_differ_neither_is_kept() {
        let mut held = Held::default();
        for (psn, content) in [(11, 1), (12, 1), (12, 1), (13, 1), (12, 0xee)] {
            keep(&mut held, psn, content, 10);
        }
        assert_eq!(released(&mut held, 11), (vec![1], 12));
        assert_eq!(released(&mut held, 13), (vec![1], 14));
    }
}
