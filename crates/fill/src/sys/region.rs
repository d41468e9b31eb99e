//! The memory that guardian and worker share: all that the next worker must know. It consists of atomics only, so that every
//! access is defined whoever else has it mapped; only one process, the worker, writes most of it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

/// Events that the log has room for, between two snapshots.
pub const LOG_SLOTS: u64 = 4096;
/// Words of one snapshot. Memory is taken only for those that are used.
const SNAPSHOT_WORDS: usize = 64 << 20;
/// The longest text, in bytes.
const TEXT_WORDS: usize = 64;

/// One event. The kernel writes `message` itself (`struct uffd_msg`).
#[derive(Debug)]
#[repr(C)]
pub struct Slot {
    /// Place in the log, plus one: what is in a slot with another number is old.
    sequence: AtomicU64,
    /// Which task's event.
    task: AtomicU64,
    message: [AtomicU64; 4],
}

/// The fixed part.
#[derive(Debug)]
#[repr(C)]
pub struct Header {
    /// Process number of the guardian.
    pub guardian: AtomicI32,
    /// Process number of the worker.
    pub worker: AtomicI32,
    /// Workers that were started in the place of one that died.
    pub restarts: AtomicU64,
    /// Not 0: everything ends.
    pub ending: AtomicU32,
    /// Not 0: the restore is refused, `text` says why.
    pub refused: AtomicU32,
    /// What CRIU has sent last, a task's number or the end: 0 if nothing is to be done about it.
    pub criu_word: AtomicU32,
    criu_byte: AtomicU32,
    /// `struct cmsghdr` and a descriptor, as the kernel writes them.
    criu_control: [AtomicU64; 3],
    /// First descriptor number of tasks; those of sockets lie just below.
    pub base: AtomicU32,
    /// How many tasks there is room for.
    pub room: AtomicU32,
    /// Faults that were answered.
    pub faults: AtomicU64,
    /// Faults that were answered with a page of zeros.
    pub zeros: AtomicU64,
    /// Pages that were dropped because nothing was mapped there any more.
    pub unplaced: AtomicU64,
    /// Events that have taken effect.
    pub log: AtomicU64,
    /// Snapshots that were made; the lowest bit says in which half the latest is.
    pub snapshots: AtomicU64,
    text: [AtomicU64; TEXT_WORDS],
    slots: [Slot; LOG_SLOTS as usize],
}

/// The whole of it, mapped.
#[derive(Debug)]
pub struct Region {
    header: &'static Header,
    halves: [&'static [AtomicU64]; 2],
}

impl Region {
    /// A new one, all zeros. It stays mapped as long as the process lives; children share it.
    pub fn new() -> io::Result<Self> {
        let header_bytes = size_of::<Header>().next_multiple_of(1 << 20);
        let half_bytes = SNAPSHOT_WORDS * 8;
        let bytes = header_bytes + 2 * half_bytes;
        // A file in memory takes only what is used, also where the kernel does not overcommit.
        let memory = rustix::fs::memfd_create("verbatim-fill", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&memory, bytes as u64)?;
        // SAFETY: a new mapping at an address that the kernel chooses; nothing else is there.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::SHARED,
                &memory,
                0,
            )
        }?;
        let base = address.cast::<u8>();
        let half = |index: usize| {
            // SAFETY: the words lie within the mapping, which is page-aligned, never unmapped and zero at first; `AtomicU64`
            // has no invalid values, and nobody has a reference to it as anything else.
            unsafe {
                let start = base.add(header_bytes + index * half_bytes);
                std::slice::from_raw_parts(start.cast::<AtomicU64>(), SNAPSHOT_WORDS)
            }
        };
        Ok(Self {
            // SAFETY: as above; the header is made of atomics only and fits into `header_bytes`.
            header: unsafe { &*base.cast::<Header>() },
            halves: [half(0), half(1)],
        })
    }

    /// The fixed part.
    pub fn header(&self) -> &Header {
        self.header
    }

    /// Takes memory for the fixed part and keeps it, so that the kernel never fails to write an event into it.
    pub fn lock(&self) {
        let header = std::ptr::from_ref(self.header);
        // SAFETY: the range is mapped; its contents do not change. Where locking is not allowed it is populated, at least.
        unsafe {
            libc::madvise(
                header.cast_mut().cast(),
                size_of::<Header>(),
                libc::MADV_POPULATE_WRITE,
            );
            libc::mlock(header.cast(), size_of::<Header>());
        }
    }

    /// Half 0 or 1 of the snapshots.
    pub fn half(&self, index: u64) -> &[AtomicU64] {
        self.halves[(index & 1) as usize]
    }
}

impl Header {
    /// Puts down why, cut off at 500 bytes.
    pub fn set_text(&self, text: &str) {
        let bytes = &text.as_bytes()[..text.len().min((TEXT_WORDS - 1) * 8)];
        self.text[0].store(bytes.len() as u64, Ordering::Relaxed);
        for (word, chunk) in self.text[1..].iter().zip(bytes.chunks(8)) {
            let mut eight = [0; 8];
            eight[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(eight), Ordering::Relaxed);
        }
    }

    /// What was put down.
    pub fn text(&self) -> String {
        let length = self.text[0].load(Ordering::Relaxed) as usize;
        let words = self.text[1..].iter();
        let mut bytes: Vec<u8> = words
            .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes())
            .collect();
        bytes.truncate(length);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn slot(&self, index: u64) -> &Slot {
        &self.slots[(index % LOG_SLOTS) as usize]
    }

    /// Puts an event of our own at `index` of the log. It counts once [`Header::log`] is greater.
    pub fn put_event(&self, index: u64, task: u32, message: [u64; 4]) {
        let slot = self.slot(index);
        // First the message is made void: a worker that dies here leaves nothing behind that looks like an event.
        slot.message[0].store(0, Ordering::SeqCst);
        slot.task.store(task.into(), Ordering::SeqCst);
        slot.sequence.store(index + 1, Ordering::SeqCst);
        for (to, word) in slot.message.iter().zip(message).rev() {
            to.store(word, Ordering::SeqCst);
        }
    }

    /// Has the kernel write the next message of `uffd` to `index` of the log. `false` if there is none.
    pub fn read_event(&self, index: u64, task: u32, uffd: BorrowedFd<'_>) -> io::Result<bool> {
        self.put_event(index, task, [0; 4]);
        let message = &self.slot(index).message;
        // SAFETY: the kernel writes at most the 32 bytes of `message`, which are atomics in shared memory.
        let read = unsafe {
            libc::read(
                uffd.as_raw_fd(),
                message.as_ptr().cast_mut().cast(),
                size_of_val(message),
            )
        };
        match read {
            32 => Ok(true),
            -1 => match io::Error::last_os_error() {
                error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(false),
                error => Err(error),
            },
            _ => Ok(false),
        }
    }

    /// Task and message at `index` of the log, if one was written there.
    pub fn event(&self, index: u64) -> Option<(u32, [u64; 4])> {
        let slot = self.slot(index);
        let message: [u64; 4] = std::array::from_fn(|word| slot.message[word].load(Ordering::SeqCst));
        let current = slot.sequence.load(Ordering::SeqCst) == index + 1 && message[0] != 0;
        current.then(|| (slot.task.load(Ordering::SeqCst) as u32, message))
    }

    /// Receives the next word from CRIU into [`Header::criu_word`], which must be 0. `None` if there is none yet, else how
    /// many bytes came: 0 if CRIU closed the connection.
    pub fn receive_word(&self, criu: BorrowedFd<'_>) -> io::Result<Option<usize>> {
        // SAFETY: the kernel writes at most 4 bytes to an atomic in shared memory.
        let received = unsafe {
            libc::recv(
                criu.as_raw_fd(),
                self.criu_word.as_ptr().cast(),
                4,
                libc::MSG_DONTWAIT,
            )
        };
        outcome(received)
    }

    /// Receives the byte that follows a task's number, and the descriptor beside it, see [`Header::descriptor`].
    pub fn receive_descriptor(&self, criu: BorrowedFd<'_>) -> io::Result<Option<usize>> {
        let mut byte = libc::iovec {
            iov_base: self.criu_byte.as_ptr().cast(),
            iov_len: 1,
        };
        // SAFETY: all zeros is a message header without anything.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut byte;
        message.msg_iovlen = 1;
        message.msg_control = self.criu_control.as_ptr().cast_mut().cast();
        message.msg_controllen = size_of_val(&self.criu_control) as _;
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        // SAFETY: the kernel writes one byte and the 24 bytes of control data to atomics in shared memory, and to `message`.
        let received = unsafe { libc::recvmsg(criu.as_raw_fd(), &raw mut message, flags) };
        outcome(received)
    }

    /// The descriptor that came, which is not used up before [`Header::descriptor_done`].
    pub fn descriptor(&self) -> Option<i32> {
        let [length, kind, descriptor] = &self.criu_control;
        let rights = (libc::SOL_SOCKET as u64) | (libc::SCM_RIGHTS as u64) << 32;
        let came = length.load(Ordering::SeqCst) == 20 && kind.load(Ordering::SeqCst) == rights;
        came.then(|| descriptor.load(Ordering::SeqCst) as u32 as i32)
    }

    /// What came from CRIU has taken effect. A worker that dies in between leaves the number of a task that has come already,
    /// without a descriptor.
    pub fn descriptor_done(&self) {
        self.criu_control[0].store(0, Ordering::SeqCst);
        self.criu_word.store(0, Ordering::SeqCst);
    }
}

fn outcome(received: isize) -> io::Result<Option<usize>> {
    match usize::try_from(received) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(_) => match io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(None),
            error => Err(error),
        },
    }
}
