//! The caller's side.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use verbatim_seqpacket::Socket;

use crate::PROGRAM_NAME;
use crate::config::Config;
use crate::protocol::{Phase, Request, Status};

/// A worker that is being replaced answers within ms; one that maps a large cache takes longer.
const ANSWER: Duration = Duration::from_secs(30);

/// What can go wrong for the caller.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The helper processes could not be started.
    #[error("the processes that fill the memory cannot be started: {0}")]
    Start(String),
    /// They run, and do not answer.
    #[error("the processes that fill the memory do not answer at {} within {within:?}", control.display())]
    Silent {
        /// Their socket.
        control: PathBuf,
        /// How long they were waited for.
        within: Duration,
    },
    /// The phase that was waited for did not come.
    #[error("the memory is not {wanted:?} in time but {found:?}")]
    Late {
        /// What was waited for.
        wanted: Phase,
        /// What it was at the deadline.
        found: Phase,
    },
    /// The phase that was waited for cannot come any more, or [`Filler::end`] came too early.
    #[error("the memory is {0:?}")]
    Phase(Phase),
    /// The operating system refused.
    #[error("{call} failed at {}", control.display())]
    Os {
        /// The control socket.
        control: PathBuf,
        /// What was tried.
        call: &'static str,
        /// Its error.
        #[source]
        source: io::Error,
    },
}

/// The helper processes of one restore.
#[derive(Debug, Clone)]
pub struct Filler {
    control: PathBuf,
}

enum Connected {
    To(Socket),
    /// They have ended, in an orderly way or not.
    Nobody,
}

impl Filler {
    /// Starts them, as `program` under the name [`PROGRAM_NAME`]. `lazy-pages.socket` listens when this returns.
    pub fn start(program: &Path, config: &Config) -> Result<Self, Error> {
        let output = Command::new(program)
            .arg0(PROGRAM_NAME)
            .args(config.arguments())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .output()
            .map_err(|error| Error::Start(format!("{}: {error}", program.display())))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(Error::Start(format!("{} ({})", said.trim(), output.status)));
        }
        let filler = Self {
            control: config.control.clone(),
        };
        // From its answer on there are two processes, of which one may die.
        match filler.status()?.phase {
            Phase::Waiting => Ok(filler),
            phase => Err(Error::Phase(phase)),
        }
    }

    /// Those that an earlier agent has started; `None` if there are none, or they have ended as they should. If they died the phase
    /// is [`Phase::Lost`].
    pub fn find(control: &Path) -> Result<Option<Self>, Error> {
        let filler = Self {
            control: control.to_owned(),
        };
        Ok(control.exists().then_some(filler))
    }

    /// Path of the control socket.
    pub fn control(&self) -> &Path {
        &self.control
    }

    fn error(&self, call: &'static str, source: io::Error) -> Error {
        Error::Os {
            control: self.control.clone(),
            call,
            source,
        }
    }

    fn connect(&self) -> Result<Connected, Error> {
        match Socket::connect(&self.control) {
            Ok(socket) => Ok(Connected::To(socket)),
            Err(verbatim_seqpacket::Error::Closed) => Ok(Connected::Nobody),
            Err(verbatim_seqpacket::Error::Os { source, .. })
                if matches!(
                    source.kind(),
                    io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
                ) =>
            {
                Ok(Connected::Nobody)
            }
            Err(error) => Err(self.error("connect", io::Error::other(error))),
        }
    }

    /// What is known of processes that are gone.
    fn gone(&self) -> Status {
        let filled = Config::filled_mark(&self.control).exists() || !self.control.exists();
        let lost =
            "guardian and worker were killed, both at once; pages that they had not filled read as zeros";
        Status {
            phase: if filled {
                Phase::Filled
            } else {
                Phase::Lost(lost.to_owned())
            },
            tasks: 0,
            pages: 0,
            pages_left: 0,
            faults: 0,
            zero_faults: 0,
            unplaced: 0,
            worker_restarts: 0,
            stalled: None,
            processes: [0, 0],
        }
    }

    fn ask(&self, request: Request) -> Result<(Option<Socket>, Status), Error> {
        let deadline = Instant::now() + ANSWER;
        while Instant::now() < deadline {
            let Connected::To(socket) = self.connect()? else {
                return Ok((None, self.gone()));
            };
            // A worker that died closes the connection, and the next one answers.
            if socket.send(&request, &[]).is_ok()
                && readable(socket.as_fd(), Some(deadline))
                && let Ok(received) = socket.recv::<Status>()
            {
                return Ok((Some(socket), received.message));
            }
        }
        Err(Error::Silent {
            control: self.control.clone(),
            within: ANSWER,
        })
    }

    /// How it stands.
    pub fn status(&self) -> Result<Status, Error> {
        Ok(self.ask(Request::Status)?.1)
    }

    /// Has them map the cache, so that no time goes by for that later. It takes 10 ms or so per GiB. Not needed.
    pub fn prepare(&self) -> Result<(), Error> {
        self.ask(Request::Prepare).map(|_| ())
    }

    /// Tells of each change.
    pub fn watch(&self) -> Result<Watch, Error> {
        let mut watch = Watch {
            filler: self.clone(),
            socket: None,
            known: None,
            next: None,
        };
        watch.connect()?;
        Ok(watch)
    }

    /// Waits until the phase is `wanted`, or a later one of those that are passed on the way to [`Phase::Filled`].
    pub fn wait(&self, wanted: &Phase, deadline: Instant) -> Result<Status, Error> {
        let rank = |phase: &Phase| match phase {
            Phase::Waiting => 0,
            Phase::Restoring => 1,
            Phase::Filling => 2,
            Phase::Filled => 3,
            Phase::Refused(_) | Phase::Lost(_) => 4,
        };
        let mut watch = self.watch()?;
        let mut found = Phase::Waiting;
        while let Some(status) = watch.next(Some(deadline))? {
            if std::mem::discriminant(&status.phase) == std::mem::discriminant(wanted) {
                return Ok(status);
            }
            match rank(&status.phase) {
                4 => return Err(Error::Phase(status.phase)),
                now if now > rank(wanted) => return Ok(status),
                _ => found = status.phase,
            }
        }
        Err(Error::Late {
            wanted: wanted.clone(),
            found,
        })
    }

    /// After [`Phase::Filled`]: they end. Returns when they are gone.
    pub fn end(self) -> Result<(), Error> {
        self.finish(Request::End)
    }

    /// They end at once, whatever is left, and this returns when they are gone. The tasks must have been killed: those that live
    /// read zeros from then on.
    pub fn give_up(self) -> Result<(), Error> {
        self.finish(Request::GiveUp)
    }

    fn finish(&self, request: Request) -> Result<(), Error> {
        let deadline = Instant::now() + ANSWER;
        while Instant::now() < deadline {
            // Known by more than their numbers before they are told.
            let before = self.status()?;
            let processes: Vec<OwnedFd> = before
                .processes
                .iter()
                .filter_map(|pid| pidfd_open(Pid::from_raw(*pid)?, PidfdFlags::empty()).ok())
                .collect();
            let (connection, status) = self.ask(request)?;
            if connection.is_none() {
                if request == Request::End && status.phase != Phase::Filled {
                    return Err(Error::Phase(status.phase));
                }
                for path in [&self.control, &Config::filled_mark(&self.control)] {
                    let _ = std::fs::remove_file(path);
                }
                return Ok(());
            }
            if request == Request::End && status.phase != Phase::Filled {
                return Err(Error::Phase(status.phase));
            }
            for process in processes {
                readable(process.as_fd(), Some(deadline));
            }
        }
        Err(Error::Silent {
            control: self.control.clone(),
            within: ANSWER,
        })
    }
}

/// Whether there is something to read before the deadline.
fn readable(fd: BorrowedFd<'_>, deadline: Option<Instant>) -> bool {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = left.map(|left| Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        });
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], timeout.as_ref()) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(_) => {}
        }
    }
}

/// Tells of changes of the phase. Its descriptor ([`AsFd`]) is readable when [`Watch::next`] has something to do, also when both
/// processes have died; it is another one after each [`Watch::next`].
#[derive(Debug)]
pub struct Watch {
    filler: Filler,
    socket: Option<Socket>,
    known: Option<Phase>,
    next: Option<Status>,
}

impl Watch {
    fn connect(&mut self) -> Result<(), Error> {
        let (socket, status) = self.filler.ask(Request::Watch)?;
        self.socket = socket;
        self.next = Some(status);
        Ok(())
    }

    /// The next phase: the present one at first. `None` if none came before the deadline. After [`Phase::Lost`], or
    /// the orderly end, it is the same again and again.
    pub fn next(&mut self, deadline: Option<Instant>) -> Result<Option<Status>, Error> {
        loop {
            if let Some(status) = self.next.take()
                && (self.known.as_ref() != Some(&status.phase) || self.socket.is_none())
            {
                self.known = Some(status.phase.clone());
                return Ok(Some(status));
            }
            let Some(socket) = &self.socket else {
                self.connect()?;
                continue;
            };
            if !readable(socket.as_fd(), deadline) {
                return Ok(None);
            }
            match socket.recv::<Status>() {
                Ok(received) => self.next = Some(received.message),
                // A worker died.
                Err(_) => self.connect()?,
            }
        }
    }
}

impl AsFd for Watch {
    /// # Panics
    /// After [`Watch::next`] has said that they are gone.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_ref().expect("the processes are gone").as_fd()
    }
}
