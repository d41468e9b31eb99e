//! A virtual machine that leaves.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::net::UnixStream;
use tokio::sync::broadcast::Receiver;

use crate::error::Result;
use crate::limit::in_time;
use crate::locks::{Held, Images};
use crate::machine::{Machine, STREAM_URI};
use crate::qmp::Event;
use crate::settings::Settings;

/// Limit for the guest to stop, with its disks drained and memory outside our RAM (a display's) sent.
const STOP: Duration = Duration::from_secs(30);

/// Limit for the transfer of the devices' state, including the network.
const STATE: Duration = Duration::from_secs(30);

/// Limit for QEMU to give a migration up.
const CANCEL: Duration = Duration::from_secs(10);

/// The state in `query-status` while QEMU's own thread is not done with the guest, for a moment after it has
/// reported the end of its migration: after a failure this thread lets the guest go on. Nothing else may do
/// so before.
const FINISHING: &str = "finish-migrate";

/// Interval of the checks whether this is over.
const LOOK: Duration = Duration::from_millis(2);

/// A leaving virtual machine. A drop changes nothing: [`Outgoing::take_back`] gives the move up.
#[derive(Debug)]
pub struct Outgoing {
    machine: Arc<Machine>,
    events: Receiver<Event>,
    /// Whether the guest ran before, and so has to run afterwards.
    ran: bool,
    /// QEMU's earlier settings.
    noted: Settings,
    /// The images that QEMU has locked; the destination's QEMU needs the same locks.
    images: Images,
}

impl Machine {
    /// Makes QEMU begin to send the state of the devices, which is to be read from the returned stream. The
    /// guest runs on until [`Outgoing::stopped`].
    pub async fn leave(self: &Arc<Self>) -> Result<(Outgoing, UnixStream)> {
        let noted = self.settings().await?;
        self.leave_from(noted).await
    }

    /// The same with settings that the caller has noted durably: they are put back when the move ends.
    pub async fn leave_from(self: &Arc<Self>, noted: Settings) -> Result<(Outgoing, UnixStream)> {
        self.may_move().await?;
        let images = Images::of(self.pid())?;
        self.prepare(&noted).await?;
        let outgoing = Outgoing {
            machine: Arc::clone(self),
            events: self.qmp().events(),
            ran: self.status().await?.running,
            noted,
            images,
        };
        let stream = self.give_stream().await?;
        self.qmp().run("migrate", json!({"uri": STREAM_URI})).await?;
        Ok((outgoing, stream))
    }

    /// The same as [`Outgoing::take_back`], for a process that takes over from an earlier one. `ran`: whether
    /// the guest ran before, and so has to run; `noted`: QEMU's earlier settings, as far as they are known.
    pub async fn take_back(&self, ran: bool, noted: Option<&Settings>) -> Result<()> {
        self.give_up(ran, &mut self.qmp().events()).await?;
        match noted {
            Some(noted) => self.put_back(noted).await,
            None => Ok(()),
        }
    }

    async fn give_up(&self, ran: bool, events: &mut Receiver<Event>) -> Result<()> {
        let over = ["none", "cancelled", "failed", "completed"];
        let status = self.migration().await?.status;
        if !over.contains(&status.as_deref().unwrap_or("none")) {
            self.qmp().run("migrate_cancel", json!({})).await?;
            self.comes_to(&over, events, CANCEL).await?;
        }
        if !ran {
            return Ok(());
        }
        let settled = async {
            loop {
                let status = self.status().await?;
                if status.status != FINISHING {
                    return Ok(status);
                }
                // There is no event for the last step of a completed migration.
                tokio::time::sleep(LOOK).await;
            }
        };
        match in_time("ended its migration", CANCEL, settled).await?.running {
            true => Ok(()),
            false => self.go_on().await,
        }
    }
}

impl Outgoing {
    /// Whether the guest ran before.
    pub fn ran(&self) -> bool {
        self.ran
    }

    /// Waits until the guest stands still and its disks are quiet. The destination must have the RAM's
    /// content of that time before [`Self::hand_over`].
    pub async fn stopped(&mut self) -> Result<()> {
        self.machine
            .comes_to(&["pre-switchover"], &mut self.events, STOP)
            .await
    }

    /// Makes QEMU send the state of the devices, and waits until all of it has left.
    pub async fn hand_over(&mut self) -> Result<()> {
        let state = json!({"state": "pre-switchover"});
        self.machine.qmp().run("migrate-continue", state).await?;
        self.machine
            .comes_to(&["completed"], &mut self.events, STATE)
            .await
    }

    /// An error if the destination's QEMU would not get the locks on images that this one had: it could load
    /// the guest, but not let it run. Called when the guest is handed over, before it is loaded: from then on
    /// the destination's QEMU has the locks.
    pub fn has_let_go(&self) -> Result<()> {
        self.images.are_free(self.machine.pid())
    }

    /// The locked images with their locks, for the destination.
    pub fn held(&self) -> Vec<Held> {
        self.images.held()
    }

    /// Gives the move up: the guest goes on here, if it ran, and QEMU's settings are put back. Only if it is
    /// certain that the guest does not run elsewhere, and never will.
    pub async fn take_back(mut self) -> Result<()> {
        self.machine.give_up(self.ran, &mut self.events).await?;
        self.machine.put_back(&self.noted).await
    }
}
