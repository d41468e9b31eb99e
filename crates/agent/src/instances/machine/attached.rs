//! A QEMU that the agent has not started, and that is an instance until it leaves this host.
//!
//! QEMU stays a process of the host, in its own namespaces. The instance's container has one program that
//! sleeps, and QEMU is counted among the container's tasks by the cgroup alone: so it is frozen for a
//! decision and killed after it, as other instances are. At its next host the machine is like one that the
//! agent has started; a domain of libvirt is libvirt's there, too, and attached.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use verbatim_container::{Bind, Cgroup, Init, Tasks, Workload, started_at};
use verbatim_vm::{Arguments, Domain, Machine, Qmp, USUAL_MAC};

use super::guest::{Guest, Owned};
use crate::agent::Shared;
use crate::instances::home::Paths;
use crate::instances::{Instance, State};
use crate::whole;

/// Note of the attached QEMU, in the folder of CRIU's logs: it is not sent along.
const FILE: &str = "attached";

/// Program of the container beside QEMU.
const HOLDER: [&str; 2] = ["sleep", "infinity"];

/// An attached QEMU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    pid: u32,
    /// Time of its start ([`started_at`]). Number and start together identify the process.
    started: u64,
    #[serde(flatten)]
    by: By,
    /// Cgroup of QEMU before it was attached, for its return.
    cgroup: Option<Cgroup>,
    /// Threads that were in other cgroups, and those cgroups.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    threads: Vec<(u32, Cgroup)>,
}

/// Access to QEMU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum By {
    /// By its QMP socket; the path as this agent sees it.
    Qmp(PathBuf),
    /// Through libvirt, which has its QMP socket.
    Domain(Domain),
}

impl Attached {
    /// The domain of libvirt with this name, its description as an instance, and its files.
    pub async fn find_domain(uri: &str, name: &str) -> anyhow::Result<(Self, Guest, Vec<Bind>)> {
        let domain = Domain::find(uri, name).await?;
        let obstacles = domain.obstacles().await?;
        ensure!(obstacles.is_empty(), "{}", obstacles.join("; "));
        let found = Self::of_domain(&domain).await?;
        let machine = found.connect().await.with_context(|| {
            format!("the domain {name} cannot be attached; its RAM must be a file in a tmpfs: memory_backing_dir of libvirt's qemu.conf")
        })?;
        machine.memory().await?;
        let binds = domain.files().await?.into_iter();
        let guest = Guest::Domain(Owned {
            ram: machine.ram().bytes(),
            domain,
        });
        Ok((
            found,
            guest,
            binds.map(|(path, writable)| Bind { path, writable }).collect(),
        ))
    }

    /// The QEMU of a domain that libvirt has started.
    pub async fn of_domain(domain: &Domain) -> anyhow::Result<Self> {
        let pid = domain.process().await?;
        Ok(Self {
            pid,
            started: started_at(pid).context("QEMU has ended")?,
            by: By::Domain(domain.clone()),
            cgroup: None,
            threads: Vec::new(),
        })
    }

    /// The QEMU that listens on a QMP socket, and its arguments.
    pub async fn find(qmp: &Path) -> anyhow::Result<(Self, Arguments)> {
        ensure!(
            qmp.is_absolute(),
            "{} is no absolute path of a QMP socket",
            qmp.display()
        );
        let (pid, connection) = connect(qmp).await?;
        let started = started_at(pid).context("QEMU has ended")?;
        let process = PathBuf::from(format!("/proc/{pid}"));
        let line = std::fs::read(process.join("cmdline")).context("cannot read QEMU's command line")?;
        let line: Vec<String> = line
            .split(|byte| *byte == 0)
            .map(|word| String::from_utf8(word.to_vec()))
            .collect::<Result<_, _>>()
            .context("QEMU's command line is not UTF-8")?;
        let line = line.strip_suffix(&[String::new()]).unwrap_or(&line);
        let cwd = std::fs::read_link(process.join("cwd")).context("cannot read QEMU's working directory")?;
        let machine = Machine::attached(pid, connection).await?;
        let (memory, kind) = (machine.memory().await?, machine.machine_type().await?);
        let arguments = Arguments::of_running(line, &memory, &kind, &cwd)?;
        ensure!(
            arguments.ram() == machine.ram().bytes(),
            "its RAM has {} bytes, and its command line says {}",
            machine.ram().bytes(),
            arguments.ram()
        );
        let found = Self {
            pid,
            started,
            by: By::Qmp(qmp.to_owned()),
            cgroup: None,
            threads: Vec::new(),
        };
        Ok((found, arguments))
    }

    /// The attached QEMU of an instance; `None` if the agent started QEMU itself.
    pub fn of(paths: &Paths) -> anyhow::Result<Option<Self>> {
        whole::read_json(&paths.work.join(FILE), "which QEMU it is")
    }

    /// Counts QEMU among the tasks of a running container. The note is written before: QEMU must not end with
    /// the container if this agent dies meanwhile.
    pub async fn join(mut self, tasks: &Tasks, paths: &Paths) -> anyhow::Result<()> {
        self.cgroup = Some(tasks.cgroup_of(self.pid).await?);
        self.threads = tasks.cgroups_of_threads(self.pid).await?;
        let path = paths.work.join(FILE);
        whole::write_json(&path, &self)?;
        Ok(tasks.take_in(self.pid).await?)
    }

    /// Undoes [`Self::join`]: QEMU is only a process of the host again.
    pub async fn leave(&self, tasks: &Tasks, paths: &Paths) -> anyhow::Result<()> {
        if let Some(cgroup) = self.cgroup.as_ref().filter(|_| self.is_there()) {
            tasks.let_out(self.pid, cgroup, &self.threads).await?;
        }
        match std::fs::remove_file(paths.work.join(FILE)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).context("QEMU is taken for a virtual machine of ours still")
            }
            _ => Ok(()),
        }
    }

    fn is_there(&self) -> bool {
        started_at(self.pid) == Some(self.started)
    }

    /// QEMU's process number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The domain, if libvirt owns this QEMU.
    pub fn domain(&self) -> Option<&Domain> {
        match &self.by {
            By::Qmp(_) => None,
            By::Domain(domain) => Some(domain),
        }
    }

    /// Connects to QEMU. By its socket QEMU serves one connection.
    pub async fn connect(&self) -> anyhow::Result<Arc<Machine>> {
        ensure!(self.is_there(), "QEMU (process {}) has ended", self.pid);
        let qmp = match &self.by {
            By::Qmp(path) => {
                let (pid, qmp) = connect(path).await?;
                if pid != self.pid {
                    bail!(
                        "process {pid} listens on {}, and the virtual machine is process {}",
                        path.display(),
                        self.pid
                    );
                }
                qmp
            }
            By::Domain(domain) => Qmp::through(domain.clone()),
        };
        Ok(Arc::new(Machine::attached(self.pid, qmp).await?))
    }
}

async fn connect(path: &Path) -> anyhow::Result<(u32, Qmp)> {
    let failed = || {
        format!(
            "cannot connect to QEMU at {}; it is the socket of `-qmp unix:…`, and serves one client at a time",
            path.display()
        )
    };
    let stream = UnixStream::connect(path).await.with_context(failed)?;
    let pid = stream.peer_cred().with_context(failed)?.pid();
    let pid = pid.and_then(|pid| u32::try_from(pid).ok());
    let pid = pid
        .filter(|pid| *pid > 0)
        .context("who listens on the QMP socket is no process that this host's agent sees")?;
    Ok((pid, Qmp::of(stream).await.with_context(failed)?))
}

/// Workload of the container while QEMU is beside it.
pub fn holder(workload: &Workload) -> anyhow::Result<Workload> {
    let Workload::Command { env, cwd, .. } = workload else {
        bail!("a virtual machine has no bundle of its own");
    };
    Ok(Workload::Command {
        args: HOLDER.map(str::to_owned).into(),
        env: env.clone(),
        cwd: cwd.clone(),
        binds: Vec::new(),
    })
}

/// The same virtual machine with the usual links of an instance at its next host.
pub fn anywhere(arguments: Arguments) -> anyhow::Result<Arguments> {
    Ok(arguments.on_tap(verbatim_container::TAP, USUAL_MAC)?)
}

/// Ends the instance when QEMU has ended. Does nothing for other instances.
pub fn watch(agent: &Shared, instance: &Arc<Instance>) -> anyhow::Result<()> {
    let paths = &instance.home.paths;
    let Some(attached) = Attached::of(paths)? else {
        return Ok(());
    };
    let tasks = Tasks::of(&agent.tools, &instance.home.record.name, &paths.work);
    let instance = Arc::clone(instance);
    let pid = i32::try_from(attached.pid).context("no process number")?;
    // Opened before the check, so that the process checked is the process waited for.
    let qemu = Init::open(pid).ok().filter(|_| attached.is_there());
    tokio::spawn(async move {
        let mut state = instance.watch();
        let is_over = |state: &State| !matches!(state, State::Running | State::Moving);
        if let Some(mut qemu) = qemu {
            tokio::select! {
                // The instance was detached, or has moved away.
                _ = state.wait_for(is_over) => return,
                ended = qemu.wait_exit() => tracing::info!(instance = instance.name(), ?ended, "QEMU has ended"),
            }
        }
        if !is_over(&instance.state())
            && let Err(error) = tasks.kill().await
        {
            let error = format!("{:#}", anyhow::Error::from(error));
            tracing::error!(
                instance = instance.name(),
                error,
                "its container stays without QEMU"
            );
        }
    });
    Ok(())
}
