//! Files of sysfs, read for libraries such as librdmacm.

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::fs::File;
use std::io::Error;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

use crate::ffi::{Errno, MinusOne, verb};

/// `ibv_get_sysfs_path`: where sysfs is mounted. `SYSFS_PATH` says it, but not to a program with the rights of another user.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    static PATH: OnceLock<CString> = OnceLock::new();
    let path = PATH.get_or_init(|| {
        let own_rights = rustix::process::getuid() == rustix::process::geteuid();
        let given = std::env::var_os("SYSFS_PATH").filter(|_| own_rights);
        let mut path = given.map_or_else(|| b"/sys".to_vec(), |path| path.as_bytes().to_vec());
        while path.len() > 1 && path.ends_with(b"/") {
            path.pop();
        }
        CString::new(path).unwrap_or_default()
    });
    path.as_ptr()
}

/// `ibv_read_sysfs_file`: what fits of a file's content, without a newline at its end, and with a zero. -1 also if the zero does not
/// fit.
///
/// # Safety
/// `folder` and `file` are NULL or C strings, `to` is NULL or valid for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_read_sysfs_file(
    folder: *const c_char,
    file: *const c_char,
    to: *mut c_char,
    size: usize,
) -> c_int {
    let answer = verb::<MinusOne>("ibv_read_sysfs_file", || {
        if folder.is_null() || file.is_null() || to.is_null() {
            return Err(Errno::INVALID);
        }
        // SAFETY: the caller's contract.
        let [folder, file] = [folder, file].map(|text| unsafe { CStr::from_ptr(text) }.to_bytes());
        let path = Path::new(OsStr::from_bytes(folder)).join(OsStr::from_bytes(file));
        let file = File::open(path).map_err(errno_of)?;
        // One read, as sysfs wants it. SAFETY: the caller's contract.
        let read = unsafe { libc::read(file.as_raw_fd(), to.cast(), size) };
        let read = usize::try_from(read).map_err(|_| errno_of(Error::last_os_error()))?;
        if read == 0 {
            return Ok(0);
        }
        // SAFETY: the kernel has written as much there.
        let ends_a_line = unsafe { to.add(read - 1).read() } as u8 == b'\n';
        let length = read - usize::from(ends_a_line);
        if length == size {
            return Err(Errno::NO_SPACE);
        }
        // SAFETY: the caller's contract.
        unsafe { to.add(length).write(0) };
        Ok(c_int::try_from(length).unwrap_or(c_int::MAX))
    });
    answer.0
}

fn errno_of(error: Error) -> Errno {
    Errno::new(error.raw_os_error().unwrap_or(libc::EIO))
}
