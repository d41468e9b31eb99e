//! One mapping, asked for by an address: `PROCMAP_QUERY` on `/proc/self/maps`, Linux 6.11 and newer.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};

// `struct procmap_query` and its bits: <linux/fs.h>.
#[repr(C)]
struct Query {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

const VMA_READABLE: u64 = 1 << 0;
const VMA_WRITABLE: u64 = 1 << 1;
const VMA_EXECUTABLE: u64 = 1 << 2;
const VMA_SHARED: u64 = 1 << 3;
const COVERING_OR_NEXT_VMA: u64 = 1 << 4;
const FILE_BACKED_VMA: u64 = 1 << 5;
const PROCMAP_QUERY: Opcode = opcode::read_write::<Query>(b'f', 17);

/// Which mapping is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// The one that has the address, if there is one.
    Covering,
    /// The first shared mapping of a file that ends above the address.
    NextSharedFile,
}

/// What the kernel tells of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    pub start: usize,
    pub end: usize,
    /// Readable, writable, executable.
    pub access: (bool, bool, bool),
    pub shared: bool,
    /// In the file, in bytes.
    pub offset: u64,
    /// Major and minor number.
    pub device: (u32, u32),
    /// 0 for no file.
    pub inode: u64,
}

/// Asks for one mapping. `Ok(None)` if there is none; `ENOTTY` if the kernel is too old.
pub fn query(maps: BorrowedFd<'_>, address: usize, which: Which) -> Result<Option<Answer>, Errno> {
    let mut query = Query {
        size: size_of::<Query>() as u64,
        query_flags: match which {
            Which::Covering => 0,
            Which::NextSharedFile => COVERING_OR_NEXT_VMA | FILE_BACKED_VMA | VMA_SHARED,
        },
        query_addr: address as u64,
        vma_start: 0,
        vma_end: 0,
        vma_flags: 0,
        vma_page_size: 0,
        vma_offset: 0,
        inode: 0,
        dev_major: 0,
        dev_minor: 0,
        vma_name_size: 0,
        build_id_size: 0,
        vma_name_addr: 0,
        build_id_addr: 0,
    };
    // SAFETY: as the implementation of `Ioctl` says.
    match unsafe { ioctl(maps, Ask(&mut query)) } {
        Ok(()) => {}
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error),
    }
    let has = |flag| query.vma_flags & flag != 0;
    Ok(Some(Answer {
        start: query.vma_start as usize,
        end: query.vma_end as usize,
        access: (has(VMA_READABLE), has(VMA_WRITABLE), has(VMA_EXECUTABLE)),
        shared: has(VMA_SHARED),
        offset: query.vma_offset,
        device: (query.dev_major, query.dev_minor),
        inode: query.inode,
    }))
}

struct Ask<'a>(&'a mut Query);

// SAFETY: the opcode and its argument are those of PROCMAP_QUERY; the kernel writes to the argument only, since neither
// a name nor a build id is asked for.
unsafe impl Ioctl for Ask<'_> {
    type Output = ();
    const IS_MUTATING: bool = true;
    fn opcode(&self) -> Opcode {
        PROCMAP_QUERY
    }
    fn as_ptr(&mut self) -> *mut c_void {
        (&raw mut *self.0).cast()
    }
    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}
