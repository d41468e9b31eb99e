//! Protection domains.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize};

use crate::context::Context;
use crate::error::VerbsError;
use crate::mr::Mr;
use crate::qp::{Qp, QpInit};
use verbatim_device::control::Access;

/// A protection domain.
#[derive(Debug)]
pub struct Pd {
    pub(crate) context: Arc<Context>,
    /// Its number within the context.
    pub(crate) number: u32,
    /// The RNIC's.
    pub(crate) physical: AtomicU32,
    /// Regions and queue pairs in it; changed under the context's lock.
    pub(crate) users: AtomicUsize,
}

impl Pd {
    /// Its device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Its number within the context.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Registers memory (`ibv_reg_mr_iova`; for `ibv_reg_mr`, `iova` is `address`). Its pages are adopted where they
    /// can be (`DESIGN.md` §3.2).
    pub fn reg_mr(
        self: &Arc<Self>,
        address: u64,
        length: u64,
        iova: u64,
        access: Access,
    ) -> Result<Arc<Mr>, VerbsError> {
        Mr::register(self, address, length, iova, access)
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
