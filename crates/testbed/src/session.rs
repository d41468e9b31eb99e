//! Running a command in a machine, from this side of the port.

use crate::channel::{Deframer, FromGuest, PORTS, Request, ToGuest, encode};
use crate::error::{Error, Result};
use crate::state::VmRecord;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;
use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A command for a machine.
#[derive(Clone, Debug)]
pub struct Command {
    request: Request,
}

impl Command {
    /// A program and its arguments.
    pub fn new<S: Into<String>>(argv: impl IntoIterator<Item = S>) -> Self {
        Self {
            request: Request {
                argv: argv.into_iter().map(Into::into).collect(),
                ..Request::default()
            },
        }
    }

    /// With an environment variable.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.request.env.push((name.into(), value.into()));
        self
    }

    /// In a directory of the machine; `/` if none is set.
    pub fn directory(mut self, directory: impl Into<String>) -> Self {
        self.request.directory = Some(directory.into());
        self
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.request.argv.join(" "))
    }
}

/// A piece of what a command writes.
#[derive(Clone, Copy, Debug)]
pub enum Output<'a> {
    /// Standard output.
    Stdout(&'a [u8]),
    /// Standard error.
    Stderr(&'a [u8]),
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Exit status; 128 + N after signal N.
    pub code: i32,
    /// What it wrote to standard output.
    pub stdout: Vec<u8>,
    /// What it wrote to standard error.
    pub stderr: Vec<u8>,
}

/// A connection to a port of a machine. A command that runs when it is dropped is killed.
#[derive(Debug)]
pub struct Session<'a> {
    vm: &'a VmRecord,
    stream: UnixStream,
    number: u64,
    deframer: Deframer,
    /// Held while the port is in use: two clients of one port would wait for each other.
    _lock: OwnedFd,
}

impl<'a> Session<'a> {
    /// Connects to a free port of a machine.
    pub fn open(vm: &'a VmRecord) -> Result<Self> {
        for number in 0..PORTS {
            let path = vm.lock(number);
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
            let lock = open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(Error::file("open", &path))?;
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Self::connect(vm, number, lock),
                Err(Errno::WOULDBLOCK) => {}
                Err(errno) => return Err(Error::file("lock", &path)(errno)),
            }
        }
        Err(Error::Busy {
            name: vm.name.clone(),
            ports: PORTS,
        })
    }

    fn connect(vm: &'a VmRecord, port: usize, lock: OwnedFd) -> Result<Self> {
        let socket = vm.socket(port);
        let connect = || {
            let mut stream = UnixStream::connect(&socket)?;
            stream.set_nonblocking(true)?;
            // Ends what an earlier client may have left unfinished: see `channel`.
            stream.write_all(&[0])?;
            Ok(stream)
        };
        let stream = connect().map_err(|error: std::io::Error| match error.kind() {
            ErrorKind::ConnectionRefused | ErrorKind::NotFound => vm.ended(),
            _ => Error::file("connect to", &socket)(error),
        })?;
        Ok(Self {
            vm,
            stream,
            number: rand::random(),
            deframer: Deframer::default(),
            _lock: lock,
        })
    }

    /// Waits until the machine answers: it is up.
    pub fn hello(&mut self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        self.send(ToGuest::Hello, Some(deadline))?;
        match self.receive(Some(deadline))? {
            Some(_) => Ok(()),
            None => Err(Error::NotReady {
                name: self.vm.name.clone(),
                limit,
                console: self.vm.console_end(),
            }),
        }
    }

    /// Runs a command, gives its output away as it comes, and returns its exit status (128 + N after signal N). After
    /// `limit` it is killed.
    pub fn run(
        mut self,
        command: &Command,
        limit: Option<Duration>,
        mut output: impl FnMut(Output<'_>) -> std::io::Result<()>,
    ) -> Result<i32> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        self.send(ToGuest::Run(command.request.clone()), deadline)?;
        let mut tell = |piece: Output<'_>| output(piece).map_err(Error::io("pass on the command's output"));
        loop {
            match self.receive(deadline)? {
                Some(FromGuest::Stdout(bytes)) => tell(Output::Stdout(&bytes))?,
                Some(FromGuest::Stderr(bytes)) => tell(Output::Stderr(&bytes))?,
                Some(FromGuest::Ended(code)) => return Ok(code),
                Some(FromGuest::NotStarted(reason)) => {
                    return Err(Error::NotStarted {
                        name: self.vm.name.clone(),
                        program: command.request.argv.first().cloned().unwrap_or_default(),
                        reason,
                    });
                }
                Some(FromGuest::Hello) => {}
                None => {
                    return Err(Error::Timeout {
                        what: command.to_string(),
                        limit: limit.unwrap_or_default(),
                    });
                }
            }
        }
    }

    /// Runs a command and collects its output.
    pub fn collect(self, command: &Command, limit: Duration) -> Result<Ended> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let code = self.run(command, Some(limit), |piece| {
            match piece {
                Output::Stdout(bytes) => stdout.extend_from_slice(bytes),
                Output::Stderr(bytes) => stderr.extend_from_slice(bytes),
            }
            Ok(())
        })?;
        Ok(Ended { code, stdout, stderr })
    }

    fn send(&mut self, message: ToGuest, deadline: Option<Instant>) -> Result<()> {
        let bytes = encode(self.number, message);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match self.stream.write(rest) {
                Ok(length) => rest = &rest[length..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if !self.wait(PollFlags::OUT, deadline)? {
                        return Err(Error::NotReady {
                            name: self.vm.name.clone(),
                            limit: Duration::ZERO,
                            console: self.vm.console_end(),
                        });
                    }
                }
                Err(_) => return Err(self.vm.ended()),
            }
        }
        Ok(())
    }

    /// The next message of this session; `None` if there is none in time.
    fn receive(&mut self, deadline: Option<Instant>) -> Result<Option<FromGuest>> {
        let mut bytes = [0; 64 << 10];
        loop {
            while let Some(frame) = self.deframer.next::<FromGuest>() {
                if frame.session == self.number {
                    return Ok(Some(frame.message));
                }
            }
            if !self.wait(PollFlags::IN, deadline)? {
                return Ok(None);
            }
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(self.vm.ended()),
                Ok(length) => self.deframer.push(&bytes[..length]),
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(_) => return Err(self.vm.ended()),
            }
        }
    }

    /// Waits for the socket; `false` if nothing happened in time.
    fn wait(&self, flags: PollFlags, deadline: Option<Instant>) -> Result<bool> {
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let left = left
                .map(Timespec::try_from)
                .transpose()
                .map_err(|_| Error::Config("the time limit is too long".to_owned()))?;
            match poll(&mut [PollFd::new(&self.stream, flags)], left.as_ref()) {
                Ok(count) => return Ok(count > 0),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::io("wait for the machine")(errno)),
            }
        }
    }
}
