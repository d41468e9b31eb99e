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

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use verbatim_channel::{Answer, Relocated};
use verbatim_device::control::{QpAttr, QpAttrMask, QpState, QpType};
use verbatim_device::image::QpImage;

use super::drain::{by_context, cqs_of};
use super::{Phase, SessionError, Sessions};
use crate::backend::{Device, TakenUp};
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

/// Images by the numbers that the program knows.
pub(super) type AllDumped = BTreeMap<u32, Dumped>;

/// All of them stand still before the first is saved, so that the images are of one moment. If that fails, all go on.
fn dump(qps: &[Arc<Qp>]) -> Result<AllDumped, SessionError> {
    let by_device: Vec<_> = by_context(qps)
        .into_iter()
        .map(|(context, qps)| {
            let numbers = physical_numbers(&qps);
            (context, qps, numbers)
        })
        .collect();
    let images = || -> Result<Vec<Vec<QpImage>>, VerbsError> {
        for (context, _, numbers) in &by_device {
            context.device()?.pause_qps(numbers, None)?;
        }
        let images = by_device.iter();
        let images = images.map(|(context, _, numbers)| context.device()?.dump_qps(numbers));
        images.collect()
    };
    let images = images().map_err(|source| {
        for (context, _, numbers) in &by_device {
            // An RNIC that is gone has failed its queue pairs.
            let _ = context.device().and_then(|device| device.resume_qps(numbers));
        }
        SessionError::Pause { source }
    })?;
    let qps = by_device.into_iter().flat_map(|(_, qps, _)| qps);
    let dumped = qps.zip(images.into_iter().flatten()).map(|(qp, image)| {
        let dumped = Dumped {
            qp: qp.clone(),
            image,
            again: Vec::new(),
            has_moved: false,
        };
        (qp.number(), dumped)
    });
    Ok(dumped.collect())
}

fn physical_numbers(qps: &[&Arc<Qp>]) -> Vec<u32> {
    qps.iter().map(|qp| qp.control.lock().physical_qpn()).collect()
}

/// Connections go on, where they were or, after their successors' rings were filled, there. All are restored before the first
/// goes on: an RNIC that has data to send has less time for the images of the others.
pub(super) fn go_on(dumped: &AllDumped) {
    let qps: Vec<_> = dumped.values().map(|one| one.qp.clone()).collect();
    let mut restored = Vec::new();
    for (context, qps) in by_context(&qps) {
        // An RNIC that is gone has failed its queue pairs.
        let Ok(device) = context.device() else { continue };
        let numbers = physical_numbers(&qps);
        let ones = qps.iter().map(|qp| &dumped[&qp.number()]);
        let images = numbers.iter().zip(ones).filter(|(_, one)| one.has_moved);
        let images: Vec<_> = images.map(|(qpn, one)| one.taken_up(*qpn)).collect();
        let lost = restore(&*device, &images);
        restored.push((device, numbers, lost));
    }
    for (device, numbers, lost) in restored {
        let whole: Vec<u32> = numbers.into_iter().filter(|qpn| !lost.contains(qpn)).collect();
        let _ = device.resume_qps(&whole);
        for qpn in lost {
            // Nobody has its state any more. The program sees that, and does not wait for ever.
            let attr = QpAttr {
                state: QpState::Err,
                ..QpAttr::default()
            };
            let _ = device.modify_qp(qpn, QpAttrMask::STATE, &attr);
        }
    }
}

/// Gives queue pairs the states of images; those of which that failed.
fn restore(device: &dyn Device, images: &[TakenUp<'_>]) -> Vec<u32> {
    let numbers = images.iter().map(|taken_up| taken_up.qpn);
    match device.restore_qps(images) {
        Ok(restored) => numbers
            .zip(restored)
            .filter(|(_, restored)| restored.is_err())
            .map(|(qpn, _)| qpn)
            .collect(),
        Err(_) => numbers.collect(),
    }
}

impl Dumped {
    /// Its successor of that number, with its state.
    fn taken_up(&self, qpn: u32) -> TakenUp<'_> {
        TakenUp {
            qpn,
            image: &self.image.image,
            sgid_index: self.qp.control.lock().sgid_index,
        }
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
}

/// What the successor of a paused queue pair is given before its image; nothing if it was not paused.
pub(super) fn take_dumped(dumped: &mut AllDumped, qp: &Qp) -> Vec<Copied> {
    let found = dumped.get_mut(&qp.number());
    found.map_or_else(Vec::new, |one| {
        one.has_moved = true;
        std::mem::take(&mut one.again)
    })
}

/// RECVs of shared receive queues that are in images: they are not posted to the new queue.
pub(super) fn keep_taken(dumped: &AllDumped) {
    for one in dumped.values().filter(|one| one.has_moved) {
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
        let mut dumped = dump(&live)?;
        let noted = self.finish_drain(session).and_then(|()| {
            let mut dumped = dumped.values_mut();
            dumped.try_for_each(Dumped::note_requests)
        });
        if let Err(error) = noted {
            go_on(&dumped);
            return Err(error);
        }
        // From here on whoever ends the session lets them go on.
        let record = self.find(session)?;
        record.dumped = dumped;
        Ok(Answer::Dumped {
            connections: record.dumped.len() as u64,
            requests: record.dumped.values().map(|one| one.again.len() as u64).sum(),
            bytes: record
                .dumped
                .values()
                .map(|one| one.image.image.len() as u64)
                .sum(),
        })
    }
}
