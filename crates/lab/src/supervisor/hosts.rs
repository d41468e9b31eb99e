//! The supervisor's side of a host.

use crate::HOST;
use crate::config::LabConfig;
use crate::error::{Error, Result};
use crate::process::ProcessId;
use crate::protocol::{self, FromHost, Lines, Response, ToHost};
use crate::state::{HostState, StateDir};
use crate::status::{HostStatus, ServiceState, ServiceStatus};
use crate::sys;
use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};
use std::ffi::OsStr;
use std::fs;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use verbatim_certificates::Authority;

/// A host that was started.
pub(super) struct Host {
    name: String,
    address: Ipv4Addr,
    pid: u32,
    pidfd: OwnedFd,
    running: bool,
    ready: bool,
    failure: Option<String>,
    services: Vec<ServiceStatus>,
    stream: UnixStream,
    lines: Lines,
    /// Who waits for the host to answer an order.
    waiting: Option<UnixStream>,
}

impl Host {
    /// Starts pid 1 of the host at `index`. It waits for `ToHost::Begin` before it uses the network.
    pub fn start(dir: &StateDir, config: &LabConfig, index: usize) -> Result<Self> {
        let name = config.hosts[index].name.clone();
        let what = format!("start host {name}");
        let (stream, stdin) = UnixStream::pair().map_err(Error::io(what.as_str()))?;
        stream.set_nonblocking(true).map_err(Error::io(what.as_str()))?;
        let number = index.to_string();
        let argv = [OsStr::new(HOST), dir.path().as_os_str(), OsStr::new(&number)];
        let spawned = sys::spawn_host(&config.program, &argv, stdin.as_fd()).map_err(Error::io(what))?;
        let services = config
            .services_of(&config.hosts[index])
            .iter()
            .map(|service| ServiceStatus {
                name: service.name.clone(),
                state: ServiceState::Waiting,
            });
        Ok(Self {
            name,
            address: config.address(index),
            pid: spawned.pid,
            pidfd: spawned.pidfd,
            running: true,
            ready: false,
            failure: None,
            services: services.collect(),
            stream,
            lines: Lines::default(),
            waiting: None,
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    pub fn is_running(&self) -> bool {
        self.running
    }

    /// Whether all services have been ready.
    pub fn is_ready(&self) -> bool {
        self.ready
    }

    /// Why the host cannot come up any more, if so.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Readable when the host has said something.
    pub fn messages(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Readable when the host has ended.
    pub fn death(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    pub fn state(&self) -> Result<HostState> {
        Ok(HostState {
            name: self.name.clone(),
            address: self.address,
            process: ProcessId::of(self.pid)?,
        })
    }

    pub fn status(&self) -> HostStatus {
        HostStatus {
            name: self.name.clone(),
            address: self.address,
            running: self.running,
            pid: self.pid,
            services: self.services.clone(),
        }
    }

    pub fn send(&mut self, message: &ToHost) -> Result<()> {
        protocol::send(&self.stream, message).map_err(Error::io(format!("talk to host {}", self.name)))
    }

    /// Passes an order on; `client` gets the host's answer.
    pub fn order(&mut self, order: &ToHost, client: UnixStream) {
        let refusal = if !self.running {
            Some(format!("host {} is down", self.name))
        } else if self.waiting.is_some() {
            Some(format!("host {} is still busy with another order", self.name))
        } else {
            self.send(order).err().map(|error| error.chain())
        };
        match refusal {
            Some(reason) => reply(&client, &Response::Failed { reason }),
            None => self.waiting = Some(client),
        }
    }

    /// Takes in what the host has said.
    pub fn receive(&mut self) -> Result<()> {
        let what = || format!("understand host {}", self.name);
        let open = self.lines.fill(&self.stream).map_err(Error::io(what()))?;
        while let Some(message) = self.lines.next().map_err(Error::io(what()))? {
            match message {
                FromHost::Services(services) => self.services = services,
                FromHost::Ready => self.ready = true,
                FromHost::Failed { reason } => self.failure = Some(reason),
                FromHost::Answer(answer) => {
                    let response = match answer {
                        Ok(()) => Response::Done,
                        Err(reason) => Response::Failed { reason },
                    };
                    if let Some(client) = self.waiting.take() {
                        reply(&client, &response);
                    }
                }
            }
        }
        if !open {
            self.reap();
        }
        Ok(())
    }

    pub fn kill(&self) {
        if self.running {
            // It fails only if there is nothing left to kill.
            let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        }
    }

    /// Waits until the host and everything in it is gone, which it is about to be.
    pub fn reap(&mut self) {
        if !self.running {
            return;
        }
        self.kill();
        // pid 1 is reported only after the kernel has killed and reaped its whole namespace: pid_namespaces(7).
        while let Err(rustix::io::Errno::INTR) =
            waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED)
        {}
        self.running = false;
        self.failure
            .get_or_insert_with(|| "its pid 1 has ended".to_owned());
        for service in &mut self.services {
            service.state = ServiceState::Exited {
                how: "with its host".to_owned(),
            };
        }
        if let Some(client) = self.waiting.take() {
            reply(
                &client,
                &Response::Failed {
                    reason: format!("host {} went down", self.name),
                },
            );
        }
    }
}

/// Answers a client, which may have gone.
pub(super) fn reply(client: &UnixStream, response: &Response) {
    let _ = protocol::send(client, response);
}

/// Makes the lab's certificates and puts them where the hosts fetch them.
pub(super) fn write_identities(dir: &StateDir, config: &LabConfig) -> Result<()> {
    let subject = format!("verbatim lab {}", config.name);
    let failed = |name: &str| {
        let name = name.to_owned();
        move |source| Error::Certificate { name, source }
    };
    let authority = Authority::new(&subject).map_err(failed(&subject))?;
    for (index, host) in config.hosts.iter().enumerate() {
        let identity = authority
            .issue(&host.name, config.address(index).into())
            .map_err(failed(&host.name))?;
        let tls = dir.host(&host.name).join("tls");
        let write = || {
            fs::DirBuilder::new()
                .recursive(true)
                .create(dir.host(&host.name))?;
            fs::DirBuilder::new().mode(0o700).create(&tls)?;
            for (file, text) in [
                ("ca.pem", authority.certificate()),
                ("cert.pem", identity.certificate.as_str()),
                ("key.pem", identity.key.as_str()),
            ] {
                let mut to = fs::OpenOptions::new()
                    .write(true)
                    .create_new(true)
                    .mode(0o600)
                    .open(tls.join(file))?;
                std::io::Write::write_all(&mut to, text.as_bytes())?;
            }
            Ok::<_, std::io::Error>(())
        };
        write().map_err(Error::io(format!("write certificates to {}", tls.display())))?;
    }
    Ok(())
}
