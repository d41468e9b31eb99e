//! Why dlmopen(3): what a preloaded library does to libibverbs, and that it does not do it here.

use std::ffi::{CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::*;
use crate::backend::rdma_core::{library::LoadError, locate};

type Mark = extern "C" fn() -> c_int;
type MarkByDriver = extern "C" fn(*const c_char) -> c_int;

fn open_here(path: &Path, flags: c_int) -> *mut c_void {
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: a C string; the libraries have no constructors.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | flags) };
    assert!(!handle.is_null(), "{} does not load", path.display());
    handle
}

/// `find` gives the functions of a library; who answers when it calls itself, and when its driver calls it.
fn marks(find: impl Fn(&CStr) -> *mut c_void, driver: &Path) -> (c_int, c_int) {
    let driver = CString::new(driver.as_os_str().as_bytes()).unwrap();
    // SAFETY: the fake's functions of those names.
    unsafe {
        let by_itself: Mark = std::mem::transmute(find(c"fake_mark_by_itself"));
        let by_driver: MarkByDriver = std::mem::transmute(find(c"fake_mark_by_driver"));
        (by_itself(), by_driver(driver.as_ptr()))
    }
}

#[test]
fn a_library_in_its_own_namespace_calls_itself_and_is_called_by_its_drivers() {
    let folder = tempfile::tempdir().unwrap();
    let [interposer, in_place, driver] =
        ["i.so", "in-place.so", "driver.so"].map(|name| folder.path().join(name));
    compile("interposer.c", &interposer, &[]);
    compile("fake_ibverbs.c", &in_place, &[]);
    // As a distribution's drivers, it needs `libibverbs.so.1`, whichever is there.
    compile_driver(&driver, &in_place);
    // As with LD_PRELOAD, in the program's scope.
    open_here(&interposer, libc::RTLD_GLOBAL);

    let handle = open_here(&in_place, libc::RTLD_LOCAL);
    // SAFETY: the handle is never closed.
    let find = |name: &CStr| unsafe { libc::dlsym(handle, name.as_ptr()) };
    assert_eq!(
        marks(find, &driver).0,
        2,
        "in the program's namespace it would call the preloaded one"
    );

    let fake = Fake::new();
    assert_eq!(marks(|name| fake.library.symbol(name), &driver), (1, 1));
}

fn compile_driver(to: &Path, needed: &Path) {
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"])
        .arg(to)
        .arg(sources().join("driver.c"))
        .arg(needed);
    assert!(cc.status().unwrap().success());
}

#[test]
fn each_side_has_its_own_errno_on_each_thread() {
    let fake = Fake::new();
    let too_many = fake.open().create_cq(1000, None).unwrap_err();
    assert_eq!(too_many.errno(), libc::EINVAL);
    let error = std::thread::scope(|scope| {
        scope
            .spawn(|| fake.open().create_cq(1000, None).unwrap_err())
            .join()
            .unwrap()
    });
    assert_eq!(error.errno(), libc::EINVAL);
}

#[test]
fn what_is_no_libibverbs_is_refused_with_its_name() {
    let missing = Library::load(Path::new("/nowhere/libibverbs.so.1")).unwrap_err();
    assert!(
        matches!(&missing, LoadError::Loader { reason, .. } if reason.contains("No such file")),
        "{missing}"
    );
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.so");
    compile("driver.c", &other, &[]);
    // SAFETY: nothing is called; the undefined function is bound only if this loads.
    let error = Library::load(&other).unwrap_err();
    assert!(error.to_string().contains("other.so"), "{error}");
}

/// On a machine without RDMA hardware; with it, the devices are the kernel's.
#[test]
fn the_systems_library_is_found_and_lists_what_the_kernel_has() {
    let Some(path) = locate::library() else {
        eprintln!("skipped: no libibverbs.so.1 is installed here");
        return;
    };
    let library = Library::load_systems().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let provider = RdmaCoreProvider::of(Arc::new(library));
    let mut listed: Vec<_> = provider.devices().into_iter().map(|device| device.name).collect();
    let class = std::fs::read_dir("/sys/class/infiniband");
    let mut expected: Vec<_> = class
        .map(|class| {
            class
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect()
        })
        .unwrap_or_default();
    listed.sort();
    expected.sort();
    assert_eq!(listed, expected);
    assert!(provider.open("none").is_err());
}
