//! Ring ends as queues hold them: those of the software RNIC and of the system's libibverbs as they are, so that posting and polling
//! need no call through a table and no copy for it; those of others, as tests have them, behind their trait.

use std::any::Any;

use verbatim_device::layout::{Cqe, SendWqe, Sge};
use verbatim_device::ring::{Armed, Body};

use super::rdma_core::{SystemCompletions, SystemRecvs, SystemSends};
use super::soft::{SoftCompletions, SoftRecvs, SoftSends};
use super::{CompletionRing, RecvRing, Refused, SendRing};

/// A [`SendRing`].
#[derive(Debug)]
pub enum Sends {
    Soft(SoftSends),
    System(SystemSends),
    Other(Box<dyn SendRing>),
}

/// A [`RecvRing`].
#[derive(Debug)]
pub enum Recvs {
    Soft(SoftRecvs),
    System(SystemRecvs),
    Other(Box<dyn RecvRing>),
}

/// A [`CompletionRing`].
#[derive(Debug)]
pub enum Completions {
    Soft(SoftCompletions),
    System(SystemCompletions),
    Other(Box<dyn CompletionRing>),
}

/// What `ring` is, if it is a `T`.
fn known<T: Any>(ring: Box<dyn Any>) -> T {
    *ring.downcast().expect("the caller has looked")
}

impl From<Box<dyn SendRing>> for Sends {
    fn from(ring: Box<dyn SendRing>) -> Self {
        match &*ring as &dyn Any {
            any if any.is::<SoftSends>() => Self::Soft(known(ring)),
            any if any.is::<SystemSends>() => Self::System(known(ring)),
            _ => Self::Other(ring),
        }
    }
}

impl From<Box<dyn RecvRing>> for Recvs {
    fn from(ring: Box<dyn RecvRing>) -> Self {
        match &*ring as &dyn Any {
            any if any.is::<SoftRecvs>() => Self::Soft(known(ring)),
            any if any.is::<SystemRecvs>() => Self::System(known(ring)),
            _ => Self::Other(ring),
        }
    }
}

impl From<Box<dyn CompletionRing>> for Completions {
    fn from(ring: Box<dyn CompletionRing>) -> Self {
        match &*ring as &dyn Any {
            any if any.is::<SoftCompletions>() => Self::Soft(known(ring)),
            any if any.is::<SystemCompletions>() => Self::System(known(ring)),
            _ => Self::Other(ring),
        }
    }
}

/// Calls a method of whichever it is.
macro_rules! either {
    ($self:ident, $ring:ident => $call:expr) => {
        match $self {
            Self::Soft($ring) => $call,
            Self::System($ring) => $call,
            Self::Other($ring) => $call,
        }
    };
}

impl SendRing for Sends {
    #[inline]
    fn room(&self) -> u32 {
        either!(self, ring => ring.room())
    }

    #[inline]
    fn push(&mut self, wqe: &SendWqe, body: Body<'_>) {
        either!(self, ring => ring.push(wqe, body));
    }

    #[inline(always)]
    fn try_push(&mut self, wqe: &SendWqe, body: Body<'_>) -> bool {
        match self {
            Self::Soft(ring) => ring.try_push(wqe, body),
            // A copy: a request whose address nobody else is given need not lie in memory.
            Self::System(ring) => ring.try_push(wqe, body),
            Self::Other(ring) => try_push_to_other(&mut **ring, *wqe, body),
        }
    }

    fn unpush(&mut self, count: u32) {
        either!(self, ring => ring.unpush(count));
    }

    #[inline]
    fn publish(&mut self) -> Result<(), Refused> {
        either!(self, ring => ring.publish())
    }

    fn for_each_unfinished(&self, take: &mut dyn FnMut(&SendWqe, Body<'_>)) {
        either!(self, ring => ring.for_each_unfinished(take));
    }

    fn unfinished(&self) -> u32 {
        either!(self, ring => ring.unfinished())
    }

    fn mark(&mut self) -> bool {
        either!(self, ring => ring.mark())
    }

    fn reset(&mut self) {
        either!(self, ring => ring.reset());
    }
}

#[inline(never)]
fn try_push_to_other(ring: &mut (impl SendRing + ?Sized), wqe: SendWqe, body: Body<'_>) -> bool {
    ring.try_push(&wqe, body)
}

impl RecvRing for Recvs {
    #[inline]
    fn room(&self) -> u32 {
        either!(self, ring => ring.room())
    }

    #[inline]
    fn push(&mut self, wr_id: u64, sges: &[Sge]) {
        either!(self, ring => ring.push(wr_id, sges));
    }

    #[inline]
    fn publish(&mut self) -> Result<(), Refused> {
        either!(self, ring => ring.publish())
    }

    fn reset(&mut self) {
        either!(self, ring => ring.reset());
    }
}

impl CompletionRing for Completions {
    #[inline]
    fn pop(&mut self) -> Option<Cqe> {
        either!(self, ring => ring.pop())
    }

    fn arm(&mut self, solicited_only: bool) -> bool {
        either!(self, ring => ring.arm(solicited_only))
    }

    fn disarm(&mut self) -> Option<Armed> {
        either!(self, ring => ring.disarm())
    }

    fn is_starved(&self) -> bool {
        either!(self, ring => ring.is_starved())
    }
}
