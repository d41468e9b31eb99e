//! Makes the objects of a record at a device that nobody but the calling process can use.
//!
//! A process that has moved does so for good ([`crate::session`], `Order::MakeAgain`); before it moves, a helper at its destination
//! does the same for a moment, to see whether it can ([`crate::trial`]).

mod windows;

use std::collections::HashMap;
use std::fmt::Display;
use std::sync::Arc;

use verbatim_channel::{
    ClaimedChannel, ClaimedContext, ClaimedCq, ClaimedMr, ClaimedMw, ClaimedPd, ClaimedQp, ClaimedSrq,
    ContextRecord, Endpoint, KeyPair, MadeContext, MadePeer, MadeQp, MrRecord, QpRecord,
};
use verbatim_device::control::{QpAttr, QpAttrMask, QpState, QpType};
use verbatim_device::gids::counterpart;
use verbatim_device::transitions::{steps, to_init};

pub(crate) use self::windows::Was;
use self::windows::alloc_that_fits;
use crate::backend::{Device, PhysicalQpInit};
use crate::error::VerbsError;
use crate::reach::Patience;
use crate::sys::start_psn;
use crate::tables::key_slot;

/// What cannot be made, and why not.
#[derive(Debug, thiserror::Error)]
#[error("{object}: {error}")]
pub(crate) struct NotMade {
    /// In words for an operator.
    object: String,
    error: VerbsError,
}

/// Names the object in an error.
trait Of<T> {
    fn of(self, object: impl FnOnce() -> String) -> Result<T, NotMade>;
}

impl<T> Of<T> for Result<T, VerbsError> {
    fn of(self, object: impl FnOnce() -> String) -> Result<T, NotMade> {
        self.map_err(|error| {
            let object = object();
            NotMade { object, error }
        })
    }
}

/// Registers the memory of a region, in the protection domain of that physical number: its local and its remote key.
pub(crate) type Register<'a> =
    &'a mut dyn FnMut(&dyn Device, &MrRecord, u32) -> Result<(u32, u32), VerbsError>;

/// A context that stands ready at its new RNIC.
pub(crate) struct Made {
    pub device: Arc<dyn Device>,
    pub claimed: ClaimedContext,
    pub told: MadeContext,
    /// By virtual number, the way of those that are to be connected.
    rest: HashMap<u32, Rest>,
    patience: Patience,
}

/// What a new queue pair lacks until it is connected.
struct Rest {
    steps: Vec<(QpState, QpAttrMask)>,
    /// As the program set them, but for the index of its GID, which is the new RNIC's.
    attr: QpAttr,
    /// With which PSN it starts to send.
    sq_psn: u32,
}

impl Made {
    /// Makes all objects of `record` at `device`. `windows`: how they were, by the upper 24 bits of their keys; those that are not in there
    /// were not bound.
    pub fn make(
        device: Arc<dyn Device>,
        record: &ContextRecord,
        windows: &HashMap<u32, Was>,
        register: Register<'_>,
    ) -> Result<Self, NotMade> {
        let gids = device.attributes().1.gid_table();
        let mut maker = Maker {
            known: &record.gids,
            windows,
            made: Self {
                device,
                claimed: ClaimedContext {
                    id: record.id,
                    pds: Vec::new(),
                    mrs: Vec::new(),
                    mws: Vec::new(),
                    channels: Vec::new(),
                    cqs: Vec::new(),
                    srqs: Vec::new(),
                    qps: Vec::new(),
                },
                told: MadeContext {
                    id: record.id,
                    gids,
                    qps: Vec::new(),
                    keys: Vec::new(),
                },
                rest: HashMap::new(),
                patience: Patience::default(),
            },
            physical: Physical::default(),
        };
        maker.make_memory(record, register)?;
        maker.make_queues(record)?;
        Ok(maker.made)
    }

    /// The queue pairs that are to be connected, with where they are.
    pub fn unconnected(&self) -> Vec<MadeQp> {
        let waits = |qp: &&MadeQp| self.rest.contains_key(&qp.qpn);
        self.told.qps.iter().filter(waits).copied().collect()
    }

    /// Whether a queue pair is here and to be connected.
    pub fn waits(&self, qpn: u32) -> bool {
        self.rest.contains_key(&qpn)
    }

    /// Connects one that is, once.
    pub fn connect(&mut self, MadePeer { peer, key_table }: &MadePeer) -> Result<(), NotMade> {
        let Some(rest) = self.rest.remove(&peer.qpn) else {
            return Ok(());
        };
        let claimed = self.claimed.qps.iter_mut().find(|qp| qp.qpn == peer.qpn);
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
            let (device, patience) = (&self.device, &mut self.patience);
            let stepped = patience.with(|| device.modify_qp(claimed.physical_qpn, *mask, &step));
            stepped.of(|| format!("queue pair {:#x} cannot go to {state:?}", peer.qpn))
        });
        if connected.is_err() {
            fail(&*self.device, claimed.physical_qpn);
        }
        claimed.remote = Some(peer.remote);
        claimed.sgid_index = Some(attr.av.sgid_index);
        claimed.key_table = *key_table;
        connected
    }
}

impl Made {
    /// Destroys the queue pairs and windows of a context that somebody else goes on with: they are the process's to make.
    pub fn destroy_queue_pairs(&mut self) -> Result<(), NotMade> {
        for qp in self.claimed.qps.drain(..) {
            let destroyed = self.device.destroy_qp(qp.physical_qpn);
            destroyed.of(|| format!("queue pair {:#x} stays", qp.qpn))?;
        }
        for mw in self.claimed.mws.drain(..) {
            let destroyed = self.device.dealloc_mw(mw.physical_rkey);
            destroyed.of(|| format!("memory window {:#x} stays", mw.rkey))?;
        }
        Ok(())
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

/// The way of a new queue pair to a state. Linux lets none go from RESET to ERR (`ib_modify_qp_is_ok`), which IBA does.
fn way_to(qp_type: QpType, state: QpState) -> Option<Vec<(QpState, QpAttrMask)>> {
    match state {
        QpState::Err => Some(vec![
            (QpState::Init, to_init(qp_type)),
            (QpState::Err, QpAttrMask::STATE),
        ]),
        _ => steps(qp_type, state),
    }
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
        object: format!("what it was made from ({number})"),
    })
}

/// How many there are of a kind, for an error: a device that has no more of them says no more than that.
fn one_of(kind: &str, name: impl Display, index: usize, all: usize) -> String {
    format!("{kind} {name} (number {} of {all})", index + 1)
}

struct Maker<'a> {
    /// The GID table that the program knows.
    known: &'a [[u8; 16]],
    windows: &'a HashMap<u32, Was>,
    made: Made,
    physical: Physical,
}

impl Maker<'_> {
    fn make_memory(&mut self, record: &ContextRecord, register: Register<'_>) -> Result<(), NotMade> {
        let made = &mut self.made;
        for (index, pd) in record.pds.iter().enumerate() {
            let all = record.pds.len();
            let physical_pd = made.device.alloc_pd();
            let physical_pd = physical_pd.of(|| one_of("protection domain", pd.pd, index, all))?;
            self.physical.pds.insert(pd.pd, physical_pd);
            let pd = pd.pd;
            made.claimed.pds.push(ClaimedPd { pd, physical_pd });
        }
        for (index, mr) in record.mrs.iter().enumerate() {
            let pd = find(&self.physical.pds, mr.pd);
            let keys = pd.and_then(|pd| register(&*made.device, mr, pd));
            let name = || {
                let bytes: u64 = record.mrs[..=index].iter().map(|mr| mr.length).sum();
                let one = one_of(
                    "memory region",
                    format_args!("{:#x}", mr.lkey),
                    index,
                    record.mrs.len(),
                );
                format!("{one} of {} bytes, {bytes} bytes up to it", mr.length)
            };
            let (physical_lkey, physical_rkey) = keys.of(name)?;
            made.claimed.mrs.push(ClaimedMr {
                lkey: mr.lkey,
                physical_lkey,
                physical_rkey,
            });
            made.told.keys.push(KeyPair {
                virtual_key: mr.rkey,
                physical_key: physical_rkey,
                any_tag: false,
            });
        }
        for (index, mw) in record.mws.iter().enumerate() {
            let pd = find(&self.physical.pds, mw.pd);
            let was = self.windows.get(&key_slot(mw.rkey)).copied().unwrap_or(Was {
                rkey: mw.rkey,
                bound: false,
            });
            let rkey = pd.and_then(|pd| alloc_that_fits(&*made.device, pd, mw.mw_type, was));
            let all = record.mws.len();
            let physical_rkey =
                rkey.of(|| one_of("memory window", format_args!("{:#x}", mw.rkey), index, all))?;
            let rkey = mw.rkey;
            made.claimed.mws.push(ClaimedMw { rkey, physical_rkey });
            made.told.keys.push(KeyPair {
                virtual_key: rkey,
                physical_key: physical_rkey,
                any_tag: true,
            });
        }
        Ok(())
    }

    fn make_queues(&mut self, record: &ContextRecord) -> Result<(), NotMade> {
        let made = &mut self.made;
        for (index, channel) in record.channels.iter().enumerate() {
            let channel = channel.channel;
            let all = record.channels.len();
            let physical = made.device.create_comp_channel();
            let physical = physical.of(|| one_of("completion channel", channel, index, all))?;
            let physical_channel = physical.number();
            self.physical.channels.insert(channel, physical_channel);
            made.claimed.channels.push(ClaimedChannel {
                channel,
                physical_channel,
            });
        }
        for (index, cq) in record.cqs.iter().enumerate() {
            let channel = cq.channel.map(|channel| find(&self.physical.channels, channel));
            let place = channel.transpose().and_then(|channel| {
                let channel = channel.map(|channel| (channel, cq.cq));
                made.device.create_cq(cq.entries, channel)
            });
            let place = place.of(|| {
                let one = one_of("completion queue", cq.cq, index, record.cqs.len());
                format!("{one} with {} entries", cq.entries)
            })?;
            self.physical.cqs.insert(cq.cq, place.cq);
            made.claimed.cqs.push(ClaimedCq {
                cq: cq.cq,
                physical_cq: place.cq,
                entries: place.entries,
                offset: place.offset,
            });
        }
        for (index, srq) in record.srqs.iter().enumerate() {
            let pd = find(&self.physical.pds, srq.pd);
            let place = pd.and_then(|pd| made.device.create_srq(pd, &srq.attr));
            let place = place.of(|| {
                let one = one_of("shared receive queue", srq.srq, index, record.srqs.len());
                let attr = &srq.attr;
                format!("{one} with max_wr {} and max_sge {}", attr.max_wr, attr.max_sge)
            })?;
            self.physical.srqs.insert(srq.srq, place.srq);
            made.claimed.srqs.push(ClaimedSrq {
                srq: srq.srq,
                physical_srq: place.srq,
                attr: place.attr,
                offset: place.offset,
            });
        }
        for (index, qp) in record.qps.iter().enumerate() {
            self.make_qp(qp).of(|| {
                let name = format_args!("{:#x}", qp.qpn);
                let one = one_of("queue pair", name, index, record.qps.len());
                let cap = &qp.cap;
                format!(
                    "{one}, {:?} with max_send_wr {}, max_recv_wr {}, max_send_sge {}, max_recv_sge {}, max_inline_data {}",
                    qp.qp_type,
                    cap.max_send_wr,
                    cap.max_recv_wr,
                    cap.max_send_sge,
                    cap.max_recv_sge,
                    cap.max_inline_data
                )
            })?;
        }
        Ok(())
    }

    fn make_qp(&mut self, qp: &QpRecord) -> Result<(), VerbsError> {
        let srq = qp.srq.map(|srq| find(&self.physical.srqs, srq));
        let place = self.made.device.create_qp(&PhysicalQpInit {
            pd: find(&self.physical.pds, qp.pd)?,
            send_cq: find(&self.physical.cqs, qp.send_cq)?,
            recv_cq: find(&self.physical.cqs, qp.recv_cq)?,
            srq: srq.transpose()?,
            qp_type: qp.qp_type,
            cap: qp.cap,
        })?;
        let state = qp.attr.state;
        let whole = way_to(qp.qp_type, state)
            .ok_or_else(|| VerbsError::Invalid("it is in SQE after a failed request".to_owned()))?;
        let (own, sgid_index) = self.own_gid(qp.attr.av.sgid_index)?;
        let mut attr = qp.attr;
        attr.av.sgid_index = sgid_index;
        let connected = qp.remote.is_some()
            && matches!(state, QpState::Rtr | QpState::Rts | QpState::Sqd)
            && qp.qp_type != QpType::Ud;
        // The rest of the way needs the other end.
        let alone = if connected { 1 } else { whole.len() };
        let made = &mut self.made;
        for (state, mask) in &whole[..alone] {
            let step = QpAttr {
                state: *state,
                ..attr
            };
            made.device.modify_qp(place.qpn, *mask, &step)?;
        }
        for gid in &qp.groups {
            made.device.attach_mcast(place.qpn, *gid)?;
        }
        let sq_psn = start_psn()?;
        if connected {
            let steps = whole[alone..].to_vec();
            made.rest.insert(qp.qpn, Rest { steps, attr, sq_psn });
        }
        made.claimed.qps.push(ClaimedQp {
            qpn: qp.qpn,
            physical_qpn: place.qpn,
            cap: place.cap,
            slot: place.slot,
            offset: place.offset,
            remote: None,
            sgid_index: None,
            key_table: None,
        });
        made.told.qps.push(MadeQp {
            qpn: qp.qpn,
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
        let there = &self.made.told.gids;
        let Some(known) = self.known.get(usize::from(index)) else {
            // What the program may not know, the RNIC refuses.
            return Ok(([0; 16], index));
        };
        let found = counterpart(self.known, *known, there);
        let found = found.ok_or_else(|| {
            VerbsError::Invalid(format!(
                "the RNIC has no GID of the kind of {}",
                std::net::Ipv6Addr::from(*known)
            ))
        })?;
        Ok((there[found], found as u8))
    }
}
