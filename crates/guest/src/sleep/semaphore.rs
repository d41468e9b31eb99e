//! sem_timedwait(3) and sem_clockwait(3).
//!
//! In the C library the system call of these is within the function, where it can have no witness. So what they do to a semaphore is
//! done here: 64-bit glibc's, whose shape all programs have compiled in since 2.21. `sem_wait` needs nothing, since the kernel starts a
//! wait without a limit again by itself.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use libc::{c_int, clockid_t, sem_t, timespec};

use super::go_on::go_on;
use super::minus_one;
use super::witness::witnessed;

/// glibc's `struct new_sem`.
#[repr(C)]
struct Semaphore {
    /// The value; above its 32 bits, how many wait.
    data: AtomicU64,
    /// 0, or 128 where other processes have it too.
    shared: c_int,
    pad: c_int,
}

const _: () = assert!(size_of::<Semaphore>() <= size_of::<sem_t>());

const VALUE: u64 = u32::MAX as u64;
const WAITER: u64 = 1 << 32;
const ANY_BIT: usize = u32::MAX as usize;

impl Semaphore {
    /// Takes one, if there is one.
    fn take(&self) -> bool {
        let take = |data: u64| (data & VALUE > 0).then(|| data - 1);
        self.data.fetch_update(Acquire, Relaxed, take).is_ok()
    }

    /// Takes one, at the latest at `end`; 0, or a negative errno.
    ///
    /// # Safety
    /// The kernel reads `end`, and checks where it is.
    unsafe fn take_until(&self, clock: clockid_t, end: *const timespec) -> isize {
        if self.take() {
            return 0;
        }
        let by_clock = match clock {
            libc::CLOCK_REALTIME => libc::FUTEX_CLOCK_REALTIME,
            _ => 0,
        };
        let privately = libc::FUTEX_PRIVATE_FLAG ^ self.shared;
        let operation = libc::FUTEX_WAIT_BITSET | by_clock | privately;
        // On little-endian processors the value comes first.
        let value = &raw const self.data;
        let arguments = [value as usize, operation as usize, 0, end as usize, 0, ANY_BIT];
        // SAFETY: the kernel checks what it is given.
        let wait = || unsafe { witnessed(libc::SYS_futex, arguments) };
        // Nothing that would have to be dropped: a thread that is cancelled in its wait is unwound from there. It stays counted, and each
        // later `sem_post` makes a system call that wakes nobody.
        self.data.fetch_add(WAITER, SeqCst);
        let ended = loop {
            if self.take() {
                break 0;
            }
            let returned = go_on(wait, || None, |_| wait());
            // Woken, or there was one already.
            if returned != 0 && returned != -(libc::EAGAIN as isize) {
                break returned;
            }
        };
        self.data.fetch_sub(WAITER, SeqCst);
        ended
    }
}

/// sem_clockwait(3)
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sem_clockwait(
    sem: *mut sem_t,
    clock: clockid_t,
    end: *const timespec,
) -> c_int {
    // SAFETY: the caller's contract.
    let (semaphore, time) = unsafe { (&*sem.cast::<Semaphore>(), &*end) };
    let has_clock = matches!(clock, libc::CLOCK_REALTIME | libc::CLOCK_MONOTONIC);
    if !has_clock || !(0..1_000_000_000).contains(&time.tv_nsec) {
        return minus_one(-(libc::EINVAL as isize));
    }
    if time.tv_sec < 0 {
        // Over for long, and nothing that the kernel takes.
        return match semaphore.take() {
            true => 0,
            false => minus_one(-(libc::ETIMEDOUT as isize)),
        };
    }
    // SAFETY: the caller's contract.
    minus_one(unsafe { semaphore.take_until(clock, end) })
}

/// sem_timedwait(3)
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sem_timedwait(sem: *mut sem_t, end: *const timespec) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { sem_clockwait(sem, libc::CLOCK_REALTIME, end) }
}
