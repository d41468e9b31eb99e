//! Send requests that the program posted and no RNIC has been given yet.

use std::collections::VecDeque;

use verbatim_device::layout::{SendWqe, Sge};
use verbatim_device::ring::Body;

/// A copy of a request, keys and `wr_id` as the program knows them.
#[derive(Debug)]
struct Copied {
    wqe: SendWqe,
    body: CopiedBody,
}

#[derive(Debug)]
enum CopiedBody {
    Sges(Box<[Sge]>),
    /// Inline data are the RNIC's from the moment of posting: the program may use the buffer again.
    Inline(Box<[u8]>),
}

/// The interception buffer of one queue pair: first in, first out.
#[derive(Debug, Default)]
pub struct Intercepted(VecDeque<Copied>);

impl Intercepted {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn push(&mut self, wqe: &SendWqe, body: Body<'_>) {
        let body = match body {
            Body::Sges(sges) => CopiedBody::Sges(sges.into()),
            Body::Inline(pieces) => CopiedBody::Inline(pieces.concat().into()),
        };
        self.0.push_back(Copied { wqe: *wqe, body });
    }

    /// Takes back what was pushed after there were `len`.
    pub fn truncate(&mut self, len: usize) {
        self.0.truncate(len);
    }

    /// Gives the oldest request to `take`.
    pub fn pop(&mut self, take: impl FnOnce(&SendWqe, Body<'_>)) {
        if let Some(Copied { wqe, body }) = self.0.pop_front() {
            match &body {
                CopiedBody::Sges(sges) => take(&wqe, Body::Sges(sges)),
                CopiedBody::Inline(bytes) => take(&wqe, Body::Inline(&[bytes])),
            }
        }
    }
}
