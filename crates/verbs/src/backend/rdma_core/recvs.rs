//! The receive queue, a queue pair's own or a shared one.

use std::ffi::c_int;
use std::sync::Arc;

use verbatim_device::layout::Sge;

use super::ffi;
use super::live::Pin;
use super::objects::{Qp, Srq};
use super::sends::position_in;
use crate::backend::{RecvRing, Refused};
use crate::error::VerbsError;
use crate::work::RECV_BIT;

/// Whose RECVs these are.
#[derive(Debug)]
enum Queue {
    /// The pin goes first: what is dropped while it is pinned is not destroyed.
    Own(Pin<ffi::ibv_qp>, Arc<Qp>),
    Shared(Arc<Srq>),
}

/// The end of a receive queue.
pub struct Recvs {
    queue: Queue,
    requests: Vec<ffi::ibv_recv_wr>,
    sges: Vec<Sge>,
}

// SAFETY: the pointers in the requests are made and forgotten within one call.
unsafe impl Send for Recvs {}

impl std::fmt::Debug for Recvs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let requests = self.requests.len();
        f.debug_struct("Recvs")
            .field("queue", &self.queue)
            .field("requests", &requests)
            .finish()
    }
}

impl Recvs {
    pub fn of_qp(qp: Arc<Qp>) -> Result<Self, VerbsError> {
        let pin = qp.live.pin("post_recv")?;
        Ok(Self::new(Queue::Own(pin, qp)))
    }

    pub fn of_srq(srq: Arc<Srq>) -> Self {
        Self::new(Queue::Shared(srq))
    }

    fn new(queue: Queue) -> Self {
        Self {
            queue,
            requests: Vec::new(),
            sges: Vec::new(),
        }
    }

    fn link(&mut self) {
        let base = self.requests.as_mut_ptr();
        let mut sge = self.sges.as_mut_ptr();
        for index in 0..self.requests.len() {
            // SAFETY: request by request, inside of both vectors, which do not change before they are posted.
            unsafe {
                let request = base.add(index);
                (*request).sg_list = sge;
                sge = sge.add((*request).num_sge as usize);
                if index > 0 {
                    (*base.add(index - 1)).next = request;
                }
            }
        }
    }

    /// Posts everything; how many were taken, and why the next was not.
    fn post(&mut self) -> Result<(), (usize, c_int)> {
        self.link();
        let base = self.requests.as_mut_ptr();
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue is pinned or held, so it and its device are alive; requests and entries are good until the call returns, and
        // the library copies what it needs longer.
        let returned = unsafe {
            match &self.queue {
                Queue::Own(qp, _) => match (*(*qp.as_ptr()).context).ops.post_recv {
                    Some(post) => post(qp.as_ptr(), base, &mut bad),
                    None => libc::EOPNOTSUPP,
                },
                Queue::Shared(srq) => {
                    let srq = srq.live.hold().ok_or((0, libc::EINVAL))?;
                    match (*(*srq.as_ptr()).context).ops.post_srq_recv {
                        Some(post) => post(srq.as_ptr(), base, &mut bad),
                        None => libc::EOPNOTSUPP,
                    }
                }
            }
        };
        if returned == 0 {
            return Ok(());
        }
        Err((position_in(base, self.requests.len(), bad), returned.abs()))
    }

    fn count_posted(&self, taken: usize) {
        match &self.queue {
            Queue::Own(_, qp) => {
                if let Some(last) = taken.checked_sub(1) {
                    qp.progress
                        .recv
                        .posted_up_to(self.requests[last].wr_id & !RECV_BIT);
                }
            }
            Queue::Shared(srq) => srq.progress.posted_more(taken as u32),
        }
    }
}

impl RecvRing for Recvs {
    fn room(&self) -> u32 {
        let (progress, limit) = match &self.queue {
            Queue::Own(_, qp) => (&qp.progress.recv, qp.cap.max_recv_wr),
            Queue::Shared(srq) => (&srq.progress, srq.attr.max_wr),
        };
        limit.saturating_sub(progress.outstanding() + self.requests.len() as u32)
    }

    #[inline]
    fn push(&mut self, wr_id: u64, sges: &[Sge]) {
        match sges {
            [sge] => self.sges.push(*sge),
            sges => self.sges.extend_from_slice(sges),
        }
        self.requests.push(ffi::ibv_recv_wr {
            wr_id,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: sges.len() as c_int,
        });
    }

    fn publish(&mut self) -> Result<(), Refused> {
        if self.requests.is_empty() {
            return Ok(());
        }
        if let Queue::Own(_, qp) = &self.queue {
            qp.progress.recv.start_at(self.requests[0].wr_id & !RECV_BIT);
        }
        let outcome = self.post();
        let taken = outcome.map_or_else(|(taken, _)| taken, |()| self.requests.len());
        self.count_posted(taken);
        let count = (self.requests.len() - taken) as u32;
        self.requests.clear();
        self.sges.clear();
        outcome.map_err(|(_, errno)| Refused {
            count,
            messages: 0,
            errno,
        })
    }

    fn reset(&mut self) {
        self.requests.clear();
        self.sges.clear();
        if let Queue::Own(_, qp) = &self.queue {
            qp.progress.recv.reset();
        }
    }
}
