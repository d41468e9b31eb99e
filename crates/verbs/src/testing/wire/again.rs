//! The objects of a process, made again on another device.

use verbatim_channel::{
    ClaimedContext, ClaimedCq, ClaimedMr, ClaimedPd, ClaimedQp, Endpoint, RoadMap, StandbyQp,
};
use verbatim_device::control::{QpAttr, QpAttrMask, QpState};

use crate::backend::{Device, PhysicalMemory, PhysicalMrInit, PhysicalQpInit};

/// Which attributes a queue pair of a connection gets on its way to a state.
pub fn connect_mask(state: QpState) -> QpAttrMask {
    use QpAttrMask as M;
    M::STATE
        | match state {
            QpState::Init => M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS,
            QpState::Rtr => {
                M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER
            }
            QpState::Rts => M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC,
            _ => M::empty(),
        }
}

/// With what a queue pair that is made again is connected.
pub struct NewPeer<'a> {
    pub gid: [u8; 16],
    pub standby: &'a StandbyQp,
    pub sq_psn: u32,
}

/// Makes the objects of a road map on another device, and connects the queue pair, if it is to be: one that gets an image is
/// not.
pub fn make_again(device: &dyn Device, map: &RoadMap, peer: Option<&NewPeer<'_>>) -> Vec<ClaimedContext> {
    let [context] = &map.contexts[..] else {
        panic!("one context")
    };
    let ([pd], [mr], [cq], [qp]) = (
        &context.pds[..],
        &context.mrs[..],
        &context.cqs[..],
        &context.qps[..],
    ) else {
        panic!("one of everything")
    };
    let physical_pd = device.alloc_pd().unwrap();
    let init = PhysicalMrInit {
        pd: physical_pd,
        access: mr.access,
        memory: PhysicalMemory {
            address: mr.address,
            length: mr.length,
            iova: mr.iova,
            segments: &mr.segments,
            file: None,
        },
    };
    let (physical_lkey, physical_rkey) = device.reg_mr(&init).unwrap();
    let place = device.create_cq(cq.entries, None).unwrap();
    let claimed_cq = ClaimedCq {
        cq: cq.cq,
        physical_cq: place.cq,
        entries: place.entries,
        offset: place.offset,
    };
    let init = PhysicalQpInit {
        pd: physical_pd,
        send_cq: place.cq,
        recv_cq: place.cq,
        srq: None,
        qp_type: qp.qp_type,
        cap: qp.cap,
    };
    let place = device.create_qp(&init).unwrap();
    let mut attr = qp.attr;
    let mut remote = qp.remote;
    if let Some(NewPeer { gid, standby, sq_psn }) = peer {
        attr.av.dgid = *gid;
        attr.dest_qpn = standby.physical_qpn;
        (attr.rq_psn, attr.sq_psn) = (standby.sq_psn, *sq_psn);
        remote = Some(Endpoint {
            gid: *gid,
            qpn: standby.physical_qpn,
        });
    }
    let steps: &[QpState] = match (qp.attr.state, peer) {
        (QpState::Rts, Some(_)) => &[QpState::Init, QpState::Rtr, QpState::Rts],
        _ => &[],
    };
    for state in steps {
        let attr = QpAttr {
            state: *state,
            ..attr
        };
        device.modify_qp(place.qpn, connect_mask(*state), &attr).unwrap();
    }
    vec![ClaimedContext {
        id: context.id,
        pds: vec![ClaimedPd {
            pd: pd.pd,
            physical_pd,
        }],
        mrs: vec![ClaimedMr {
            lkey: mr.lkey,
            physical_lkey,
            physical_rkey,
        }],
        mws: Vec::new(),
        channels: Vec::new(),
        srqs: Vec::new(),
        cqs: vec![claimed_cq],
        qps: vec![ClaimedQp {
            qpn: qp.qpn,
            physical_qpn: place.qpn,
            cap: place.cap,
            slot: place.slot,
            offset: place.offset,
            remote,
            sgid_index: remote.map(|_| 0),
            key_table: None,
        }],
    }]
}
