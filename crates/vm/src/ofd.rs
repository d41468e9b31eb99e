//! Locks of open file descriptions, which none of our libraries offers.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// A lock of one byte.
fn of_byte(kind: i32, byte: u64) -> io::Result<libc::flock> {
    // SAFETY: a structure of numbers, for which zeros are valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = byte.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
    lock.l_len = 1;
    Ok(lock)
}

fn control(file: &File, command: i32, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: the descriptor is open as long as `file` is borrowed, and these commands take a pointer to such a structure.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(lock)) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Whether another open file description has a lock on this byte. Nothing is locked by this.
pub(crate) fn is_locked(file: &File, byte: u64) -> io::Result<bool> {
    let mut lock = of_byte(libc::F_WRLCK, byte)?;
    control(file, libc::F_OFD_GETLK, &mut lock)?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

/// Takes a lock that others may have, too.
pub(crate) fn lock(file: &File, byte: u64) -> io::Result<()> {
    control(file, libc::F_OFD_SETLK, &mut of_byte(libc::F_RDLCK, byte)?)
}

/// Gives up all locks of this open file description.
pub(crate) fn unlock(file: &File) -> io::Result<()> {
    let mut all = of_byte(libc::F_UNLCK, 0)?;
    // To the end of the file, however long that is.
    all.l_len = 0;
    control(file, libc::F_OFD_SETLK, &mut all)
}

/// Takes a lock that nobody else may have.
#[cfg(test)]
pub(crate) fn lock_alone(file: &File, byte: u64) -> io::Result<()> {
    control(file, libc::F_OFD_SETLK, &mut of_byte(libc::F_WRLCK, byte)?)
}
