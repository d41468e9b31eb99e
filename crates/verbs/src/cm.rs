//! Connections by address and port (rdma_cm(7)): the channels of a process, and its line to the RNIC, which keeps all else.
//!
//! A channel takes the place of an open `/dev/infiniband/rdma_cm`. Its descriptor is one end of a pair of sockets; the RNIC has
//! the other one, and keeps it readable while there are events. All channels of a process share one context of the RNIC, which is
//! opened with the first of them and closed with the last. That context is none of the program's devices, and does not move: a
//! process that has a channel is not moved (`docs/rdma-cm.md`).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use rustix::net::RecvFlags;
use verbatim_device::control::{CmEvent, CmReply, CmRequest};

use crate::backend::Device;
use crate::backend::soft::events::SoftChannel;
use crate::context::Context;
use crate::error::VerbsError;
use crate::held;
use crate::helper;
use crate::process::Process;

/// A channel.
#[derive(Debug)]
pub struct CmChannel {
    process: Arc<Process>,
    device: Arc<dyn Device>,
    number: u32,
    /// A child of this process shall not take the events away. Forgotten before the descriptor goes.
    _held: held::Held,
    fd: OwnedFd,
    closed: AtomicBool,
}

fn wrong<T>(reply: CmReply) -> Result<T, VerbsError> {
    Err(VerbsError::Invalid(format!("the RNIC answered with {reply:?}")))
}

/// Numbers and GIDs of a process that has moved are not the RNIC's, and what it tells peers by rdma_cm would not be translated.
fn check_unmoved(process: &Process) -> Result<(), VerbsError> {
    let moved = |context: &Arc<Context>| context.moves.load(SeqCst) > 0;
    match process.contexts().iter().any(moved) {
        false => Ok(()),
        true => Err(VerbsError::Unsupported(
            "a program that has moved cannot begin to connect by rdma_cm yet".to_owned(),
        )),
    }
}

impl CmChannel {
    /// Makes a channel at the software RNIC. `None` if the process has none, whatever else it has.
    pub fn open(process: &Arc<Process>) -> Option<Result<Arc<Self>, VerbsError>> {
        process
            .has_cm_device()
            .then(|| Self::open_at(process).map(Arc::new))
    }

    fn open_at(process: &Arc<Process>) -> Result<Self, VerbsError> {
        let _pass = process.control.enter();
        check_unmoved(process)?;
        let (fd, theirs) = SoftChannel::pair()?;
        let mut cm = process.cm.lock();
        let line = cm.line(|| process.open_cm_device())?;
        let created = line.device.cm(CmRequest::CreateChannel, Some(theirs.as_fd()));
        let number = match created {
            Ok(CmReply::Channel { channel }) => channel,
            other => {
                cm.close_unless_used();
                return other.and_then(wrong);
            }
        };
        line.channels += 1;
        let device = line.device.clone();
        drop(cm);
        process.changed();
        // An agent must hear of it, so that nothing is moved that cannot be.
        helper::ensure(process);
        Ok(Self {
            process: process.clone(),
            device,
            number,
            _held: held::hold_fd(fd.as_fd()),
            fd,
            closed: AtomicBool::new(false),
        })
    }

    /// What the program waits on: readable while there are events. It may make it non-blocking.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Its number at the RNIC.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Asks the RNIC.
    pub fn call(&self, request: CmRequest) -> Result<CmReply, VerbsError> {
        self.device.cm(request, None)
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
            let (_, length) = rustix::net::recv(&self.fd, &mut [0; 16][..], RecvFlags::PEEK)
                .map_err(|errno| VerbsError::os("recv", errno))?;
            if length == 0 {
                return Err(VerbsError::os("recv", rustix::io::Errno::NODEV));
            }
            let request = CmRequest::GetEvent { channel: self.number };
            match self.call(request) {
                Ok(CmReply::Event { event, quiet }) => {
                    self.is_quiet(quiet);
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
                self.is_quiet(quiet);
                Ok(events)
            }
            reply => wrong(reply),
        }
    }

    /// An answer has taken the last event away: so is what says that there are some.
    fn is_quiet(&self, quiet: bool) {
        if quiet {
            // The RNIC has put it there before it answered.
            let _ = rustix::net::recv(&self.fd, &mut [0; 16][..], RecvFlags::DONTWAIT);
        }
    }

    /// Ends it, and all its ids. The descriptor stays until this is dropped.
    pub fn close(&self) {
        if self.closed.swap(true, SeqCst) {
            return;
        }
        let mut cm = self.process.cm.lock();
        // That of a parent, or one whose RNIC is gone, is no business of the line that there is now.
        let Some(line) = cm.line_to(&self.device) else {
            return;
        };
        // An RNIC that is gone has nothing to destroy.
        let _ = self.call_done(CmRequest::DestroyChannel { channel: self.number });
        line.channels -= 1;
        cm.close_unless_used();
        drop(cm);
        self.process.changed();
    }
}

impl Drop for CmChannel {
    fn drop(&mut self) {
        self.close();
    }
}
