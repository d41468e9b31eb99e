//! Wait-before-stop (MigrRDMA §3.4): until nothing is in flight in either direction.
//!
//! The program's threads poll as they like meanwhile; what the helper thread takes out of a completion queue it puts in
//! the fake one. A queue pair is drained when the RNIC has finished all its send requests and as many messages have come
//! as the other end sent. An RNIC may count a request as finished a moment before its completion is visible; after all
//! were seen idle each queue pair's state is asked for, and an answer comes after the completions of all that was
//! finished before ([`crate::backend::SendRing::unfinished`]). The queues are swept once more after it.
//!
//! A network that is too bad for that, or a program that has to do something first, is not waited for beyond a limit:
//! [`super::stopped`] then goes on.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use verbatim_channel::{Answer, QpCount};
use verbatim_device::control::{QpState, QpType};

use super::partner::can_be_replaced;
use super::{Phase, SessionError, Sessions};
use crate::context::Context;
use crate::cq::Cq;
use crate::qp::Qp;

/// So many looks are separated by a mere yield: a drain is short when the network is.
const YIELDS: u32 = 200;
/// Then by this: a software RNIC needs the CPU more than we do, and there is no event to wait for.
const PAUSE: Duration = Duration::from_micros(50);

impl Sessions {
    pub(super) fn drain(
        &mut self,
        session: u64,
        expected: &[QpCount],
        timeout_ms: u32,
        sends_only: bool,
    ) -> Result<Answer, SessionError> {
        let record = self.find_in(session, Phase::Suspended, "Drain")?;
        let (qps, marked) = (record.qps.clone(), record.marked.clone());
        // Datagrams need nobody's leave.
        let marks = qps
            .iter()
            .filter(|qp| qp.qp_type() == QpType::Ud || marked.contains(&qp.number()));
        let marks: Vec<_> = marks.cloned().collect();
        let counted = expected.iter().filter(|_| !sends_only);
        let expected: HashMap<u32, u64> = counted.map(|count| (count.qpn, count.messages)).collect();
        let uc: HashSet<u32> = qps
            .iter()
            .filter(|qp| qp.qp_type() == QpType::Uc)
            .map(|qp| qp.number())
            .collect();
        let (unreliable, reliable) = expected
            .iter()
            .partition::<HashMap<u32, u64>, _>(|(qpn, _)| uc.contains(qpn));
        let cqs = cqs_of(&qps);
        let deadline = Instant::now() + Duration::from_millis(timeout_ms.into());
        let mut looks = 0;
        while !look(&qps, &cqs, &reliable) {
            // Also where nothing is unfinished: a marker that has failed says that its queue pair has.
            marks.iter().for_each(|qp| qp.mark());
            if Instant::now() >= deadline {
                match undrained(&qps, &reliable) {
                    // Drained since the look.
                    (qpns, _) if qpns.is_empty() => break,
                    (qpns, left) => return Ok(Answer::Undrained { qpns, left }),
                }
            }
            looks += 1;
            if looks % YIELDS == 0 {
                // An RNIC that is gone finishes nothing.
                self.process.look_after_devices();
            }
            if looks < YIELDS {
                crate::sys::yield_now();
            } else {
                std::thread::sleep(PAUSE);
            }
        }
        if sends_only {
            return Ok(Answer::Drained);
        }
        if !unreliable.is_empty() {
            wait_for_the_wire(&qps, &cqs, &unreliable);
        }
        self.finish_drain(session)?;
        Ok(Answer::Drained)
    }

    /// Lets the other ends post markers ([`crate::qp`], `markers`).
    pub(super) fn allow_markers(&mut self, session: u64) -> Result<Answer, SessionError> {
        let record = self.find_in(session, Phase::Suspended, "AllowMarkers")?;
        let mut qpns = Vec::new();
        for qp in &record.qps {
            if qp.allow_markers()? {
                qpns.push(qp.number());
            }
        }
        Ok(Answer::MarkersAllowed { qpns })
    }

    /// Nothing is in flight any more, but for queue pairs that are stopped: RECVs stay here from now on.
    pub(super) fn finish_drain(&mut self, session: u64) -> Result<(), SessionError> {
        let (qps, all) = {
            let record = self.find(session)?;
            (record.qps.clone(), record.all)
        };
        // A queue pair may have failed without a completion of ours to tell it.
        for (context, qps) in by_context(&qps) {
            let numbers: Vec<_> = qps.iter().map(|qp| qp.control.lock().physical_qpn()).collect();
            let states = context.device()?.qp_states(&numbers)?;
            for (qp, state) in qps.iter().zip(states) {
                qp.control.lock().was_failed = state == QpState::Err;
            }
        }
        for qp in &qps {
            qp.recv.lock().hold();
        }
        if all {
            self.process.srqs().for_each(|srq| srq.queue.lock().hold());
        }
        cqs_of(&qps).iter().for_each(|cq| _ = cq.queue.lock().sweep());
        for qp in &qps {
            let control = qp.control.lock();
            if control.standby.is_some() {
                // Once more: what the program has posted since the standby was made may tie it to this one.
                can_be_replaced(qp, &*qp.context().device()?, control.physical_qpn())?;
            }
        }
        self.find(session)?.phase = Phase::Drained;
        Ok(())
    }
}

/// The rights are again those that the program has set. Only when nothing is in flight: what a marker meets that is under way
/// would break the connection.
pub(super) fn disallow_markers(qps: &[Arc<Qp>]) {
    for qp in qps {
        // One that has failed meanwhile takes nothing more.
        let _ = qp.disallow_markers();
    }
}

/// Of an unreliable connection nothing tells what has arrived: a count that is too low is loss, for which there is no
/// second try, and of WRITEs there is no count. When the other ends have sent all, what the wire still holds comes within
/// the least of these times; while messages are missing, until none has come for so long.
fn wait_for_the_wire(qps: &[Arc<Qp>], cqs: &[Arc<Cq>], expected: &HashMap<u32, u64>) {
    const LEAST: Duration = Duration::from_millis(5);
    const SILENCE: Duration = Duration::from_millis(20);
    let received = || {
        let of = |qp: &Arc<Qp>| qp.side.received.load(Relaxed);
        let counted = qps.iter().filter(|qp| expected.contains_key(&qp.number()));
        counted.map(of).sum::<u64>()
    };
    let begun = Instant::now();
    let (mut seen, mut since) = (received(), begun);
    loop {
        cqs.iter().for_each(|cq| _ = cq.queue.lock().sweep());
        let now = Instant::now();
        if received() != seen {
            (seen, since) = (received(), now);
        }
        let all = qps.iter().all(|qp| has_received(qp, expected));
        if now - begun >= LEAST && (all || now - since >= SILENCE) {
            return;
        }
        std::thread::sleep(PAUSE);
    }
}

/// One look: sweeps the completion queues; whether all is done.
fn look(qps: &[Arc<Qp>], cqs: &[Arc<Cq>], expected: &HashMap<u32, u64>) -> bool {
    let idle = qps.iter().all(|qp| qp.send.lock().is_idle());
    cqs.iter().for_each(|cq| _ = cq.queue.lock().sweep());
    idle && qps.iter().all(|qp| has_received(qp, expected))
}

fn has_received(qp: &Qp, expected: &HashMap<u32, u64>) -> bool {
    let expected = expected.get(&qp.number()).copied().unwrap_or(0);
    qp.side.received.load(Relaxed) >= expected || qp.side.failed.load(Relaxed)
}

/// Which are not drained, and what is left of them.
fn undrained(qps: &[Arc<Qp>], expected: &HashMap<u32, u64>) -> (Vec<u32>, String) {
    /// So many are described.
    const DESCRIBED: usize = 8;
    let (mut qpns, mut left) = (Vec::new(), Vec::new());
    for qp in qps {
        let number = qp.number();
        let what = if !qp.send.lock().is_idle() {
            "has unfinished send requests".to_owned()
        } else if !has_received(qp, expected) {
            let received = qp.side.received.load(Relaxed);
            format!("has received {received} of {} messages", expected[&number])
        } else {
            continue;
        };
        qpns.push(number);
        if left.len() < DESCRIBED {
            left.push(format!("queue pair {number} {what}"));
        }
    }
    (qpns, left.join(", "))
}

/// The queue pairs of each context.
pub(super) fn by_context(qps: &[Arc<Qp>]) -> Vec<(&Arc<Context>, Vec<&Arc<Qp>>)> {
    let mut found: Vec<(&Arc<Context>, Vec<&Arc<Qp>>)> = Vec::new();
    for qp in qps {
        match found
            .iter_mut()
            .find(|(known, _)| Arc::ptr_eq(known, qp.context()))
        {
            Some((_, of_it)) => of_it.push(qp),
            None => found.push((qp.context(), vec![qp])),
        }
    }
    found
}

/// Their completion queues, each once.
pub(super) fn cqs_of(qps: &[Arc<Qp>]) -> Vec<Arc<Cq>> {
    let mut cqs: Vec<Arc<Cq>> = Vec::new();
    for cq in qps.iter().flat_map(|qp| qp.cqs()) {
        if !cqs.iter().any(|known| Arc::ptr_eq(known, cq)) {
            cqs.push(cq.clone());
        }
    }
    cqs
}
