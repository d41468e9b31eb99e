//! File systems that stand still (`linux/fs.h`, and `uapi/linux/ext4.h` for the last of these requests).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

const FIFREEZE: libc::Ioctl = 0xC004_5877;
const FITHAW: libc::Ioctl = 0xC004_5878;
const EXT4_IOC_SHUTDOWN: libc::Ioctl = 0x8004_587D;

/// Without another write to the disk, not even of the journal.
const NO_FLUSH: u32 = 2;

fn ask(folder: &Path, request: libc::Ioctl, argument: &u32) -> io::Result<()> {
    let file = File::open(folder)?;
    // SAFETY: the kernel reads one such number at most, which lives longer than the call.
    match unsafe { libc::ioctl(file.as_raw_fd(), request, std::ptr::from_ref(argument)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Everything that was written to the file system is on its disk when this returns, which then needs nothing of its journal; who writes
/// waits from then on, until it is thawed.
pub fn freeze(folder: &Path) -> io::Result<()> {
    ask(folder, FIFREEZE, &0)
}

/// Who waits goes on. False if it was not frozen.
pub fn thaw(folder: &Path) -> io::Result<bool> {
    match ask(folder, FITHAW, &0) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The file system, frozen or not, never writes to its disk again.
pub fn shut_down(folder: &Path) -> io::Result<()> {
    ask(folder, EXT4_IOC_SHUTDOWN, &NO_FLUSH)
}
