//! Contexts whose objects the restored process makes again, by itself: those of RNICs that a library in the process drives.
//!
//! Nobody can prepare such a context ahead of its process, and hand it over: half of it is that library's memory. So while the
//! process stands still its old context stays as it is, and is taken up again if the migration is rolled back:
//!
//! ```text
//!   Quiesce ─► the device is let go, and kept ──┬─ Claim ─────────────────────────────► the same device again
//!                                               └─ (restored) MakeAgain, ConnectMade, Claim ─► the new one; the old one abandoned
//! ```
//! What cannot be made at the new place is lost as if its RNIC had died: there is no way back any more. Agents see to it that what
//! is known beforehand to be lacking refuses the migration.

use std::collections::HashMap;
use std::fmt::Display;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use verbatim_channel::{Answer, MadePeer, MrRecord};

use super::{LetGo, Phase, SessionError, Sessions};
use crate::backend::Device;
use crate::context::Context;
use crate::described;
use crate::error::VerbsError;
use crate::maker::{Made, NotMade, Was};

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
    /// was hung up from an agent that has one.
    pub(super) fn make_again(&mut self, session: u64, fds: &[OwnedFd]) -> Result<Answer, SessionError> {
        if let Some(told) = &self.find(session)?.told_made {
            // Whoever drives the session now has not heard it.
            return Ok(told.clone());
        }
        let process = self.process.clone();
        let record = self.find_in(session, Phase::Quiesced, "MakeAgain")?;
        let mut all = AllMade::default();
        for (context, let_go) in process.contexts().iter().zip(&mut record.let_go) {
            let LetGo::Kept(kept) = let_go else { continue };
            let Some(kept) = kept.take() else { continue };
            let Some(old) = kept.kept else { continue };
            drop(kept.reopen);
            let new = old.open_again();
            old.abandon(fds.first().map(AsFd::as_fd));
            let device = context.device_name();
            match new {
                Ok(new) => match make(context, new) {
                    Ok(made) => _ = all.contexts.insert(context.id(), made),
                    Err(not_made) => all.lost.push(lost(device, &not_made)),
                },
                Err(error) => all.lost.push(lost(device, &error)),
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
