//! userfaultfd(2) for pages that are missing, of another process (`Documentation/admin-guide/mm/userfaultfd.rst`).

use std::io;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::ioctl::{self, Opcode, Setter, Updater, opcode};

/// `USERFAULTFD_IOC_NEW`, of `/dev/userfaultfd`. Its argument are flags of userfaultfd(2).
pub const NEW: u64 = opcode::none(0xaa, 0x00) as u64;

const API: u64 = 0xaa;
/// `UFFD_FEATURE_MISSING_SHMEM`.
const MISSING_SHMEM: u64 = 1 << 5;
/// `UFFDIO_REGISTER_MODE_MISSING`.
const REGISTER_MISSING: u64 = 1 << 0;
/// `UFFD_EVENT_PAGEFAULT`.
const PAGEFAULT: u8 = 0x12;

/// `struct uffdio_api`.
#[repr(C)]
struct ApiRequest {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct RangeRequest {
    start: u64,
    length: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct RegisterRequest {
    range: RangeRequest,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_copy`.
#[repr(C)]
struct CopyRequest {
    to: u64,
    from: u64,
    length: u64,
    mode: u64,
    /// Bytes that were copied, or an error's number below zero.
    copied: i64,
}

/// `struct uffdio_zeropage`.
#[repr(C)]
struct ZeroRequest {
    range: RangeRequest,
    mode: u64,
    /// As with [`CopyRequest`].
    zeroed: i64,
}

const UFFDIO_API: Opcode = opcode::read_write::<ApiRequest>(0xaa, 0x3f);
const UFFDIO_REGISTER: Opcode = opcode::read_write::<RegisterRequest>(0xaa, 0x00);
const UFFDIO_UNREGISTER: Opcode = opcode::read::<RangeRequest>(0xaa, 0x01);
const UFFDIO_WAKE: Opcode = opcode::read::<RangeRequest>(0xaa, 0x02);
const UFFDIO_COPY: Opcode = opcode::read_write::<CopyRequest>(0xaa, 0x03);
const UFFDIO_ZEROPAGE: Opcode = opcode::read_write::<ZeroRequest>(0xaa, 0x04);

/// Sets a new one up: threads that touch a page that a file of tmpfs lacks wait.
pub fn set_up(uffd: BorrowedFd<'_>) -> io::Result<()> {
    let mut request = ApiRequest {
        api: API,
        features: MISSING_SHMEM,
        ioctls: 0,
    };
    // SAFETY: UFFDIO_API reads and writes a `struct uffdio_api`, which is three u64.
    unsafe { ioctl::ioctl(uffd, Updater::<UFFDIO_API, _>::new(&mut request)) }?;
    Ok(())
}

/// From now on who touches a missing page of this memory waits.
pub fn register(uffd: BorrowedFd<'_>, start: u64, length: u64) -> io::Result<()> {
    let mut request = RegisterRequest {
        range: RangeRequest { start, length },
        mode: REGISTER_MISSING,
        ioctls: 0,
    };
    // SAFETY: UFFDIO_REGISTER reads and writes a `struct uffdio_register`, which is four u64. What it changes is how faults in another
    // process are handled, or, where the memory is this process's own, that its threads wait as others do.
    unsafe { ioctl::ioctl(uffd, Updater::<UFFDIO_REGISTER, _>::new(&mut request)) }?;
    Ok(())
}

/// Nobody waits any more: a page that is missing is zero.
pub fn unregister(uffd: BorrowedFd<'_>, start: u64, length: u64) -> io::Result<()> {
    let request = RangeRequest { start, length };
    // SAFETY: UFFDIO_UNREGISTER reads a `struct uffdio_range`, which is two u64. Its number says otherwise than that it reads.
    unsafe { ioctl::ioctl(uffd, Setter::<UFFDIO_UNREGISTER, _>::new(request)) }?;
    Ok(())
}

/// Who waits for a page of this memory tries again, and is told of again if it is still missing.
pub fn wake(uffd: BorrowedFd<'_>, start: u64, length: u64) -> io::Result<()> {
    let request = RangeRequest { start, length };
    // SAFETY: UFFDIO_WAKE reads a `struct uffdio_range`, which is two u64.
    unsafe { ioctl::ioctl(uffd, Setter::<UFFDIO_WAKE, _>::new(request)) }?;
    Ok(())
}

/// What has become of pages that were to be put in their place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// So many bytes are there now, and who waited for them goes on.
    Bytes(u64),
    /// The first page was there before, and is as it was.
    Exists,
}

/// Puts pages in their place, where there is none.
pub fn copy(uffd: BorrowedFd<'_>, to: u64, bytes: &[u8]) -> io::Result<Put> {
    let mut request = CopyRequest {
        to,
        from: bytes.as_ptr().expose_provenance() as u64,
        length: bytes.len() as u64,
        mode: 0,
        copied: 0,
    };
    // SAFETY: UFFDIO_COPY reads and writes a `struct uffdio_copy`, which is five u64, and reads as many bytes as it says from where it says:
    // a slice that is borrowed until it returns. It writes only to pages that nobody has had yet.
    let done = unsafe { ioctl::ioctl(uffd, Updater::<UFFDIO_COPY, _>::new(&mut request)) };
    put(done, request.copied)
}

/// Puts pages of zeros in their place, where there is none.
pub fn zero(uffd: BorrowedFd<'_>, start: u64, length: u64) -> io::Result<Put> {
    let mut request = ZeroRequest {
        range: RangeRequest { start, length },
        mode: 0,
        zeroed: 0,
    };
    // SAFETY: UFFDIO_ZEROPAGE reads and writes a `struct uffdio_zeropage`, which is four u64. It writes only to pages that nobody has had
    // yet.
    let done = unsafe { ioctl::ioctl(uffd, Updater::<UFFDIO_ZEROPAGE, _>::new(&mut request)) };
    put(done, request.zeroed)
}

fn put(done: Result<(), Errno>, bytes: i64) -> io::Result<Put> {
    match (done, u64::try_from(bytes)) {
        // Of a part the call itself says that it is to be tried again.
        (Ok(()) | Err(Errno::AGAIN), Ok(bytes)) if bytes > 0 => Ok(Put::Bytes(bytes)),
        (Err(Errno::EXIST), _) => Ok(Put::Exists),
        (Err(error), _) => Err(error.into()),
        (Ok(()), _) => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// The next page that somebody waits for, by an address in it, if there is one.
pub fn next(uffd: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    /// `struct uffd_msg`: the event, and of a page fault its address behind two more u64.
    const MESSAGE: usize = 32;
    let mut message = [0; MESSAGE];
    match rustix::io::read(uffd, &mut message) {
        Ok(MESSAGE) if message[0] == PAGEFAULT => {
            let address = message[16..24].try_into().expect("eight bytes");
            Ok(Some(u64::from_ne_bytes(address)))
        }
        Ok(_) => Err(io::ErrorKind::InvalidData.into()),
        Err(Errno::AGAIN) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
