//! An operator's pause: reliable connections stand still at the RNIC until they are told to go on, or its limit has passed.
//!
//! No session: the program posts as ever, until its rings are full, and its completions stay away. Whether a queue pair is still
//! paused is the RNIC's word. Sessions keep their hands off what is paused, and it is not paused what a session has: both are
//! decided here, by the helper thread, one order at a time.

use std::sync::Arc;

use verbatim_channel::{Answer, Order, Scope};
use verbatim_device::control::QpSecret;

use super::{SessionError, Sessions};
use crate::dump;
use crate::error::VerbsError;
use crate::qp::Qp;

impl Sessions {
    pub(super) fn share(&self, secrets: &[(u32, QpSecret)]) -> Result<Answer, SessionError> {
        for (qpn, secret) in secrets {
            let qp = self.find_qp(*qpn)?;
            let control = qp.control.lock();
            let device = qp.context().device()?;
            device.set_qp_secret(control.physical_qpn(), Some(*secret))?;
        }
        Ok(Answer::Done)
    }

    /// All or nothing, but for a longer limit of those that were paused before.
    pub(super) fn pause(&self, qpns: &[u32], limit_s: u32) -> Result<Answer, SessionError> {
        let mut fresh: Vec<Arc<Qp>> = Vec::new();
        for qpn in qpns {
            match self.pause_one(*qpn, limit_s) {
                Ok(Some(qp)) => fresh.push(qp),
                Ok(None) => {}
                Err(error) => {
                    // What went well one way goes well back: the RNIC, if it is there, resumes whatever is paused.
                    fresh.iter().for_each(|qp| _ = unpause(qp));
                    return Err(error);
                }
            }
        }
        Ok(Answer::Done)
    }

    /// The queue pair, if it was not paused before.
    fn pause_one(&self, qpn: u32, limit_s: u32) -> Result<Option<Arc<Qp>>, SessionError> {
        let qp = self.find_qp(qpn)?;
        let in_session = |found: &super::Session| {
            let of_it = |qps: &[Arc<Qp>]| qps.iter().any(|own| Arc::ptr_eq(own, &qp));
            found.held || of_it(&found.qps) || of_it(&found.prepared)
        };
        if let Some((session, _)) = self.open.iter().find(|(_, found)| in_session(found)) {
            return Err(SessionError::Blocked(format!(
                "queue pair {qpn:#x} is part of migration {session:016x}; wait until that has ended"
            )));
        }
        let mut control = qp.control.lock();
        if control.stands {
            return Err(SessionError::Blocked(dump::blocker()));
        }
        let device = qp.context().device()?;
        device.pause_qps(&[control.physical_qpn()], Some(limit_s))?;
        let was_paused = std::mem::replace(&mut control.paused, true);
        drop(control);
        Ok((!was_paused).then_some(qp))
    }

    /// What is gone, or not paused, needs nothing.
    pub(super) fn unpause(&self, qpns: &[u32]) -> Result<Answer, SessionError> {
        for qp in qpns.iter().filter_map(|qpn| self.process.qp(*qpn)) {
            unpause(&qp)?;
        }
        Ok(Answer::Done)
    }

    /// Refuses an order that begins to move a queue pair which is paused.
    pub(super) fn check_paused(&self, order: &Order) -> Result<(), SessionError> {
        let named = |qpns: &[u32]| qpns.iter().filter_map(|qpn| self.process.qp(*qpn)).collect();
        let qps: Vec<Arc<Qp>> = match order {
            Order::Hold { .. }
            | Order::Suspend {
                scope: Scope::All, ..
            } => self.process.qps(),
            Order::Suspend {
                scope: Scope::Qps(qpns),
                ..
            }
            | Order::PrepareStandby { qpns, .. } => named(qpns),
            _ => return Ok(()),
        };
        if qps.iter().any(|qp| qp.stands()) {
            return Err(SessionError::Blocked(dump::blocker()));
        }
        match qps.iter().find(|qp| qp.is_paused()) {
            None => Ok(()),
            Some(qp) => Err(SessionError::Blocked(blocker(qp.control.lock().physical_qpn()))),
        }
    }

    fn find_qp(&self, qpn: u32) -> Result<Arc<Qp>, SessionError> {
        self.process.qp(qpn).ok_or(SessionError::NoQp { qpn })
    }
}

/// Why a process with a paused queue pair is not moved, nor one that is connected to it.
pub(crate) fn blocker(physical_qpn: u32) -> String {
    format!("queue pair {physical_qpn:#x} is paused by an operator; `verbatim resume` it first")
}

fn unpause(qp: &Qp) -> Result<(), VerbsError> {
    let mut control = qp.control.lock();
    if !std::mem::take(&mut control.paused) {
        return Ok(());
    }
    match qp.context().device() {
        Ok(device) => device.resume_qps(&[control.physical_qpn()]),
        // With the RNIC, what it held is gone.
        Err(_) => Ok(()),
    }
}

impl Qp {
    /// Whether an operator has paused it, and its limit has not passed.
    pub(crate) fn is_paused(&self) -> bool {
        let mut control = self.control.lock();
        if control.paused {
            let physical_qpn = control.physical_qpn();
            // An RNIC that is gone holds nothing.
            let device = self.context().device();
            control.paused = device.is_ok_and(|device| device.is_paused(physical_qpn).unwrap_or(false));
        }
        control.paused
    }
}
