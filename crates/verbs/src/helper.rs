//! The helper thread: sleeps until the agent orders something, or an RNIC says something that nobody asked for.
//!
//! One per process, started when the first device is opened. All signals are blocked in it, so that the program's
//! handlers run where they always did. Where there is no agent it looks for one whenever a device is opened. When an agent
//! goes away, it looks for it again with growing delay and settles the sessions that cannot go on without it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use verbatim_channel::{Answer, GATE_NAME, Gate, Greeting, MAX_LONG_BYTES, MovedEndpoint, Order, VERSIONS};
use verbatim_seqpacket::{Error, Socket};

use crate::backend::soft::program_name;
use crate::process::Process;
use crate::session::{SessionError, Sessions, error_answer};
use crate::watch::Watch;
use crate::{held, nap, sys};

/// Enough for the encoding of a long road map.
const STACK_BYTES: usize = 512 << 10;
const FIRST_DELAY: Duration = Duration::from_millis(1);
/// A process whose turn is about to come must not sleep long; one that waits for an agent to be installed may.
const MAX_DELAY_QUIESCED: Duration = Duration::from_millis(20);
const MAX_DELAY: Duration = Duration::from_secs(1);
/// How long a drained session waits for an agent that went away.
const GRACE: Duration = Duration::from_secs(10);

/// The running thread.
#[derive(Debug)]
pub struct Handle {
    /// The process that has it: a forked child has none.
    pid: u32,
    stop: Arc<AtomicBool>,
}

/// Starts the thread, if it does not run; if it does, without an agent, it looks for one.
pub fn ensure(process: &Arc<Process>) {
    let mut helper = process.helper.lock();
    let pid = std::process::id();
    if helper.as_ref().is_some_and(|handle| handle.pid == pid) {
        wake(process);
        return;
    }
    let handle = Handle {
        pid,
        stop: Arc::default(),
    };
    let thread = Helper {
        sessions: Sessions::new(process.clone()),
        version: VERSIONS.newest,
        process: process.clone(),
        stop: handle.stop.clone(),
    };
    let first = connect(process);
    let spawned = sys::with_signals_blocked(|| {
        std::thread::Builder::new()
            .name("verbatim".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || thread.run(first))
    });
    // A program that may have no more threads runs without migration, and without asynchronous events.
    if spawned.is_ok() {
        *helper = Some(handle);
    }
}

fn wake(process: &Process) {
    if let Ok(watch) = process.watch() {
        watch.wake();
    }
}

fn connect(process: &Process) -> Option<Socket> {
    Socket::connect(&process.agent_socket()?).ok()
}

impl Handle {
    /// Ends the thread, as the end of the program would.
    pub fn stop(&self, process: &Process) {
        self.stop.store(true, SeqCst);
        wake(process);
    }
}

struct Helper {
    process: Arc<Process>,
    sessions: Sessions,
    /// The version of the contract that the agent is greeted with, and that is spoken then.
    version: u32,
    stop: Arc<AtomicBool>,
}

/// Why the thread is not with an agent any more.
enum Ended {
    /// It was told to stop.
    Stopped,
    /// The connection ended, one way or another.
    Lost,
}

impl Helper {
    fn run(mut self, first: Option<Socket>) {
        let mut next = first.or_else(|| self.wait_for_agent());
        while let Some(socket) = next {
            next = match self.serve(socket) {
                Ok(Ended::Stopped) => None,
                // Whatever ended the connection, another is looked for.
                Ok(Ended::Lost) | Err(_) => self.reconnect(),
            };
        }
    }

    /// The newest version that the agent speaks, found out by questions: the first by this connection. An agent of an earlier
    /// release takes a process that greets in another version than its own for one that it cannot move, and goes on saying so for
    /// seconds after it has greeted as it should. A question that it does not understand is nothing to it. `None` when the
    /// thread shall end.
    fn agree(&self, first: Socket) -> Option<u32> {
        let mut socket = Some(first);
        let mut version = VERSIONS.newest;
        loop {
            if self.is_spoken(version, socket.take().or_else(|| connect(&self.process)))? {
                return Some(version);
            }
            // One that understands nothing hears the newest version, and can tell its operator of it.
            let Some(below) = VERSIONS.below(version) else {
                return Some(VERSIONS.newest);
            };
            version = below;
        }
    }

    /// Whether the agent answers a question in this version; `None` when the thread shall end.
    fn is_spoken(&self, version: u32, socket: Option<Socket>) -> Option<bool> {
        let Some(socket) = socket else {
            return Some(false);
        };
        let _held = held::hold_fd(socket.as_fd());
        // Nobody has this GID, so that the answer is short.
        let question = Greeting::Ways {
            version,
            gid: [0; 16],
        };
        if verbatim_channel::send(&socket, &question, &[]).is_err() {
            return Some(false);
        }
        while !self.sleep(None, Some(&socket))? {}
        Some(verbatim_channel::recv::<Vec<MovedEndpoint>>(&socket).is_ok())
    }

    fn greeting(&self) -> Greeting {
        let gate = Gate::open(&self.gate_path(), false);
        Greeting::Process {
            version: self.version,
            pid: std::process::id(),
            program: program_name(),
            generation: gate.map_or(0, |gate| gate.generation()),
            quiesced: self.sessions.is_quiesced(),
        }
    }

    fn gate_path(&self) -> PathBuf {
        self.process.runtime().join(GATE_NAME)
    }

    /// Sleeps until there is something, and does what the RNICs ask for. Whether the agent has something to say; `None`
    /// when the thread shall end.
    fn sleep(&self, timeout: Option<Duration>, agent: Option<&Socket>) -> Option<bool> {
        let Ok(watch) = self.process.watch() else {
            // No descriptors left: for now, only time passes.
            nap::asleep_while(|| std::thread::sleep(MAX_DELAY));
            return (!self.stop.load(SeqCst)).then_some(agent.is_some());
        };
        self.sleep_on(&watch, timeout, agent)
    }

    fn sleep_on(&self, watch: &Watch, timeout: Option<Duration>, agent: Option<&Socket>) -> Option<bool> {
        if let Some(agent) = agent {
            watch.add_agent(agent.as_fd());
        }
        if self.stop.load(SeqCst) {
            return None;
        }
        let ready = watch.wait(timeout);
        self.process.look_after(&ready.contexts, watch);
        (!self.stop.load(SeqCst)).then_some(ready.agent)
    }

    fn serve(&mut self, first: Socket) -> Result<Ended, Error> {
        let Some(version) = self.agree(first) else {
            return Ok(Ended::Stopped);
        };
        self.version = version;
        let Some(socket) = connect(&self.process) else {
            return Ok(Ended::Lost);
        };
        let held = held::hold_fd(socket.as_fd());
        self.sessions.speak(self.version);
        verbatim_channel::send(&socket, &self.greeting(), &[])?;
        loop {
            match self.sleep(None, Some(&socket)) {
                None => return Ok(Ended::Stopped),
                Some(false) => continue,
                Some(true) => {}
            }
            let (order, fds) = verbatim_channel::recv_as::<Order>(&socket, self.version, MAX_LONG_BYTES)?;
            match order {
                Order::Quiesce { session } => match self.quiesce(&socket, session) {
                    Ok((gate, seen)) => {
                        // The agent freezes the process when it sees this connection's end: that is the last
                        // descriptor to go.
                        drop(held);
                        drop(socket);
                        gate.wait(seen);
                        return Ok(Ended::Lost);
                    }
                    Err(error) => self.answer(&socket, &error_answer(&error), &[])?,
                },
                order => {
                    let answer = self.sessions.answer(order, fds);
                    let sent = self.answer(&socket, &answer, &[]);
                    self.sessions.clear();
                    sent?;
                }
            }
        }
    }

    fn answer(&self, socket: &Socket, answer: &Answer, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        verbatim_channel::send_as(socket, self.version, answer, fds)
    }

    /// Lets go of everything and tells the agent. The gate, and its generation before anyone could have opened it.
    fn quiesce(&mut self, socket: &Socket, session: u64) -> Result<(Gate, u32), SessionError> {
        let gate = Gate::open(&self.gate_path(), false).map_err(SessionError::Gate)?;
        let seen = gate.generation();
        let connections = self.sessions.quiesce(session)?;
        self.process.forget_watch();
        let fds: Vec<_> = connections.iter().map(AsFd::as_fd).collect();
        if let Err(error) = self.answer(socket, &Answer::Quiesced, &fds) {
            // The agent is gone and nobody else has the connections: take them back and go on here.
            let order = Order::Claim {
                session,
                contexts: Vec::new(),
                key_tables: Vec::new(),
            };
            self.sessions.handle(order, connections);
            self.sessions.handle(Order::Resume { session }, Vec::new());
            return Err(SessionError::Gate(io::Error::other(error)));
        }
        Ok((gate, seen))
    }

    /// Waits until there is an agent, at the opening of a device; `None` when the thread shall end.
    fn wait_for_agent(&self) -> Option<Socket> {
        loop {
            self.sleep(None, None)?;
            if let Some(socket) = connect(&self.process) {
                return Some(socket);
            }
        }
    }

    /// Looks for the agent until it is there; `None` when the thread shall end.
    fn reconnect(&mut self) -> Option<Socket> {
        self.sessions.agent_is_gone(false);
        let lost = Instant::now();
        let mut delay = FIRST_DELAY;
        loop {
            if self.stop.load(SeqCst) {
                return None;
            }
            if let Some(socket) = connect(&self.process) {
                return Some(socket);
            }
            self.sessions.agent_is_gone(lost.elapsed() > GRACE);
            self.sleep(Some(delay), None)?;
            let max = if self.sessions.is_quiesced() {
                MAX_DELAY_QUIESCED
            } else {
                MAX_DELAY
            };
            delay = (delay * 2).min(max);
        }
    }
}
