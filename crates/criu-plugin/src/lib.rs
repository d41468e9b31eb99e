//! A plugin of CRIU for what CRIU alone cannot do: it leaves the kernel's RNICs alone, and reads limits of processes of other users
//! where root may not ask the kernel for them ([`limits`]).
//!
//! It passes over what a process has of RNICs, so that a dump neither fails nor touches a queue pair, and a dump that is given up is as
//! if it had not been.
//!
//! | of the process | in the images | after a restore |
//! | --- | --- | --- |
//! | a descriptor of `/dev/infiniband/uverbsN`, or of its events (`[infinibandevent]`) | that there was one | an eventfd of 0, at the same number |
//! | a mapping of the device | its place | pages of a memfd called [`PLACEHOLDER`], at the same address |
//!
//! Where somebody else has opened the node and handed it over, CRIU does not find its mount. Whoever starts the dump tells it of such a file
//! (`--external`), and it is named by mount and inode then.
//!
//! The placeholders are inert: nothing is ever readable, and what is written goes nowhere. The guest library makes the objects again
//! and puts its own descriptors in their place. It finds them by what it remembers, and by the name of the memfd.
//!
//! CRIU loads every file of its plugins' folder whose name ends in `.so`, so this one is linked into a folder of its own
//! (`verbatim_container::Host`). It is loaded at the restore, too: images with a file that a plugin has dumped need one.

mod limits;

use std::ffi::{CStr, c_char, c_int};
use std::io;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FileType, MemfdFlags, fstat, ftruncate, memfd_create};

/// The name of the memfd that stands for mappings of a device: `/memfd:verbatim-uverbs (deleted)` in `/proc/PID/maps`.
pub const PLACEHOLDER: &CStr = c"verbatim-uverbs";

/// More than any ring is long. Nobody touches a page, so none is there.
const PLACEHOLDER_BYTES: u64 = 1 << 30;

/// Is set for a CRIU whose hook for restored files has a second argument: that of 4.2 has not, later ones have, and the interface's version
/// is the same.
const RETRIES_VARIABLE: &str = "VERBATIM_CRIU_RETRIES";

/// Is set for a CRIU that is to leave RNICs alone; else they are refused, as CRIU does.
const RNICS_VARIABLE: &str = "VERBATIM_CRIU_RNICS";

/// What `/proc/PID/fd` shows of a completion channel and of a context's asynchronous events (`uverbs_std_types.c`,
/// `"[infinibandevent]"`).
const EVENTS: &str = "[infinibandevent]";

/// Version 0.2.0 of the interface: that of CRIU 3.15 and newer (`criu-plugin.h`).
const INTERFACE: u32 = 2 << 8;

/// How many hooks there were when the last one that is used here came.
const HOOKS: usize = 12;

/// Places in the list of hooks (`criu-plugin.h`).
const DUMP_EXT_FILE: usize = 2;
const RESTORE_EXT_FILE: usize = 3;
const HANDLE_DEVICE_VMA: usize = 7;
const UPDATE_VMA_MAP: usize = 8;

/// Why a hook leaves something to others: `-ENOTSUP`.
const NOT_OURS: c_int = -libc::ENOTSUP;

/// `cr_plugin_desc_t`
#[repr(C)]
pub struct Descriptor {
    name: *const c_char,
    init: extern "C" fn(c_int) -> c_int,
    exit: extern "C" fn(c_int, c_int),
    version: u32,
    max_hooks: u32,
    hooks: [Hook; HOOKS],
}

// SAFETY: nobody writes to it, and what it points to is constant.
unsafe impl Sync for Descriptor {}

/// A hook, by its type: CRIU knows from its place in the list how it is called.
#[repr(C)]
#[derive(Clone, Copy)]
union Hook {
    none: *const (),
    dump_file: extern "C" fn(c_int, c_int) -> c_int,
    restore_file: unsafe extern "C" fn(c_int, *mut bool) -> c_int,
    device_mapping: extern "C" fn(c_int, *const libc::stat) -> c_int,
    restore_mapping: unsafe extern "C" fn(*const c_char, u64, u64, *mut u64, *mut c_int) -> c_int,
}

/// What CRIU looks for.
#[unsafe(no_mangle)]
pub static CR_PLUGIN_DESC: Descriptor = {
    let mut hooks = [Hook {
        none: std::ptr::null(),
    }; HOOKS];
    hooks[DUMP_EXT_FILE] = Hook { dump_file };
    hooks[RESTORE_EXT_FILE] = Hook { restore_file };
    hooks[HANDLE_DEVICE_VMA] = Hook { device_mapping };
    hooks[UPDATE_VMA_MAP] = Hook { restore_mapping };
    Descriptor {
        name: c"verbatim".as_ptr(),
        init: begin,
        exit: end,
        version: INTERFACE,
        max_hooks: HOOKS as u32,
        hooks,
    }
};

/// Whether CRIU passes [`restore_file`] where to say that it must be asked again.
static RETRIES: AtomicBool = AtomicBool::new(false);

/// Whether RNICs are to be left alone.
static RNICS: AtomicBool = AtomicBool::new(false);

extern "C" fn begin(_stage: c_int) -> c_int {
    limits::stand_before();
    RNICS.store(std::env::var_os(RNICS_VARIABLE).is_some(), Ordering::Relaxed);
    RETRIES.store(std::env::var_os(RETRIES_VARIABLE).is_some(), Ordering::Relaxed);
    0
}

extern "C" fn end(_stage: c_int, _result: c_int) {}

/// `CR_PLUGIN_HOOK__DUMP_EXT_FILE`: a file of a kind that CRIU does not know. 0: no more is to be written down of it.
extern "C" fn dump_file(fd: c_int, _id: c_int) -> c_int {
    answer(|| Ok(is_events(fd)? || is_rnic(fd)?))
}

/// `CR_PLUGIN_HOOK__HANDLE_DEVICE_VMA`: a mapping of a device's file. 0: its content is none of CRIU's business.
extern "C" fn device_mapping(fd: c_int, _file: *const libc::stat) -> c_int {
    answer(|| is_rnic(fd))
}

fn answer(ours: impl FnOnce() -> io::Result<bool>) -> c_int {
    match RNICS.load(Ordering::Relaxed).then(ours) {
        Some(Ok(true)) => 0,
        // CRIU refuses what nobody takes.
        Some(Ok(false) | Err(_)) | None => NOT_OURS,
    }
}

/// `CR_PLUGIN_HOOK__RESTORE_EXT_FILE`: a descriptor for a file that [`dump_file`] has passed over. CRIU puts it at its number.
///
/// # Safety
///
/// `again` is CRIU's, to be written to, if [`RETRIES`]; else it is whatever was in the register.
unsafe extern "C" fn restore_file(_id: c_int, again: *mut bool) -> c_int {
    if RETRIES.load(Ordering::Relaxed) {
        // SAFETY: as above.
        unsafe { again.write(false) };
    }
    match eventfd(0, EventfdFlags::CLOEXEC) {
        Ok(fd) => fd.into_raw_fd(),
        Err(errno) => -errno.raw_os_error(),
    }
}

/// `CR_PLUGIN_HOOK__UPDATE_VMA_MAP`: a file, and a place in it, for a mapping of the file at `path`. 1: it is to be mapped.
///
/// # Safety
///
/// `path` is a C string, and `offset` and `fd` are CRIU's, to be written to.
unsafe extern "C" fn restore_mapping(
    path: *const c_char,
    _at: u64,
    _old_offset: u64,
    offset: *mut u64,
    fd: *mut c_int,
) -> c_int {
    // SAFETY: as above.
    let path = unsafe { CStr::from_ptr(path) };
    if !is_node(path.to_bytes()) {
        return NOT_OURS;
    }
    let made = memfd_create(PLACEHOLDER, MemfdFlags::CLOEXEC)
        .and_then(|memfd| ftruncate(&memfd, PLACEHOLDER_BYTES).map(|()| memfd));
    match made {
        Ok(memfd) => {
            // SAFETY: as above.
            unsafe {
                offset.write(0);
                fd.write(memfd.into_raw_fd());
            }
            1
        }
        Err(errno) => -errno.raw_os_error(),
    }
}

/// Whether a path is that of a node of uverbs, wherever the container has it, or CRIU's name of one that was handed over to a process, by
/// mount and inode: it was told of no other files.
fn is_node(path: &[u8]) -> bool {
    if path.starts_with(b"file[") && path.ends_with(b"]") {
        return true;
    }
    let mut parts = path.rsplit(|byte| *byte == b'/');
    let name = parts.next().and_then(|name| name.strip_prefix(b"uverbs"));
    let is_number = name.is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit));
    is_number && parts.next() == Some(b"infiniband")
}

/// Whether a descriptor is one of events of a context.
fn is_events(fd: c_int) -> io::Result<bool> {
    let target = std::fs::read_link(format!("/proc/self/fd/{fd}"))?;
    Ok(target.to_string_lossy().ends_with(EVENTS))
}

/// Whether a descriptor is a node of uverbs. Its major number is given out when the kernel starts; what the node belongs to says that it
/// is an RNIC.
fn is_rnic(fd: c_int) -> io::Result<bool> {
    // SAFETY: CRIU has it open as long as the hook runs.
    let file = fstat(unsafe { BorrowedFd::borrow_raw(fd) })?;
    if FileType::from_raw_mode(file.st_mode) != FileType::CharacterDevice {
        return Ok(false);
    }
    let (major, minor) = (rustix::fs::major(file.st_rdev), rustix::fs::minor(file.st_rdev));
    Ok(Path::new(&format!("/sys/dev/char/{major}:{minor}/ibdev")).exists())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    #[test]
    fn only_nodes_of_uverbs_are_taken() {
        assert!(is_node(b"/dev/infiniband/uverbs0") && is_node(b"./dev/infiniband/uverbs12"));
        assert!(is_node(b"file[1e:5]"), "one that was handed over");
        for other in [
            &b"file[1e:5]/x"[..],
            b"/dev/infiniband/rdma_cm",
            b"/dev/infiniband/uverbs",
            b"/dev/uverbs0",
            b"/dev/infiniband/uverbs0/x",
            b"",
        ] {
            assert!(!is_node(other), "{}", String::from_utf8_lossy(other));
        }
    }

    #[test]
    fn what_is_no_rnics_is_left_to_others() {
        for path in ["/dev/null", "/proc/self/stat"] {
            let file = File::open(path).unwrap();
            assert_eq!(dump_file(file.as_raw_fd(), 1), NOT_OURS, "{path}");
            assert_eq!(
                device_mapping(file.as_raw_fd(), std::ptr::null()),
                NOT_OURS,
                "{path}"
            );
        }
    }

    #[test]
    fn placeholders_are_inert_and_have_a_name() {
        let mut again = true;
        RETRIES.store(true, Ordering::Relaxed);
        // SAFETY: it is to be written to.
        let fd = unsafe { restore_file(7, &raw mut again) };
        assert!(fd >= 0 && !again);
        // SAFETY: it was given to us.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        RETRIES.store(false, Ordering::Relaxed);
        // SAFETY: it is not looked at.
        let fd = unsafe { restore_file(7, std::ptr::without_provenance_mut(8)) };
        // SAFETY: it was given to us.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
        let mut ends = [rustix::event::PollFd::new(&event, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec::default();
        assert_eq!(
            rustix::event::poll(&mut ends, Some(&now)),
            Ok(0),
            "it is not readable"
        );

        let (mut offset, mut fd) = (7, -1);
        let mut map = |path: &CStr| {
            // SAFETY: a C string, and variables to be written to.
            unsafe { restore_mapping(path.as_ptr(), 0x1000, 4096, &raw mut offset, &raw mut fd) }
        };
        assert_eq!(map(c"/dev/zero"), NOT_OURS);
        assert_eq!(map(c"/dev/infiniband/uverbs0"), 1);
        assert_eq!(offset, 0);
        // SAFETY: it was given to us.
        let memfd = unsafe { OwnedFd::from_raw_fd(fd) };
        let shown = std::fs::read_link(format!("/proc/self/fd/{}", memfd.as_raw_fd())).unwrap();
        assert_eq!(shown, Path::new("/memfd:verbatim-uverbs (deleted)"));
    }
}
