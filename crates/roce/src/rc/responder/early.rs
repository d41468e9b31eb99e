//! Requests that come too early: one before them is missing.
//!
//! They are dropped, all of them, and the partner is told which PSN is missing, as the standard has it (IBA §9.7.4.1.2,
//! §9.7.5.2.8). Packets do not say that they are the partner's: a forged one that was kept would be executed in the place
//! of the partner's own, which then is a duplicate. As it is, a forger has to guess the one PSN of 2^24 that is expected.
//!
//! A NAK costs the partner all that it has under way, so a forged packet shall not cause one either. One packet is enough for
//! a NAK if it is [`NEAR`]. Farther ahead it takes [`FAR_ROW`] of which each follows the one before it: a partner that has
//! lost more than that, or whose READs take many PSNs each, sends more of them. For each gap there is one NAK; there is
//! another one if the partner has begun again, so that what is missing was lost once more, and one for each [`ROW`] of packets
//! that follow each other, in case the NAK was lost.

use crate::Psn;

/// How far ahead a single packet may be to be answered with a NAK.
const NEAR: u32 = 32;

/// So many packets farther ahead are, if each follows the one before it.
const FAR_ROW: u32 = 8;

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
    /// How many of those have come in a row since the partner was told.
    row: u32,
    /// Where the latest one ends of those that are far ahead and do not follow, and how many of them have come in a row.
    far: Option<(Psn, u32)>,
    told: Told,
}

impl Early {
    /// A packet has come of which the first PSN is expected later, and that takes so many. Says whether to send a NAK.
    pub fn note(&mut self, expected: Psn, first: Psn, packets: u32) -> bool {
        let end = first.add(packets);
        let near = first.offset_from(expected) <= NEAR;
        let follows = self.latest.is_some_and(|latest| latest.end == first);
        if !near && !follows {
            let row = match self.far {
                Some((far_end, row)) if far_end == first => row + 1,
                _ => 1,
            };
            self.far = Some((end, row));
            if row < FAR_ROW {
                return false;
            }
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
        for ahead in [2, 3, 5, 6, 7, 9, 20, 21, 300, 5000] {
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
    fn a_packet_far_ahead_is_answered_at_the_end_of_a_row() {
        let mut early = Early::default();
        for ahead in [NEAR + 1, 1000, 1001, 1003, 999, 1 << 20, (1 << 23) - 1] {
            assert!(!note(&mut early, ahead, 1), "{ahead}");
        }
        let naks: Vec<u32> = (0..12)
            .filter(|n| note(&mut early, 4000 + n * 500, 500))
            .collect();
        assert_eq!(naks, [FAR_ROW - 1]);
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
