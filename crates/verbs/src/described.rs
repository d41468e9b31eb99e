//! A context's objects in the form that the record has: what must be made again elsewhere.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use verbatim_channel::{ChannelRecord, ContextRecord, CqRecord, MwRecord, PdRecord, QpRecord, SrqRecord};
use verbatim_device::control::{QpAttr, QpState, SrqAttr};

use crate::context::Context;
use crate::error::VerbsError;
use crate::qp::{Control, Qp};

/// All objects but the queue pairs.
pub fn objects(context: &Context) -> ContextRecord {
    let objects = context.objects.lock();
    let pds = objects.pds.keys().map(|pd| PdRecord { pd: *pd }).collect();
    let mrs = objects.mrs.values().map(|mr| mr.describe()).collect();
    let mws = objects.mws.values().map(|mw| MwRecord {
        rkey: mw.rkey(),
        physical_rkey: context.windows.physical(mw.rkey()),
        pd: mw.pd().number(),
        mw_type: mw.mw_type(),
    });
    let mws = mws.collect();
    let channels = objects.channels.keys();
    let channels = channels
        .map(|channel| ChannelRecord { channel: *channel })
        .collect();
    let cqs = objects.cqs.values().map(|cq| CqRecord {
        cq: cq.number(),
        entries: cq.entries(),
        channel: cq.channel().map(|channel| channel.number()),
    });
    let cqs = cqs.collect();
    let srqs = objects.srqs.values().map(|srq| SrqRecord {
        srq: srq.number(),
        pd: srq.pd().number(),
        attr: SrqAttr {
            limit: 0,
            ..*srq.attr()
        },
    });
    let srqs = srqs.collect();
    let handles = objects.ahs.values();
    let handle_gids: BTreeSet<_> = handles
        .filter_map(|ah| context.gid(ah.attr().sgid_index.into()))
        .collect();
    let handle_gids = handle_gids.into_iter().collect();
    ContextRecord {
        id: context.id(),
        gids: context.port_attr().gid_table(),
        handle_gids,
        moves: context.moves.load(SeqCst),
        pds,
        mrs,
        mws,
        channels,
        cqs,
        srqs,
        qps: Vec::new(),
    }
}

/// A queue pair, in the state that the RNIC says.
pub fn queue_pair(qp: &Qp) -> Result<QpRecord, VerbsError> {
    let attr = qp.current_attr()?;
    let paused = qp.is_paused();
    let record = with(qp, &qp.control.lock(), attr);
    Ok(QpRecord { paused, ..record })
}

/// All objects, of a context whose RNIC is not to be asked any more.
pub fn kept(context: &Context) -> ContextRecord {
    let qps: Vec<_> = context.objects.lock().qps.values().cloned().collect();
    let as_known = |qp: &Arc<Qp>| {
        let control = qp.control.lock();
        let state = match control.was_failed {
            true => QpState::Err,
            false => control.attr.state,
        };
        let attr = QpAttr {
            state,
            ..control.attr
        };
        with(qp, &control, attr)
    };
    ContextRecord {
        qps: qps.iter().map(as_known).collect(),
        ..objects(context)
    }
}

fn with(qp: &Qp, control: &Control, attr: QpAttr) -> QpRecord {
    QpRecord {
        qpn: qp.number(),
        pd: qp.pd().number(),
        send_cq: qp.send_cq().number(),
        recv_cq: qp.recv_cq().number(),
        srq: qp.srq().map(|srq| srq.number()),
        qp_type: qp.qp_type(),
        cap: *qp.cap(),
        attr,
        groups: control.mcast.clone(),
        physical_qpn: control.physical_qpn(),
        local_gid: control
            .remote
            .and_then(|_| qp.context().physical_gid(control.sgid_index)),
        remote: control.remote,
        paused: false,
    }
}
