//! The system's libibverbs, loaded into a namespace of its own.
//!
//! We are in the global scope of the program (`LD_PRELOAD`) and define the names that libibverbs exports. libibverbs
//! calls itself through these names (`ibv_open_device` calls `ibv_query_device` …), and so do the drivers that it loads
//! (`ibv_query_gid`, `ibv_reg_mr` …). In the program's namespace all those calls come out at our functions, with objects
//! that are not ours. `RTLD_DEEPBIND` does not help: where the program is linked with libibverbs it is loaded and bound
//! before we run, and its drivers are loaded without that flag. So the library is opened by dlmopen(3) with
//! `LM_ID_NEWLM`: it, its drivers (a `dlopen` stays in the caller's namespace) and what they depend on see only each
//! other.
//!
//! What follows from that:
//! - The namespace has a C library of its own, with an `errno` of its own: [`Library::errno`] reads that one. Memory that
//!   one side has allocated the other does not free.
//! - That C library prepares its character tables only for the thread that loads it; other threads would find null
//!   pointers there (sscanf(3) in a driver). uselocale(3) of that C library does it for the calling thread, before its first
//!   call ([`Library::functions`]). Posting and polling do not look at characters.
//!   It also has an environment of its own.
//! - It is never unloaded, and there is one for the process.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::AtomicBool;

use super::abandon::ALLOW_DISASSOCIATED;
use super::ahead;
use super::doorbell::{self, Below};
use super::drivers::{self, Drivers};
use super::functions::Functions;
use super::locate;
use crate::error::VerbsError;

/// `LC_GLOBAL_LOCALE`
const GLOBAL_LOCALE: libc::locale_t = std::ptr::without_provenance_mut(usize::MAX);

/// Why there is no library.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LoadError {
    /// It is nowhere.
    #[error(
        "no libibverbs.so.1 was found; install it (package libibverbs1 or libibverbs), or name its file in {}",
        locate::PATH_VARIABLE
    )]
    Missing,
    /// The loader refuses it.
    #[error("{path} cannot be loaded: {reason}")]
    Loader {
        /// Its file.
        path: String,
        /// The loader's words.
        reason: String,
    },
    /// It is another library, or an old one.
    #[error("{path} has no {symbol}; libibverbs of rdma-core 32 or later is needed")]
    Symbol {
        /// Its file.
        path: String,
        /// What is not there.
        symbol: String,
    },
}

impl From<LoadError> for VerbsError {
    fn from(error: LoadError) -> Self {
        VerbsError::Unsupported(error.to_string())
    }
}

/// A loaded library.
#[derive(Debug)]
pub struct Library {
    path: PathBuf,
    handle: Handle,
    /// It is in a namespace of its own.
    apart: bool,
    functions: Functions,
    errno_location: unsafe extern "C" fn() -> *mut c_int,
    write: unsafe extern "C" fn(c_int, *const c_void, usize) -> isize,
    ioctl: unsafe extern "C" fn(c_int, c_long, *mut c_void) -> c_int,
    uselocale: unsafe extern "C" fn(libc::locale_t) -> libc::locale_t,
}

/// What dlmopen(3) gave.
#[derive(Debug)]
struct Handle(NonNull<c_void>);

// SAFETY: the loader's functions may be called with it from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

thread_local! {
    /// The library whose tables this thread has prepared last.
    static PREPARED: Cell<*const Library> = const { Cell::new(std::ptr::null()) };
}

impl Library {
    /// Loads the system's.
    pub fn load_systems() -> Result<Self, LoadError> {
        Self::load(&locate::library().ok_or(LoadError::Missing)?)
    }

    /// Loads this file into a new namespace.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        let shown = path.display().to_string();
        let refused = |reason: String| LoadError::Loader {
            path: shown.clone(),
            reason,
        };
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| refused(error.to_string()))?;
        // SAFETY: a C string; the library's constructors do what libibverbs's do.
        let handle = unsafe {
            libc::dlmopen(
                libc::LM_ID_NEWLM,
                name.as_ptr(),
                libc::RTLD_NOW | libc::RTLD_LOCAL,
            )
        };
        let handle = NonNull::new(handle).ok_or_else(|| refused(last_loader_error()))?;
        let library = Self::of(handle, path, true)?;
        // SAFETY: just opened, and never closed from here on.
        unsafe { drivers::attach(handle) };
        Ok(library)
    }

    /// Which drivers it loads, where that is known.
    pub fn drivers(&self) -> Option<&'static Drivers> {
        drivers::of(self.handle.0)
    }

    /// The one that this program has: by preload or by link, whose verbs those are.
    pub fn of_program() -> Result<Self, LoadError> {
        // SAFETY: the program's own handle, by which what is in its global scope is found.
        let handle = unsafe { libc::dlopen(std::ptr::null(), libc::RTLD_NOW) };
        let path = Path::new("this program");
        let handle = NonNull::new(handle).ok_or_else(|| LoadError::Loader {
            path: path.display().to_string(),
            reason: last_loader_error(),
        })?;
        Self::of(handle, path, false)
    }

    fn of(handle: NonNull<c_void>, path: &Path, apart: bool) -> Result<Self, LoadError> {
        let shown = path.display().to_string();
        let find = |symbol: &'static CStr| {
            // SAFETY: a handle that was just opened and is never closed, and a C string.
            let address = unsafe { libc::dlsym(handle.as_ptr(), symbol.as_ptr()) };
            if address.is_null() {
                return Err(LoadError::Symbol {
                    path: shown.clone(),
                    symbol: symbol.to_string_lossy().into_owned(),
                });
            }
            Ok(address)
        };
        let [errno_location, uselocale] = [find(c"__errno_location")?, find(c"uselocale")?];
        let [setenv, write, ioctl] = [find(c"setenv")?, find(c"write")?, find(c"ioctl")?];
        // SAFETY: all are functions of those names, from that library or, those that are not verbs, from the C library that it depends
        // on; it is never closed. ioctl(2) takes any arguments, and this one where others lie.
        unsafe {
            let setenv = std::mem::transmute::<
                *mut c_void,
                unsafe extern "C" fn(*const c_char, *const c_char, c_int) -> c_int,
            >(setenv);
            if apart {
                // In the environment of that C library, which nobody else reads. What is short of memory now says so soon enough.
                setenv(ALLOW_DISASSOCIATED.as_ptr(), c"1".as_ptr(), 1);
            }
            Ok(Self {
                functions: Functions::load(find)?,
                errno_location: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *mut c_int>(
                    errno_location,
                ),
                uselocale: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(libc::locale_t) -> libc::locale_t,
                >(uselocale),
                write: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(c_int, *const c_void, usize) -> isize,
                >(write),
                ioctl: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(c_int, c_long, *mut c_void) -> c_int,
                >(ioctl),
                path: path.to_owned(),
                handle: Handle(handle),
                apart,
            })
        }
    }

    /// Where a symbol of it is, or null.
    #[cfg(any(test, feature = "measure"))]
    pub fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the handle is never closed.
        unsafe { libc::dlsym(self.handle.0.as_ptr(), name.as_ptr()) }
    }

    /// Has what drivers call done as it must be where the threads of a process are restored ones. To be called when drivers are
    /// loaded, and again after others are. An error says why that cannot be.
    pub fn lead_doorbells(&self) -> Result<(), String> {
        if !self.apart {
            // Whoever made the library that the program has sees to its own.
            return Ok(());
        }
        let below = || Below {
            write: self.write,
            ioctl: self.ioctl,
            errno_location: self.errno_location,
            refused: AtomicBool::new(false),
        };
        // SAFETY: the handle is never closed.
        unsafe { doorbell::attach(self.handle.0, below) }
    }

    /// Its namespace, and what its libraries call there, for [`ahead`].
    pub fn below(&self) -> Result<(NonNull<c_void>, ahead::Below), String> {
        if !self.apart {
            return Err("the library is the program's own".to_owned());
        }
        let handle = self.handle.0;
        let find = |name: &CStr| {
            // SAFETY: a handle that is never closed, and a C string.
            let found = unsafe { libc::dlsym(handle.as_ptr(), name.as_ptr()) };
            let missing = || format!("its C library has no {}", name.to_string_lossy());
            NonNull::new(found).ok_or_else(missing)
        };
        let [read, mmap] = [find(c"read")?, find(c"mmap")?];
        // SAFETY: functions of those names, of the C library that the libraries of that namespace are bound to.
        let (read, mmap) = unsafe {
            (
                std::mem::transmute::<
                    NonNull<c_void>,
                    unsafe extern "C" fn(c_int, *mut c_void, usize) -> isize,
                >(read),
                std::mem::transmute::<
                    NonNull<c_void>,
                    unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, libc::off_t) -> *mut c_void,
                >(mmap),
            )
        };
        let below = ahead::Below {
            ioctl: self.ioctl,
            read,
            mmap,
            errno_location: self.errno_location,
        };
        Ok((handle, below))
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its functions, for this thread to call.
    pub fn functions(&self) -> &Functions {
        PREPARED.with(|prepared| {
            if prepared.replace(self) != std::ptr::from_ref(self) {
                // SAFETY: the locale that every thread starts with.
                unsafe { (self.uselocale)(GLOBAL_LOCALE) };
            }
        });
        &self.functions
    }

    /// This thread's `errno` as the library left it.
    pub fn errno(&self) -> i32 {
        // SAFETY: the C library of the namespace has one for each thread.
        unsafe { *(self.errno_location)() }
    }

    /// The outcome of a verb that returns 0, an errno, or -1 with `errno`.
    pub fn check(&self, verb: &'static str, returned: c_int) -> Result<(), VerbsError> {
        match returned {
            0 => Ok(()),
            1.. => Err(refused(verb, returned)),
            _ => Err(refused(verb, self.errno())),
        }
    }

    /// The outcome of a verb that returns an object, or null with `errno`.
    pub fn made<T>(&self, verb: &'static str, object: *mut T) -> Result<NonNull<T>, VerbsError> {
        NonNull::new(object).ok_or_else(|| refused(verb, self.errno()))
    }
}

fn refused(verb: &'static str, errno: i32) -> VerbsError {
    VerbsError::Refused {
        verb,
        errno,
        message: io::Error::from_raw_os_error(errno).to_string(),
    }
}

fn last_loader_error() -> String {
    // SAFETY: null, or a C string that is good until this thread's next call to the loader.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            return "no reason was given".to_owned();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}
