//! The RNIC as connections and buffers keep it open.

use std::path::Path;
use std::sync::Arc;

use verbatim_verbs::{Context, Process};

use crate::error::Error;

/// An RNIC that this process has opened; closed with the last that uses it.
#[derive(Debug)]
pub struct Opened {
    process: Arc<Process>,
    pub context: Arc<Context>,
}

impl Opened {
    /// The one whose control socket is in the folder `runtime`.
    pub fn open(runtime: &Path) -> Result<Arc<Self>, Error> {
        let process = Process::unattended(runtime);
        let none = || Error::NoDevice {
            runtime: runtime.display().to_string(),
        };
        let device = process.devices().into_iter().next().ok_or_else(none)?;
        let opened = process.open(&device.name);
        let context = opened.map_err(Error::verbs("the RNIC cannot be opened"))?;
        Ok(Arc::new(Self { process, context }))
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // An RNIC that is gone needs no word.
        let _ = self.context.close();
        self.process.cleanup();
    }
}
