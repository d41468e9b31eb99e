//! Queue pairs that have left: a RESUME that was sent to where one was is passed on to where it is.
//!
//! So both ends of a connection may move at the same time, though each tells the other's old place where it goes on. Nothing
//! else is passed on: who was told NAK "stopped" sends nothing else before it has heard from the new place.

use std::collections::HashMap;

use crate::tx::{BatchFull, TxBatch};
use crate::wire::bth::Bth;
use crate::wire::migeth::{MIGETH_BYTES, MOST_HOPS, MigrationEth};
use crate::wire::opcode::Opcode;
use crate::wire::packet::{Head, packet_bytes};
use crate::{Location, Packet, Qpn, Time};

#[derive(Clone, Copy, Debug)]
struct Entry {
    to: Location,
    until: Time,
}

/// The forwarding entries of an RNIC, by the numbers that queue pairs had here.
#[derive(Debug)]
pub struct Forwarding {
    entries: HashMap<Qpn, Entry>,
    most_entries: usize,
}

/// A RESUME on its way on.
#[derive(Clone, Copy, Debug)]
pub struct Forwarded {
    /// Where it goes: its address is that of the next UDP flow.
    pub to: Location,
    bth: Bth,
    header: MigrationEth,
}

impl Forwarding {
    /// No entries yet, and never more than so many.
    pub fn new(most_entries: usize) -> Forwarding {
        Forwarding {
            entries: HashMap::new(),
            most_entries,
        }
    }

    /// The queue pair that had this number is there now; remembered until that time. Says whether there was room.
    pub fn insert(&mut self, now: Time, left: Qpn, to: Location, until: Time) -> bool {
        if self.entries.len() >= self.most_entries && !self.entries.contains_key(&left) {
            self.entries.retain(|_, entry| now < entry.until);
            if self.entries.len() >= self.most_entries {
                return false;
            }
        }
        self.entries.insert(left, Entry { to, until });
        true
    }

    /// There is a queue pair with this number here (again).
    pub fn remove(&mut self, qpn: Qpn) {
        self.entries.remove(&qpn);
    }

    /// How many entries there are, those included whose time is over and that nobody has asked for since.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Are there none?
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// What is to be passed on of a packet whose ICRC was good: a RESUME for a queue pair that has left, if it was not passed
    /// on too often before. Who it is from is not known here: that is found out at its destination.
    pub fn forward(&mut self, now: Time, packet: &Packet<'_>) -> Option<Forwarded> {
        if packet.bth.opcode != Opcode::RC_RESUME {
            return None;
        }
        let left = packet.bth.dest_qpn;
        let Entry { to, until } = *self.entries.get(&left)?;
        if until <= now {
            self.entries.remove(&left);
            return None;
        }
        let bytes: &[u8; MIGETH_BYTES] = packet.payload.try_into().ok()?;
        let mut header = MigrationEth::parse(bytes);
        if header.hops > MOST_HOPS {
            // It would look like one that nobody has forwarded.
            return None;
        }
        header.hops = header.hops.checked_sub(1)?;
        let bth = Bth {
            dest_qpn: to.qpn,
            ..packet.bth
        };
        Some(Forwarded { to, bth, header })
    }
}

impl Forwarded {
    /// Appends it to a batch whose flow goes to its destination; false if it does not fit, and the batch is to be sent first.
    pub fn append(&self, batch: &mut TxBatch) -> bool {
        let bytes = packet_bytes(Opcode::RC_RESUME, MIGETH_BYTES);
        if batch.fits(bytes).is_err() {
            return false;
        }
        let appended: Result<(), BatchFull> = batch.append(bytes, |body| {
            let payload = Head::new(self.bth).emit(body, MIGETH_BYTES);
            self.header
                .emit(payload.try_into().expect("its size was asked for"));
            Ok(())
        });
        appended.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::Link;
    use crate::wire::bth::BTH_BYTES;
    use crate::wire::migeth::{MAC_BYTES, MIGETH_VERSION};

    /// Hops of a RESUME that had so many left and was passed on.
    fn hops_after(hops: u8) -> Option<u8> {
        let location = |qpn| Location {
            address: [10, 0, 0, 2].into(),
            qpn: Qpn::new(qpn),
        };
        let mut forwarding = Forwarding::new(1);
        let now = Time::from_nanos(1);
        assert!(forwarding.insert(now, Qpn::new(7), location(9), Time::from_nanos(2)));
        let mut payload = [0; MIGETH_BYTES];
        let header = MigrationEth {
            version: MIGETH_VERSION,
            hops,
            begun: false,
            expected: crate::Psn::new(0),
            source: location(8),
            counter: 1,
            about: 0,
            mac: [0; MAC_BYTES],
        };
        header.emit(&mut payload);
        let mut bth = Link::default().bth(Opcode::RC_RESUME, crate::Psn::new(0));
        bth.dest_qpn = Qpn::new(7);
        let mut bytes = vec![0; BTH_BYTES];
        bth.emit(bytes.first_chunk_mut().expect("as long as a BTH"));
        bytes.extend(payload);
        bytes.extend([0; 4]);
        let packet = Packet::parse(&bytes).expect("it is a packet");
        let forwarded = forwarding.forward(now, &packet)?;
        assert_eq!(forwarded.to, location(9));
        Some(forwarded.header.hops)
    }

    /// The MAC does not cover the hops. A program, which knows the secret, could otherwise let another RNIC make of one hop too many a
    /// message that looks like one that nobody has passed on: from that RNIC's own address.
    #[test]
    fn nothing_that_is_passed_on_looks_as_if_it_were_direct() {
        for hops in 0..=u8::MAX {
            let expected = (1..=MOST_HOPS).contains(&hops).then(|| hops - 1);
            assert_eq!(hops_after(hops), expected, "{hops} hops");
            assert_ne!(hops_after(hops), Some(MOST_HOPS));
        }
    }
}
