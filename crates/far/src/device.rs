//! The RNIC of this host, opened by a daemon.

use std::path::Path;
use std::sync::Arc;

use crate::connection::{Connection, Options};
use crate::error::Error;
use crate::opened::Opened;
use crate::which::Which;

/// This host's RNIC. As long as one of its connections or buffers lives, it is open.
#[derive(Debug, Clone)]
pub struct Device {
    opened: Arc<Opened>,
}

impl Device {
    /// Opens the RNIC whose control socket is in the folder `runtime`, else the first that the kernel drives.
    pub fn open(runtime: &Path) -> Result<Self, Error> {
        Self::choose(&Which {
            runtime: runtime.to_owned(),
            name: None,
            address: None,
        })
    }

    /// Opens one. Nobody moves what this process does with it: it is a daemon of this host. `VERBATIM_BACKEND` says of which kind it
    /// may be, as for a program.
    pub fn choose(which: &Which) -> Result<Self, Error> {
        let opened = Opened::open(which)?;
        Ok(Self { opened })
    }

    /// Its name, `verbatim0` or `mlx5_0`.
    pub fn name(&self) -> &str {
        &self.opened.name
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
