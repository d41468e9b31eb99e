//! The partner's side of a migration: standby queue pairs, and the switch to them.

use std::collections::HashMap;
use std::sync::Arc;

use verbatim_channel::{Answer, KeyPair, StandbyPeer};

use super::stopped::take_stopped;
use super::{Phase, Session, SessionError, Sessions, destroy_standbys};
use crate::backend::Device;
use crate::qp::{Qp, Standby, key_table};
use crate::reach::Patience;

/// Whether the queue pair, of that number at its device, can be replaced by a standby.
pub(super) fn can_be_replaced(qp: &Qp, device: &dyn Device, physical: u32) -> Result<(), SessionError> {
    match device.keeps_queue_pair(physical) {
        None => Ok(()),
        Some(why) => Err(SessionError::Blocked(format!(
            "queue pair {:#x} cannot be replaced: {why}",
            qp.number()
        ))),
    }
}

impl Sessions {
    pub(super) fn prepare(&mut self, session: u64, qpns: &[u32]) -> Result<Answer, SessionError> {
        if self.open.contains_key(&session) {
            self.find_in(session, Phase::Prepared, "PrepareStandby")?;
        }
        let mut prepared = Vec::with_capacity(qpns.len());
        let mut standbys = Vec::with_capacity(qpns.len());
        for qpn in qpns {
            match self.prepare_one(session, *qpn) {
                Ok((qp, standby)) => {
                    standbys.push(standby.describe(&qp));
                    prepared.push(qp);
                }
                Err(error) => {
                    destroy_standbys(session, &prepared);
                    return Err(error);
                }
            }
        }
        let record = self.open.entry(session).or_insert_with(Session::new);
        record.prepared.extend(prepared);
        Ok(Answer::StandbyPrepared(standbys))
    }

    fn prepare_one(&self, session: u64, qpn: u32) -> Result<(Arc<Qp>, Standby), SessionError> {
        let qp = self.process.qp(qpn).ok_or(SessionError::NoQp { qpn })?;
        let device = qp.context().device()?;
        if let Some(blocker) = device.blocker() {
            // What cannot be told of it here could not be carried over to the standby either.
            return Err(SessionError::Blocked(blocker));
        }
        let physical = qp.control.lock().physical_qpn();
        can_be_replaced(&qp, &*device, physical)?;
        // Locked until the standby is noted, so that the program cannot change the queue pair in between.
        let mut control = qp.control.lock();
        // Nobody would destroy a standby of one that is gone.
        qp.check_alive()?;
        if let Some(other) = &control.standby {
            return Err(SessionError::StandbyTaken {
                qpn,
                other: other.session,
            });
        }
        let standby = Standby::create(&qp, &*device, session)?;
        control.standby = Some(standby);
        drop(control);
        Ok((qp, standby))
    }

    pub(super) fn connect(&mut self, session: u64, peers: &[StandbyPeer]) -> Result<Answer, SessionError> {
        match self.find(session)?.phase {
            // The other end's new queue pairs may be there only after the decision.
            Phase::Prepared | Phase::Drained => {}
            Phase::Replaced => return Ok(Answer::Done),
            phase => {
                let order = "ConnectStandby";
                return Err(SessionError::Phase {
                    session,
                    phase,
                    order,
                });
            }
        }
        let mut patience = Patience::default();
        for peer in peers {
            // What the program has destroyed or changed meanwhile has no standby any more, and needs none.
            let Some(qp) = self.process.qp(peer.qpn) else {
                continue;
            };
            let device = qp.context().device()?;
            let mut control = qp.control.lock();
            let (attr, sgid_index) = (control.attr, control.sgid_index);
            if let Some(standby) = control
                .standby
                .as_mut()
                .filter(|standby| standby.session == session)
                // Whoever drives the session now may not know that it is done.
                .filter(|standby| standby.remote != Some(peer.remote))
            {
                standby.connect(&*device, qp.qp_type(), &attr, sgid_index, peer, &mut patience)?;
            }
        }
        Ok(Answer::Done)
    }

    pub(super) fn switch(
        &mut self,
        session: u64,
        key_tables: &[Vec<KeyPair>],
        tables: &[(u32, u32)],
    ) -> Result<Answer, SessionError> {
        if self.find(session)?.phase == Phase::Replaced {
            // It was switched, and an agent that has died meanwhile could not say so.
            return Ok(Answer::Claimed { replayed_receives: 0 });
        }
        let contexts = self.process.contexts();
        let record = self.find_in(session, Phase::Drained, "Switch")?;
        let built: Vec<_> = key_tables.iter().map(|keys| Arc::new(key_table(keys))).collect();
        if let Some((qpn, table)) = tables.iter().find(|(_, table)| *table as usize >= built.len()) {
            return Err(SessionError::Claim(format!(
                "queue pair {qpn} is to use key table {table} of {}",
                built.len()
            )));
        }
        // All ends first, since this can fail and what follows cannot.
        let mut ready = Vec::new();
        for qp in &record.qps {
            let mut control = qp.control.lock();
            let ours = |standby: &Standby| standby.session == session;
            let Some(standby) = control.standby.filter(ours) else {
                continue;
            };
            if qp.context().is_dead() {
                // The RNIC has died, and with it both; the program knows.
                control.standby = None;
                continue;
            }
            let device = qp.context().device()?;
            if control.was_failed || standby.remote.is_none() {
                // The program shall go on seeing the error, which the old one has.
                control.standby = None;
                standby.destroy(&*device);
                continue;
            }
            ready.push((qp.clone(), standby, device.qp_ends(&standby.place)?));
        }
        for (qp, standby, ends) in ready {
            let mut control = qp.control.lock();
            control.standby = None;
            control.markers_allowed = false;
            control.remote = standby.remote;
            control.stops = 0;
            let old = std::mem::replace(&mut control.place, standby.place);
            drop(control);
            qp.disown(old.qpn);
            qp.own(standby.place.qpn);
            let (again, receive) = take_stopped(&mut record.stopped, &qp);
            record.replayed_sends += again.len() as u64;
            qp.send.lock().attach_new(ends.send, again);
            match (qp.srq(), receive) {
                (None, _) => qp.recv.lock().attach_new(ends.recv),
                // Taken for a message that will come whole.
                (Some(srq), Some(slot)) => srq.queue.lock().post_again(slot),
                (Some(_), None) => {}
            }
            record.replaced.push((qp, old));
        }
        for context in contexts {
            let of_it = record
                .replaced
                .iter()
                .filter(|(qp, _)| Arc::ptr_eq(qp.context(), &context));
            let numbers = of_it.map(|(qp, old)| (old.qpn, qp.control.lock().physical_qpn()));
            // Cannot fail but for an RNIC that is gone, which is found out and told elsewhere.
            let _ = context.rebind_windows(&numbers.collect());
        }
        let by_number: HashMap<u32, &Arc<Qp>> = record.qps.iter().map(|qp| (qp.number(), qp)).collect();
        for (qpn, table) in tables {
            if let Some(qp) = by_number.get(qpn) {
                let table = built[*table as usize].clone();
                qp.send.lock().set_remote_keys(Some(table));
            }
        }
        let replayed_receives = record.qps.iter().map(|qp| qp.recv.lock().release()).sum();
        record.phase = Phase::Replaced;
        self.process.changed();
        Ok(Answer::Claimed { replayed_receives })
    }
}
