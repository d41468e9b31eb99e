//! A virtual machine that arrives.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::net::UnixStream;
use tokio::sync::broadcast::Receiver;

use crate::error::{Error, Result};
use crate::machine::{Machine, STREAM_URI};
use crate::qmp::Event;
use crate::settings::{LATE, Settings};

/// How long the state of the devices may take to arrive, once it is expected, and to be loaded.
const LOAD: Duration = Duration::from_secs(60);

/// How its new place is told to switches: by so many packets, the first two ms apart, in ms and in numbers.
const ANNOUNCEMENT: [(&str, u32); 4] = [("initial", 50), ("max", 550), ("rounds", 5), ("step", 100)];

/// One that is on its way. It runs when [`Incoming::run`] says so, and never before.
#[derive(Debug)]
pub struct Incoming {
    machine: Arc<Machine>,
    events: Receiver<Event>,
    /// This QEMU's earlier settings.
    noted: Settings,
}

impl Machine {
    /// Has a QEMU that was started to take what arrives wait for the state of the devices, which is written to the stream that is returned.
    pub async fn arrive(self: &Arc<Self>) -> Result<(Incoming, UnixStream)> {
        let noted = self.settings().await?;
        self.prepare(&noted).await?;
        let incoming = Incoming {
            machine: Arc::clone(self),
            events: self.qmp().events(),
            noted,
        };
        let stream = self.give_stream().await?;
        self.qmp()
            .run("migrate-incoming", json!({"uri": STREAM_URI}))
            .await?;
        Ok((incoming, stream))
    }
}

impl Incoming {
    /// Waits until the state of the devices is loaded. The guest could run then, and does not.
    pub async fn loaded(&mut self) -> Result<()> {
        self.machine
            .comes_to(&["completed"], &mut self.events, LOAD)
            .await?;
        let status = self.machine.status().await?;
        match status.running {
            false => Ok(()),
            true => Err(Error::Malformed("the guest runs, and was not told to".to_owned())),
        }
    }

    /// Has QEMU take its images, and the locks on them, when the guest begins to run, and not when it is loaded. Only for a guest that is to run: QEMU (7.2) aborts where it
    /// migrates a guest that has never taken its images.
    pub async fn takes_images_late(&self) -> Result<()> {
        let late = json!({"capabilities": [{"capability": LATE, "state": true}]});
        self.machine.qmp().run("migrate-set-capabilities", late).await
    }

    /// This QEMU's settings before it was prepared.
    pub fn noted(&self) -> &Settings {
        &self.noted
    }

    /// Lets the guest run: after the decision that it runs here, and if it ran at its source. QEMU's settings
    /// are put back.
    pub async fn run(self) -> Result<()> {
        self.machine.go_on().await?;
        self.machine.announce().await?;
        self.machine.put_back(&self.noted).await
    }
}

impl Machine {
    /// Tells the switches where the guest is now.
    pub async fn announce(&self) -> Result<()> {
        let announcement: serde_json::Map<_, _> = ANNOUNCEMENT
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).into()))
            .collect();
        self.qmp().run("announce-self", announcement.into()).await
    }
}
