//! System calls that a thread of another process is made to make.

use std::io;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::maps;
use crate::still::{has_ended, refusal};
use crate::sys::ptrace::{self, Seized, Stop};

/// How long a process may take to stop, and to make a few system calls.
const LIMIT: Duration = Duration::from_secs(2);

/// The instruction `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// The code segment of 64-bit programs.
const USER_CS: u64 = 0x33;

/// Where the process has an instruction that makes a system call.
fn system_call_instruction(pid: u32, memory: &crate::Memory) -> Result<u64, Error> {
    let text = maps::read(pid)?;
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
    // Of one that has ended meanwhile nothing could be read.
    maps::read(pid)?;
    Err(Error::Io {
        what: "find an instruction that makes a system call",
        source: io::ErrorKind::NotFound.into(),
    })
}

/// The first thread of a process, which has stopped between two instructions of its program, and goes on there whatever it is made to do.
pub struct Stopped {
    thread: Seized,
    /// Where it can make a system call.
    gadget: u64,
    before: ptrace::Registers,
    mask: u64,
    until: Instant,
    /// It has gone on where it was.
    went_on: bool,
}

impl Stopped {
    /// Stops it. Only in a thread that ends soon ([`crate::still::alone`]).
    pub fn stop(pid: u32) -> Result<Self, Error> {
        let memory = crate::Memory::open(pid)?;
        let gadget = system_call_instruction(pid, &memory)?;
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
        before.rip = after_interruption(&thread, &memory, before.rip);
        let mask = thread
            .signal_mask()
            .map_err(Error::io("read the signals of a process"))?;
        let stopped = Self {
            thread,
            gadget,
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

    /// Has it make a system call; returns what the kernel returns.
    pub fn call(&mut self, number: i64, arguments: [u64; 3]) -> Result<i64, Error> {
        let mut registers = self.before;
        registers.rip = self.gadget;
        registers.rax = number as u64;
        [registers.rdi, registers.rsi, registers.rdx] = arguments;
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

    /// The same of one that makes a descriptor; returns its number.
    pub fn make_descriptor(&mut self, number: i64, arguments: [u64; 3]) -> Result<i32, Error> {
        let made = self.call(number, arguments)?;
        match i32::try_from(made) {
            Ok(descriptor) if descriptor >= 0 => Ok(descriptor),
            Ok(error) => Err(Error::Refused(io::Error::from_raw_os_error(-error))),
            Err(_) => Err(Error::Io {
                what: "read what a system call returned",
                source: io::ErrorKind::InvalidData.into(),
            }),
        }
    }

    /// Lets it go on where it was.
    pub fn go_on(mut self) -> Result<(), Error> {
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
