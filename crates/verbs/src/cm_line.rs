//! The context of the RNIC that the channels of a process share ([`crate::cm`]), and how it moves.
//!
//! It is there while a channel has, or has had, an id. A move takes it along: its RNIC says all that it has of the program's ids, the
//! process keeps that while it is frozen, and another RNIC takes it up.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use verbatim_device::control::{CmReply, CmRequest, MOST_CM_BYTES_HERE};
use verbatim_seqpacket::Carried;

use crate::backend::{Device, Parked, Reopen};
use crate::cm::Ends;
use crate::error::VerbsError;
use crate::process::Process;

/// The line to the RNIC.
#[derive(Debug)]
pub struct Line {
    /// None while the process is quiesced.
    device: Option<Arc<dyn Device>>,
    /// Tells it from earlier ones.
    serial: u64,
    /// The process that opened it: a forked child has none.
    pid: u32,
    /// Channels that the RNIC knows, by their numbers there.
    attached: BTreeMap<u32, Arc<Ends>>,
    /// All that the RNIC had, while the process is quiesced.
    image: Option<Vec<u8>>,
}

/// The line of a process, while it has channels with ids.
#[derive(Debug, Default)]
pub struct Cm {
    line: Option<Line>,
    lines: u64,
}

/// What a channel is at the RNIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attachment {
    serial: u64,
    pub number: u32,
}

impl Line {
    pub fn device(&self) -> Option<&Arc<dyn Device>> {
        self.device.as_ref()
    }

    /// A channel's part of it.
    pub fn attachment(&self, number: u32) -> Attachment {
        let serial = self.serial;
        Attachment { serial, number }
    }

    pub fn attach(&mut self, number: u32, channel: &Arc<Ends>) {
        self.attached.insert(number, channel.clone());
    }

    /// The RNIC is gone: so are all ids, and their channels say so.
    fn hang_up(&self) {
        self.attached.values().for_each(|channel| channel.hang_up());
    }
}

/// The context, and whether its ids could be taken along; if not, it is to be taken up again.
pub type ParkedIds = (Parked, Result<(), VerbsError>);

impl Cm {
    /// The line of this process, opened if there is none, or one to an RNIC that is gone.
    pub fn line(&mut self, process: &Process) -> Result<&mut Line, VerbsError> {
        let pid = std::process::id();
        let is_ours = |line: &&mut Line| {
            let is_gone = line.device.as_ref().is_some_and(|device| device.is_gone());
            line.pid == pid && !is_gone
        };
        if self.line.as_mut().filter(is_ours).is_none() {
            if let Some(line) = self.line.take().filter(|line| line.pid == pid) {
                line.hang_up();
            }
            let device = process.open_cm_device()?;
            if let Some(home) = process.home_of(&*device) {
                let know = CmRequest::Know {
                    node_guid: home.node_guid,
                    gids: home.gids.iter().map(|entry| entry.gid).collect(),
                };
                device.cm(know, None)?;
            }
            self.lines += 1;
            self.line = Some(Line {
                device: Some(device),
                serial: self.lines,
                pid,
                attached: BTreeMap::new(),
                image: None,
            });
        }
        Ok(self.line.as_mut().expect("it was just there"))
    }

    /// The line of this process, if there is one.
    pub fn own(&mut self) -> Option<&mut Line> {
        let pid = std::process::id();
        self.line.as_mut().filter(|line| line.pid == pid)
    }

    /// The line, if that is what a channel is attached to.
    pub fn line_of(&mut self, attachment: Attachment) -> Option<&mut Line> {
        self.own().filter(|line| line.serial == attachment.serial)
    }

    /// A channel has gone. Without one the line is closed.
    pub fn detach(&mut self, attachment: Attachment) {
        let Some(line) = self.line_of(attachment) else {
            return;
        };
        line.attached.remove(&attachment.number);
        if line.attached.is_empty() {
            self.line = None;
        }
    }

    /// Without a channel it is closed.
    pub fn close_unless_used(&mut self) {
        if self.own().is_some_and(|line| line.attached.is_empty()) {
            self.line = None;
        }
    }

    /// Whether this process has a line.
    pub fn is_open(&mut self) -> bool {
        self.own().is_some()
    }

    /// What its ids need elsewhere; none without a line.
    pub fn describe(&mut self) -> Result<Option<Vec<u8>>, VerbsError> {
        let device = self.own().and_then(|line| line.device.clone());
        device
            .map(|device| device.cm_bytes(CmRequest::Describe))
            .transpose()
    }

    /// Lets go of the RNIC. What it has of the ids stays in the process; on an error, too, it is let go of.
    pub fn park(&mut self) -> Result<Option<ParkedIds>, VerbsError> {
        let Some(line) = self.own() else { return Ok(None) };
        let Some(device) = line.device.as_ref() else {
            return Ok(None);
        };
        device.deafen()?;
        let image = device.cm_bytes(CmRequest::Dump);
        let device = line.device.take().expect("it was just there");
        let parked = device.park()?;
        let outcome = image.map(|image| line.image = Some(image));
        Ok(Some((parked, outcome)))
    }

    /// Takes an RNIC up: the old one, or another one, where the ids go on. Where that fails they are lost, and their channels say so.
    pub fn claim(&mut self, reopen: &Reopen, connection: OwnedFd, is_new: bool) -> Option<Arc<dyn Device>> {
        let line = self.own()?;
        let image = line.image.take();
        let taken = reopen(connection).and_then(|device| {
            if is_new {
                line.move_to(&*device, image.unwrap_or_default())?;
            }
            Ok(device)
        });
        match taken {
            Ok(device) => {
                line.device = Some(device.clone());
                Some(device)
            }
            Err(_) => {
                self.end();
                None
            }
        }
    }

    /// Its RNIC is gone: whether that was so.
    pub fn look_after(&mut self) -> bool {
        let is_gone = self
            .own()
            .and_then(|line| line.device.as_ref())
            .is_some_and(|device| device.is_gone());
        if is_gone {
            self.end();
        }
        is_gone
    }

    fn end(&mut self) {
        if let Some(line) = self.line.take() {
            line.hang_up();
        }
    }
}

impl Line {
    fn move_to(&mut self, device: &dyn Device, image: Vec<u8>) -> Result<(), VerbsError> {
        let os = |source| VerbsError::Channel {
            verb: "rdma_cm",
            peer: "software RNIC",
            source,
        };
        let (image, memory) = Carried::new(image, MOST_CM_BYTES_HERE).map_err(os)?;
        let adopted = device.cm(
            CmRequest::Adopt { image },
            memory.as_ref().map(std::os::fd::AsFd::as_fd),
        )?;
        let CmReply::Adopted { channels } = adopted else {
            return Err(VerbsError::Invalid(format!("the RNIC answered with {adopted:?}")));
        };
        let numbers: BTreeMap<u32, u32> = channels.into_iter().collect();
        for (number, channel) in std::mem::take(&mut self.attached) {
            let missing = || VerbsError::Invalid(format!("channel {number} of rdma_cm is missing"));
            let number = *numbers.get(&number).ok_or_else(missing)?;
            channel.attach_again(device, self.attachment(number))?;
            self.attached.insert(number, channel);
        }
        Ok(())
    }
}
