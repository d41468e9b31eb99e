//! The global offset tables of loaded libraries: where their calls of other libraries lead (System V ABI, "Global Offset Table").
//!
//! Somebody who stands between a library and the C library for that library alone, and not for the whole program, changes its
//! table. Only libraries that the caller names are looked at. A table may be read-only once the loader has filled it (RELRO),
//! and is made so again.
//!
//! [`patch`] looks at the libraries of the caller's namespace, [`patch_namespace`] at those of one that dlmopen(3) made, and
//! [`patch_program`] at the program.

#![allow(unsafe_code)]

mod library;
mod namespace;

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use self::library::Library;
pub use self::namespace::patch_namespace;

/// A function, and what is called in its place.
pub struct Hook {
    name: &'static CStr,
    function: *const c_void,
}

// SAFETY: a function's address, which does not change.
unsafe impl Sync for Hook {}

impl Hook {
    /// `function` is called as the function of that name is.
    pub const fn new(name: &'static CStr, function: *const c_void) -> Self {
        Self { name, function }
    }
}

/// A library whose calls lead elsewhere now.
#[derive(Debug)]
pub struct Patched {
    /// Its file, as the loader tells it.
    pub path: String,
    /// Entries that were changed, or why one could not be.
    pub entries: io::Result<usize>,
}

/// Leads the calls of each library of the caller's namespace whose file's name begins with `prefix` to the hooks. What `loaded` tells
/// is when it was looked last: where nothing was loaded since, this costs little. Gives those in which something was changed.
pub fn patch(prefix: &str, hooks: &[Hook], loaded: &AtomicU64) -> Vec<Patched> {
    let mut look = Look {
        prefix: prefix.as_bytes(),
        hooks,
        loaded: loaded.load(Ordering::Acquire),
        now: 0,
        patched: Vec::new(),
    };
    // SAFETY: the callback gets what it was given, and keeps nothing. The loader's list cannot change meanwhile.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut look).cast()) };
    loaded.store(look.now, Ordering::Release);
    look.patched
}

/// Leads the calls of the program itself, and of none of its libraries, to the hooks. Gives how many entries were changed.
pub fn patch_program(hooks: &[Hook]) -> io::Result<usize> {
    let mut program = Program {
        hooks,
        entries: Ok(0),
    };
    // SAFETY: the callback gets what it was given, and keeps nothing. The loader's list cannot change meanwhile.
    unsafe { libc::dl_iterate_phdr(Some(visit_program), (&raw mut program).cast()) };
    program.entries
}

struct Program<'a> {
    hooks: &'a [Hook],
    entries: io::Result<usize>,
}

/// # Safety
/// Called by `dl_iterate_phdr` with a [`Program`]: for the program first (`man 3 dl_iterate_phdr`).
unsafe extern "C" fn visit_program(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    program: *mut c_void,
) -> c_int {
    // SAFETY: the loader's structure with its array of program headers, and what `patch_program` gave.
    unsafe {
        let (info, program) = (&*info, &mut *program.cast::<Program<'_>>());
        let headers = std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
        if let Some(library) = Library::read(info.dlpi_addr as usize, headers) {
            program.entries = library.patch(program.hooks);
        }
    }
    // The others are libraries.
    1
}

struct Look<'a> {
    prefix: &'a [u8],
    hooks: &'a [Hook],
    loaded: u64,
    now: u64,
    patched: Vec<Patched>,
}

impl Look<'_> {
    fn is_meant(&self, path: &CStr) -> bool {
        let path = path.to_bytes();
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        name.starts_with(self.prefix)
    }

    /// # Safety
    /// The library is loaded, and stays so while this runs.
    unsafe fn patch(&mut self, path: &CStr, library: &Library) {
        // SAFETY: the caller's contract.
        let entries = unsafe { library.patch(self.hooks) };
        if !matches!(entries, Ok(0)) {
            self.patched.push(Patched {
                path: path.to_string_lossy().into_owned(),
                entries,
            });
        }
    }
}

/// # Safety
/// Called by `dl_iterate_phdr` with a [`Look`].
unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _size: usize, look: *mut c_void) -> c_int {
    // SAFETY: the loader's structure, and what `patch` gave.
    let (info, look) = unsafe { (&*info, &mut *look.cast::<Look<'_>>()) };
    look.now = info.dlpi_adds;
    if look.now == look.loaded {
        return 1;
    }
    if info.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: the loader's C string and array of program headers, of a library that stays loaded while the loader's list is held.
    unsafe {
        let path = CStr::from_ptr(info.dlpi_name);
        if look.is_meant(path) {
            let headers = std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
            if let Some(library) = Library::read(info.dlpi_addr as usize, headers) {
                look.patch(path, &library);
            }
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn answer() -> c_int {
        42
    }

    #[test]
    fn only_the_named_library_is_led_elsewhere_and_once() {
        static HOOKS: [Hook; 1] = [Hook::new(c"rand_r", answer as *const c_void)];
        // SAFETY: a library whose constructors do nothing.
        let handle = unsafe { libc::dlopen(c"librdmacm.so.1".as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            eprintln!("skipped: librdmacm.so.1 is not installed (package librdmacm1)");
            return;
        }
        let loaded = AtomicU64::new(0);
        let look = || patch("librdmacm.so", &HOOKS, &loaded);
        let found = look();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].entries.as_ref().ok(), Some(&1), "{found:?}");
        let now = loaded.load(Ordering::Relaxed);
        assert!(look().is_empty(), "nothing was loaded since");
        loaded.store(0, Ordering::Relaxed);
        assert!(look().is_empty(), "it is as it is to be");
        assert_eq!(loaded.load(Ordering::Relaxed), now);
        let mut seed = 1;
        // SAFETY: rand_r(3) takes a pointer to its state.
        let ours = unsafe { rand_r(&mut seed) };
        assert_ne!((ours, seed), (42, 1), "our own call goes to the C library");
    }

    #[test]
    fn the_program_itself_is_led_elsewhere() {
        unsafe extern "C" fn our_rand() -> c_int {
            43
        }
        static HOOKS: [Hook; 1] = [Hook::new(c"rand", our_rand as *const c_void)];
        assert_eq!(patch_program(&HOOKS).unwrap(), 1);
        assert_eq!(patch_program(&HOOKS).unwrap(), 0, "it is as it is to be");
        // SAFETY: rand(3) takes nothing.
        assert_eq!(unsafe { rand() }, 43);
    }

    unsafe extern "C" {
        fn rand() -> c_int;
        fn rand_r(seed: *mut libc::c_uint) -> c_int;
    }
}
