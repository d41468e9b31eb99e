//! The handle of a lab: bring up, take down, look into, break.

use crate::config::{LabConfig, check_name};
use crate::error::{Error, Result};
use crate::protocol::{Request, Response};
use crate::state::{State, StateDir};
use crate::status::{HostStatus, LabStatus, ServiceState};
use crate::{ENTER, cgroup, supervisor};
use rustix::process::Signal;
use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

/// How long a host may take to stop or start a service.
const SERVICE_TIMEOUT: Duration = Duration::from_secs(20);
/// How long the processes of a lab may take to die.
const DEATH_TIMEOUT: Duration = Duration::from_secs(10);

/// The service of a host that serves disks, by its name: it ends before all else.
pub const VOLUMES: &str = "volumes";

/// Where that has its keepers.
const KEEPERS: &str = "/run/verbatim/volumes";

/// The service of a host that brings what lies on them to rest.
const AGENT: &str = "agent";

/// A lab. The handle owns nothing: the lab stays up until [`Lab::down`].
#[derive(Debug)]
pub struct Lab {
    dir: StateDir,
    state: State,
}

impl Lab {
    /// Brings up a lab; returns when every service of every host is ready.
    ///
    /// What a killed lab of the same name left is cleared first. On an error nothing is left but the log files.
    pub fn up(config: LabConfig) -> Result<Self> {
        if !rustix::process::geteuid().is_root() {
            return Err(Error::NotRoot);
        }
        config.check()?;
        let dir = StateDir::of(&config.name);
        let lock = dir.create_and_lock()?;
        if let Some(state) = dir.load()? {
            if state.supervisor.is_alive() {
                return Err(Error::Exists {
                    name: config.name,
                    pid: state.supervisor.pid,
                });
            }
            clear(&dir, Some(&state))?;
        }
        dir.empty()?;
        let started = supervisor::start(&dir, &config);
        let state = match started {
            Ok(()) => dir.load()?.ok_or_else(|| Error::NoLab {
                name: config.name.clone(),
                root: dir.root(),
            })?,
            Err(error) => {
                clear(&dir, dir.load()?.as_ref())?;
                return Err(error);
            }
        };
        drop(lock);
        Ok(Self { dir, state })
    }

    /// The lab of that name, running or not.
    pub fn open(name: &str) -> Result<Self> {
        check_name("lab", name)?;
        let dir = StateDir::of(name);
        let state = dir.load()?.ok_or_else(|| Error::NoLab {
            name: name.to_owned(),
            root: dir.root(),
        })?;
        Ok(Self { dir, state })
    }

    /// The names of all labs on this machine, running or not.
    pub fn names() -> Result<Vec<String>> {
        StateDir::names()
    }

    /// Ends the lab with everything in it, and removes what it left on the machine.
    pub fn down(self) -> Result<()> {
        let _lock = self.dir.create_and_lock()?;
        if self.state.supervisor.is_alive() {
            for host in self.hosts() {
                self.end_volumes(host);
            }
            self.state.supervisor.kill(Signal::TERM)?;
            if !self.state.supervisor.wait(DEATH_TIMEOUT)? {
                self.state.supervisor.kill(Signal::KILL)?;
                self.state.supervisor.wait(DEATH_TIMEOUT)?;
            }
        }
        clear(&self.dir, Some(&self.state))?;
        self.dir.remove()
    }

    /// The lab's name.
    pub fn name(&self) -> &str {
        &self.state.name
    }

    /// Where the lab keeps its state and its logs (`supervisor.log`, `hosts/HOST/SERVICE.log`).
    pub fn state_dir(&self) -> &Path {
        self.dir.path()
    }

    /// How the lab, its hosts and their services are.
    pub fn status(&self) -> Result<LabStatus> {
        if !self.state.supervisor.is_alive() {
            return Ok(self.state.status_when_dead());
        }
        match self.request(&Request::Status)? {
            Response::Status(status) => Ok(status),
            other => Err(Error::Refused(format!(
                "the supervisor answered {other:?} to a request for its status"
            ))),
        }
    }

    /// The hosts' names, in the order of their addresses.
    pub fn hosts(&self) -> impl Iterator<Item = &str> {
        self.state.hosts.iter().map(|host| host.name.as_str())
    }

    /// A command that runs `program` in `host`: in its namespaces and its cgroup, with this process's working
    /// directory and with the arguments, environment and stdio that the caller then sets.
    ///
    /// The process that the command starts stands in for the one in the host: it passes on SIGTERM, SIGINT and SIGHUP,
    /// ends with the same status (128 + number for a signal), and if it is killed so is the other.
    pub fn command(&self, host: &str, program: impl AsRef<OsStr>) -> Result<Command> {
        self.host(host)?;
        let mut command = Command::new(&self.state.program);
        command.arg0(ENTER).arg(self.dir.path()).arg(host).arg(program);
        Ok(command)
    }

    /// Runs `argv` in `host` with `env` added to the environment and this process's stdio, and waits for its end.
    pub fn exec<A: AsRef<OsStr>>(&self, host: &str, argv: &[A], env: &[(&str, &str)]) -> Result<ExitStatus> {
        let (program, args) = argv
            .split_first()
            .ok_or_else(|| Error::Config("no command to run in the host".to_owned()))?;
        self.command(host, program)?
            .args(args)
            .envs(env.iter().copied())
            .status()
            .map_err(Error::io(format!("run a command in host {host}")))
    }

    /// Where a path of `host` lies as seen from the machine, for example to connect to a socket there.
    pub fn host_path(&self, host: &str, path: impl AsRef<Path>) -> Result<PathBuf> {
        let pid = self.host(host)?.process.pid;
        let path = path.as_ref();
        Ok(Path::new("/proc")
            .join(pid.to_string())
            .join("root")
            .join(path.strip_prefix("/").unwrap_or(path)))
    }

    /// Kills a service of a host with SIGKILL; returns when it is dead.
    pub fn kill(&self, host: &str, service: &str) -> Result<()> {
        self.order(
            host,
            Request::Kill {
                host: host.to_owned(),
                service: service.to_owned(),
            },
        )
    }

    /// Starts a service of a host that has ended; returns when it is ready.
    pub fn start(&self, host: &str, service: &str) -> Result<()> {
        self.order(
            host,
            Request::Start {
                host: host.to_owned(),
                service: service.to_owned(),
            },
        )
    }

    /// Cuts the power of a host: all of its processes die at once, and it does not come back.
    pub fn kill_host(&self, host: &str) -> Result<()> {
        self.end_volumes(host);
        let process = self.host(host)?.process;
        process.kill(Signal::KILL)?;
        process.wait(DEATH_TIMEOUT)?;
        Ok(())
    }

    /// Ends what has to do with disks that a host's own volume daemon serves, if it has one, before everything else.
    ///
    /// If the daemon is the last process of the host, the kernel unmounts, within that process's end, what lies on a disk which the process has
    /// served, and waits for it for ever: the disk fails only when the process has ended. And who writes to a file system that an agent has brought to
    /// rest for a move cannot be killed until somebody lets it go on.
    fn end_volumes(&self, host: &str) {
        let status = self.status();
        let service = status.as_ref().ok().and_then(|status| status.host(host));
        let Some(service) = service.and_then(|host| host.service(VOLUMES)) else {
            return;
        };
        // They may have ended since, or before.
        let _ = self.kill(host, AGENT);
        for mounted in &self.loop_mounts(host) {
            // One that is not at rest is refused.
            let _ = Command::new("fsfreeze").arg("--unfreeze").arg(mounted).output();
        }
        if matches!(service.state, ServiceState::Running { .. }) {
            let _ = self.kill(host, VOLUMES);
        }
        self.end_keepers(host);
    }

    /// Ends what keeps the disks of a volume daemon for the next one: there is none, and whoever uses a disk is not to wait for it.
    fn end_keepers(&self, host: &str) {
        let Ok(folder) = self.host_path(host, KEEPERS) else {
            return;
        };
        let Ok(entries) = std::fs::read_dir(folder) else {
            return;
        };
        let paths = entries.flatten().map(|entry| entry.path());
        for path in paths.filter(|path| {
            path.extension()
                .is_some_and(|kind| kind == "keeper" || kind == "pages")
        }) {
            if let Some(keeper) = verbatim_keeper::Keeper::find_within(&path, SERVICE_TIMEOUT) {
                keeper.end();
            }
        }
    }

    /// Where a host has mounted loop devices, as this process sees it.
    fn loop_mounts(&self, host: &str) -> Vec<PathBuf> {
        let mounts = self.host_path(host, "/proc/1/mounts").and_then(|path| {
            std::fs::read_to_string(&path).map_err(Error::io(format!("read {}", path.display())))
        });
        let mounts = mounts.unwrap_or_default();
        let places = mounts.lines().filter_map(|line| {
            let (device, rest) = line.split_once(' ')?;
            let place = rest.split(' ').next()?;
            device.starts_with("/dev/loop").then_some(place)
        });
        places
            .filter_map(|place| self.host_path(host, place).ok())
            .collect()
    }

    fn order(&self, host: &str, request: Request) -> Result<()> {
        self.host(host)?;
        match self.request(&request)? {
            Response::Done => Ok(()),
            Response::Failed { reason } => Err(Error::Refused(reason)),
            Response::Status(_) => Err(Error::Refused(
                "the supervisor answered with its status".to_owned(),
            )),
        }
    }

    fn request(&self, request: &Request) -> Result<Response> {
        if !self.state.supervisor.is_alive() {
            return Err(Error::NotRunning {
                name: self.state.name.clone(),
            });
        }
        crate::protocol::ask(&self.dir.control_socket(), request, SERVICE_TIMEOUT)
    }

    fn host(&self, name: &str) -> Result<&crate::state::HostState> {
        self.state
            .hosts
            .iter()
            .find(|host| host.name == name)
            .ok_or_else(|| Error::NoHost {
                lab: self.state.name.clone(),
                host: name.to_owned(),
                hosts: self.hosts().collect::<Vec<_>>().join(", "),
            })
    }
}

/// Ends what is left of a lab whose supervisor is dead, and removes its cgroups.
fn clear(dir: &StateDir, state: Option<&State>) -> Result<()> {
    let deadline = Instant::now() + DEATH_TIMEOUT;
    if let Some(state) = state {
        for host in &state.hosts {
            // It has PR_SET_PDEATHSIG: this only makes sure, and waits until the kernel is through with it.
            host.process.kill(Signal::KILL)?;
            host.process
                .wait(deadline.saturating_duration_since(Instant::now()))?;
        }
    }
    cgroup::remove(dir.name(), deadline)
}

impl HostStatus {
    /// The service of that name.
    pub fn service(&self, name: &str) -> Option<&crate::ServiceStatus> {
        self.services.iter().find(|service| service.name == name)
    }
}

impl LabStatus {
    /// The host of that name.
    pub fn host(&self, name: &str) -> Option<&HostStatus> {
        self.hosts.iter().find(|host| host.name == name)
    }
}
