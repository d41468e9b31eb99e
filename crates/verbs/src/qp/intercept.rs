//! Send requests that the program posted and no RNIC has been given yet.

use std::collections::VecDeque;

use verbatim_device::layout::{SendWqe, Sge};
use verbatim_device::ring::Body;

/// A copy of a request, keys and `wr_id` as the program knows them.
#[derive(Debug, Clone)]
pub struct Copied {
    pub wqe: SendWqe,
    body: CopiedBody,
}

#[derive(Debug, Clone)]
enum CopiedBody {
    Sges(Box<[Sge]>),
    /// Inline data are the RNIC's from the moment of posting: the program may use the buffer again.
    Inline(Box<[u8]>),
}

impl Copied {
    pub fn new(wqe: &SendWqe, body: Body<'_>) -> Self {
        let body = match body {
            Body::Sges(sges) => CopiedBody::Sges(sges.into()),
            Body::Inline(pieces) => CopiedBody::Inline(pieces.concat().into()),
        };
        Self { wqe: *wqe, body }
    }

    /// Gives it to `take`.
    pub fn with_body<R>(&self, take: impl FnOnce(&SendWqe, Body<'_>) -> R) -> R {
        match &self.body {
            CopiedBody::Sges(sges) => take(&self.wqe, Body::Sges(sges)),
            CopiedBody::Inline(bytes) => take(&self.wqe, Body::Inline(&[bytes])),
        }
    }

    /// Its scatter/gather entries; none if the data are inline.
    pub fn sges_mut(&mut self) -> &mut [Sge] {
        match &mut self.body {
            CopiedBody::Sges(sges) => sges,
            CopiedBody::Inline(_) => &mut [],
        }
    }
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
        self.0.push_back(Copied::new(wqe, body));
    }

    /// Puts requests in front of all others, in their order.
    pub fn put_first(&mut self, requests: Vec<Copied>) {
        requests
            .into_iter()
            .rev()
            .for_each(|request| self.0.push_front(request));
    }

    /// Takes back what was pushed after there were `len`.
    pub fn truncate(&mut self, len: usize) {
        self.0.truncate(len);
    }

    /// Gives the oldest request to `take`.
    pub fn pop(&mut self, take: impl FnOnce(&SendWqe, Body<'_>)) {
        if let Some(request) = self.0.pop_front() {
            request.with_body(take);
        }
    }

    /// All of them, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Copied> {
        self.0.iter()
    }
}
