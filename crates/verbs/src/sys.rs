//! Calls into the operating system that rustix does not wrap.

#![allow(unsafe_code)]

/// Lets others run.
pub fn yield_now() {
    std::thread::yield_now();
}

/// `CLOCK_MONOTONIC`, as RNICs stamp completions.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
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
