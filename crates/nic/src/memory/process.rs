//! Memory that is not in a file: `/proc/PID/mem` (proc_pid_mem(5)) of the process that owns the context.
//!
//! The open file stands for the address space that the process had then, not for the process's number. So when the
//! process ends or calls execve(2) nothing is reached any more: neither whoever gets the number next, nor the program
//! that is executed, which may have more rights than the one that registered its memory.

use std::cell::RefCell;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};
use verbatim_jail::procfs;
use verbatim_seqpacket::{Credentials, Process};

/// The process's memory cannot be reached: it is gone, or the address is not mapped so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unreachable;

/// The process whose memory a context's regions mean. A context changes hands when its connection is handed over
/// (`Request::AttachContext`), and its regions follow.
#[derive(Debug, Default)]
pub struct Owner {
    memory: RefCell<Option<OwnedFd>>,
    process: RefCell<Option<Process>>,
}

impl Owner {
    /// From now on it is this process, as the kernel named it beside a message. One whose memory this process may not
    /// reach can register files, but no other memory.
    pub fn set(&self, credentials: Credentials, process: Process) {
        let memory = open_memory(credentials, &process).inspect_err(|error| {
            tracing::debug!(pid = credentials.pid, %error, "only files of this process can be registered");
        });
        *self.memory.borrow_mut() = memory.ok();
        *self.process.borrow_mut() = Some(process);
    }

    /// The process's number, if it can be seen and has not ended.
    pub fn pid(&self) -> Option<i32> {
        self.process.borrow().as_ref()?.pid()
    }

    /// Whether there is a process to read from.
    pub fn is_visible(&self) -> bool {
        self.memory.borrow().is_some()
    }

    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), Unreachable> {
        let length = out.len();
        self.transfer(length, |memory| rustix::io::pread(memory, out, address))
    }

    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), Unreachable> {
        self.transfer(data.len(), |memory| rustix::io::pwrite(memory, data, address))
    }

    fn transfer(
        &self,
        length: usize,
        call: impl FnOnce(&OwnedFd) -> rustix::io::Result<usize>,
    ) -> Result<(), Unreachable> {
        let memory = self.memory.borrow();
        let memory = memory.as_ref().ok_or(Unreachable)?;
        match call(memory) {
            Ok(done) if done == length => Ok(()),
            _ => Err(Unreachable),
        }
    }
}

fn open_memory(credentials: Credentials, process: &Process) -> rustix::io::Result<OwnedFd> {
    // Number 0 stands for a sender in a PID namespace that this process cannot see.
    if credentials.pid <= 0 {
        return Err(rustix::io::Errno::SRCH);
    }
    let folder = procfs::path(&credentials.pid.to_string());
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let memory = rustix::fs::open(format!("{folder}/mem"), flags, Mode::empty())?;
    // It may have executed a program of another user since it sent the message: the memory would be that program's. Its
    // folder belongs to the user that it runs as, and to root if it may not be looked into.
    if rustix::fs::stat(&folder)?.st_uid != credentials.uid {
        return Err(rustix::io::Errno::PERM);
    }
    // As long as the process has not ended, what was opened under its number is its own.
    match process.pid() {
        Some(_) => Ok(memory),
        None => Err(rustix::io::Errno::SRCH),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Child, Command, Stdio};

    fn credentials(pid: u32) -> Credentials {
        Credentials {
            pid: pid as i32,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
        }
    }

    fn set(owner: &Owner, process: Credentials) {
        owner.set(process, Process::open(process));
    }

    #[test]
    fn own_memory_is_read_and_written_and_a_dead_process_is_not() {
        let owner = Owner::default();
        let mut bytes = *b"before";
        let address = bytes.as_mut_ptr() as u64;
        let mut out = [0; 6];
        assert_eq!(owner.read(address, &mut out), Err(Unreachable));
        set(&owner, credentials(std::process::id()));
        owner.read(address, &mut out).unwrap();
        assert_eq!(&out, b"before");
        assert_eq!(owner.pid(), Some(std::process::id() as i32));
        owner.write(address, b"after!").unwrap();
        assert_eq!(&std::hint::black_box(bytes), b"after!");
        for wrong in [8, u64::MAX, u64::MAX - 8, 1 << 63] {
            assert_eq!(owner.read(wrong, &mut out), Err(Unreachable));
        }

        let mut child = Command::new("true").spawn().unwrap();
        set(&owner, credentials(child.id()));
        child.wait().unwrap();
        assert_eq!(owner.read(address, &mut out), Err(Unreachable));
        assert_eq!(owner.pid(), None);
    }

    #[test]
    fn a_number_that_has_become_anothers_opens_nothing() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let ended = Process::open(credentials(child.id()));
        drop(child.stdin.take());
        child.wait().unwrap();
        // As if the kernel had given the number to this process.
        let owner = Owner::default();
        owner.set(credentials(std::process::id()), ended);
        assert!(!owner.is_visible() && owner.pid().is_none());
    }

    /// A shell that waits for a line and then becomes another program, which does the same.
    fn becomes_another() -> Child {
        let script = "echo ready; read line; exec sh -c 'echo ready; read line'";
        let mut shell = Command::new("sh");
        let piped = shell.args(["-c", script]).stdin(Stdio::piped());
        piped.stdout(Stdio::piped()).spawn().unwrap()
    }

    fn stack(pid: u32) -> u64 {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let line = maps.lines().find(|line| line.ends_with("[stack]")).unwrap();
        let end = line.split(['-', ' ']).nth(1).unwrap();
        u64::from_str_radix(end, 16).unwrap() - 64
    }

    #[test]
    fn what_a_process_executes_is_out_of_reach() {
        let mut child = becomes_another();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut input = child.stdin.take().unwrap();
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let owner = Owner::default();
        set(&owner, credentials(child.id()));
        let mut bytes = [0; 8];
        owner.read(stack(child.id()), &mut bytes).unwrap();

        writeln!(input).unwrap();
        output.read_line(&mut line).unwrap();
        let there = stack(child.id());
        assert_eq!(owner.read(there, &mut bytes), Err(Unreachable));
        assert_eq!(owner.write(there, &[1; 8]), Err(Unreachable));
        writeln!(input).unwrap();
        assert!(child.wait().unwrap().success(), "nothing was written there");
    }

    #[test]
    fn a_process_of_another_user_is_not_the_one_that_asked() {
        let owner = Owner::default();
        let mut asker = credentials(std::process::id());
        asker.uid += 1;
        set(&owner, asker);
        assert!(!owner.is_visible());
    }
}
