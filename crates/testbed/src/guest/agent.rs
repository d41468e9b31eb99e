//! The agent in a machine: a thread per port, each of which runs one command at a time.
//!
//! A port of which the host's end is closed is readable at once and for ever, so it is watched by its edges (epoll(7),
//! EPOLLET): the kernel wakes a port's waiters when data comes and when the host's end is opened or closed.

use crate::channel::{CHUNK, Deframer, Frame, FromGuest, PORTS, Request, ToGuest, encode, port_name};
use crate::error::{Error, Result};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use std::convert::Infallible;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

const PORT: u64 = 0;
const STDOUT: u64 = 1;
const STDERR: u64 = 2;
const CHILD: u64 = 3;

/// Serves all ports; returns only if one cannot be served any more.
pub(super) fn main() -> Result<Infallible> {
    let (sender, ends) = std::sync::mpsc::channel();
    for number in 0..PORTS {
        let mut agent = Agent::open(number)?;
        let sender = sender.clone();
        std::thread::spawn(move || {
            let Err(error) = agent.serve();
            // The receiver lives as long as this process.
            let _ = sender.send(error);
        });
    }
    let error = ends.recv().expect("a sender is kept here");
    Err(Error::io("serve a port")(error))
}

/// The device of a port. There is no udev: the kernel's own name for it is found by the one that QEMU gave it.
fn device(number: usize) -> Result<PathBuf> {
    let class = Path::new("/sys/class/virtio-ports");
    let wanted = port_name(number);
    let entries = fs::read_dir(class).map_err(Error::file("read", class))?;
    let found = entries
        .flatten()
        .find(|entry| fs::read_to_string(entry.path().join("name")).is_ok_and(|name| name.trim() == wanted));
    match found {
        Some(entry) => Ok(Path::new("/dev").join(entry.file_name())),
        None => Err(Error::Config(format!("there is no virtio port {wanted}"))),
    }
}

/// Why a command's run ended.
enum End {
    Exited(ExitStatus),
    /// The client went away; what a later one has said already.
    Abandoned(Option<Frame<ToGuest>>),
}

struct Agent {
    port: File,
    epoll: OwnedFd,
    deframer: Deframer,
    /// Whose command runs or ran last.
    session: u64,
}

impl Agent {
    fn open(number: usize) -> Result<Self> {
        let path = device(number)?;
        let open = || {
            let port = File::options()
                .read(true)
                .write(true)
                .custom_flags(libc::O_NONBLOCK)
                .open(&path)?;
            let epoll = epoll::create(CreateFlags::CLOEXEC)?;
            epoll::add(
                &epoll,
                &port,
                EventData::new_u64(PORT),
                EventFlags::IN | EventFlags::ET,
            )?;
            Ok::<_, io::Error>((port, epoll))
        };
        let (port, epoll) = open().map_err(Error::file("open", &path))?;
        Ok(Self {
            port,
            epoll,
            deframer: Deframer::default(),
            session: 0,
        })
    }

    fn serve(&mut self) -> io::Result<Infallible> {
        loop {
            self.wait()?;
            self.read()?;
            let mut next = self.deframer.next();
            while let Some(frame) = next {
                next = self.answer(frame)?.or_else(|| self.deframer.next());
            }
        }
    }

    /// Does what a client asks for; returns what came meanwhile and is still to be answered.
    fn answer(&mut self, frame: Frame<ToGuest>) -> io::Result<Option<Frame<ToGuest>>> {
        self.session = frame.session;
        match frame.message {
            ToGuest::Hello => self.send(FromGuest::Hello)?,
            ToGuest::Run(request) => match start(&request) {
                Err(error) => self.send(FromGuest::NotStarted(error.to_string()))?,
                Ok(mut child) => match self.attend(&mut child)? {
                    End::Exited(status) => self.send(FromGuest::Ended(code(status)))?,
                    End::Abandoned(next) => return Ok(next),
                },
            },
        }
        Ok(None)
    }

    /// Passes on a command's output until it ends or nobody wants it any more.
    fn attend(&mut self, child: &mut Child) -> io::Result<End> {
        let pid = Pid::from_child(child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        let mut stdout = child.stdout.take().expect("stdout is piped");
        let mut stderr = child.stderr.take().expect("stderr is piped");
        rustix::io::ioctl_fionbio(&stdout, true)?;
        rustix::io::ioctl_fionbio(&stderr, true)?;
        for (fd, token) in [
            (stdout.as_fd(), STDOUT),
            (stderr.as_fd(), STDERR),
            (pidfd.as_fd(), CHILD),
        ] {
            epoll::add(&self.epoll, fd, EventData::new_u64(token), EventFlags::IN)?;
        }
        loop {
            let events = self.wait()?;
            for (token, closed) in events {
                match token {
                    STDOUT if !self.pass(&mut stdout, FromGuest::Stdout)? => {
                        epoll::delete(&self.epoll, &stdout)?;
                    }
                    STDERR if !self.pass(&mut stderr, FromGuest::Stderr)? => {
                        epoll::delete(&self.epoll, &stderr)?;
                    }
                    CHILD => {
                        let status = child.wait()?;
                        // What a process that lives on in the background writes later is nobody's.
                        while self.pass(&mut stdout, FromGuest::Stdout)? && readable(&stdout)? {}
                        while self.pass(&mut stderr, FromGuest::Stderr)? && readable(&stderr)? {}
                        return Ok(End::Exited(status));
                    }
                    PORT => {
                        self.read()?;
                        let next = self.deframer.next::<ToGuest>();
                        // A client that was replaced before we looked is as gone as one that hung up.
                        if closed || next.is_some() {
                            // Both fail only if there is nothing left to kill.
                            let _ = kill_process_group(pid, Signal::KILL);
                            child.wait()?;
                            return Ok(End::Abandoned(next));
                        }
                    }
                    _ => {}
                }
            }
        }
    }

    /// Sends one piece of what can be read; `false` at its end.
    fn pass(&mut self, from: &mut impl Read, message: impl Fn(Vec<u8>) -> FromGuest) -> io::Result<bool> {
        let mut piece = vec![0; CHUNK];
        match from.read(&mut piece) {
            Ok(0) => Ok(false),
            Ok(length) => {
                piece.truncate(length);
                self.send(message(piece))?;
                Ok(true)
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                Ok(true)
            }
            Err(error) => Err(error),
        }
    }

    /// Waits for events: their tokens, and whether the other end is closed.
    fn wait(&self) -> io::Result<Vec<(u64, bool)>> {
        let mut events = Vec::with_capacity(4);
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let told = events.iter().map(|event: &epoll::Event| {
            // Copied: the kernel's structure is packed.
            let (data, flags) = (event.data, event.flags);
            (data.u64(), flags.contains(EventFlags::HUP))
        });
        Ok(told.collect())
    }

    /// Takes in all that has come.
    fn read(&mut self) -> io::Result<()> {
        let mut bytes = [0; 4096];
        loop {
            match self.port.read(&mut bytes) {
                Ok(0) => return Ok(()),
                Ok(length) => self.deframer.push(&bytes[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends a message, or drops it if nobody is there.
    fn send(&mut self, message: FromGuest) -> io::Result<()> {
        let bytes = encode(self.session, message);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match self.port.write(rest) {
                Ok(length) => rest = &rest[length..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let mut fds = [PollFd::new(&self.port, PollFlags::OUT)];
                    poll(&mut fds, None)?;
                    if fds[0].revents().contains(PollFlags::HUP) {
                        return Ok(());
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn start(request: &Request) -> io::Result<Child> {
    let (program, arguments) = request
        .argv
        .split_first()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no command"))?;
    Command::new(program)
        .args(arguments)
        .envs(request.env.iter().map(|(name, value)| (name, value)))
        .current_dir(request.directory.as_deref().unwrap_or("/"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
}

fn readable(fd: &impl AsFd) -> io::Result<bool> {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    let now = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    Ok(poll(&mut fds, Some(&now))? > 0 && fds[0].revents().contains(PollFlags::IN))
}

fn code(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}
