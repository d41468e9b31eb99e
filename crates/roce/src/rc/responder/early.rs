//! Requests that come too early: one before them is missing.
//!
//! They are dropped, all of them, and the partner is told which PSN is missing, as the standard has it (IBA §9.7.4.1.2,
//! §9.7.5.2.8). Packets do not say that they are the partner's: a forged one that was kept would be executed in the place
//! of the partner's own, which then is a duplicate. As it is, a forger has to guess the one PSN of 2^24 that is expected.
//!
//! A NAK costs the partner all that it has under way, so a forged packet shall not cause one either. One packet is
//! enough for a NAK if it is [`NEAR`]: there a partner of our kind is, whatever it has lost. Farther ahead it takes two of
//! which one follows the other: a partner that has far more under way sends more of it. For each gap there is one NAK; there
//! is another one if the partner has begun again, so that what is missing was lost once more, and one for each
//! [`ROW`] of packets that follow each other, in case the NAK was lost.

use crate::Psn;

/// How far ahead a single packet may be to be answered with a NAK: the most packets that an RNIC of ours has under way.
const NEAR: u32 = 256;

/// So many packets behind a gap, each of which follows the one before it, show that the partner does not know of it.
const ROW: u32 = 16;

/// What the partner was told of the PSN that is expected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Told {
    #[default]
    Nothing,
    /// It is missing.
    Missing,
    /// There was no RECV for it.
    NotReady,
}

/// A packet by the PSNs that it takes.
#[derive(Clone, Copy, Debug)]
struct Span {
    first: Psn,
    end: Psn,
}

/// What has come behind the PSN that is expected.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Early {
    /// The latest packet that may be the partner's.
    latest: Option<Span>,
    /// Where the latest one ends of those that are far ahead.
    far_end: Option<Psn>,
    /// How many have come in a row since the partner was told.
    row: u32,
    told: Told,
}

impl Early {
    /// A packet has come of which the first PSN is expected later, and that takes so many. Says whether to send a NAK.
    pub fn note(&mut self, expected: Psn, first: Psn, packets: u32) -> bool {
        let end = first.add(packets);
        let near = first.offset_from(expected) <= NEAR;
        let follows = self.latest.is_some_and(|latest| latest.end == first);
        if !near && !follows && self.far_end.replace(end) != Some(first) {
            return false;
        }
        let begins_again = near
            && self
                .latest
                .is_some_and(|latest| first.distance_from(latest.first) < 0);
        self.latest = Some(Span { first, end });
        self.row = if follows { self.row + 1 } else { 0 };
        let unheard = self.row >= ROW && self.told == Told::Missing;
        if self.told != Told::Nothing && !begins_again && !unheard {
            return false;
        }
        self.row = 0;
        self.told = Told::Missing;
        true
    }

    /// The partner is told that there is no RECV for the PSN that is expected. Says whether it does not know yet.
    pub fn note_not_ready(&mut self) -> bool {
        std::mem::replace(&mut self.told, Told::NotReady) == Told::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: u32 = 0xff_fff0;

    fn note(early: &mut Early, ahead: u32, packets: u32) -> bool {
        let expected = Psn::new(EXPECTED);
        early.note(expected, expected.add(ahead), packets)
    }

    #[test]
    fn one_gap_is_one_nak() {
        let mut early = Early::default();
        assert!(note(&mut early, 1, 1));
        for ahead in [2, 3, 5, 6, 7, 9, 200, 201, 300, 5000] {
            assert!(!note(&mut early, ahead, 1), "{ahead}");
        }
        assert!(note(&mut early, 1, 1), "the partner has begun again");
        assert!(!note(&mut early, 2, 1));
    }

    #[test]
    fn a_partner_that_goes_on_does_not_know() {
        let mut early = Early::default();
        let naks: Vec<u32> = (1..60).filter(|ahead| note(&mut early, *ahead, 1)).collect();
        assert_eq!(naks, [1, 1 + ROW, 1 + 2 * ROW, 1 + 3 * ROW]);
    }

    #[test]
    fn a_single_packet_far_ahead_is_not_answered_and_two_in_a_row_are() {
        let mut early = Early::default();
        for ahead in [NEAR + 1, 1000, 1002, 999, 1 << 20, (1 << 23) - 1] {
            assert!(!note(&mut early, ahead, 1), "{ahead}");
        }
        assert!(!note(&mut early, 4000, 500));
        assert!(note(&mut early, 4500, 500));
        assert!(!note(&mut early, 5000, 500));
        assert!(!note(&mut early, 4000, 1), "it has not begun again there");
    }

    #[test]
    fn what_is_not_ready_is_not_missing() {
        let mut early = Early::default();
        assert!(early.note_not_ready());
        assert!(!early.note_not_ready());
        for ahead in 1..100 {
            assert!(!note(&mut early, ahead, 1));
        }
        assert!(
            note(&mut early, 1, 1),
            "the partner has begun again, and it was lost"
        );
    }
}
