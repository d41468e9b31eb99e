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

/// How long the guest may take to stop, with its disks drained and what is no RAM of ours (a display's memory) sent.
const STOP: Duration = Duration::from_secs(30);

/// How long the state of the devices may take, the network between included.
const STATE: Duration = Duration::from_secs(30);

/// How long QEMU may take to give a migration up.
const CANCEL: Duration = Duration::from_secs(10);

/// What `query-status` says while QEMU's own thread has still to do with the guest, for a moment after it has said how its migration ended: it lets the
/// guest go on where that has failed. Nobody else may before.
const FINISHING: &str = "finish-migrate";

/// How often it is looked whether that is over.
const LOOK: Duration = Duration::from_millis(2);

/// One that is on its way. Dropping this changes nothing: it is given up by [`Outgoing::take_back`].
#[derive(Debug)]
pub struct Outgoing {
    machine: Arc<Machine>,
    events: Receiver<Event>,
    /// Whether the guest ran before, and so is to run afterwards.
    ran: bool,
    /// QEMU's earlier settings.
    noted: Settings,
    /// The images that it has locked; the destination's QEMU needs the same locks.
    images: Images,
}

impl Machine {
    /// Has QEMU begin to send the state of the devices, which is read from the stream that is returned.
    /// The guest runs on until [`Outgoing::stopped`].
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

    /// What [`Outgoing::take_back`] does, for whoever comes after one who has died with it; `ran`: whether
    /// the guest ran before, and so is to run; `noted`: QEMU's earlier settings, as far as they are known.
    pub async fn take_back(&self, ran: bool, noted: Option<&Settings>) -> Result<()> {
        self.give_up(ran, None, &mut self.qmp().events()).await?;
        match noted {
            Some(noted) => self.put_back(noted).await,
            None => Ok(()),
        }
    }

    /// `guarded`: images that are guarded until QEMU takes them.
    async fn give_up(&self, ran: bool, guarded: Option<&Images>, events: &mut Receiver<Event>) -> Result<()> {
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
                // No event tells of the last step of a migration that has completed.
                tokio::time::sleep(LOOK).await;
            }
        };
        match in_time("ended its migration", CANCEL, settled).await?.running {
            true => Ok(()),
            false => {
                guarded.inspect(|images| images.release());
                self.go_on().await
            }
        }
    }
}

impl Outgoing {
    /// Whether the guest ran before.
    pub fn ran(&self) -> bool {
        self.ran
    }

    /// Waits until the guest stands still and its disks are quiet. What is in the RAM then is what the destination must have
    /// before [`Self::hand_over`].
    pub async fn stopped(&mut self) -> Result<()> {
        self.machine
            .comes_to(&["pre-switchover"], &mut self.events, STOP)
            .await
    }

    /// Has QEMU send the state of the devices, and waits until all of it has left.
    pub async fn hand_over(&mut self) -> Result<()> {
        let state = json!({"state": "pre-switchover"});
        self.machine.qmp().run("migrate-continue", state).await?;
        self.machine
            .comes_to(&["completed"], &mut self.events, STATE)
            .await
    }

    /// An error if the destination's QEMU would not get the locks on images that this one had: it could load
    /// the guest, but not let it run. To be called when the guest is handed over, and before it is loaded:
    /// from then on the destination's QEMU has them.
    pub fn has_let_go(&self) -> Result<()> {
        self.images.are_free(self.machine.pid())
    }

    /// Holds the locks on images that QEMU has let go in its place, so that nobody else gets them: until [`Self::release`], [`Self::take_back`], or the end of this
    /// process. To be called after [`Self::hand_over`] alone: before, QEMU may still take its images back by itself.
    pub fn guard(&self) -> Result<()> {
        self.images.guard()
    }

    /// The destination's QEMU may take them from now on.
    pub fn release(&self) {
        self.images.release();
    }

    /// The images that it had locked, for the destination, which is to have them so.
    pub fn held(&self) -> Vec<Held> {
        self.images.held()
    }

    /// Gives it up: the guest goes on here, if it ran, and QEMU is set as it was. Only where it is certain that it does not run elsewhere, and never will.
    pub async fn take_back(mut self) -> Result<()> {
        let images = Some(&self.images);
        self.machine.give_up(self.ran, images, &mut self.events).await?;
        self.machine.put_back(&self.noted).await
    }
}
