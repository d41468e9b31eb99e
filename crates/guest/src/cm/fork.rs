//! The channels' lock is held over a fork.

use std::sync::Once;

use super::channels;
use crate::ffi::data_path;
use crate::log::log;

/// Registers the handlers, after those of the verbs: handlers run in the order in which locks are taken, this one's first.
pub fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: functions of this library, which is never unloaded while handlers of it are registered: they hold a
        // reference to it (`__register_atfork` runs them at dlclose).
        let outcome = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
        if outcome != 0 {
            log!("the handlers for fork could not be registered: {outcome}");
        }
    });
}

unsafe extern "C" fn before() {
    data_path(channels::before_fork, || ());
}

unsafe extern "C" fn after() {
    data_path(channels::after_fork, || ());
}
