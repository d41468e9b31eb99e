//! A world of RNICs. They move nothing but completions: immediate data name a message.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::net::SendFlags;
use verbatim_device::control::{
    Access, AddressVector, AsyncEvent, AsyncEventType, CompletionEvent, DeviceAttr, Gid, MwBound, MwState,
    MwType, PortAttr, QpAttr, QpAttrMask, QpState, QpType, SrqAttr,
};
use verbatim_device::layout::{Cqe, SEND_SIGNALED, SEND_SOLICITED, SendWqe, Sge};
use verbatim_device::ring::{Armed, Body};

use crate::backend::soft::events::{Events, SoftChannel};
use crate::backend::{
    CompletionRing, CqPlace, Device, EventChannel, MadeAgainBy, Parked, PhysicalMrInit, PhysicalQpInit,
    QpEnds, QpPlace, RecvRing, Refused, SendRing, SrqPlace, Watched,
};
use crate::error::VerbsError;
use crate::work::{SendOpcode, WC_WITH_INV, WC_WR_FLUSH_ERR};

/// (device, number).
type Name = (u8, u32);

#[derive(Debug)]
struct FakeQp {
    attr: QpAttr,
    qp_type: QpType,
    send_cq: Name,
    recv_cq: Name,
    srq: Option<Name>,
    capacity: u32,
    /// Pushed and not published.
    pushed: Vec<SendWqe>,
    sends: VecDeque<SendWqe>,
    recvs: VecDeque<u64>,
    pushed_recvs: Vec<u64>,
    recv_capacity: u32,
}

#[derive(Debug, Default)]
struct FakeSrq {
    recvs: VecDeque<u64>,
    attr: SrqAttr,
}

#[derive(Debug, Default)]
struct State {
    qps: BTreeMap<Name, FakeQp>,
    cqs: HashMap<Name, VecDeque<Cqe>>,
    keys: HashSet<Name>,
    next: HashMap<u8, u32>,
    srqs: HashMap<Name, FakeSrq>,
    /// Memory windows, by the index of their key.
    mws: HashMap<Name, (MwType, MwState)>,
    /// Where address handles lead.
    ahs: HashMap<Name, AddressVector>,
    /// Armed completion queues, and whether for any completion.
    armed: HashMap<Name, bool>,
    /// What is told of events.
    channels: HashMap<Name, OwnedFd>,
    /// Which channel a completion queue's events go to, and what they say.
    channel_of: HashMap<Name, (Name, u32)>,
    /// What the RNICs hold of each opened device: while it is there, so are they.
    lines: Vec<(u8, OwnedFd)>,
    /// Requests that are refused room although there is: slots that the RNIC frees late.
    late_room: u32,
    /// Devices whose contexts cannot be moved.
    immovable: HashSet<u8>,
    /// Devices whose processes make them again where they move to, and where that is.
    made_again: HashMap<u8, Option<u8>>,
    /// Done once the next queue pair is gone at its device, before its destroyer hears of it.
    on_destroy: Option<Hook>,
}

/// Something to be done in the middle of something else.
struct Hook(Box<dyn FnOnce() + Send>);

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hook")
    }
}

/// All RNICs.
#[derive(Debug, Clone, Default)]
pub struct World(Arc<Mutex<State>>);

#[derive(Debug)]
struct FakeDevice {
    id: u8,
    world: World,
    attr: DeviceAttr,
    port: PortAttr,
    events: Events,
}

impl State {
    fn number(&mut self, device: u8) -> u32 {
        let next = self.next.entry(device).or_insert(15);
        *next += 1;
        *next
    }

    /// Finishes the oldest request of a queue pair, if it can be.
    fn step(&mut self, name: Name) -> bool {
        let Some(qp) = self.qps.get(&name) else {
            return false;
        };
        let Some(wqe) = qp.sends.front().copied() else {
            return false;
        };
        let (send_cq, failed) = (qp.send_cq, qp.attr.state == QpState::Err);
        let two_sided = SendOpcode::from_raw(wqe.opcode.into()).is_some_and(SendOpcode::is_two_sided);
        let datagram = qp.qp_type == QpType::Ud;
        let peer = match datagram {
            true => (self.ahs[&(name.0, wqe.ah)].dgid[15], wqe.remote_qpn),
            false => (qp.attr.av.dgid[15], qp.attr.dest_qpn),
        };
        // A datagram that nobody takes is lost.
        let takes = |peer: &FakeQp| peer.srq.is_none() && !peer.recvs.is_empty();
        let lost = datagram && !self.qps.get(&peer).is_some_and(takes);
        if !failed && two_sided && !lost {
            let Some(peer_qp) = self.qps.get_mut(&peer) else {
                return false;
            };
            let connected_back = (peer_qp.attr.av.dgid[15], peer_qp.attr.dest_qpn) == name;
            if !(connected_back || datagram) || peer_qp.attr.state == QpState::Err {
                return false;
            }
            let recv_cq = peer_qp.recv_cq;
            let srq = peer_qp.srq;
            let taken = match srq {
                None => peer_qp.recvs.pop_front(),
                Some(srq) => self.pop_shared(srq),
            };
            let Some(wr_id) = taken else {
                return false;
            };
            self.complete(
                recv_cq,
                Cqe {
                    wr_id,
                    opcode: 128,
                    imm: wqe.imm,
                    qpn: peer.1,
                    src_qpn: name.1,
                    solicited: u32::from(wqe.flags & SEND_SOLICITED != 0),
                    wc_flags: match wqe.opcode == SendOpcode::SendWithInvalidate as u8 {
                        true => WC_WITH_INV,
                        false => 0,
                    },
                    ..Cqe::default()
                },
            );
        }
        if !failed {
            self.work_on_windows(name, peer.0, &wqe);
        }
        if failed || wqe.flags & SEND_SIGNALED != 0 {
            self.complete(
                send_cq,
                Cqe {
                    wr_id: wqe.wr_id,
                    status: if failed { WC_WR_FLUSH_ERR } else { 0 },
                    qpn: name.1,
                    ..Cqe::default()
                },
            );
        }
        let qp = self.qps.get_mut(&name).expect("found above");
        qp.sends.pop_front();
        true
    }

    /// What a request of the queue pair `name`, whose peer is at `peer_device`, does to windows.
    fn work_on_windows(&mut self, name: Name, peer_device: u8, wqe: &SendWqe) {
        let end = |state: &mut Self, device: u8, rkey: u32| {
            let (_, window) = state.mws.get_mut(&(device, rkey >> 8)).expect("a live window");
            assert_eq!(window.rkey, rkey, "the key of the last bind");
            window.bound = None;
        };
        match SendOpcode::from_raw(wqe.opcode.into()) {
            Some(SendOpcode::BindMw) => {
                let (mw_type, window) = self.mws.get_mut(&(name.0, wqe.rkey >> 8)).expect("a live window");
                let lkey = wqe.swap as u32;
                assert!(self.keys.contains(&(name.0, lkey)), "a live region");
                window.rkey = wqe.imm;
                window.bound = Some(MwBound {
                    lkey,
                    address: wqe.remote_address,
                    length: wqe.compare_add,
                    access: Access::from_bits_truncate((wqe.swap >> 32) as u32),
                    qpn: (*mw_type == MwType::Two).then_some(name.1),
                });
            }
            Some(SendOpcode::LocalInvalidate) => end(self, name.0, wqe.imm),
            Some(SendOpcode::SendWithInvalidate) => end(self, peer_device, wqe.imm),
            _ => {}
        }
    }

    fn complete(&mut self, cq: Name, cqe: Cqe) {
        self.cqs
            .get_mut(&cq)
            .expect("a queue pair's completion queue")
            .push_back(cqe);
        let wanted = |any: &bool| *any || cqe.solicited != 0 || cqe.status != 0;
        if self.armed.get(&cq).is_some_and(wanted) {
            self.armed.remove(&cq);
            let (channel, event) = self.channel_of[&cq];
            let message = postcard::to_stdvec(&CompletionEvent { cq: event }).expect("an event");
            rustix::net::send(&self.channels[&channel], &message, SendFlags::NOSIGNAL)
                .expect("there is room");
        }
    }

    fn pop_shared(&mut self, name: Name) -> Option<u64> {
        let srq = self
            .srqs
            .get_mut(&name)
            .expect("a queue pair's shared receive queue");
        let wr_id = srq.recvs.pop_front()?;
        if (srq.recvs.len() as u32) < srq.attr.limit {
            srq.attr.limit = 0;
            let event = AsyncEvent {
                event: AsyncEventType::SrqLimitReached,
                object: name.1,
            };
            self.tell(name.0, event);
        }
        Some(wr_id)
    }

    fn tell(&self, device: u8, event: AsyncEvent) {
        let message = postcard::to_stdvec(&event).expect("an event");
        for (_, line) in self.lines.iter().filter(|(id, _)| *id == device) {
            // A line that a parked device had is nobody's.
            let _ = rustix::net::send(line, &message, SendFlags::NOSIGNAL);
        }
    }

    fn qp(&mut self, name: Name) -> &mut FakeQp {
        self.qps.get_mut(&name).expect("a live queue pair")
    }

    fn flush_recvs(&mut self, name: Name) {
        let qp = self.qp(name);
        let (cq, wr_ids) = (qp.recv_cq, std::mem::take(&mut qp.recvs));
        for wr_id in wr_ids {
            let cqe = Cqe {
                wr_id,
                status: WC_WR_FLUSH_ERR,
                qpn: name.1,
                ..Cqe::default()
            };
            self.complete(cq, cqe);
        }
    }
}

impl World {
    /// A device.
    pub fn device(&self, id: u8) -> Arc<dyn Device> {
        let mut gid = [0; 16];
        gid[15] = id;
        let (events, line) = Events::pair().expect("a socket pair");
        self.0.lock().lines.push((id, line));
        Arc::new(FakeDevice {
            id,
            world: self.clone(),
            events,
            attr: DeviceAttr {
                name: format!("fake{id}"),
                fw_ver: String::new(),
                node_guid: [id; 8],
                max_mr_size: u64::MAX,
                max_qp: 1000,
                max_qp_wr: 1000,
                max_sge: 4,
                max_inline_data: 64,
                max_cq: 1000,
                max_cqe: 1000,
                max_mr: 1000,
                max_pd: 1000,
                max_qp_rd_atom: 16,
                max_qp_init_rd_atom: 16,
                max_dm_size: 8192,
                ..DeviceAttr::default()
            },
            port: PortAttr {
                active_mtu: 5,
                max_mtu: 5,
                gids: vec![Gid { gid, ifindex: 0 }],
                netdev: String::new(),
                max_msg_bytes: 1 << 30,
            },
        })
    }

    /// Each queue pair finishes one request, if it can.
    pub fn step(&self) -> bool {
        let mut state = self.0.lock();
        let names: Vec<Name> = state.qps.keys().copied().collect();
        names.into_iter().filter(|name| state.step(*name)).count() > 0
    }

    /// Takes a queue pair to ERR, as a failed request would.
    pub fn fail(&self, device: u8, qpn: u32) {
        let mut state = self.0.lock();
        state.qp((device, qpn)).attr.state = QpState::Err;
        state.flush_recvs((device, qpn));
    }

    /// Queue pairs of a device.
    pub fn qpns(&self, device: u8) -> Vec<u32> {
        let state = self.0.lock();
        state
            .qps
            .keys()
            .filter(|name| name.0 == device)
            .map(|name| name.1)
            .collect()
    }

    /// Ends a device, as `kill -9` does its RNIC.
    pub fn kill(&self, device: u8) {
        self.0.lock().lines.retain(|(id, _)| *id != device);
    }

    /// A device tells of an event.
    pub fn tell(&self, device: u8, event: AsyncEvent) {
        self.0.lock().tell(device, event);
    }

    /// For the next `looks` looks, send queues say that they have no room.
    pub fn free_slots_late(&self, looks: u32) {
        self.0.lock().late_room = looks;
    }

    /// From now on, contexts that are opened on the device cannot be moved.
    pub fn pin(&self, device: u8) {
        self.0.lock().immovable.insert(device);
    }

    /// The process that has `device` makes it again where it moves to: at `target`, or nowhere.
    pub fn makes_again(&self, device: u8, target: Option<u8>) {
        self.0.lock().made_again.insert(device, target);
    }

    /// Has something done when the next queue pair is gone at its device, before its destroyer hears of it.
    pub fn on_destroy(&self, hook: impl FnOnce() + Send + 'static) {
        self.0.lock().on_destroy = Some(Hook(Box::new(hook)));
    }

    /// Requests that the RNICs have not finished.
    pub fn unfinished(&self) -> usize {
        self.0.lock().qps.values().map(|qp| qp.sends.len()).sum()
    }
}

impl Device for FakeDevice {
    fn attributes(&self) -> (&DeviceAttr, &PortAttr) {
        (&self.attr, &self.port)
    }

    fn watch(&self) -> Watched<'_> {
        Watched {
            connection: None,
            events: Some(self.events.fd()),
        }
    }

    fn blocker(&self) -> Option<String> {
        let immovable = self.world.0.lock().immovable.contains(&self.id);
        immovable.then(|| format!("device {} cannot be moved", self.id))
    }

    fn made_again(&self) -> Option<MadeAgainBy> {
        let again = self.world.0.lock().made_again.contains_key(&self.id);
        again.then(|| MadeAgainBy {
            name: self.attr.name.clone(),
            driver: None,
        })
    }

    fn open_again(&self) -> Result<Arc<dyn Device>, VerbsError> {
        let mut state = self.world.0.lock();
        let target =
            state.made_again[&self.id].ok_or(VerbsError::Unsupported("no such device here".to_owned()))?;
        state.made_again.entry(target).or_default();
        drop(state);
        Ok(self.world.device(target))
    }

    fn is_gone(&self) -> bool {
        !self.world.0.lock().lines.iter().any(|(id, _)| *id == self.id)
    }

    fn next_async_event(&self) -> Option<AsyncEvent> {
        self.events.next()
    }

    fn alloc_pd(&self) -> Result<u32, VerbsError> {
        Ok(self.world.0.lock().number(self.id))
    }

    fn create_comp_channel(&self) -> Result<Arc<dyn EventChannel>, VerbsError> {
        let mut state = self.world.0.lock();
        let number = state.number(self.id);
        let (ours, theirs) = SoftChannel::pair()?;
        let line = theirs.try_clone().expect("a descriptor");
        state.channels.insert((self.id, number), line);
        Ok(Arc::new(SoftChannel::new(number, ours, theirs)))
    }

    fn attach_comp_channel(&self, number: u32, channel: &dyn EventChannel) -> Result<(), VerbsError> {
        let line = channel.line().expect("a socket").try_clone_to_owned();
        let mut state = self.world.0.lock();
        let earlier = state
            .channels
            .insert((self.id, number), line.expect("a descriptor"));
        assert!(earlier.is_some(), "a live channel");
        Ok(())
    }

    fn destroy_comp_channel(&self, channel: u32) -> Result<(), VerbsError> {
        self.world.0.lock().channels.remove(&(self.id, channel));
        Ok(())
    }

    fn create_srq(&self, _: u32, attr: &SrqAttr) -> Result<SrqPlace, VerbsError> {
        let mut state = self.world.0.lock();
        let srq = state.number(self.id);
        let made = FakeSrq {
            recvs: VecDeque::new(),
            attr: *attr,
        };
        state.srqs.insert((self.id, srq), made);
        Ok(SrqPlace {
            srq,
            attr: *attr,
            offset: 0,
        })
    }

    fn modify_srq(&self, srq: u32, limit: u32) -> Result<(), VerbsError> {
        let mut state = self.world.0.lock();
        state
            .srqs
            .get_mut(&(self.id, srq))
            .expect("a live queue")
            .attr
            .limit = limit;
        Ok(())
    }

    fn query_srq(&self, srq: u32) -> Result<SrqAttr, VerbsError> {
        Ok(self.world.0.lock().srqs[&(self.id, srq)].attr)
    }

    fn destroy_srq(&self, srq: u32) -> Result<(), VerbsError> {
        self.world.0.lock().srqs.remove(&(self.id, srq));
        Ok(())
    }

    fn srq_end(&self, place: &SrqPlace) -> Result<Box<dyn RecvRing>, VerbsError> {
        Ok(Box::new(FakeSrqEnd(FakeEnd {
            name: (self.id, place.srq),
            world: self.world.clone(),
        })))
    }

    fn create_ah(&self, _: u32, av: &AddressVector) -> Result<u32, VerbsError> {
        let mut state = self.world.0.lock();
        let number = state.number(self.id);
        state.ahs.insert((self.id, number), *av);
        Ok(number)
    }

    fn destroy_ah(&self, ah: u32) -> Result<(), VerbsError> {
        let gone = self.world.0.lock().ahs.remove(&(self.id, ah));
        assert!(gone.is_some(), "address handle {ah} is destroyed once");
        Ok(())
    }

    fn dealloc_pd(&self, _: u32) -> Result<(), VerbsError> {
        Ok(())
    }

    fn reg_mr(&self, _: &PhysicalMrInit<'_>) -> Result<(u32, u32), VerbsError> {
        let mut state = self.world.0.lock();
        // The least that is free, so that keys come again.
        let key = (1..)
            .map(|index| index << 8 | 7)
            .find(|key| !state.keys.contains(&(self.id, *key)));
        let key = key.expect("a free key");
        state.keys.insert((self.id, key));
        Ok((key, key))
    }

    fn alloc_mw(&self, _: u32, mw_type: MwType) -> Result<u32, VerbsError> {
        let mut state = self.world.0.lock();
        let rkey = state.number(self.id) << 20 | 3;
        let unbound = MwState { rkey, bound: None };
        state.mws.insert((self.id, rkey >> 8), (mw_type, unbound));
        Ok(rkey)
    }

    fn dealloc_mw(&self, rkey: u32) -> Result<(), VerbsError> {
        let gone = self.world.0.lock().mws.remove(&(self.id, rkey >> 8));
        assert!(gone.is_some(), "a live window");
        Ok(())
    }

    fn query_mw(&self, rkey: u32) -> Result<MwState, VerbsError> {
        Ok(self.world.0.lock().mws[&(self.id, rkey >> 8)].1)
    }

    fn restore_mw(&self, state: &MwState) -> Result<(), VerbsError> {
        let mut world = self.world.0.lock();
        if let Some(bound) = state.bound {
            assert!(world.keys.contains(&(self.id, bound.lkey)), "a live region");
            assert!(
                bound
                    .qpn
                    .is_none_or(|qpn| world.qps.contains_key(&(self.id, qpn))),
                "a live queue pair"
            );
        }
        let (_, window) = world
            .mws
            .get_mut(&(self.id, state.rkey >> 8))
            .expect("a live window");
        *window = *state;
        Ok(())
    }

    fn dereg_mr(&self, lkey: u32) -> Result<(), VerbsError> {
        assert!(self.world.0.lock().keys.remove(&(self.id, lkey)), "a live key");
        Ok(())
    }

    fn create_cq(&self, entries: u32, channel: Option<(u32, u32)>) -> Result<CqPlace, VerbsError> {
        let mut state = self.world.0.lock();
        let cq = state.number(self.id);
        if let Some((channel, event)) = channel {
            state
                .channel_of
                .insert((self.id, cq), ((self.id, channel), event));
        }
        state.cqs.insert((self.id, cq), VecDeque::new());
        Ok(CqPlace {
            cq,
            entries,
            offset: 0,
        })
    }

    fn destroy_cq(&self, cq: u32) -> Result<(), VerbsError> {
        self.world.0.lock().cqs.remove(&(self.id, cq));
        Ok(())
    }

    fn create_qp(&self, init: &PhysicalQpInit) -> Result<QpPlace, VerbsError> {
        let mut state = self.world.0.lock();
        let free = (100..).find(|qpn| !state.qps.contains_key(&(self.id, *qpn)));
        let qpn = free.expect("a free number");
        let qp = FakeQp {
            attr: QpAttr::default(),
            qp_type: init.qp_type,
            send_cq: (self.id, init.send_cq),
            recv_cq: (self.id, init.recv_cq),
            srq: init.srq.map(|srq| (self.id, srq)),
            capacity: init.cap.max_send_wr,
            pushed: Vec::new(),
            sends: VecDeque::new(),
            recvs: VecDeque::new(),
            pushed_recvs: Vec::new(),
            recv_capacity: init.cap.max_recv_wr,
        };
        state.qps.insert((self.id, qpn), qp);
        Ok(QpPlace {
            qpn,
            cap: init.cap,
            slot: 0,
            offset: 0,
        })
    }

    fn modify_qp(&self, qpn: u32, mask: QpAttrMask, attr: &QpAttr) -> Result<(), VerbsError> {
        let mut state = self.world.0.lock();
        state.qp((self.id, qpn)).attr.merge(attr, mask);
        match state.qp((self.id, qpn)).attr.state {
            QpState::Err => state.flush_recvs((self.id, qpn)),
            QpState::Reset => {
                let qp = state.qp((self.id, qpn));
                (qp.sends, qp.recvs) = Default::default();
                qp.attr = QpAttr::default();
            }
            _ => {}
        }
        Ok(())
    }

    fn query_qp(&self, qpn: u32) -> Result<QpAttr, VerbsError> {
        Ok(self.world.0.lock().qp((self.id, qpn)).attr)
    }

    fn destroy_qp(&self, qpn: u32) -> Result<(), VerbsError> {
        let mut state = self.world.0.lock();
        let gone = state.qps.remove(&(self.id, qpn));
        assert!(gone.is_some(), "queue pair {qpn} is destroyed once");
        let hook = state.on_destroy.take();
        drop(state);
        if let Some(Hook(hook)) = hook {
            hook();
        }
        Ok(())
    }

    fn qp_ends(&self, place: &QpPlace) -> Result<QpEnds, VerbsError> {
        let name = (self.id, place.qpn);
        let world = self.world.clone();
        let send = FakeEnd {
            name,
            world: world.clone(),
        };
        Ok(QpEnds {
            send: Box::new(send),
            recv: Box::new(FakeEnd { name, world }),
        })
    }

    fn cq_end(&self, place: &CqPlace) -> Result<Box<dyn CompletionRing>, VerbsError> {
        Ok(Box::new(FakeEnd {
            name: (self.id, place.cq),
            world: self.world.clone(),
        }))
    }

    fn park(self: Arc<Self>) -> Result<Parked, VerbsError> {
        let world = self.world.clone();
        Ok(Parked {
            kept: Some(self.clone()),
            connection: connection(self.id),
            reopen: Box::new(move |connection| {
                let mut id = [0];
                let mut file = File::from(connection);
                file.rewind()
                    .and_then(|()| file.read_exact(&mut id))
                    .expect("a connection of ours");
                Ok(world.device(id[0]))
            }),
        })
    }
}

/// What stands for a connection to a device.
pub fn connection(device: u8) -> OwnedFd {
    let mut file = tempfile::tempfile().expect("a temporary file");
    file.write_all(&[device]).expect("room for a byte");
    file.into()
}

/// Any end of any queue.
#[derive(Debug)]
struct FakeEnd {
    name: Name,
    world: World,
}

impl FakeEnd {
    fn check_keys(state: &State, name: Name, sges: &[Sge]) {
        for sge in sges {
            assert!(
                state.keys.contains(&(name.0, sge.lkey)),
                "key {:#x} is known to device {}",
                sge.lkey,
                name.0
            );
        }
    }
}

impl SendRing for FakeEnd {
    fn room(&self) -> u32 {
        let mut state = self.world.0.lock();
        if state.late_room > 0 {
            state.late_room -= 1;
            return 0;
        }
        let qp = state.qp(self.name);
        qp.capacity - (qp.sends.len() + qp.pushed.len()) as u32
    }

    fn push(&mut self, wqe: &SendWqe, body: Body<'_>) {
        let mut state = self.world.0.lock();
        if let Body::Sges(sges) = body {
            Self::check_keys(&state, self.name, sges);
        }
        state.qp(self.name).pushed.push(*wqe);
    }

    fn unpush(&mut self, count: u32) {
        let mut state = self.world.0.lock();
        let pushed = &mut state.qp(self.name).pushed;
        pushed.truncate(pushed.len() - count as usize);
    }

    fn publish(&mut self) -> Result<(), Refused> {
        let mut state = self.world.0.lock();
        let qp = state.qp(self.name);
        let pushed = std::mem::take(&mut qp.pushed);
        qp.sends.extend(pushed);
        Ok(())
    }

    fn unfinished(&self) -> u32 {
        // Whoever waits for the RNICs lets them work.
        self.world.step();
        self.world.0.lock().qp(self.name).sends.len() as u32
    }

    fn reset(&mut self) {}
}

impl RecvRing for FakeEnd {
    fn room(&self) -> u32 {
        let mut state = self.world.0.lock();
        let qp = state.qp(self.name);
        qp.recv_capacity - (qp.recvs.len() + qp.pushed_recvs.len()) as u32
    }

    fn push(&mut self, wr_id: u64, sges: &[Sge]) {
        let mut state = self.world.0.lock();
        Self::check_keys(&state, self.name, sges);
        state.qp(self.name).pushed_recvs.push(wr_id);
    }

    fn publish(&mut self) -> Result<(), Refused> {
        let mut state = self.world.0.lock();
        let qp = state.qp(self.name);
        let pushed = std::mem::take(&mut qp.pushed_recvs);
        qp.recvs.extend(pushed);
        if qp.attr.state == QpState::Err {
            state.flush_recvs(self.name);
        }
        Ok(())
    }

    fn reset(&mut self) {}
}

/// The end of a shared receive queue; what is pushed is visible at once.
#[derive(Debug)]
struct FakeSrqEnd(FakeEnd);

impl RecvRing for FakeSrqEnd {
    fn room(&self) -> u32 {
        u32::MAX
    }

    fn push(&mut self, wr_id: u64, sges: &[Sge]) {
        let mut state = self.0.world.0.lock();
        FakeEnd::check_keys(&state, self.0.name, sges);
        let srq = state.srqs.get_mut(&self.0.name).expect("a live queue");
        srq.recvs.push_back(wr_id);
    }

    fn publish(&mut self) -> Result<(), Refused> {
        Ok(())
    }

    fn reset(&mut self) {}
}

impl CompletionRing for FakeEnd {
    fn pop(&mut self) -> Option<Cqe> {
        self.world.0.lock().cqs.get_mut(&self.name)?.pop_front()
    }

    fn arm(&mut self, solicited_only: bool) -> bool {
        let mut state = self.world.0.lock();
        *state.armed.entry(self.name).or_default() |= !solicited_only;
        !state.cqs[&self.name].is_empty()
    }

    fn disarm(&mut self) -> Option<Armed> {
        let any = self.world.0.lock().armed.remove(&self.name)?;
        Some(if any { Armed::Any } else { Armed::Solicited })
    }
}
