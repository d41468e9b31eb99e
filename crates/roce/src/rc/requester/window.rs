//! How many packets may be under way.
//!
//! Bounded by a limit that the NIC sets (what the partner's socket buffer can hold, or a share of it). Below it the window
//! opens by an eighth for each window that arrives, and while packets wait on the way by a 64th of the limit. When a packet was lost it is halved, but not below what the path
//! was seen to carry in a round trip without queueing: a loss by chance says nothing about congestion, and a loss by a
//! full queue shows in that estimate too (the idea of TCP Westwood). If the round trips are about as short as they ever
//! were, no queue can be full, and an eighth less will do. If they are longer, what was sent behind the loss still fills that
//! queue, while it is sent again: only what the path carries goes at once, and the window doubles with each round from
//! there to the half. When nothing comes back at all, one packet goes to
//! ask, and the window doubles with each round from there to half of what it was; if the answer shows that nothing was
//! lost, it is as wide as before.

/// Never fewer than this after a loss, if the limit allows it.
const FLOOR: u32 = 4;

/// The window opens by such a part of the limit for each window that arrives while packets wait on the way: the same for all
/// that share a path, so that those come closer who have less.
const CAREFUL: u32 = 64;

/// Why the window is down to one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Probe {
    /// Nothing came back for too long.
    Timeout,
    /// The partner had no RECV: there was no loss.
    Receiver,
}

/// A window in packets.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Window {
    limit: u32,
    current: u32,
    /// Packets acknowledged since the window last grew.
    credit: u32,
    /// Below this the window doubles with each round.
    threshold: u32,
    /// What a round trip without queueing carries, by the best of the last rounds.
    path: u32,
    /// The window before a probe, and why that is.
    probe: Option<(u32, Probe)>,
}

impl Window {
    /// Sets the limit, at least one packet. A window that is fully open follows the limit up and down.
    pub fn limit(&mut self, packets: u32) {
        let packets = packets.max(1);
        if packets == self.limit {
            return;
        }
        let was_open = self.current == self.limit;
        self.limit = packets;
        self.current = if was_open {
            packets
        } else {
            self.current.min(packets)
        };
    }

    pub fn packets(&self) -> u32 {
        self.current
    }

    pub fn limit_packets(&self) -> u32 {
        self.limit
    }

    /// A packet was lost; for each window at most one call. Without a queue on the way it was lost by chance.
    pub fn on_loss(&mut self, queueing: bool) {
        if self.probe.is_some() {
            return;
        }
        let least = (self.path + self.path / 4).max(FLOOR).min(self.current);
        let reduced = if queueing {
            self.path -= self.path / 8;
            self.current / 2
        } else {
            self.current - self.current / 8
        };
        self.threshold = reduced.max(least).min(self.limit).max(1);
        self.current = if queueing {
            least.clamp(1, self.threshold)
        } else {
            self.threshold
        };
        self.credit = 0;
    }

    /// The network reports congestion.
    pub fn on_congestion(&mut self) {
        let reduced = self.current - self.current / 5;
        self.current = reduced.max(FLOOR.min(self.current));
        self.threshold = self.current;
    }

    /// Nothing has come back.
    pub fn on_timeout(&mut self) {
        self.collapse(Probe::Timeout);
    }

    /// There was no RECV.
    pub fn on_receiver_not_ready(&mut self) {
        self.collapse(Probe::Receiver);
    }

    fn collapse(&mut self, why: Probe) {
        let before = self.probe.map_or(self.current, |(before, _)| before);
        self.probe = Some((before, why));
        self.current = 1;
    }

    /// What was sent before a timeout had arrived: says whether there was a timeout that was none.
    pub fn undo_timeout(&mut self) -> bool {
        let Some((before, why)) = self.probe.take() else {
            return false;
        };
        self.current = before.min(self.limit);
        why == Probe::Timeout
    }

    /// So many packets have arrived; `queueing` says whether others wait on the way.
    pub fn on_ack(&mut self, packets: u32, queueing: bool) {
        match self.probe.take() {
            Some((before, Probe::Receiver)) => self.current = before.min(self.limit),
            Some((before, Probe::Timeout)) => {
                self.threshold = (before / 2).max(self.path).min(before);
                self.current = FLOOR.min(self.limit);
            }
            None => {}
        }
        if self.current == self.limit {
            return;
        }
        if self.current < self.threshold {
            self.current = self
                .current
                .saturating_add(packets)
                .min(self.threshold)
                .min(self.limit);
            return;
        }
        self.credit += packets;
        if self.credit >= self.current {
            self.credit = 0;
            let more = if queueing {
                (self.limit / CAREFUL).max(1)
            } else {
                self.current / 8 + 1
            };
            self.current = (self.current + more).min(self.limit);
        }
    }

    /// In a round trip, so many packets were delivered that the path would carry `packets` in the shortest one.
    pub fn on_round(&mut self, packets: u32) {
        self.path = packets.max(self.path - self.path.div_ceil(32).min(self.path));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(packets: u32) -> Window {
        let mut window = Window::default();
        window.limit(packets);
        window
    }

    #[test]
    fn halves_and_recovers() {
        let mut window = open(100);
        window.on_loss(true);
        assert_eq!(window.packets(), FLOOR, "nothing is known of the path");
        for packets in [4, 8, 16, 32] {
            window.on_ack(packets, false);
        }
        assert_eq!(window.packets(), 50);
        for _ in 0..10 {
            window.on_loss(true);
        }
        assert_eq!(window.packets(), FLOOR);
        for _ in 0..100 {
            window.on_ack(50, false);
        }
        assert_eq!(window.packets(), 100);
        window.on_loss(true);
        window.on_ack(100, true);
        assert_eq!(window.packets(), 50);
        window.on_ack(50, true);
        assert_eq!(window.packets(), 51, "others wait");
        window.limit(0);
        window.on_loss(true);
        assert_eq!(window.packets(), 1);
    }

    #[test]
    fn a_loss_leaves_what_the_path_carries() {
        let mut window = open(100);
        window.on_round(64);
        window.on_loss(true);
        assert_eq!(window.packets(), 80);
        window.on_loss(false);
        assert_eq!(window.packets(), 70, "the estimate itself is an eighth less: 56");
        for _ in 0..200 {
            window.on_round(0);
        }
        window.on_loss(true);
        window.on_ack(70, false);
        assert_eq!(window.packets(), 35);
    }

    #[test]
    fn a_timeout_asks_with_one_packet() {
        let mut window = open(100);
        window.on_timeout();
        window.on_timeout();
        assert_eq!(window.packets(), 1);
        assert!(window.undo_timeout());
        assert_eq!(window.packets(), 100);

        window.on_timeout();
        let mut rounds = 0;
        while window.packets() < 50 {
            window.on_ack(window.packets(), false);
            rounds += 1;
        }
        assert!(rounds <= 5, "{rounds} rounds");
        assert!(!window.undo_timeout());

        window.on_receiver_not_ready();
        window.on_ack(1, false);
        assert!(window.packets() >= 50);
    }

    #[test]
    fn an_open_window_follows_its_limit() {
        let mut window = open(100);
        window.limit(10);
        assert_eq!(window.packets(), 10);
        window.limit(40);
        assert_eq!(window.packets(), 40);
        window.on_loss(true);
        window.limit(200);
        window.on_ack(40, false);
        assert_eq!(window.packets(), 20);
    }
}
