//! One loaded library: its dynamic section, and the entries of its table that are functions.

use std::ffi::CStr;
use std::io;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::Hook;

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
pub struct Library {
    base: usize,
    /// Its segments that can be written to, and the part that is read-only once it is loaded.
    relro: Option<(usize, usize)>,
    symbols: *const libc::Elf64_Sym,
    names: *const std::ffi::c_char,
    relocations: Vec<(*const Relocation, usize)>,
}

impl Library {
    /// # Safety
    /// Of a library that is loaded at `base`, and its program headers.
    pub unsafe fn read(base: usize, headers: &[libc::Elf64_Phdr]) -> Option<Self> {
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
    pub unsafe fn patch(&self, hooks: &[Hook]) -> io::Result<usize> {
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
                let set = unsafe { self.set(self.base + relocation.offset as usize, hook) };
                patched += usize::from(set?);
            }
        }
        Ok(patched)
    }

    /// Whether it was changed.
    ///
    /// # Safety
    /// There is a pointer, which only ever is called.
    unsafe fn set(&self, entry: usize, hook: &Hook) -> io::Result<bool> {
        let page_bytes = rustix::param::page_size();
        let page = entry / page_bytes * page_bytes;
        let protected = self.relro.is_some_and(|(start, bytes)| {
            entry >= start && entry < (start + bytes) / page_bytes * page_bytes
        });
        let protect = |rights| {
            // SAFETY: a page of the library's data: other threads read it meanwhile, and can.
            if protected && unsafe { libc::mprotect(page as *mut _, page_bytes, rights) } != 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        };
        let function = hook.function.cast_mut();
        // SAFETY: the caller's contract; other threads may call through it at the same time.
        let entry = unsafe { AtomicPtr::from_ptr(entry as *mut *mut _) };
        if entry.load(Ordering::Acquire) == function {
            return Ok(false);
        }
        protect(libc::PROT_READ | libc::PROT_WRITE)?;
        entry.store(function, Ordering::Release);
        protect(libc::PROT_READ)?;
        Ok(true)
    }
}

/// The program headers of the library at `base`; none if its file's header does not lie there.
///
/// # Safety
/// A library is loaded there, and stays so as long as they are used.
pub unsafe fn program_headers(base: usize) -> Option<&'static [libc::Elf64_Phdr]> {
    if base == 0 {
        return None;
    }
    // SAFETY: the caller's contract: the first page of a loaded file.
    let header = unsafe { &*(base as *const libc::Elf64_Ehdr) };
    if header.e_ident[..4] != *b"\x7fELF" {
        return None;
    }
    let first = (base + header.e_phoff as usize) as *const libc::Elf64_Phdr;
    // SAFETY: the headers lie in the first segment, as the file's header says.
    Some(unsafe { std::slice::from_raw_parts(first, header.e_phnum.into()) })
}
