//! Where datagrams go and where they come from, once anybody has moved.
//!
//! A datagram names its receiver anew each time, by an address handle and a queue pair number. When that queue pair has
//! moved, the agents tell every program, and from then on the request gets another number and the address handle of
//! another host ([`Datagrams::to_physical`]). What arrives from a moved queue pair is shown under the numbers that the
//! program knows: in the completion, and in the 40 bytes in front of the data ([`Datagrams::show`]).
//!
//! The lock here is taken under queue locks, and no other lock under it.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::RwLock;
use verbatim_channel::{Endpoint, MovedEndpoint};

use crate::grh::Grh;
use crate::sys;
use crate::work::{UdAddress, WC_GRH, Wc};

/// An address handle that no RNIC has: a request with it fails as one with a handle that was destroyed.
const NO_AH: u32 = u32::MAX;

/// What one context knows of the ways of datagrams.
#[derive(Debug, Default)]
pub struct Datagrams {
    /// Something differs from what the program knows.
    translates: AtomicBool,
    ways: RwLock<Ways>,
}

#[derive(Debug, Default)]
struct Ways {
    /// By the number that the program knows.
    ahs: HashMap<u32, Handle>,
    /// Queue pairs that are elsewhere now, by what programs know.
    moved: HashMap<Endpoint, MovedEndpoint>,
    /// What programs know them by, by where they are.
    known: HashMap<Endpoint, Endpoint>,
    /// This context's own GIDs on its RNIC, and those that the program knows.
    own: Vec<([u8; 16], [u8; 16])>,
    /// Regions whose addresses are not those of the process, by local key: what is to be added.
    shifts: HashMap<u32, u64>,
}

#[derive(Debug)]
struct Handle {
    gid: [u8; 16],
    physical: u32,
    /// The same way to other hosts, where queue pairs of this one have moved to.
    elsewhere: Vec<([u8; 16], u32)>,
}

/// Where a RECV's first entry is: where the 40 bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Front {
    pub address: u64,
    /// Virtual.
    pub lkey: u32,
    pub length: u32,
}

impl Datagrams {
    /// Whether anything differs from what the program knows.
    #[inline]
    pub fn translates(&self) -> bool {
        self.translates.load(Relaxed)
    }

    /// A handle that the program has made.
    pub fn add_handle(&self, number: u32, gid: [u8; 16], physical: u32) {
        let handle = Handle {
            gid,
            physical,
            elsewhere: Vec::new(),
        };
        self.ways.write().ahs.insert(number, handle);
        if number != physical {
            self.translates.store(true, Relaxed);
        }
    }

    /// Forgets a handle; the RNIC's numbers of it.
    pub fn remove_handle(&self, number: u32) -> Vec<u32> {
        let removed = self.ways.write().ahs.remove(&number);
        removed.map_or_else(Vec::new, |handle| {
            let elsewhere = handle.elsewhere.iter().map(|(_, physical)| *physical);
            elsewhere.chain([handle.physical]).collect()
        })
    }

    /// The RNIC's number of a handle.
    pub fn physical_handle(&self, number: u32) -> Option<u32> {
        self.ways.read().ahs.get(&number).map(|handle| handle.physical)
    }

    /// Where a handle leads; to which other hosts too, after what is known now, and none is made for yet.
    pub fn wanted(&self, number: u32) -> Vec<[u8; 16]> {
        let ways = self.ways.read();
        let Some(handle) = ways.ahs.get(&number) else {
            return Vec::new();
        };
        let mut wanted: Vec<[u8; 16]> = Vec::new();
        for moved in ways.moved.values().filter(|moved| moved.known.gid == handle.gid) {
            let gid = moved.now.gid;
            let has = gid == handle.gid || handle.elsewhere.iter().any(|(there, _)| *there == gid);
            if !has && !wanted.contains(&gid) {
                wanted.push(gid);
            }
        }
        wanted
    }

    /// The same way to another host is there from now on. False: the handle is gone.
    #[must_use]
    pub fn add_way(&self, number: u32, gid: [u8; 16], physical: u32) -> bool {
        let mut ways = self.ways.write();
        let Some(handle) = ways.ahs.get_mut(&number) else {
            return false;
        };
        handle.elsewhere.push((gid, physical));
        true
    }

    /// Queue pairs that are elsewhere now. What is older than what is known is passed over.
    pub fn learn(&self, moved: &[MovedEndpoint]) {
        let mut ways = self.ways.write();
        for entry in moved {
            if let Some(earlier) = ways.moved.get(&entry.known) {
                if earlier.moves >= entry.moves {
                    continue;
                }
                let earlier = earlier.now;
                if ways.known.get(&earlier) == Some(&entry.known) {
                    ways.known.remove(&earlier);
                }
            }
            ways.moved.insert(entry.known, *entry);
            ways.known.insert(entry.now, entry.known);
        }
        if !moved.is_empty() {
            self.translates.store(true, Relaxed);
        }
    }

    /// The context is on another RNIC, which has no handle of it yet. Its own GIDs there, and what the program knows.
    pub fn arrive(&self, own: Vec<([u8; 16], [u8; 16])>) {
        let mut ways = self.ways.write();
        ways.own = own;
        for handle in ways.ahs.values_mut() {
            handle.physical = NO_AH;
            handle.elsewhere.clear();
        }
        self.translates.store(true, Relaxed);
    }

    /// A region's addresses are so much less than the process's.
    pub fn set_shift(&self, lkey: u32, shift: u64) {
        let mut ways = self.ways.write();
        match shift {
            0 => _ = ways.shifts.remove(&lkey),
            _ => _ = ways.shifts.insert(lkey, shift),
        }
    }

    /// Where the RNIC is to send what the program sends to `address`.
    pub fn to_physical(&self, address: UdAddress) -> UdAddress {
        let ways = self.ways.read();
        let Some(handle) = ways.ahs.get(&address.ah) else {
            return UdAddress { ah: NO_AH, ..address };
        };
        let known = Endpoint {
            gid: handle.gid,
            qpn: address.remote_qpn,
        };
        let Some(moved) = ways.moved.get(&known) else {
            return UdAddress {
                ah: handle.physical,
                ..address
            };
        };
        let there = match moved.now.gid == handle.gid {
            true => Some(handle.physical),
            false => {
                let found = handle.elsewhere.iter().find(|(gid, _)| *gid == moved.now.gid);
                found.map(|(_, physical)| *physical)
            }
        };
        UdAddress {
            // Without a handle there, the datagram goes where it would have gone: it is lost, as datagrams may be.
            ah: there.unwrap_or(handle.physical),
            remote_qpn: moved.now.qpn,
            ..address
        }
    }

    /// Puts the numbers that the program knows into a completion and into the 40 bytes in front of what has arrived.
    pub fn show(&self, wc: &mut Wc, front: Front) {
        if wc.wc_flags & WC_GRH == 0 || (front.length as usize) < Grh::BYTES {
            return;
        }
        let ways = self.ways.read();
        let shift = ways.shifts.get(&front.lkey).copied().unwrap_or(0);
        let address = front.address.wrapping_add(shift);
        let mut bytes = [0; Grh::BYTES];
        // Not the program's memory any more: then nobody will look.
        if !sys::read_own_memory(address, &mut bytes) {
            return;
        }
        let mut grh = Grh::new(bytes);
        let source = Endpoint {
            gid: grh.source(),
            qpn: wc.src_qp,
        };
        if let Some(known) = ways.known.get(&source) {
            wc.src_qp = known.qpn;
            grh.set_source(known.gid);
        }
        let destination = grh.destination();
        if let Some((_, known)) = ways.own.iter().find(|(physical, _)| *physical == destination) {
            grh.set_destination(*known);
        }
        if grh.bytes() != &bytes {
            sys::write_own_memory(address, grh.bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(host: u8, qpn: u32) -> Endpoint {
        let mut gid = [0; 16];
        (gid[10], gid[11], gid[12], gid[15]) = (0xff, 0xff, 10, host);
        Endpoint { gid, qpn }
    }

    fn moved(known: Endpoint, now: Endpoint, moves: u32) -> MovedEndpoint {
        MovedEndpoint { known, now, moves }
    }

    fn to(ah: u32, remote_qpn: u32) -> UdAddress {
        UdAddress {
            ah,
            remote_qpn,
            remote_qkey: 7,
        }
    }

    #[test]
    fn requests_follow_each_queue_pair_to_where_it_is() {
        let ways = Datagrams::default();
        ways.add_handle(1, end(1, 0).gid, 1);
        assert!(!ways.translates());
        ways.learn(&[moved(end(1, 10), end(2, 20), 1), moved(end(1, 11), end(3, 30), 1)]);
        assert!(ways.translates());
        let mut wanted = ways.wanted(1);
        wanted.sort_unstable();
        assert_eq!(wanted, [end(2, 0).gid, end(3, 0).gid]);
        assert!(ways.add_way(1, end(2, 0).gid, 5) && ways.add_way(1, end(3, 0).gid, 6));
        assert!(ways.wanted(1).is_empty());
        assert_eq!(ways.to_physical(to(1, 10)), to(5, 20));
        assert_eq!(ways.to_physical(to(1, 11)), to(6, 30));
        assert_eq!(ways.to_physical(to(1, 12)), to(1, 12), "it has not moved");
        // Older news that come late change nothing; newer ones do, also those of who comes home.
        ways.learn(&[moved(end(1, 10), end(1, 40), 3)]);
        ways.learn(&[moved(end(1, 10), end(3, 21), 2)]);
        assert_eq!(ways.to_physical(to(1, 10)), to(1, 40));
        assert_eq!(ways.remove_handle(1), [5, 6, 1]);
        assert_eq!(ways.to_physical(to(1, 10)).ah, NO_AH);
    }

    #[test]
    fn what_arrives_shows_the_numbers_that_the_program_knows() {
        let ways = Datagrams::default();
        ways.learn(&[moved(end(1, 10), end(2, 20), 1)]);
        ways.arrive(vec![(end(9, 0).gid, end(8, 0).gid)]);
        let mut memory = Grh::ipv4_for_tests([10, 0, 0, 2], [10, 0, 0, 9]);
        let address = (&raw mut memory) as u64;
        let mut wc = Wc {
            wc_flags: WC_GRH,
            src_qp: 20,
            ..Wc::default()
        };
        let front = Front {
            address: address - 64,
            lkey: 3,
            length: 100,
        };
        ways.set_shift(3, 64);
        ways.show(&mut wc, front);
        assert_eq!(wc.src_qp, 10);
        let shown = Grh::new(memory);
        assert_eq!(
            (shown.source(), shown.destination()),
            (end(1, 0).gid, end(8, 0).gid)
        );
        assert_eq!(
            memory,
            Grh::ipv4_for_tests([10, 0, 0, 1], [10, 0, 0, 8]),
            "with its checksum"
        );
        // Of the same number on another host nothing is known; memory that is not there is left alone.
        let mut other = Grh::ipv4_for_tests([10, 0, 0, 3], [10, 0, 0, 9]);
        let front = Front {
            address: (&raw mut other) as u64,
            ..Front { lkey: 1, ..front }
        };
        wc.src_qp = 20;
        ways.show(&mut wc, front);
        assert_eq!(wc.src_qp, 20);
        ways.show(&mut wc, Front { address: 8, ..front });
        assert_eq!(wc.src_qp, 20);
    }
}
