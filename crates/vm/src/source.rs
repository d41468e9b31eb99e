//! A virtual machine that leaves.

use std::path::Path;
use std::time::Duration;

use serde_json::json;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::broadcast::Receiver;

use crate::error::{Error, Result};
use crate::machine::Machine;
use crate::qmp::{Event, in_time};

/// How long the guest may take to stop, with its disks drained and what is no RAM of ours (a display's memory) sent.
const STOP: Duration = Duration::from_secs(30);

/// How long the state of the devices may take, the network between included.
const STATE: Duration = Duration::from_secs(30);

/// How long QEMU may take to give a migration up.
const CANCEL: Duration = Duration::from_secs(10);

/// In ms: QEMU stops the guest when it believes that what is left of other memory than the RAM takes no longer.
const OTHER_MEMORY: u64 = 20;

/// In bytes/s: QEMU is not held up, but by the network.
const BANDWIDTH: u64 = 1 << 40;

/// One that is on its way. Dropping this changes nothing: it is given up by [`Outgoing::take_back`].
#[derive(Debug)]
pub struct Outgoing<'a> {
    machine: &'a Machine,
    events: Receiver<Event>,
    /// Whether the guest ran before, and so is to run afterwards.
    ran: bool,
}

impl Machine {
    /// Has QEMU begin to send the state of the devices, which is read from the stream that is returned. `socket` is a path that does not exist.
    /// The guest runs on until [`Outgoing::stopped`].
    pub async fn leave(&self, socket: &Path) -> Result<(Outgoing<'_>, UnixStream)> {
        self.may_move().await?;
        self.prepare().await?;
        let parameters = json!({"max-bandwidth": BANDWIDTH, "downtime-limit": OTHER_MEMORY});
        self.qmp().run("migrate-set-parameters", parameters).await?;
        let outgoing = Outgoing {
            machine: self,
            events: self.qmp().events(),
            ran: self.status().await?.running,
        };
        let bound = UnixListener::bind(socket);
        let listener = bound.map_err(Error::io(format!("listen at {}", socket.display())))?;
        let uri = format!("unix:{}", socket.display());
        self.qmp().run("migrate", json!({"uri": uri})).await?;
        let accepted = async {
            listener
                .accept()
                .await
                .map_err(Error::io("accept QEMU's connection"))
        };
        let accepted = in_time("connected to send its state", STOP, accepted).await;
        // The name has served. Whoever else finds it finds nobody.
        let (Ok(()) | Err(_)) = std::fs::remove_file(socket);
        Ok((outgoing, accepted?.0))
    }
}

impl Outgoing<'_> {
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

    /// Gives it up: the guest goes on here, if it ran. Only where it is certain that it does not run elsewhere, and never will.
    pub async fn take_back(mut self) -> Result<()> {
        let over = ["none", "cancelled", "failed", "completed"];
        let status = self.machine.migration().await?.status;
        if !over.contains(&status.as_deref().unwrap_or("none")) {
            self.machine.qmp().run("migrate_cancel", json!({})).await?;
            self.machine.comes_to(&over, &mut self.events, CANCEL).await?;
        }
        match self.ran && !self.machine.status().await?.running {
            true => self.machine.go_on().await,
            false => Ok(()),
        }
    }
}
