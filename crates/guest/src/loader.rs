//! Programs that load libibverbs by its name (dlopen(3)) get this library.
//!
//! A program that is linked with libibverbs finds our functions first, since the library is preloaded. One that opens the library and
//! asks that for functions does not: Python's ctypes, Rust's and Go's bindings, NCCL. So `dlopen` is ours in front of the C library's:
//! libibverbs' name means this library, and everything else goes on to the C library as it came, the caller's address included,
//! by which the loader knows the caller's search path. Nothing else is changed: librdmacm and providers, which are linked with
//! libibverbs, load the system's, and call ours as before. A program's `LD_LIBRARY_PATH` stays as it is.
//!
//! Not reached: who makes namespaces of their own (`dlmopen`), and programs that are started without the guest library.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{Acquire, Release};

use crate::ffi::{data_path, errno, set_errno};

/// libibverbs, without what comes after the name (`.1`, `.1.14.44.0`).
const LIBRARY: &[u8] = b"libibverbs.so";

/// The C library's `dlopen`, known after the first call of [`ours`].
static NEXT: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// dlopen(3)
///
/// # Safety
/// As there.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {ours}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jne 2f",
        // With the caller's return address on the stack.
        "jmp qword ptr [rip + {next}]",
        "2:",
        "ret",
        ours = sym ours,
        next = sym NEXT,
    )
}

/// A handle of this library if that is what is meant; else NULL, and [`NEXT`] is known.
///
/// # Safety
/// As for dlopen(3).
unsafe extern "C" fn ours(file: *const c_char, flags: c_int) -> *mut c_void {
    let before = errno();
    let next = match NEXT.load(Acquire) {
        known if !known.is_null() => known,
        _ => {
            // SAFETY: the name is a C string.
            let found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"dlopen".as_ptr()) };
            NEXT.store(found, Release);
            found
        }
    };
    // SAFETY: the caller's contract.
    let handle = match !next.is_null() && unsafe { is_libibverbs(file) } {
        // SAFETY: that is what it is.
        true => unsafe { itself(std::mem::transmute::<*mut c_void, Dlopen>(next), flags) },
        false => null_mut(),
    };
    set_errno(before);
    handle
}

type Dlopen = unsafe extern "C-unwind" fn(*const c_char, c_int) -> *mut c_void;

/// # Safety
/// NULL or a C string.
unsafe fn is_libibverbs(file: *const c_char) -> bool {
    if file.is_null() {
        return false;
    }
    // SAFETY: the caller's contract.
    let path = unsafe { CStr::from_ptr(file) }.to_bytes();
    data_path(|| names_libibverbs(path), || false)
}

fn names_libibverbs(path: &[u8]) -> bool {
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let rest = name.strip_prefix(LIBRARY);
    rest.is_some_and(|rest| rest.is_empty() || rest[0] == b'.')
}

/// This library, which is loaded, as the loader knows it.
///
/// # Safety
/// `next` is the C library's `dlopen`.
unsafe fn itself(next: Dlopen, flags: c_int) -> *mut c_void {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: an address of this library, a structure to write to, and a path that the loader keeps for as long as the library is
    // loaded. A library that is there already runs no code.
    unsafe {
        match libc::dladdr((&raw const NEXT).cast(), found.as_mut_ptr()) {
            0 => null_mut(),
            _ => next(found.assume_init().dli_fname, flags | libc::RTLD_NOLOAD),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libibverbs_is_known_by_its_files_name() {
        let known: [&[u8]; 4] = [
            b"libibverbs.so.1",
            b"libibverbs.so",
            b"/usr/lib/x86_64-linux-gnu/libibverbs.so.1",
            b"./libibverbs.so.1.14.44.0",
        ];
        let others: [&[u8]; 6] = [
            b"",
            b"libibverbs",
            b"libibverbs.so1",
            b"libibverbs.so.1/",
            b"libmlx5.so.1",
            b"/libibverbs.so.1/libc.so.6",
        ];
        assert!(known.iter().all(|path| names_libibverbs(path)));
        assert!(!others.iter().any(|path| names_libibverbs(path)));
    }
}
