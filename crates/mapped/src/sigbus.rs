//! A program may truncate a file that a daemon has mapped; touching a page behind its new end raises SIGBUS.
//!
//! Each access is announced in a variable of the thread. The handler, which runs on the thread that faulted, puts a page
//! of zeroes in the place of a missing page of the announced range and leaves a note; the access goes on and its result
//! is thrown away. A fault anywhere else is a defect of the daemon and takes the default action.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::Once;
use std::sync::atomic::{Ordering::SeqCst, compiler_fence};

const PAGE: usize = 4096;

struct Announced {
    start: Cell<usize>,
    end: Cell<usize>,
    faulted: Cell<bool>,
}

thread_local! {
    // Constant and without a destructor: the handler may use it at any time.
    static ANNOUNCED: Announced =
        const { Announced { start: Cell::new(0), end: Cell::new(0), faulted: Cell::new(false) } };
}

/// The file behind a mapping ends before the page that was touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Truncated;

/// Installs the handler for the whole process, once.
pub fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: a sigaction is plain data; the handler does only what is allowed in one (see `on_sigbus`).
        let installed = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_sigbus as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut())
        };
        assert_eq!(installed, 0, "SIGBUS can be handled");
    });
}

/// Runs `access`, which touches no memory that can fault but `[start, start + length)`, a part of one mapping.
#[inline]
pub fn guarded(start: usize, length: usize, access: impl FnOnce()) -> Result<(), Truncated> {
    ANNOUNCED.with(|announced| {
        announced.start.set(start);
        announced.end.set(start + length);
        compiler_fence(SeqCst);
        access();
        compiler_fence(SeqCst);
        announced.end.set(0);
        if announced.faulted.replace(false) {
            Err(Truncated)
        } else {
            Ok(())
        }
    })
}

extern "C" fn on_sigbus(_signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo for SIGBUS (SA_SIGINFO).
    let address = unsafe { (*info).si_addr() } as usize;
    let repaired = ANNOUNCED.with(|announced| {
        let hit = (announced.start.get()..announced.end.get()).contains(&address);
        hit && {
            announced.faulted.set(true);
            // SAFETY: the page belongs to a file mapping of the daemon (contract of `guarded`), which holds no Rust
            // object; mmap is a plain system call, safe in a handler.
            let page = unsafe {
                libc::mmap(
                    (address & !(PAGE - 1)) as *mut c_void,
                    PAGE,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                )
            };
            page != libc::MAP_FAILED
        }
    });
    if !repaired {
        // SAFETY: signal(2) may be called in a handler. The access faults again, with the default action.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    }
}
