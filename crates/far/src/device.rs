//! The RNIC of this host, opened by a daemon.

use std::path::Path;
use std::sync::Arc;

use crate::connection::{Connection, Options};
use crate::error::Error;
use crate::opened::Opened;

/// This host's RNIC. As long as one of its connections or buffers lives, it is open.
#[derive(Debug, Clone)]
pub struct Device {
    opened: Arc<Opened>,
}

impl Device {
    /// Opens the RNIC whose control socket is in the folder `runtime`. Nobody moves what this process does with it: it is a daemon
    /// of this host.
    pub fn open(runtime: &Path) -> Result<Self, Error> {
        let opened = Opened::open(runtime)?;
        Ok(Self { opened })
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
