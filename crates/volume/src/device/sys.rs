//! System calls of loop devices (`man 4 loop`) and of FUSE (`man 4 fuse`) that no library of ours has.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
const LOOP_SET_CAPACITY: libc::Ioctl = 0x4C07;
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;

/// `FUSE_DEV_IOC_CLONE`: `_IOR(229, 0, uint32_t)`.
const CLONE: libc::Ioctl = 0x8004_e500_u32 as libc::Ioctl;

/// `linux/prctl.h`.
const PR_SET_IO_FLUSHER: i32 = 57;

const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;

/// The major number of loop devices (`Documentation/admin-guide/devices.txt`).
const MAJOR: u32 = 7;

/// `struct loop_config` with the `struct loop_info64` in it (`linux/loop.h`).
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    /// `lo_device`, `lo_inode`, `lo_rdevice`, `lo_offset`, `lo_sizelimit`.
    places: [u64; 5],
    /// `lo_number`, `lo_encrypt_type`, `lo_encrypt_key_size`.
    numbers: [u32; 3],
    flags: u32,
    name: [u8; 64],
    /// `lo_crypt_name`, `lo_encrypt_key`, `lo_init`.
    unused: [u64; 14],
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopConfig>() == 304, "as the kernel has it");

/// The number of a loop device that was free a moment ago.
pub fn free_loop_device(control: &File) -> io::Result<u32> {
    // SAFETY: this request has no argument.
    let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
    u32::try_from(number).map_err(|_| io::Error::last_os_error())
}

/// Puts the loop device on this file, with direct I/O; the device goes with its last descriptor. EBUSY if the
/// device is taken.
pub fn configure_loop_device(device: &File, file: &File, is_read_only: bool) -> io::Result<()> {
    let mut name = [0; 64];
    let text = b"verbatim volume";
    name[..text.len()].copy_from_slice(text);
    let config = LoopConfig {
        fd: descriptor(file.as_raw_fd()),
        block_size: 0,
        places: [0; 5],
        numbers: [0; 3],
        flags: LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO | if is_read_only { LO_FLAGS_READ_ONLY } else { 0 },
        name,
        unused: [0; 14],
        reserved: [0; 8],
    };
    // SAFETY: the kernel reads one such structure, which lives longer than the call.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives the loop device the present length of its file.
pub fn follow_the_file(device: &File) -> io::Result<()> {
    // SAFETY: this request has no argument.
    match unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_CAPACITY) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A FUSE descriptor without a connection; reads do not block.
pub fn open_fuse() -> io::Result<OwnedFd> {
    let mut open = OpenOptions::new();
    open.read(true).write(true).custom_flags(libc::O_NONBLOCK);
    Ok(open.open("/dev/fuse")?.into())
}

/// A clone of this FUSE descriptor. Requests that are read from a clone are to be answered by it.
pub fn clone_fuse(fuse: &OwnedFd) -> io::Result<OwnedFd> {
    let clone = open_fuse()?;
    let of = descriptor(fuse.as_raw_fd());
    // SAFETY: the kernel reads one number, which lives longer than the call.
    match unsafe { libc::ioctl(clone.as_raw_fd(), CLONE, &raw const of) } {
        0 => Ok(clone),
        _ => Err(io::Error::last_os_error()),
    }
}

fn descriptor(fd: RawFd) -> u32 {
    u32::try_from(fd).expect("an open descriptor")
}

/// Makes the node of a loop device.
pub fn make_node(path: &Path, number: u32) -> io::Result<()> {
    let mode = Mode::from_raw_mode(0o600);
    Ok(mknodat(
        CWD,
        path,
        FileType::BlockDevice,
        mode,
        makedev(MAJOR, number),
    )?)
}

/// Tells the kernel that this thread, and those that it starts, carry out I/O that memory reclaim waits for
/// (`man 2 prctl`). Without the privilege nothing changes.
pub fn be_io_flusher() {
    // SAFETY: no argument is a pointer.
    let result = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
    if result != 0 {
        let error = io::Error::last_os_error();
        tracing::debug!("memory that becomes free through volumes may wait for itself: {error}");
    }
}
