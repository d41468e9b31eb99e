//! Mapped files, and system calls without a form in our libraries.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};

/// `struct file_clone_range` (`linux/fs.h`).
#[repr(C)]
struct CloneRange {
    source: i64,
    source_offset: u64,
    length: u64,
    offset: u64,
}

/// `_IOW(0x94, 13, struct file_clone_range)`.
const FICLONERANGE: libc::Ioctl = 0x4020_940D;

/// Gives this thread, and all that it starts, a mount namespace of its own. Without it a namespace that another program makes
/// meanwhile would take the file system along, and keep it mounted after `umount`.
pub fn have_own_mounts() -> io::Result<()> {
    // SAFETY: only descriptors (`FILES`) and signal state are unsafe to unshare.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }?;
    let made = std::process::Command::new("mount")
        .args(["--make-rprivate", "/"])
        .status()?;
    match made.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "mount --make-rprivate / ends with {made}"
        ))),
    }
}

/// A file in memory, shared with all its users.
pub struct Map {
    start: *mut std::ffi::c_void,
    length: usize,
}

impl Map {
    /// The first `length` bytes, which the file has to have.
    pub fn of(file: &File, length: usize) -> io::Result<Self> {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, rights, MapFlags::SHARED, file, 0) };
        Ok(Self {
            start: start?,
            length,
        })
    }

    pub fn read(&self, offset: usize, data: &mut [u8]) {
        assert!(offset + data.len() <= self.length);
        // SAFETY: within the mapping, which no reference points into.
        unsafe {
            std::ptr::copy_nonoverlapping(self.start.cast::<u8>().add(offset), data.as_mut_ptr(), data.len())
        };
    }

    pub fn write(&self, offset: usize, data: &[u8]) {
        assert!(offset + data.len() <= self.length);
        // SAFETY: within the mapping, which no reference points into.
        unsafe {
            std::ptr::copy_nonoverlapping(data.as_ptr(), self.start.cast::<u8>().add(offset), data.len())
        };
    }

    /// Makes the written bytes durable.
    pub fn sync(&self) -> io::Result<()> {
        // SAFETY: the mapping is ours, and has that length.
        Ok(unsafe { rustix::mm::msync(self.start, self.length, MsyncFlags::SYNC) }?)
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing has a reference into it.
        let _ = unsafe { rustix::mm::munmap(self.start, self.length) };
    }
}

/// Makes a part of one file share its blocks with a part of another.
pub fn clone_range(to: &File, offset: u64, from: &File, from_offset: u64, length: u64) -> io::Result<()> {
    let range = CloneRange {
        source: from.as_raw_fd().into(),
        source_offset: from_offset,
        length,
        offset,
    };
    // SAFETY: the kernel reads one such structure, which lives longer than the call.
    match unsafe { libc::ioctl(to.as_raw_fd(), FICLONERANGE, &raw const range) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Writes this part of the page cache, and waits for it.
pub fn sync_range(file: &File, offset: u64, length: u64) -> io::Result<()> {
    let flags =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: no argument is a pointer.
    match unsafe { libc::sync_file_range(file.as_raw_fd(), offset as i64, length as i64, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
