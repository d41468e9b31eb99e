//! Connections that pause within the protocol, in the place of a drain (MigrOS §3.2 to §3.4; `docs/wire-extension.md`).
//!
//! Nothing is waited for. The RNIC lets a connection stand still in the middle of whatever is under way, tells the partner's
//! RNIC to wait, and gives the connection's whole state as an image. That moves with the process, in its memory:
//!
//! ```text
//!   old ring:   │ done │ in the image: begun, not complete │ not begun │      │ intercepted … │
//!   new ring:          │ in the image                      │ not begun │ intercepted …
//! ```
//!
//! The new ring gets all that have no completion, in their order and at their old positions; then the new RNIC takes up the
//! image, and with it the requests that it names, and goes on. The partner's program, and its guest library, notice nothing.
//!
//! Datagrams are sent at once or never, so that they are drained.

use std::sync::Arc;
use std::time::{Duration, Instant};

use verbatim_channel::{Answer, Relocated};
use verbatim_device::control::{QpAttr, QpAttrMask, QpState, QpType};

use super::drain::{by_context, cqs_of};
use super::{Phase, SessionError, Sessions};
use crate::backend::QpImage;
use crate::error::VerbsError;
use crate::qp::{Copied, Qp};

/// The pause between two looks at queue pairs that are being drained or flushed.
const PAUSE: Duration = Duration::from_micros(50);

/// A connection that stands still.
pub(super) struct Dumped {
    qp: Arc<Qp>,
    image: QpImage,
    /// What is posted to its successor, oldest first.
    again: Vec<Copied>,
    /// It has a successor, at another RNIC, which waits for the image.
    has_moved: bool,
}

impl Dumped {
    fn dump(qp: &Arc<Qp>) -> Result<Self, SessionError> {
        let image = || -> Result<QpImage, VerbsError> {
            let device = qp.context().device()?;
            let qpn = qp.control.lock().physical_qpn();
            device.pause_qp(qpn, None)?;
            device.dump_qp(qpn).inspect_err(|_| _ = device.resume_qp(qpn))
        };
        let image = image().map_err(|source| SessionError::Pause {
            qpn: qp.number(),
            source,
        })?;
        Ok(Self {
            qp: qp.clone(),
            image,
            again: Vec::new(),
            has_moved: false,
        })
    }

    /// Takes down what its successor is to be given. The completions of all that is complete have been taken.
    fn note_requests(&mut self) -> Result<(), SessionError> {
        let send = self.qp.send.lock();
        let fits = |first: u64| {
            self.image
                .requests
                .iter()
                .copied()
                .eq(first..first + self.image.requests.len() as u64)
        };
        let unfinished = send.first_unfinished().filter(|first| fits(*first));
        let requests = unfinished.and_then(|_| send.unfinished());
        let requests = requests.filter(|requests| requests.len() >= self.image.requests.len());
        let qpn = self.qp.number();
        self.again = requests.ok_or(SessionError::Image { qpn })?;
        Ok(())
    }

    /// The connection goes on, where it was or, after its successor's rings were filled, there.
    pub fn go_on(&self) {
        let Ok(device) = self.qp.context().device() else {
            // An RNIC that is gone has failed the queue pair.
            return;
        };
        let control = self.qp.control.lock();
        let (qpn, sgid_index) = (control.physical_qpn(), control.sgid_index);
        drop(control);
        let restored = match self.has_moved {
            true => device.restore_qp(qpn, &self.image.bytes, sgid_index),
            false => Ok(()),
        };
        if restored.and_then(|()| device.resume_qp(qpn)).is_err() {
            // Nobody has its state any more. The program sees that, and does not wait for ever.
            let attr = QpAttr {
                state: QpState::Err,
                ..QpAttr::default()
            };
            let _ = device.modify_qp(qpn, QpAttrMask::STATE, &attr);
        }
    }
}

/// What the successor of a paused queue pair is given before its image; nothing if it was not paused.
pub(super) fn take_dumped(dumped: &mut [Dumped], qp: &Arc<Qp>) -> Vec<Copied> {
    let found = dumped.iter_mut().find(|one| Arc::ptr_eq(&one.qp, qp));
    found.map_or_else(Vec::new, |one| {
        one.has_moved = true;
        std::mem::take(&mut one.again)
    })
}

/// RECVs of shared receive queues that are in images: they are not posted to the new queue.
pub(super) fn keep_taken(dumped: &[Dumped]) {
    for one in dumped.iter().filter(|one| one.has_moved) {
        if let (Some(srq), Some(receive)) = (one.qp.srq(), one.image.receive) {
            srq.queue.lock().is_taken(receive);
        }
    }
}

impl Sessions {
    pub(super) fn relocate(&self, peers: &[Relocated]) -> Result<Answer, SessionError> {
        for Relocated { qpn, remote } in peers {
            // Destroyed by the program meanwhile: nothing to note.
            if let Some(qp) = self.process.qp(*qpn) {
                let mut control = qp.control.lock();
                if control.remote.is_some() {
                    control.remote = Some(*remote);
                }
            }
        }
        self.process.changed();
        Ok(Answer::Done)
    }

    pub(super) fn stop_and_dump(&mut self, session: u64, timeout_ms: u32) -> Result<Answer, SessionError> {
        let record = self.find_in(session, Phase::Suspended, "StopAndDump")?;
        let all = record.all;
        let qps = record.qps.clone();
        if !all {
            return Err(SessionError::Claim(
                "only a process that is suspended as a whole can be paused".to_owned(),
            ));
        }
        let deadline = Instant::now() + Duration::from_millis(timeout_ms.into());
        let (mut live, mut others) = (Vec::new(), Vec::new());
        for (context, qps) in by_context(&qps) {
            let numbers: Vec<_> = qps.iter().map(|qp| qp.control.lock().physical_qpn()).collect();
            let states = context.device()?.qp_states(&numbers)?;
            for (qp, state) in qps.into_iter().zip(states) {
                let connected = matches!(state, QpState::Rtr | QpState::Rts | QpState::Sqd);
                match (qp.qp_type(), connected) {
                    (QpType::Rc, true) => live.push(qp.clone()),
                    (QpType::Uc, true) => {
                        let qpn = qp.number();
                        let why = "nothing tells of an unreliable connection what has arrived";
                        return Err(SessionError::Blocked(format!(
                            "queue pair {qpn} cannot be paused: {why}"
                        )));
                    }
                    // Datagrams, and what is flushed after an error.
                    _ => others.push(qp.clone()),
                }
            }
        }
        while let Some(qp) = others.iter().find(|qp| !qp.send.lock().is_idle()) {
            if Instant::now() > deadline {
                let qpn = qp.number();
                return Ok(Answer::Undrained {
                    qpns: vec![qpn],
                    left: format!("queue pair {qpn} has unfinished send requests"),
                });
            }
            cqs_of(&others).iter().for_each(|cq| _ = cq.queue.lock().sweep());
            std::thread::sleep(PAUSE);
        }
        let mut dumped = Vec::with_capacity(live.len());
        let mut result = Ok(());
        for qp in &live {
            match Dumped::dump(qp) {
                Ok(one) => dumped.push(one),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        let noted = result.and_then(|()| self.finish_drain(session)).and_then(|()| {
            let mut dumped = dumped.iter_mut();
            dumped.try_for_each(Dumped::note_requests)
        });
        // From here on whoever ends the session lets them go on.
        let record = self.find(session)?;
        record.dumped = dumped;
        if let Err(error) = noted {
            for one in std::mem::take(&mut record.dumped) {
                one.go_on();
            }
            return Err(error);
        }
        Ok(Answer::Dumped {
            connections: record.dumped.len() as u64,
            requests: record.dumped.iter().map(|one| one.again.len() as u64).sum(),
            bytes: record.dumped.iter().map(|one| one.image.bytes.len() as u64).sum(),
        })
    }
}
