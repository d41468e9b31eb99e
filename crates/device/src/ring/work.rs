//! Send and receive queues: the program produces, the RNIC consumes.

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::BadIndex;
use crate::layout::{QpHeader, QpLayout, RecvLayout, RecvWqe, SEND_INLINE, SendWqe, Sge};
use crate::shared::{self, AtomicU32};

/// What follows the head of a send request.
#[derive(Debug, Clone, Copy)]
pub enum Body<'a> {
    /// Where the data are.
    Sges(&'a [Sge]),
    /// The data, in pieces.
    Inline(&'a [&'a [u8]]),
}

/// Slots of one direction of a queue pair.
#[derive(Debug)]
struct Slots {
    header: NonNull<QpHeader>,
    first: NonNull<u8>,
    slots: u32,
    /// How many requests the program may have posted, at most `slots`.
    limit: u32,
    stride: usize,
    /// This side's counter.
    count: u32,
}

impl Slots {
    /// # Safety
    /// See [`SendProducer::new`].
    unsafe fn send(base: NonNull<u8>, layout: &QpLayout) -> Self {
        // SAFETY: the send slots follow the header.
        let first = unsafe { base.add(size_of::<QpHeader>()) };
        Self {
            header: base.cast(),
            first,
            slots: layout.send_slots,
            limit: layout.send_limit,
            stride: layout.send_stride as usize,
            count: 0,
        }
    }

    /// # Safety
    /// See [`SendProducer::new`].
    unsafe fn recv(base: NonNull<u8>, layout: &RecvLayout) -> Self {
        // SAFETY: the receive slots are at that offset, inside of the layout.
        let first = unsafe { base.add(layout.offset as usize) };
        Self {
            header: base.cast(),
            first,
            slots: layout.slots,
            limit: layout.limit,
            stride: layout.stride as usize,
            count: 0,
        }
    }

    #[inline]
    fn header(&self) -> &QpHeader {
        // SAFETY: the contract of `new`; all fields are atomics.
        unsafe { self.header.as_ref() }
    }

    /// The slot of the current count.
    #[inline]
    fn slot(&self) -> NonNull<u8> {
        self.slot_of(self.count)
    }

    /// The slot of any count.
    #[inline]
    fn slot_of(&self, count: u32) -> NonNull<u8> {
        // The number of slots is a power of two.
        let index = count & (self.slots - 1);
        // SAFETY: less than the number of slots, all of which the contract of `new` covers.
        unsafe { self.first.add(index as usize * self.stride) }
    }

    /// What the consumer has finished at least, for who has not looked yet: so little that there seems to be no room.
    fn nothing_seen(&self) -> u32 {
        self.count.wrapping_sub(self.limit)
    }

    /// How many more requests fit, if the consumer has finished `done`.
    #[inline]
    fn room(&self, done: u32) -> u32 {
        self.limit.saturating_sub(self.count.wrapping_sub(done))
    }

    /// How many requests the program claims to have posted beyond this consumer's count.
    fn pending(&self, producer: &AtomicU32) -> Result<u32, BadIndex> {
        let claimed = producer.load(Acquire);
        let pending = claimed.wrapping_sub(self.count);
        if pending > self.slots {
            return Err(BadIndex {
                claimed,
                seen: self.count,
                slots: self.slots,
            });
        }
        Ok(pending)
    }

    /// Copies the SGEs that follow `head_bytes` of head, as many as both the request claims and the slot holds.
    ///
    /// # Panics
    /// Never: the count is limited by the slot's length.
    fn read_sges(&self, head_bytes: usize, claimed: u32, out: &mut Vec<Sge>) -> bool {
        self.read_sges_of(self.slot(), head_bytes, claimed, out)
    }

    /// As [`Self::read_sges`], of any slot of this queue.
    fn read_sges_of(&self, slot: NonNull<u8>, head_bytes: usize, claimed: u32, out: &mut Vec<Sge>) -> bool {
        let most = (self.stride - head_bytes) / size_of::<Sge>();
        out.clear();
        if claimed as usize > most {
            return false;
        }
        for index in 0..claimed as usize {
            // SAFETY: inside the slot, see `most`; any bytes are a valid Sge.
            out.push(unsafe { shared::read_once(slot.add(head_bytes + index * size_of::<Sge>()).cast()) });
        }
        true
    }
}

/// The program's end of a send queue.
#[derive(Debug)]
pub struct SendProducer {
    slots: Slots,
    /// What [`SendProducer::completed`] was when last looked at. The RNIC writes it all the time, so that each look may
    /// take the line from another core; as long as this says that there is room, there is.
    seen: Cell<u32>,
}

// SAFETY: the only one of its role (contract of `new`); the other end synchronises through the counters.
unsafe impl Send for SendProducer {}

impl SendProducer {
    /// # Safety
    /// `base` points to `layout.bytes` bytes of mapped memory, 64-byte aligned, that started as zeroes and stay mapped
    /// for as long as this exists; this is the only end of its role.
    pub unsafe fn new(base: NonNull<u8>, layout: &QpLayout) -> Self {
        // SAFETY: the same contract.
        let mut slots = unsafe { Slots::send(base, layout) };
        slots.count = slots.header().sq_producer.load(Relaxed);
        let seen = Cell::new(slots.nothing_seen());
        Self { slots, seen }
    }

    /// Requests posted since the queue was made or reset.
    pub fn posted(&self) -> u32 {
        self.slots.count
    }

    /// Requests finished, signaled or not.
    #[inline]
    pub fn completed(&self) -> u32 {
        self.slots.header().sq_completed.load(Acquire)
    }

    /// How many more requests fit, at least; 0 only if there is no room.
    #[inline]
    pub fn room(&self) -> u32 {
        match self.slots.room(self.seen.get()) {
            0 => {
                self.seen.set(self.completed());
                self.slots.room(self.seen.get())
            }
            room => room,
        }
    }

    /// Writes a request into the next slot, invisible until [`SendProducer::publish`]. The caller has checked
    /// [`SendProducer::room`], and that the body fits the limits of the queue.
    ///
    /// # Panics
    /// If the body is longer than a slot.
    #[inline(always)]
    pub fn push(&mut self, wqe: &SendWqe, body: Body<'_>) {
        let slot = self.slots.slot();
        let most = self.slots.stride - size_of::<SendWqe>();
        // SAFETY: the slot is free (the caller's check of `room`), so the RNIC does not read it; the lengths are
        // checked against the slot's.
        unsafe {
            shared::write(slot.cast(), *wqe);
            let mut at = slot.add(size_of::<SendWqe>());
            match body {
                // The most common, without the call that copies any number.
                Body::Sges([sge]) if size_of::<Sge>() <= most => shared::write(at.cast(), *sge),
                Body::Sges(sges) => {
                    assert!(
                        size_of_val(sges) <= most,
                        "{} entries do not fit a slot",
                        sges.len()
                    );
                    shared::write_all(at, sges);
                }
                Body::Inline(pieces) => {
                    let total: usize = pieces.iter().map(|piece| piece.len()).sum();
                    assert!(total <= most, "{total} bytes of inline data do not fit a slot");
                    for piece in pieces {
                        shared::write_all(at, piece);
                        at = at.add(piece.len());
                    }
                }
            }
        }
        self.slots.count = self.slots.count.wrapping_add(1);
    }

    /// Takes back the last `count` requests, all of them pushed and none published (`ibv_wr_abort`).
    pub fn unpush(&mut self, count: u32) {
        self.slots.count = self.slots.count.wrapping_sub(count);
    }

    /// Makes all pushed requests visible to the RNIC. Ring the doorbell after it.
    #[inline]
    pub fn publish(&mut self) {
        self.slots.header().sq_producer.store(self.slots.count, Release);
    }

    /// Gives `take` the requests that were posted and are not finished, oldest first, as they lie in their slots. The RNIC
    /// shall not be finishing any meanwhile. Nothing, if it claims to have finished what was never posted.
    pub fn for_each_unfinished(&self, mut take: impl FnMut(&SendWqe, Body<'_>)) {
        let posted = self.slots.header().sq_producer.load(Relaxed);
        let unfinished = posted.wrapping_sub(self.completed());
        if unfinished > self.slots.limit {
            return;
        }
        let (mut sges, mut inline) = (Vec::new(), Vec::new());
        let head_bytes = size_of::<SendWqe>();
        for count in (0..unfinished).rev() {
            let slot = self.slots.slot_of(posted.wrapping_sub(count).wrapping_sub(1));
            // SAFETY: the slot is inside the queue; any bytes are a valid SendWqe.
            let head: SendWqe = unsafe { shared::read_once(slot.cast()) };
            if head.flags & SEND_INLINE != 0 {
                let most = self.slots.stride - head_bytes;
                inline.resize((head.inline_bytes as usize).min(most), 0);
                // SAFETY: the length was limited to the slot's.
                unsafe { shared::read_bytes_once(slot.add(head_bytes), &mut inline) };
                take(&head, Body::Inline(&[&inline]));
            } else {
                self.slots
                    .read_sges_of(slot, head_bytes, head.num_sge.into(), &mut sges);
                take(&head, Body::Sges(&sges));
            }
        }
    }

    /// Starts from zero, as the RNIC does when the queue pair goes to RESET. The RNIC's own counter is the RNIC's to
    /// clear; the caller does this after the RNIC's answer.
    pub fn reset(&mut self) {
        self.slots.count = 0;
        self.seen.set(0);
        self.slots.header().sq_producer.store(0, Release);
    }
}

/// The program's end of a receive queue.
#[derive(Debug)]
pub struct RecvProducer {
    slots: Slots,
    /// As for [`SendProducer`]: what the RNIC had taken when last looked at.
    seen: Cell<u32>,
}

// SAFETY: the only one of its role (contract of `new`); the other end synchronises through the counters.
unsafe impl Send for RecvProducer {}

impl RecvProducer {
    /// # Safety
    /// As for [`SendProducer::new`]; `base` is that of the queue pair or of the shared receive queue.
    pub unsafe fn new(base: NonNull<u8>, layout: &RecvLayout) -> Self {
        // SAFETY: the same contract.
        let mut slots = unsafe { Slots::recv(base, layout) };
        slots.count = slots.header().rq_producer.load(Relaxed);
        let seen = Cell::new(slots.nothing_seen());
        Self { slots, seen }
    }

    /// How many more requests fit, at least; 0 only if there is no room.
    #[inline]
    pub fn room(&self) -> u32 {
        match self.slots.room(self.seen.get()) {
            0 => {
                self.seen.set(self.slots.header().rq_consumed.load(Acquire));
                self.slots.room(self.seen.get())
            }
            room => room,
        }
    }

    /// Writes a request into the next slot, invisible until [`RecvProducer::publish`]. The caller has checked
    /// [`RecvProducer::room`].
    ///
    /// # Panics
    /// If there are more entries than fit a slot.
    #[inline]
    pub fn push(&mut self, wr_id: u64, sges: &[Sge]) {
        let most = self.slots.stride - size_of::<RecvWqe>();
        assert!(
            size_of_val(sges) <= most,
            "{} entries do not fit a slot",
            sges.len()
        );
        let slot = self.slots.slot();
        // SAFETY: the slot is free (the caller's check of `room`), so the RNIC does not read it; the length was
        // checked.
        unsafe {
            let head = RecvWqe {
                wr_id,
                num_sge: sges.len() as u32,
                reserved: 0,
            };
            shared::write(slot.cast(), head);
            let at = slot.add(size_of::<RecvWqe>());
            match sges {
                [sge] => shared::write(at.cast(), *sge),
                sges => shared::write_all(at, sges),
            }
        }
        self.slots.count = self.slots.count.wrapping_add(1);
    }

    /// Makes all pushed requests visible to the RNIC.
    #[inline]
    pub fn publish(&mut self) {
        self.slots.header().rq_producer.store(self.slots.count, Release);
    }

    /// As [`SendProducer::reset`].
    pub fn reset(&mut self) {
        self.slots.count = 0;
        self.seen.set(0);
        self.slots.header().rq_producer.store(0, Release);
    }
}

/// A send request as the RNIC copied it out of its slot; nothing in it has been checked, except that its body is inside
/// the slot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SentWqe {
    /// The head.
    pub head: SendWqe,
    /// The entries, if the data are not inline.
    pub sges: Vec<Sge>,
    /// The inline data.
    pub inline: Vec<u8>,
    /// The body claimed to be longer than the slot; it was left out.
    pub overlong: bool,
}

/// The RNIC's end of a send queue.
#[derive(Debug)]
pub struct SendConsumer {
    slots: Slots,
    completed: u32,
}

// SAFETY: the only one of its role (contract of `new`); the other end synchronises through the counters.
unsafe impl Send for SendConsumer {}

impl SendConsumer {
    /// # Safety
    /// As for [`SendProducer::new`].
    pub unsafe fn new(base: NonNull<u8>, layout: &QpLayout) -> Self {
        // SAFETY: the same contract.
        let slots = unsafe { Slots::send(base, layout) };
        Self { slots, completed: 0 }
    }

    /// Requests posted and not yet taken.
    pub fn pending(&self) -> Result<u32, BadIndex> {
        self.slots.pending(&self.slots.header().sq_producer)
    }

    /// Requests taken and not completed.
    #[inline]
    pub fn under_way(&self) -> u32 {
        self.slots.count.wrapping_sub(self.completed)
    }

    /// Copies the next request into `out`; false if there is none. Its slot stays the RNIC's until
    /// [`SendConsumer::complete`].
    pub fn pop(&mut self, out: &mut SentWqe) -> Result<bool, BadIndex> {
        // Slots that were taken but not completed are not the program's to fill again.
        let claimed = self.slots.header().sq_producer.load(Acquire);
        if claimed.wrapping_sub(self.completed) > self.slots.slots {
            return Err(BadIndex {
                claimed,
                seen: self.completed,
                slots: self.slots.slots,
            });
        }
        if self.pending()? == 0 {
            return Ok(false);
        }
        let slot = self.slots.slot();
        let head_bytes = size_of::<SendWqe>();
        // SAFETY: the slot is inside the queue; any bytes are a valid SendWqe.
        out.head = unsafe { shared::read_once(slot.cast()) };
        out.sges.clear();
        out.inline.clear();
        if out.head.flags & SEND_INLINE != 0 {
            let length = out.head.inline_bytes as usize;
            out.overlong = length > self.slots.stride - head_bytes;
            if !out.overlong {
                out.inline.resize(length, 0);
                // SAFETY: the length was checked against the slot's.
                unsafe { shared::read_bytes_once(slot.add(head_bytes), &mut out.inline) };
            }
        } else {
            out.overlong = !self
                .slots
                .read_sges(head_bytes, out.head.num_sge.into(), &mut out.sges);
        }
        self.slots.count = self.slots.count.wrapping_add(1);
        Ok(true)
    }

    /// The `wr_id` of the request behind the next `skip`, which stays there; `None` if there is none.
    pub fn peek(&self, skip: u32) -> Result<Option<u64>, BadIndex> {
        if self.pending()? <= skip {
            return Ok(None);
        }
        // SAFETY: the slot is inside the queue; any bytes are a valid SendWqe.
        let head: SendWqe =
            unsafe { shared::read_once(self.slots.slot_of(self.slots.count.wrapping_add(skip)).cast()) };
        Ok(Some(head.wr_id))
    }

    /// Gives the oldest `count` taken slots back.
    pub fn complete(&mut self, count: u32) {
        debug_assert!(
            self.slots.count.wrapping_sub(self.completed) >= count,
            "only taken slots can be completed"
        );
        self.completed = self.completed.wrapping_add(count);
        self.slots.header().sq_completed.store(self.completed, Release);
    }

    /// Forgets everything, for a queue pair that goes to RESET.
    pub fn reset(&mut self) {
        self.slots.count = 0;
        self.completed = 0;
        self.slots.header().sq_producer.store(0, Release);
        self.slots.header().sq_completed.store(0, Release);
    }
}

/// The RNIC's end of a receive queue.
#[derive(Debug)]
pub struct RecvConsumer(Slots);

// SAFETY: the only one of its role (contract of `new`); the other end synchronises through the counters.
unsafe impl Send for RecvConsumer {}

impl RecvConsumer {
    /// # Safety
    /// As for [`RecvProducer::new`].
    pub unsafe fn new(base: NonNull<u8>, layout: &RecvLayout) -> Self {
        // SAFETY: the same contract.
        Self(unsafe { Slots::recv(base, layout) })
    }

    /// Requests posted and not yet taken.
    pub fn pending(&self) -> Result<u32, BadIndex> {
        self.0.pending(&self.0.header().rq_producer)
    }

    /// Takes the next request: its `wr_id`, and its entries into `sges`. `Some(None)` stands for a request whose
    /// entries do not fit a slot.
    pub fn pop(&mut self, sges: &mut Vec<Sge>) -> Result<Option<Option<u64>>, BadIndex> {
        if self.0.pending(&self.0.header().rq_producer)? == 0 {
            return Ok(None);
        }
        // SAFETY: the slot is inside the queue; any bytes are a valid RecvWqe.
        let head: RecvWqe = unsafe { shared::read_once(self.0.slot().cast()) };
        let fits = self.0.read_sges(size_of::<RecvWqe>(), head.num_sge, sges);
        self.0.count = self.0.count.wrapping_add(1);
        self.0.header().rq_consumed.store(self.0.count, Release);
        Ok(Some(fits.then_some(head.wr_id)))
    }

    /// The `wr_id` of the next request, which stays there; `None` if there is none.
    pub fn peek(&self) -> Result<Option<u64>, BadIndex> {
        if self.pending()? == 0 {
            return Ok(None);
        }
        // SAFETY: the slot is inside the queue; any bytes are a valid RecvWqe.
        let head: RecvWqe = unsafe { shared::read_once(self.0.slot().cast()) };
        Ok(Some(head.wr_id))
    }

    /// Forgets everything, for a queue pair that goes to RESET.
    pub fn reset(&mut self) {
        self.0.count = 0;
        self.0.header().rq_producer.store(0, Release);
        self.0.header().rq_consumed.store(0, Release);
    }
}

#[cfg(test)]
#[path = "work_tests.rs"]
mod tests;
