//! A child of this process that does to its memory what it is told, and nothing else: what the kernel can do is tried on it.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;

/// The size of a page table: memory of this alignment moves by whole tables.
pub const TABLE: usize = 2 << 20;
/// How many of them the child's area has.
const TABLES: usize = 3;

/// Pages of the child's area, as numbers from its beginning.
pub mod page {
    /// It is written to in the second step.
    pub const WRITTEN: usize = 1;
    /// It is read.
    pub const READ: usize = 2;
    /// Nothing is done to it.
    pub const LEFT: usize = 3;
    /// Nobody has used it before the second step.
    pub const NEW: usize = 9;
}

/// The child.
pub struct Child {
    pid: libc::pid_t,
    orders: PipeWriter,
    answers: PipeReader,
    /// Where its area is, aligned to [`TABLE`].
    pub area: u64,
    /// Where its second table goes in the second step.
    pub moved_to: u64,
}

impl Child {
    /// Starts it: the first pages of its area, and its second table, have been written to.
    pub fn start() -> io::Result<Self> {
        let length = TABLE * (2 * TABLES + 1);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh mapping, which nobody else knows.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let area = mapped.addr().next_multiple_of(TABLE);
        let moved_to = area + TABLES * TABLE;
        let (orders_in, orders) = io::pipe()?;
        let (answers, answers_in) = io::pipe()?;
        // SAFETY: the child of this process, which may have several threads, calls nothing but system calls and writes to nothing
        // but the fresh mapping.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: as above; the addresses lie in the mapping, whose copy is the child's alone.
            unsafe {
                work(
                    mapped.with_addr(area),
                    moved_to,
                    orders_in.as_raw_fd(),
                    answers_in.as_raw_fd(),
                )
            }
        }
        // SAFETY: it was mapped above; the child has its own.
        unsafe { libc::munmap(mapped, length) };
        if pid < 0 {
            return Err(io::Error::last_os_error());
        }
        drop((orders_in, answers_in));
        let mut child = Self {
            pid,
            orders,
            answers,
            area: area as u64,
            moved_to: moved_to as u64,
        };
        child.step()?;
        Ok(child)
    }

    /// Lets it take its next step, and waits until it has.
    pub fn step(&mut self) -> io::Result<()> {
        self.orders.write_all(&[0])?;
        self.answers.read_exact(&mut [0])
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid.unsigned_abs()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: our own child, which nobody else waits for.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), libc::__WALL);
        }
    }
}

/// The steps of the child, one for each byte that comes; it ends when no more come.
///
/// # Safety
///
/// `area` has room for two times [`TABLES`] tables, of which the second half begins at the address `moved_to`.
unsafe fn work(area: *mut libc::c_void, moved_to: usize, orders: i32, answers: i32) -> ! {
    const PAGE: usize = 4096;
    // SAFETY: see above; only system calls are made, and only those addresses are touched.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        // Small pages, so that each is its own.
        libc::madvise(area, 2 * TABLES * TABLE, libc::MADV_NOHUGEPAGE);
        let at = |page: usize| area.cast::<u8>().add(page * PAGE);
        let mut order = 0u8;
        for step in 0.. {
            if libc::read(orders, (&raw mut order).cast(), 1) != 1 {
                libc::_exit(0);
            }
            match step {
                0 => {
                    for page in 0..8 {
                        at(page).write_volatile(1);
                    }
                    for page in 0..TABLE / PAGE {
                        at(TABLE / PAGE + page).write_volatile(2);
                    }
                }
                1 => {
                    at(page::WRITTEN).write_volatile(3);
                    at(page::READ).read_volatile();
                    at(page::NEW).write_volatile(4);
                    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                    let to = area.with_addr(moved_to);
                    if libc::mremap(area.byte_add(TABLE), TABLE, TABLE, flags, to) == libc::MAP_FAILED {
                        libc::_exit(1);
                    }
                }
                _ => {}
            }
            if libc::write(answers, (&raw const order).cast(), 1) != 1 {
                libc::_exit(0);
            }
        }
        libc::_exit(0)
    }
}
