//! Answers with data that came too early: some before them are missing.
//!
//! The standard has the requester drop them, and ask again for all from the gap on (IBA §9.7.5.1.2). Here some are kept, and
//! taken as soon as the missing ones have come; only those are asked for again. On the wire that is nothing new. Requests
//! that come early are dropped (see the responder's `early`).
//!
//! The memory for it is bounded by [`crate::QpConfig::hold_bytes`] for each queue pair and by a [`HoldBudget`] for all of
//! them, and gone when the gap is. What does not fit is dropped, as the standard has it.

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
}

/// Packets that wait for an earlier one, by PSN.
#[derive(Debug, Default)]
pub(crate) struct Held {
    packets: Vec<HeldPacket>,
    bytes: usize,
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

    /// Keeps a packet behind `expected`, if there is room. The budget is the same each time.
    pub fn keep(
        &mut self,
        packet: &Packet<'_>,
        expected: Psn,
        most_bytes: usize,
        budget: Option<&HoldBudget>,
    ) {
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
        if !budget.is_none_or(|budget| budget.take(bytes)) {
            return;
        }
        if self.budget.is_none() {
            self.budget = budget.cloned();
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
        while let Some(held) = self.packets.last() {
            let distance = held.head.bth.psn.distance_from(expected);
            if distance > 0 {
                return None;
            }
            let held = self.packets.pop().expect("it was just looked at");
            let bytes = PACKET_BYTES + held.payload.len();
            self.bytes -= bytes;
            if let Some(budget) = &self.budget {
                budget.give_back(bytes);
            }
            if distance == 0 {
                return Some(Released(held));
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
}
