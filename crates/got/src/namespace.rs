//! Libraries of another namespace of the loader's: dl_iterate_phdr(3) tells of the caller's only.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;

use crate::library::{Library, program_headers};
use crate::{Hook, Look, Patched};

const RTLD_DI_LINKMAP: c_int = 2;

/// The beginning of `struct link_map` (link.h), which debuggers read, too.
#[repr(C)]
struct LinkMap {
    base: usize,
    path: *const c_char,
    dynamic: *const c_void,
    next: *const LinkMap,
    previous: *const LinkMap,
}

unsafe extern "C" {
    fn dlinfo(handle: *mut c_void, request: c_int, info: *mut c_void) -> c_int;
}

/// Leads the calls of each library in the namespace of `handle` whose file's name begins with `prefix` to the hooks. Gives those in which
/// something was changed.
///
/// # Safety
/// `handle` is what dlmopen(3) gave, and not closed.
pub unsafe fn patch_namespace(handle: NonNull<c_void>, prefix: &str, hooks: &[Hook]) -> Vec<Patched> {
    let mut map: *const LinkMap = std::ptr::null();
    // SAFETY: the caller's contract, and room for a pointer.
    if unsafe { dlinfo(handle.as_ptr(), RTLD_DI_LINKMAP, (&raw mut map).cast()) } != 0 || map.is_null() {
        return Vec::new();
    }
    let look = Look {
        prefix: prefix.as_bytes(),
        hooks,
        loaded: 0,
        now: 0,
        patched: Vec::new(),
    };
    let mut walk = Walk { map, look };
    // The loader changes the lists of all namespaces under the lock that it holds while it calls back.
    // SAFETY: the callback gets what it was given, and keeps nothing.
    unsafe { libc::dl_iterate_phdr(Some(walks), (&raw mut walk).cast()) };
    walk.look.patched
}

struct Walk<'a> {
    map: *const LinkMap,
    look: Look<'a>,
}

/// # Safety
/// Called by `dl_iterate_phdr` with a [`Walk`].
unsafe extern "C" fn walks(_: *mut libc::dl_phdr_info, _size: usize, walk: *mut c_void) -> c_int {
    // SAFETY: what `patch_namespace` gave; the loader's list, whose lock is held, and whose libraries stay loaded meanwhile.
    unsafe {
        let Walk { map, look } = &mut *walk.cast::<Walk<'_>>();
        let mut next = *map;
        while !(*next).previous.is_null() {
            next = (*next).previous;
        }
        while let Some(map) = next.as_ref() {
            next = map.next;
            if map.path.is_null() {
                continue;
            }
            let path = CStr::from_ptr(map.path);
            if !look.is_meant(path) {
                continue;
            }
            let headers = program_headers(map.base);
            if let Some(library) = headers.and_then(|headers| Library::read(map.base, headers)) {
                look.patch(path, &library);
            }
        }
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn answer(_: *const c_char) -> *mut c_char {
        std::ptr::null_mut()
    }

    #[test]
    fn a_library_of_that_namespace_is_led_elsewhere_and_not_the_one_here() {
        static HOOKS: [Hook; 1] = [Hook::new(c"getenv", answer as *const c_void)];
        // SAFETY: a library whose constructors do nothing.
        let (here, there) = unsafe {
            let name = c"librdmacm.so.1".as_ptr();
            let here = libc::dlopen(name, libc::RTLD_NOW);
            (here, libc::dlmopen(libc::LM_ID_NEWLM, name, libc::RTLD_NOW))
        };
        let (Some(here), Some(there)) = (NonNull::new(here), NonNull::new(there)) else {
            eprintln!("skipped: librdmacm.so.1 is not installed (package librdmacm1)");
            return;
        };
        // SAFETY: handles that were just opened.
        let look = |handle, prefix| unsafe { patch_namespace(handle, prefix, &HOOKS) };
        assert!(look(there, "libnothing").is_empty());
        let found = look(there, "librdmacm.so");
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].entries.as_ref().ok(), Some(&1), "{found:?}");
        assert!(look(there, "librdmacm.so").is_empty(), "it is as it is to be");
        let found = look(here, "librdmacm.so");
        assert_eq!(found.len(), 1, "the table here is another one: {found:?}");
    }
}
