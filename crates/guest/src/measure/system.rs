//! The same for RNICs of the system's libibverbs: verbs as C programs call them, of that library and of this one above it.

use std::ffi::c_int;
use std::path::Path;
use std::ptr::{NonNull, null_mut};

use verbatim_verbs::Wc;
use verbatim_verbs::measure::System;

use super::{Layer, Target};
use crate::abi::*;
use crate::data;
use crate::verbs::{cq_handle_of, qp_handle_of};

/// What is measured, with its C objects.
pub struct MeasuredSystem {
    system: System,
    qp: NonNull<ibv_qp>,
    cq: NonNull<ibv_cq>,
}

impl MeasuredSystem {
    /// Makes it above the libibverbs in that file; it stays for the life of the process.
    pub fn new(library: &Path) -> Result<Self, verbatim_verbs::VerbsError> {
        let system = System::new(library)?;
        Ok(Self {
            qp: qp_handle_of(system.qp.clone()),
            cq: cq_handle_of(system.cq.clone()),
            system,
        })
    }
}

impl Target for MeasuredSystem {
    fn is_moved(&self) {
        self.system.is_moved();
    }

    fn complete(&mut self) {
        self.system.complete();
    }

    #[inline]
    unsafe fn post_send(&self, layer: Layer, wr: *mut ibv_send_wr) -> c_int {
        let mut bad = null_mut();
        match layer {
            // SAFETY: the object lives as long as the process; the caller's contract.
            Layer::Guest => unsafe { data::post_send(self.qp.as_ptr(), wr, &raw mut bad) },
            // SAFETY: the caller's contract.
            Layer::Provider => unsafe { self.system.direct.post_send(wr.cast()) },
        }
    }

    #[inline]
    unsafe fn post_recv(&self, layer: Layer, wr: *mut ibv_recv_wr) -> c_int {
        let mut bad = null_mut();
        match layer {
            // SAFETY: as above.
            Layer::Guest => unsafe { data::post_recv(self.qp.as_ptr(), wr, &raw mut bad) },
            // SAFETY: the caller's contract.
            Layer::Provider => unsafe { self.system.direct.post_recv(wr.cast()) },
        }
    }

    #[inline]
    fn poll(&self, layer: Layer, wc: &mut ibv_wc) -> c_int {
        match layer {
            // SAFETY: the object lives as long as the process; there is room for one.
            Layer::Guest => unsafe { data::poll_cq(self.cq.as_ptr(), 1, wc) },
            Layer::Provider => {
                // SAFETY: the layouts are equal (`data::poll`).
                let wc = unsafe { &mut *std::ptr::from_mut(wc).cast::<Wc>() };
                self.system.direct.poll(wc)
            }
        }
    }
}
