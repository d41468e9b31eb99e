//! What librdmacm calls in the place of the C library's functions. Everything that is not its device goes on to these.

use std::ffi::{CStr, c_char, c_int, c_void};

use verbatim_got::Hook;
use verbatim_verbs::{CmChannel, Process};

use super::{channels, commands};
use crate::ffi::{Answer, Errno, MinusOne, verb};
use crate::process;

/// The device file's name.
const DEVICE: &[u8] = b"/dev/infiniband/rdma_cm";

/// Where the kernel tells the number of its own such device, if it has one.
const DEVICE_NUMBER: &str = "/sys/class/misc/rdma_cm/dev";

/// All of them, by the names of what they replace. Which of them there are depends on how librdmacm was compiled.
pub static HOOKS: [Hook; 11] = [
    Hook::new(c"open", open as *const c_void),
    Hook::new(c"open64", open as *const c_void),
    Hook::new(c"__open_2", open_2 as *const c_void),
    Hook::new(c"__open64_2", open_2 as *const c_void),
    Hook::new(c"write", write as *const c_void),
    Hook::new(c"close", close as *const c_void),
    Hook::new(c"fstat", fstat as *const c_void),
    Hook::new(c"fstat64", fstat as *const c_void),
    Hook::new(c"__fxstat", fxstat as *const c_void),
    Hook::new(c"__fxstat64", fxstat as *const c_void),
    Hook::new(c"__close", close as *const c_void),
];

/// A number of bytes, or -1 with `errno` set.
#[repr(transparent)]
struct Bytes(isize);

impl Answer for Bytes {
    type Success = usize;
    fn success(value: usize) -> Self {
        Self(isize::try_from(value).unwrap_or(isize::MAX))
    }
    fn failure(errno: Errno) -> Self {
        Self(MinusOne::failure(errno).0 as isize)
    }
}

/// Makes a channel if that is what is opened; `None` for any other file, or where no RNIC makes channels.
///
/// # Safety
/// `path` is NULL or a C string.
unsafe fn open_device(path: *const c_char) -> Option<Result<c_int, Errno>> {
    if path.is_null() {
        return None;
    }
    // SAFETY: the caller's contract.
    if unsafe { CStr::from_ptr(path) }.to_bytes() != DEVICE {
        return None;
    }
    process::register();
    super::fork::register();
    let channel = CmChannel::open(Process::global())?;
    Some(channel.map(channels::insert).map_err(Errno::from))
}

/// # Safety
/// As for open(2).
unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
    let mut other = false;
    let opened = verb::<MinusOne>("open rdma_cm", || {
        // SAFETY: the caller's contract.
        unsafe { open_device(path) }.unwrap_or_else(|| {
            other = true;
            Ok(0)
        })
    });
    match other {
        // SAFETY: the caller's contract; without O_CREAT nobody looks at the mode.
        true => unsafe { libc::open(path, flags, mode) },
        false => opened.0,
    }
}

/// # Safety
/// As for open(2).
unsafe extern "C" fn open_2(path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { open(path, flags, 0) }
}

/// # Safety
/// As for write(2).
unsafe extern "C" fn write(fd: c_int, bytes: *const c_void, count: usize) -> isize {
    let mut other = false;
    let written = verb::<Bytes>("rdma_cm", || {
        let Some(channel) = channels::find(fd) else {
            other = true;
            return Ok(0);
        };
        // SAFETY: the caller's contract; commands hold addresses of librdmacm's own.
        unsafe { commands::run(&channel, crate::ffi::slice(bytes.cast(), count)?) }.map(|()| count)
    });
    match other {
        // SAFETY: the caller's contract.
        true => unsafe { libc::write(fd, bytes, count) },
        false => written.0,
    }
}

/// # Safety
/// As for close(2).
unsafe extern "C" fn close(fd: c_int) -> c_int {
    let mut other = false;
    let closed = verb::<MinusOne>("close rdma_cm", || {
        // It ends with its last user, as a file does: a thread that waits for an event goes on waiting.
        other = channels::remove(fd).is_none();
        Ok(0)
    });
    match other {
        // SAFETY: the caller's contract.
        true => unsafe { libc::close(fd) },
        false => closed.0,
    }
}

/// # Safety
/// As for fstat(2).
unsafe extern "C" fn fstat(fd: c_int, to: *mut libc::stat) -> c_int {
    // SAFETY: the caller's contract.
    let result = unsafe { libc::fstat(fd, to) };
    if result != 0 {
        return result;
    }
    let answer = verb::<MinusOne>("fstat rdma_cm", || {
        if channels::find(fd).is_some() && !to.is_null() {
            // SAFETY: it was just filled in.
            unsafe {
                (*to).st_mode = libc::S_IFCHR | 0o666;
                (*to).st_rdev = device_number();
            }
        }
        Ok(0)
    });
    answer.0
}

/// # Safety
/// As for fstat(2); the version is that of the only structure that there is.
unsafe extern "C" fn fxstat(_version: c_int, fd: c_int, to: *mut libc::stat) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { fstat(fd, to) }
}

/// librdmacm may know the number of the kernel's own device (by netlink), and compares. 0 where there is none.
fn device_number() -> libc::dev_t {
    let text = std::fs::read_to_string(DEVICE_NUMBER).unwrap_or_default();
    let numbers = text.trim().split_once(':');
    let parsed = numbers.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    parsed.map_or(0, |(major, minor)| libc::makedev(major, minor))
}
