//! What is different for a virtual machine: QEMU waits at the destination before any RAM is sent, and is stopped by its own means.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, bail};

use super::Source;
use super::images::Images;
use crate::agent::Shared;
use crate::instances::machine::RAM;
use crate::instances::machine::leaving::Leaving;
use crate::instances::record::Record;
use crate::instances::storage::devices;
use crate::instances::tasks::Dumped;
use crate::memory::ram::Which;
use crate::protocol::{BLOCK_DEVICES, LIBVIRT, MACHINES};
use crate::report::milliseconds;
use crate::session::told;

/// Why a virtual machine cannot come to a host whose agent may be an earlier one.
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

impl Source {
    /// Whether the instance is one.
    pub(super) fn is_machine(&self) -> bool {
        self.record().machine.is_some()
    }

    /// An error if it cannot be moved, or the destination does not know what it is.
    pub(super) async fn meet_machine(&mut self) -> anyhow::Result<()> {
        let to = &self.request.destination;
        if let Some(why) = unknown(&self.agent, self.record(), to) {
            bail!("{why}");
        }
        self.machine = Some(Leaving::begin(&self.instance).await?);
        Ok(())
    }

    /// QEMU waits at the destination when this returns, and what is written to the RAM is known from then on. What QEMU has put into its RAM there when it
    /// started is written over by the first round.
    pub(super) async fn await_machine(&mut self) -> anyhow::Result<()> {
        let to = self.request.destination.clone();
        let machine = self.machine.as_ref().context("QEMU was not asked yet")?;
        machine.describe(&self.instance).await?;
        let mut destination = self.destination();
        // The folders that its container has mounts of.
        self.bytes.pre_copy += self.files.round(&mut destination).await?;
        let prepared = destination.prepare_restore(self.id()).await;
        told(&to, "start QEMU", prepared)?;
        let machine = self.machine.as_mut().context("QEMU was not asked yet")?;
        machine.track().await
    }

    /// The guest stands still when this returns, the destination has its RAM, and the state of its devices is written down.
    pub(super) async fn stop_machine(&mut self) -> anyhow::Result<()> {
        let machine = self.machine.as_mut().context("QEMU was not asked yet")?;
        let stopped = machine.leave(&self.agent.tools, &self.instance).await?;
        // Kept before it is waited for, so that it is undone in order.
        let Dumped::Machine(stopped) = self.dumped.insert(Dumped::Machine(stopped)) else {
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
