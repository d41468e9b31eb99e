//! Calls into the operating system that rustix does not wrap.

#![allow(unsafe_code)]

use crate::error::VerbsError;

/// Lets others run.
pub fn yield_now() {
    std::thread::yield_now();
}

/// `CLOCK_MONOTONIC`, as RNICs stamp completions.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The PSN with which a new connection starts to send. The kernel's random numbers: who cannot guess it cannot send in the
/// partner's name.
pub fn start_psn() -> Result<u32, VerbsError> {
    let mut bytes = [0; 4];
    // SAFETY: the buffer is as long as is said.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got != bytes.len() as isize {
        return Err(VerbsError::Os {
            call: "getrandom",
            source: std::io::Error::last_os_error(),
        });
    }
    Ok(u32::from_ne_bytes(bytes) & 0x00ff_ffff)
}

/// Runs `spawn` with all signals blocked, so that the thread that it starts never runs one of the program's handlers.
pub fn with_signals_blocked<T>(spawn: impl FnOnce() -> T) -> T {
    let mut before = std::mem::MaybeUninit::uninit();
    // SAFETY: both sets are initialised by the calls that are given them before they are read; a thread's signal mask is
    // its own.
    let before = unsafe {
        let mut all = std::mem::MaybeUninit::uninit();
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    };
    let result = spawn();
    // SAFETY: the set is the one that the thread had.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    result
}

fn part<T>(address: *const T, bytes: usize) -> libc::iovec {
    libc::iovec {
        iov_base: address.cast_mut().cast(),
        iov_len: bytes,
    }
}

/// Reads this process's memory where the program says that it is; false if it is not there.
pub fn read_own_memory(address: u64, bytes: &mut [u8]) -> bool {
    let local = part(bytes.as_mut_ptr(), bytes.len());
    let remote = part(address as *const u8, bytes.len());
    // SAFETY: the local part is a slice of ours; the kernel checks the other.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    read == bytes.len() as isize
}

/// Writes it, likewise.
pub fn write_own_memory(address: u64, bytes: &[u8]) -> bool {
    let local = part(bytes.as_ptr(), bytes.len());
    let remote = part(address as *const u8, bytes.len());
    // SAFETY: the local part is a slice of ours, which is only read. The other is a buffer that the program gave for what
    // arrives, and whose completion it has not got: nobody has a reference to it. The kernel checks that it is there.
    let written = unsafe { libc::process_vm_writev(libc::getpid(), &local, 1, &remote, 1, 0) };
    written == bytes.len() as isize
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn start_psns_do_not_follow_from_each_other() {
        let psns: Vec<u32> = (0..64).map(|_| start_psn().unwrap()).collect();
        assert!(psns.iter().all(|psn| *psn < 1 << 24));
        let steps = psns.windows(2).map(|pair| pair[1].wrapping_sub(pair[0]));
        let steps: BTreeSet<u32> = steps.collect();
        assert!(steps.len() > 60, "{psns:?}");
    }
}
