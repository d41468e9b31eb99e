//! The instance's side of a migration: letting go of the RNIC before the freeze, and taking one up after it.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use verbatim_channel::{Answer, CM_CONTEXT, ClaimedContext, ClaimedMw, Endpoint, KeyPair, MovedEndpoint};
use verbatim_device::control::{QpAttr, QpAttrMask, QpState, QpType};
use verbatim_seqpacket::MAX_FDS;

use super::dumped::{keep_taken, take_dumped};
use super::stopped::take_stopped;
use super::{LetGo, Phase, SessionError, Sessions};
use crate::backend::{CompletionRing, CqPlace, Device, Parked, QpEnds, QpPlace, RecvRing, SrqPlace};
use crate::context::Context;
use crate::cq::Cq;
use crate::error::VerbsError;
use crate::qp::{Copied, Qp, key_table};
use crate::reach::Patience;
use crate::road_map;
use crate::srq::Srq;
use crate::tables::{KeyTable, key_slot};

/// Says which requests of a queue pair are to be posted again.
type Again<'a> = &'a mut dyn FnMut(&Arc<Qp>) -> Vec<Copied>;

/// The new ends of a context's queues, all of them made before any is put in.
struct NewEnds {
    cqs: Vec<(Arc<Cq>, CqPlace, Box<dyn CompletionRing>)>,
    srqs: Vec<(Arc<Srq>, SrqPlace, Box<dyn RecvRing>)>,
    qps: Vec<(Arc<Qp>, QpPlace, QpEnds)>,
}

impl Sessions {
    /// Takes the last completions and lets go of everything that is not the process's own. One connection per context.
    pub fn quiesce(&mut self, session: u64) -> Result<Vec<OwnedFd>, SessionError> {
        let (process, contract) = (self.process.clone(), self.contract);
        let record = self.find_in(session, Phase::Drained, "Quiesce")?;
        if !record.all {
            return Err(SessionError::Claim(
                "only a process that is suspended as a whole can be quiesced".to_owned(),
            ));
        }
        // Made since the road map was told.
        if let Some(blocker) = road_map::blockers(&process, contract).into_iter().next() {
            return Err(SessionError::Blocked(blocker));
        }
        let contexts = process.contexts();
        let of_cm = usize::from(process.cm.lock().is_open());
        if contexts.len() + of_cm > MAX_FDS {
            return Err(SessionError::Claim(format!(
                "{} opened devices; at most {MAX_FDS} can be moved",
                contexts.len()
            )));
        }
        for qp in &record.qps {
            if let Some(standby) = &qp.control.lock().standby {
                return Err(SessionError::StandbyTaken {
                    qpn: qp.number(),
                    other: standby.session,
                });
            }
        }
        let mut connections = Vec::with_capacity(contexts.len());
        let mut all_let_go = Vec::with_capacity(contexts.len());
        let mut failure = None;
        for context in &contexts {
            let stays = context.device().is_ok_and(|device| device.made_again().is_some());
            match let_go(context) {
                Ok(parked) if stays => all_let_go.push(LetGo::Kept(Some(parked))),
                Ok(parked) => {
                    connections.push(parked.connection);
                    all_let_go.push(LetGo::Given(parked.reopen));
                }
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        record.let_go = all_let_go;
        if failure.is_none() {
            match process.cm.lock().park() {
                Ok(None) => {}
                Ok(Some((parked, outcome))) => {
                    connections.push(parked.connection);
                    record.reopen_cm = Some(parked.reopen);
                    failure = outcome.err();
                }
                Err(error) => failure = Some(error),
            }
        }
        record.phase = Phase::Quiesced;
        if let Some(error) = failure {
            // A thread still uses the device: cannot be, since control verbs are shut out. The contexts that were let
            // go are taken up again; the one that could not be is lost with its RNIC connection.
            let _ = self.claim(session, &[], &[], connections);
            return Err(error.into());
        }
        if let Some(adopter) = process.adopter_in_use() {
            adopter.close_files();
        }
        Ok(connections)
    }

    pub(super) fn claim(
        &mut self,
        session: u64,
        claimed: &[ClaimedContext],
        key_tables: &[Vec<KeyPair>],
        fds: Vec<OwnedFd>,
    ) -> Result<Answer, SessionError> {
        let process = self.process.clone();
        let record = self.find_in(session, Phase::Quiesced, "Claim")?;
        let contexts = process.contexts();
        let given = record
            .let_go
            .iter()
            .filter(|let_go| matches!(let_go, LetGo::Given(_)))
            .count();
        let reopen_cm = record.reopen_cm.take();
        let expected = given + usize::from(reopen_cm.is_some());
        if fds.len() != expected {
            record.reopen_cm = reopen_cm;
            return Err(SessionError::Claim(format!(
                "{} connections for {expected} contexts",
                fds.len(),
            )));
        }
        let has_moved = !claimed.is_empty() || record.made.is_some();
        let mut fds = fds;
        let of_cm = reopen_cm.and_then(|reopen| Some((reopen, fds.pop()?)));
        let mut fds = fds.into_iter();
        let built: Vec<_> = key_tables.iter().map(|keys| Arc::new(key_table(keys))).collect();
        let mut ready = Vec::with_capacity(contexts.len());
        for (context, let_go) in contexts.iter().zip(&mut record.let_go) {
            let (device, replacement) = match let_go {
                LetGo::Given(reopen) => {
                    let replacement = claimed.iter().find(|claimed| claimed.id == context.id());
                    if replacement.is_none() && has_moved {
                        return Err(SessionError::Claim(format!(
                            "nothing for context {}",
                            context.id()
                        )));
                    }
                    let fd = fds.next().expect("they were counted");
                    (reopen(fd), replacement.cloned())
                }
                LetGo::Kept(_) if has_moved => {
                    let made = record.made.as_mut().and_then(|made| made.take(context.id()));
                    let Some(made) = made else {
                        // It could not be made here.
                        context.die();
                        continue;
                    };
                    (Ok(made.device), Some(made.claimed))
                }
                LetGo::Kept(kept) => {
                    let Some(kept) = kept.take() else { continue };
                    ((kept.reopen)(kept.connection), None)
                }
            };
            let taken = || {
                let device = device?;
                let ends = new_ends(context, &*device, replacement.as_ref())?;
                Ok((device, ends))
            };
            match taken() {
                Ok((device, ends)) => ready.push((context, device, ends, replacement)),
                // Its RNIC has died since. The program sees what it sees whenever that happens, and the rest goes on.
                Err(SessionError::Verbs(error)) if error.is_loss_of_device() => context.die(),
                Err(error) => return Err(error),
            }
        }
        for (context, device, ends, replacement) in ready {
            let lost_recvs = device.lost_recvs();
            context.set_device(device);
            if let Some(replacement) = &replacement {
                unless_lost(renumber(context, replacement, &built))?;
                unless_lost(find_ways(context, replacement))?;
                // Before anything is posted.
                unless_lost(open_windows(context, replacement))?;
            }
            let (stopped, dumped) = (&mut record.stopped, &mut record.dumped);
            let mut again = |qp: &Arc<Qp>| {
                let (mut again, _) = take_stopped(stopped, qp);
                again.append(&mut take_dumped(dumped, qp));
                again
            };
            let moved = replacement.is_some().then_some(&mut again as Again<'_>);
            record.replayed_sends += put_in(ends, moved, &lost_recvs);
            keep_taken(&record.dumped);
        }
        if !has_moved {
            super::drain::disallow_markers(&record.qps);
        }
        if has_moved {
            for qp in &record.qps {
                unless_lost(fail_if_failed(qp))?;
            }
        }
        let mut replayed_receives = record.qps.iter().map(|qp| qp.recv.lock().release()).sum();
        for srq in contexts.iter().flat_map(|context| context.srqs()) {
            replayed_receives += srq.queue.lock().release();
            if has_moved {
                // After its RECVs, of which there may have been fewer than the limit for a moment.
                let arm = || -> Result<(), SessionError> {
                    let device = srq.context().device()?;
                    Ok(device.modify_srq(srq.physical(), *srq.limit.lock())?)
                };
                unless_lost(arm())?;
            }
        }
        record.phase = Phase::Replaced;
        record.let_go.clear();
        record.made = None;
        if has_moved {
            process.has_moved();
        }
        if let Some((reopen, fd)) = of_cm {
            let device = process.cm.lock().claim(&reopen, fd, has_moved);
            if let Some(device) = device {
                process.watch_device(CM_CONTEXT, &*device);
            }
        }
        self.process.changed();
        Ok(Answer::Claimed { replayed_receives })
    }
}

/// An RNIC that dies while it is taken up is found out as at any time, by its connection, and the program is told then.
fn unless_lost(outcome: Result<(), SessionError>) -> Result<(), SessionError> {
    match outcome {
        Err(SessionError::Verbs(error)) if error.is_loss_of_device() => Ok(()),
        outcome => outcome,
    }
}

/// Lets go of a context's RNIC. What that has said until then is taken.
fn let_go(context: &Context) -> Result<Parked, VerbsError> {
    let device = context.device()?;
    device.deafen()?;
    context.take_events(&*device);
    for srq in context.srqs() {
        *srq.limit.lock() = srq.armed_limit()?;
    }
    for mw in context.mws() {
        mw.park(&*device)?;
    }
    drop(device);
    detach(context);
    let device = context.take_device().ok_or_else(|| VerbsError::Gone {
        object: format!("context {}", context.id()),
    })?;
    device.park()
}

/// Drops every ring end of a context.
fn detach(context: &Context) {
    let objects = context.objects.lock();
    for cq in objects.cqs.values() {
        cq.lose_ring();
    }
    for qp in objects.qps.values() {
        qp.detach();
    }
    for srq in objects.srqs.values() {
        srq.queue.lock().detach();
    }
}

/// The ends of all of a context's queues, at their old places or at their new ones.
fn new_ends(
    context: &Context,
    device: &dyn Device,
    replacement: Option<&ClaimedContext>,
) -> Result<NewEnds, SessionError> {
    let objects = context.objects.lock();
    let cqs: Vec<_> = objects.cqs.values().cloned().collect();
    let qps: Vec<_> = objects.qps.values().cloned().collect();
    drop(objects);
    let missing = |what: &str, number| SessionError::Claim(format!("nothing for {what} {number}"));
    let mut ends = NewEnds {
        cqs: Vec::with_capacity(cqs.len()),
        srqs: Vec::new(),
        qps: Vec::with_capacity(qps.len()),
    };
    for cq in cqs {
        let place = match replacement {
            None => *cq.place.lock(),
            Some(new) => {
                let found = new.cqs.iter().find(|claimed| claimed.cq == cq.number());
                let found = found.ok_or_else(|| missing("completion queue", cq.number()))?;
                CqPlace {
                    cq: found.physical_cq,
                    entries: found.entries,
                    offset: found.offset,
                }
            }
        };
        let end = device.cq_end(&place)?;
        ends.cqs.push((cq, place, end));
    }
    for srq in context.srqs() {
        let place = match replacement {
            None => *srq.place.lock(),
            Some(new) => {
                let found = new.srqs.iter().find(|claimed| claimed.srq == srq.number());
                let found = found.ok_or_else(|| missing("shared receive queue", srq.number()))?;
                SrqPlace {
                    srq: found.physical_srq,
                    attr: found.attr,
                    offset: found.offset,
                }
            }
        };
        let end = device.srq_end(&place)?;
        ends.srqs.push((srq, place, end));
    }
    let by_number: HashMap<u32, _> = replacement
        .iter()
        .flat_map(|new| new.qps.iter().map(|claimed| (claimed.qpn, claimed)))
        .collect();
    for qp in qps {
        let place = match replacement {
            None => qp.control.lock().place,
            Some(_) => {
                let found = by_number.get(&qp.number());
                let found = found.ok_or_else(|| missing("queue pair", qp.number()))?;
                QpPlace {
                    qpn: found.physical_qpn,
                    cap: found.cap,
                    slot: found.slot,
                    offset: found.offset,
                }
            }
        };
        let qp_ends = device.qp_ends(&place)?;
        ends.qps.push((qp, place, qp_ends));
    }
    Ok(ends)
}

/// Notes the physical numbers and keys of a context that has moved.
fn renumber(
    context: &Context,
    replacement: &ClaimedContext,
    key_tables: &[Arc<KeyTable>],
) -> Result<(), SessionError> {
    let missing = |what: &str, number: u32| SessionError::Claim(format!("nothing for {what} {number:#x}"));
    let mut objects = context.objects.lock();
    objects.moved = true;
    for channel in objects.channels.values() {
        let found = replacement
            .channels
            .iter()
            .find(|claimed| claimed.channel == channel.number());
        let found = found.ok_or_else(|| missing("completion channel", channel.number()))?;
        channel.attach(&*context.device()?, found.physical_channel)?;
    }
    for pd in objects.pds.values() {
        let found = replacement.pds.iter().find(|claimed| claimed.pd == pd.number());
        let found = found.ok_or_else(|| missing("protection domain", pd.number()))?;
        pd.physical.store(found.physical_pd, SeqCst);
    }
    let mrs: HashMap<u32, _> = replacement
        .mrs
        .iter()
        .map(|claimed| (claimed.lkey, claimed))
        .collect();
    for mr in objects.mrs.values() {
        let found = mrs
            .get(&mr.lkey())
            .ok_or_else(|| missing("memory region", mr.lkey()))?;
        mr.physical_lkey.store(found.physical_lkey, SeqCst);
        mr.physical_rkey.store(found.physical_rkey, SeqCst);
        context.lkeys.set(mr.lkey(), found.physical_lkey);
    }
    let qps: Vec<_> = objects.qps.values().cloned().collect();
    for srq in objects.srqs.values() {
        srq.queue.lock().set_local_keys(context.lkeys.clone());
    }
    drop(objects);
    let claims: HashMap<u32, _> = replacement
        .qps
        .iter()
        .map(|claimed| (claimed.qpn, claimed))
        .collect();
    for qp in qps {
        let claimed = claims
            .get(&qp.number())
            .ok_or_else(|| missing("queue pair", qp.number()))?;
        let mut send = qp.send.lock();
        send.set_local_keys(context.lkeys.clone());
        if let Some(index) = claimed.key_table {
            let table = key_tables.get(index as usize);
            let table = table.ok_or_else(|| missing("key table", index))?;
            send.set_remote_keys(Some(table.clone()));
        }
        drop(send);
        qp.recv.lock().set_local_keys(context.lkeys.clone());
        let mut control = qp.control.lock();
        control.markers_allowed = false;
        control.remote = claimed.remote;
        control.sgid_index = claimed.sgid_index.unwrap_or_default();
    }
    Ok(())
}

/// Learns a moved context's new GIDs, and makes its address handles anew. Its own datagram queue pairs are elsewhere for itself, too.
fn find_ways(context: &Context, replacement: &ClaimedContext) -> Result<(), SessionError> {
    let device = context.device()?;
    let moves = context.moves.fetch_add(1, SeqCst) + 1;
    let (_, port) = device.attributes();
    let own = context.find_own_ways(&port.gid_table());
    let objects = context.objects.lock();
    let ahs: Vec<_> = objects.ahs.values().cloned().collect();
    let datagram = |qpn| {
        let found = objects.qps.get(qpn);
        found.is_some_and(|qp| qp.qp_type() == QpType::Ud)
    };
    let qps = replacement.qps.iter().filter(|claimed| datagram(&claimed.qpn));
    let moved: Vec<_> = qps
        .flat_map(|claimed| {
            own.iter().map(|(now, known)| MovedEndpoint {
                known: Endpoint {
                    gid: *known,
                    qpn: claimed.qpn,
                },
                now: Endpoint {
                    gid: *now,
                    qpn: claimed.physical_qpn,
                },
                moves,
            })
        })
        .collect();
    drop(objects);
    context.datagrams.learn(&moved);
    let mut patience = Patience::default();
    for ah in ahs {
        ah.make_again(&*device, &mut patience)?;
    }
    Ok(())
}

/// Binds a moved context's windows as they were.
fn open_windows(context: &Context, replacement: &ClaimedContext) -> Result<(), SessionError> {
    let device = context.device()?;
    let qps = replacement.qps.iter();
    let qps = qps.map(|claimed| (claimed.qpn, claimed.physical_qpn)).collect();
    for mw in context.mws() {
        let same = |claimed: &&ClaimedMw| key_slot(claimed.rkey) == key_slot(mw.rkey());
        let found = replacement.mws.iter().find(same);
        let found = found
            .ok_or_else(|| SessionError::Claim(format!("nothing for memory window {:#x}", mw.rkey())))?;
        mw.restore(&*device, found.physical_rkey, &qps)?;
    }
    Ok(())
}

/// Puts the new ends in. Of a context that has moved, with the requests of each queue pair that are to be posted again: how
/// many those are.
fn put_in(ends: NewEnds, mut again: Option<Again<'_>>, lost_recvs: &[u32]) -> u64 {
    let moved = again.is_some();
    let mut replayed = 0;
    for (cq, place, ring) in ends.cqs {
        *cq.place.lock() = place;
        if moved {
            cq.queue.lock().clear_owners();
        }
        cq.take_ring(ring);
    }
    for (qp, place, QpEnds { send, recv }) in ends.qps {
        let has_lost_recvs = lost_recvs.contains(&place.qpn);
        let mut control = qp.control.lock();
        control.place = place;
        if let Some(again) = &mut again {
            control.stops = 0;
            drop(control);
            qp.own(place.qpn);
            let again = again(&qp);
            replayed += again.len() as u64;
            qp.send.lock().attach_new(send, again);
        } else {
            drop(control);
            qp.send.lock().attach_again(send);
        }
        if qp.srq().is_some() {
            continue;
        }
        let mut queue = qp.recv.lock();
        if moved || has_lost_recvs {
            queue.attach_new(recv);
        } else {
            queue.attach_again(recv);
        }
    }
    for (srq, place, ring) in ends.srqs {
        *srq.place.lock() = place;
        let mut queue = srq.queue.lock();
        if moved {
            queue.attach_new(ring);
        } else {
            queue.attach_again(ring);
        }
    }
    replayed
}

/// A queue pair that was in ERR is so on its new RNIC, too, whatever the road map said when that was prepared.
fn fail_if_failed(qp: &Qp) -> Result<(), SessionError> {
    let control = qp.control.lock();
    if control.was_failed {
        let attr = QpAttr {
            state: QpState::Err,
            ..QpAttr::default()
        };
        let device = qp.context().device()?;
        device.modify_qp(control.physical_qpn(), QpAttrMask::STATE, &attr)?;
    }
    Ok(())
}
