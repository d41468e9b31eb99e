//! Which of its drivers libibverbs loads: those of the RNICs that the machine has.
//!
//! It loads all that are installed, some twenty of them, as soon as it sees one RNIC, and never unloads any. Each is five mappings of
//! the process, and whoever writes a process down, or makes it again, pays for each mapping: half of those of a small program were
//! drivers of RNICs that it did not have. So libibverbs's calls of dlopen(3) lead here, and what does not look like the driver of a device
//! that is there is passed over. Names do not always tell; if a device has no driver then, all are loaded after all, and are asked
//! again ([`Drivers::load_the_rest`]).
//!
//! libibverbs only looks whether dlopen(3) has given a handle, and does not keep it (`libibverbs/dynamic_driver.c`, `load_driver`).

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::OnceLock;

use parking_lot::Mutex;
use verbatim_got::Hook;

use super::{CLASS, driver_of};

/// The library's file begins so.
const LIBIBVERBS: &str = "libibverbs.so";

/// A driver's file is `libNAME-rdmavN.so` (`VERBS_PROVIDER_SUFFIX`).
const PREFIX: &str = "lib";
const SUFFIX: &str = "-rdmav";

static HOOKS: [Hook; 1] = [Hook::new(c"dlopen", dlopen as *const c_void)];

/// One for the process, as there is one libibverbs.
static DRIVERS: OnceLock<Drivers> = OnceLock::new();

/// The drivers of a libibverbs in a namespace of its own.
pub struct Drivers {
    /// A handle of libibverbs, for those that were passed over.
    library: Handle,
    namespace: libc::Lmid_t,
    /// Files that were passed over, as libibverbs named them.
    passed_over: Mutex<Vec<CString>>,
}

/// What dlmopen(3) gave.
struct Handle(NonNull<c_void>);

// SAFETY: the loader's functions may be called with it from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// Has that libibverbs load no driver for which no device is there. To be called before it looks for devices. Where that cannot be done it
/// loads all of them.
///
/// # Safety
/// `library` is what dlmopen(3) gave, and never closed.
pub unsafe fn attach(library: NonNull<c_void>) {
    let mut namespace: libc::Lmid_t = 0;
    // SAFETY: the caller's contract, and room for a number.
    let found =
        unsafe { libc::dlinfo(library.as_ptr(), libc::RTLD_DI_LMID, (&raw mut namespace).cast()) } == 0;
    let drivers = Drivers {
        library: Handle(library),
        namespace,
        passed_over: Mutex::default(),
    };
    if found && DRIVERS.set(drivers).is_ok() {
        // SAFETY: the caller's contract.
        unsafe { verbatim_got::patch_namespace(library, LIBIBVERBS, &HOOKS) };
    }
}

/// Those of this library, if it is the one that [`attach`] was called for.
pub fn of(library: NonNull<c_void>) -> Option<&'static Drivers> {
    DRIVERS.get().filter(|drivers| drivers.library.0 == library)
}

/// The devices that the kernel has.
fn devices() -> impl Iterator<Item = String> {
    let entries = std::fs::read_dir(Path::new(CLASS))
        .into_iter()
        .flatten()
        .flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

impl Drivers {
    /// Loads what was passed over if the kernel has a device that is not among these: whether there was something to load. Called by one
    /// thread at a time, and not while libibverbs looks for devices.
    pub fn load_the_rest(&self, found: impl Fn(&str) -> bool) -> bool {
        if self.passed_over.lock().is_empty() || devices().all(|device| found(&device)) {
            return false;
        }
        for file in std::mem::take(&mut *self.passed_over.lock()) {
            // One that is not there is not there for libibverbs either, which has other places to look for it.
            // SAFETY: a C string; a driver's constructor registers it with libibverbs.
            unsafe { libc::dlmopen(self.namespace, file.as_ptr(), libc::RTLD_NOW) };
        }
        true
    }

    /// Whether that is the file of a driver that is not needed.
    fn passes_over(&self, file: &CStr) -> bool {
        let Some(driver) = file.to_str().ok().and_then(driver_in) else {
            return false;
        };
        let mut devices = devices().peekable();
        let passes_over = devices.peek().is_some() && Path::new(&*file.to_string_lossy()).exists();
        let passes_over =
            passes_over && !devices.any(|device| is_of(driver, &device, driver_of(&device).as_deref()));
        if passes_over {
            self.passed_over.lock().push(file.to_owned());
        }
        passes_over
    }
}

/// The name of the driver in a file of this name.
fn driver_in(file: &str) -> Option<&str> {
    let name = file.rsplit('/').next()?.strip_prefix(PREFIX)?;
    name.split_once(SUFFIX).map(|(driver, _)| driver)
}

/// Whether a device looks like one of that driver, by its own name (`rxe0`, `mlx5_0`) or by that of its driver in the kernel
/// (`mlx5_core`).
fn is_of(driver: &str, device: &str, in_kernel: Option<&str>) -> bool {
    device.starts_with(driver) || in_kernel.is_some_and(|name| name.starts_with(driver))
}

/// In the place of dlopen(3) for libibverbs.
unsafe extern "C" fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void {
    let Some(drivers) = DRIVERS.get() else {
        return std::ptr::null_mut();
    };
    // SAFETY: the caller's contract, which is that of dlopen(3).
    if !name.is_null() && drivers.passes_over(unsafe { CStr::from_ptr(name) }) {
        return drivers.library.0.as_ptr();
    }
    // By dlopen(3), which goes by its caller, it would be loaded into the program's namespace.
    // SAFETY: as above.
    unsafe { libc::dlmopen(drivers.namespace, name, flags) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_drivers_are_known_by_their_names() {
        for (file, driver) in [
            (
                "/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so",
                Some("rxe"),
            ),
            ("libbnxt_re-rdmav57.so", Some("bnxt_re")),
            ("/opt/mine/libmlx5-rdmav2.so", Some("mlx5")),
            ("libibverbs.so.1", None),
            ("/usr/lib/rxe-rdmav34.so", None),
            ("", None),
        ] {
            assert_eq!(driver_in(file), driver, "{file}");
        }
    }

    #[test]
    fn a_device_is_of_the_driver_whose_name_its_own_or_its_kernel_drivers_begins_with() {
        for (driver, device, in_kernel, is) in [
            ("rxe", "rxe0", None, true),
            ("mlx5", "mlx5_0", Some("mlx5_core"), true),
            ("mlx5", "rocep1s0f1", Some("mlx5_core"), true),
            ("mlx4", "rocep1s0f1", Some("mlx5_core"), false),
            ("siw", "rxe0", None, false),
            ("irdma", "rocep2s0", Some("ice"), false),
        ] {
            assert_eq!(is_of(driver, device, in_kernel), is, "{driver} {device}");
        }
    }
}
