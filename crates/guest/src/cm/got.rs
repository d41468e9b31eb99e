//! The global offset tables of librdmacm: where its calls of the C library lead (System V ABI, "Global Offset Table").
//!
//! Only a library that is called `librdmacm` is looked at. Its table may be read-only once the loader has filled it (RELRO), and
//! is made so again.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::log::log;

/// A function, and what is called in its place.
pub struct Hook {
    name: &'static CStr,
    function: *const c_void,
}

// SAFETY: a function's address, which does not change.
unsafe impl Sync for Hook {}

impl Hook {
    pub const fn new(name: &'static CStr, function: *const c_void) -> Self {
        Self { name, function }
    }
}

#[cfg(target_arch = "x86_64")]
const CALLS: [u32; 2] = [6, 7]; // R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT
#[cfg(target_arch = "aarch64")]
const CALLS: [u32; 2] = [1025, 1026]; // R_AARCH64_GLOB_DAT, R_AARCH64_JUMP_SLOT
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const CALLS: [u32; 2] = [u32::MAX; 2];

const DT_NULL: i64 = 0;
const DT_PLTRELSZ: i64 = 2;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_JMPREL: i64 = 23;

/// `Elf64_Dyn`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Dynamic {
    tag: i64,
    value: u64,
}

/// `Elf64_Rela`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Relocation {
    offset: u64,
    info: u64,
    addend: i64,
}

impl Relocation {
    fn kind(&self) -> u32 {
        self.info as u32
    }

    fn symbol(&self) -> usize {
        (self.info >> 32) as usize
    }
}

/// A loaded library.
struct Library {
    base: usize,
    /// Its segments that can be written to, and the part that is read-only once it is loaded.
    relro: Option<(usize, usize)>,
    symbols: *const libc::Elf64_Sym,
    names: *const libc::c_char,
    relocations: Vec<(*const Relocation, usize)>,
}

/// Leads the calls of every librdmacm that is loaded to the hooks. Costs little where nothing was loaded since the last time.
pub fn patch(hooks: &'static [Hook]) {
    /// What the loader has counted when it was looked last.
    static LOADED: AtomicU64 = AtomicU64::new(0);
    let mut look = Look {
        hooks,
        loaded: LOADED.load(Ordering::Acquire),
        now: 0,
        patched: 0,
    };
    // SAFETY: the callback gets what it was given, and keeps nothing. The loader's list cannot change meanwhile.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut look).cast()) };
    LOADED.store(look.now, Ordering::Release);
}

struct Look {
    hooks: &'static [Hook],
    loaded: u64,
    now: u64,
    /// Entries that were changed.
    patched: usize,
}

/// # Safety
/// Called by `dl_iterate_phdr` with a [`Look`].
unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _size: usize, look: *mut c_void) -> c_int {
    // SAFETY: the loader's structure, and what `patch` gave.
    let (info, look) = unsafe { (&*info, &mut *look.cast::<Look>()) };
    look.now = info.dlpi_adds;
    if look.now == look.loaded {
        return 1;
    }
    if info.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: the loader's C string.
    let path = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    if name.starts_with(b"librdmacm.so") {
        // SAFETY: a library that is loaded, and stays so while the loader's list is held.
        unsafe {
            if let Some(library) = Library::read(info) {
                let patched = library.patch(look.hooks);
                look.patched += patched;
                log!(
                    "{}: {patched} calls lead to the RNIC",
                    String::from_utf8_lossy(path)
                );
            }
        }
    }
    0
}

impl Library {
    /// # Safety
    /// Of a library that is loaded.
    unsafe fn read(info: &libc::dl_phdr_info) -> Option<Self> {
        let base = info.dlpi_addr as usize;
        // SAFETY: the loader's array of program headers.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        let dynamic = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC)?;
        let relro = headers.iter().find(|header| header.p_type == libc::PT_GNU_RELRO);
        let relro = relro.map(|header| (base + header.p_vaddr as usize, header.p_memsz as usize));
        let mut next = (base + dynamic.p_vaddr as usize) as *const Dynamic;
        let mut found = [0; DT_JMPREL as usize + 1];
        loop {
            // SAFETY: the dynamic section of a loaded library ends with DT_NULL.
            let entry = unsafe { *next };
            if entry.tag == DT_NULL {
                break;
            }
            if let Some(value) = usize::try_from(entry.tag).ok().and_then(|tag| found.get_mut(tag)) {
                *value = entry.value as usize;
            }
            // SAFETY: as above.
            next = unsafe { next.add(1) };
        }
        let value = |tag: i64| found[tag as usize];
        // Loaders write addresses into the section where they can, and leave offsets elsewhere.
        let address = |tag| match value(tag) {
            0 => None,
            offset if offset < base => Some(base + offset),
            address => Some(address),
        };
        let table = |start, bytes| {
            let count = value(bytes) / size_of::<Relocation>();
            address(start).map(|start| (start as *const Relocation, count))
        };
        let tables = [table(DT_JMPREL, DT_PLTRELSZ), table(DT_RELA, DT_RELASZ)];
        Some(Self {
            base,
            relro,
            symbols: address(DT_SYMTAB)? as *const libc::Elf64_Sym,
            names: address(DT_STRTAB)? as *const libc::c_char,
            relocations: tables.into_iter().flatten().collect(),
        })
    }

    /// Gives how many entries were changed.
    ///
    /// # Safety
    /// The library is loaded.
    unsafe fn patch(&self, hooks: &[Hook]) -> usize {
        let mut patched = 0;
        for (first, count) in &self.relocations {
            for index in 0..*count {
                // SAFETY: within the table whose length the library tells.
                let relocation = unsafe { *first.add(index) };
                if !CALLS.contains(&relocation.kind()) {
                    continue;
                }
                // SAFETY: relocations name symbols of the table, and these their names.
                let name = unsafe {
                    let symbol = &*self.symbols.add(relocation.symbol());
                    CStr::from_ptr(self.names.add(symbol.st_name as usize))
                };
                let Some(hook) = hooks.iter().find(|hook| hook.name == name) else {
                    continue;
                };
                // SAFETY: an entry of the library's table, of a pointer's size and alignment.
                patched +=
                    usize::from(unsafe { self.set(self.base + relocation.offset as usize, hook.function) });
            }
        }
        patched
    }

    /// # Safety
    /// There is a pointer, which only ever is called.
    unsafe fn set(&self, entry: usize, function: *const c_void) -> bool {
        let page_bytes = rustix::param::page_size();
        let page = entry / page_bytes * page_bytes;
        let protected = self.relro.is_some_and(|(start, bytes)| {
            entry >= start && entry < (start + bytes) / page_bytes * page_bytes
        });
        let protect = |rights| {
            // SAFETY: a page of the library's data: other threads read it meanwhile, and can.
            protected && unsafe { libc::mprotect(page as *mut c_void, page_bytes, rights) } != 0
        };
        if protect(libc::PROT_READ | libc::PROT_WRITE) {
            log!(
                "the global offset table of librdmacm cannot be changed: {}",
                std::io::Error::last_os_error()
            );
            return false;
        }
        // SAFETY: the caller's contract; other threads may call through it at the same time.
        let entry = unsafe { AtomicPtr::from_ptr(entry as *mut *mut c_void) };
        let before = entry.swap(function.cast_mut(), Ordering::AcqRel);
        protect(libc::PROT_READ);
        before != function.cast_mut()
    }
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
        let look = |loaded| {
            let mut look = Look {
                hooks: &HOOKS,
                loaded,
                now: 0,
                patched: 0,
            };
            // SAFETY: as in `patch`.
            let stopped = unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut look).cast()) };
            (look.now, look.patched, stopped)
        };
        let (loaded, patched, _) = look(0);
        assert_eq!(patched, 1);
        assert_eq!(look(0), (loaded, 0, 0), "it is as it is to be");
        assert_eq!(look(loaded), (loaded, 0, 1), "nothing was loaded since");
        let mut seed = 1;
        // SAFETY: rand_r(3) takes a pointer to its state.
        let ours = unsafe { rand_r(&mut seed) };
        assert_ne!((ours, seed), (42, 1), "our own call goes to the C library");
    }

    unsafe extern "C" {
        fn rand_r(seed: *mut libc::c_uint) -> c_int;
    }
}
