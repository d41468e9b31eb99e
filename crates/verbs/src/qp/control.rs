//! Modifying, querying and destroying a queue pair.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use verbatim_channel::Endpoint;
use verbatim_device::control::{QpAttr, QpAttrMask, QpCap, QpClass, QpSecret, QpState, QpType};

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
    /// The index of the own GID on the RNIC by which it is connected; of use while it is.
    pub sgid_index: u8,
    /// The one that may take its place.
    pub standby: Option<Standby>,
    /// When it was drained, it was in ERR: so must its successor be.
    pub was_failed: bool,
    /// How many sessions have stopped the physical queue pair.
    pub stops: u32,
    /// The other end may write to it, of a program that has not allowed that ([`Qp::allow_markers`]).
    pub markers_allowed: bool,
    /// An operator has paused it: ask [`Qp::is_paused`].
    pub paused: bool,
    /// It stands still for a dump ([`crate::dump`]).
    pub stands: bool,
    /// It was restored from a dump, and waits for what was in its queues.
    pub awaits_refill: bool,
    /// Multicast groups that it is in.
    pub mcast: Vec<[u8; 16]>,
}

impl Control {
    pub fn new(place: QpPlace, attr: QpAttr) -> Self {
        Self {
            attr,
            place,
            remote: None,
            sgid_index: 0,
            standby: None,
            was_failed: false,
            stops: 0,
            markers_allowed: false,
            paused: false,
            stands: false,
            awaits_refill: false,
            mcast: Vec::new(),
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
        if mask.contains(QpAttrMask::AV) {
            physical.av.sgid_index = self.context().physical_gid_index(attr.av.sgid_index)?;
        }
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
        if control.stands || control.awaits_refill {
            return Err(VerbsError::Refused {
                verb: "modify_qp",
                errno: libc::EBUSY,
                message: format!(
                    "queue pair {:#x} is of a context that was dumped: RESUME or REFILL first",
                    self.number()
                ),
            });
        }
        let ends = mask.contains(QpAttrMask::STATE) && matches!(attr.state, QpState::Reset | QpState::Err);
        if ends && std::mem::take(&mut control.paused) {
            // The connection's end is the pause's.
            device.resume_qps(&[control.physical_qpn()])?;
        }
        device.modify_qp(control.physical_qpn(), mask, &physical)?;
        if let Some(standby) = control.standby.take() {
            // Its state would no longer be that of the one that it stands for.
            standby.destroy(&*device);
        }
        control.attr.merge(attr, mask);
        if mask.contains(QpAttrMask::ACCESS_FLAGS) || ends {
            control.markers_allowed = false;
        }
        if connects {
            control.remote = remote;
            control.sgid_index = physical.av.sgid_index;
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

    /// The secret that its RNIC shares with the partner's, for pause and resume; of a reliable connection.
    pub fn set_secret(&self, secret: Option<QpSecret>) -> Result<(), VerbsError> {
        let _pass = self.context().process().control.enter_qp(self.number());
        self.check_alive()?;
        let control = self.control.lock();
        self.context()
            .device()?
            .set_qp_secret(control.physical_qpn(), secret)
    }

    /// Who goes first when several queue pairs have something to send: one in the background, a reliable connection, yields to
    /// all others ([`QpClass`]). [`VerbsError::Unsupported`] where the RNIC has no classes (hardware, an older software RNIC): there
    /// the caller sends at a pace of its own. It is for queue pairs that do not move: no road map and no dump has the class, and
    /// one that takes this one's place at another RNIC is a user's.
    pub fn set_class(&self, class: QpClass) -> Result<(), VerbsError> {
        let _pass = self.context().process().control.enter_qp(self.number());
        self.check_alive()?;
        let control = self.control.lock();
        self.context()
            .device()?
            .set_qp_class(control.physical_qpn(), class)
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

    /// Lets a UD queue pair receive what is sent to a multicast group (ibv_attach_mcast(3)).
    pub fn attach_mcast(&self, gid: [u8; 16]) -> Result<(), VerbsError> {
        let process = self.context().process();
        let _pass = process.control.enter_qp(self.number());
        self.check_alive()?;
        if self.qp_type() != QpType::Ud || !is_group(gid) {
            return Err(VerbsError::Invalid(format!(
                "a {:?} queue pair and the group {}: only UD ones and multicast addresses go together",
                self.qp_type(),
                std::net::Ipv6Addr::from(gid)
            )));
        }
        let mut control = self.control.lock();
        if !control.mcast.contains(&gid) {
            self.context()
                .device()?
                .attach_mcast(control.physical_qpn(), gid)?;
            control.mcast.push(gid);
            process.changed();
        }
        Ok(())
    }

    /// Undoes it (ibv_detach_mcast(3)).
    pub fn detach_mcast(&self, gid: [u8; 16]) -> Result<(), VerbsError> {
        let _pass = self.context().process().control.enter_qp(self.number());
        self.check_alive()?;
        let mut control = self.control.lock();
        let joined = control.mcast.iter().position(|group| *group == gid);
        let joined = joined.ok_or_else(|| {
            VerbsError::Invalid(format!(
                "queue pair {} is not in the group {}",
                self.number(),
                std::net::Ipv6Addr::from(gid)
            ))
        })?;
        let qpn = control.physical_qpn();
        self.context()
            .destroy_physically(|device| device.detach_mcast(qpn, gid))?;
        control.mcast.swap_remove(joined);
        self.context().process().changed();
        Ok(())
    }

    /// Destroys it, and its completions with it; `EBUSY` while it is in a multicast group. Waits until its events are
    /// acknowledged.
    pub fn destroy(&self) -> Result<(), VerbsError> {
        let context = self.context();
        let process = context.process();
        let pass = process.control.enter_qp(self.number());
        self.check_alive()?;
        let mut control = self.control.lock();
        if !control.mcast.is_empty() {
            return Err(VerbsError::Busy {
                object: format!("queue pair {}", self.number()),
                users: control.mcast.len(),
            });
        }
        let qpn = control.physical_qpn();
        let numbers = context.numbers.lock();
        // Before it is destroyed: the ends of its queues use it until they are gone.
        self.detach();
        context
            .destroy_physically(|device| device.destroy_qp(qpn))
            .inspect_err(|_| self.attach_again(&control.place))?;
        let standby = control.standby.take();
        if let Ok(device) = context.device() {
            standby.inspect(|standby| standby.destroy(&*device));
            context.retired.destroy_of(self.number(), &*device);
        }
        let mut objects = context.objects.lock();
        objects.qps.remove(&self.number());
        self.pd().users.fetch_sub(1, SeqCst);
        self.send_cq().users.fetch_sub(1, SeqCst);
        self.recv_cq().users.fetch_sub(1, SeqCst);
        if let Some(srq) = self.srq() {
            srq.users.fetch_sub(1, SeqCst);
        }
        drop(objects);
        for cq in self.cqs() {
            let mut queue = cq.queue.lock();
            queue.purge(self.number());
            queue.remove_owner(qpn);
        }
        drop(numbers);
        drop(control);
        if context.is_movable() {
            process.registry.lock().qps.remove(&self.number());
        }
        process.changed();
        drop(pass);
        self.async_events.close();
        Ok(())
    }

    /// Whether one stands ready that was made for `session`.
    pub(crate) fn has_standby(&self, session: u64) -> bool {
        let control = self.control.lock();
        control.standby.is_some_and(|standby| standby.session == session)
    }

    /// An error once it is destroyed. For sure only while [`Self::control`] is locked.
    pub(crate) fn check_alive(&self) -> Result<(), VerbsError> {
        let alive = self.context().objects.lock().qps.contains_key(&self.number());
        if alive {
            return Ok(());
        }
        Err(VerbsError::Gone {
            object: format!("queue pair {}", self.number()),
        })
    }
}

/// Whether it is the GID of a multicast group: of IPv6, or mapped of IPv4 (annex A17).
fn is_group(gid: [u8; 16]) -> bool {
    let address = std::net::Ipv6Addr::from(gid);
    address.is_multicast() || address.to_ipv4_mapped().is_some_and(|ipv4| ipv4.is_multicast())
}

/// The table of these translations.
pub(crate) fn key_table(keys: &[verbatim_channel::KeyPair]) -> KeyTable {
    let table = KeyTable::new();
    for pair in keys {
        match pair.any_tag {
            true => table.set_any_tag(pair.virtual_key, pair.physical_key),
            false => table.set(pair.virtual_key, pair.physical_key),
        }
    }
    table
}
