//! The doorbells of librxe, which other threads ring than those that opened the device.
//!
//! librxe puts a request into a ring and calls write(2) with POST_SEND. The kernel takes that only from a thread with the very
//! credentials, compared as pointers, that opened the descriptor (`ib_uverbs_write`); `EACCES` is its answer to others, before it
//! has looked at anything. A process that CRIU has restored has credentials of its own for each thread, and the thread that
//! makes its context again is none of the program's. `ib_uverbs_ioctl` does not look at credentials, and its
//! `UVERBS_METHOD_INVOKE_WRITE` reaches the same handler. So librxe's calls of write(2) lead here: what write(2) refuses goes by
//! that ioctl, from then on at once.
//!
//! No other driver's library needs this: libibverbs itself uses the ioctl, and hardware is rung through mapped memory.

use std::ffi::{c_int, c_long, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use verbatim_got::Hook;

use super::uverbs::{
    ATTR_CORE_IN, ATTR_CORE_OUT, ATTR_WRITE_CMD, Attribute, Header, METHOD_INVOKE_WRITE, OBJECT_DEVICE,
    RDMA_DRIVER_RXE, RDMA_VERBS_IOCTL,
};

/// The library's file begins so.
const LIBRXE: &str = "librxe-rdmav";

static HOOKS: [Hook; 1] = [Hook::new(c"write", write as *const c_void)];

/// What is below: one C library for the process, as there is one libibverbs.
static BELOW: OnceLock<Below> = OnceLock::new();

/// Functions of the C library that librxe is bound to, which has an `errno` of its own.
#[derive(Debug)]
pub struct Below {
    pub write: unsafe extern "C" fn(c_int, *const c_void, usize) -> isize,
    pub ioctl: unsafe extern "C" fn(c_int, c_long, *mut c_void) -> c_int,
    pub errno_location: unsafe extern "C" fn() -> *mut c_int,
    /// write(2) has been refused, and will be.
    pub refused: AtomicBool,
}

/// Leads the doorbells of librxe here if it is loaded in the namespace of `library`, whose C library has those functions. An error says why
/// they cannot be.
///
/// # Safety
/// `library` is what dlmopen(3) gave, and not closed.
pub unsafe fn attach(library: NonNull<c_void>, below: impl FnOnce() -> Below) -> Result<(), String> {
    BELOW.get_or_init(below);
    // SAFETY: the caller's contract.
    let patched = unsafe { verbatim_got::patch_namespace(library, LIBRXE, &HOOKS) };
    patched.into_iter().try_for_each(|patched| match patched.entries {
        Ok(_) => Ok(()),
        Err(error) => Err(format!(
            "where {} calls write(2) cannot be changed: {error}",
            patched.path
        )),
    })
}

/// In the place of write(2) for librxe.
unsafe extern "C" fn write(fd: c_int, bytes: *const c_void, count: usize) -> isize {
    match BELOW.get() {
        // SAFETY: the caller's contract, which is that of write(2).
        Some(below) => unsafe { below.ring(fd, bytes, count) },
        None => -1,
    }
}

/// `struct ib_uverbs_cmd_hdr`, and what all commands with an answer begin with.
#[repr(C)]
struct Command {
    command: u32,
    in_words: u16,
    out_words: u16,
    response: u64,
}

/// The commands that are doorbells. None has a part of its driver's.
const POST_SEND: u32 = 28;
const POST_RECV: u32 = 29;
const POST_SRQ_RECV: u32 = 36;

/// `sizeof(struct ib_uverbs_cmd_hdr)`
const HEADER_BYTES: usize = 8;
const WORD_BYTES: u16 = 4;

/// `struct ib_uverbs_ioctl_hdr` with three attributes.
#[repr(C)]
struct InvokeWrite {
    header: Header,
    attribute: [Attribute; 3],
}

impl Below {
    /// What write(2) gives, with this C library's `errno`.
    ///
    /// # Safety
    /// That of write(2).
    unsafe fn ring(&self, fd: c_int, bytes: *const c_void, count: usize) -> isize {
        if !self.refused.load(Ordering::Relaxed) {
            // SAFETY: the caller's contract; `errno` is this thread's.
            let (written, errno) = unsafe {
                let written = (self.write)(fd, bytes, count);
                (written, *(self.errno_location)())
            };
            if written >= 0 || errno != libc::EACCES {
                return written;
            }
        }
        // SAFETY: the caller's contract.
        let Some(mut invoke) = (unsafe { invoke_write(bytes, count) }) else {
            // No doorbell.
            // SAFETY: the caller's contract.
            return unsafe { (self.write)(fd, bytes, count) };
        };
        // SAFETY: the kernel's structure, whose attributes lead to the command and to the room that it names.
        let failed = unsafe { (self.ioctl)(fd, RDMA_VERBS_IOCTL, (&raw mut invoke).cast()) };
        if failed != 0 {
            return -1;
        }
        self.refused.store(true, Ordering::Relaxed);
        isize::try_from(count).unwrap_or(isize::MAX)
    }
}

/// The same command for the ioctl; `None` if it is no doorbell.
///
/// # Safety
/// That of write(2); what is given leads to `bytes`.
unsafe fn invoke_write(bytes: *const c_void, count: usize) -> Option<InvokeWrite> {
    if count < size_of::<Command>() {
        return None;
    }
    // SAFETY: so many bytes can be read.
    let command = unsafe { bytes.cast::<Command>().read_unaligned() };
    if !matches!(command.command, POST_SEND | POST_RECV | POST_SRQ_RECV) {
        return None;
    }
    let body = bytes.wrapping_byte_add(HEADER_BYTES) as u64;
    let body_bytes = u16::try_from(count - HEADER_BYTES).ok()?;
    Some(InvokeWrite {
        header: Header {
            bytes: size_of::<InvokeWrite>() as u16,
            object: OBJECT_DEVICE,
            method: METHOD_INVOKE_WRITE,
            attributes: 3,
            reserved: 0,
            driver: RDMA_DRIVER_RXE,
            reserved_too: 0,
        },
        attribute: [
            Attribute::new(ATTR_WRITE_CMD, size_of::<u64>() as u16, command.command.into()),
            Attribute::new(ATTR_CORE_IN, body_bytes, body),
            Attribute::new(
                ATTR_CORE_OUT,
                command.out_words.checked_mul(WORD_BYTES)?,
                command.response,
            ),
        ],
    })
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    thread_local! {
        static ERRNO: Cell<c_int> = const { Cell::new(0) };
        /// What write(2) answers to commands, and what the ioctl does.
        static ANSWERS: Cell<(c_int, c_int)> = const { Cell::new((0, 0)) };
        static CALLED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    fn answer(errno: c_int) -> bool {
        if errno != 0 {
            ERRNO.set(errno);
        }
        errno == 0
    }

    unsafe extern "C" fn writes(fd: c_int, _: *const c_void, count: usize) -> isize {
        CALLED.with_borrow_mut(|called| called.push(format!("write {fd} {count}")));
        if answer(ANSWERS.get().0) {
            count as isize
        } else {
            -1
        }
    }

    unsafe extern "C" fn ioctls(fd: c_int, request: c_long, invoke: *mut c_void) -> c_int {
        // SAFETY: what `ring` gives, with attributes that lead to the test's command.
        let said = unsafe {
            let invoke = &*invoke.cast::<InvokeWrite>();
            let [command, input, output] = &invoke.attribute;
            let body = std::slice::from_raw_parts(input.data as *const u8, input.bytes.into());
            let header = &invoke.header;
            let of_driver = (header.bytes, header.object, header.method, header.driver);
            format!(
                "ioctl {fd} {request:#x} {of_driver:?} {} {body:?} {:#x}+{}",
                command.data, output.data, output.bytes
            )
        };
        CALLED.with_borrow_mut(|called| called.push(said));
        if answer(ANSWERS.get().1) { 0 } else { -1 }
    }

    unsafe extern "C" fn errno_location() -> *mut c_int {
        ERRNO.with(Cell::as_ptr)
    }

    fn below() -> Below {
        Below {
            write: writes,
            ioctl: ioctls,
            errno_location,
            refused: AtomicBool::new(false),
        }
    }

    /// POST_SEND of a queue pair, with room for an answer of one word at 0x1000.
    fn command(number: u32) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&number.to_ne_bytes());
        bytes[4..6].copy_from_slice(&8u16.to_ne_bytes());
        bytes[6..8].copy_from_slice(&1u16.to_ne_bytes());
        bytes[8..16].copy_from_slice(&0x1000u64.to_ne_bytes());
        bytes[16] = 77;
        bytes
    }

    /// What the caller sees, and what was called for it.
    fn ring(below: &Below, bytes: &[u8], write: c_int, ioctl: c_int) -> (isize, c_int, Vec<String>) {
        ANSWERS.set((write, ioctl));
        ERRNO.set(0);
        // SAFETY: bytes that can be read.
        let returned = unsafe { below.ring(3, bytes.as_ptr().cast(), bytes.len()) };
        (returned, ERRNO.get(), CALLED.take())
    }

    const SEND: &str = "ioctl 3 0xc0181b01 (72, 0, 0, 14) 28 [0, 16, 0, 0, 0, 0, 0, 0, 77, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0] 0x1000+4";

    #[test]
    fn what_write_refuses_goes_by_the_ioctl_and_then_at_once() {
        let below = below();
        let send = command(POST_SEND);
        assert_eq!(ring(&below, &send, 0, 0), (32, 0, vec!["write 3 32".to_owned()]));
        let (returned, _, called) = ring(&below, &send, libc::EACCES, 0);
        assert_eq!(
            (returned, called),
            (32, vec!["write 3 32".to_owned(), SEND.to_owned()])
        );
        let (returned, _, called) = ring(&below, &send, libc::EACCES, 0);
        assert_eq!(
            (returned, called),
            (32, vec![SEND.to_owned()]),
            "write is not tried again"
        );
    }

    #[test]
    fn what_the_kernel_says_of_a_command_is_said_to_the_driver() {
        let below = below();
        let send = command(POST_SEND);
        // Of write: nothing was looked at only where the answer is EACCES.
        assert_eq!(
            ring(&below, &send, libc::EINVAL, 0),
            (-1, libc::EINVAL, vec!["write 3 32".to_owned()])
        );
        let (returned, errno, called) = ring(&below, &send, libc::EACCES, libc::ENOMEM);
        assert_eq!((returned, errno, called.len()), (-1, libc::ENOMEM, 2));
    }

    #[test]
    fn what_is_no_doorbell_goes_by_write_alone() {
        let below = below();
        for bytes in [&command(24)[..], &command(POST_SEND)[..12], &[]] {
            let (returned, errno, called) = ring(&below, bytes, libc::EACCES, 0);
            assert_eq!((returned, errno), (-1, libc::EACCES));
            assert!(called.iter().all(|call| call.starts_with("write")), "{called:?}");
        }
    }
}
