//! ptrace(2) of single threads, by PTRACE_SEIZE: nobody sees a signal.
//!
//! Whoever traces is a thread. What it has seized is let go when that thread ends, whatever happened.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// `PTRACE_O_SUSPEND_SECCOMP`: filters of the tracee say nothing meanwhile.
const SUSPEND_SECCOMP: u64 = 1 << 21;
/// `PTRACE_O_TRACESYSGOOD`.
const SYSTEM_CALL_GOOD: u64 = 1;
/// A stop at a system call, with the option above.
const SYSTEM_CALL_STOP: i32 = libc::SIGTRAP | 0x80;
/// `PTRACE_EVENT_STOP`.
const EVENT_STOP: i32 = 128;
/// How often a stop is looked for: waitpid(2) has no limit of time.
const LOOK_AGAIN: Duration = Duration::from_micros(20);

/// The registers of a thread (`struct user_regs_struct`).
#[cfg(target_arch = "x86_64")]
pub type Registers = libc::user_regs_struct;

/// A seized thread. Dropping it lets go of it where it has stopped.
pub struct Seized {
    tid: i32,
    /// What it has stopped with, and gets when it is let go: a signal that was being delivered.
    signal: i32,
    stopped: bool,
}

/// Why a thread has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// At a system call, before or after it.
    SystemCall,
    /// As it was asked to, or since its process is stopped.
    Event,
    /// With a signal, which it gets when it goes on.
    Signal,
}

fn request(what: libc::c_uint, tid: i32, address: u64, data: u64) -> io::Result<()> {
    // SAFETY: none of the requests that come here takes a pointer in `address` or `data`.
    let done = unsafe { libc::ptrace(what, tid, address, data) };
    match done {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// What has become of a thread.
struct Change {
    is_stop: bool,
    /// Of a stop: the signal, and above it the event.
    status: i32,
}

/// A change of these kinds that a thread has gone through, if there is one; ESRCH if there is no such thread to wait for any more.
fn changed(tid: i32, kinds: i32) -> io::Result<Option<Change>> {
    loop {
        // SAFETY: all bits zero are a `siginfo_t`.
        let mut information: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let options = kinds | libc::__WALL | libc::WNOHANG;
        // SAFETY: `information` is a `siginfo_t` to write to.
        let done = unsafe { libc::waitid(libc::P_PID, tid.unsigned_abs(), &raw mut information, options) };
        if done == -1 {
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => continue,
                Some(libc::ECHILD) => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
                _ => return Err(error),
            }
        }
        // SAFETY: waitid fills these fields in, or leaves them zero.
        let (pid, status) = unsafe { (information.si_pid(), information.si_status()) };
        return Ok((pid != 0).then_some(Change {
            is_stop: matches!(information.si_code, libc::CLD_TRAPPED | libc::CLD_STOPPED),
            status,
        }));
    }
}

impl Seized {
    /// Seizes a thread, which runs on.
    pub fn seize(tid: u32, suspend_seccomp: bool) -> io::Result<Self> {
        let tid = tid.cast_signed();
        let options = SYSTEM_CALL_GOOD | if suspend_seccomp { SUSPEND_SECCOMP } else { 0 };
        request(libc::PTRACE_SEIZE, tid, 0, options)?;
        Ok(Self {
            tid,
            signal: 0,
            stopped: false,
        })
    }

    /// Its number.
    pub fn tid(&self) -> u32 {
        self.tid.unsigned_abs()
    }

    /// Asks it to stop.
    pub fn interrupt(&self) -> io::Result<()> {
        request(libc::PTRACE_INTERRUPT, self.tid, 0, 0)
    }

    /// Waits until it has stopped. An error of the kind `TimedOut` if it does not until then, and ESRCH if it has ended.
    pub fn wait(&mut self, until: Instant) -> io::Result<Stop> {
        loop {
            // Only looked at: the end of a process is its parent's to hear of, also where that is us.
            let Some(found) = changed(self.tid, libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT)? else {
                if Instant::now() >= until {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                std::thread::sleep(LOOK_AGAIN);
                continue;
            };
            if !found.is_stop {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            let Some(stop) = changed(self.tid, libc::WSTOPPED)? else {
                // It was killed in between.
                continue;
            };
            self.stopped = true;
            self.signal = 0;
            return Ok(match (stop.status & 0xff, stop.status >> 8) {
                (SYSTEM_CALL_STOP, 0) => Stop::SystemCall,
                (_, EVENT_STOP) => Stop::Event,
                (signal, _) => {
                    self.signal = signal;
                    Stop::Signal
                }
            });
        }
    }

    fn go(&mut self, how: libc::c_uint) -> io::Result<()> {
        let signal = std::mem::take(&mut self.signal);
        self.stopped = false;
        request(how, self.tid, 0, signal as u64)
    }

    /// Lets it go on, seized as it is.
    pub fn go_on(&mut self) -> io::Result<()> {
        self.go(libc::PTRACE_CONT)
    }

    /// Lets it go on to its next system call, or out of the one that it is in.
    pub fn go_to_system_call(&mut self) -> io::Result<()> {
        self.go(libc::PTRACE_SYSCALL)
    }

    /// Lets go of it: it goes on, or stands still with the others of its process if that is stopped.
    pub fn detach(&mut self) -> io::Result<()> {
        self.go(libc::PTRACE_DETACH)
    }

    /// Its registers, while it has stopped.
    #[cfg(target_arch = "x86_64")]
    pub fn registers(&self) -> io::Result<Registers> {
        let mut registers = std::mem::MaybeUninit::<Registers>::zeroed();
        // SAFETY: PTRACE_GETREGS fills in a `struct user_regs_struct`; `address` is not used.
        let done = unsafe { libc::ptrace(libc::PTRACE_GETREGS, self.tid, 0, registers.as_mut_ptr()) };
        if done == -1 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it was zeroed, and all its fields are integers.
        Ok(unsafe { registers.assume_init() })
    }

    /// Changes them.
    #[cfg(target_arch = "x86_64")]
    pub fn set_registers(&self, registers: &Registers) -> io::Result<()> {
        // SAFETY: PTRACE_SETREGS reads a `struct user_regs_struct`; `address` is not used.
        let done = unsafe { libc::ptrace(libc::PTRACE_SETREGS, self.tid, 0, &raw const *registers) };
        match done {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }

    /// Where its `struct rseq` is (rseq(2)), if it has one.
    pub fn restartable(&self) -> Option<u64> {
        let mut found = RestartableSequences::default();
        let size = size_of::<RestartableSequences>();
        // SAFETY: PTRACE_GET_RSEQ_CONFIGURATION writes no more bytes than `address` says, which is the size of `found`.
        let done = unsafe { libc::ptrace(PTRACE_GET_RSEQ_CONFIGURATION, self.tid, size, &raw mut found) };
        (done > 0 && found.pointer != 0).then_some(found.pointer)
    }

    /// Which signals it blocks.
    pub fn signal_mask(&self) -> io::Result<u64> {
        let mut mask = 0u64;
        // SAFETY: PTRACE_GETSIGMASK writes as many bytes as `address` says, which is the size of `mask`.
        let done = unsafe { libc::ptrace(PTRACE_GETSIGMASK, self.tid, size_of::<u64>(), &raw mut mask) };
        match done {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(mask),
        }
    }

    /// Changes that.
    pub fn set_signal_mask(&self, mask: u64) -> io::Result<()> {
        // SAFETY: PTRACE_SETSIGMASK reads as many bytes as `address` says, which is the size of `mask`.
        let done = unsafe { libc::ptrace(PTRACE_SETSIGMASK, self.tid, size_of::<u64>(), &raw const mask) };
        match done {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}

/// `struct ptrace_rseq_configuration`.
#[repr(C)]
#[derive(Default)]
struct RestartableSequences {
    pointer: u64,
    size: u32,
    signature: u32,
    flags: u32,
    pad: u32,
}

const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
const PTRACE_SETSIGMASK: libc::c_uint = 0x420b;

impl Drop for Seized {
    fn drop(&mut self) {
        if self.stopped {
            let _ = self.go(libc::PTRACE_DETACH);
        }
    }
}

/// A process, by which it is known for good.
pub fn open(pid: u32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid.cast_signed()).ok_or(io::ErrorKind::NotFound)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// A copy of one of its descriptors.
pub fn take(process: &OwnedFd, descriptor: i32) -> io::Result<OwnedFd> {
    Ok(pidfd_getfd(process, descriptor, PidfdGetfdFlags::empty())?)
}
