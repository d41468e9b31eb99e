//! userfaultfd(2): makes threads that touch a page without content wait.

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use rustix::io::{self, Errno};
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Updater, ioctl, opcode};
use rustix::mm::{UserfaultfdFlags, userfaultfd};
use std::ops::Range;

use super::kept::KeptFd;

// <linux/userfaultfd.h>
const USERFAULTFD_IOC: u8 = 0xAA;
const UFFD_API: u64 = 0xAA;
const UFFD_USER_MODE_ONLY: u32 = 1;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1 << 0;
const UFFDIO_REGISTER_MODE_MINOR: u64 = 1 << 2;
const UFFD_FEATURE_MISSING_SHMEM: u64 = 1 << 5;
const UFFD_FEATURE_MINOR_SHMEM: u64 = 1 << 10;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdRange {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Register {
    range: UffdRange,
    mode: u64,
    ioctls: u64,
}

const UFFDIO_REGISTER: Opcode = opcode::read_write::<Register>(USERFAULTFD_IOC, 0);
const UFFDIO_UNREGISTER: Opcode = opcode::read::<UffdRange>(USERFAULTFD_IOC, 1);
const UFFDIO_WAKE: Opcode = opcode::read::<UffdRange>(USERFAULTFD_IOC, 2);
const UFFDIO_API: Opcode = opcode::read_write::<Api>(USERFAULTFD_IOC, 0x3F);

/// Which kind of mapping lacks its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Private anonymous memory: a touched page is missing.
    Anonymous,
    /// A mapping of a file on tmpfs: a touched page is missing from the file, or from the page table only.
    Shared,
}

/// A userfaultfd.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
    kind: Kind,
}

/// One that stays open from move to move: to close the last descriptor of a userfaultfd takes time for every mapping that the
/// process has.
#[derive(Debug)]
pub struct KeptUserfaultfd {
    fd: KeptFd,
    kind: Kind,
}

impl KeptUserfaultfd {
    /// Of which kind it is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// `None` if the program has closed it.
    pub fn duplicate(&self) -> Option<Userfaultfd> {
        Some(Userfaultfd {
            fd: self.fd.duplicate().ok()?,
            kind: self.kind,
        })
    }
}

impl Userfaultfd {
    /// One that also stops faults from within system calls. `device` is tried first.
    pub fn open_full(device: Option<BorrowedFd<'_>>, kind: Kind) -> Option<Self> {
        device
            .and_then(|device| from_device(device).ok())
            .or_else(|| {
                let device = open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
                from_device(device.as_fd()).ok()
            })
            .or_else(|| from_syscall(UserfaultfdFlags::empty()).ok())
            .and_then(|fd| Self::agree(fd, kind).ok())
    }

    /// One that needs no privilege and stops faults from user mode only.
    pub fn open_user_mode(kind: Kind) -> Option<Self> {
        from_syscall(UserfaultfdFlags::from_bits_retain(UFFD_USER_MODE_ONLY))
            .ok()
            .and_then(|fd| Self::agree(fd, kind).ok())
    }

    fn agree(fd: OwnedFd, kind: Kind) -> io::Result<Self> {
        let mut api = Api {
            api: UFFD_API,
            features: match kind {
                Kind::Anonymous => 0,
                Kind::Shared => UFFD_FEATURE_MISSING_SHMEM | UFFD_FEATURE_MINOR_SHMEM,
            },
            ioctls: 0,
        };
        // SAFETY: UFFDIO_API takes a `struct uffdio_api`.
        unsafe { ioctl(&fd, Updater::<UFFDIO_API, Api>::new(&mut api)) }?;
        Ok(Self { fd, kind })
    }

    /// Keeps a duplicate.
    pub fn keep(&self) -> Option<KeptUserfaultfd> {
        Some(KeptUserfaultfd {
            fd: KeptFd::new(&self.fd).ok()?,
            kind: self.kind,
        })
    }

    /// From now on, whoever touches a page of `range` that has no entry in the page table waits, until the answer is
    /// dropped. Fails with `EBUSY` if the program watches the range itself.
    pub fn hold(&self, range: Range<usize>) -> io::Result<Held<'_>> {
        let mut register = Register {
            range: UffdRange::from(&range),
            mode: match self.kind {
                Kind::Anonymous => UFFDIO_REGISTER_MODE_MISSING,
                Kind::Shared => UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR,
            },
            ioctls: 0,
        };
        // SAFETY: UFFDIO_REGISTER takes a `struct uffdio_register`. It changes no content of memory.
        unsafe { ioctl(&self.fd, Updater::<UFFDIO_REGISTER, Register>::new(&mut register)) }?;
        Ok(Held { of: self, range })
    }
}

/// A range whose missing pages make threads wait. Dropping it lets them try again, with whatever is mapped then.
#[derive(Debug)]
pub struct Held<'a> {
    of: &'a Userfaultfd,
    range: Range<usize>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut range = UffdRange::from(&self.range);
        // The mapping that was registered is gone when the move went well: then this has nothing to do.
        // SAFETY: UFFDIO_UNREGISTER takes a `struct uffdio_range`.
        let _ = unsafe {
            ioctl(
                &self.of.fd,
                Updater::<UFFDIO_UNREGISTER, UffdRange>::new(&mut range),
            )
        };
        // SAFETY: UFFDIO_WAKE takes a `struct uffdio_range`.
        let _ = unsafe { ioctl(&self.of.fd, Updater::<UFFDIO_WAKE, UffdRange>::new(&mut range)) };
    }
}

impl From<&Range<usize>> for UffdRange {
    fn from(range: &Range<usize>) -> Self {
        Self {
            start: range.start as u64,
            len: range.len() as u64,
        }
    }
}

fn from_syscall(more: UserfaultfdFlags) -> io::Result<OwnedFd> {
    // SAFETY: the descriptor is used by `Userfaultfd` alone, whose methods only delay other threads.
    unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK | more) }
}

/// `USERFAULTFD_IOC_NEW`: the argument is the flags, the result a descriptor.
struct New;

// SAFETY: the opcode and its meaning are those of <linux/userfaultfd.h>; the kernel reads and writes no memory.
unsafe impl Ioctl for New {
    type Output = OwnedFd;
    const IS_MUTATING: bool = true;
    fn opcode(&self) -> Opcode {
        opcode::none(USERFAULTFD_IOC, 0)
    }
    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::without_provenance_mut((OFlags::CLOEXEC | OFlags::NONBLOCK).bits() as usize)
    }
    unsafe fn output_from_ptr(fd: IoctlOutput, _: *mut std::ffi::c_void) -> io::Result<OwnedFd> {
        // SAFETY: the kernel just made this descriptor for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

fn from_device(device: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // The program may have closed our descriptor and opened something else by its number.
    if FileType::from_raw_mode(fstat(device)?.st_mode) != FileType::CharacterDevice {
        return Err(Errno::BADF);
    }
    // SAFETY: as the implementation of `Ioctl` says.
    unsafe { ioctl(device, New) }
}
