//! Contexts whose objects the restored process makes again, by itself: those of RNICs that a library in the process drives.
//!
//! Nobody can prepare such a context ahead of its process, and hand it over: half of it is that library's memory. So while the
//! process stands still its old context stays as it is, and is taken up again if the migration is rolled back:
//!
//! ```text
//!   Quiesce ─► the device is let go, and kept ──┬─ Claim ─────────────────────────────► the same device again
//!                                               └─ (restored) MakeAgain, ConnectMade, Claim ─► the new one; the old one abandoned
//! ```
//! Where a helper of the agent's has made some of it at the new place already, the process goes on with that ([`verbatim_channel::ahead`]).
//! What cannot be made at the new place is lost as if its RNIC had died: there is no way back any more. Agents see to it that what
//! is known beforehand to be lacking refuses the migration.

use std::collections::HashMap;
use std::fmt::Display;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use verbatim_channel::ahead::{self, MadeAhead};
use verbatim_channel::{Answer, MadePeer, MrRecord};

use super::{LetGo, Phase, SessionError, Sessions};
use crate::backend::{Device, rdma_core};
use crate::context::Context;
use crate::described;
use crate::error::VerbsError;
use crate::maker::{Made, NotMade, Was};
use crate::process::Process;

/// All that a session has made.
#[derive(Default)]
pub(super) struct AllMade {
    contexts: HashMap<u32, Made>,
    lost: Vec<String>,
}

impl AllMade {
    /// The one of that context, for its claim; `None` if it is lost.
    pub fn take(&mut self, context: u32) -> Option<Made> {
        self.contexts.remove(&context)
    }

    fn describe(&self) -> Answer {
        let contexts = self.contexts.values().map(|made| made.told.clone());
        let mut contexts: Vec<_> = contexts.collect();
        contexts.sort_by_key(|made| made.id);
        let lost = self.lost.clone();
        Answer::Made { contexts, lost }
    }
}

impl Sessions {
    /// Makes the objects of all contexts that were kept. The old ones are nobody's any more. `fds`: what came with the order, a terminal that
    /// was hung up from an agent that has one, and behind it what was made ahead ([`verbatim_channel::ahead`]).
    pub(super) fn make_again(&mut self, session: u64, fds: Vec<OwnedFd>) -> Result<Answer, SessionError> {
        if let Some(told) = &self.find(session)?.told_made {
            // Whoever drives the session now has not heard it.
            return Ok(told.clone());
        }
        let process = self.process.clone();
        let record = self.find_in(session, Phase::Quiesced, "MakeAgain")?;
        let mut fds = fds.into_iter();
        let dead = fds.next();
        let mut ahead = Ahead::of(&process, fds);
        let mut all = AllMade::default();
        for (context, let_go) in process.contexts().iter().zip(&mut record.let_go) {
            let LetGo::Kept(kept) = let_go else { continue };
            let Some(kept) = kept.take() else { continue };
            let Some(old) = kept.kept else { continue };
            drop(kept.reopen);
            let made = ahead.go_on(context, &*old);
            let new = match made {
                Some(_) => None,
                None => Some(old.open_again()),
            };
            old.abandon(dead.as_ref().map(AsFd::as_fd));
            let device = context.device_name();
            let made = match (made, new) {
                (Some(made), _) => Ok(made),
                (None, Some(Ok(new))) => make(context, new).map_err(|not_made| lost(device, &not_made)),
                (None, Some(Err(error))) => Err(lost(device, &error)),
                (None, None) => unreachable!("what was not made ahead is opened"),
            };
            match made {
                Ok(made) => _ = all.contexts.insert(context.id(), made),
                Err(lost) => all.lost.push(lost),
            }
        }
        let told = all.describe();
        record.made = Some(all);
        record.told_made = Some(told.clone());
        Ok(told)
    }

    /// Connects the new queue pairs.
    pub(super) fn connect_made(&mut self, session: u64, peers: &[MadePeer]) -> Result<Answer, SessionError> {
        if self.find(session)?.phase == Phase::Replaced {
            let (contexts, lost) = Default::default();
            return Ok(Answer::Made { contexts, lost });
        }
        let record = self.find_in(session, Phase::Quiesced, "ConnectMade")?;
        let all = record.made.as_mut().ok_or_else(|| {
            SessionError::Claim("nothing was made again that could be connected".to_owned())
        })?;
        let mut lost = Vec::new();
        for told in peers {
            let mut contexts = all.contexts.values_mut();
            let owner = contexts.find(|made| made.waits(told.peer.qpn));
            // Lost with its context, or connected by whoever asked before.
            let Some(made) = owner else { continue };
            if let Err(not_made) = made.connect(told) {
                lost.push(format!("there, {not_made}"));
            }
        }
        let contexts = Vec::new();
        Ok(Answer::Made { contexts, lost })
    }
}

/// What was made ahead of the process, for it to go on with.
struct Ahead {
    contexts: Vec<(MadeAhead, Vec<OwnedFd>)>,
    /// The process's file of adopted memory, by device and inode number.
    memory: Option<(u64, u64)>,
}

impl Ahead {
    /// What came with the order, behind the terminal. What is not understood is let go.
    fn of(process: &Process, mut fds: impl Iterator<Item = OwnedFd>) -> Self {
        let packed = fds.next().and_then(|packed| ahead::unpack(packed).ok());
        let contexts = packed.into_iter().flatten().map(|made| {
            let own = fds.by_ref().take(made.descriptors as usize).collect();
            (made, own)
        });
        Self {
            contexts: contexts.collect(),
            memory: process.memory_file(),
        }
    }

    /// Makes a context of what was made ahead; `None` if nothing was, or something else: then nothing of it is left.
    fn go_on(&mut self, context: &Context, old: &dyn Device) -> Option<Made> {
        let index = self
            .contexts
            .iter()
            .position(|(made, _)| made.id == context.id())?;
        let (made, descriptors) = self.contexts.swap_remove(index);
        // The RNIC would write to another file than the program reads.
        let is_the_file = made.memory.is_some() && made.memory == self.memory;
        if !made.rkeys.is_empty() && !is_the_file {
            return None;
        }
        let make = || {
            let new = old.open_again().map_err(|error| error.to_string())?;
            self::make(context, new).map_err(|not_made| not_made.to_string())
        };
        rdma_core::ahead::answered(made, descriptors, make).ok()
    }
}

fn lost(device: &str, why: &dyn Display) -> String {
    format!("what it had on {device} cannot be made there: {why}")
}

/// Makes all objects of a context at the device that takes the place of the one that it had.
fn make(context: &Context, device: Arc<dyn Device>) -> Result<Made, NotMade> {
    let objects = context.objects.lock();
    let mrs: HashMap<u32, _> = objects.mrs.values().map(|mr| (mr.lkey(), mr.clone())).collect();
    drop(objects);
    let mut register = |device: &dyn Device, mr: &MrRecord, pd: u32| {
        let mr = mrs.get(&mr.lkey).ok_or_else(|| VerbsError::Gone {
            object: "the region".to_owned(),
        })?;
        mr.register_again(context.process(), device, pd)
    };
    let windows: HashMap<u32, Was> = context.mws().iter().filter_map(|mw| mw.was()).collect();
    Made::make(device, &described::kept(context), &windows, &mut register)
}
