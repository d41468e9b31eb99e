//! "Queue pair at slot s has new send requests", for up to 65,536 of them.

use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use crate::layout::{ContextPage, MAX_QP_SLOTS};

/// The program's side.
#[derive(Debug, Clone, Copy)]
pub struct Doorbell(NonNull<ContextPage>);

// SAFETY: all fields of a ContextPage are atomics.
unsafe impl Send for Doorbell {}
// SAFETY: as above.
unsafe impl Sync for Doorbell {}

impl Doorbell {
    /// # Safety
    /// `page` points to a mapped, zero-initialised `ContextPage` that stays mapped for as long as this is used.
    pub unsafe fn new(page: NonNull<ContextPage>) -> Self {
        Self(page)
    }

    /// Rings for `slot`, after its producer index was stored. True: the RNIC sleeps, and the caller must write the
    /// eventfd.
    #[must_use]
    #[inline]
    pub fn ring(&self, slot: u32) -> bool {
        debug_assert!(slot < MAX_QP_SLOTS, "the RNIC gives no such slot");
        // SAFETY: the contract of `new`.
        let page = unsafe { self.0.as_ref() };
        let word = slot as usize / 64;
        page.doorbells[word].fetch_or(1 << (slot % 64), SeqCst);
        // Not only by who finds the word empty: that thread may lose its core before it comes to say so here. The swap of the
        // word, if it was before ours, orders this load behind the summary's.
        let summary = &page.summary[word / 64];
        if summary.load(Relaxed) & 1 << (word % 64) == 0 {
            summary.fetch_or(1 << (word % 64), SeqCst);
        }
        page.nic_sleeping.load(SeqCst) != 0
    }
}

/// The RNIC's side.
#[derive(Debug)]
pub struct DoorbellReader(NonNull<ContextPage>);

// SAFETY: all fields of a ContextPage are atomics.
unsafe impl Send for DoorbellReader {}

impl DoorbellReader {
    /// # Safety
    /// As for [`Doorbell::new`].
    pub unsafe fn new(page: NonNull<ContextPage>) -> Self {
        Self(page)
    }

    /// Calls `visit` with every slot that was rung since the last call. Slots are whatever the program wrote: the
    /// caller ignores those that it does not know.
    pub fn drain(&mut self, mut visit: impl FnMut(u32)) {
        // SAFETY: the contract of `new`.
        let page = unsafe { self.0.as_ref() };
        for (index, summary) in page.summary.iter().enumerate() {
            if summary.load(Acquire) == 0 {
                continue;
            }
            let mut words = summary.swap(0, SeqCst);
            while words != 0 {
                let word = index * 64 + words.trailing_zeros() as usize;
                words &= words - 1;
                let mut bits = page.doorbells[word].swap(0, SeqCst);
                while bits != 0 {
                    visit(word as u32 * 64 + bits.trailing_zeros());
                    bits &= bits - 1;
                }
            }
        }
    }

    /// Whether a slot was rung since the last [`DoorbellReader::drain`].
    pub fn is_rung(&self) -> bool {
        // SAFETY: the contract of `new`.
        let page = unsafe { self.0.as_ref() };
        page.summary.iter().any(|word| word.load(SeqCst) != 0)
    }

    /// Tells the program whether to wake the RNIC. After saying that it sleeps, look at [`Self::is_rung`] once more.
    pub fn set_sleeping(&self, sleeping: bool) {
        // SAFETY: the contract of `new`.
        unsafe { self.0.as_ref() }
            .nic_sleeping
            .store(sleeping.into(), SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    fn page() -> Box<ContextPage> {
        // SAFETY: a ContextPage is atomics and padding; zero is a value of each.
        unsafe { Box::new(std::mem::zeroed()) }
    }

    #[test]
    fn every_ring_is_seen_once() {
        let mut page = page();
        let pointer = NonNull::from(&mut *page);
        // SAFETY: the box outlives both ends.
        let (bell, mut reader) = unsafe { (Doorbell::new(pointer), DoorbellReader::new(pointer)) };
        for slot in [0, 1, 63, 64, 4095, 4096, MAX_QP_SLOTS - 1, 64] {
            assert!(!bell.ring(slot));
        }
        let mut seen = Vec::new();
        reader.drain(|slot| seen.push(slot));
        assert_eq!(seen, [0, 1, 63, 64, 4095, 4096, MAX_QP_SLOTS - 1]);
        assert!(!reader.is_rung());
        reader.set_sleeping(true);
        assert!(bell.ring(5));
        assert!(reader.is_rung());
    }

    #[test]
    fn a_ring_is_seen_though_another_thread_has_stopped_in_the_middle_of_one() {
        let mut page = page();
        // It has set its bit in the word, and not yet that of the word.
        page.doorbells[0].store(1, Relaxed);
        let pointer = NonNull::from(&mut *page);
        // SAFETY: the box outlives both ends.
        let (bell, mut reader) = unsafe { (Doorbell::new(pointer), DoorbellReader::new(pointer)) };
        assert!(!bell.ring(1));
        assert!(reader.is_rung());
        let mut seen = Vec::new();
        reader.drain(|slot| seen.push(slot));
        assert_eq!(seen, [0, 1]);
    }

    #[test]
    fn no_ring_is_lost_between_two_threads() {
        const ROUNDS: u64 = 20_000;
        let mut page = page();
        let pointer = NonNull::from(&mut *page);
        // SAFETY: the box outlives both ends; the scope joins the thread before it goes.
        let (bell, mut reader) = unsafe { (Doorbell::new(pointer), DoorbellReader::new(pointer)) };
        let posted = [const { AtomicU64::new(0) }; 3];
        let slots = [7u32, 70, 5000];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    for (count, slot) in posted.iter().zip(slots) {
                        count.fetch_add(1, Relaxed);
                        let _ = bell.ring(slot);
                    }
                }
            });
            let mut seen = [0; 3];
            while seen.iter().any(|count| *count < ROUNDS) {
                reader.drain(|slot| {
                    let index = slots
                        .iter()
                        .position(|known| *known == slot)
                        .expect("a slot that was rung");
                    seen[index] = posted[index].load(Relaxed);
                });
                std::thread::yield_now();
            }
        });
    }
}
