//! System calls that know whether a signal handler ran meanwhile.
//!
//! The kernel tells nobody that it ran a handler: `EINTR` is the same for a handler and for a freezer. But a handler's frame
//! has to lie somewhere. On x86-64 it begins below the red zone of the thread's stack (128 bytes), or at the end of its alternate
//! stack, and at that end is what the processor saved, which always has a mark of the kernel's (FP_XSTATE_MAGIC2) or registers. So
//! both places get a pattern before the call, and if it is still there afterwards, no handler has run. CRIU runs its own
//! code in a task on stacks of its own.
//!
//! The call is made here and not by the C library, since the place of the frame follows from the stack pointer at the call. The
//! C library's calls that sleep are places at which a thread can be cancelled, and so is this: as there, cancellation is
//! asynchronous for the time of the call.

use std::arch::asm;
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::Relaxed;

use super::alternate;

/// How a call ended.
#[derive(Debug, Clone, Copy)]
pub struct Outcome {
    /// What the kernel returned: a negative number is an errno.
    pub returned: isize,
    /// Whether a handler ran on this thread.
    pub handler_ran: bool,
}

const PTHREAD_CANCEL_ASYNCHRONOUS: c_int = 1;

/// Words of the pattern. The end of a frame is aligned to 64 bytes, so that the first written byte is less than 128 away.
const WORDS: usize = 64;

/// Nothing that would be there by itself.
const PATTERN: u64 = 0x9d3c_71e5_a4f0_862b;

unsafe extern "C-unwind" {
    fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
}

/// Makes a system call that may sleep.
///
/// # Safety
/// That of the system call.
pub unsafe fn witnessed(number: libc::c_long, arguments: [usize; 6]) -> Outcome {
    let may_be_cancelled = !is_single_threaded();
    let mut before = 0;
    if may_be_cancelled {
        // SAFETY: this thread's own; who is cancelled here owns nothing that would have to be given back.
        unsafe { pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &mut before) };
    }
    let other = alternate::end(8 * WORDS);
    if let Some(end) = other {
        // SAFETY: within the alternate stack, on which nobody runs now.
        (1..=WORDS).for_each(|word| unsafe { end.sub(word).write_volatile(PATTERN) });
    }
    // SAFETY: the caller's contract.
    let (returned, changed) = unsafe { call(number, arguments) };
    let is_changed = |end: *mut u64| {
        // SAFETY: as above.
        (1..=WORDS).any(|word| unsafe { end.sub(word).read_volatile() } != PATTERN)
    };
    let handler_ran = changed != 0 || other.is_some_and(is_changed);
    if may_be_cancelled {
        // SAFETY: as above.
        unsafe { pthread_setcanceltype(before, ptr::null_mut()) };
    }
    Outcome {
        returned,
        handler_ran,
    }
}

/// Makes one that never sleeps, and so is never interrupted; without a witness.
///
/// # Safety
/// That of the system call.
pub unsafe fn at_once(number: libc::c_long, arguments: [usize; 6]) -> Outcome {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the caller's contract.
    let returned = match unsafe { libc::syscall(number, a, b, c, d, e, f) } {
        // SAFETY: this thread's own.
        -1 => -unsafe { *libc::__errno_location() } as isize,
        returned => returned as isize,
    };
    Outcome {
        returned,
        handler_ran: true,
    }
}

/// The call, and whether the pattern below the red zone has changed. Nothing but this uses the memory there between its first and
/// its last instruction, handlers apart.
///
/// # Safety
/// That of the system call.
unsafe fn call(number: libc::c_long, arguments: [usize; 6]) -> (isize, u64) {
    let [a, b, c, d, e, f] = arguments;
    let (mut returned, mut changed) = (number as isize, 0u64);
    // SAFETY: memory below the stack pointer is this thread's, and nobody's. The system call is the caller's.
    unsafe {
        asm!(
            "mov ecx, {words}",
            "2:",
            "mov qword ptr [rsp + rcx * 8 - {end}], {pattern}",
            "dec ecx",
            "jnz 2b",
            "syscall",
            "mov ecx, {words}",
            "3:",
            "mov r11, qword ptr [rsp + rcx * 8 - {end}]",
            "xor r11, {pattern}",
            "or {changed}, r11",
            "dec ecx",
            "jnz 3b",
            words = const WORDS,
            // So that the last word ends where the red zone does.
            end = const 128 + 8 * (WORDS + 1),
            pattern = in(reg) PATTERN,
            changed = inout(reg) changed,
            inout("rax") returned,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            in("r10") d,
            in("r8") e,
            in("r9") f,
            out("rcx") _,
            out("r11") _,
        );
    }
    (returned, changed)
}

/// The C library's `__libc_single_threaded`, if it has one: a byte that it changes. Found when this library is loaded, since who
/// waits in a signal handler may be within the loader.
static SINGLE_THREADED: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());

/// Run by the loader before the program.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = find_flag;

extern "C" fn find_flag() {
    // SAFETY: a C string.
    let flag = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) };
    SINGLE_THREADED.store(flag.cast(), Relaxed);
}

/// Whether the C library knows of no thread but this: nobody can cancel it then. Who leaves a call by longjmp(3) from a handler
/// keeps the kind of cancellation that it had here, which so concerns programs with threads only, as it does without us.
fn is_single_threaded() -> bool {
    let flag = SINGLE_THREADED.load(Relaxed);
    // SAFETY: null, or the variable, which lives as long as the C library.
    !flag.is_null() && unsafe { flag.read_volatile() } != 0
}
