//! Completion queues and shared receive queues.

use crate::ends::{CqEnd, SrqEnd};
use verbatim_device::control::SrqAttr;

/// What a completion queue got in a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum News {
    Nothing,
    Plain,
    /// At least one completion is solicited, or an error.
    Solicited,
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    pub context: u32,
    /// Queue pairs that refer to it, once for each direction.
    pub users: u32,
    pub ring: CqEnd,
    /// It lost a completion, and is of no use any more.
    pub overrun: bool,
    /// Where its events go.
    pub channel: Option<u32>,
    /// What they say.
    pub event: u32,
    pub news: News,
    /// Entries that were asked for, for the account of its context.
    pub entries: u32,
}

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    pub context: u32,
    pub pd: u32,
    /// Queue pairs that refer to it.
    pub users: u32,
    /// Its limits; `limit` is 0 when it is not armed.
    pub attr: SrqAttr,
    pub ring: SrqEnd,
    /// An index or a request cannot be: it is not read any more.
    pub broken: bool,
}
