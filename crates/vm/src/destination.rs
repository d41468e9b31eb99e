//! A virtual machine that arrives.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::net::UnixStream;
use tokio::sync::broadcast::Receiver;

use crate::error::{Error, Result};
use crate::machine::{Machine, STREAM_URI};
use crate::qmp::Event;
use crate::settings::Settings;

/// Limit for the state of the devices to arrive, once it is expected, and to be loaded.
const LOAD: Duration = Duration::from_secs(60);

/// Announcement of the guest's new place to switches: the number of packets, and their intervals in ms.
const ANNOUNCEMENT: [(&str, u32); 4] = [("initial", 50), ("max", 550), ("rounds", 5), ("step", 100)];

/// An arriving virtual machine. It runs only after [`Incoming::run`].
#[derive(Debug)]
pub struct Incoming {
    machine: Arc<Machine>,
    events: Receiver<Event>,
    /// This QEMU's earlier settings.
    noted: Settings,
}

impl Machine {
    /// Makes a QEMU that was started for a migration wait for the state of the devices, which is to be
    /// written to the returned stream.
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
    /// Waits until the state of the devices is loaded. The guest could run then, but does not.
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
    /// Announces the guest's place to the switches.
    pub async fn announce(&self) -> Result<()> {
        let announcement: serde_json::Map<_, _> = ANNOUNCEMENT
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).into()))
            .collect();
        self.qmp().run("announce-self", announcement.into()).await
    }
}
