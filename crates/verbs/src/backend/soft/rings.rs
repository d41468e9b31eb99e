//! Ring ends that keep their memory.
//!
//! Fields are dropped in order: the end before the arena.

use std::sync::Arc;

use verbatim_device::layout::{Cqe, SendWqe, Sge};
use verbatim_device::ring::{Armed, Body, CqConsumer, RecvProducer, SendProducer};

use super::map::Arena;
use crate::backend::{CompletionRing, RecvRing, Refused, SendRing};

#[derive(Debug)]
pub struct SoftSends {
    end: SendProducer,
    arena: Arc<Arena>,
    slot: u32,
}

impl SoftSends {
    pub fn new(arena: Arc<Arena>, end: SendProducer, slot: u32) -> Self {
        Self { end, arena, slot }
    }
}

impl SendRing for SoftSends {
    #[inline]
    fn room(&self) -> u32 {
        self.end.room()
    }

    #[inline(always)]
    fn push(&mut self, wqe: &SendWqe, body: Body<'_>) {
        self.end.push(wqe, body);
    }

    #[inline(always)]
    fn try_push(&mut self, wqe: &SendWqe, body: Body<'_>) -> bool {
        let fits = self.end.room() > 0;
        if fits {
            self.end.push(wqe, body);
        }
        fits
    }

    fn unpush(&mut self, count: u32) {
        self.end.unpush(count);
    }

    #[inline]
    fn publish(&mut self) -> Result<(), Refused> {
        self.end.publish();
        self.arena.ring(self.slot);
        Ok(())
    }

    fn for_each_unfinished(&self, take: &mut dyn FnMut(&SendWqe, Body<'_>)) {
        self.end.for_each_unfinished(take);
    }

    fn unfinished(&self) -> u32 {
        self.end.posted().wrapping_sub(self.end.completed())
    }

    fn reset(&mut self) {
        self.end.reset();
    }
}

#[derive(Debug)]
pub struct SoftRecvs {
    end: RecvProducer,
    _arena: Arc<Arena>,
}

impl SoftRecvs {
    pub fn new(arena: Arc<Arena>, end: RecvProducer) -> Self {
        Self { end, _arena: arena }
    }
}

impl RecvRing for SoftRecvs {
    #[inline]
    fn room(&self) -> u32 {
        self.end.room()
    }

    #[inline]
    fn push(&mut self, wr_id: u64, sges: &[Sge]) {
        self.end.push(wr_id, sges);
    }

    #[inline]
    fn publish(&mut self) -> Result<(), Refused> {
        self.end.publish();
        Ok(())
    }

    fn reset(&mut self) {
        self.end.reset();
    }
}

#[derive(Debug)]
pub struct SoftCompletions {
    end: CqConsumer,
    arena: Arc<Arena>,
}

impl SoftCompletions {
    pub fn new(arena: Arc<Arena>, end: CqConsumer) -> Self {
        Self { end, arena }
    }
}

impl CompletionRing for SoftCompletions {
    #[inline(always)]
    fn pop(&mut self) -> Option<Cqe> {
        self.end.pop()
    }
    fn arm(&mut self, solicited_only: bool) -> bool {
        self.end.arm(solicited_only)
    }

    fn disarm(&mut self) -> Option<Armed> {
        self.end.disarm()
    }

    fn is_starved(&self) -> bool {
        self.arena.is_starved()
    }
}
