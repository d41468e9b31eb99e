//! Where a quiesced process waits: a word in a file of the runtime folder that it and its agent map.
//!
//! A futex and not a socket, since nothing that reaches out of a process may be open while CRIU freezes it. The word is
//! the generation of the instance's life; whoever waits has seen the old value, so a wake-up cannot be missed, also
//! when the waiter is restored on another host where the word has changed already.

use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;

use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::futex;

const BYTES: usize = 4096;

/// The mapped gate of one instance.
#[derive(Debug)]
pub struct Gate(NonNull<AtomicU32>);

// SAFETY: the word is atomic.
unsafe impl Send for Gate {}
// SAFETY: the word is atomic.
unsafe impl Sync for Gate {}

impl Gate {
    /// Maps the gate at `path`; the agent makes it first, with `create`.
    pub fn open(path: &Path, create: bool) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(create)
            .truncate(false)
            .open(path)?;
        if file.metadata()?.len() < BYTES as u64 {
            if !create {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the gate's file is too short",
                ));
            }
            file.set_len(BYTES as u64)?;
        }
        // SAFETY: a new mapping of a whole file, at an address that the kernel chooses.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )?
        };
        Ok(Self(
            NonNull::new(address.cast()).expect("mmap never returns the null page here"),
        ))
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: mapped until drop, aligned, and only ever used as an atomic.
        unsafe { self.0.as_ref() }
    }

    /// How often the gate was opened.
    pub fn generation(&self) -> u32 {
        self.word().load(SeqCst)
    }

    /// Waits until the generation is another one than `seen`.
    pub fn wait(&self, seen: u32) {
        while self.generation() == seen {
            // Interrupted, woken or changed meanwhile: the loop's condition decides.
            let _ = futex::wait(self.word(), futex::Flags::empty(), seen, None);
        }
    }

    /// Lets all who wait go on.
    pub fn open_up(&self) {
        self.word().fetch_add(1, SeqCst);
        // Waking fails only for a bad address, which this is not.
        let _ = futex::wake(self.word(), futex::Flags::empty(), i32::MAX as u32);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // SAFETY: mapped by `open` with this length; no reference outlives self.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_is_let_go_and_who_comes_late_does_not_wait() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gate");
        assert!(Gate::open(&path, false).is_err());
        let agent = Gate::open(&path, true).unwrap();
        let guest = Gate::open(&path, false).unwrap();
        let seen = guest.generation();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| guest.wait(seen));
            agent.open_up();
            waiter.join().unwrap();
        });
        guest.wait(seen);
        assert_eq!(guest.generation(), seen + 1);
    }
}
