//! The control path.

use std::fs::File;
use std::io::{Read, Seek};
use std::net::IpAddr;
use std::sync::Arc;

use verbatim_device::control::{
    DeviceAttr, Gid, OutstandingRequest, PortAttr, QpAttr, QpAttrMask, QpPosition, QpSecret, QpState,
};
use verbatim_device::image::QpImage;
use verbatim_roce::{AccessFlags, Mtu, Psn, Qp, QpAttributes, Qpn, RcImage, RcQp, Secret, SecretEnd};

use super::rings::{CqEnd, QpEnd};
use super::{Region, Rnic, Wire, WireQp, new_qp};
use crate::backend::{
    CompletionRing, CqPlace, Device, Parked, PhysicalMrInit, PhysicalQpInit, QpEnds, QpPlace, TakenUp,
};
use crate::error::VerbsError;
use crate::testing::nic::connection;

#[derive(Debug)]
struct WireDevice {
    id: u8,
    wire: Wire,
    attr: DeviceAttr,
    port: PortAttr,
}

pub fn open(wire: &Wire, id: u8) -> Arc<dyn Device> {
    let mut gid = [0; 16];
    gid[15] = id;
    Arc::new(WireDevice {
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

impl WireDevice {
    fn with<T>(&self, run: impl FnOnce(&mut Rnic) -> T) -> T {
        run(self.wire.0.lock().rnics.get_mut(&self.id).expect("an RNIC"))
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
            if let Some(receive) = image.receive() {
                let first = qp.queues.recvs.pop_front();
                assert_eq!(first.map(|first| first.wr_id), Some(receive));
            }
            qp.remote = match image.peer().map(|peer| peer.address) {
                Some(IpAddr::V4(address)) => address.octets()[3],
                Some(IpAddr::V6(_)) => panic!("there is no other family here"),
                None => image.attributes().av.expect("it was connected").dgid[15],
            };
            let restored = RcQp::restore(Qpn::new(qpn), super::config(), image);
            qp.transport = Qp::Rc(restored.expect("an image that fits"));
        });
    }

    /// A number that differs between devices, as a key or a queue pair's number would.
    fn number(&self) -> u32 {
        self.with(|rnic| {
            rnic.next += 1;
            u32::from(self.id) << 12 | rnic.next
        })
    }
}

impl Device for WireDevice {
    fn attributes(&self) -> (&DeviceAttr, &PortAttr) {
        (&self.attr, &self.port)
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
        self.with(|rnic| rnic.regions.insert(key, region));
        Ok(())
    }

    fn dereg_mr(&self, lkey: u32) -> Result<(), VerbsError> {
        self.with(|rnic| rnic.regions.remove(&lkey));
        Ok(())
    }

    fn create_cq(&self, entries: u32, _: Option<(u32, u32)>) -> Result<CqPlace, VerbsError> {
        let cq = self.number();
        self.with(|rnic| rnic.cqs.insert(cq, Default::default()));
        Ok(CqPlace {
            cq,
            entries,
            offset: 0,
        })
    }

    fn destroy_cq(&self, cq: u32) -> Result<(), VerbsError> {
        self.with(|rnic| rnic.cqs.remove(&cq));
        Ok(())
    }

    fn create_qp(&self, init: &PhysicalQpInit) -> Result<QpPlace, VerbsError> {
        self.create_qp_as(init, self.number())
    }

    fn create_qp_as(&self, init: &PhysicalQpInit, qpn: u32) -> Result<QpPlace, VerbsError> {
        let qp = new_qp(qpn, init.cap, init.send_cq, init.recv_cq);
        self.with(|rnic| rnic.qps.insert(qpn, qp));
        Ok(QpPlace {
            qpn,
            cap: init.cap,
            slot: 0,
            offset: 0,
        })
    }

    fn modify_qp(&self, qpn: u32, mask: QpAttrMask, attr: &QpAttr) -> Result<(), VerbsError> {
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
            *qp = new_qp(qpn, qp.queues.cap, qp.queues.send_cq, qp.queues.recv_cq);
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
        let mut state = self.wire.0.lock();
        let stopped = state.with_qp(self.id, qpn, |qp, host| {
            let position = qp.stop(host).expect("a reliable connection");
            (qp.state(), position)
        });
        let (now, position) = stopped.expect("a live queue pair");
        let forgetful = state.forgetful;
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
        let gone = self.with(|rnic| rnic.qps.remove(&qpn));
        assert!(gone.is_some(), "queue pair {qpn} is destroyed once");
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

    fn park(self: Arc<Self>) -> Result<Parked, VerbsError> {
        self.wire.park(self.id, true);
        let wire = self.wire.clone();
        Ok(Parked {
            kept: None,
            connection: connection(self.id),
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
        av: given(M::AV).then(|| {
            let IpAddr::V4(there) = super::address(attr.av.dgid[15]) else {
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
