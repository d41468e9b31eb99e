//! Modifying, querying and destroying a queue pair.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use verbatim_channel::Endpoint;
use verbatim_device::control::{QpAttr, QpAttrMask, QpCap, QpState};

use super::Qp;
use super::standby::Standby;
use crate::backend::QpPlace;
use crate::error::VerbsError;
use crate::session::resolve;
use crate::tables::KeyTable;

/// What the control path knows of a queue pair.
#[derive(Debug)]
pub struct Control {
    /// As the program has set them.
    pub attr: QpAttr,
    /// The physical queue pair.
    pub place: QpPlace,
    /// The physical other end.
    pub remote: Option<Endpoint>,
    /// The one that may take its place.
    pub standby: Option<Standby>,
    /// When it was drained, it was in ERR: so must its successor be.
    pub was_failed: bool,
}

impl Control {
    pub fn new(place: QpPlace, attr: QpAttr) -> Self {
        Self {
            attr,
            place,
            remote: None,
            standby: None,
            was_failed: false,
        }
    }

    /// The physical number.
    pub fn physical_qpn(&self) -> u32 {
        self.place.qpn
    }
}

impl Qp {
    /// Changes attributes or state (`ibv_modify_qp`). Waits while a migration has the queue pair in its hands.
    pub fn modify(&self, mask: QpAttrMask, attr: &QpAttr) -> Result<(), VerbsError> {
        let process = self.context().process();
        let _pass = process.control.enter_qp(self.number());
        let device = self.context().device()?;
        self.check_alive()?;
        let connects = mask.contains(QpAttrMask::STATE | QpAttrMask::DEST_QPN | QpAttrMask::AV);
        let mut physical = *attr;
        let mut remote = None;
        let mut keys = Vec::new();
        if connects {
            let named = Endpoint {
                gid: attr.av.dgid,
                qpn: attr.dest_qpn,
            };
            let resolved = resolve(process, named)?;
            physical.av.dgid = resolved.endpoint.gid;
            physical.dest_qpn = resolved.endpoint.qpn;
            remote = Some(resolved.endpoint);
            keys = resolved.keys;
        }

        let mut control = self.control.lock();
        device.modify_qp(control.physical_qpn(), mask, &physical)?;
        if let Some(standby) = control.standby.take() {
            // Its state would no longer be that of the one that it stands for.
            standby.destroy(&*device);
        }
        control.attr.merge(attr, mask);
        if connects {
            control.remote = remote;
            let table = (!keys.is_empty()).then(|| Arc::new(key_table(&keys)));
            self.send.lock().set_remote_keys(table);
        }
        if mask.contains(QpAttrMask::STATE) {
            if attr.state == QpState::Reset {
                control.remote = None;
                control.attr = QpAttr::default();
                for cq in self.cqs() {
                    cq.queue.lock().purge(self.number());
                }
                self.side.failed.store(false, Relaxed);
            }
            self.send.lock().set_state(attr.state);
            self.recv.lock().set_state(attr.state);
        }
        drop(control);
        process.changed();
        Ok(())
    }

    /// The attributes as the program set them, in the state in which the RNIC has it, and the limits.
    pub fn query(&self) -> Result<(QpAttr, QpCap), VerbsError> {
        let _pass = self.context().process().control.enter_qp(self.number());
        self.check_alive()?;
        Ok((self.current_attr()?, *self.cap()))
    }

    /// As [`Self::query`], without waiting for a session.
    pub(crate) fn current_attr(&self) -> Result<QpAttr, VerbsError> {
        let device = self.context().device()?;
        let control = self.control.lock();
        let state = device.query_qp(control.physical_qpn())?.state;
        Ok(QpAttr {
            state,
            cur_state: state,
            ..control.attr
        })
    }

    /// Destroys it, and its completions with it.
    pub fn destroy(&self) -> Result<(), VerbsError> {
        let context = self.context();
        let process = context.process();
        let _pass = process.control.enter_qp(self.number());
        let device = context.device()?;
        self.check_alive()?;
        let mut control = self.control.lock();
        device.destroy_qp(control.physical_qpn())?;
        if let Some(standby) = control.standby.take() {
            standby.destroy(&*device);
        }
        self.detach();
        let mut objects = context.objects.lock();
        objects.qps.remove(&self.number());
        self.pd().users.fetch_sub(1, SeqCst);
        self.send_cq().users.fetch_sub(1, SeqCst);
        self.recv_cq().users.fetch_sub(1, SeqCst);
        drop(objects);
        for cq in self.cqs() {
            let mut queue = cq.queue.lock();
            queue.purge(self.number());
            queue.remove_owner(control.physical_qpn());
        }
        drop(control);
        process.registry.lock().qps.remove(&self.number());
        process.changed();
        Ok(())
    }

    /// Whether one stands ready that was made for `session`.
    pub(crate) fn has_standby(&self, session: u64) -> bool {
        let control = self.control.lock();
        control.standby.is_some_and(|standby| standby.session == session)
    }

    fn check_alive(&self) -> Result<(), VerbsError> {
        let alive = self.context().objects.lock().qps.contains_key(&self.number());
        if alive {
            return Ok(());
        }
        Err(VerbsError::Gone {
            object: format!("queue pair {}", self.number()),
        })
    }
}

/// The table of these translations.
pub(crate) fn key_table(keys: &[verbatim_channel::KeyPair]) -> KeyTable {
    let table = KeyTable::new();
    for pair in keys {
        table.set(pair.virtual_key, pair.physical_key);
    }
    table
}
