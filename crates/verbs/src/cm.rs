//! Connections by address and port (rdma_cm(7)): the channels of a process, and its line to the RNIC, which keeps all else.
//!
//! A channel takes the place of an open `/dev/infiniband/rdma_cm`. Its descriptor is one end of a pair of sockets, and stays so
//! wherever the process moves. The RNIC gets the other end with the channel's first id, and keeps the descriptor readable while there
//! are events; the process has that end, too, for the next RNIC. A channel without ids is the process's own affair.
//!
//! All channels with ids share one context of the RNIC ([`crate::cm_line`]), which is none of the program's devices.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use parking_lot::Mutex;
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use verbatim_channel::CM_CONTEXT;
use verbatim_device::control::{CmEvent, CmReply, CmRequest};

use crate::backend::Device;
use crate::backend::soft::events::SoftChannel;
use crate::cm_line::Attachment;
use crate::error::VerbsError;
use crate::held;
use crate::helper;
use crate::process::Process;

/// A channel.
#[derive(Debug)]
pub struct CmChannel {
    process: Arc<Process>,
    ends: Arc<Ends>,
    closed: AtomicBool,
}

/// What the line knows of a channel, also while that is about to go.
#[derive(Debug)]
pub(crate) struct Ends {
    /// What it is at the RNIC, once it has had an id.
    attachment: Mutex<Option<Attachment>>,
    /// A child of this process shall not take the events away. Forgotten before the descriptors go.
    _held: [held::Held; 3],
    /// The program's.
    fd: OwnedFd,
    /// A duplicate of it, by which the program's is known.
    own: OwnedFd,
    /// The RNIC's end.
    theirs: OwnedFd,
}

fn wrong<T>(reply: CmReply) -> Result<T, VerbsError> {
    Err(VerbsError::Invalid(format!("the RNIC answered with {reply:?}")))
}

/// What the kernel says of numbers that are no ids.
fn no_id() -> VerbsError {
    VerbsError::Refused {
        verb: "rdma_cm",
        errno: libc::ENOENT,
        message: "the channel has no ids".to_owned(),
    }
}

/// Whether a request changes what ids need at another RNIC.
fn changes_needs(request: &CmRequest) -> bool {
    use CmRequest as R;
    matches!(
        request,
        R::Bind { .. }
            | R::ResolveAddress { .. }
            | R::Listen { .. }
            | R::CreateId { .. }
            | R::DestroyId { .. }
    )
}

impl Ends {
    /// An answer has taken the last event away: so is what says that there are some.
    fn is_quiet(&self, quiet: bool) {
        if quiet {
            // The RNIC has put it there before it answered.
            let _ = rustix::net::recv(&self.own, &mut [0; 16][..], RecvFlags::DONTWAIT);
        }
    }

    /// Another RNIC has its ids: it gets the other end, and what says that there are events is there if there are some.
    pub(crate) fn attach_again(&self, device: &dyn Device, to: Attachment) -> Result<(), VerbsError> {
        let request = CmRequest::AttachChannel { channel: to.number };
        let CmReply::Attached { waiting } = device.cm(request, Some(self.theirs.as_fd()))? else {
            return Err(VerbsError::Invalid(
                "the RNIC does not attach a channel".to_owned(),
            ));
        };
        *self.attachment.lock() = Some(to);
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let is_said = rustix::net::recv(&self.own, &mut [0; 16][..], flags).is_ok();
        match (waiting, is_said) {
            (true, false) => {
                let sent = rustix::net::send(&self.theirs, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
                sent.map(drop).map_err(|errno| VerbsError::os("send", errno))
            }
            (false, true) => {
                self.is_quiet(true);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Its RNIC is gone. Whoever waits for an event learns of it.
    pub(crate) fn hang_up(&self) {
        let _ = rustix::net::shutdown(&self.theirs, Shutdown::Both);
    }
}

impl CmChannel {
    /// Makes a channel for the software RNIC. `None` if the process has none, whatever else it has.
    pub fn open(process: &Arc<Process>) -> Option<Result<Arc<Self>, VerbsError>> {
        process.has_cm_device().then(|| Self::make(process).map(Arc::new))
    }

    fn make(process: &Arc<Process>) -> Result<Self, VerbsError> {
        let (fd, theirs) = SoftChannel::pair()?;
        let own = rustix::io::fcntl_dupfd_cloexec(&fd, 0).map_err(|errno| VerbsError::os("fcntl", errno))?;
        let ends = Ends {
            attachment: Mutex::default(),
            _held: [
                held::hold_fd(fd.as_fd()),
                held::hold_fd(own.as_fd()),
                held::hold_fd(theirs.as_fd()),
            ],
            fd,
            own,
            theirs,
        };
        Ok(Self {
            process: process.clone(),
            ends: Arc::new(ends),
            closed: AtomicBool::new(false),
        })
    }

    /// What the program waits on: readable while there are events. It may make it non-blocking.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.ends.fd.as_fd()
    }

    /// A duplicate of [`Self::fd`], which is nobody else's: by it a descriptor is known that the program may have closed.
    pub fn own(&self) -> BorrowedFd<'_> {
        self.ends.own.as_fd()
    }

    /// The line and the channel's number at its RNIC, made if there is none.
    fn attached(&self) -> Result<(Arc<dyn Device>, u32), VerbsError> {
        let mut cm = self.process.cm.lock();
        let before = cm.own().is_some();
        let line = cm.line(&self.process)?;
        let gone = || VerbsError::Gone {
            object: "the context of rdma_cm".to_owned(),
        };
        let device = line.device().cloned().ok_or_else(gone)?;
        let mut attachment = self.ends.attachment.lock();
        if let Some(known) = *attachment {
            return match line.attachment(known.number) == known {
                true => Ok((device, known.number)),
                // Of an RNIC that is gone: it has hung up.
                false => Err(VerbsError::os("rdma_cm", rustix::io::Errno::NODEV)),
            };
        }
        let created = device.cm(CmRequest::CreateChannel, Some(self.ends.theirs.as_fd()));
        let number = match created {
            Ok(CmReply::Channel { channel }) => channel,
            other => {
                cm.close_unless_used();
                return other.and_then(wrong);
            }
        };
        line.attach(number, &self.ends);
        *attachment = Some(line.attachment(number));
        drop(attachment);
        drop(cm);
        self.process.changed();
        if !before {
            // An agent must hear of it, and the helper thread of the RNIC's end.
            self.process.watch_device(CM_CONTEXT, &*device);
            helper::ensure(&self.process);
        }
        Ok((device, number))
    }

    /// The line and the channel's number, if it has any.
    fn found(&self) -> Option<(Arc<dyn Device>, u32)> {
        let mut cm = self.process.cm.lock();
        let attachment = (*self.ends.attachment.lock())?;
        let device = cm.line_of(attachment)?.device()?.clone();
        Some((device, attachment.number))
    }

    /// Asks the RNIC for something that makes ids, by the channel's number there.
    fn call_attached(&self, request: impl FnOnce(u32) -> CmRequest) -> Result<CmReply, VerbsError> {
        let _pass = self.process.control.enter();
        let (device, number) = self.attached()?;
        ask(&self.process, &*device, request(number))
    }

    /// Makes an id whose events go here.
    pub fn create_id(&self, uid: u64, port_space: u16, qp_type: u8) -> Result<u32, VerbsError> {
        let created = self.call_attached(|channel| CmRequest::CreateId {
            channel,
            uid,
            port_space,
            qp_type,
        });
        match created? {
            CmReply::Id { id } => Ok(id),
            reply => wrong(reply),
        }
    }

    /// Takes an id and its events from another channel; how many events of it were told there.
    pub fn migrate_id(&self, from: &Self, id: u32) -> Result<u32, VerbsError> {
        match self.call_attached(|channel| CmRequest::MigrateId { id, channel })? {
            CmReply::Reported { events, quiet } => {
                from.ends.is_quiet(quiet);
                Ok(events)
            }
            reply => wrong(reply),
        }
    }

    /// Asks the RNIC.
    pub fn call(&self, request: CmRequest) -> Result<CmReply, VerbsError> {
        let _pass = self.process.control.enter();
        let (device, _) = self.found().ok_or_else(no_id)?;
        ask(&self.process, &*device, request)
    }

    /// As [`Self::call`], where there is nothing to be said but that it is done.
    pub fn call_done(&self, request: CmRequest) -> Result<(), VerbsError> {
        match self.call(request)? {
            CmReply::Done => Ok(()),
            reply => wrong(reply),
        }
    }

    /// The next event. Waits, unless the descriptor is non-blocking (`EAGAIN`); a signal that is handled may end the wait (`EINTR`).
    pub fn next_event(&self) -> Result<CmEvent, VerbsError> {
        loop {
            // The message stays: it says that there are events as long as there are some.
            let (_, length) = rustix::net::recv(&self.ends.fd, &mut [0; 16][..], RecvFlags::PEEK)
                .map_err(|errno| VerbsError::os("recv", errno))?;
            if length == 0 {
                return Err(VerbsError::os("recv", rustix::io::Errno::NODEV));
            }
            let _pass = self.process.control.enter();
            // Its RNIC is gone: it hangs up.
            let Some((device, channel)) = self.found() else {
                return Err(VerbsError::os("recv", rustix::io::Errno::NODEV));
            };
            match device.cm(CmRequest::GetEvent { channel }, None) {
                Ok(CmReply::Event { event, quiet }) => {
                    self.ends.is_quiet(quiet);
                    return Ok(event);
                }
                // Another thread was faster.
                Err(error) if error.errno() == libc::EAGAIN => std::thread::yield_now(),
                Ok(reply) => return wrong(reply),
                Err(error) => return Err(error),
            }
        }
    }

    /// A request that may take the channel's last event away; how many events of the object were told.
    pub fn call_reported(&self, request: CmRequest) -> Result<u32, VerbsError> {
        match self.call(request)? {
            CmReply::Reported { events, quiet } => {
                self.ends.is_quiet(quiet);
                Ok(events)
            }
            reply => wrong(reply),
        }
    }

    /// Ends it, and all its ids. The descriptor stays until this is dropped.
    pub fn close(&self) {
        if self.closed.swap(true, SeqCst) {
            return;
        }
        let Some(attachment) = *self.ends.attachment.lock() else {
            return;
        };
        let _pass = self.process.control.enter();
        // It may have moved meanwhile.
        let attachment = self.ends.attachment.lock().unwrap_or(attachment);
        let mut cm = self.process.cm.lock();
        // That of a parent, or one whose RNIC is gone, is no business of the line that there is now.
        let Some(device) = cm.line_of(attachment).and_then(|line| line.device().cloned()) else {
            return;
        };
        // An RNIC that is gone has nothing to destroy.
        let channel = attachment.number;
        let _ = device.cm(CmRequest::DestroyChannel { channel }, None);
        cm.detach(attachment);
        drop(cm);
        self.process.changed();
    }
}

impl Drop for CmChannel {
    fn drop(&mut self) {
        self.close();
    }
}

fn ask(process: &Process, device: &dyn Device, request: CmRequest) -> Result<CmReply, VerbsError> {
    let changes = changes_needs(&request);
    let reply = device.cm(request, None);
    if changes && reply.is_ok() {
        process.changed();
    }
    reply
}
