//! What two processes share: words, and bytes that are copied in and out of slots.
//!
//! The queues use the names of this module and no others for shared memory. So there is one place that says how it may
//! be touched, and the model of the queues (`tests/model`) can put its own in its place.

use std::ptr::NonNull;

pub use std::sync::atomic::{AtomicU32, AtomicU64, fence};

/// Copies `value` into a slot.
///
/// # Safety
/// `slot` is valid for writing a `T` and aligned for it.
#[inline]
pub unsafe fn write<T: Copy>(slot: NonNull<T>, value: T) {
    // SAFETY: the same contract.
    unsafe { slot.write(value) }
}

/// Copies `values` into a slot.
///
/// # Safety
/// `slot` is valid for writing that many bytes.
#[inline]
pub unsafe fn write_all<T: Copy>(slot: NonNull<u8>, values: &[T]) {
    // SAFETY: the same contract; nobody has a reference to shared memory, so that it cannot overlap with `values`.
    unsafe { slot.copy_from_nonoverlapping(NonNull::from(values).cast(), size_of_val(values)) }
}

/// Copies a value out of a slot that the other side has finished with.
///
/// # Safety
/// `slot` is valid for reading a `T`, of which any bytes are one, and aligned for it.
#[inline]
pub unsafe fn read<T: Copy>(slot: NonNull<T>) -> T {
    // SAFETY: the same contract.
    unsafe { slot.read() }
}

/// Copies a value out of a slot, once: whoever is at the other side may write to it meanwhile, and what is checked must be
/// what is used.
///
/// # Safety
/// As for [`read`].
#[inline]
pub unsafe fn read_once<T: Copy>(slot: NonNull<T>) -> T {
    // SAFETY: the same contract.
    unsafe { slot.read_volatile() }
}

/// As [`read_once`], for plain bytes.
///
/// # Safety
/// `slot` is valid for reading as many bytes as `out` has.
#[inline]
pub unsafe fn read_bytes_once(slot: NonNull<u8>, out: &mut [u8]) {
    // SAFETY: the same contract; `out` is private memory.
    unsafe { std::ptr::copy_nonoverlapping(slot.as_ptr(), out.as_mut_ptr(), out.len()) }
}
