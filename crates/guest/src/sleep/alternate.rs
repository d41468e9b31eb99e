//! Where each thread's alternate signal stack is.
//!
//! To ask the kernel at each wait would be a system call that the program does not make: slower, and the end of a program whose
//! seccomp filter allows only its own. So sigaltstack(2) is ours, too, and notes what it sets.

use std::arch::asm;
use std::cell::Cell;
use std::ffi::c_int;
use std::ptr;

use libc::stack_t;

thread_local! {
    /// The first and the last address, both 0 where there is none.
    static STACK: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// sigaltstack(2)
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sigaltstack(new: *const stack_t, old: *mut stack_t) -> c_int {
    // SAFETY: the kernel checks what it is given.
    let returned = unsafe { libc::syscall(libc::SYS_sigaltstack, new, old) } as c_int;
    // SAFETY: NULL, or the kernel has read it.
    if let (0, Some(new)) = (returned, unsafe { new.as_ref() }) {
        let start = new.ss_sp as usize;
        STACK.set(match new.ss_flags & libc::SS_DISABLE {
            0 => (start, start + new.ss_size),
            _ => (0, 0),
        });
    }
    returned
}

/// The end of this thread's alternate stack, if it has one of at least so many bytes and does not run on it.
pub fn end(at_least: usize) -> Option<*mut u64> {
    let here: usize;
    // SAFETY: a register is read.
    unsafe { asm!("mov {}, rsp", out(reg) here, options(nomem, nostack, preserves_flags)) };
    let (start, end) = STACK.get();
    let end = end & !7;
    (end > start + at_least && !(start..end).contains(&here)).then(|| ptr::with_exposed_provenance_mut(end))
}
