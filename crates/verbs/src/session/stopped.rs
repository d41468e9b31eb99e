//! Past the limit of a drain: connections are stopped in the middle of their requests (MigrRDMA §3.4, "Handling buggy
//! network situations", but nothing twice).
//!
//! The paper posts everything again that has no completion. What was executed and only lacks its acknowledgement would be
//! executed twice, which a program sees of an ATOMIC, of a WRITE that somebody else has overwritten since, and of a SEND as
//! one message more. Here the RNICs of both ends first stop the queue pair: it neither sends nor takes packets, so nothing
//! is executed any more. Then each end says where it stands, and [`super::decision`] tells what was executed:
//!
//! ```text
//!   old ring:      │ done │ executed │ READ │ executed │ in part │ not │      │ intercepted … │
//!                         └ first unfinished                            posted
//!   new ring:               complete   post   complete    post    post           post
//! ```
//!
//! The new ring gets all of them in their order and at their old positions. What was executed is marked
//! ([`verbatim_device::layout::SEND_EXECUTED`]): the RNIC completes it in its turn, as if it came from the wire, so that
//! unsignaled requests, fences and the order of completions need no care here. All is taken from the old ring, where the
//! RNIC leaves a request until it is complete, inline data too; keys are put back to those that the program knows, since
//! the new RNICs know others.
//!
//! A RECV that a message in part was being put into is not complete, and is posted again with all those that no message has
//! consumed. Only in a partner's shared receive queue, which stays, it must be put back by name. Completions that the
//! program has not polled are swept into the fake queue, and count as complete.
//!
//! Nothing here is final before the queue pairs are replaced: until then the old ones can go on, as if all that was under
//! way had been lost.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use verbatim_channel::{Answer, QpProgress};
use verbatim_device::control::{QpPosition, QpState};
use verbatim_device::layout::SEND_EXECUTED;

use super::decision::{Fate, Uncertain, fates, undecided};
use super::drain::cqs_of;
use super::{Phase, SessionError, Sessions};
use crate::error::VerbsError;
use crate::qp::{Copied, Qp};

/// How long an RNIC may take to flush the requests of a queue pair in ERR.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);

/// The pause between two looks at them.
const PAUSE: Duration = Duration::from_micros(50);

/// A queue pair that was stopped.
pub(super) struct Stopped {
    qp: Arc<Qp>,
    /// The physical one.
    qpn: u32,
    position: QpPosition,
    /// What its successor is given, once that is known.
    again: Vec<Copied>,
}

impl Stopped {
    fn stop(qp: &Arc<Qp>) -> Result<Self, SessionError> {
        let stop = || -> Result<(u32, QpPosition), VerbsError> {
            let mut control = qp.control.lock();
            let qpn = control.physical_qpn();
            let position = qp.context().device()?.stop_qp(qpn)?;
            control.stops += u32::from(position.state != QpState::Err);
            Ok((qpn, position))
        };
        let (qpn, position) = stop().map_err(|source| SessionError::Stop {
            qpn: qp.number(),
            source,
        })?;
        Ok(Self {
            qp: qp.clone(),
            qpn,
            position,
            again: Vec::new(),
        })
    }

    fn failed(&self) -> bool {
        self.position.state == QpState::Err
    }

    /// Lets the queue pair go on, if it is still in use and no other session has stopped it.
    pub fn restart(&self) {
        let mut control = self.qp.control.lock();
        if self.failed() || control.physical_qpn() != self.qpn || control.stops == 0 {
            return;
        }
        control.stops -= 1;
        if let Some(device) = self.qp.context().device().ok().filter(|_| control.stops == 0) {
            // An RNIC that is gone has failed the queue pair.
            let _ = device.restart_qp(self.qpn);
        }
    }

    fn progress(&self) -> QpProgress {
        QpProgress {
            qpn: self.qp.number(),
            failed: self.failed(),
            sent: self.qp.send.lock().messages(),
            received: self.qp.side.received.load(Relaxed),
            expected_psn: self.position.expected_psn,
            atomics: self.position.atomics.clone(),
        }
    }

    /// What its successor is to be given, marked with what is to be done with it.
    fn decide(&self, peer: &QpProgress) -> Result<Vec<Copied>, Uncertain> {
        let send = self.qp.send.lock();
        let mut requests = send.unfinished().ok_or(Uncertain::Requests)?;
        let is_decided = |request: &Copied| request.wqe.flags & SEND_EXECUTED != 0;
        let decided: Vec<bool> = requests.iter().map(is_decided).collect();
        let own = undecided(&self.position, &decided)?;
        let open = || requests.iter().filter(|request| !is_decided(request));
        let opcodes: Vec<u8> = open().map(|request| request.wqe.opcode).collect();
        let fates = fates(&own, &opcodes, send.messages(), peer)?;
        let open = requests.iter_mut().filter(|request| !is_decided(request));
        for (request, fate) in open.zip(fates) {
            if let Fate::Complete(value) = fate {
                request.wqe.flags |= SEND_EXECUTED;
                request.wqe.compare_add = value.unwrap_or(request.wqe.compare_add);
            }
        }
        Ok(requests)
    }
}

/// What the successor of a stopped queue pair is given: send requests, and which RECV the old one has taken for a message of
/// which only a part came. Nothing if it was not stopped, or has failed.
pub(super) fn take_stopped(stopped: &mut Vec<Stopped>, qp: &Arc<Qp>) -> (Vec<Copied>, Option<u64>) {
    let found = stopped.iter().position(|one| Arc::ptr_eq(&one.qp, qp));
    let Some(one) = found.map(|index| stopped.swap_remove(index)) else {
        return Default::default();
    };
    let receive = one.position.receive.filter(|_| !one.failed());
    (one.again, receive)
}

impl Sessions {
    pub(super) fn stop(&mut self, session: u64, qpns: &[u32]) -> Result<Answer, SessionError> {
        let record = self.find(session)?;
        let phase = record.phase;
        if !matches!(phase, Phase::Suspended | Phase::Drained) {
            return Err(SessionError::Phase {
                session,
                phase,
                order: "Stop",
            });
        }
        let by_number: HashMap<u32, &Arc<Qp>> = record.qps.iter().map(|qp| (qp.number(), qp)).collect();
        let mut stopped = Vec::with_capacity(qpns.len());
        let mut result = Ok(());
        for qpn in qpns {
            let found = by_number.get(qpn).ok_or(SessionError::NoQp { qpn: *qpn });
            match found.and_then(|qp| Stopped::stop(qp)) {
                Ok(one) => stopped.push(one),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        let result = result
            .and_then(|()| await_flushed(&stopped))
            .and_then(|()| match phase {
                Phase::Suspended => self.finish_drain(session),
                _ => Ok(()),
            });
        if let Err(error) = result {
            stopped.iter().for_each(Stopped::restart);
            return Err(error);
        }
        let record = self.find(session)?;
        for one in stopped.iter().filter(|one| one.failed()) {
            one.qp.control.lock().was_failed = true;
        }
        cqs_of(&record.qps)
            .iter()
            .for_each(|cq| _ = cq.queue.lock().sweep());
        let progress = stopped.iter().map(Stopped::progress).collect();
        record.stopped = stopped;
        record.phase = Phase::Stopped;
        Ok(Answer::Stopped(progress))
    }

    pub(super) fn settle(&mut self, session: u64, peers: &[QpProgress]) -> Result<Answer, SessionError> {
        let record = self.find_in(session, Phase::Stopped, "Settle")?;
        let peers: HashMap<u32, &QpProgress> = peers.iter().map(|peer| (peer.qpn, peer)).collect();
        let mut decided = Vec::with_capacity(record.stopped.len());
        for one in &record.stopped {
            let qpn = one.qp.number();
            let requests = match peers.get(&qpn) {
                _ if one.failed() => Ok(Vec::new()),
                Some(peer) => one.decide(peer),
                None => Err(Uncertain::NoPeer),
            };
            decided.push(requests.map_err(|source| SessionError::Uncertain { qpn, source })?);
        }
        let (mut replayed, mut completed) = (0, 0);
        for (one, requests) in record.stopped.iter_mut().zip(decided) {
            let marked = |request: &&Copied| request.wqe.flags & SEND_EXECUTED != 0;
            let done = requests.iter().filter(marked).count() as u64;
            completed += done;
            replayed += requests.len() as u64 - done;
            one.again = requests;
        }
        record.phase = Phase::Drained;
        Ok(Answer::Settled { replayed, completed })
    }
}

/// Queue pairs in ERR complete all that they have with an error, by and by.
fn await_flushed(stopped: &[Stopped]) -> Result<(), SessionError> {
    let deadline = Instant::now() + FLUSH_LIMIT;
    for one in stopped.iter().filter(|one| one.failed()) {
        while !one.qp.send.lock().is_idle() {
            if Instant::now() > deadline {
                let qpn = one.qp.number();
                let source = Uncertain::Requests;
                return Err(SessionError::Uncertain { qpn, source });
            }
            std::thread::sleep(PAUSE);
        }
    }
    Ok(())
}
