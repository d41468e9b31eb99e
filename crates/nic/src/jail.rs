//! What an RNIC gives up once it works. docs/security.md has the table.

use rustix::thread::CapabilitySet;
use verbatim_jail::{Argument, Calls, Capabilities, procfs};

/// The type of a socket, without its flags (`SOCK_TYPE_MASK` of `linux/net.h`).
const SOCKET_TYPE: u64 = 0xf;

/// `int` arguments: the kernel does not look at the other half.
const INT: u64 = 0xffff_ffff;

/// From here on this process does what an RNIC does, and no more. It must have one thread, and be past everything that needs more. `is_locked`: all memory
/// that it gets is locked.
///
/// What this kernel, or this user, cannot give up is named in the log.
pub fn enter(is_locked: bool) {
    let steps = [
        ("all of the host's paths", procfs::enter()),
        ("all rights of its user", capabilities(is_locked).keep()),
        ("all system calls", calls().keep().map_err(std::io::Error::other)),
    ];
    for (kept, result) in steps {
        match result {
            Ok(()) => {}
            Err(error) => tracing::warn!("the RNIC keeps {kept}: {error}"),
        }
    }
}

/// - `CAP_SYS_PTRACE` and `CAP_DAC_OVERRIDE`: `/proc/PID/mem` of other users' processes is theirs, with mode 0600.
/// - `CAP_SYS_RESOURCE`: descriptors that are under way between processes are counted for each user. What containers of root have under way
///   must not keep an RNIC of root from giving a program its arena (`too_many_unix_fds` of `net/unix/scm.c`).
/// - `CAP_IPC_LOCK`: only where memory is locked.
fn capabilities(is_locked: bool) -> Capabilities {
    let kept = Capabilities::none()
        .and(CapabilitySet::SYS_PTRACE)
        .and(CapabilitySet::DAC_OVERRIDE)
        .and(CapabilitySet::SYS_RESOURCE);
    match is_locked {
        true => kept.and(CapabilitySet::IPC_LOCK),
        false => kept,
    }
}

/// The system calls of an RNIC that works: those of its loop, those of the allocator and of the C library in rare paths, and those with which a process ends.
///
/// - No program is executed, no process and no thread is made.
/// - No memory becomes executable.
/// - Paths are opened from the root directory only: a descriptor of a directory, which a program could send along, leads nowhere.
/// - Sockets are made for datagrams of IP only, for groups that programs join and to ask for the MTU.
/// - Signals go to the process itself only: abort(3) sends itself one.
pub fn calls() -> Calls {
    let own = u64::from(std::process::id());
    let is = |index, mask, value| Argument { index, mask, value };
    let not_executable = [is(2, libc::PROT_EXEC as u64, 0)];
    let from_root = [is(0, INT, libc::AT_FDCWD as u32 as u64)];
    let datagrams = |family: i32| {
        [
            is(0, INT, family as u64),
            is(1, SOCKET_TYPE, libc::SOCK_DGRAM as u64),
        ]
    };
    let mut calls = Calls::none()
        // Packets, rings, messages.
        .and(&[
            libc::SYS_sendmsg,
            libc::SYS_recvmsg,
            libc::SYS_sendmmsg,
            libc::SYS_recvmmsg,
            libc::SYS_sendto,
            libc::SYS_recvfrom,
            libc::SYS_epoll_pwait2,
            libc::SYS_epoll_pwait,
            libc::SYS_epoll_ctl,
            libc::SYS_ppoll,
            libc::SYS_read,
            libc::SYS_write,
            libc::SYS_readv,
            libc::SYS_writev,
            libc::SYS_pread64,
            libc::SYS_pwrite64,
            libc::SYS_accept4,
            libc::SYS_accept,
            libc::SYS_bind,
            libc::SYS_connect,
            libc::SYS_shutdown,
            libc::SYS_getsockname,
            libc::SYS_getpeername,
            libc::SYS_setsockopt,
            libc::SYS_getsockopt,
            libc::SYS_close,
            libc::SYS_dup,
            libc::SYS_fcntl,
            libc::SYS_eventfd2,
            libc::SYS_timerfd_create,
            libc::SYS_timerfd_settime,
            libc::SYS_pidfd_open,
            libc::SYS_sched_yield,
        ])
        // Arenas, registered memory and the allocator's.
        .and(&[
            libc::SYS_memfd_create,
            libc::SYS_ftruncate,
            libc::SYS_fallocate,
            libc::SYS_fstat,
            libc::SYS_fstatfs,
            libc::SYS_newfstatat,
            libc::SYS_statx,
            libc::SYS_lseek,
            libc::SYS_munmap,
            libc::SYS_mremap,
            libc::SYS_madvise,
            libc::SYS_msync,
            libc::SYS_mlock,
            libc::SYS_mlock2,
            libc::SYS_munlock,
            libc::SYS_brk,
        ])
        // Of the C library and of Rust's.
        .and(&[
            libc::SYS_futex,
            libc::SYS_membarrier,
            libc::SYS_rseq,
            libc::SYS_set_robust_list,
            libc::SYS_sigaltstack,
            libc::SYS_rt_sigaction,
            libc::SYS_rt_sigprocmask,
            libc::SYS_rt_sigreturn,
            libc::SYS_restart_syscall,
            libc::SYS_getrandom,
            libc::SYS_clock_gettime,
            libc::SYS_clock_nanosleep,
            libc::SYS_nanosleep,
            libc::SYS_gettimeofday,
            libc::SYS_getcpu,
            libc::SYS_sched_getaffinity,
            libc::SYS_sysinfo,
            libc::SYS_uname,
            libc::SYS_getpid,
            libc::SYS_gettid,
            libc::SYS_getppid,
            libc::SYS_getuid,
            libc::SYS_geteuid,
            libc::SYS_getgid,
            libc::SYS_getegid,
            // Of the shell that removes what is left.
            libc::SYS_wait4,
            libc::SYS_waitid,
            libc::SYS_exit,
            libc::SYS_exit_group,
        ])
        .and_if(libc::SYS_ioctl, &[is(1, INT, libc::FIONBIO)])
        .and_if(libc::SYS_ioctl, &[is(1, INT, libc::SIOCGIFMTU)])
        .and_if(libc::SYS_mmap, &not_executable)
        .and_if(libc::SYS_mprotect, &not_executable)
        .and_if(libc::SYS_openat, &from_root)
        .and_if(libc::SYS_socket, &datagrams(libc::AF_INET))
        .and_if(libc::SYS_socket, &datagrams(libc::AF_INET6))
        .and_if(libc::SYS_tgkill, &[is(0, INT, own)])
        // Asking for a limit, not setting one.
        .and_if(libc::SYS_prlimit64, &[is(2, u64::MAX, 0)]);
    if cfg!(target_arch = "x86_64") {
        calls = calls.and(OLDER);
    }
    calls
}

/// Older forms of some calls, which newer machines do not have.
#[cfg(target_arch = "x86_64")]
const OLDER: &[libc::c_long] = &[
    // It has no descriptor of a directory.
    libc::SYS_open,
    libc::SYS_poll,
    libc::SYS_epoll_wait,
    libc::SYS_time,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[libc::c_long] = &[];
