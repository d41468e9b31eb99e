//! A context stands still, all of it or nothing: before the first object is looked at, no queue pair moves any more.
//!
//! Live reliable connections are paused at the RNIC (MigrOS §3.2), in the middle of whatever is under way. Of all others nothing is
//! given to the RNIC any more, and what it has is waited for: datagrams are sent at once or never. Nothing tells of a live
//! unreliable connection what has arrived: it is refused.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use verbatim_device::control::{QpState, QpType};
use verbatim_device::image::QpImage;

use crate::backend::{Device, TakenUp};
use crate::context::Context;
use crate::error::VerbsError;
use crate::qp::Qp;
use crate::road_map::blocker_of_cm;

/// How long is waited for requests of queue pairs that cannot be paused.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);
/// The pause between two looks at them.
const LOOK_INTERVAL: Duration = Duration::from_micros(50);

/// What stands still.
#[derive(Debug, Default)]
pub struct Standing {
    /// Paused at the RNIC.
    paused: Vec<Arc<Qp>>,
    /// Their requests are intercepted.
    held: Vec<Arc<Qp>>,
}

/// Why a process of which a context stands still is not moved, nor one that is connected to it.
pub fn blocker() -> String {
    "a program has dumped its context, and not let it go on (ibv_dump_context)".to_owned()
}

// The images of many queue pairs, and their pause: here and nowhere else in this module.

fn numbers(qps: &[Arc<Qp>]) -> Vec<u32> {
    qps.iter().map(|qp| qp.number()).collect()
}

fn pause_all(device: &dyn Device, qps: &[Arc<Qp>]) -> Result<(), VerbsError> {
    let paused = device.pause_qps(&numbers(qps), None);
    paused.inspect_err(|_| resume_all(device, qps))
}

fn resume_all(device: &dyn Device, qps: &[Arc<Qp>]) {
    // Cannot fail but for an RNIC that is gone, which is found out and told elsewhere.
    let _ = device.resume_qps(&numbers(qps));
}

pub(super) fn image(device: &dyn Device, qp: &Qp) -> Result<QpImage, VerbsError> {
    let mut images = device.dump_qps(&[qp.number()])?;
    Ok(images.pop().expect("as many as were asked for"))
}

/// Gives a queue pair in RESET, whose rings are filled, an image, and tells its partner where it is.
pub(super) fn go_on_from(
    device: &dyn Device,
    qpn: u32,
    image: &[u8],
    sgid_index: u8,
) -> Result<(), VerbsError> {
    let taken_up = TakenUp {
        qpn,
        image,
        sgid_index,
    };
    device
        .restore_qps(&[taken_up])?
        .into_iter()
        .collect::<Result<(), _>>()?;
    device.resume_qps(&[qpn])
}

impl Standing {
    /// Whether it was paused.
    pub(super) fn is_paused(&self, qp: &Arc<Qp>) -> bool {
        self.paused.iter().any(|paused| Arc::ptr_eq(paused, qp))
    }

    fn end(self, context: &Context) {
        let live = |qp: &Arc<Qp>| context.objects.lock().qps.contains_key(&qp.number());
        let (paused, held) = (self.paused, self.held);
        paused
            .iter()
            .chain(&held)
            .for_each(|qp| qp.control.lock().stands = false);
        let paused: Vec<_> = paused.into_iter().filter(live).collect();
        if let Ok(device) = context.device() {
            resume_all(&*device, &paused);
        }
        held.iter().for_each(|qp| _ = qp.send.lock().release());
    }
}

impl Qp {
    /// Whether it stands still for a dump.
    pub(crate) fn stands(&self) -> bool {
        self.control.lock().stands
    }
}

impl Context {
    /// Whether it stands still, since a dump was taken.
    pub fn stands(&self) -> bool {
        self.standing.lock().is_some()
    }

    /// Lets a context that stands still go on, as if no dump had been taken: that is worth nothing any more. `EINVAL` if it
    /// runs.
    pub fn go_on(&self) -> Result<(), VerbsError> {
        let _alone = self.process().control.alone();
        let standing = self.standing.lock().take();
        let standing = standing.ok_or_else(|| VerbsError::Invalid("the context runs".to_owned()))?;
        standing.end(self);
        self.process().changed();
        Ok(())
    }

    /// Makes all stand still that does not yet. The caller is alone with the process. If it fails, all is as it was.
    pub(super) fn stand(&self) -> Result<(), VerbsError> {
        self.check_dump()?;
        if let Some(why) = blocker_of_cm(self.process()) {
            return Err(VerbsError::Unsupported(why));
        }
        let device = self.device()?;
        let qps: Vec<_> = self.objects.lock().qps.values().cloned().collect();
        let mut fresh = Standing::default();
        let outcome = self.stand_with(&*device, &qps, &mut fresh);
        if let Err(error) = outcome {
            fresh.end(self);
            return Err(error);
        }
        let mut standing = self.standing.lock();
        let all = standing.get_or_insert_default();
        all.paused.append(&mut fresh.paused);
        all.held.append(&mut fresh.held);
        Ok(())
    }

    fn stand_with(
        &self,
        device: &dyn Device,
        qps: &[Arc<Qp>],
        fresh: &mut Standing,
    ) -> Result<(), VerbsError> {
        let mut live = Vec::new();
        for qp in qps.iter().filter(|qp| !qp.stands()) {
            if qp.is_paused() || qp.control.lock().awaits_refill {
                return Err(VerbsError::Refused {
                    verb: "dump_context",
                    errno: libc::EBUSY,
                    message: format!("queue pair {:#x} is paused, or waits for REFILL", qp.number()),
                });
            }
            let state = device.query_qp(qp.number())?.state;
            let connected = matches!(state, QpState::Rtr | QpState::Rts | QpState::Sqd);
            match (qp.qp_type(), connected) {
                (QpType::Rc, true) => live.push(qp.clone()),
                (QpType::Uc, true) => {
                    return Err(VerbsError::Unsupported(format!(
                        "queue pair {:#x} is an unreliable connection: nothing tells what of it has arrived",
                        qp.number()
                    )));
                }
                (QpType::Ud, _) if state == QpState::Sqe => {
                    return Err(VerbsError::Unsupported(format!(
                        "queue pair {:#x} is in SQE after a failed request: take it back to RTS first",
                        qp.number()
                    )));
                }
                _ => {
                    qp.control.lock().stands = true;
                    qp.send.lock().hold();
                    fresh.held.push(qp.clone());
                }
            }
        }
        wait_until_idle(&fresh.held)?;
        pause_all(device, &live)?;
        for qp in &live {
            qp.control.lock().stands = true;
        }
        fresh.paused = live;
        Ok(())
    }

    /// Whether a dump can hold all that this context has.
    fn check_dump(&self) -> Result<(), VerbsError> {
        let unsupported = |what: String| Err(VerbsError::Unsupported(what));
        if self.is_dead() {
            return Err(self.dead("dump_context"));
        }
        if !self.is_movable() {
            return unsupported("only a context of the software RNIC can be dumped".to_owned());
        }
        if self.moves.load(SeqCst) > 0 {
            return unsupported(
                "the context has been moved by an agent: its numbers are not those of its RNIC".to_owned(),
            );
        }
        let objects = self.objects.lock();
        if !objects.dms.is_empty() {
            return unsupported("on-chip memory is not dumped: free it first".to_owned());
        }
        let qps: Vec<_> = objects.qps.values().cloned().collect();
        drop(objects);
        for qp in qps {
            if qp.control.lock().physical_qpn() != qp.number() || !qp.send.lock().has_own_keys() {
                return unsupported(format!(
                    "an agent has moved the other end of queue pair {:#x}, and with it numbers and keys",
                    qp.number()
                ));
            }
        }
        Ok(())
    }
}

/// Nothing new is given to them. After the answer to any control verb the completions of what they had are there.
fn wait_until_idle(held: &[Arc<Qp>]) -> Result<(), VerbsError> {
    let deadline = Instant::now() + DRAIN_LIMIT;
    while let Some(qp) = held.iter().find(|qp| !qp.send.lock().is_idle()) {
        if Instant::now() > deadline {
            return Err(VerbsError::Refused {
                verb: "dump_context",
                errno: libc::ETIMEDOUT,
                message: format!("queue pair {:#x} has unfinished send requests", qp.number()),
            });
        }
        // Its completion queue may be full.
        qp.cqs().for_each(|cq| _ = cq.queue.lock().sweep());
        std::thread::sleep(LOOK_INTERVAL);
    }
    Ok(())
}
