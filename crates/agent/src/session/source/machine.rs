//! Differences for a virtual machine: QEMU waits at the destination before any RAM is sent, and is stopped by
//! its own means.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, bail};
use tonic::transport::Channel;
use verbatim_container::Workload;
use verbatim_vm::Carried;

use super::Source;
use super::images::Images;
use crate::agent::Shared;
use crate::instances::machine::RAM;
use crate::instances::machine::guest::Guest;
use crate::instances::machine::leaving::Leaving;
use crate::instances::record::Record;
use crate::instances::storage::{devices, images};
use crate::instances::tasks::Dumped;
use crate::memory::ram::Which;
use crate::peers::reason;
use crate::proto::OpenRequest;
use crate::proto::peer_client::PeerClient;
use crate::protocol::{BLOCK_DEVICES, DISK_SERVERS, IMAGES, LIBVIRT, MACHINE_FITS, MACHINES};
use crate::report::milliseconds;
use crate::session::told;

/// Obstacle to a virtual machine's move to a host with an agent that may be an earlier release.
pub fn unknown(agent: &Shared, record: &Record, to: &str) -> Option<String> {
    let guest = record.machine.as_ref()?;
    let lacks = |capability: &str| !agent.peers.can(to, capability);
    if lacks(MACHINES) {
        Some(format!(
            "the agent of {to} does not know virtual machines; upgrade it"
        ))
    } else if guest.is_domain() && lacks(LIBVIRT) {
        Some(format!(
            "the agent of {to} does not know libvirt's domains; upgrade it"
        ))
    } else if !devices::names(&record.workload).is_empty() && lacks(BLOCK_DEVICES) {
        Some(format!(
            "the agent of {to} does not know disks that are block devices; upgrade it"
        ))
    } else {
        None
    }
}

/// The reason why a virtual machine in its present state cannot move to a host with an agent of an earlier
/// release, which cannot compare its disks.
pub fn uncompared(agent: &Shared, record: &Record, carried: &Carried, to: &str) -> Option<String> {
    let Workload::Command { binds, .. } = &record.workload else {
        return None;
    };
    if let Some(remote) = carried.remotes.first()
        && !agent.peers.can(to, DISK_SERVERS)
    {
        return Some(format!(
            "the agent of {to} does not compare the servers of disks, such as that of {}; upgrade it",
            remote.disk
        ));
    }
    if agent.peers.can(to, IMAGES) {
        return None;
    }
    let is_as_started = carried
        .arguments
        .as_ref()
        .is_none_or(|arguments| matches!(&record.machine, Some(Guest::Qemu(known)) if known == arguments));
    let is_named = |path: &Path| binds.iter().any(|bind| bind.path == path);
    let unnamed = carried.files.iter().find(|file| !is_named(&file.path));
    match unnamed {
        Some(file) => Some(format!(
            "the agent of {to} does not compare {}, which is a part of its disks; upgrade it",
            file.path.display()
        )),
        None if is_as_started => None,
        None => Some(format!(
            "the agent of {to} does not know virtual machines whose disks or devices were changed while they ran; upgrade it"
        )),
    }
}

/// Asks the destination for the images that it has on other storage, and fills in their content.
pub async fn look_into_images(
    peer: &mut PeerClient<Channel>,
    request: &mut OpenRequest,
) -> anyhow::Result<()> {
    if request.images.is_empty() {
        return Ok(());
    }
    let asked = peer.check_instance(request.clone()).await;
    let reply = asked
        .map_err(|status| anyhow::anyhow!("{}", reason(&status)))?
        .into_inner();
    let mut images = std::mem::take(&mut request.images);
    let looked = tokio::task::spawn_blocking(move || {
        images::look_into(&mut images, &reply.images_elsewhere)?;
        anyhow::Ok(images)
    });
    request.images = looked.await.context("looking into images panicked")??;
    Ok(())
}

impl Source {
    /// Whether the instance is a virtual machine.
    pub(super) fn is_machine(&self) -> bool {
        self.record().machine.is_some()
    }

    /// An error if the machine cannot be moved, or the destination does not support it.
    pub(super) async fn meet_machine(&mut self) -> anyhow::Result<()> {
        let to = &self.request.destination;
        if let Some(why) = unknown(&self.agent, self.record(), to) {
            bail!("{why}");
        }
        let leaving = Leaving::begin(&self.instance).await?;
        if let Some(why) = uncompared(&self.agent, self.record(), &leaving.carried, to) {
            bail!("{why}");
        }
        self.machine = Some(leaving);
        Ok(())
    }

    /// Properties of the machine for the destination to compare with its own. Empty if it does not compare
    /// them, or if there are none.
    pub(super) async fn machine_needs(&self) -> anyhow::Result<String> {
        match (&self.machine, &self.record().machine) {
            (Some(machine), Some(guest)) if self.agent.peers.can(&self.request.destination, MACHINE_FITS) => {
                machine.needs(&self.agent, guest).await
            }
            _ => Ok(String::new()),
        }
    }

    /// Has QEMU started at the destination, where it waits when this returns; writes to the RAM are tracked
    /// from then on. QEMU's own writes to its RAM there at its start are overwritten by the first round.
    pub(super) async fn await_machine(&mut self) -> anyhow::Result<()> {
        let to = self.request.destination.clone();
        let machine = self.machine.as_ref().context("QEMU was not asked yet")?;
        machine.describe(&self.instance).await?;
        let mut destination = self.destination();
        // Folders that the container of the destination's QEMU mounts.
        self.bytes.pre_copy += self.files.round(&mut destination).await?;
        let prepared = destination.prepare_restore(self.id()).await;
        told(&to, "start QEMU", prepared)?;
        let machine = self.machine.as_mut().context("QEMU was not asked yet")?;
        machine.track().await
    }

    /// Stops the guest. When this returns, the guest stands still, the destination has its RAM, and the state
    /// of its devices is written to disk.
    pub(super) async fn stop_machine(&mut self) -> anyhow::Result<()> {
        let machine = self.machine.as_mut().context("QEMU was not asked yet")?;
        let stopped = machine.leave(&self.agent.tools, &self.instance).await?;
        // Kept before the wait, so that an error undoes the steps in order.
        let Dumped::Machine(stopped) = self.dumped.insert(Dumped::Machine(Box::new(stopped))) else {
            unreachable!("it was put there just now");
        };
        stopped.stopped().await?;
        self.timeline.frozen();
        self.detached = true;
        self.instance.home.detach()?;
        let begun = Instant::now();
        let mut destination = self.destination();
        let mut beside = destination.clone();
        self.files.hurry();
        if self.left_behind.is_some() {
            self.leave_the_rest_behind().await?;
            self.bytes.stop_and_copy += self.files.round(&mut destination).await?;
        } else {
            let (way, rounds) = (
                self.in_a_hurry(),
                &mut self.machine.as_mut().context("as above")?.rounds,
            );
            let (files, ram) = tokio::join!(
                self.files.round(&mut destination),
                way.ram(Path::new(RAM), rounds, Which::Last, &mut beside),
            );
            self.bytes.stop_and_copy += files? + ram?;
        }
        let last = milliseconds(begun.elapsed());
        tracing::debug!("the last round of the RAM took {last:.1} ms");
        let Some(Dumped::Machine(stopped)) = &mut self.dumped else {
            unreachable!("as above");
        };
        stopped.hand_over().await?;
        let images = &self.instance.home.paths.images;
        self.images = Some(Images::new(self.session, images));
        Ok(())
    }
}
