//! Protection domains.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicUsize};

use verbatim_device::control::{Access, AddressVector, MwType, SrqAttr};

use crate::ah::Ah;
use crate::context::Context;
use crate::dm::Dm;
use crate::error::VerbsError;
use crate::mr::Mr;
use crate::mw::Mw;
use crate::qp::{Qp, QpInit};
use crate::srq::Srq;

/// A protection domain.
#[derive(Debug)]
pub struct Pd {
    pub(crate) context: Arc<Context>,
    /// Its number within the context.
    pub(crate) number: u32,
    /// The RNIC's.
    pub(crate) physical: AtomicU32,
    /// What is in it; changed under the context's lock.
    pub(crate) users: AtomicUsize,
    cookie: AtomicUsize,
}

impl Pd {
    /// For the caller's own use.
    pub fn set_cookie(&self, cookie: usize) {
        self.cookie.store(cookie, Relaxed);
    }

    /// What was set last, or 0.
    pub fn cookie(&self) -> usize {
        self.cookie.load(Relaxed)
    }

    pub(crate) fn new(context: Arc<Context>, number: u32, physical: u32) -> Self {
        Self {
            context,
            number,
            physical: AtomicU32::new(physical),
            users: AtomicUsize::new(0),
            cookie: AtomicUsize::new(0),
        }
    }

    /// Its device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Its number within the context.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Registers memory (`ibv_reg_mr_iova`; for `ibv_reg_mr`, `iova` is `address`). Its pages are adopted where they
    /// can be (`DESIGN.md` §3.2). With [`Access::ZERO_BASED`], `iova` does not count: addresses start at 0.
    pub fn reg_mr(
        self: &Arc<Self>,
        address: u64,
        length: u64,
        iova: u64,
        access: Access,
    ) -> Result<Arc<Mr>, VerbsError> {
        Mr::register(self, address, length, iova, access)
    }

    /// Registers memory that this process has mapped, shared, from a file on tmpfs, a memfd for one, from `offset` on. Nothing of it is
    /// adopted, which of much memory takes long. Only for a process that no agent looks after ([`crate::Process::unattended`]).
    pub fn reg_file(
        self: &Arc<Self>,
        file: (BorrowedFd<'_>, u64),
        (address, length): (u64, u64),
        access: Access,
    ) -> Result<Arc<Mr>, VerbsError> {
        Mr::register_file(self, file, (address, length), access)
    }

    /// Registers on-chip memory (ibv_reg_dm_mr(3)): `length` bytes from `offset` on, which have the addresses from 0 on.
    pub fn reg_dm_mr(
        self: &Arc<Self>,
        dm: &Arc<Dm>,
        offset: u64,
        length: u64,
        access: Access,
    ) -> Result<Arc<Mr>, VerbsError> {
        Mr::register_dm(self, dm, offset, length, access)
    }

    /// Makes a memory window, which is not bound yet.
    pub fn alloc_mw(self: &Arc<Self>, mw_type: MwType) -> Result<Arc<Mw>, VerbsError> {
        Mw::alloc(self, mw_type)
    }

    /// Makes an address handle.
    pub fn create_ah(self: &Arc<Self>, attr: &AddressVector) -> Result<Arc<Ah>, VerbsError> {
        Ah::create(self, attr)
    }

    /// Makes a shared receive queue.
    pub fn create_srq(self: &Arc<Self>, attr: &SrqAttr) -> Result<Arc<Srq>, VerbsError> {
        Srq::create(self, attr)
    }

    /// Makes a queue pair.
    pub fn create_qp(self: &Arc<Self>, init: &QpInit) -> Result<Arc<Qp>, VerbsError> {
        Qp::create(self, init)
    }

    /// Destroys it; `EBUSY` while something is in it.
    pub fn dealloc(&self) -> Result<(), VerbsError> {
        self.context.dealloc_pd(self)
    }
}
