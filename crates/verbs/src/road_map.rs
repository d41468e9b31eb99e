//! The road map: what a process has made, told to its agent (MigrRDMA §3.2).
//!
//! The objects are the record; nothing is kept beside them. A version counts every change, so that the agent can see
//! whether what it was told still holds.

use verbatim_channel::{ContextRecord, CqRecord, MrRecord, PdRecord, QpRecord, RoadMap};
use verbatim_device::control::QpState;
use verbatim_seqpacket::MAX_FDS;

use crate::context::Context;
use crate::error::VerbsError;
use crate::process::Process;
use crate::qp::Qp;

/// Everything that `process` has made.
pub fn describe(process: &Process) -> Result<RoadMap, VerbsError> {
    // Read first: a change while the rest is read makes the answer look old, never new.
    let version = process.road_map_version();
    let contexts = process.contexts();
    let mut blockers = Vec::new();
    if contexts.len() > MAX_FDS {
        blockers.push(format!(
            "{} opened devices; at most {MAX_FDS} can be moved",
            contexts.len()
        ));
    }
    let contexts = contexts
        .iter()
        .map(|context| describe_context(context, &mut blockers))
        .collect::<Result<_, _>>()?;
    Ok(RoadMap {
        pid: std::process::id(),
        version,
        contexts,
        blockers,
    })
}

fn describe_context(context: &Context, blockers: &mut Vec<String>) -> Result<ContextRecord, VerbsError> {
    let objects = context.objects.lock();
    let pds = objects.pds.keys().map(|pd| PdRecord { pd: *pd }).collect();
    let mrs = objects.mrs.values().map(|mr| MrRecord {
        lkey: mr.lkey(),
        rkey: mr.rkey(),
        pd: mr.pd().number(),
        address: mr.address(),
        length: mr.length(),
        iova: mr.iova,
        access: mr.access,
        segments: mr.segments.clone(),
    });
    let mrs = mrs.collect();
    let cqs = objects.cqs.values().map(|cq| CqRecord {
        cq: cq.number(),
        entries: cq.entries(),
    });
    let cqs = cqs.collect();
    let live: Vec<_> = objects.qps.values().cloned().collect();
    drop(objects);

    let mut qps = Vec::with_capacity(live.len());
    for qp in live {
        match describe_qp(&qp) {
            Ok(record) => qps.push(record),
            // Destroyed since it was listed: the version shows that this road map is old.
            Err(_) if !context.objects.lock().qps.contains_key(&qp.number()) => {}
            Err(error) => return Err(error),
        }
    }
    for qp in qps.iter().filter(|qp| qp.attr.state == QpState::Sqd) {
        blockers.push(format!(
            "queue pair {} is in SQD, where requests wait that cannot be drained",
            qp.qpn
        ));
    }
    Ok(ContextRecord {
        id: context.id(),
        pds,
        mrs,
        cqs,
        qps,
    })
}

fn describe_qp(qp: &Qp) -> Result<QpRecord, VerbsError> {
    let attr = qp.current_attr()?;
    let control = qp.control.lock();
    Ok(QpRecord {
        qpn: qp.number(),
        pd: qp.pd().number(),
        send_cq: qp.send_cq().number(),
        recv_cq: qp.recv_cq().number(),
        qp_type: qp.qp_type(),
        cap: *qp.cap(),
        attr,
        physical_qpn: control.physical_qpn(),
        remote: control.remote,
    })
}
