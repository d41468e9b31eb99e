//! Reads another process's memory.

use std::io;

/// Reads from there as much as can be read in one go (process_vm_readv(2)).
pub fn read(pid: u32, address: u64, into: &mut [u8]) -> io::Result<usize> {
    let local = libc::iovec {
        iov_base: into.as_mut_ptr().cast(),
        iov_len: into.len(),
    };
    let remote = libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(address as usize),
        iov_len: into.len(),
    };
    // SAFETY: the local vector is the whole of a slice that is ours to write; the remote one is not of this process.
    let read =
        unsafe { libc::process_vm_readv(pid.cast_signed(), &raw const local, 1, &raw const remote, 1, 0) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}
