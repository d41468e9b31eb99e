//! Virtual machines: QEMUs that the agent starts, and QEMUs of others that it attaches.

use std::path::Path;

use anyhow::{Context, bail};
use verbatim_container::{ContainerName, Init, Tasks, Workload};
use verbatim_vm::{Arguments, Domain};

use super::ControlService;
use crate::instances::home::{Home, Paths};
use crate::instances::machine::attached::{self, Attached};
use crate::instances::machine::guest::Guest;
use crate::instances::machine::{self, Origin, leaving, qemu};
use crate::instances::record::Record;
use crate::instances::recovery;
use crate::instances::start;
use crate::instances::volumes::{self, Disks, Mounted};
use crate::instances::{Instance as HostInstance, State};
use crate::proto::{AttachRequest, Instance};

impl ControlService {
    /// A virtual machine that has these volumes of this host as disks.
    pub(super) async fn with_disks(
        &self,
        name: &ContainerName,
        arguments: Arguments,
        volumes: &[String],
    ) -> anyhow::Result<(Arguments, Vec<Mounted>)> {
        let wanted = volumes::machine::parse(volumes)?;
        let disks = Disks::new(&self.0.config.runtime_dir, name.as_str());
        tokio::task::spawn_blocking(move || volumes::machine::with(arguments, &wanted, &disks)).await?
    }

    /// Lets the guest run, once its QEMU has been started and waits. On an error nothing of the instance is
    /// left.
    pub(super) async fn let_run(&self, home: &Home, init: Init) -> anyhow::Result<Init> {
        let runs = async {
            let machine = qemu::connect(&home.paths, init.pid()).await?;
            Ok(machine.go_on().await?)
        };
        match runs.await {
            Ok(()) => Ok(init),
            Err(error) => {
                self.0.tools.runc().delete(&home.record.name, true).await?;
                Err(error)
            }
        }
    }

    /// Takes a running QEMU as an instance. On an error QEMU is unchanged.
    pub(super) async fn attach_machine(&self, request: AttachRequest) -> anyhow::Result<Instance> {
        let name = ContainerName::new(request.name)?;
        let reservation = self.0.instances.reserve(name.as_str())?;
        let (found, guest, workload) = find(&request.qmp, &request.libvirt, &name).await?;
        let (address, prefix) = self.address(&request.address, &reservation).await?;
        let record = Record {
            name,
            workload,
            address,
            prefix,
            visited: Default::default(),
            rnics: Vec::new(),
            machine: Some(guest),
            volumes: Vec::new(),
            swap: Vec::new(),
            files: self.0.config.instance_files,
            prealloc: false,
            further: Vec::new(),
        };
        let ram = record.machine.as_ref().map_or(0, Guest::ram);
        // QEMU has its RAM already: no lack of memory can refuse the claim.
        let claimed = self.0.instances.claim(&reservation, &record, ram, |_| None);
        if let Err(conflict) = claimed {
            bail!("{conflict}; choose another one");
        }
        if let Some(other) = self.0.instances.all().iter().find(|other| is(other, &found)) {
            bail!("it is the instance {} already", other.name());
        }
        let home = self.home(record, Origin::Attached).await?;
        let tasks = Tasks::of(&self.0.tools, &home.record.name, &home.paths.work);
        let started = async {
            let init = start::start(self.0.tools.runc(), &home).await?;
            match found.join(&tasks, &home.paths).await {
                Ok(()) => Ok(init),
                Err(error) => {
                    self.0.tools.runc().delete(&home.record.name, true).await?;
                    Err(error)
                }
            }
        };
        match started.await {
            Ok(init) => {
                let pid = init.pid();
                let instance = HostInstance::start(home, pid, std::future::ready(Ok(init)), false);
                self.0.instances.insert(instance.clone());
                attached::watch(&self.0, &instance)?;
                Ok(self.describe(&instance).await)
            }
            Err(error) => {
                let _ = tokio::task::spawn_blocking(move || home.remove()).await;
                Err(error)
            }
        }
    }

    /// Forgets an attached virtual machine, and leaves it as it is.
    pub(super) async fn detach_machine(&self, name: &str) -> anyhow::Result<()> {
        let instance = recovery::find(&self.0, name)?;
        let _reservation = self.0.instances.reserve(name)?;
        match instance.state() {
            State::Running => {}
            State::Moving => bail!("{name} is being moved; cancel that, or wait until it has ended"),
            State::Exited(status) => bail!("{name} has ended with status {status}"),
            State::MovedTo(host) => bail!("{name} lives on {host}; ask the agent there"),
        }
        let home = &instance.home;
        let attached = Attached::of(&home.paths)?.with_context(|| {
            format!(
                "{name} was started by Verbatim, and is nothing without it; `verbatim stop {name}` ends it"
            )
        })?;
        leaving::must_be_taken_back(&instance).await?;
        let tasks = Tasks::of(&self.0.tools, &home.record.name, &home.paths.work);
        attached.leave(&tasks, &home.paths).await?;
        self.0.tools.runc().delete(&home.record.name, true).await?;
        let left = instance.clone();
        tokio::task::spawn_blocking(move || left.home.remove()).await?;
        self.0.instances.remove(&instance);
        Ok(())
    }

    /// Ends a QEMU that runc has not started.
    pub(super) async fn end_attached(&self, instance: &HostInstance) -> anyhow::Result<()> {
        let home = &instance.home;
        if Attached::of(&home.paths)?.is_some() {
            Tasks::of(&self.0.tools, &home.record.name, &home.paths.work)
                .kill()
                .await?;
        }
        Ok(())
    }
}

/// A running machine, by its QMP socket, or as the domain of this name if a connection to libvirt is named.
async fn find(qmp: &str, libvirt: &str, name: &ContainerName) -> anyhow::Result<(Attached, Guest, Workload)> {
    if libvirt.is_empty() {
        let (found, arguments) = Attached::find(Path::new(qmp)).await?;
        let arguments = attached::anywhere(arguments)?;
        let workload = machine::workload(&arguments, &[]);
        return Ok((found, Guest::Qemu(arguments), workload));
    }
    let (found, guest, binds) = Attached::find_domain(libvirt, name.as_str()).await?;
    let args = found.domain().map(Domain::line).unwrap_or_default();
    let workload = Workload::Command {
        args,
        env: Vec::new(),
        cwd: "/".into(),
        binds,
    };
    Ok((found, guest, workload))
}

fn is(instance: &HostInstance, found: &Attached) -> bool {
    let known = Attached::of(&instance.home.paths);
    known.is_ok_and(|known| known.is_some_and(|known| known.pid() == found.pid()))
}

/// Process number that is shown to users: that of QEMU for an attached machine.
pub(super) fn pid(paths: &Paths, init_pid: i32) -> i32 {
    match Attached::of(paths) {
        Ok(Some(attached)) => attached.pid().cast_signed(),
        _ => init_pid,
    }
}
