//! How many packets may be under way: bounded by what the partner's socket buffer can hold, halved on loss and
//! opened again by acknowledgements.

/// Never fewer than this, if the limit allows it.
const FLOOR: u32 = 4;

/// A window in packets.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Window {
    limit: u32,
    current: u32,
    /// Packets acknowledged since the window last grew.
    credit: u32,
}

impl Window {
    /// Sets the limit, at least one packet, and opens the window that far.
    pub fn limit(&mut self, packets: u32) {
        self.limit = packets.max(1);
        self.current = self.limit;
    }

    pub fn packets(&self) -> u32 {
        self.current
    }

    pub fn limit_packets(&self) -> u32 {
        self.limit
    }

    /// A packet was lost.
    pub fn on_loss(&mut self) {
        self.current = (self.current / 2).max(FLOOR).min(self.limit);
        self.credit = 0;
    }

    /// So many packets have arrived: the window grows by an eighth for each window that does.
    pub fn on_ack(&mut self, packets: u32) {
        if self.current == self.limit {
            return;
        }
        self.credit += packets;
        if self.credit >= self.current {
            self.credit = 0;
            self.current = (self.current + self.current / 8 + 1).min(self.limit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_and_recovers() {
        let mut window = Window::default();
        window.limit(100);
        window.on_loss();
        assert_eq!(window.packets(), 50);
        for _ in 0..10 {
            window.on_loss();
        }
        assert_eq!(window.packets(), FLOOR);
        for _ in 0..100 {
            window.on_ack(50);
        }
        assert_eq!(window.packets(), 100);
        window.limit(0);
        window.on_loss();
        assert_eq!(window.packets(), 1);
    }
}
