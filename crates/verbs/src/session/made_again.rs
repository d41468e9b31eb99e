//! Contexts whose objects the restored process makes again, by itself: those of RNICs that a library in the process drives.
//!
//! Nobody can prepare such a context ahead of its process, and hand it over: half of it is that library's memory. So while the
//! process stands still its old context stays as it is, and is taken up again if the migration is rolled back:
//!
//! ```text
//!   Quiesce ─► the device is let go, and kept ──┬─ Claim ─────────────────────────────► the same device again
//!                                               └─ (restored) MakeAgain, ConnectMade, Claim ─► the new one; the old one abandoned
//! ```
//! What cannot be made at the new place is lost as if its RNIC had died: there is no way back any more. Agents see to it that what
//! is known beforehand to be lacking refuses the migration.

use std::collections::HashMap;
use std::sync::Arc;

use verbatim_channel::{
    Answer, ClaimedChannel, ClaimedContext, ClaimedCq, ClaimedMr, ClaimedMw, ClaimedPd, ClaimedQp,
    ClaimedSrq, Endpoint, KeyPair, MadeContext, MadePeer, MadeQp,
};
use verbatim_device::control::{QpAttr, QpAttrMask, QpState, QpType};
use verbatim_device::gids::counterpart;
use verbatim_device::transitions::steps;

use super::{LetGo, Phase, SessionError, Sessions};
use crate::backend::{Device, PhysicalQpInit};
use crate::context::Context;
use crate::error::VerbsError;
use crate::qp::Qp;

/// A context that stands ready at its new RNIC.
pub(super) struct Made {
    pub device: Arc<dyn Device>,
    pub claimed: ClaimedContext,
    told: MadeContext,
    /// By virtual number, the way of those that are to be connected.
    rest: HashMap<u32, Rest>,
}

/// What a new queue pair lacks until it is connected.
struct Rest {
    steps: Vec<(QpState, QpAttrMask)>,
    /// As the program set them, but for the index of its GID, which is the new RNIC's.
    attr: QpAttr,
    /// With which PSN it starts to send.
    sq_psn: u32,
}

/// All that a session has made.
#[derive(Default)]
pub(super) struct AllMade {
    contexts: HashMap<u32, Made>,
    lost: Vec<String>,
}

impl AllMade {
    /// The one of that context, for its claim; `None` if it is lost.
    pub fn take(&mut self, context: u32) -> Option<Made> {
        self.contexts.remove(&context)
    }

    fn describe(&self) -> Answer {
        let contexts = self.contexts.values().map(|made| made.told.clone());
        let mut contexts: Vec<_> = contexts.collect();
        contexts.sort_by_key(|made| made.id);
        let lost = self.lost.clone();
        Answer::Made { contexts, lost }
    }
}

impl Sessions {
    /// Makes the objects of all contexts that were kept. The old ones are nobody's any more.
    pub(super) fn make_again(&mut self, session: u64) -> Result<Answer, SessionError> {
        if let Some(told) = &self.find(session)?.told_made {
            // Whoever drives the session now has not heard it.
            return Ok(told.clone());
        }
        let process = self.process.clone();
        let record = self.find_in(session, Phase::Quiesced, "MakeAgain")?;
        let mut all = AllMade::default();
        for (context, let_go) in process.contexts().iter().zip(&mut record.let_go) {
            let LetGo::Kept(kept) = let_go else { continue };
            let Some(kept) = kept.take() else { continue };
            let Some(old) = kept.kept else { continue };
            drop(kept.reopen);
            let new = old.open_again();
            old.abandon();
            match new.and_then(|new| make(context, new)) {
                Ok(made) => _ = all.contexts.insert(context.id(), made),
                Err(error) => {
                    let device = context.device_name();
                    all.lost
                        .push(format!("what it had on {device} cannot be made there: {error}"));
                }
            }
        }
        let told = all.describe();
        record.made = Some(all);
        record.told_made = Some(told.clone());
        Ok(told)
    }

    /// Connects the new queue pairs.
    pub(super) fn connect_made(&mut self, session: u64, peers: &[MadePeer]) -> Result<Answer, SessionError> {
        if self.find(session)?.phase == Phase::Replaced {
            let (contexts, lost) = Default::default();
            return Ok(Answer::Made { contexts, lost });
        }
        let record = self.find_in(session, Phase::Quiesced, "ConnectMade")?;
        let all = record.made.as_mut().ok_or_else(|| {
            SessionError::Claim("nothing was made again that could be connected".to_owned())
        })?;
        let mut lost = Vec::new();
        for MadePeer { peer, key_table } in peers {
            let contexts = &mut all.contexts;
            let owner = contexts
                .values_mut()
                .find(|made| made.rest.contains_key(&peer.qpn));
            // Lost with its context, or connected by whoever asked before.
            let Some(made) = owner else { continue };
            let rest = made.rest.remove(&peer.qpn).expect("it was found by it");
            let claimed = made.claimed.qps.iter_mut().find(|qp| qp.qpn == peer.qpn);
            let claimed = claimed.expect("each queue pair is claimed");
            let mut attr = rest.attr;
            attr.av.dgid = peer.remote.gid;
            attr.dest_qpn = peer.remote.qpn;
            if let Some(rq_psn) = peer.rq_psn {
                (attr.rq_psn, attr.sq_psn) = (rq_psn, rest.sq_psn);
            }
            let connected = rest.steps.iter().try_for_each(|(state, mask)| {
                let step = QpAttr {
                    state: *state,
                    ..attr
                };
                made.device.modify_qp(claimed.physical_qpn, *mask, &step)
            });
            if let Err(error) = connected {
                lost.push(format!(
                    "queue pair {:#x} cannot be connected there: {error}",
                    peer.qpn
                ));
                fail(&*made.device, claimed.physical_qpn);
            }
            claimed.remote = Some(peer.remote);
            claimed.sgid_index = Some(attr.av.sgid_index);
            claimed.key_table = *key_table;
        }
        let contexts = Vec::new();
        Ok(Answer::Made { contexts, lost })
    }
}

/// The program sees of a queue pair that cannot go on what it sees of one whose connection has failed.
fn fail(device: &dyn Device, physical_qpn: u32) {
    let attr = QpAttr {
        state: QpState::Err,
        ..QpAttr::default()
    };
    // An RNIC that refuses that, too, completes nothing more of it, and its end is told by itself.
    let _ = device.modify_qp(physical_qpn, QpAttrMask::STATE, &attr);
}

/// Makes all objects of a context at the device that takes the place of the one that it had.
fn make(context: &Arc<Context>, device: Arc<dyn Device>) -> Result<Made, VerbsError> {
    let gids = device.attributes().1.gid_table();
    let mut maker = Maker {
        known: context.port_attr().gid_table(),
        claimed: ClaimedContext {
            id: context.id(),
            pds: Vec::new(),
            mrs: Vec::new(),
            mws: Vec::new(),
            channels: Vec::new(),
            cqs: Vec::new(),
            srqs: Vec::new(),
            qps: Vec::new(),
        },
        told: MadeContext {
            id: context.id(),
            gids,
            qps: Vec::new(),
            keys: Vec::new(),
        },
        rest: HashMap::new(),
        physical: Physical::default(),
        device,
    };
    maker.make_memory(context)?;
    maker.make_queues(context)?;
    Ok(Made {
        device: maker.device,
        claimed: maker.claimed,
        told: maker.told,
        rest: maker.rest,
    })
}

/// New numbers by those that the program knows.
#[derive(Default)]
struct Physical {
    pds: HashMap<u32, u32>,
    channels: HashMap<u32, u32>,
    cqs: HashMap<u32, u32>,
    srqs: HashMap<u32, u32>,
}

fn find(table: &HashMap<u32, u32>, number: u32) -> Result<u32, VerbsError> {
    // A program that destroys objects in an order that it may not keeps its own mistake.
    table.get(&number).copied().ok_or_else(|| VerbsError::Gone {
        object: format!("what an object was made from ({number})"),
    })
}

struct Maker {
    device: Arc<dyn Device>,
    /// The GID table that the program knows.
    known: Vec<[u8; 16]>,
    claimed: ClaimedContext,
    told: MadeContext,
    rest: HashMap<u32, Rest>,
    physical: Physical,
}

impl Maker {
    fn make_memory(&mut self, context: &Context) -> Result<(), VerbsError> {
        let objects = context.objects.lock();
        let pds: Vec<_> = objects.pds.keys().copied().collect();
        let mrs: Vec<_> = objects.mrs.values().cloned().collect();
        let mws: Vec<_> = objects.mws.values().cloned().collect();
        drop(objects);
        for pd in pds {
            let physical_pd = self.device.alloc_pd()?;
            self.physical.pds.insert(pd, physical_pd);
            self.claimed.pds.push(ClaimedPd { pd, physical_pd });
        }
        for mr in mrs {
            let pd = find(&self.physical.pds, mr.pd().number())?;
            let (physical_lkey, physical_rkey) = mr.register_again(context.process(), &*self.device, pd)?;
            self.claimed.mrs.push(ClaimedMr {
                lkey: mr.lkey(),
                physical_lkey,
                physical_rkey,
            });
            self.told.keys.push(KeyPair {
                virtual_key: mr.rkey(),
                physical_key: physical_rkey,
                any_tag: false,
            });
        }
        for mw in mws {
            let pd = find(&self.physical.pds, mw.pd().number())?;
            let physical_rkey = self.device.alloc_mw(pd, mw.mw_type())?;
            let rkey = mw.rkey();
            self.claimed.mws.push(ClaimedMw { rkey, physical_rkey });
            self.told.keys.push(KeyPair {
                virtual_key: rkey,
                physical_key: physical_rkey,
                any_tag: true,
            });
        }
        Ok(())
    }

    fn make_queues(&mut self, context: &Context) -> Result<(), VerbsError> {
        let objects = context.objects.lock();
        let channels: Vec<_> = objects.channels.keys().copied().collect();
        let cqs: Vec<_> = objects.cqs.values().cloned().collect();
        let qps: Vec<_> = objects.qps.values().cloned().collect();
        drop(objects);
        for channel in channels {
            let physical_channel = self.device.create_comp_channel()?.number();
            self.physical.channels.insert(channel, physical_channel);
            self.claimed.channels.push(ClaimedChannel {
                channel,
                physical_channel,
            });
        }
        for cq in cqs {
            let number = cq.number();
            let channel = cq
                .channel()
                .map(|channel| find(&self.physical.channels, channel.number()));
            let channel = channel.transpose()?.map(|channel| (channel, number));
            let place = self.device.create_cq(cq.entries(), channel)?;
            self.physical.cqs.insert(number, place.cq);
            self.claimed.cqs.push(ClaimedCq {
                cq: number,
                physical_cq: place.cq,
                entries: place.entries,
                offset: place.offset,
            });
        }
        for srq in context.srqs() {
            let pd = find(&self.physical.pds, srq.pd().number())?;
            let attr = verbatim_device::control::SrqAttr {
                limit: 0,
                ..*srq.attr()
            };
            let place = self.device.create_srq(pd, &attr)?;
            self.physical.srqs.insert(srq.number(), place.srq);
            self.claimed.srqs.push(ClaimedSrq {
                srq: srq.number(),
                physical_srq: place.srq,
                attr: place.attr,
                offset: place.offset,
            });
        }
        qps.iter().try_for_each(|qp| self.make_qp(qp))
    }

    fn make_qp(&mut self, qp: &Qp) -> Result<(), VerbsError> {
        let srq = qp.srq().map(|srq| find(&self.physical.srqs, srq.number()));
        let place = self.device.create_qp(&PhysicalQpInit {
            pd: find(&self.physical.pds, qp.pd().number())?,
            send_cq: find(&self.physical.cqs, qp.send_cq().number())?,
            recv_cq: find(&self.physical.cqs, qp.recv_cq().number())?,
            srq: srq.transpose()?,
            qp_type: qp.qp_type(),
            cap: *qp.cap(),
        })?;
        let control = qp.control.lock();
        let state = match control.was_failed {
            true => QpState::Err,
            false => control.attr.state,
        };
        let whole = steps(qp.qp_type(), state).ok_or_else(|| {
            VerbsError::Invalid(format!(
                "queue pair {:#x} is in SQE after a failed request",
                qp.number()
            ))
        })?;
        let (own, sgid_index) = self.own_gid(control.attr.av.sgid_index)?;
        let mut attr = control.attr;
        attr.av.sgid_index = sgid_index;
        let connected = control.remote.is_some()
            && matches!(state, QpState::Rtr | QpState::Rts | QpState::Sqd)
            && qp.qp_type() != QpType::Ud;
        // The rest of the way needs the other end.
        let alone = if connected { 1 } else { whole.len() };
        for (state, mask) in &whole[..alone] {
            let step = QpAttr {
                state: *state,
                ..attr
            };
            self.device.modify_qp(place.qpn, *mask, &step)?;
        }
        for gid in &control.mcast {
            self.device.attach_mcast(place.qpn, *gid)?;
        }
        // Any PSN will do on a connection that is new on both sides; a varying one shows stray packets in captures.
        let sq_psn = (place.qpn.rotate_left(12) ^ qp.number()).wrapping_mul(0x9e37_79b1) & 0x00ff_ffff;
        if connected {
            let steps = whole[alone..].to_vec();
            self.rest.insert(qp.number(), Rest { steps, attr, sq_psn });
        }
        self.claimed.qps.push(ClaimedQp {
            qpn: qp.number(),
            physical_qpn: place.qpn,
            cap: place.cap,
            slot: place.slot,
            offset: place.offset,
            remote: None,
            sgid_index: None,
            key_table: None,
        });
        self.told.qps.push(MadeQp {
            qpn: qp.number(),
            own: Endpoint {
                gid: own,
                qpn: place.qpn,
            },
            sq_psn,
        });
        Ok(())
    }

    /// What takes the place of the GID that the program knows by `index`: itself, and its index at the new RNIC.
    fn own_gid(&self, index: u8) -> Result<([u8; 16], u8), VerbsError> {
        let there = &self.told.gids;
        let Some(known) = self.known.get(usize::from(index)) else {
            // What the program may not know, the RNIC refuses.
            return Ok(([0; 16], index));
        };
        let found = counterpart(&self.known, *known, there);
        let found = found.ok_or_else(|| {
            VerbsError::Invalid(format!(
                "the RNIC has no GID of the kind of {}",
                std::net::Ipv6Addr::from(*known)
            ))
        })?;
        Ok((there[found], found as u8))
    }
}
