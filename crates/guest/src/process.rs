//! What the core must know of the life of the process: `fork` and the end.

use std::sync::Once;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use crate::ffi::data_path;
use crate::log::log;

/// The process that opened a device last; a child that only inherited the library has nothing to clean up.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Registers the handlers; to be called before a device is opened.
pub fn register() {
    static ONCE: Once = Once::new();
    OWNER.store(std::process::id(), Relaxed);
    ONCE.call_once(|| {
        // SAFETY: functions of this library, which is never unloaded while handlers of it are registered: they hold a
        // reference to it (`__register_atfork`, `__cxa_atexit` run them at dlclose and at exit).
        let outcomes = unsafe {
            [
                libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)),
                libc::atexit(at_exit),
            ]
        };
        if outcomes != [0, 0] {
            log!("the handlers for fork and exit could not be registered: {outcomes:?}");
        }
    });
}

unsafe extern "C" fn before() {
    data_path(verbatim_verbs::before_fork, || ());
}

unsafe extern "C" fn in_parent() {
    data_path(verbatim_verbs::after_fork_in_parent, || ());
}

unsafe extern "C" fn in_child() {
    data_path(verbatim_verbs::after_fork_in_child, || ());
}

extern "C" fn at_exit() {
    if OWNER.load(Relaxed) == std::process::id() {
        data_path(|| verbatim_verbs::Process::global().cleanup(), || ());
    }
}
