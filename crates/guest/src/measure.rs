//! For the measurement of what virtualisation costs on the data path (`bench/run cost`): the verbs as C programs call them,
//! once of this library, once of a provider that virtualises nothing. Both read the program's requests and answer it with
//! the same code, above the same rings.

mod system;

use std::ffi::c_int;
use std::ptr::{NonNull, null_mut};

pub use verbatim_verbs::measure::KEY;
use verbatim_verbs::measure::{Provider, Rig};
use verbatim_verbs::{SendWr, Wc};

use crate::abi::*;
use crate::data;
use crate::ffi::{Errno, data_path};
use crate::verbs::{cq_handle_of, qp_handle_of};

pub use self::system::MeasuredSystem;

/// A queue pair and its completion queue in two layers.
pub trait Target {
    /// From now on keys are translated, as after a move of this process and of its peer.
    fn is_moved(&self);

    /// The RNICs complete all that was posted.
    fn complete(&mut self);

    /// `ibv_post_send`(3) of one request.
    ///
    /// # Safety
    /// The request is valid, and the only one in its list.
    unsafe fn post_send(&self, layer: Layer, wr: *mut ibv_send_wr) -> c_int;

    /// `ibv_post_recv`(3) of one request.
    ///
    /// # Safety
    /// The request is valid, and the only one in its list.
    unsafe fn post_recv(&self, layer: Layer, wr: *mut ibv_recv_wr) -> c_int;

    /// `ibv_poll_cq`(3) for one completion.
    fn poll(&self, layer: Layer, wc: &mut ibv_wc) -> c_int;
}

/// What is measured, with its C objects.
pub struct Measured {
    rig: Rig,
    qp: NonNull<ibv_qp>,
    cq: NonNull<ibv_cq>,
}

/// Which of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer {
    /// Without virtualisation.
    Provider,
    /// This library.
    Guest,
}

impl Measured {
    /// Makes it; it stays for the life of the process.
    #[allow(clippy::new_without_default, reason = "it maps memory")]
    pub fn new() -> Self {
        let rig = Rig::new();
        Self {
            qp: qp_handle_of(rig.qp.clone()),
            cq: cq_handle_of(rig.cq.clone()),
            rig,
        }
    }
}

impl Target for Measured {
    fn is_moved(&self) {
        self.rig.is_moved();
    }

    fn complete(&mut self) {
        self.rig.complete();
    }

    #[inline]
    unsafe fn post_send(&self, layer: Layer, wr: *mut ibv_send_wr) -> c_int {
        let mut bad = null_mut();
        match layer {
            // SAFETY: the object lives as long as the process; the caller's contract.
            Layer::Guest => unsafe { data::post_send(self.qp.as_ptr(), wr, &raw mut bad) },
            // SAFETY: the caller's contract.
            Layer::Provider => unsafe { provider_post_send(&self.rig.provider, wr, &raw mut bad) },
        }
    }

    #[inline]
    unsafe fn post_recv(&self, layer: Layer, wr: *mut ibv_recv_wr) -> c_int {
        let mut bad = null_mut();
        match layer {
            // SAFETY: the object lives as long as the process; the caller's contract.
            Layer::Guest => unsafe { data::post_recv(self.qp.as_ptr(), wr, &raw mut bad) },
            // SAFETY: the caller's contract.
            Layer::Provider => unsafe { provider_post_recv(&self.rig.provider, wr, &raw mut bad) },
        }
    }

    #[inline]
    fn poll(&self, layer: Layer, wc: &mut ibv_wc) -> c_int {
        match layer {
            // SAFETY: the object lives as long as the process; there is room for one.
            Layer::Guest => unsafe { data::poll_cq(self.cq.as_ptr(), 1, wc) },
            // SAFETY: there is room for one.
            Layer::Provider => unsafe { provider_poll_cq(&self.rig.provider, wc) },
        }
    }
}

/// # Safety
/// As for [`Measured::post_send`].
#[inline(never)]
unsafe extern "C" fn provider_post_send(
    provider: &Provider,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    let post = || {
        // SAFETY: the caller's contract.
        let request = unsafe { wr.as_ref() }.ok_or(Errno::INVALID)?;
        let post = |wr: SendWr<'_>| Ok(provider.post_send(&wr)?);
        // SAFETY: the caller's contract.
        unsafe { data::with_send(request, false, post) }
    };
    answer(data_path(post, || Err(Errno::BROKEN)), wr, bad_wr)
}

/// # Safety
/// As for [`Measured::post_recv`].
#[inline(never)]
unsafe extern "C" fn provider_post_recv(
    provider: &Provider,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    let post = || {
        // SAFETY: the caller's contract.
        let posted = unsafe {
            data::each(wr, |requests| {
                requests
                    .into_iter()
                    .try_for_each(|request| provider.post_recv(&request).map_err(|error| (0, error)))
            })
        };
        posted.map_err(|(_, errno)| errno)
    };
    answer(data_path(post, || Err(Errno::BROKEN)), wr, bad_wr)
}

/// # Safety
/// `to` is valid for writes of one entry.
#[inline(never)]
unsafe extern "C" fn provider_poll_cq(provider: &Provider, to: *mut ibv_wc) -> c_int {
    // SAFETY: the caller's contract; the layouts are equal (`data::poll`).
    let to = unsafe { std::slice::from_raw_parts_mut(to.cast::<Wc>(), 1) };
    data_path(|| provider.poll(to) as c_int, || -libc::EIO)
}

#[inline]
fn answer<T>(outcome: Result<(), Errno>, wr: *mut T, bad_wr: *mut *mut T) -> c_int {
    let Err(errno) = outcome else { return 0 };
    // SAFETY: it is a variable of the caller's.
    unsafe { bad_wr.write(wr) };
    errno.raw()
}
