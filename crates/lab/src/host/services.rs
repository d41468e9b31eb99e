//! A host's services: started in order, each once the one before it is ready, killed and started again on request.

use super::{Environment, FOREIGN_VARIABLES, environment};
use crate::config::{LabConfig, Service};
use crate::error::{Error, Result};
use crate::protocol::FromHost;
use crate::status::{ServiceState, ServiceStatus};
use crate::sys::unblock_signals;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, Signal, WaitStatus, kill_process};
use std::collections::VecDeque;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// bind(2) makes a socket's file, listen(2) comes a moment later and has no event: then it is tried again.
const LISTEN_RETRY: Duration = Duration::from_millis(1);

pub(super) struct Services {
    services: Vec<Service>,
    states: Vec<ServiceState>,
    environment: Environment,
    /// Where the logs are; opened while the machine's `/run` is still in sight.
    logs: OwnedFd,
    /// Tells when something appears beside the sockets that are waited for.
    inotify: OwnedFd,
    /// Services to start, the first of which may have been.
    queue: VecDeque<usize>,
    order: Option<Order>,
    ready_said: bool,
    states_said: Vec<ServiceState>,
    refused: bool,
}

/// What the supervisor waits for.
enum Order {
    /// That the queue is worked off.
    Start,
    /// That the service is dead.
    Kill(usize),
    /// To hear why not.
    Refused(String),
}

impl Services {
    pub fn new(config: &LabConfig, index: usize, host_dir: &Path) -> Result<Self> {
        let logs = rustix::fs::open(host_dir, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(Error::io(format!("open {}", host_dir.display())))?;
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
            .map_err(Error::io("watch for sockets"))?;
        let services = config.services_of(&config.hosts[index]).to_vec();
        let states = vec![ServiceState::Waiting; services.len()];
        Ok(Self {
            services,
            states_said: states.clone(),
            states,
            environment: environment(config, index),
            logs,
            inotify,
            queue: VecDeque::new(),
            order: None,
            ready_said: false,
            refused: false,
        })
    }

    /// Readable when a socket may have appeared.
    pub fn socket_events(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }

    /// Forgets the events: only that there were some matters.
    pub fn drain_socket_events(&self) {
        let mut events = [0; 4096];
        while rustix::io::read(&self.inotify, &mut events).is_ok_and(|length| length > 0) {}
    }

    /// When to call [`Self::advance`] again if no event comes.
    pub fn retry_after(&self) -> Option<Duration> {
        self.refused.then_some(LISTEN_RETRY)
    }

    /// Starts all services, in order.
    pub fn start_all(&mut self) {
        self.queue = (0..self.services.len()).collect();
        self.order = Some(Order::Start);
    }

    /// Starts a service that has ended.
    pub fn start(&mut self, name: &str) {
        self.order = Some(match self.find(name) {
            Ok(index) => match &self.states[index] {
                ServiceState::Exited { .. } => {
                    self.states[index] = ServiceState::Waiting;
                    self.queue.push_back(index);
                    Order::Start
                }
                _ => Order::Refused(format!(
                    "service {name} runs already: end it with `verbatim lab kill` first"
                )),
            },
            Err(refusal) => refusal,
        });
    }

    /// Kills a service.
    pub fn kill(&mut self, name: &str) {
        self.order = Some(match self.find(name) {
            Ok(index) => {
                if let Some(pid) = pid_of(&self.states[index]) {
                    // It fails only if the service has just ended, which is what was asked for.
                    let _ = kill_process(pid, Signal::KILL);
                }
                Order::Kill(index)
            }
            Err(refusal) => refusal,
        });
    }

    /// A child has ended, perhaps a service.
    pub fn ended(&mut self, pid: u32, status: WaitStatus) {
        for state in &mut self.states {
            if pid_of(state).is_some_and(|own| own.as_raw_nonzero().get().cast_unsigned() == pid) {
                let how = match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => format!("exit status {code}"),
                    (None, Some(signal)) => format!("signal {signal}"),
                    (None, None) => "unknown".to_owned(),
                };
                *state = ServiceState::Exited { how };
            }
        }
    }

    /// Does what can be done now, and returns what the supervisor should hear.
    pub fn advance(&mut self) -> Result<Vec<FromHost>> {
        self.refused = false;
        let mut failure = None;
        while let Some(&index) = self.queue.front() {
            let (service, state) = (&self.services[index], &self.states[index]);
            match state {
                ServiceState::Waiting => self.spawn(index)?,
                ServiceState::Exited { how } => {
                    failure = Some(format!(
                        "service {} ended before it was ready ({how})",
                        service.name
                    ));
                    self.queue.clear();
                }
                &ServiceState::Starting { pid } => match accept_all(&service.sockets) {
                    Accepts::Yes => self.states[index] = ServiceState::Running { pid },
                    Accepts::NotYet { refused } => {
                        self.refused = refused;
                        break;
                    }
                },
                ServiceState::Running { .. } => {
                    self.queue.pop_front();
                }
            }
        }
        Ok(self.news(failure))
    }

    fn news(&mut self, failure: Option<String>) -> Vec<FromHost> {
        let mut news = Vec::new();
        if self.states != self.states_said {
            self.states_said.clone_from(&self.states);
            let states = self.services.iter().zip(&self.states);
            let list = states.map(|(service, state)| ServiceStatus {
                name: service.name.clone(),
                state: state.clone(),
            });
            news.push(FromHost::Services(list.collect()));
        }
        match self.order.take() {
            Some(Order::Refused(reason)) => news.push(FromHost::Answer(Err(reason))),
            Some(Order::Kill(index)) if pid_of(&self.states[index]).is_none() => {
                news.push(FromHost::Answer(Ok(())))
            }
            Some(Order::Start) if failure.is_some() || self.queue.is_empty() => {
                news.push(match (failure, self.ready_said) {
                    (Some(reason), false) => FromHost::Failed { reason },
                    (Some(reason), true) => FromHost::Answer(Err(reason)),
                    (None, true) => FromHost::Answer(Ok(())),
                    (None, false) => FromHost::Ready,
                });
                self.ready_said = true;
            }
            order => self.order = order,
        }
        news
    }

    fn find(&self, name: &str) -> std::result::Result<usize, Order> {
        self.services
            .iter()
            .position(|service| service.name == name)
            .ok_or_else(|| {
                let names: Vec<&str> = self
                    .services
                    .iter()
                    .map(|service| service.name.as_str())
                    .collect();
                Order::Refused(format!(
                    "there is no service {name}, there is {}",
                    names.join(", ")
                ))
            })
    }

    fn spawn(&mut self, index: usize) -> Result<()> {
        let service = &self.services[index];
        let what = |what: &str| format!("{what} of service {}", service.name);
        for socket in &service.sockets {
            // An earlier run's socket must not be taken for this one's.
            match fs::remove_file(socket) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::io(what("remove the old socket"))(error));
                }
                _ => {}
            }
            let dir = socket.parent().unwrap_or(Path::new("/"));
            fs::create_dir_all(dir).map_err(Error::io(what("make the socket directory")))?;
            inotify::add_watch(&self.inotify, dir, WatchFlags::CREATE | WatchFlags::MOVED_TO)
                .map_err(Error::io(what("watch the socket directory")))?;
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::CLOEXEC;
        let log = openat(
            &self.logs,
            format!("{}.log", service.name),
            flags,
            Mode::from_raw_mode(0o644),
        )
        .map_err(Error::io(what("open the log")))?;
        let errors = log.try_clone().map_err(Error::io(what("open the log")))?;
        let mut command = Command::new(&service.program);
        command
            .args(&service.args)
            .envs(self.environment.clone())
            .envs(&service.env);
        for variable in FOREIGN_VARIABLES {
            command.env_remove(variable);
        }
        // SAFETY: it makes only calls that are allowed between fork and exec.
        unsafe {
            command.pre_exec(unblock_signals);
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .spawn()
            .map_err(Error::io(format!(
                "start service {} ({})",
                service.name,
                service.program.display()
            )))?;
        // Reaped with everybody else: see `Init::reap`.
        self.states[index] = ServiceState::Starting { pid: child.id() };
        Ok(())
    }
}

fn pid_of(state: &ServiceState) -> Option<Pid> {
    match state {
        ServiceState::Starting { pid } | ServiceState::Running { pid } => Pid::from_raw(pid.cast_signed()),
        ServiceState::Waiting | ServiceState::Exited { .. } => None,
    }
}

enum Accepts {
    Yes,
    /// `refused`: the file is there, but nobody listens yet.
    NotYet {
        refused: bool,
    },
}

fn accept_all(sockets: &[impl AsRef<Path>]) -> Accepts {
    for socket in sockets {
        match probe(socket.as_ref(), SocketType::SEQPACKET) {
            Ok(()) | Err(Errno::AGAIN) => {}
            Err(Errno::NOENT) => return Accepts::NotYet { refused: false },
            Err(_) => return Accepts::NotYet { refused: true },
        }
    }
    Accepts::Yes
}

/// Connects and hangs up. Whoever listens may do so with any type of socket: unix(7), EPROTOTYPE.
fn probe(path: &Path, kind: SocketType) -> rustix::io::Result<()> {
    let socket = socket_with(
        AddressFamily::UNIX,
        kind,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    match connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(Errno::PROTOTYPE) if kind == SocketType::SEQPACKET => probe(path, SocketType::STREAM),
        result => result,
    }
}
