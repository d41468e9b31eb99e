//! A batch of work requests that is built call by call (`ibv_wr_post`(3)).
//!
//! A request is complete when all that belongs to it was set: its data and, on datagram queue pairs, its address, in
//! whatever order. What comes next, another request or the end of the batch, finds out if the data never were, and then
//! it has none. The queue is locked from start to end, as the manual page says ("ibv_wr_start … any thread locking").

use std::cell::UnsafeCell;

use verbatim_verbs::{Body, OwnedSendBatch, SendOpcode, SendWr, Sge, UdAddress};

use crate::abi::ibv_qp_ex;
use crate::ffi::{Errno, data_path};
use crate::handles::QpHandle;

/// The batch of a queue pair that is being built, if any.
#[derive(Default)]
pub struct Builder(UnsafeCell<Option<Building>>);

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Builder")
    }
}

/// Data that were set before the address: a copy, since the program's may be gone when that comes.
enum Data {
    Sges(Vec<Sge>),
    Inline(Vec<u8>),
}

impl Data {
    fn copy(body: Body<'_>) -> Self {
        match body {
            Body::Sges(sges) => Self::Sges(sges.to_vec()),
            Body::Inline(pieces) => Self::Inline(pieces.concat()),
        }
    }
}

/// The batch itself.
pub struct Building {
    batch: OwnedSendBatch,
    datagram: bool,
    /// A request that is not complete.
    head: Option<SendWr<'static>>,
    /// Its address is missing.
    unaddressed: bool,
    early: Option<Data>,
    /// The first thing that went wrong; then nothing is posted.
    error: Option<Errno>,
}

impl Building {
    fn note(&mut self, outcome: Result<(), Errno>) {
        if let Err(errno) = outcome {
            self.error.get_or_insert(errno);
        }
    }

    #[inline]
    fn push(&mut self, wr: &SendWr<'_>) {
        let outcome = self.batch.push(wr).map_err(Errno::from);
        self.note(outcome);
    }

    /// Starts a request; the one before it, if it has no data, is complete.
    #[inline]
    pub fn begin(&mut self, wr: SendWr<'static>) {
        self.flush();
        if self.datagram && !matches!(wr.opcode, SendOpcode::Send | SendOpcode::SendWithImm) {
            return self.note(Err(Errno::INVALID));
        }
        self.head = Some(wr);
        self.unaddressed = self.datagram;
    }

    /// Adds a request that has neither data nor address, or notes why it cannot be.
    pub fn whole(&mut self, wr: Result<SendWr<'static>, Errno>) {
        self.flush();
        match wr {
            Ok(wr) if !self.datagram => self.push(&wr),
            Ok(_) => self.note(Err(Errno::INVALID)),
            Err(errno) => self.note(Err(errno)),
        }
    }

    /// Completes a request that nothing more was said about.
    #[inline]
    fn flush(&mut self) {
        if self.head.is_none() {
            return;
        }
        if self.unaddressed {
            (self.head, self.early) = (None, None);
            return self.note(Err(Errno::INVALID));
        }
        self.data(Ok(Body::Sges(&[])));
    }

    /// Gives the request its data.
    #[inline]
    pub fn data(&mut self, body: Result<Body<'_>, Errno>) {
        match (self.head, body) {
            (Some(_), Ok(body)) if self.unaddressed => {
                self.early.get_or_insert_with(|| Data::copy(body));
            }
            (Some(head), Ok(body)) => {
                self.head = None;
                self.push(&SendWr { body, ..head });
            }
            (_, Err(errno)) => self.note(Err(errno)),
            (None, _) => self.note(Err(Errno::INVALID)),
        }
    }

    /// Gives the request its address.
    pub fn address(&mut self, address: Result<UdAddress, Errno>) {
        match (&mut self.head, address) {
            (Some(head), Ok(address)) if self.unaddressed => {
                head.ud = address;
                self.unaddressed = false;
            }
            (_, Err(errno)) => return self.note(Err(errno)),
            _ => return self.note(Err(Errno::INVALID)),
        }
        match self.early.take() {
            Some(Data::Sges(sges)) => self.data(Ok(Body::Sges(&sges))),
            Some(Data::Inline(bytes)) => self.data(Ok(Body::Inline(&[&bytes]))),
            None => {}
        }
    }

    /// Posts all, or nothing if something went wrong.
    pub fn complete(mut self) -> Result<(), Errno> {
        self.flush();
        match self.error {
            Some(errno) => {
                self.batch.abort();
                Err(errno)
            }
            None => Ok(self.batch.complete().map_err(|(_, error)| error)?),
        }
    }
}

/// Starts a batch of `qp`; waits while another thread has one.
///
/// # Safety
/// `qp` is alive, and this thread has started none.
pub unsafe fn start(qp: *mut ibv_qp_ex) {
    let run = || {
        // SAFETY: the caller's contract.
        let Ok(handle) = (unsafe { QpHandle::lend(qp) }) else {
            return;
        };
        let building = Building {
            batch: handle.core.qp.owned_batch(),
            datagram: handle.core.datagram,
            head: None,
            unaddressed: false,
            early: None,
            error: None,
        };
        // SAFETY: the queue is locked now, by us: nobody else looks into the cell.
        unsafe { *handle.core.builder.0.get() = Some(building) };
    };
    data_path(run, || ());
}

/// Ends the batch of `qp`: takes it out of the cell before its lock goes.
///
/// # Safety
/// As for [`with`].
pub unsafe fn end(qp: *mut ibv_qp_ex) -> Option<Building> {
    // SAFETY: the caller's contract.
    let handle = unsafe { QpHandle::lend(qp) }.ok()?;
    // SAFETY: as above.
    unsafe { &mut *handle.core.builder.0.get() }.take()
}

/// Runs `f` on the batch of `qp`.
///
/// # Safety
/// `qp` is alive and `ibv_wr_start` was called on it by this thread: its lock keeps the others out.
#[inline]
pub unsafe fn with(qp: *mut ibv_qp_ex, f: impl FnOnce(&mut Building)) {
    let run = || {
        // SAFETY: the caller's contract.
        let Ok(handle) = (unsafe { QpHandle::lend(qp) }) else {
            return;
        };
        // SAFETY: as above: nobody else looks into the cell.
        if let Some(building) = unsafe { &mut *handle.core.builder.0.get() } {
            f(building);
        }
    };
    data_path(run, || ());
}
