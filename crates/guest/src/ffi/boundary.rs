//! The one way from C into this library.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use super::answer::{Answer, Errno, errno, set_errno};
use crate::log::log;

/// Runs a verb: no panic leaves it, `errno` is as before if it succeeds, and its failure has the form that the verb's
/// manual page promises.
pub fn verb<A: Answer>(name: &'static str, body: impl FnOnce() -> Result<A::Success, Errno>) -> A {
    quiet_panics();
    let before = errno();
    let answer = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(errno)) => {
            log!("{name}: {errno}");
            Err(errno)
        }
        Err(_) => Err(Errno::BROKEN),
    };
    set_errno(before);
    match answer {
        Ok(value) => A::success(value),
        Err(errno) => A::failure(errno),
    }
}

/// What is asked for is not there; says what, since the verb's name alone does not.
pub fn unsupported(what: &str) -> Errno {
    log!("{what}: not supported");
    Errno::NOT_SUPPORTED
}

/// Runs a verb of the data path: as [`verb`], but `errno` needs no care since nothing on that path calls the C library,
/// and a failure is not logged since a full queue is daily life.
#[inline]
pub fn data_path<T>(body: impl FnOnce() -> T, panicked: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| panicked())
}

/// A guest writes nothing on stderr unless asked to, not even when it breaks. The hook belongs to this library's own
/// copy of the standard library: a Rust program keeps its own.
fn quiet_panics() {
    static ONCE: Once = Once::new();
    // Inside of a Rust test or program that links us, the hook would be theirs.
    if cfg!(test) {
        return;
    }
    ONCE.call_once(|| {
        std::panic::set_hook(Box::new(|info| log!("{info}")));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::{Code, MinusOne};

    #[test]
    fn a_panic_becomes_the_verbs_own_error() {
        let panics = || -> Result<(), Errno> { panic!("on purpose") };
        assert_eq!(verb::<Code>("test", panics), Code(libc::EIO));
        assert_eq!(data_path(|| -> i32 { panic!("on purpose") }, || -7), -7);
    }

    #[test]
    fn errno_is_kept_when_all_goes_well_and_set_when_it_does_not() {
        set_errno(libc::EAGAIN);
        let well = || {
            set_errno(libc::ENOENT);
            Ok(3)
        };
        assert_eq!(verb::<MinusOne>("test", well), MinusOne(3));
        assert_eq!(errno(), libc::EAGAIN);
        assert_eq!(verb::<MinusOne>("test", || Err(Errno::INVALID)), MinusOne(-1));
        assert_eq!(errno(), libc::EINVAL);
    }
}
