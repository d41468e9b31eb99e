//! How much may be on its way to one destination, shared by the queue pairs that have something to send there.
//!
//! A receiver's socket buffer is one for all of its queue pairs. Each queue pair's transport has a window of its own, and
//! thousands of them would overflow the buffer; a fixed share for each would starve the one that is busy beside
//! thousands that are idle. So those count that are active, and each may have its share of the whole just before it
//! transmits.

use std::collections::HashMap;
use std::net::IpAddr;

/// One packet of the largest MTU, so that everybody gets on.
const NARROWEST_WINDOW_BYTES: u32 = 4 << 10;

/// More for one queue pair does not make it faster, measured between two network namespaces.
pub const WIDEST_WINDOW_BYTES: u32 = 256 << 10;

#[derive(Debug, Default, Clone, Copy)]
struct Peer {
    /// Routes that go there.
    routes: u32,
    /// Queue pairs with something on its way or waiting.
    active: u32,
}

/// All destinations.
#[derive(Debug, Default)]
pub struct Peers {
    numbers: HashMap<IpAddr, u32>,
    peers: Vec<Peer>,
    free: Vec<u32>,
}

impl Peers {
    /// A route there begins; gives the destination's number.
    pub fn begin(&mut self, address: IpAddr) -> u32 {
        let number = *self.numbers.entry(address).or_insert_with(|| {
            self.free.pop().unwrap_or_else(|| {
                self.peers.push(Peer::default());
                self.peers.len() as u32 - 1
            })
        });
        self.peers[number as usize].routes += 1;
        number
    }

    /// A route there ends; its queue pair is not active any more.
    pub fn end(&mut self, number: u32, address: IpAddr) {
        let peer = &mut self.peers[number as usize];
        peer.routes -= 1;
        if peer.routes == 0 {
            *peer = Peer::default();
            self.numbers.remove(&address);
            self.free.push(number);
        }
    }

    /// A queue pair begins or ends to be active.
    #[inline]
    pub fn set_active(&mut self, number: u32, active: bool) {
        let peer = &mut self.peers[number as usize];
        peer.active = match active {
            true => peer.active + 1,
            false => peer.active.saturating_sub(1),
        };
    }

    /// A queue pair's share of `budget` bytes.
    #[inline]
    pub fn window(&self, number: u32, budget: u32) -> u32 {
        let share = budget / self.peers[number as usize].active.max(1);
        share.clamp(NARROWEST_WINDOW_BYTES, WIDEST_WINDOW_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_active_ones_share() {
        const BUDGET: u32 = 2 << 20;
        let mut peers = Peers::default();
        let [a, b] = [1, 2].map(|host| IpAddr::from([10, 0, 0, host]));
        let number = peers.begin(a);
        for _ in 0..4095 {
            assert_eq!(peers.begin(a), number);
        }
        let other = peers.begin(b);
        assert_ne!(other, number);
        assert_eq!(peers.window(number, BUDGET), WIDEST_WINDOW_BYTES);
        for _ in 0..64 {
            peers.set_active(number, true);
        }
        assert_eq!(peers.window(number, BUDGET), BUDGET / 64);
        assert_eq!(peers.window(other, BUDGET), WIDEST_WINDOW_BYTES);
        for _ in 64..4096 {
            peers.set_active(number, true);
        }
        assert_eq!(peers.window(number, BUDGET), NARROWEST_WINDOW_BYTES);
        for _ in 0..4096 {
            peers.set_active(number, false);
            peers.end(number, a);
        }
        assert_eq!(
            peers.begin([10, 0, 0, 3].into()),
            number,
            "its place is used again"
        );
        assert_eq!(peers.numbers.len(), 2);
    }
}
