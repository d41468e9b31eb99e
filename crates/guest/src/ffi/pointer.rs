//! Pointers that cross the boundary.
//!
//! - An object that the program owns is a [`Handle`]: the structure of the header, followed by what belongs to us. It
//!   is given away once ([`Handle::give`]), lent back at each verb ([`Handle::lend`]) and taken back once, when it is
//!   destroyed ([`Handle::take`]).
//! - What the program only shows us for the length of a call is read, written or seen as a slice.
//!
//! NULL is `EINVAL` everywhere. A pointer that is not NULL is believed: that is the contract of the verbs.

use std::cell::UnsafeCell;
use std::ptr::NonNull;

use super::Errno;

/// A structure of the header that is the first part of an object of ours.
pub trait CObject {
    /// What follows it.
    type Core;
}

/// An object that a program owns. Aligned and laid out so that a pointer to it is one to its C part.
#[repr(C)]
#[derive(Debug)]
pub struct Handle<C: CObject> {
    /// The program reads it, and writes some of it, whenever it likes: we touch single members through raw pointers only.
    c: UnsafeCell<C>,
    /// Ours.
    pub core: C::Core,
}

impl<C: CObject> Handle<C> {
    /// Gives an object to the program.
    pub fn give(c: C, core: C::Core) -> NonNull<C> {
        let handle = Box::new(Self {
            c: UnsafeCell::new(c),
            core,
        });
        NonNull::from(Box::leak(handle)).cast()
    }

    /// Sees an object that the program has.
    ///
    /// # Safety
    /// NULL, or what [`Handle::give`] returned and [`Handle::take`] has not taken back, also not before the end of `'a`.
    #[inline]
    pub unsafe fn lend<'a>(pointer: *mut C) -> Result<&'a Self, Errno> {
        // SAFETY: a handle starts with its C part; the contract of this function. All of it is shared: the C part is
        // in a cell, `core` is only ever borrowed.
        unsafe { pointer.cast::<Self>().as_ref() }.ok_or(Errno::INVALID)
    }

    /// Takes an object back, for good.
    ///
    /// # Safety
    /// As for [`Handle::lend`], and nobody uses the pointer any more.
    pub unsafe fn take(pointer: NonNull<C>) -> C::Core {
        // SAFETY: made by `give` from a box, and taken back once.
        unsafe { Box::from_raw(pointer.cast::<Self>().as_ptr()) }.core
    }

    /// The C part. Dereference it for single members only.
    #[inline]
    pub fn c(&self) -> *mut C {
        self.c.get()
    }
}

/// Copies what the program shows.
///
/// # Safety
/// NULL or valid for reads of `T`.
pub unsafe fn read<T: Copy>(pointer: *const T) -> Result<T, Errno> {
    // SAFETY: the caller's contract.
    unsafe { pointer.as_ref() }.copied().ok_or(Errno::INVALID)
}

/// Writes where the program wants it.
///
/// # Safety
/// NULL or valid for writes of `T`.
pub unsafe fn write<T>(pointer: *mut T, value: T) -> Result<(), Errno> {
    if pointer.is_null() {
        return Err(Errno::INVALID);
    }
    // SAFETY: the caller's contract.
    unsafe { pointer.write(value) };
    Ok(())
}

/// Sees an array of the program's; NULL is fine for an empty one.
///
/// # Safety
/// Valid for reads of `count` elements for `'a`, unless NULL or `count` is 0.
#[inline]
pub unsafe fn slice<'a, T>(pointer: *const T, count: usize) -> Result<&'a [T], Errno> {
    match (count, pointer.is_null()) {
        (0, _) => Ok(&[]),
        (_, true) => Err(Errno::INVALID),
        // SAFETY: the caller's contract.
        (_, false) => Ok(unsafe { std::slice::from_raw_parts(pointer, count) }),
    }
}

/// Sees an array of the program's, to be written; NULL is fine for an empty one.
///
/// # Safety
/// Valid for writes of `count` elements for `'a`, and nobody else's meanwhile, unless NULL or `count` is 0.
pub unsafe fn slice_mut<'a, T>(pointer: *mut T, count: usize) -> Result<&'a mut [T], Errno> {
    match (count, pointer.is_null()) {
        (0, _) => Ok(&mut []),
        (_, true) => Err(Errno::INVALID),
        // SAFETY: the caller's contract.
        (_, false) => Ok(unsafe { std::slice::from_raw_parts_mut(pointer, count) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    struct Thing {
        number: u32,
    }

    impl CObject for Thing {
        type Core = std::rc::Rc<()>;
    }

    #[test]
    fn an_object_goes_out_and_comes_back_once() {
        let core = std::rc::Rc::new(());
        let pointer = Handle::give(Thing { number: 7 }, core.clone());
        // SAFETY: just given.
        let lent = unsafe { Handle::lend(pointer.as_ptr()) }.unwrap();
        // SAFETY: one member of a live object.
        assert_eq!(unsafe { (*lent.c()).number }, 7);
        assert_eq!(std::rc::Rc::strong_count(&core), 2);
        // SAFETY: given above, not used after.
        drop(unsafe { Handle::take(pointer) });
        assert_eq!(std::rc::Rc::strong_count(&core), 1);
        // SAFETY: NULL is allowed.
        let nothing = unsafe { Handle::<Thing>::lend(std::ptr::null_mut()) };
        assert_eq!(nothing.err(), Some(Errno::INVALID));
    }

    #[test]
    fn null_is_an_empty_array_or_an_error() {
        // SAFETY: NULL is allowed.
        unsafe {
            assert_eq!(slice::<u8>(std::ptr::null(), 0), Ok(&[][..]));
            assert_eq!(slice::<u8>(std::ptr::null(), 1), Err(Errno::INVALID));
            assert_eq!(read::<u8>(std::ptr::null()), Err(Errno::INVALID));
            assert_eq!(write::<u8>(std::ptr::null_mut(), 1), Err(Errno::INVALID));
        }
    }
}
