//! The RNIC of this host, opened by a daemon.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::connection::{Connection, Options};
use crate::error::Error;
use crate::opened::Opened;

/// Which of this host's RNICs: the software RNIC, or one that the kernel drives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Which {
    /// The folder of the software RNIC's control socket; there need not be one.
    pub runtime: PathBuf,
    /// The one of this name only.
    pub name: Option<String>,
    /// Rather the one that has this address among its GIDs, and that GID of it: other hosts reach this one by it.
    pub address: Option<IpAddr>,
}

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
