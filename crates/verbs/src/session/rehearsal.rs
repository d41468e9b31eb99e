//! How long a drain would take, without one.
//!
//! Requests are finished in the order in which they were posted. So what is under way now is what a drain would wait for, and it
//! takes about as long while the program goes on; whatever the link, the RNIC, and the other end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use verbatim_channel::{Answer, Scope};

use crate::process::Process;
use crate::qp::Qp;

/// So many looks are separated by a mere yield: what is short is measured well.
const YIELDS: u32 = 20;
/// Then by this: the program needs the queues' locks more than we do.
const PAUSE: Duration = Duration::from_micros(200);

/// Waits until all that is posted now is finished, or until the limit.
pub(super) fn measure_drain(process: &Process, scope: &Scope, limit: Duration) -> Answer {
    let begun = Instant::now();
    let qps = match scope {
        Scope::All => process.qps(),
        Scope::Qps(qpns) => qpns.iter().filter_map(|qpn| process.qp(*qpn)).collect(),
    };
    let mut under_way: Vec<(Arc<Qp>, u64)> = qps
        .into_iter()
        .map(|qp| {
            let posted = qp.send.lock().posted();
            (qp, posted)
        })
        .collect();
    for look in 0u32.. {
        let is_finished = |qp: &Qp, posted: u64| {
            let first = qp.send.lock().first_unfinished();
            // An RNIC that is gone finishes nothing more.
            first.is_none_or(|first| first >= posted)
        };
        under_way.retain(|(qp, posted)| !is_finished(qp, *posted));
        let elapsed = begun.elapsed();
        if under_way.is_empty() {
            let us = elapsed.as_micros().try_into().ok();
            return Answer::DrainMeasured { us };
        }
        if elapsed >= limit {
            break;
        }
        match look < YIELDS {
            true => crate::sys::yield_now(),
            false => std::thread::sleep(PAUSE),
        }
    }
    Answer::DrainMeasured { us: None }
}
