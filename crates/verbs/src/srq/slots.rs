//! Outstanding RECVs of a shared receive queue.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::datagrams::Front;
use crate::qp::Fronts;
use crate::work::RecvWr;

/// No slot.
pub(super) const NONE: u32 = u32::MAX;

/// The `wr_id`s of outstanding RECVs, by slot.
///
/// Whoever posts takes slots, under the queue's lock; whoever polls gives them back, each under its completion queue's.
/// So there is one taker, and a list of free slots that many push to and one takes as a whole.
#[derive(Debug)]
pub struct Slots {
    pub(super) wr_ids: Box<[AtomicU64]>,
    /// In which place the slot's RECV was posted, from 1 on; 0: the slot has none.
    places: Box<[AtomicU64]>,
    /// Where the first entries are, for datagrams.
    fronts: Fronts,
    /// The next free slot, of one that is free.
    next: Box<[AtomicU32]>,
    /// The slot that was given back last.
    given_back: AtomicU32,
}

impl Slots {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            wr_ids: (0..capacity).map(|_| AtomicU64::new(0)).collect(),
            fronts: Fronts::new(capacity as usize),
            places: (0..capacity).map(|_| AtomicU64::new(0)).collect(),
            next: (1..capacity).chain([NONE]).map(AtomicU32::new).collect(),
            given_back: AtomicU32::new(if capacity == 0 { NONE } else { 0 }),
        }
    }

    /// As [`Self::new`]; slots that are `taken` are not free.
    pub(super) fn without(capacity: u32, taken: impl Fn(u32) -> bool) -> Self {
        let slots = Self::new(capacity);
        let mut head = NONE;
        for slot in (0..capacity).rev().filter(|slot| !taken(*slot)) {
            slots.next[slot as usize].store(head, Relaxed);
            head = slot;
        }
        slots.given_back.store(head, Relaxed);
        slots
    }

    /// The program's `wr_id` of the RECV in `slot`.
    pub(super) fn wr_id(&self, slot: u32) -> u64 {
        self.wr_ids[slot as usize].load(Relaxed)
    }

    /// The RECV in `slot` has completed: its `wr_id`. `None` if there is no such slot.
    #[inline]
    pub fn retire(&self, slot: u64) -> Option<u64> {
        let index = usize::try_from(slot).ok()?;
        let wr_id = self.wr_ids.get(index)?.load(Relaxed);
        self.give_back(slot as u32);
        Some(wr_id)
    }

    /// Notes the RECV that is about to be given to the RNIC, in which place of all.
    #[inline]
    pub(super) fn note(&self, slot: u32, wr: &RecvWr<'_>, place: u64) {
        let wr_id = wr.wr_id;
        self.fronts.note(slot as usize, wr.sges);
        self.wr_ids[slot as usize].store(wr_id, Relaxed);
        self.places[slot as usize].store(place, Relaxed);
    }

    /// Where the first entry of the RECV in `slot` is.
    pub fn front(&self, slot: u64) -> Front {
        self.fronts.get(slot as usize)
    }

    /// The slots of all RECVs that have not completed, in the order in which they were posted.
    pub(super) fn outstanding(&self) -> Vec<u32> {
        let places = self.places.iter().map(|place| place.load(Relaxed));
        let mut taken: Vec<(u64, u32)> = places.zip(0..).filter(|(place, _)| *place > 0).collect();
        taken.sort_unstable();
        taken.into_iter().map(|(_, slot)| slot).collect()
    }

    pub(super) fn give_back(&self, slot: u32) {
        self.places[slot as usize].store(0, Relaxed);
        let mut head = self.given_back.load(Relaxed);
        loop {
            self.next[slot as usize].store(head, Relaxed);
            match self
                .given_back
                .compare_exchange_weak(head, slot, Release, Relaxed)
            {
                Ok(_) => return,
                Err(other) => head = other,
            }
        }
    }

    /// Takes a free slot; `local` is the taker's own list.
    #[inline]
    pub(super) fn take(&self, local: &mut u32) -> Option<u32> {
        if *local == NONE {
            *local = self.given_back.swap(NONE, Acquire);
        }
        let slot = *local;
        *local = self.next.get(slot as usize)?.load(Relaxed);
        Some(slot)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::SeqCst;

    use parking_lot::Mutex;

    use super::*;

    fn request(wr_id: u64) -> RecvWr<'static> {
        RecvWr { wr_id, sges: &[] }
    }

    #[test]
    fn slots_come_back_in_any_order_and_are_never_given_twice() {
        let slots = Slots::new(4);
        let mut free = NONE;
        let taken: Vec<_> = (0..4).map(|_| slots.take(&mut free).unwrap()).collect();
        assert_eq!(taken, [0, 1, 2, 3]);
        assert_eq!(slots.take(&mut free), None);
        for slot in [2, 0] {
            slots.note(slot, &request(70 + u64::from(slot)), 1);
            assert_eq!(slots.retire(slot.into()), Some(70 + u64::from(slot)));
        }
        assert_eq!(slots.retire(4), None);
        let mut again: Vec<_> = std::iter::from_fn(|| slots.take(&mut free)).collect();
        again.sort_unstable();
        assert_eq!(again, [0, 2]);
    }

    #[test]
    fn slots_that_are_taken_are_not_given() {
        let slots = Slots::without(5, |slot| slot == 0 || slot == 3);
        let mut free = NONE;
        let taken: Vec<_> = std::iter::from_fn(|| slots.take(&mut free)).collect();
        assert_eq!(taken, [1, 2, 4]);
        slots.retire(3).unwrap();
        assert_eq!(slots.take(&mut free), Some(3));
        assert_eq!(slots.take(&mut free), None);
    }

    #[test]
    fn what_has_not_completed_is_told_in_the_order_of_posting() {
        let slots = Slots::new(4);
        let mut free = NONE;
        while slots.take(&mut free).is_some() {}
        for (place, slot) in [(1, 3), (2, 0), (3, 2), (4, 1)] {
            slots.note(slot, &request(7), place);
        }
        slots.retire(0).unwrap();
        assert_eq!(slots.outstanding(), [3, 2, 1]);
    }

    #[test]
    fn many_pollers_give_back_what_one_poster_takes() {
        const ROUNDS: usize = 20_000;
        let slots = Slots::new(8);
        let held = [const { AtomicU32::new(0) }; 8];
        let (send, recv) = std::sync::mpsc::channel::<u32>();
        let recv = Mutex::new(recv);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    loop {
                        let Ok(slot) = recv.lock().recv() else { return };
                        assert_eq!(held[slot as usize].swap(0, SeqCst), 1);
                        slots.retire(slot.into()).unwrap();
                    }
                });
            }
            let mut free = NONE;
            let mut rounds = 0;
            while rounds < ROUNDS {
                match slots.take(&mut free) {
                    Some(slot) => {
                        assert_eq!(held[slot as usize].swap(1, SeqCst), 0, "given to one only");
                        send.send(slot).unwrap();
                        rounds += 1;
                    }
                    None => std::thread::yield_now(),
                }
            }
            drop(send);
        });
    }
}
