//! System calls without a safe wrapper elsewhere: clone3(2), signalfd(2), unshare(2).

use rustix::thread::UnshareFlags;
use std::ffi::{CString, OsStr};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The namespaces that a host has for itself.
const HOST_NAMESPACES: i32 =
    libc::CLONE_NEWNET | libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC;

/// A process that was just started.
pub(crate) struct Spawned {
    /// Its pid, as this process's namespace numbers it.
    pub pid: u32,
    /// Readable when it has ended.
    pub pidfd: OwnedFd,
}

/// Starts `program` as pid 1 in namespaces of its own, with `stdin` as its standard input and this process's
/// environment, stdout and stderr.
pub(crate) fn spawn_host(program: &Path, argv: &[&OsStr], stdin: BorrowedFd<'_>) -> io::Result<Spawned> {
    let program = CString::new(program.as_os_str().as_bytes())?;
    let argv: Vec<CString> = argv
        .iter()
        .map(|arg| CString::new(arg.as_bytes()))
        .collect::<Result<_, _>>()?;
    let mut pointers: Vec<*const libc::c_char> = argv.iter().map(|arg| arg.as_ptr()).collect();
    pointers.push(std::ptr::null());

    let mut pidfd: libc::c_int = -1;
    // SAFETY: all zeroes is a valid clone_args: no flags, no stack (the child goes on with a copy of this one).
    let mut args: libc::clone_args = unsafe { MaybeUninit::zeroed().assume_init() };
    args.flags = u64::from((HOST_NAMESPACES | libc::CLONE_PIDFD).cast_unsigned());
    args.pidfd = &raw mut pidfd as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    // SAFETY: `args` is valid for its size and `pidfd` outlives the call. Without CLONE_VM this is fork(2): the child
    // has its own memory, and does nothing but async-signal-safe calls (signal-safety(7)) on what was made before.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) };
    match pid {
        0 => {
            // SAFETY: in the child; `stdin` is open, `program` and `pointers` are NUL- and null-terminated.
            unsafe {
                if libc::dup2(stdin.as_raw_fd(), 0) == 0 {
                    libc::execv(program.as_ptr(), pointers.as_ptr());
                }
                libc::_exit(127)
            }
        }
        1.. => {
            // SAFETY: the kernel stored a new descriptor there, which nobody else owns.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            Ok(Spawned {
                pid: u32::try_from(pid).map_err(io::Error::other)?,
                pidfd,
            })
        }
        _ => Err(io::Error::last_os_error()),
    }
}

/// Moves this process, which must have one thread, to a new network namespace.
pub(crate) fn unshare_network() -> io::Result<()> {
    // SAFETY: only the network namespace is left; no memory or descriptor table is taken apart.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.map_err(Into::into)
}

/// Blocks no signal in this thread any longer. A program inherits what is blocked: between fork(2) and exec(2) of one,
/// this undoes [`Signals::take`]. It makes only calls that are allowed there.
pub(crate) fn unblock_signals() -> io::Result<()> {
    let mut none = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set before pthread_sigmask reads it; both are async-signal-safe.
    let error = unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut())
    };
    match error {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Signals as something to poll.
pub(crate) struct Signals(OwnedFd);

impl Signals {
    /// Blocks `signals` in this thread and takes them from a descriptor from now on.
    pub fn take(signals: &[libc::c_int]) -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises the set before anything reads it; every pointer is valid for its call.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for &signal in signals {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            if libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
            let fd = libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                Err(io::Error::last_os_error())
            } else {
                Ok(Self(OwnedFd::from_raw_fd(fd)))
            }
        }
    }

    /// The next signal that has come, if any.
    pub fn next(&self) -> Option<libc::c_int> {
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.0, &mut info) {
            // ssi_signo is the structure's first field: signalfd(2).
            Ok(length) if length == info.len() => {
                Some(i32::from_ne_bytes([info[0], info[1], info[2], info[3]]))
            }
            _ => None,
        }
    }
}

impl std::os::fd::AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
