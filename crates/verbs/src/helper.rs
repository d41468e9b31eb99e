//! The helper thread: sleeps until the agent orders something.
//!
//! One per process, started when the first device is opened and there is an agent. All signals are blocked in it, so
//! that the program's handlers run where they always did. When the agent goes away, the thread looks for it again with
//! growing delay and settles the sessions that cannot go on without it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::Shutdown;
use verbatim_channel::{Answer, GATE_NAME, Gate, Greeting, Order, SOCKET_NAME, VERSION};
use verbatim_seqpacket::{Error, Socket};

use crate::backend::soft::program_name;
use crate::process::Process;
use crate::session::{SessionError, Sessions, error_answer};
use crate::sys;
use crate::{fork, nap};

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
    connection: Arc<Mutex<Option<OwnedFd>>>,
}

/// Starts the thread, if it does not run and there is an agent.
pub fn ensure(process: &Arc<Process>) {
    let mut helper = process.helper.lock();
    let pid = std::process::id();
    if helper.as_ref().is_some_and(|handle| handle.pid == pid) {
        return;
    }
    let Ok(socket) = Socket::connect(&process.runtime().join(SOCKET_NAME)) else {
        return;
    };
    let handle = Handle {
        pid,
        stop: Arc::default(),
        connection: Arc::default(),
    };
    let thread = Helper {
        sessions: Sessions::new(process.clone()),
        process: process.clone(),
        stop: handle.stop.clone(),
        connection: handle.connection.clone(),
    };
    let spawned = sys::with_signals_blocked(|| {
        std::thread::Builder::new()
            .name("verbatim".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || thread.run(socket))
    });
    // A program that may have no more threads runs without migration.
    if spawned.is_ok() {
        *helper = Some(handle);
    }
}

impl Handle {
    /// Ends the thread, as the end of the program would.
    pub fn stop(&self) {
        self.stop.store(true, SeqCst);
        if let Some(connection) = &*self.connection.lock() {
            // Not connected any more: the thread is about to see the flag.
            let _ = rustix::net::shutdown(connection, Shutdown::Both);
        }
    }
}

struct Helper {
    process: Arc<Process>,
    sessions: Sessions,
    stop: Arc<AtomicBool>,
    /// A second descriptor of the agent's connection, for [`Handle::stop`]; none while the process is quiesced.
    connection: Arc<Mutex<Option<OwnedFd>>>,
}

impl Helper {
    fn run(mut self, first: Socket) {
        let mut next = Some(first);
        while let Some(socket) = next.take().or_else(|| self.reconnect()) {
            // Whatever ended the connection, another is looked for.
            let _ = self.serve(socket);
        }
    }

    fn greeting(&self) -> Greeting {
        let gate = Gate::open(&self.gate_path(), false);
        Greeting::Process {
            version: VERSION,
            pid: std::process::id(),
            program: program_name(),
            generation: gate.map_or(0, |gate| gate.generation()),
            quiesced: self.sessions.is_quiesced(),
        }
    }

    fn gate_path(&self) -> PathBuf {
        self.process.runtime().join(GATE_NAME)
    }

    fn serve(&mut self, socket: Socket) -> Result<(), Error> {
        let duplicate = socket.as_fd().try_clone_to_owned();
        let duplicate = duplicate.map_err(|source| Error::Os { call: "dup", source })?;
        let held = [fork::hold_fd(socket.as_fd()), fork::hold_fd(duplicate.as_fd())];
        *self.connection.lock() = Some(duplicate);
        verbatim_channel::send(&socket, &self.greeting(), &[])?;
        loop {
            wait_for_order(&socket)?;
            let (order, fds) = verbatim_channel::recv::<Order>(&socket)?;
            match order {
                Order::Quiesce { session } => match self.quiesce(&socket, session) {
                    Ok((gate, seen)) => {
                        // The agent freezes the process when it sees this connection's end: that is the last
                        // descriptor to go.
                        drop(held);
                        *self.connection.lock() = None;
                        drop(socket);
                        gate.wait(seen);
                        return Ok(());
                    }
                    Err(error) => verbatim_channel::send(&socket, &error_answer(&error), &[])?,
                },
                order => {
                    let answer = self.sessions.handle(order, fds);
                    verbatim_channel::send(&socket, &answer, &[])?;
                }
            }
        }
    }

    /// Lets go of everything and tells the agent. The gate, and its generation before anyone could have opened it.
    fn quiesce(&mut self, socket: &Socket, session: u64) -> Result<(Gate, u32), SessionError> {
        let gate = Gate::open(&self.gate_path(), false).map_err(SessionError::Gate)?;
        let seen = gate.generation();
        let connections = self.sessions.quiesce(session)?;
        let fds: Vec<_> = connections.iter().map(AsFd::as_fd).collect();
        if let Err(error) = verbatim_channel::send(socket, &Answer::Quiesced, &fds) {
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

    /// Looks for the agent until it is there; `None` when the thread shall end.
    fn reconnect(&mut self) -> Option<Socket> {
        *self.connection.lock() = None;
        self.sessions.agent_is_gone(false);
        let lost = Instant::now();
        let mut delay = FIRST_DELAY;
        loop {
            if self.stop.load(SeqCst) {
                return None;
            }
            if let Ok(socket) = connect(self.process.runtime()) {
                return Some(socket);
            }
            self.sessions.agent_is_gone(lost.elapsed() > GRACE);
            nap::asleep_while(|| std::thread::sleep(delay));
            let max = if self.sessions.is_quiesced() {
                MAX_DELAY_QUIESCED
            } else {
                MAX_DELAY
            };
            delay = (delay * 2).min(max);
        }
    }
}

/// Sleeps until there is something to read, or an end.
fn wait_for_order(socket: &Socket) -> Result<(), Error> {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    loop {
        match nap::asleep_while(|| poll(&mut fds, None)) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => {
                return Err(Error::Os {
                    call: "poll",
                    source: errno.into(),
                });
            }
        }
    }
}

fn connect(runtime: &Path) -> Result<Socket, Error> {
    Socket::connect(&runtime.join(SOCKET_NAME))
}
