//! Objects that a helper has made at the new host, by which the process goes on with its own library.
//!
//! Half of a context is the kernel's, and hangs on its descriptor, which can be handed over. The other half is memory of the library's, which
//! cannot. But what that half holds follows from what the program asked for and what the kernel answered. So the helper notes commands and
//! answers ([`record`]), and where the process makes its context again, its library asks for the same objects and is answered from the notes
//! ([`replay`]), on the descriptor that was handed over:
//!
//! ```text
//!  helper, while the program still runs elsewhere              the restored process
//!   library ─ioctl─► here ─ioctl─► kernel: objects, pins        library ─ioctl─► here      (a noted command: the noted answer)
//!                     └─► commands, answers, descriptors ─────────────────────────┘
//!                                                               library ─mmap─► kernel     (its queues, for the first time)
//! ```
//!
//! - What makes a context is noted: itself, protection domains, regions, channels, completion and shared receive queues ([`table`]). What
//!   else is asked for the kernel does, at both. So queue pairs are the process's: the kernel names it as who made them, by which agents
//!   know whose they are.
//! - rxe maps a queue once. The helper's library is given anonymous memory in its place.
//! - Events name objects by addresses of the maker's. The helper gives the kernel numbers that are no address, and what is read of a descriptor
//!   of events is translated ([`tokens`]).
//! - Whatever differs from the notes ends with an error, and nothing of it is used: then all is made anew, as without a helper.
//!
//! Only for drivers of which nothing else is the library's to tell the kernel ([`MADE_AHEAD`]): where queues are the library's memory, as those
//! of hardware are, they would have to move along.
//!
//! The libraries' calls lead here from the first time on that it is needed in a process, and then for good.

mod record;
mod replay;
mod table;
#[cfg(test)]
mod tests;
mod tokens;

use std::cell::RefCell;
use std::ffi::{c_int, c_long, c_void};
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use libc::off_t;
use verbatim_channel::ahead::MadeAhead;
use verbatim_got::Hook;

use self::record::Recorder;
use self::replay::Replay;
use super::library::Library;
use super::uverbs::{Command, RDMA_DRIVER_RXE, RDMA_VERBS_IOCTL};

/// Drivers of the kernel's whose libraries can go on with what another process has made.
const MADE_AHEAD: [u32; 1] = [RDMA_DRIVER_RXE];

/// The files of the libraries begin so.
const LIBIBVERBS: &str = "libibverbs.so";
const LIBRXE: &str = "librxe-rdmav";

static COMMANDS: [Hook; 2] = [
    Hook::new(c"ioctl", ioctl as *const c_void),
    Hook::new(c"read", read as *const c_void),
];
static MAPPINGS: [Hook; 1] = [Hook::new(c"mmap", mmap as *const c_void)];

/// One C library for the process, as there is one libibverbs.
static BELOW: OnceLock<Below> = OnceLock::new();

/// Functions of the C library that the libraries are bound to, which has an `errno` of its own.
#[derive(Debug)]
pub struct Below {
    pub ioctl: unsafe extern "C" fn(c_int, c_long, *mut c_void) -> c_int,
    pub read: unsafe extern "C" fn(c_int, *mut c_void, usize) -> isize,
    pub mmap: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, off_t) -> *mut c_void,
    pub errno_location: unsafe extern "C" fn() -> *mut c_int,
}

thread_local! {
    /// What becomes of this thread's commands.
    static NOW: RefCell<Now> = const { RefCell::new(Now::Asked) };
}

/// What becomes of commands.
enum Now {
    /// The kernel is asked.
    Asked,
    /// It is asked, and its answers are noted.
    Noted(Recorder),
    /// They have been noted.
    Answered(Replay),
}

/// Whether the calling thread's commands are noted or answered here, so that the libraries' calls have to lead here.
pub fn is_needed() -> bool {
    NOW.with_borrow(|now| !matches!(now, Now::Asked))
}

/// Leads the libraries' calls here. To be called when drivers are loaded.
pub fn attach(library: &Library) -> Result<(), String> {
    let (namespace, below) = library.below()?;
    BELOW.get_or_init(|| below);
    for (prefix, hooks) in [(LIBIBVERBS, &COMMANDS[..]), (LIBRXE, &MAPPINGS[..])] {
        // SAFETY: what dlmopen(3) gave, and never closed.
        let patched = unsafe { verbatim_got::patch_namespace(namespace, prefix, hooks) };
        for patched in patched {
            patched.entries.map_err(|error| {
                format!(
                    "where {} asks the kernel cannot be changed: {error}",
                    patched.path
                )
            })?;
        }
    }
    Ok(())
}

/// What the calling thread's commands lead to while this exists.
struct Until;

impl Until {
    fn begin(now: Now) -> Self {
        NOW.set(now);
        Self
    }

    fn end(self) -> Now {
        NOW.replace(Now::Asked)
    }
}

impl Drop for Until {
    fn drop(&mut self) {
        NOW.set(Now::Asked);
    }
}

/// Commands and answers of what `make` has made at one device, with the descriptors; an error says why another process cannot go on with it.
pub fn noted<T>(make: impl FnOnce() -> T) -> (T, Noted) {
    let until = Until::begin(Now::Noted(Recorder::default()));
    let made = make();
    (made, Noted(until))
}

/// The notes of what was made, while more is done.
pub struct Noted(Until);

impl Noted {
    /// The notes, and the descriptors of the context. The context is `id`; `memory` is the file that is registered.
    pub fn finish(self, id: u32, memory: Option<(u64, u64)>) -> Result<(MadeAhead, Vec<OwnedFd>), String> {
        match self.0.end() {
            Now::Noted(recorder) => recorder.finish(id, memory),
            _ => unreachable!("nobody else changes what the thread's commands lead to"),
        }
    }
}

/// Has `make` make what was made ahead, and nothing else. An error says what was another: then what `make` has is not to be used.
pub fn answered<T>(
    ahead: MadeAhead,
    descriptors: Vec<OwnedFd>,
    make: impl FnOnce() -> Result<T, String>,
) -> Result<T, String> {
    let until = Until::begin(Now::Answered(Replay::new(ahead, descriptors)));
    let made = make();
    let Now::Answered(replay) = until.end() else {
        unreachable!("nobody else changes what the thread's commands lead to")
    };
    let ended = replay.finish();
    let made = made.map_err(|error| match &ended {
        Err(differs) => format!("{differs} ({error})"),
        Ok(()) => error,
    })?;
    ended.map(|()| made)
}

/// In the place of ioctl(2) for libibverbs.
unsafe extern "C" fn ioctl(fd: c_int, request: c_long, argument: *mut c_void) -> c_int {
    let Some(below) = BELOW.get() else { return -1 };
    // SAFETY: the caller's contract, which is that of ioctl(2).
    let ask = || unsafe { (below.ioctl)(fd, request, argument) };
    if request != RDMA_VERBS_IOCTL {
        return ask();
    }
    let done = NOW.try_with(|now| {
        let mut now = now.try_borrow_mut().ok()?;
        // SAFETY: libibverbs calls, with a command that is its own for that time.
        let mut command = unsafe { Command::at(argument) };
        match &mut *now {
            Now::Asked => None,
            // SAFETY: as above; the kernel has answered what is read.
            Now::Noted(recorder) => Some(unsafe { recorder.note(fd, &mut command, ask) }),
            // SAFETY: as above.
            Now::Answered(replay) => match unsafe { replay.answer(fd, &mut command) }? {
                Ok(()) => Some(0),
                Err(errno) => {
                    // SAFETY: this thread's.
                    unsafe { *(below.errno_location)() = errno };
                    Some(-1)
                }
            },
        }
    });
    done.ok().flatten().unwrap_or_else(ask)
}

/// In the place of read(2) for libibverbs, which reads events.
unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, count: usize) -> isize {
    let Some(below) = BELOW.get() else { return -1 };
    // SAFETY: the caller's contract, which is that of read(2).
    let got = unsafe { (below.read)(fd, buffer, count) };
    if let Ok(got) = usize::try_from(got)
        && got >= size_of::<u64>()
    {
        let first = buffer.cast::<u64>();
        // SAFETY: so many bytes were read into it.
        unsafe {
            if let Some(known) = tokens::address(first.read_unaligned()) {
                first.write_unaligned(known);
            }
        }
    }
    got
}

/// In the place of mmap(2) for librxe.
unsafe extern "C" fn mmap(
    at: *mut c_void,
    bytes: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    let Some(below) = BELOW.get() else {
        return libc::MAP_FAILED;
    };
    let noted = NOW.try_with(|now| {
        let now = now.try_borrow().ok()?;
        matches!(&*now, Now::Noted(recorder) if recorder.is_of(fd)).then_some(())
    });
    if noted.ok().flatten().is_none() {
        // SAFETY: the caller's contract, which is that of mmap(2).
        return unsafe { (below.mmap)(at, bytes, protection, flags, fd, offset) };
    }
    // Whoever goes on with the queue maps it, which can be done once.
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: new memory, and, as long as the queue, room for its first word.
    unsafe {
        let memory = (below.mmap)(at, bytes, protection, flags, -1, 0);
        if memory != libc::MAP_FAILED && bytes >= size_of::<u32>() {
            memory.cast::<u32>().write(LOG2_ELEMENT_BYTES);
        }
        memory
    }
}

/// `log2_elem_size` of `struct rxe_queue_buf`: librxe looks whether a completion fits into an entry.
const LOG2_ELEMENT_BYTES: u32 = 7;
