//! For measurements: a queue pair of the library, used as its header uses it, with nothing of ours between.

use std::ffi::{CStr, c_int, c_void};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use verbatim_device::control::{QpCap, QpType};

use super::device::RdmaCoreDevice;
use super::ffi;
use super::library::Library;
use crate::backend::{Device, PhysicalQpInit};
use crate::error::VerbsError;
use crate::work::Wc;

/// A library that was loaded from a file.
pub struct Loaded(Arc<Library>);

/// Loads one, into a namespace of its own.
pub fn load(path: &Path) -> Result<Loaded, VerbsError> {
    Ok(Loaded(Arc::new(Library::load(path)?)))
}

impl Loaded {
    /// Opens a device.
    pub fn open(&self, name: &str) -> Result<Arc<RdmaCoreDevice>, VerbsError> {
        super::open_device(&self.0, name)
    }

    /// Where a symbol of it is.
    pub fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        NonNull::new(self.0.symbol(name))
    }
}

impl RdmaCoreDevice {
    /// The library's queue pair of that number.
    pub fn pointer(&self, qpn: u32) -> Result<NonNull<c_void>, VerbsError> {
        let qp = self.objects.qps.get(qpn)?;
        let held = qp.live.get("a measurement")?;
        Ok(held.cast())
    }
}

/// A queue pair with its completion queue.
pub struct Direct {
    qp: NonNull<ffi::ibv_qp>,
    _device: Arc<RdmaCoreDevice>,
}

impl Direct {
    /// Makes it; it stays as long as the device.
    pub fn new(device: &Arc<RdmaCoreDevice>, entries: u32, cap: QpCap) -> Result<Self, VerbsError> {
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(entries, None)?;
        let place = device.create_qp(&PhysicalQpInit {
            pd,
            send_cq: cq.cq,
            recv_cq: cq.cq,
            srq: None,
            qp_type: QpType::Rc,
            cap,
        })?;
        Ok(Self {
            qp: device.pointer(place.qpn)?.cast(),
            _device: device.clone(),
        })
    }

    /// The library's queue pair.
    pub fn qp(&self) -> NonNull<c_void> {
        self.qp.cast()
    }

    /// `ibv_post_send`, as the header has it.
    ///
    /// # Safety
    /// `wr` is a valid list of requests (`struct ibv_send_wr`).
    #[inline]
    pub unsafe fn post_send(&self, wr: *mut c_void) -> c_int {
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair lives as long as the device; the caller's contract; every provider has that function.
        unsafe {
            let ops = &(*self.qp.as_ref().context).ops;
            (ops.post_send.expect("every provider has it"))(self.qp.as_ptr(), wr.cast(), &mut bad)
        }
    }

    /// `ibv_post_recv`, likewise.
    ///
    /// # Safety
    /// `wr` is a valid list of requests (`struct ibv_recv_wr`).
    #[inline]
    pub unsafe fn post_recv(&self, wr: *mut c_void) -> c_int {
        let mut bad = std::ptr::null_mut();
        // SAFETY: as above.
        unsafe {
            let ops = &(*self.qp.as_ref().context).ops;
            (ops.post_recv.expect("every provider has it"))(self.qp.as_ptr(), wr.cast(), &mut bad)
        }
    }

    /// `ibv_poll_cq` for one completion.
    #[inline]
    pub fn poll(&self, wc: &mut Wc) -> c_int {
        // SAFETY: as above; there is room for one.
        unsafe {
            let qp = self.qp.as_ref();
            let ops = &(*qp.context).ops;
            (ops.poll_cq.expect("every provider has it"))(qp.send_cq, 1, wc)
        }
    }
}
