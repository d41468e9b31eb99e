//! Where a quiesced process waits: a word in a file of the runtime folder that it and its agent map.
//!
//! A futex and not a socket, since nothing that reaches out of a process may be open while CRIU freezes it. The word is
//! the generation of the instance's life; whoever waits has seen the old value, so a wake-up cannot be missed, also
//! when the waiter is restored on another host where the word has changed already.
//!
//! The file belongs to the program, which can put something else in its place, or cut it off while the agent has it
//! mapped. So no link is followed, and the agent has the kernel read and write the word (`process_vm_readv(2)` on
//! itself): where a load or a store would end it with SIGBUS, that says EFAULT. The program itself just loads the word.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
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
            // Of a FIFO, opening it for writing would wait for nobody, but mapping it fails.
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
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

    /// Lets all who wait go on. Only the agent does this, so nobody else changes the word meanwhile.
    ///
    /// An error means that the program has cut its own gate off.
    pub fn open_up(&self) -> io::Result<()> {
        let next = self.read()?.wrapping_add(1);
        self.write(next)?;
        futex::wake(self.word(), futex::Flags::empty(), i32::MAX as u32)?;
        Ok(())
    }

    fn read(&self) -> io::Result<u32> {
        let mut value = 0u32;
        let (local, remote) = (part_of(&raw mut value), part_of(self.0.as_ptr()));
        // SAFETY: both parts are four bytes: a local variable, and the mapping, which the kernel checks.
        let copied = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
        whole(copied).map(|()| value)
    }

    fn write(&self, mut value: u32) -> io::Result<()> {
        let (local, remote) = (part_of(&raw mut value), part_of(self.0.as_ptr()));
        // SAFETY: as above.
        let copied = unsafe { libc::process_vm_writev(libc::getpid(), &local, 1, &remote, 1, 0) };
        whole(copied)
    }
}

fn part_of<T>(value: *mut T) -> libc::iovec {
    libc::iovec {
        iov_base: value.cast(),
        iov_len: size_of::<T>(),
    }
}

fn whole(copied: isize) -> io::Result<()> {
    match copied {
        4 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        _ => Err(io::Error::from_raw_os_error(libc::EFAULT)),
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
            agent.open_up().unwrap();
            waiter.join().unwrap();
        });
        guest.wait(seen);
        assert_eq!(guest.generation(), seen + 1);
    }
    #[test]
    fn a_program_cannot_end_the_agent_by_its_gate() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gate");
        let agent = Gate::open(&path, true).unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(0).unwrap();
        assert_eq!(agent.open_up().unwrap_err().raw_os_error(), Some(libc::EFAULT));
        file.set_len(BYTES as u64).unwrap();
        agent.open_up().unwrap();
        assert_eq!(agent.generation(), 1);
    }

    #[test]
    fn what_is_no_gate_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (victim, gate) = (folder.path().join("victim"), folder.path().join("gate"));
        std::fs::write(&victim, [7; BYTES]).unwrap();
        std::os::unix::fs::symlink(&victim, &gate).unwrap();
        for create in [false, true] {
            let refused = Gate::open(&gate, create).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::ELOOP));
        }
        assert_eq!(std::fs::read(&victim).unwrap(), [7; BYTES]);
        std::fs::remove_file(&gate).unwrap();
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mknodat(rustix::fs::CWD, &gate, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(Gate::open(&gate, true).is_err());
    }
}
