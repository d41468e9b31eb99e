//! The software RNIC: a connection for the control path, an arena of shared memory for the queues, a socket for
//! asynchronous events and one for each completion channel.

mod control;
mod device;
pub(crate) mod events;
mod images;
pub(crate) mod map;
mod numbers;
pub(crate) mod rings;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use verbatim_device::control::{Request, SOCKET_NAME};
use verbatim_seqpacket::Socket;

use self::control::no_answer;
use self::device::SoftDevice;
pub(super) use self::rings::{SoftCompletions, SoftRecvs, SoftSends};
use super::{Device, Provider};
use crate::backend::DeviceInfo;
use crate::error::VerbsError;

/// The software RNIC whose socket is in a runtime folder.
#[derive(Debug)]
pub struct SoftProvider {
    runtime: PathBuf,
    /// Limit for a request to the RNIC; `None`: it waits.
    limit: Option<Duration>,
    /// As it said when it was first asked: a program may list devices often.
    known: Mutex<Vec<DeviceInfo>>,
}

impl SoftProvider {
    pub fn new(runtime: &Path, limit: Option<Duration>) -> Self {
        Self {
            runtime: runtime.to_owned(),
            limit,
            known: Mutex::default(),
        }
    }
}

impl Provider for SoftProvider {
    fn devices(&self) -> Vec<DeviceInfo> {
        let mut known = self.known.lock();
        if known.is_empty()
            && let Ok(device) = open(&self.runtime, self.limit)
        {
            let (attr, _) = device.attributes();
            known.push(DeviceInfo {
                name: attr.name.clone(),
                guid: attr.node_guid,
            });
        }
        known.clone()
    }

    fn open(&self, _name: &str) -> Result<Arc<dyn Device>, VerbsError> {
        open(&self.runtime, self.limit)
    }

    fn has_cm(&self) -> bool {
        self.runtime.join(SOCKET_NAME).exists()
    }
}

/// Opens a new context at the RNIC of this runtime folder.
fn open(runtime: &Path, limit: Option<Duration>) -> Result<Arc<dyn Device>, VerbsError> {
    let connection = Socket::connect_within(&runtime.join(SOCKET_NAME), limit);
    let connection = connection.map_err(no_answer("open_device"))?;
    let request = |version| Request::OpenContext {
        version,
        name: program_name(),
    };
    let device = SoftDevice::start(connection, "open_device", request)?;
    if limit.is_some() {
        device.serve_host();
    }
    Ok(Arc::new(device))
}

/// The program's name, for the RNIC's statistics.
pub fn program_name() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}
