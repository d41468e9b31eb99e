//! What is sent again without going back to it: data of a READ that are missing among others that have come, and the one
//! packet that asks how things are.

use crate::Psn;

/// A part of what is under way that is sent again.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Repair {
    /// Still to be sent, up to the end.
    next: Option<Psn>,
    /// The end of the latest one, until something comes of it.
    end: Option<Psn>,
    /// It is known what is missing: data that was asked for.
    exact: bool,
}

impl Repair {
    /// Begins to send a packet again, to ask how things are. A READ request is sent whole.
    pub fn begin_probe(&mut self, from: Psn) {
        self.exact = false;
        self.begin(from, 1);
    }

    /// Begins to ask again for so many packets of data that are missing.
    pub fn begin_exact(&mut self, from: Psn, packets: u32) {
        self.exact = true;
        self.begin(from, packets);
    }

    fn begin(&mut self, from: Psn, packets: u32) {
        self.next = Some(from).filter(|_| packets > 0);
        self.end = self.next.map(|from| from.add(packets));
    }

    /// The packet to send now, and whether it is the last one.
    pub fn next(&self) -> Option<(Psn, bool)> {
        let (next, end) = (self.next?, self.end?);
        Some((next, end.distance_from(next) <= 1))
    }

    /// How much data to ask for again at this PSN of a READ, of which `rest` packets are one piece.
    pub fn data_packets(&self, psn: Psn, rest: u32) -> u32 {
        let left = self.end.map_or(0, |end| end.offset_from(psn));
        if self.exact { rest.min(left) } else { rest }
    }

    /// So many packets were sent.
    pub fn note_sent(&mut self, packets: u32) {
        let next = self.next.map(|next| next.add(packets));
        self.next = next.filter(|next| self.end.is_some_and(|end| end.distance_from(*next) > 0));
    }

    /// Is this where the latest one ends?
    pub fn ends_at(&self, psn: Psn) -> bool {
        self.end == Some(psn)
    }

    /// Forgets what is to be sent.
    pub fn cancel(&mut self) {
        *self = Repair::default();
    }

    /// Everything before `ack` has arrived.
    pub fn learn(&mut self, ack: Psn) {
        let is_before = |psn: Psn| ack.distance_from(psn) < 0;
        if !self.end.is_some_and(is_before) {
            return self.cancel();
        }
        if let Some(next) = self.next
            && ack.distance_from(next) > 0
        {
            self.next = Some(ack);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_come_meanwhile_is_not_sent() {
        let psn = Psn::new;
        let mut repair = Repair::default();
        assert_eq!(repair.next(), None);
        repair.begin_exact(psn(0xff_fffe), 0);
        assert_eq!(repair.next(), None);
        repair.begin_exact(psn(0xff_fffe), 5);
        assert_eq!(repair.next(), Some((psn(0xff_fffe), false)));
        assert_eq!(repair.data_packets(psn(0xff_fffe), 64), 5);
        repair.note_sent(1);
        repair.learn(psn(1));
        assert_eq!(repair.next(), Some((psn(1), false)));
        repair.note_sent(1);
        assert_eq!(repair.next(), Some((psn(2), true)));
        assert!(repair.ends_at(psn(3)));
        repair.note_sent(1);
        assert_eq!(repair.next(), None);
        assert!(repair.ends_at(psn(3)), "nothing has come of it");
        repair.learn(psn(3));
        assert!(!repair.ends_at(psn(3)));
        repair.begin_probe(psn(5));
        assert_eq!(repair.data_packets(psn(5), 64), 64);
        repair.learn(psn(40));
        assert_eq!(repair.next(), None);
    }
}
