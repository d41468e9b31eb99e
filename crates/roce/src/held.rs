//! Packets that came too early: one before them is missing.
//!
//! The standard has the responder drop such requests, and the requester send them again after the NAK (IBA §9.7.4.1.2,
//! §9.7.5.2.8). Here some are kept, and executed as soon as the missing one has come. On the wire that is nothing new:
//! the partner gets the same NAK, and when it sends again from the gap, an acknowledgement of what it sent before, as if
//! that were late. A partner that knows it can repair the gap with one packet (see the requester's `repair`). The
//! requester keeps early answers likewise, and asks again for those alone that are missing.
//!
//! Packets do not say that they are the partner's, so one that is forged could wait here and be executed in the place of
//! the partner's own, which then is a duplicate. Dropping all that is early leaves a forger one PSN of 2^24; keeping all of
//! it leaves half of them. So a packet is executed from here only if the order in which packets came shows that the
//! partner's own sequence went through it:
//!
//! - *It follows*: it came after the one before it in this list (or after what was executed), as the next packet or with
//!   one missing in between. A forged one follows only if its PSN is that exact one. What does not follow is kept, too,
//!   and waits until the partner has sent it again: what is behind it then is the partner's, because it follows.
//! - *It was passed*: a packet that follows it came after it. So for answers, whose PSNs are bounded by what was asked for.
//! - *It was seen*: so for requests. A row of forged ones passes itself. But the partner has no reason to stop where the
//!   row begins. So once what was missing has come, the partner must send something more: a packet that is here already,
//!   the same again, which shows that its sequence goes up to there; or one that follows what is here, which shows that
//!   its sequence went through that. A row of forged packets is not the same as what the partner sends at its place.
//! - Another packet of the same PSN came that is not the same: one of the two is forged. Both are dropped, and all that
//!   waits, since the forger may have sent more of it. The connection goes on as if they had been lost.
//!
//! The memory for it is bounded by [`crate::QpConfig::hold_bytes`] for each queue pair and by a [`HoldBudget`] for all of
//! them, and gone when the gap is, or after [`MOST_AGE`]. What does not fit is dropped, as the standard has it.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::{Packet, Psn, Time};

/// No packet waits longer for an earlier one: a partner has sent it again by then, or is gone.
pub(crate) const MOST_AGE: Duration = Duration::from_millis(100);

/// The packets that may be missing between one and the next that follows it.
const MOST_MISSING: u32 = 1;

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
    /// The PSN after it: a READ request takes as many as its answer has packets.
    end: Psn,
    /// When it came.
    at: Time,
    /// How many had come before it.
    order: u64,
    follows: bool,
    passed: bool,
    seen: bool,
}

impl HeldPacket {
    fn psn(&self) -> Psn {
        self.head.bth.psn
    }

    fn bytes(&self) -> usize {
        PACKET_BYTES + self.payload.len()
    }

    /// Is it the same request or answer? What says how it is to be acknowledged is not compared, nor for an answer its
    /// place among the packets of one READ: what is sent again may differ in that.
    fn is_same(&self, packet: &Packet<'_>) -> bool {
        let head = &self.head;
        let opcode = head.bth.opcode == packet.bth.opcode || !packet.info.is_request();
        opcode
            && head.info.kind == packet.info.kind
            && head.reth == packet.reth
            && head.atomic_eth == packet.atomic_eth
            && head.atomic_ack == packet.atomic_ack
            && head.imm == packet.imm
            && head.invalidate == packet.invalidate
            && *self.payload == *packet.payload
    }
}

/// Packets that wait for an earlier one, by PSN.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// In falling order of PSNs, so that the next one to be released is at the end.
    packets: Vec<HeldPacket>,
    bytes: usize,
    /// Where the bytes were taken from.
    budget: Option<HoldBudget>,
    /// No packet is older.
    since: Time,
    /// How many have come since it was empty.
    came: u64,
    /// How many of them had come when the latest packet was executed that had been missing.
    came_before: u64,
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

/// What became of a packet that came too early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keeping {
    /// It waits.
    Kept,
    /// The same one waits already.
    Known,
    /// There is no room for it, or it fills a hole among packets that were passed: it comes again.
    Dropped,
    /// Another one of the same PSN waited. It is dropped as well, and all that waited.
    Conflict,
}

/// A packet that is to be kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Early<'a, 'b> {
    pub packet: &'a Packet<'b>,
    /// How many PSNs it takes.
    pub span: u32,
    /// When it comes.
    pub now: Time,
}

/// What a request shows of those that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sight {
    Nothing,
    /// It is one of them: the partner's sequence goes up to there.
    Again,
    /// It follows one of them: the partner's sequence went through there.
    Past,
}

/// Is this PSN where a sequence goes on whose end is known?
fn follows(psn: Psn, end: Psn) -> bool {
    (0..=MOST_MISSING as i32).contains(&psn.distance_from(end))
}

/// The earliest packet that waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct First {
    pub psn: Psn,
    pub end: Psn,
    /// Is it of the partner's own sequence, if that is so of what is before it?
    pub follows: bool,
    /// Has another one come that follows it?
    pub passed: bool,
}

impl Held {
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Keeps a packet behind `expected`, if there is room. The budget is the same each time.
    pub fn keep(
        &mut self,
        early: &Early<'_, '_>,
        expected: Psn,
        most_bytes: usize,
        budget: Option<&HoldBudget>,
    ) -> Keeping {
        let packet = early.packet;
        let psn = packet.bth.psn;
        let distance = psn.offset_from(expected);
        let offset = |held: &HeldPacket| held.psn().offset_from(expected);
        // They mostly come in order, so the place is mostly at the start, and this is found by bisection.
        let at = self.packets.partition_point(|held| offset(held) > distance);
        let before = match self.packets.get_mut(at) {
            Some(held) if held.psn() == psn => {
                if held.is_same(packet) {
                    return Keeping::Known;
                }
                self.clear();
                return Keeping::Conflict;
            }
            before => before,
        };
        let end = before.as_ref().map_or(expected, |held| held.end);
        let follows = follows(psn, end);
        if let Some(before) = before.filter(|_| follows) {
            if before.passed {
                // Late: what follows the one before it has come.
                return Keeping::Dropped;
            }
            before.passed = true;
        }
        let bytes = PACKET_BYTES + packet.payload.len();
        if self.bytes + bytes > most_bytes || !budget.is_none_or(|budget| budget.take(bytes)) {
            return Keeping::Dropped;
        }
        if self.budget.is_none() {
            self.budget = budget.cloned();
        }
        if self.packets.is_empty() {
            self.since = early.now;
        }
        let head = Packet {
            payload: &[],
            grh: None,
            ..*packet
        };
        let held = HeldPacket {
            head,
            payload: packet.payload.into(),
            end: psn.add(early.span),
            at: early.now,
            order: self.came,
            follows,
            passed: false,
            seen: false,
        };
        self.came += 1;
        self.packets.insert(at, held);
        self.bytes += bytes;
        Keeping::Kept
    }

    /// Takes one out; what followed it follows nothing any more.
    fn take_out(&mut self, at: usize) -> HeldPacket {
        let held = self.packets.remove(at);
        if let Some(next) = at.checked_sub(1).and_then(|next| self.packets.get_mut(next)) {
            next.follows = false;
        }
        self.give_back(held.bytes());
        held
    }

    fn give_back(&mut self, bytes: usize) {
        self.bytes -= bytes;
        if let Some(budget) = &self.budget {
            budget.give_back(bytes);
        }
        if self.packets.is_empty() {
            // Nothing is missing: neither is the memory.
            self.packets = Vec::new();
        }
    }

    /// Drops what is before `expected`, and looks at the packet with that PSN.
    fn at(&mut self, expected: Psn) -> Option<&mut HeldPacket> {
        while let Some(held) = self.packets.last()
            && held.psn().distance_from(expected) < 0
        {
            self.take_out(self.packets.len() - 1);
        }
        self.packets.last_mut().filter(|held| held.psn() == expected)
    }

    fn take_first(&mut self) -> Option<HeldPacket> {
        let held = self.packets.pop()?;
        self.give_back(held.bytes());
        Some(held)
    }

    /// Takes the answer with this PSN, if it follows and was passed; those before it are not needed any more.
    pub fn release_passed(&mut self, expected: Psn) -> Option<Released> {
        self.at(expected).filter(|held| held.follows && held.passed)?;
        self.take_first().map(Released)
    }

    /// Takes the request with this PSN, if it follows and was seen; those before it are not needed any more.
    pub fn release_seen(&mut self, expected: Psn) -> Option<Released> {
        self.at(expected).filter(|held| held.follows && held.seen)?;
        self.take_first().map(Released)
    }

    /// A request has come while nothing is missing before what waits. Says what it shows of that.
    pub fn see(&mut self, packet: &Packet<'_>, expected: Psn) -> Sight {
        if self.at(expected).is_none_or(|first| !first.follows) {
            return Sight::Nothing;
        }
        let psn = packet.bth.psn;
        let distance = psn.offset_from(expected);
        let at = self
            .packets
            .partition_point(|held| held.psn().offset_from(expected) > distance);
        let Some(held) = self.packets.get(at).filter(|held| held.order < self.came_before) else {
            return Sight::Nothing;
        };
        let sight = match held.psn() == psn {
            true if held.is_same(packet) => Sight::Again,
            false if follows(psn, held.end) => Sight::Past,
            _ => return Sight::Nothing,
        };
        // Behind a hole the partner may have begun again, and what it sent before in the place of these is not here any more.
        if self.packets[at..].iter().any(|held| !held.follows) {
            return Sight::Nothing;
        }
        for held in &mut self.packets[at..] {
            held.seen = true;
        }
        sight
    }

    /// A packet of the partner with the PSN that is expected is about to be executed. Says whether another one waited:
    /// then a forger is at work, and all is dropped.
    pub fn settle(&mut self, packet: &Packet<'_>) -> bool {
        self.came_before = self.came;
        let Some(held) = self.at(packet.bth.psn) else {
            return false;
        };
        let conflicts = !held.is_same(packet);
        if conflicts {
            self.clear();
        } else {
            // What follows it is the partner's, too.
            self.take_first();
        }
        conflicts
    }

    /// A packet with this PSN has come. Says whether the one at `expected` waited for nothing else.
    pub fn pass(&mut self, psn: Psn, expected: Psn) -> bool {
        let before = match self.packets.as_slice() {
            [.., second, _] => psn.distance_from(second.psn()) < 0,
            _ => true,
        };
        let Some(held) = self.at(expected).filter(|held| held.follows && before) else {
            return false;
        };
        held.passed |= follows(psn, held.end);
        held.passed
    }

    /// The partner has answered what is behind the packet at `expected`.
    pub fn pass_first(&mut self, expected: Psn) {
        if let Some(held) = self.at(expected) {
            held.passed = true;
        }
    }

    /// The earliest that there is.
    pub fn first(&self) -> Option<First> {
        self.packets.last().map(|held| First {
            psn: held.psn(),
            end: held.end,
            follows: held.follows,
            passed: held.passed,
        })
    }

    /// When the oldest has waited for too long, or before.
    pub fn deadline(&self) -> Option<Time> {
        (!self.packets.is_empty()).then(|| self.since + MOST_AGE)
    }

    /// Drops what has waited for too long, and says how many packets that was.
    pub fn age(&mut self, now: Time) -> u64 {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return 0;
        }
        let mut dropped = 0;
        for at in (0..self.packets.len()).rev() {
            if now >= self.packets[at].at + MOST_AGE {
                self.take_out(at);
                dropped += 1;
            }
        }
        self.since = self.packets.iter().map(|held| held.at).min().unwrap_or_default();
        dropped
    }

    pub fn clear(&mut self) {
        *self = Held::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: usize = 1 << 20;

    fn bytes(psn: u32, content: u8) -> Vec<u8> {
        let [_, a, b, c] = psn.to_be_bytes();
        // A SEND of one packet.
        let mut bytes = vec![0x04, 0x40, 0xff, 0xff, 0, 0, 0, 0x22, 0x80, a, b, c];
        bytes.extend([content; 8]);
        bytes.extend([0; 4]);
        bytes
    }

    fn keep_at(held: &mut Held, psn: u32, content: u8, expected: u32, millis: u64) -> Keeping {
        let bytes = bytes(psn, content);
        let early = Early {
            packet: &Packet::parse(&bytes).unwrap(),
            span: 1,
            now: Time::from_nanos(millis * 1_000_000),
        };
        held.keep(&early, Psn::new(expected), ROOM, None)
    }

    fn keep(held: &mut Held, psns: &[u32], expected: u32) -> Vec<Keeping> {
        let each = |psn: &u32| keep_at(held, *psn, 1, expected, 0);
        psns.iter().map(each).collect()
    }

    fn released(held: &mut Held, expected: u32) -> Vec<u32> {
        let mut expected = Psn::new(expected);
        let mut all = Vec::new();
        while let Some(released) = held.release_passed(expected) {
            all.push(released.packet().bth.psn.get());
            expected = expected.next();
        }
        all
    }

    #[test]
    fn what_follows_and_was_passed_is_released() {
        let mut held = Held::default();
        keep(&mut held, &[11, 12, 13, 15], 10);
        assert_eq!(released(&mut held, 10), [0; 0]);
        assert_eq!(
            released(&mut held, 11),
            [11, 12, 13],
            "nothing has come behind the last one"
        );
        assert_eq!(held.first().map(|first| first.psn.get()), Some(15));
        assert!(!held.pass(Psn::new(18), Psn::new(15)), "that does not follow it");
        assert!(held.pass(Psn::new(17), Psn::new(15)));
        assert_eq!(released(&mut held, 15), [15]);
        assert!(held.is_empty() && held.deadline().is_none());
    }

    fn see(held: &mut Held, psn: u32, content: u8, expected: u32) -> Sight {
        let bytes = bytes(psn, content);
        held.see(&Packet::parse(&bytes).unwrap(), Psn::new(expected))
    }

    fn settle(held: &mut Held, psn: u32) -> bool {
        let bytes = bytes(psn, 1);
        held.settle(&Packet::parse(&bytes).unwrap())
    }

    fn seen(held: &mut Held, mut expected: u32) -> u32 {
        while held.release_seen(Psn::new(expected)).is_some() {
            expected += 1;
        }
        expected
    }

    #[test]
    fn a_request_is_released_when_the_partner_has_been_seen_past_it() {
        for (psn, sight, end) in [
            (13, Sight::Again, 14),
            (14, Sight::Again, 15),
            (15, Sight::Past, 15),
            (16, Sight::Past, 15),
            (17, Sight::Nothing, 11),
        ] {
            let mut held = Held::default();
            keep(&mut held, &[11, 12, 13, 14], 10);
            assert_eq!(see(&mut held, 14, 1, 10), Sight::Nothing, "10 is missing");
            assert!(!settle(&mut held, 10));
            assert_eq!(seen(&mut held, 11), 11);
            assert_eq!(see(&mut held, psn, 1, 11), sight);
            assert_eq!(seen(&mut held, 11), end);
        }
    }

    #[test]
    fn a_row_behind_what_came_is_not_released_with_it_and_does_not_show_itself() {
        let mut held = Held::default();
        keep(&mut held, &[11, 12], 10);
        let forged = |held: &mut Held, psns: std::ops::Range<u32>| {
            for psn in psns {
                assert_eq!(keep_at(held, psn, 2, 10, 0), Keeping::Kept);
            }
        };
        forged(&mut held, 13..17);
        settle(&mut held, 10);
        forged(&mut held, 17..19);
        assert_eq!(
            see(&mut held, 18, 2, 11),
            Sight::Nothing,
            "it came after what was missing"
        );
        assert_eq!(see(&mut held, 13, 1, 11), Sight::Nothing);
        assert_eq!(see(&mut held, 12, 1, 11), Sight::Again);
        assert_eq!(seen(&mut held, 11), 13);
        assert!(settle(&mut held, 13), "the partner's own is not the same");
        assert!(held.is_empty());
    }

    #[test]
    fn what_is_behind_one_more_that_is_missing_was_seen_with_the_rest_and_what_is_behind_a_hole_was_not() {
        let mut held = Held::default();
        keep(&mut held, &[11, 13, 20, 21], 10);
        settle(&mut held, 10);
        assert_eq!(see(&mut held, 21, 1, 11), Sight::Nothing);
        assert_eq!(see(&mut held, 13, 1, 11), Sight::Again);
        assert_eq!(seen(&mut held, 11), 12);
        settle(&mut held, 12);
        assert_eq!(seen(&mut held, 13), 14);
        assert_eq!(seen(&mut held, 20), 20, "it does not follow");
        settle(&mut held, 20);
        assert_eq!(seen(&mut held, 21), 21);
        assert_eq!(see(&mut held, 22, 1, 21), Sight::Past);
        assert_eq!(seen(&mut held, 21), 22);
    }

    #[test]
    fn what_lies_ahead_waits_until_it_has_come_again() {
        let mut held = Held::default();
        keep(&mut held, &[12, 13, 14], 10);
        assert_eq!(released(&mut held, 12), [0; 0]);
        let again = bytes(12, 1);
        assert!(!held.settle(&Packet::parse(&again).unwrap()));
        assert_eq!(released(&mut held, 13), [13]);
    }

    #[test]
    fn one_ahead_of_the_others_keeps_none_of_them_away_and_is_not_released_with_them() {
        let mut held = Held::default();
        assert_eq!(keep(&mut held, &[13], 10), [Keeping::Kept]);
        keep(&mut held, &[11, 12], 10);
        assert_eq!(keep_at(&mut held, 14, 1, 10, 0), Keeping::Kept);
        assert_eq!(
            released(&mut held, 11),
            [11],
            "12 was not passed: 13 came before it"
        );
    }

    #[test]
    fn what_fills_a_hole_late_is_dropped_and_what_comes_twice_is_known() {
        let mut held = Held::default();
        keep(&mut held, &[11, 13], 10);
        let all = keep(&mut held, &[12, 13], 10);
        assert_eq!(all, [Keeping::Dropped, Keeping::Known]);
    }

    #[test]
    fn a_conflict_drops_all_and_gives_the_memory_back() {
        let budget = HoldBudget::new(ROOM);
        let mut held = Held::default();
        for psn in [11, 12, 13] {
            let bytes = bytes(psn, 1);
            let early = Early {
                packet: &Packet::parse(&bytes).unwrap(),
                span: 1,
                now: Time::ZERO,
            };
            held.keep(&early, Psn::new(10), ROOM, Some(&budget));
        }
        assert!(budget.left_bytes() < ROOM);
        assert_eq!(keep_at(&mut held, 12, 2, 10, 0), Keeping::Conflict);
        assert!(held.is_empty());
        assert_eq!(budget.left_bytes(), ROOM);
    }

    #[test]
    fn what_is_too_old_goes_and_what_followed_it_does_not_any_more() {
        let mut held = Held::default();
        keep_at(&mut held, 11, 1, 10, 0);
        keep_at(&mut held, 12, 1, 10, 60);
        keep_at(&mut held, 13, 1, 10, 60);
        let at = |millis: u64| Time::from_nanos(millis * 1_000_000);
        assert_eq!(held.age(at(99)), 0);
        assert_eq!(held.age(at(100)), 1);
        assert_eq!(held.deadline(), Some(at(160)));
        assert_eq!(released(&mut held, 12), [0; 0]);
        assert_eq!(held.age(at(160)), 2);
        assert_eq!(held.deadline(), None);
    }
}
