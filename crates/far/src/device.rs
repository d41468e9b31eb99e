//! The RNIC of this host, opened by a daemon.

use std::path::Path;
use std::sync::Arc;

use verbatim_verbs::{Context, Process, QpClass};

use crate::connection::Connection;
use crate::error::Error;

/// This host's RNIC. As long as one of its connections lives, it is open.
#[derive(Debug, Clone)]
pub struct Device {
    opened: Arc<Opened>,
}

#[derive(Debug)]
pub(crate) struct Opened {
    process: Arc<Process>,
    pub(crate) context: Arc<Context>,
}

/// How a connection is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Whose work goes first. In the background, answers wait like requests: both ends should be of one class. Where an RNIC has no
    /// classes, it is served as all others are ([`Connection::yields`]).
    pub class: QpClass,
    /// The most bytes in flight; a request that is longer goes alone.
    pub window_bytes: u64,
    /// The most requests in flight.
    pub window_requests: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            class: QpClass::User,
            window_bytes: 4 << 20,
            window_requests: 64,
        }
    }
}

impl Device {
    /// Opens the RNIC whose control socket is in the folder `runtime`. Nobody moves what this process does with it: it is a daemon
    /// of this host.
    pub fn open(runtime: &Path) -> Result<Self, Error> {
        let process = Process::unattended(runtime);
        let none = || Error::NoDevice {
            runtime: runtime.display().to_string(),
        };
        let device = process.devices().into_iter().next().ok_or_else(none)?;
        let opened = process.open(&device.name);
        let context = opened.map_err(Error::verbs("the RNIC cannot be opened"))?;
        Ok(Self {
            opened: Arc::new(Opened { process, context }),
        })
    }

    /// Whether the RNIC is gone for ever, and another must be opened.
    pub fn is_gone(&self) -> bool {
        self.opened.context.is_dead()
    }

    /// A new connection, which is not connected yet.
    pub fn connection(&self, options: Options) -> Result<Connection, Error> {
        Connection::new(Arc::clone(&self.opened), options)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // An RNIC that is gone needs no word.
        let _ = self.context.close();
        self.process.cleanup();
    }
}
