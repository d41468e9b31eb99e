//! Completion queues: the RNIC produces, the program consumes.

use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use crate::layout::{CQ_ARMED, CQ_ARMED_SOLICITED, CQE_STRIDE, CqHeader, CqLayout, Cqe};
use crate::shared::{self, fence};

#[inline]
fn slot(base: NonNull<u8>, entries: u32, index: u32) -> NonNull<Cqe> {
    // The number of entries is a power of two.
    let offset = size_of::<CqHeader>() as u64 + u64::from(index & (entries - 1)) * CQE_STRIDE;
    // SAFETY: the index is less than the number of entries, and the contract of `new` covers them all.
    unsafe { base.add(offset as usize).cast() }
}

/// The RNIC's end.
#[derive(Debug)]
pub struct CqProducer {
    base: NonNull<u8>,
    entries: u32,
    produced: u32,
}

// SAFETY: the only one of its role (contract of `new`); the other end synchronises through the counters.
unsafe impl Send for CqProducer {}

impl CqProducer {
    /// # Safety
    /// `base` points to `layout.bytes` bytes of mapped memory, 64-byte aligned, that started as zeroes and stay mapped
    /// for as long as this exists; this is the only producer.
    pub unsafe fn new(base: NonNull<u8>, layout: &CqLayout) -> Self {
        Self {
            base,
            entries: layout.entries,
            produced: 0,
        }
    }

    fn header(&self) -> &CqHeader {
        // SAFETY: the contract of `new`; all fields are atomics.
        unsafe { self.base.cast().as_ref() }
    }

    /// Appends one completion; false if the queue is full (or the program wrote nonsense into its counter): an overrun.
    #[must_use]
    pub fn push(&mut self, cqe: &Cqe) -> bool {
        let used = self.produced.wrapping_sub(self.header().consumer.load(Acquire));
        if used >= self.entries {
            return false;
        }
        // SAFETY: `slot` is inside the queue; the program does not touch it before the producer index covers it, and
        // if it does, it harms its own completion only.
        unsafe { shared::write(slot(self.base, self.entries, self.produced), *cqe) };
        self.produced = self.produced.wrapping_add(1);
        self.header().producer.store(self.produced, Release);
        true
    }

    /// Whether the program asks for an event, now that completions were pushed of which at least one is or none is
    /// `solicited` (or an error). It asks for one only: true is said once for each [`CqConsumer::arm`].
    #[must_use]
    pub fn take_armed(&mut self, solicited: bool) -> bool {
        // Either this sees the arming, or the program's look after it sees the completions.
        fence(SeqCst);
        let armed = &self.header().armed;
        let wanted = match armed.load(Relaxed) {
            0 => false,
            CQ_ARMED_SOLICITED => solicited,
            // Whatever else a program writes.
            _ => true,
        };
        wanted && armed.swap(0, SeqCst) != 0
    }

    /// How many completions nobody has read, as the program claims; a claim that cannot be is more than any queue has.
    pub fn unread(&self) -> u32 {
        self.produced.wrapping_sub(self.header().consumer.load(Acquire))
    }

    /// Copies what nobody has read to the end of another queue, in order, and what the program has armed; false if it
    /// does not fit.
    #[must_use]
    pub fn copy_to(&self, other: &mut CqProducer) -> bool {
        let header = self.header();
        other.header().armed.store(header.armed.load(SeqCst), SeqCst);
        let first = header.consumer.load(Acquire);
        let count = self.produced.wrapping_sub(first);
        if count > self.entries {
            return false;
        }
        (0..count).all(|index| {
            // SAFETY: `slot` is inside the queue; a program that writes to it meanwhile harms its own completions only,
            // which are plain numbers.
            let cqe = unsafe { shared::read_once(slot(self.base, self.entries, first.wrapping_add(index))) };
            other.push(&cqe)
        })
    }
}

/// The program's end.
#[derive(Debug)]
pub struct CqConsumer {
    base: NonNull<u8>,
    entries: u32,
    consumed: u32,
}

// SAFETY: the only one of its role (contract of `new`); the other end synchronises through the counters.
unsafe impl Send for CqConsumer {}

impl CqConsumer {
    /// Goes on where an earlier consumer of the same queue stopped.
    ///
    /// # Safety
    /// As for [`CqProducer::new`], and this is the only consumer.
    pub unsafe fn new(base: NonNull<u8>, layout: &CqLayout) -> Self {
        let mut consumer = Self {
            base,
            entries: layout.entries,
            consumed: 0,
        };
        consumer.consumed = consumer.header().consumer.load(Relaxed);
        consumer
    }

    #[inline]
    fn header(&self) -> &CqHeader {
        // SAFETY: the contract of `new`; all fields are atomics.
        unsafe { self.base.cast().as_ref() }
    }

    /// Takes the next completion. A queue that the RNIC has destroyed reads as zeroes, and as empty.
    #[inline(always)]
    pub fn pop(&mut self) -> Option<Cqe> {
        let available = self.header().producer.load(Acquire).wrapping_sub(self.consumed);
        if available == 0 || available > self.entries {
            return None;
        }
        // SAFETY: the producer index covers the slot, so that the RNIC has written it and does not touch it again
        // before the consumer index passes it.
        let cqe = unsafe { shared::read(slot(self.base, self.entries, self.consumed)) };
        self.consumed = self.consumed.wrapping_add(1);
        self.header().consumer.store(self.consumed, Release);
        Some(cqe)
    }

    /// Asks for an event at the next completion, or at the next that is solicited or an error. If there is one already
    /// (the answer is true), the event may never come: take that one.
    pub fn arm(&self, solicited_only: bool) -> bool {
        let wanted = if solicited_only {
            CQ_ARMED_SOLICITED
        } else {
            CQ_ARMED
        };
        let header = self.header();
        // The stronger wish stays: `ibv_req_notify_cq` for any completion, then for solicited ones, is for any.
        if header.armed.load(Relaxed) != CQ_ARMED {
            header.armed.store(wanted, SeqCst);
        }
        fence(SeqCst);
        header.producer.load(Acquire) != self.consumed
    }

    /// Takes an arming back: what was asked for, if no event was sent for it. For a queue that another takes the place
    /// of, or whose RNIC is gone.
    pub fn disarm(&self) -> Option<Armed> {
        match self.header().armed.swap(0, SeqCst) {
            0 => None,
            CQ_ARMED_SOLICITED => Some(Armed::Solicited),
            _ => Some(Armed::Any),
        }
    }
}

/// What an armed queue waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Armed {
    /// The next completion.
    Any,
    /// The next that is solicited or an error.
    Solicited,
}

#[cfg(test)]
mod tests {
    use super::super::testing::Memory;
    use super::*;

    #[test]
    fn order_is_kept_and_an_overrun_is_seen() {
        let layout = CqLayout::new(3);
        assert_eq!(layout.entries, 4);
        let memory = Memory::zeroed(layout.bytes);
        // SAFETY: the memory outlives both ends and is theirs alone.
        let (mut producer, mut consumer) = unsafe {
            (
                CqProducer::new(memory.base(), &layout),
                CqConsumer::new(memory.base(), &layout),
            )
        };
        for round in 0..5u64 {
            for n in 0..4 {
                assert!(producer.push(&Cqe {
                    wr_id: round * 4 + n,
                    ..Cqe::default()
                }));
            }
            assert!(!producer.push(&Cqe::default()));
            for n in 0..4 {
                assert_eq!(consumer.pop().unwrap().wr_id, round * 4 + n);
            }
            assert!(consumer.pop().is_none());
        }
    }

    fn pair(memory: &Memory, layout: &CqLayout) -> (CqProducer, CqConsumer) {
        // SAFETY: the memory outlives both ends and is theirs alone.
        unsafe {
            (
                CqProducer::new(memory.base(), layout),
                CqConsumer::new(memory.base(), layout),
            )
        }
    }

    #[test]
    fn an_armed_queue_fires_once() {
        let layout = CqLayout::new(4);
        let memory = Memory::zeroed(layout.bytes);
        let (mut producer, mut consumer) = pair(&memory, &layout);
        assert!(!producer.take_armed(true), "nobody has asked");
        assert!(!consumer.arm(true));
        assert!(!producer.take_armed(false), "only a solicited one is wanted");
        assert!(!consumer.arm(false) && !consumer.arm(true));
        assert!(producer.push(&Cqe::default()));
        assert!(producer.take_armed(false), "the stronger wish stays");
        assert!(!producer.take_armed(true), "once");
        assert!(consumer.arm(false), "there is one already");
        assert!(consumer.pop().is_some() && !consumer.arm(false));
        assert_eq!(consumer.disarm(), Some(Armed::Any));
        assert!(!consumer.arm(true));
        assert_eq!(consumer.disarm(), Some(Armed::Solicited));
        assert_eq!(consumer.disarm(), None);
        assert!(!producer.take_armed(true), "taken back");
    }

    #[test]
    fn what_nobody_has_read_moves_to_another_queue() {
        let (small, large) = (CqLayout::new(4), CqLayout::new(8));
        let (from, to) = (Memory::zeroed(small.bytes), Memory::zeroed(large.bytes));
        let (mut producer, mut consumer) = pair(&from, &small);
        for wr_id in 0..6 {
            assert!(producer.push(&Cqe {
                wr_id,
                ..Cqe::default()
            }));
            if wr_id < 3 {
                assert!(consumer.pop().is_some());
            }
        }
        let (mut larger, mut reader) = pair(&to, &large);
        assert!(producer.copy_to(&mut larger));
        let read: Vec<_> = std::iter::from_fn(|| reader.pop()).map(|cqe| cqe.wr_id).collect();
        assert_eq!(read, [3, 4, 5]);
        let tiny = CqLayout::new(2);
        let memory = Memory::zeroed(tiny.bytes);
        assert!(!producer.copy_to(&mut pair(&memory, &tiny).0), "three do not fit");
    }

    #[test]
    fn a_destroyed_queue_is_empty() {
        let layout = CqLayout::new(4);
        let memory = Memory::zeroed(layout.bytes);
        // SAFETY: as above.
        let (mut producer, mut consumer) = unsafe {
            (
                CqProducer::new(memory.base(), &layout),
                CqConsumer::new(memory.base(), &layout),
            )
        };
        assert!(producer.push(&Cqe::default()) && consumer.pop().is_some());
        // SAFETY: the header lies at the start of the memory.
        unsafe { memory.base().cast::<CqHeader>().as_ref() }
            .producer
            .store(0, Relaxed);
        assert!(consumer.pop().is_none());
    }

    #[test]
    fn a_hostile_counter_cannot_make_the_producer_leave_the_queue() {
        let layout = CqLayout::new(4);
        let memory = Memory::zeroed(layout.bytes);
        // SAFETY: as above.
        let mut producer = unsafe { CqProducer::new(memory.base(), &layout) };
        for hostile in [1, 5, u32::MAX, 0x8000_0000] {
            // SAFETY: the header lies at the start of the memory.
            unsafe { memory.base().cast::<CqHeader>().as_ref() }
                .consumer
                .store(hostile, Relaxed);
            let _ = producer.push(&Cqe::default());
        }
        assert!(memory.guard_is_intact());
    }
}
