//! How much to send again when a packet is missing: from the whole rest down to that packet alone.
//!
//! The standard has the partner drop what follows a gap, so all of it is to be sent again (go back N). Partners of our
//! kind keep it ([`crate::held`]); nothing in the packets says so, but it shows: the acknowledgement then goes beyond what
//! was sent again. So a repair begins with one packet and is doubled each time that it brought nothing beyond itself,
//! which makes it go back N after a few losses, and is one packet again as soon as it did.
//!
//! The partner executes what it has kept only when it sees that we have gone on behind it, since any of that may be forged.
//! So behind a repair the latest packet is sent again, unless a new one can be. A partner that keeps nothing drops that
//! too, and its NAK for what comes behind the repair shows it.

use crate::Psn;

/// A part of what is under way that is sent again.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Repair {
    /// How many packets the next one has, less one, so that the default is one packet.
    more: u32,
    /// Still to be sent, up to the end.
    next: Option<Psn>,
    /// The end of the latest one, until something comes of it.
    end: Option<Psn>,
    /// It is known what is missing: data that was asked for.
    exact: bool,
    /// Something behind it is to be sent, or was: it shows the partner that we have gone on.
    shows: bool,
    /// That is still to be sent.
    owed: bool,
}

impl Repair {
    /// How many packets to send again.
    pub fn packets(&self) -> u32 {
        self.more + 1
    }

    /// Begins to send again from a PSN, of the `most` packets that are under way. Something is to be sent behind it if it
    /// ends before `high`, the end of what was ever sent.
    pub fn begin(&mut self, from: Psn, most: u32, high: Psn) {
        let packets = self.packets().min(most);
        self.exact = false;
        self.shows = high.distance_from(from.add(packets)) > 0;
        self.owed = self.shows;
        self.begin_with(from, packets);
    }

    /// Begins to ask again for so many packets that are missing.
    pub fn begin_exact(&mut self, from: Psn, packets: u32) {
        self.exact = true;
        self.show_nothing();
        self.begin_with(from, packets);
    }

    fn begin_with(&mut self, from: Psn, packets: u32) {
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

    /// Is everything sent but what shows the partner that we have gone on?
    pub fn owes(&self) -> bool {
        self.owed && self.next.is_none()
    }

    /// Something was sent behind it.
    pub fn note_shown(&mut self) {
        self.owed = false;
    }

    /// Nothing can be sent behind it.
    pub fn show_nothing(&mut self) {
        self.shows = false;
        self.owed = false;
    }

    /// Will there be an answer to what is behind it?
    pub fn shows(&self) -> bool {
        self.shows
    }

    /// Forgets what is to be sent.
    pub fn cancel(&mut self) {
        self.next = None;
        self.end = None;
        self.show_nothing();
    }

    /// The packet with this PSN is missing. If that is where the latest one ends, the partner has kept nothing behind it.
    pub fn refuse(&mut self, psn: Psn) {
        if self.end == Some(psn) && self.next.is_none() {
            self.widen();
            self.cancel();
        }
    }

    fn widen(&mut self) {
        self.more = (self.more * 2 + 1).min(Psn::MASK >> 2);
    }

    /// Everything before `ack` has arrived; `all` says whether that is all that was ever sent.
    pub fn learn(&mut self, ack: Psn, all: bool) {
        if let Some(next) = self.next
            && ack.distance_from(next) > 0
        {
            self.next = Some(ack).filter(|_| self.end.is_some_and(|end| end.distance_from(ack) > 0));
        }
        let Some(beyond) = self.end.map(|end| ack.distance_from(end)) else {
            return;
        };
        match beyond {
            ..0 => return,
            _ if all || self.exact => {}
            // The answer to what is behind it tells.
            0 if self.shows => return,
            0 => self.widen(),
            1.. => self.more = 0,
        }
        self.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_until_something_comes_of_it() {
        let psn = Psn::new;
        let mut repair = Repair::default();
        for (from, packets) in [(10, 1), (11, 2), (13, 4)] {
            assert_eq!(repair.packets(), packets);
            repair.begin(psn(from), 100, psn(from + packets));
            for at in from..from + packets {
                assert_eq!(repair.next(), Some((psn(at), at + 1 == from + packets)));
                repair.note_sent(1);
            }
            assert_eq!(repair.next(), None);
            repair.learn(psn(from + packets), false);
            assert!(repair.end.is_none());
        }
        repair.begin(psn(17), 4, psn(21));
        repair.learn(psn(18), false);
        assert!(repair.ends_at(psn(21)), "the end has not come");
        assert_eq!(repair.next(), Some((psn(18), false)));
        repair.learn(psn(40), false);
        assert_eq!((repair.packets(), repair.next()), (1, None));
        repair.begin(psn(50), 1, psn(51));
        repair.learn(psn(51), true);
        assert_eq!(repair.packets(), 1, "there was nothing to go beyond to");
    }

    #[test]
    fn what_is_sent_behind_it_tells_whether_the_partner_keeps_what_comes_early() {
        let psn = Psn::new;
        let mut repair = Repair::default();
        let begin = |repair: &mut Repair| {
            repair.begin(psn(10), 50, psn(60));
            assert!(!repair.owes(), "the missing packet comes first");
            repair.note_sent(1);
            assert!(repair.owes());
            repair.note_shown();
            repair.learn(psn(11), false);
            assert!(!repair.owes() && repair.ends_at(psn(11)));
        };
        begin(&mut repair);
        repair.refuse(psn(12));
        assert_eq!(repair.packets(), 1);
        repair.refuse(psn(11));
        assert_eq!(repair.packets(), 2);
        repair.cancel();
        repair.more = 0;
        begin(&mut repair);
        repair.learn(psn(60), false);
        assert_eq!(repair.packets(), 1);
        assert!(!repair.ends_at(psn(11)));
    }
}
