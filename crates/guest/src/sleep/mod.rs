//! Waits that a freeze would end early.
//!
//! CRIU ends system calls that sleep: in a program that has moved, `sleep`, `poll` and `epoll_wait` that were under way return
//! with `EINTR`, and so they do in one whose dump was given up. The program expects that only where a handler of its own has
//! run. So these functions of the C library are ours in front of it: what was interrupted without a handler goes on with what is
//! left ([`go_on`]), and whether a handler ran is seen on the stack ([`witness`], [`alternate`]). That needs no word from the agent, and holds for
//! every freeze and every dump in rounds.
//!
//! Time is that of `CLOCK_MONOTONIC`, which goes on from where it stood in a program that has moved: what it was frozen for does
//! not count.
//!
//! Not here, since they go on by themselves: `select`, `pselect`, `ppoll` and sleeps until a point in time (the kernel starts them
//! again with what is left), and waits for mutexes and condition variables (the C library does). Not reached: who makes system
//! calls by itself (Go, programs that are linked statically).

mod alternate;
mod go_on;
mod semaphore;
mod witness;

use std::time::Duration;

use libc::{c_int, c_uint, clockid_t, epoll_event, nfds_t, pollfd, sigset_t, timespec};

use go_on::{INTERRUPTED, go_on};
use witness::{Outcome, at_once, witnessed};

/// Bytes of the kernel's signal set.
const SIGNAL_SET: usize = 8;

unsafe extern "C" {
    /// Ends the program: a buffer is smaller than what is to be written there.
    fn __chk_fail() -> !;
}

// ---- sleeping --------------------------------------------------------------------------------------------------------

/// As clock_nanosleep(2), but a failure is negative.
///
/// # Safety
/// That of clock_nanosleep(2): the kernel looks at `length` first.
unsafe fn sleep_by(clock: clockid_t, flags: c_int, length: *const timespec, left: *mut timespec) -> isize {
    // The program may give one variable for both, and what the kernel writes there must not become the length.
    let mut rest = timespec_of(Duration::ZERO);
    let rest_at = &raw mut rest;
    let call = |length: *const timespec| {
        let arguments = [
            clock as usize,
            flags as usize,
            length as usize,
            rest_at as usize,
            0,
            0,
        ];
        // SAFETY: the caller's contract; the kernel checks what it is given.
        unsafe { witnessed(libc::SYS_clock_nanosleep, arguments) }
    };
    // SAFETY: the kernel has read it.
    let given = || Some(duration(unsafe { &*length }));
    let returned = if clock < 0 || clock == libc::CLOCK_PROCESS_CPUTIME_ID {
        // Time that a process or thread has used: the kernel knows how much is left.
        call(length).returned
    } else if flags & libc::TIMER_ABSTIME != 0 {
        return go_on(|| call(length), || None, |_| call(length));
    } else {
        go_on(
            || call(length),
            given,
            |left| call(&timespec_of(left.unwrap_or(Duration::MAX))),
        )
    };
    // SAFETY: NULL, or the caller's.
    if let (true, Some(left)) = (returned == INTERRUPTED, unsafe { left.as_mut() }) {
        // SAFETY: a local variable, which the kernel wrote.
        *left = unsafe { rest_at.read_volatile() };
    }
    returned
}

/// nanosleep(2)
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn nanosleep(length: *const timespec, left: *mut timespec) -> c_int {
    // SAFETY: the caller's contract.
    minus_one(unsafe { sleep_by(libc::CLOCK_REALTIME, 0, length, left) })
}

/// clock_nanosleep(2)
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn clock_nanosleep(
    clock: clockid_t,
    flags: c_int,
    length: *const timespec,
    left: *mut timespec,
) -> c_int {
    if clock == libc::CLOCK_THREAD_CPUTIME_ID {
        return libc::EINVAL;
    }
    // SAFETY: the caller's contract.
    -unsafe { sleep_by(clock, flags, length, left) } as c_int
}

/// sleep(3): seconds that are left if a handler ran.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn sleep(seconds: c_uint) -> c_uint {
    let mut time = timespec {
        tv_sec: seconds.into(),
        tv_nsec: 0,
    };
    let at = &raw mut time;
    // SAFETY: a local variable, read before it is written.
    match unsafe { sleep_by(libc::CLOCK_REALTIME, 0, at, at) } {
        0 => 0,
        _ => time.tv_sec as c_uint,
    }
}

/// usleep(3)
#[unsafe(no_mangle)]
pub extern "C-unwind" fn usleep(microseconds: c_uint) -> c_int {
    let length = timespec_of(Duration::from_micros(microseconds.into()));
    // SAFETY: a local variable.
    minus_one(unsafe { sleep_by(libc::CLOCK_REALTIME, 0, &length, std::ptr::null_mut()) })
}

// ---- waiting for descriptors -----------------------------------------------------------------------------------------

/// A wait whose limit is in milliseconds, none if negative.
fn wait_by(limit_ms: c_int, call: impl Fn(c_int) -> Outcome) -> c_int {
    let given = || u64::try_from(limit_ms).ok().map(Duration::from_millis);
    minus_one(go_on(
        || call(limit_ms),
        given,
        |left| call(left.map_or(-1, milliseconds)),
    ))
}

/// poll(2)
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn poll(fds: *mut pollfd, count: nfds_t, limit_ms: c_int) -> c_int {
    wait_by(limit_ms, |limit_ms| {
        let arguments = [fds as usize, count as usize, limit_ms as usize, 0, 0, 0];
        // SAFETY: the kernel checks what it is given.
        unsafe { witnessed(libc::SYS_poll, arguments) }
    })
}

/// What `poll` is in programs that are built with `_FORTIFY_SOURCE`.
///
/// # Safety
/// As poll(2).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __poll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    limit_ms: c_int,
    bytes: usize,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe {
        if bytes / size_of::<pollfd>() < count as usize {
            __chk_fail();
        }
        poll(fds, count, limit_ms)
    }
}

/// A wait for events. Who only looks, in a loop maybe, pays for nothing: the kernel interrupts no such call.
///
/// # Safety
/// That of the system call.
unsafe fn look_or_wait(limit_ms: c_int, number: libc::c_long, arguments: [usize; 6]) -> Outcome {
    // SAFETY: the caller's contract.
    unsafe {
        match limit_ms {
            0 => at_once(number, arguments),
            _ => witnessed(number, arguments),
        }
    }
}

/// epoll_wait(2)
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_wait(
    epoll: c_int,
    events: *mut epoll_event,
    room: c_int,
    limit_ms: c_int,
) -> c_int {
    wait_by(limit_ms, |limit_ms| {
        let arguments = [
            epoll as usize,
            events as usize,
            room as usize,
            limit_ms as usize,
            0,
            0,
        ];
        // SAFETY: the kernel checks what it is given.
        unsafe { look_or_wait(limit_ms, libc::SYS_epoll_wait, arguments) }
    })
}

/// epoll_pwait(2)
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_pwait(
    epoll: c_int,
    events: *mut epoll_event,
    room: c_int,
    limit_ms: c_int,
    mask: *const sigset_t,
) -> c_int {
    wait_by(limit_ms, |limit_ms| {
        let arguments = [
            epoll as usize,
            events as usize,
            room as usize,
            limit_ms as usize,
            mask as usize,
            SIGNAL_SET,
        ];
        // SAFETY: the kernel checks what it is given.
        unsafe { look_or_wait(limit_ms, libc::SYS_epoll_pwait, arguments) }
    })
}

/// epoll_pwait2(2)
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_pwait2(
    epoll: c_int,
    events: *mut epoll_event,
    room: c_int,
    limit: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    let call = |limit: *const timespec| {
        let arguments = [
            epoll as usize,
            events as usize,
            room as usize,
            limit as usize,
            mask as usize,
            SIGNAL_SET,
        ];
        // SAFETY: the kernel checks what it is given.
        unsafe { witnessed(libc::SYS_epoll_pwait2, arguments) }
    };
    // SAFETY: NULL, or the kernel has read it.
    let given = || unsafe { limit.as_ref() }.map(duration);
    minus_one(go_on(
        || call(limit),
        given,
        |left| match left {
            Some(left) => call(&timespec_of(left)),
            None => call(std::ptr::null()),
        },
    ))
}

// ---- forms -----------------------------------------------------------------------------------------------------------

/// What the kernel returned, as most functions of the C library tell it.
fn minus_one(returned: isize) -> c_int {
    if returned < 0 {
        // SAFETY: this thread's own.
        unsafe { *libc::__errno_location() = -returned as c_int };
        return -1;
    }
    returned as c_int
}

/// Of one that the kernel has accepted.
fn duration(time: &timespec) -> Duration {
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn timespec_of(duration: Duration) -> timespec {
    timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// No shorter than it is.
fn milliseconds(duration: Duration) -> c_int {
    duration
        .as_nanos()
        .div_ceil(1_000_000)
        .try_into()
        .unwrap_or(c_int::MAX)
}

#[cfg(test)]
mod tests;
