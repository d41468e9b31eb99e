//! The conventions by which verbs tell success from failure, each of them a type.
//!
//! | type | success | failure | for example |
//! | --- | --- | --- | --- |
//! | [`Pointer`] | the object | NULL, `errno` set | `ibv_alloc_pd` |
//! | [`Code`] | 0 | an errno as the value | `ibv_modify_qp` |
//! | [`MinusOne`] | 0 or more | -1, `errno` set | `ibv_query_gid` |
//! | [`Count`] | a count | a negative errno | `ibv_poll_cq`, `_ibv_query_gid_table` |
//! | [`Nothing`] | | | `ibv_free_device_list` |

use std::ffi::c_int;
use std::ptr::NonNull;

/// A positive errno.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Errno(c_int);

impl Errno {
    /// A parameter makes no sense.
    pub const INVALID: Self = Self(libc::EINVAL);
    /// The verb, or what it was asked for, is not there.
    pub const NOT_SUPPORTED: Self = Self(libc::EOPNOTSUPP);
    /// A queue is full, or memory is short.
    pub const NO_MEMORY: Self = Self(libc::ENOMEM);
    /// Somebody still uses it.
    pub const BUSY: Self = Self(libc::EBUSY);
    /// What is to be written does not fit.
    pub const NO_SPACE: Self = Self(libc::ENOSPC);
    /// There is nothing at that place.
    pub const NO_DATA: Self = Self(libc::ENODATA);
    /// There is no completion to be had.
    pub const NO_ENTRY: Self = Self(libc::ENOENT);
    /// Something broke inside of this library.
    pub const BROKEN: Self = Self(libc::EIO);

    /// An errno from elsewhere; what cannot be one becomes [`Errno::BROKEN`], since 0 would read as success.
    pub fn new(raw: c_int) -> Self {
        if raw > 0 { Self(raw) } else { Self::BROKEN }
    }

    /// The number.
    pub fn raw(self) -> c_int {
        self.0
    }

    fn set(self) {
        set_errno(self.0);
    }
}

impl std::fmt::Display for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

/// The calling thread's `errno`.
pub fn errno() -> c_int {
    // SAFETY: the C library's own location of this thread's errno.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's `errno`.
pub fn set_errno(raw: c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = raw };
}

/// What a verb returns.
pub trait Answer: Sized {
    /// What it has when all went well.
    type Success;
    /// All went well.
    fn success(value: Self::Success) -> Self;
    /// It did not; may set `errno`.
    fn failure(errno: Errno) -> Self;
}

/// An object, or NULL with `errno` set.
#[repr(transparent)]
#[derive(Debug)]
pub struct Pointer<T>(*mut T);

impl<T> Answer for Pointer<T> {
    type Success = NonNull<T>;
    fn success(value: NonNull<T>) -> Self {
        Self(value.as_ptr())
    }
    fn failure(errno: Errno) -> Self {
        errno.set();
        Self(std::ptr::null_mut())
    }
}

impl<T> Pointer<T> {
    /// For the tables of functions, whose types are those of the header.
    pub fn raw(self) -> *mut T {
        self.0
    }
}

/// 0, or a positive errno as the value.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub c_int);

impl Answer for Code {
    type Success = ();
    fn success((): ()) -> Self {
        Self(0)
    }
    fn failure(errno: Errno) -> Self {
        Self(errno.0)
    }
}

/// 0 or a number, or -1 with `errno` set.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MinusOne(pub c_int);

impl Answer for MinusOne {
    type Success = c_int;
    fn success(value: c_int) -> Self {
        Self(value)
    }
    fn failure(errno: Errno) -> Self {
        errno.set();
        Self(-1)
    }
}

/// A count, or a negative errno.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count(pub isize);

impl Answer for Count {
    type Success = usize;
    fn success(value: usize) -> Self {
        Self(isize::try_from(value).unwrap_or(isize::MAX))
    }
    fn failure(errno: Errno) -> Self {
        Self(-(errno.0 as isize))
    }
}

/// No answer: C is told nothing.
pub type Nothing = ();

impl Answer for Nothing {
    type Success = ();
    fn success((): ()) {}
    fn failure(_: Errno) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_convention_says_failure_in_its_own_way() {
        set_errno(0);
        assert_eq!(Code::failure(Errno::INVALID), Code(libc::EINVAL));
        assert_eq!(Count::failure(Errno::INVALID), Count(-(libc::EINVAL as isize)));
        assert_eq!(errno(), 0);
        assert_eq!(MinusOne::failure(Errno::NO_MEMORY), MinusOne(-1));
        assert_eq!(errno(), libc::ENOMEM);
        assert!(Pointer::<u8>::failure(Errno::NOT_SUPPORTED).raw().is_null());
        assert_eq!(errno(), libc::EOPNOTSUPP);
    }

    #[test]
    fn an_errno_is_never_taken_for_success() {
        assert_eq!(Code::failure(Errno::new(0)), Code(libc::EIO));
        assert_eq!(Code::failure(Errno::new(-5)), Code(libc::EIO));
    }
}
