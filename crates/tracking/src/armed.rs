//! A process with a userfaultfd of ours in it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::maps;
use crate::still::{alone, has_ended, refusal};
use crate::sys::ptrace::{self, Seized, Stop};
use crate::sys::uffd;

/// How long a process may take to stop, and to make two system calls.
const LIMIT: Duration = Duration::from_secs(2);

/// The instruction `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// The code segment of 64-bit programs.
const USER_CS: u64 = 0x33;

/// A process whose memory can be protected from here. Dropping it lets go of all that is protected; it may be dropped whatever the
/// process does.
#[derive(Debug)]
pub struct Armed {
    pid: u32,
    process: OwnedFd,
    uffd: OwnedFd,
}

impl Armed {
    /// Puts a userfaultfd into the process.
    pub fn arm(pid: u32) -> Result<Self, Error> {
        let process = ptrace::open(pid).map_err(Error::io("open a process"))?;
        let uffd = alone(|| put_in(pid, &process))?;
        uffd::set_up(uffd.as_fd()).map_err(Error::Refused)?;
        Ok(Self { pid, process, uffd })
    }

    /// The userfaultfd.
    pub fn uffd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }

    /// The mappings of the process, and the page map of the same memory.
    pub fn memory(&self) -> Result<(String, File), Error> {
        let text = maps::read(self.pid)?;
        let pagemap = self.pagemap()?;
        self.is_the_same()?;
        Ok((text, pagemap))
    }

    /// That of the memory that the process has now.
    fn pagemap(&self) -> Result<File, Error> {
        let path = format!("/proc/{}/pagemap", self.pid);
        File::open(path).map_err(Error::io("open the page map of a process"))
    }

    /// An error if the process has ended: its number may be another one's by now.
    fn is_there(&self) -> Result<(), Error> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut ended = [PollFd::new(&self.process, PollFlags::IN)];
        match poll(&mut ended, Some(&Timespec::default())) {
            Ok(0) | Err(_) => Ok(()),
            Ok(_) => Err(Error::Gone),
        }
    }

    /// An error if what is tracked is not the memory of the process any more.
    fn is_the_same(&self) -> Result<(), Error> {
        self.is_there()?;
        match uffd::has_memory(self.uffd.as_fd()) {
            true => Ok(()),
            // One that is ending has no memory, for some time before it has ended.
            false => maps::read(self.pid).and(Err(Error::Changed)),
        }
    }
}

/// Has the first thread of a process make a userfaultfd, takes a copy, and has it closed there.
#[cfg(target_arch = "x86_64")]
fn put_in(pid: u32, process: &OwnedFd) -> Result<OwnedFd, Error> {
    const FLAGS: u64 = uffd::USER_MODE_ONLY | (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    let gadget = system_call_instruction(pid)?;
    let mut thread = Stopped::stop(pid, &crate::Memory::open(pid)?)?;
    let made = thread.call(gadget, libc::SYS_userfaultfd, FLAGS)?;
    let Ok(descriptor) = i32::try_from(made) else {
        return Err(Error::Io {
            what: "read what a system call returned",
            source: io::ErrorKind::InvalidData.into(),
        });
    };
    if descriptor < 0 {
        thread.go_on()?;
        return Err(Error::Refused(io::Error::from_raw_os_error(-descriptor)));
    }
    let taken = ptrace::take(process, descriptor);
    let closed = thread.call(gadget, libc::SYS_close, descriptor as u64);
    thread.go_on()?;
    closed?;
    taken.map_err(Error::io("take the userfaultfd of a process"))
}

#[cfg(not(target_arch = "x86_64"))]
fn put_in(_: u32, _: &OwnedFd) -> Result<OwnedFd, Error> {
    Err(Error::Refused(io::ErrorKind::Unsupported.into()))
}

/// Where the process has an instruction that makes a system call.
fn system_call_instruction(pid: u32) -> Result<u64, Error> {
    let text = maps::read(pid)?;
    let memory = crate::Memory::open(pid)?;
    let mut mappings: Vec<_> = maps::parse(&text)
        .filter(|mapping| mapping.is_executable)
        .collect();
    mappings.retain(|mapping| mapping.name != "[vsyscall]");
    // The kernel's own first: it is small, and there in every program.
    mappings.sort_by_key(|mapping| mapping.name != "[vdso]");
    const PART: u64 = 64 << 10;
    for mapping in mappings {
        let mut from = mapping.range.start;
        while from < mapping.range.end {
            let to = mapping.range.end.min(from + PART);
            let mut bytes = vec![0; (to - from) as usize];
            memory.read(from..to, &mut bytes)?;
            if let Some(index) = bytes.windows(SYSCALL.len()).position(|window| window == SYSCALL) {
                return Ok(from + index as u64);
            }
            from = to;
        }
    }
    Err(Error::Io {
        what: "find an instruction that makes a system call",
        source: io::ErrorKind::NotFound.into(),
    })
}

/// A thread that has stopped between two instructions of its program, and goes on there whatever it is made to do.
#[cfg(target_arch = "x86_64")]
struct Stopped {
    thread: Seized,
    before: ptrace::Registers,
    mask: u64,
    until: Instant,
    /// It has gone on where it was.
    went_on: bool,
}

#[cfg(target_arch = "x86_64")]
impl Stopped {
    fn stop(pid: u32, memory: &crate::Memory) -> Result<Self, Error> {
        let until = Instant::now() + LIMIT;
        let mut thread = match Seized::seize(pid, true) {
            Err(error) if has_ended(&error) => return Err(Error::Gone),
            Err(error) => return Err(refusal(pid, error)?),
            Ok(thread) => thread,
        };
        thread.interrupt().map_err(Error::io("stop a process"))?;
        wait_for(&mut thread, until, Stop::Event)?;
        let mut before = thread
            .registers()
            .map_err(Error::io("read the registers of a process"))?;
        if before.cs != USER_CS {
            return Err(Error::ThirtyTwoBit);
        }
        before.rip = after_interruption(&thread, memory, before.rip);
        let mask = thread
            .signal_mask()
            .map_err(Error::io("read the signals of a process"))?;
        let stopped = Self {
            thread,
            before,
            mask,
            until,
            went_on: false,
        };
        // What comes meanwhile comes afterwards.
        stopped
            .thread
            .set_signal_mask(u64::MAX)
            .map_err(Error::io("hold the signals of a process back"))?;
        Ok(stopped)
    }

    /// Has it make a system call with one argument.
    fn call(&mut self, gadget: u64, number: i64, argument: u64) -> Result<i64, Error> {
        let mut registers = self.before;
        registers.rip = gadget;
        registers.rax = number as u64;
        registers.rdi = argument;
        // It is in no system call that would be begun again.
        registers.orig_rax = u64::MAX;
        let failed = Error::io("have a process make a system call");
        self.thread.set_registers(&registers).map_err(&failed)?;
        // To the call, and out of it.
        for _ in 0..2 {
            self.thread.go_to_system_call().map_err(&failed)?;
            wait_for_call(&mut self.thread, self.until)?;
        }
        let registers = self.thread.registers().map_err(&failed)?;
        Ok(registers.rax as i64)
    }

    /// Lets it go on where it was.
    fn go_on(mut self) -> Result<(), Error> {
        self.restore()
    }

    fn restore(&mut self) -> Result<(), Error> {
        let failed = Error::io("let a process go on");
        // The system call that it was in is begun again only on the way out of a stop like the first.
        self.thread.interrupt().map_err(&failed)?;
        self.thread.go_on().map_err(&failed)?;
        wait_for(&mut self.thread, Instant::now() + LIMIT, Stop::Event)?;
        self.thread.set_registers(&self.before).map_err(&failed)?;
        self.thread.set_signal_mask(self.mask).map_err(&failed)?;
        self.thread.detach().map_err(&failed)?;
        self.went_on = true;
        Ok(())
    }
}

#[cfg(target_arch = "x86_64")]
impl Drop for Stopped {
    fn drop(&mut self) {
        if !self.went_on {
            // It has failed on the way, and says why.
            let _ = self.restore();
        }
    }
}

/// Where a thread goes on that was stopped at `rip`. In a restartable sequence (rseq(2)) that is where the sequence is given up: the
/// kernel does not see that it was interrupted, since the thread makes its system calls elsewhere.
#[cfg(target_arch = "x86_64")]
fn after_interruption(thread: &Seized, memory: &crate::Memory, rip: u64) -> u64 {
    let given_up = || {
        // `struct rseq` has the address of a `struct rseq_cs` behind two u32, or 0; that has where it starts, how long it is, and
        // where it is given up, behind two u32.
        let sequence = memory
            .number(thread.restartable()? + 8)
            .filter(|address| *address != 0)?;
        let [start, length, abort] = [8, 16, 24].map(|offset| memory.number(sequence + offset));
        (rip.wrapping_sub(start?) < length?).then_some(abort?)
    };
    given_up().unwrap_or(rip)
}

/// Waits for a stop of this kind. A signal that comes first is let through to the thread, which stops again.
fn wait_for(thread: &mut Seized, until: Instant, wanted: Stop) -> Result<(), Error> {
    loop {
        match stop_of(thread, until)? {
            stop if stop == wanted => return Ok(()),
            _ => thread.go_on().map_err(Error::io("let a process go on"))?,
        }
    }
}

/// The same for a stop at a system call.
#[cfg(target_arch = "x86_64")]
fn wait_for_call(thread: &mut Seized, until: Instant) -> Result<(), Error> {
    loop {
        match stop_of(thread, until)? {
            Stop::SystemCall => return Ok(()),
            Stop::Event | Stop::Signal => thread
                .go_to_system_call()
                .map_err(Error::io("have a process make a system call"))?,
        }
    }
}

fn stop_of(thread: &mut Seized, until: Instant) -> Result<Stop, Error> {
    match thread.wait(until) {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(Error::Busy { tid: thread.tid() }),
        stop => stop.map_err(Error::io("wait for a process to stop")),
    }
}
