//! The tap link of a virtual machine (the kernel's `Documentation/networking/tuntap.rst`).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Makes a tap link of this thread's network namespace, which stays when nobody has it open. Root may open it, also without rights
/// over the namespace.
pub(super) fn make(name: &str) -> io::Result<()> {
    let device = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .map_err(|error| io::Error::new(error.kind(), format!("/dev/net/tun: {error}")))?;
    // SAFETY: all of an `ifreq` may be zero; it is plain data.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the kernel reads and writes an `ifreq`, which lives across the call.
    done(unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    // SAFETY: the argument is a number.
    done(unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETOWNER, 0) })?;
    // SAFETY: as above.
    done(unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETPERSIST, 1) })
}

fn done(returned: libc::c_int) -> io::Result<()> {
    match returned {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
