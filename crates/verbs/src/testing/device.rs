//! The control path.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use verbatim_device::control::{
    AddressVector, AsyncEvent, DeviceAttr, Gid, MwState, MwType, OutstandingRequest, PortAttr, QpAttr,
    QpAttrMask, QpPosition, QpSecret, QpState, SrqAttr,
};
use verbatim_device::image::QpImage;
use verbatim_roce::{AccessFlags, Mtu, Psn, Qp, QpAttributes, Qpn, RcImage, RcQp, Secret, SecretEnd};

use super::Wire;
use super::memory::Region;
use super::rings::{CqEnd, QpEnd, SrqEnd};
use super::rnic::{Rnic, Shared, WireCq, WireQp, WireSrq, config};
use super::wire::{State, address, device_at};
use crate::backend::soft::events::{Events, SoftChannel};
use crate::backend::{
    CompletionRing, CqPlace, Device, EventChannel, MadeAgainBy, Parked, PhysicalMrInit, PhysicalQpInit,
    QpEnds, QpPlace, RecvRing, SrqPlace, TakenUp, Watched,
};
use crate::error::VerbsError;

#[derive(Debug)]
struct WireDevice {
    id: u8,
    wire: Wire,
    attr: DeviceAttr,
    port: PortAttr,
    events: Events,
}

/// What stands for a connection to a device.
pub fn connection(device: u8) -> OwnedFd {
    let mut file = tempfile::tempfile().expect("a temporary file");
    file.write_all(&[device]).expect("room for a byte");
    file.into()
}

/// By what others find a device.
pub fn gid(device: u8) -> [u8; 16] {
    let mut gid = [0; 16];
    gid[15] = device;
    gid
}

pub fn open(wire: &Wire, id: u8) -> Arc<dyn Device> {
    let (events, line) = Events::pair().expect("a socket pair");
    wire.with_rnic(id, |rnic| rnic.shared.lines.push(line));
    Arc::new(WireDevice {
        events,
        id,
        wire: wire.clone(),
        attr: DeviceAttr {
            name: format!("wire{id}"),
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
            gids: vec![Gid {
                gid: gid(id),
                ifindex: 0,
            }],
            netdev: String::new(),
            max_msg_bytes: 1 << 30,
        },
    })
}

impl WireDevice {
    fn with<T>(&self, run: impl FnOnce(&mut Rnic) -> T) -> T {
        self.wire.with_rnic(self.id, run)
    }

    fn with_shared<T>(&self, run: impl FnOnce(&mut Shared) -> T) -> T {
        self.with(|rnic| run(&mut rnic.shared))
    }

    fn with_qp<T>(&self, qpn: u32, run: impl FnOnce(&mut WireQp) -> T) -> T {
        self.with(|rnic| run(rnic.qps.get_mut(&qpn).expect("a live queue pair")))
    }

    fn restore(&self, qpn: u32, image: &[u8]) {
        let image = RcImage::decode(image).expect("an image");
        self.with_qp(qpn, |qp| {
            let sends = qp.queues.sends.drain(..image.requests().count());
            let taken: Vec<u64> = sends.map(|posted| posted.wqe.wr_id).collect();
            assert!(
                taken.into_iter().eq(image.requests()),
                "the ring begins with the requests of the image"
            );
            // That of a shared receive queue is not posted again.
            if let (Some(receive), None) = (image.receive(), qp.queues.init.srq) {
                let first = qp.queues.recvs.pop_front();
                assert_eq!(first.map(|first| first.wr_id), Some(receive));
            }
            qp.remote = match image.peer() {
                Some(peer) => device_at(peer.address),
                None => image.attributes().av.expect("it was connected").dgid[15],
            };
            let restored = RcQp::restore(Qpn::new(qpn), config(&qp.queues.init), image);
            qp.transport = Qp::Rc(restored.expect("an image that fits"));
        });
    }

    fn number(&self) -> u32 {
        let mut state = self.wire.0.lock();
        let State { faults, rnics, .. } = &mut *state;
        let rnic = rnics.get_mut(&self.id).expect("an RNIC");
        match faults.next_numbers.pop_front() {
            Some(again) => again,
            None if faults.reuses_numbers => (16..).find(|number| !rnic.has(*number)).expect("a free one"),
            None => {
                rnic.last_number += 1;
                u32::from(self.id) << 12 | rnic.last_number
            }
        }
    }

    fn is_made_again(&self) -> bool {
        self.wire.0.lock().faults.made_again.contains_key(&self.id)
    }
}

impl Device for WireDevice {
    fn attributes(&self) -> (&DeviceAttr, &PortAttr) {
        (&self.attr, &self.port)
    }

    fn blocker(&self) -> Option<String> {
        let hook = self.wire.0.lock().faults.on_look.take();
        if let Some(hook) = hook {
            (hook.0)();
        }
        let pinned = self.wire.0.lock().faults.pinned.contains(&self.id);
        pinned.then(|| format!("device {} cannot be moved", self.id))
    }

    fn made_again(&self) -> Option<MadeAgainBy> {
        self.is_made_again().then(|| MadeAgainBy {
            name: self.attr.name.clone(),
            driver: None,
        })
    }

    fn open_again(&self) -> Result<Arc<dyn Device>, VerbsError> {
        let target = self.wire.0.lock().faults.made_again[&self.id];
        let target = target.ok_or(VerbsError::Unsupported("no such device here".to_owned()))?;
        self.wire.makes_again(target, None);
        Ok(self.wire.device(target))
    }

    fn watch(&self) -> Watched<'_> {
        Watched {
            connection: None,
            events: Some(self.events.fd()),
        }
    }

    fn is_gone(&self) -> bool {
        self.with(|rnic| rnic.dead)
    }

    fn next_async_event(&self) -> Option<AsyncEvent> {
        self.events.next()
    }

    fn alloc_pd(&self) -> Result<u32, VerbsError> {
        Ok(self.number())
    }

    fn dealloc_pd(&self, _: u32) -> Result<(), VerbsError> {
        Ok(())
    }

    fn reg_mr(&self, init: &PhysicalMrInit<'_>) -> Result<(u32, u32), VerbsError> {
        let key = self.number() << 8 | 0x5a;
        self.reg_mr_as(init, key)?;
        Ok((key, key))
    }

    fn reg_mr_as(&self, init: &PhysicalMrInit<'_>, key: u32) -> Result<(), VerbsError> {
        let region = Region {
            address: init.memory.iova,
            length: init.memory.length,
            access: init.access,
        };
        self.with_shared(|shared| shared.memory.regions.insert(key, region));
        Ok(())
    }

    fn dereg_mr(&self, lkey: u32) -> Result<(), VerbsError> {
        let gone = self.with_shared(|shared| shared.memory.regions.remove(&lkey));
        assert!(gone.is_some(), "region {lkey:#x} is deregistered once");
        Ok(())
    }

    fn alloc_mw(&self, _: u32, mw_type: MwType) -> Result<u32, VerbsError> {
        let rkey = self.number() << 8 | 3;
        let unbound = MwState { rkey, bound: None };
        self.with_shared(|shared| shared.memory.windows.insert(rkey >> 8, (mw_type, unbound)));
        Ok(rkey)
    }

    fn dealloc_mw(&self, rkey: u32) -> Result<(), VerbsError> {
        let gone = self.with_shared(|shared| shared.memory.windows.remove(&(rkey >> 8)));
        assert!(gone.is_some(), "window {rkey:#x} is deallocated once");
        Ok(())
    }

    fn query_mw(&self, rkey: u32) -> Result<MwState, VerbsError> {
        Ok(self.with_shared(|shared| shared.memory.windows[&(rkey >> 8)].1))
    }

    fn restore_mw(&self, state: &MwState) -> Result<(), VerbsError> {
        self.with(|rnic| {
            let memory = &mut rnic.shared.memory;
            if let Some(bound) = state.bound {
                assert!(memory.regions.contains_key(&bound.lkey), "a live region");
                let live = bound.qpn.is_none_or(|qpn| rnic.qps.contains_key(&qpn));
                assert!(live, "a live queue pair");
            }
            let window = memory.windows.get_mut(&(state.rkey >> 8));
            window.expect("a live window").1 = *state;
        });
        Ok(())
    }

    fn create_comp_channel(&self) -> Result<Arc<dyn EventChannel>, VerbsError> {
        let number = self.number();
        let (ours, theirs) = SoftChannel::pair()?;
        let line = theirs.try_clone().expect("a descriptor");
        self.with_shared(|shared| shared.channels.insert(number, line));
        Ok(Arc::new(SoftChannel::new(number, ours, theirs)))
    }

    fn attach_comp_channel(&self, number: u32, channel: &dyn EventChannel) -> Result<(), VerbsError> {
        let line = channel.line().expect("a socket").try_clone_to_owned();
        let line = line.expect("a descriptor");
        let earlier = self.with_shared(|shared| shared.channels.insert(number, line));
        assert!(earlier.is_some(), "a live channel");
        Ok(())
    }

    fn destroy_comp_channel(&self, channel: u32) -> Result<(), VerbsError> {
        self.with_shared(|shared| shared.channels.remove(&channel));
        Ok(())
    }

    fn create_srq(&self, _: u32, attr: &SrqAttr) -> Result<SrqPlace, VerbsError> {
        let srq = self.number();
        let made = WireSrq {
            attr: *attr,
            pushed: Vec::new(),
            recvs: Default::default(),
        };
        self.with_shared(|shared| shared.srqs.insert(srq, made));
        Ok(SrqPlace {
            srq,
            attr: *attr,
            offset: 0,
        })
    }

    fn modify_srq(&self, srq: u32, limit: u32) -> Result<(), VerbsError> {
        self.with_shared(|shared| shared.srqs.get_mut(&srq).expect("a live queue").attr.limit = limit);
        Ok(())
    }

    fn query_srq(&self, srq: u32) -> Result<SrqAttr, VerbsError> {
        Ok(self.with_shared(|shared| shared.srqs[&srq].attr))
    }

    fn destroy_srq(&self, srq: u32) -> Result<(), VerbsError> {
        self.with_shared(|shared| shared.srqs.remove(&srq));
        Ok(())
    }

    fn create_ah(&self, _: u32, av: &AddressVector) -> Result<u32, VerbsError> {
        let number = self.number();
        self.with_shared(|shared| shared.ahs.insert(number, av.dgid[15]));
        Ok(number)
    }

    fn destroy_ah(&self, ah: u32) -> Result<(), VerbsError> {
        let gone = self.with_shared(|shared| shared.ahs.remove(&ah));
        assert!(gone.is_some(), "address handle {ah} is destroyed once");
        Ok(())
    }

    fn create_cq(&self, entries: u32, channel: Option<(u32, u32)>) -> Result<CqPlace, VerbsError> {
        let cq = self.number();
        let made = WireCq {
            channel,
            ..WireCq::default()
        };
        self.with_shared(|shared| shared.cqs.insert(cq, made));
        Ok(CqPlace {
            cq,
            entries,
            offset: 0,
        })
    }

    fn destroy_cq(&self, cq: u32) -> Result<(), VerbsError> {
        self.with(|rnic| {
            let inits = rnic.qps.values().map(|qp| &qp.queues.init);
            match inits
                .filter(|init| [init.send_cq, init.recv_cq].contains(&cq))
                .count()
            {
                0 => {
                    rnic.shared.cqs.remove(&cq);
                    Ok(())
                }
                users => Err(VerbsError::Busy {
                    object: format!("completion queue {cq}"),
                    users,
                }),
            }
        })
    }

    fn create_qp(&self, init: &PhysicalQpInit) -> Result<QpPlace, VerbsError> {
        self.create_qp_as(init, self.number())
    }

    fn create_qp_as(&self, init: &PhysicalQpInit, qpn: u32) -> Result<QpPlace, VerbsError> {
        let earlier = self.with(|rnic| rnic.qps.insert(qpn, WireQp::new(qpn, *init)));
        assert!(earlier.is_none(), "queue pair {qpn} is there already");
        Ok(QpPlace {
            qpn,
            cap: init.cap,
            slot: 0,
            offset: 0,
        })
    }

    fn modify_qp(&self, qpn: u32, mask: QpAttrMask, attr: &QpAttr) -> Result<(), VerbsError> {
        if self.is_made_again() && mask.contains(QpAttrMask::STATE) && attr.state == QpState::Err {
            // As the kernel does for all of its RNICs.
            let from_reset = self.query_qp(qpn)?.state == QpState::Reset;
            let refused = || VerbsError::Invalid("no way leads from RESET to ERR".to_owned());
            (!from_reset).then_some(()).ok_or_else(refused)?;
        }
        let to_rtr = mask.contains(QpAttrMask::STATE) && attr.state == QpState::Rtr;
        if to_rtr && self.wire.does_not_answer() {
            return Err(VerbsError::os("modify_qp", rustix::io::Errno::TIMEDOUT));
        }
        let mut state = self.wire.0.lock();
        let changed = state
            .with_qp(self.id, qpn, |qp, host| qp.modify(&translate(mask, attr), host))
            .expect("a live queue pair");
        changed.map_err(|error| VerbsError::Invalid(error.to_string()))?;
        let rnic = state.rnics.get_mut(&self.id).expect("an RNIC");
        let qp = rnic.qps.get_mut(&qpn).expect("a live queue pair");
        qp.attr.merge(attr, mask);
        if mask.contains(QpAttrMask::AV) {
            qp.remote = attr.av.dgid[15];
        }
        if mask.contains(QpAttrMask::STATE) && attr.state == QpState::Reset {
            *qp = WireQp::new(qpn, qp.queues.init);
        }
        Ok(())
    }

    fn query_qp(&self, qpn: u32) -> Result<QpAttr, VerbsError> {
        Ok(self.with(|rnic| {
            let qp = &rnic.qps[&qpn];
            QpAttr {
                state: QpState::from_raw(qp.transport.state() as u32).expect("a state"),
                ..qp.attr
            }
        }))
    }

    fn stop_qp(&self, qpn: u32) -> Result<QpPosition, VerbsError> {
        if self.is_made_again() {
            return Err(VerbsError::Unsupported(
                "this device stops no queue pair".to_owned(),
            ));
        }
        let mut state = self.wire.0.lock();
        let stopped = state.with_qp(self.id, qpn, |qp, host| {
            let position = qp.stop(host).expect("a reliable connection");
            (qp.state(), position)
        });
        let (now, position) = stopped.expect("a live queue pair");
        let forgetful = state.faults.forgetful;
        let rnic = state.rnics.get_mut(&self.id).expect("an RNIC");
        let qp = rnic.qps.get_mut(&qpn).expect("a live queue pair");
        qp.stopped = now != verbatim_roce::QpState::Err;
        let requests = position.requests.iter().map(|request| OutstandingRequest {
            wr_id: request.wr_id,
            first_psn: request.first.get(),
            packets: request.packets,
            executed: request.executed,
        });
        let atomics = position.atomics.iter().map(|(psn, value)| (psn.get(), *value));
        Ok(QpPosition {
            state: QpState::from_raw(now as u32).expect("a state"),
            acknowledged_psn: position.acknowledged.get(),
            sent_psn: position.sent.get(),
            requests: requests.collect(),
            expected_psn: position.expected.get(),
            atomics: atomics.filter(|_| !forgetful).collect(),
            receive: position.receive,
        })
    }

    fn restart_qp(&self, qpn: u32) -> Result<(), VerbsError> {
        let mut state = self.wire.0.lock();
        let now = state.now;
        state.with_qp(self.id, qpn, |qp, _| qp.restart(now));
        let rnic = state.rnics.get_mut(&self.id).expect("an RNIC");
        let qp = rnic.qps.get_mut(&qpn).expect("a live queue pair");
        assert!(std::mem::take(&mut qp.stopped), "it was stopped");
        Ok(())
    }

    fn set_qp_secret(&self, qpn: u32, secret: Option<QpSecret>) -> Result<(), VerbsError> {
        let secret = secret.map(|secret| {
            let end = match secret.first {
                true => SecretEnd::First,
                false => SecretEnd::Second,
            };
            Secret::new(secret.key, end)
        });
        self.with_qp(qpn, |qp| qp.connection().set_secret(secret));
        Ok(())
    }

    fn pause_qps(&self, qpns: &[u32], _: Option<u32>) -> Result<(), VerbsError> {
        let now = self.wire.0.lock().now;
        for qpn in qpns {
            let halted = self.with_qp(*qpn, |qp| qp.connection().halt(now));
            assert!(halted, "it was in a state in which something is sent or received");
        }
        Ok(())
    }

    fn dump_qps(&self, qpns: &[u32]) -> Result<Vec<QpImage>, VerbsError> {
        let images = qpns.iter().map(|qpn| {
            let image = self.with_qp(*qpn, |qp| qp.connection().save());
            let image = image.expect("it is paused");
            Ok(QpImage {
                image: image.encode(),
                requests: image.requests().collect(),
                receive: image.receive(),
            })
        });
        images.collect()
    }

    fn restore_qps(&self, images: &[TakenUp<'_>]) -> Result<Vec<Result<(), VerbsError>>, VerbsError> {
        for taken_up in images {
            self.restore(taken_up.qpn, taken_up.image);
        }
        Ok(images.iter().map(|_| Ok(())).collect())
    }

    fn resume_qps(&self, qpns: &[u32]) -> Result<(), VerbsError> {
        let now = self.wire.0.lock().now;
        for qpn in qpns {
            self.with_qp(*qpn, |qp| qp.connection().resume(now));
        }
        Ok(())
    }

    fn destroy_qp(&self, qpn: u32) -> Result<(), VerbsError> {
        let gone = self.with(|rnic| {
            rnic.shared.memory.free_windows_of(qpn);
            rnic.qps.remove(&qpn)
        });
        assert!(gone.is_some(), "queue pair {qpn} is destroyed once");
        let hook = self.wire.0.lock().faults.on_destroy.take();
        if let Some(hook) = hook {
            (hook.0)();
        }
        Ok(())
    }

    fn qp_ends(&self, place: &QpPlace) -> Result<QpEnds, VerbsError> {
        let end = || QpEnd {
            wire: self.wire.clone(),
            device: self.id,
            qpn: place.qpn,
        };
        Ok(QpEnds {
            send: Box::new(end()),
            recv: Box::new(end()),
        })
    }

    fn cq_end(&self, place: &CqPlace) -> Result<Box<dyn CompletionRing>, VerbsError> {
        Ok(Box::new(CqEnd {
            wire: self.wire.clone(),
            device: self.id,
            cq: place.cq,
        }))
    }

    fn srq_end(&self, place: &SrqPlace) -> Result<Box<dyn RecvRing>, VerbsError> {
        Ok(Box::new(SrqEnd {
            wire: self.wire.clone(),
            device: self.id,
            srq: place.srq,
        }))
    }

    fn park(self: Arc<Self>) -> Result<Parked, VerbsError> {
        let (wire, id) = (self.wire.clone(), self.id);
        // What a process keeps goes on as it is.
        let kept = self.is_made_again();
        wire.park(id, !kept);
        Ok(Parked {
            kept: kept.then_some(self as Arc<dyn Device>),
            connection: connection(id),
            reopen: Box::new(move |connection| {
                let mut id = [0];
                let mut file = File::from(connection);
                file.rewind()
                    .and_then(|()| file.read_exact(&mut id))
                    .expect("a connection of ours");
                wire.park(id[0], false);
                Ok(open(&wire, id[0]))
            }),
        })
    }
}

fn translate(mask: QpAttrMask, attr: &QpAttr) -> QpAttributes {
    use QpAttrMask as M;
    let given = |flag| mask.contains(flag);
    let pick = |flag, value: u8| given(flag).then_some(value);
    QpAttributes {
        state: given(M::STATE)
            .then(|| verbatim_roce::QpState::from_code(attr.state as u32).expect("a state")),
        access_flags: given(M::ACCESS_FLAGS).then(|| AccessFlags::from_bits_truncate(attr.access.bits())),
        pkey_index: given(M::PKEY_INDEX).then_some(0),
        port_num: pick(M::PORT, 1),
        qkey: given(M::QKEY).then_some(attr.qkey),
        av: given(M::AV).then(|| {
            let IpAddr::V4(there) = address(attr.av.dgid[15]) else {
                unreachable!("there is no other family here")
            };
            verbatim_roce::AddressVector {
                dgid: there.to_ipv6_mapped().octets(),
                ..Default::default()
            }
        }),
        path_mtu: given(M::PATH_MTU).then(|| Mtu::try_from(attr.path_mtu).expect("an mtu")),
        timeout: pick(M::TIMEOUT, attr.timeout),
        retry_cnt: pick(M::RETRY_CNT, attr.retry_cnt),
        rnr_retry: pick(M::RNR_RETRY, attr.rnr_retry),
        rq_psn: given(M::RQ_PSN).then_some(Psn::new(attr.rq_psn)),
        max_rd_atomic: pick(M::MAX_QP_RD_ATOMIC, attr.max_rd_atomic),
        min_rnr_timer: pick(M::MIN_RNR_TIMER, attr.min_rnr_timer),
        sq_psn: given(M::SQ_PSN).then_some(Psn::new(attr.sq_psn)),
        max_dest_rd_atomic: pick(M::MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic),
        dest_qpn: given(M::DEST_QPN).then_some(Qpn::new(attr.dest_qpn)),
        ..QpAttributes::default()
    }
}
