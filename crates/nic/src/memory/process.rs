//! Memory that is not in a file: process_vm_readv(2) and process_vm_writev(2) on the process that owns the context.

use std::cell::RefCell;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};

use crate::error::Refused;

/// The process's memory cannot be reached: it is gone, or the address is not mapped so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unreachable;

#[derive(Debug)]
struct Process {
    pid: Pid,
    /// Says whether the process still lives, since its number may be given to another.
    pidfd: OwnedFd,
}

/// The process whose memory a context's regions mean. A context changes hands when its connection is handed over
/// (`Request::AttachContext`), and its regions follow.
#[derive(Debug, Default)]
pub struct Owner(RefCell<Option<Process>>);

impl Owner {
    /// From now on it is this process, as the kernel named it beside a message.
    pub fn set(&self, pid: i32) -> Result<(), Refused> {
        // Number 0 stands for a sender in a PID namespace that this process cannot see. Such a program can register
        // files, but no other memory.
        let process = match Pid::from_raw(pid) {
            None => None,
            Some(pid) => {
                let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())
                    .map_err(|errno| Refused::os("pidfd_open", errno))?;
                Some(Process { pid, pidfd })
            }
        };
        *self.0.borrow_mut() = process;
        Ok(())
    }

    /// Whether there is a process to read from.
    pub fn is_visible(&self) -> bool {
        self.0.borrow().is_some()
    }

    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), Unreachable> {
        let local = libc::iovec {
            iov_base: out.as_mut_ptr().cast(),
            iov_len: out.len(),
        };
        // SAFETY: the local vector is a buffer of this process that may be written; a remote one that is not mapped is
        // an error, not a fault.
        self.transfer(address, out.len(), |pid, remote| unsafe {
            libc::process_vm_readv(pid, &local, 1, remote, 1, 0)
        })
    }

    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), Unreachable> {
        let local = libc::iovec {
            iov_base: data.as_ptr().cast_mut().cast(),
            iov_len: data.len(),
        };
        // SAFETY: the local vector is only read; see `read`.
        self.transfer(address, data.len(), |pid, remote| unsafe {
            libc::process_vm_writev(pid, &local, 1, remote, 1, 0)
        })
    }

    fn transfer(
        &self,
        address: u64,
        length: usize,
        call: impl FnOnce(libc::pid_t, *const libc::iovec) -> isize,
    ) -> Result<(), Unreachable> {
        let process = self.0.borrow();
        let Some(process) = process.as_ref() else {
            return Err(Unreachable);
        };
        let mut poll = [PollFd::new(&process.pidfd, PollFlags::IN)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        match rustix::event::poll(&mut poll, Some(&now)) {
            Ok(0) => {}
            _ => return Err(Unreachable),
        }
        let remote = libc::iovec {
            iov_base: address as *mut _,
            iov_len: length,
        };
        match call(process.pid.as_raw_nonzero().get(), &remote) {
            done if done == length as isize => Ok(()),
            _ => Err(Unreachable),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_memory_is_read_and_written_and_a_dead_process_is_not() {
        let owner = Owner::default();
        let mut bytes = *b"before";
        let address = bytes.as_mut_ptr() as u64;
        let mut out = [0; 6];
        assert_eq!(owner.read(address, &mut out), Err(Unreachable));
        owner.set(std::process::id() as i32).unwrap();
        owner.read(address, &mut out).unwrap();
        assert_eq!(&out, b"before");
        owner.write(address, b"after!").unwrap();
        assert_eq!(&std::hint::black_box(bytes), b"after!");
        assert_eq!(owner.read(8, &mut out), Err(Unreachable));

        let mut child = std::process::Command::new("true").spawn().unwrap();
        owner.set(child.id() as i32).unwrap();
        child.wait().unwrap();
        assert_eq!(owner.read(address, &mut out), Err(Unreachable));
    }
}
