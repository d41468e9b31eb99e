//! Processes that share their table of descriptors, and nothing else.

use std::io;

/// Who returns from [`clone_with_files`].
#[derive(Debug)]
pub enum Cloned {
    /// The caller: number of the new process.
    Parent(i32),
    /// The new process.
    Child,
}

/// Makes a process that has a copy of this one's memory and the same table of descriptors. Only for a process with one thread.
pub fn clone_with_files() -> io::Result<Cloned> {
    let flags = libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: without CLONE_VM the child has its own copy of everything, its stack too, like after fork(2), and this process has
    // one thread, so that no lock is held by a thread that the child lacks. The arguments that stand in another order on other
    // machines are 0.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Cloned::Child),
        pid => Ok(Cloned::Parent(pid as i32)),
    }
}

/// fork(2). Only for a process with one thread. `true` in the child.
pub fn fork() -> io::Result<bool> {
    // SAFETY: the process has one thread.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(pid == 0),
    }
}

/// Signals that ask a process to end, or stop it at a terminal, do nothing from here on.
pub fn ignore_signals() {
    let signals = [
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTERM,
        libc::SIGPIPE,
        libc::SIGUSR1,
        libc::SIGUSR2,
        libc::SIGALRM,
        libc::SIGTSTP,
        libc::SIGTTIN,
        libc::SIGTTOU,
        libc::SIGXCPU,
        libc::SIGXFSZ,
        libc::SIGVTALRM,
        libc::SIGPROF,
    ];
    for signal in signals {
        // SAFETY: no handler is installed.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Ends at once, without anything that Rust or libc do at the end of a process.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: it does not return.
    unsafe { libc::_exit(code) }
}
