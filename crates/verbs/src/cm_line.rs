//! The context of the RNIC that the channels of a process share ([`crate::cm`]).

use std::sync::Arc;

use crate::backend::Device;
use crate::error::VerbsError;

/// The line to the RNIC.
#[derive(Debug)]
pub struct Line {
    pub device: Arc<dyn Device>,
    /// The process that opened it: a forked child has none.
    pid: u32,
    pub channels: usize,
}

/// The line of a process, while it has channels.
#[derive(Debug, Default)]
pub struct Cm {
    line: Option<Line>,
}

impl Cm {
    /// The line of this process, opened if there is none.
    pub fn line(
        &mut self,
        open: impl FnOnce() -> Result<Arc<dyn Device>, VerbsError>,
    ) -> Result<&mut Line, VerbsError> {
        let pid = std::process::id();
        let is_ours = |line: &&mut Line| line.pid == pid && !line.device.is_gone();
        if self.line.as_mut().filter(is_ours).is_none() {
            self.line = Some(Line {
                device: open()?,
                pid,
                channels: 0,
            });
        }
        Ok(self.line.as_mut().expect("it was just there"))
    }

    /// The line of this process, if it leads there.
    pub fn line_to(&mut self, device: &Arc<dyn Device>) -> Option<&mut Line> {
        let pid = std::process::id();
        let is_it = |line: &&mut Line| line.pid == pid && Arc::ptr_eq(&line.device, device);
        self.line.as_mut().filter(is_it)
    }

    /// Without a channel it is closed.
    pub fn close_unless_used(&mut self) {
        if self.line.as_ref().is_some_and(|line| line.channels == 0) {
            self.line = None;
        }
    }

    /// How many channels this process has.
    pub fn channels(&self) -> usize {
        let ours = self.line.as_ref().filter(|line| line.pid == std::process::id());
        ours.map_or(0, |line| line.channels)
    }
}
