//! A container: a child of this program, with memory at a fixed address that a userfaultfd watches.

use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

pub const PAGE: u64 = 4096;
pub const BASE: u64 = 0x1000_0000_0000;

/// What a page of the dump begins with, and what is in its other words.
pub fn word(address: u64, index: u64) -> u64 {
    (address ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(index * 2 + 1)
}

pub fn content(address: u64) -> Vec<u8> {
    (0..PAGE / 8)
        .flat_map(|index| word(address, index).to_le_bytes())
        .collect()
}

/// Whether the page at `at` has what the dump had at `origin`, or zeros.
pub fn check(at: u64, origin: Option<u64>) -> bool {
    (0..PAGE / 8).all(|index| {
        // SAFETY: the caller has mapped the page.
        let found = unsafe { std::ptr::read_volatile((at + index * 8) as *const u64) };
        found == origin.map_or(0, |origin| word(origin, index))
    })
}

/// Maps `bytes` at `at` in this process.
pub fn map(at: u64, bytes: u64) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
    // SAFETY: nothing is at the address.
    let got = unsafe {
        libc::mmap(
            at as *mut _,
            bytes as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        )
    };
    assert_eq!(got as u64, at, "mmap: {}", std::io::Error::last_os_error());
    // SAFETY: the range was mapped just now.
    unsafe { libc::madvise(got, bytes as usize, libc::MADV_NOHUGEPAGE) };
}

/// A userfaultfd with what CRIU asks for, over the range.
pub fn watch(ranges: &[(u64, u64)]) -> OwnedFd {
    // SAFETY: plain system calls on memory of this process.
    unsafe {
        let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
        assert!(fd >= 0, "userfaultfd: {}", std::io::Error::last_os_error());
        let fd = OwnedFd::from_raw_fd(fd as i32);
        // FORK, REMAP, REMOVE, UNMAP.
        let mut api = [0xaau64, 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6, 0];
        assert_eq!(libc::ioctl(fd.as_raw_fd(), 0xc018_aa3f, api.as_mut_ptr()), 0);
        for (start, bytes) in ranges {
            let mut register = [*start, *bytes, 1, 0];
            assert_eq!(libc::ioctl(fd.as_raw_fd(), 0xc020_aa00, register.as_mut_ptr()), 0);
        }
        fd
    }
}

/// A child. It maps, sends its descriptor, waits for one byte, does `what`, and says by one byte whether all was right.
pub struct Container {
    pub pid: i32,
    socket: UnixStream,
    uffd: Option<OwnedFd>,
}

impl Container {
    pub fn start(ranges: &[(u64, u64)], what: impl FnOnce() -> bool) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        // SAFETY: this program has one thread.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            drop(ours);
            // Whatever goes wrong here must not go on as another test.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| live(ranges, theirs, what)));
            // SAFETY: ends the child.
            unsafe { libc::_exit(1) };
        }
        drop(theirs);
        let mut socket = ours;
        let mut number = [0; 4];
        socket.read_exact(&mut number).unwrap();
        let pidfd = rustix::process::pidfd_open(
            rustix::process::Pid::from_raw(pid).unwrap(),
            rustix::process::PidfdFlags::empty(),
        )
        .unwrap();
        let number = i32::from_le_bytes(number);
        // SAFETY: a system call that makes a descriptor for us.
        let uffd = unsafe {
            let fd = libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_fd().as_raw_fd(), number, 0);
            assert!(fd >= 0);
            OwnedFd::from_raw_fd(fd as i32)
        };
        socket.write_all(b"g").unwrap();
        socket.read_exact(&mut [0]).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Self {
            pid,
            socket,
            uffd: Some(uffd),
        }
    }

    /// Its descriptor, which nobody else has from here on.
    pub fn uffd(&mut self) -> OwnedFd {
        self.uffd.take().expect("it is sent once")
    }

    /// Lets it run.
    pub fn go(&mut self) {
        self.socket.write_all(b"g").unwrap();
    }

    /// It has ended its part, and all was right. `None` if it has not ended it yet.
    pub fn is_right(&mut self) -> bool {
        let mut answer = [0];
        self.socket.read_exact(&mut answer).is_ok() && answer == *b"y"
    }

    pub fn has_ended(&mut self) -> bool {
        self.socket.set_nonblocking(true).unwrap();
        // SAFETY: reads one byte into nothing of ours but a local.
        let got = unsafe {
            let mut byte = 0u8;
            libc::recv(self.socket.as_raw_fd(), (&raw mut byte).cast(), 1, libc::MSG_PEEK)
        };
        self.socket.set_nonblocking(false).unwrap();
        got >= 0
    }

    pub fn kill(&self) {
        // SAFETY: a child of ours that nobody has waited for.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

/// The child's life.
fn live(ranges: &[(u64, u64)], mut socket: UnixStream, what: impl FnOnce() -> bool) -> std::io::Result<()> {
    ranges.iter().for_each(|(start, bytes)| map(*start, *bytes));
    let uffd = watch(ranges);
    socket.write_all(&uffd.as_raw_fd().to_le_bytes())?;
    socket.read_exact(&mut [0])?;
    drop(uffd);
    socket.write_all(b"s")?;
    socket.read_exact(&mut [0])?;
    let right = what();
    socket.write_all(if right { b"y" } else { b"n" })?;
    // It lives until it is killed, or this program closes its end.
    socket.read_exact(&mut [0])
}

/// Behind the last address of the mapping that `at` lies in.
pub fn mapping_end(at: u64) -> Option<u64> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let ranges = maps
        .lines()
        .filter_map(|line| line.split_once(' ')?.0.split_once('-'));
    let number = |text| u64::from_str_radix(text, 16).ok();
    let mut ranges = ranges.filter_map(|(start, end)| Some(number(start)?..number(end)?));
    ranges.find(|range| range.contains(&at)).map(|range| range.end)
}
