//! `ibv_modify_qp`: the RNIC's own checks, and the translation for the transport, which checks the transition.

use std::net::SocketAddr;

use verbatim_device::control::{AddressVector, QpAttr, QpAttrMask, Reply};
use verbatim_roce::icrc::Flow;
use verbatim_roce::{AccessFlags, Mtu, Psn, QpAttributes, QpState, Qpn, UDP_PORT};

use super::{Desk, path};
use crate::device::Device;
use crate::error::Refused;
use crate::objects::Objects;
use crate::qp::FLUSH_INTERVAL;
use crate::qp::Route;

/// Queue keys with this bit are controlled (IBA §10.2.5): hosts themselves speak with them, to queue pair 1 of others. The
/// kernel gives them to holders of `CAP_NET_RAW`; here the RNIC keeps them.
const CONTROLLED_QKEY: u32 = 1 << 31;

impl Desk<'_> {
    pub(super) fn modify_qp(
        &mut self,
        id: u32,
        qpn: u32,
        mask: QpAttrMask,
        attr: &QpAttr,
    ) -> Result<Reply, Refused> {
        let qp = self.own_qp(qpn, id)?;
        if qp.stopped || qp.is_paused() {
            let message = "a queue pair that is stopped stays as it is until it goes on";
            return Err(Refused::new(libc::EBUSY, message));
        }
        let change = translate(self.device, mask, attr)?;
        // The way is resolved before anything changes.
        let path = change
            .av
            .map(|_| path::resolve(self.device, &attr.av))
            .transpose()?;
        if path.is_some_and(|path| path.destination.is_multicast()) {
            return Err(Refused::invalid(
                "a connection has one partner, not a multicast group",
            ));
        }

        let Self {
            objects,
            effects,
            changed_qps,
            now,
            ..
        } = self;
        let Objects { qps, shared, .. } = &mut **objects;
        let qp = qps.get_mut(qpn).expect("its owner was checked");
        let other_end = qp.other_end();
        let (transport, mut host) = qp.split(shared, effects, *now);
        transport
            .modify(&change, &mut host)
            .map_err(|error| Refused::invalid(error.to_string()))?;
        qp.flush_interval = FLUSH_INTERVAL;
        if change.state == Some(QpState::Reset) {
            qp.rings.reset();
            objects.set_route(qpn, None);
        }
        if let Some(path) = path {
            let end = |address| SocketAddr::new(address, UDP_PORT);
            // The program knows the place that its partner has left.
            let moved = objects
                .qps
                .get(qpn)
                .and_then(|qp| qp.transport.as_rc()?.peer())
                .map(|peer| peer.address)
                .filter(|address| address.is_ipv4() == path.source.is_ipv4());
            let destination = moved.unwrap_or(path.destination);
            let flow = Flow::new(end(path.source), end(destination)).expect("a path has one family");
            let route = Route {
                remote: destination,
                port: attr.av.sgid_index,
                peer: objects.peers.begin(destination),
                flow,
                traffic: path.traffic,
            };
            objects.set_route(qpn, Some(route));
        }
        objects.other_end_changed(qpn, other_end, *now);
        changed_qps.push(qpn);
        Ok(Reply::Done)
    }
}

fn translate(device: &Device, mask: QpAttrMask, attr: &QpAttr) -> Result<QpAttributes, Refused> {
    let unknown = mask.difference(QpAttrMask::all());
    let left_out = mask & (QpAttrMask::ALT_PATH | QpAttrMask::PATH_MIG_STATE | QpAttrMask::CAP);
    if !unknown.is_empty() || !left_out.is_empty() {
        let bits = (unknown | left_out).bits();
        return Err(Refused::new(
            libc::EOPNOTSUPP,
            format!("attributes {bits:#x} cannot be set on this device"),
        ));
    }
    let state = |wanted: verbatim_device::control::QpState| QpState::from_code(wanted as u32);
    let given = |flag| mask.contains(flag);
    let pick = |flag: QpAttrMask, value: u8| given(flag).then_some(value);

    let path_mtu = match pick(QpAttrMask::PATH_MTU, attr.path_mtu) {
        None => None,
        Some(code) if code > device.port.active_mtu => {
            return Err(Refused::invalid(format!(
                "path mtu code {code} is more than the port's active mtu {}",
                device.port.active_mtu
            )));
        }
        Some(code) => Some(Mtu::try_from(code).map_err(|error| Refused::invalid(error.to_string()))?),
    };
    let most = device.limits.max_rd_atomic;
    for (flag, name, value) in [
        (QpAttrMask::MAX_QP_RD_ATOMIC, "max_rd_atomic", attr.max_rd_atomic),
        (
            QpAttrMask::MAX_DEST_RD_ATOMIC,
            "max_dest_rd_atomic",
            attr.max_dest_rd_atomic,
        ),
    ] {
        if given(flag) && value > most {
            return Err(Refused::invalid(format!(
                "{name} is {value}, and at most {most} is possible"
            )));
        }
    }
    if given(QpAttrMask::QKEY) && attr.qkey & CONTROLLED_QKEY != 0 {
        return Err(Refused::new(
            libc::EPERM,
            format!(
                "queue key {:#x} is one of the RNIC's own; take one below 0x80000000",
                attr.qkey
            ),
        ));
    }
    if given(QpAttrMask::PORT) && attr.port_num != 1 {
        return Err(Refused::invalid(format!(
            "there is no port {}, only port 1",
            attr.port_num
        )));
    }
    if given(QpAttrMask::PKEY_INDEX) && attr.pkey_index != 0 {
        return Err(Refused::invalid(format!(
            "there is no pkey index {}, only index 0",
            attr.pkey_index
        )));
    }
    let av = given(QpAttrMask::AV)
        .then(|| address_vector(device, &attr.av))
        .transpose()?;
    let access_flags = match given(QpAttrMask::ACCESS_FLAGS) {
        true => Some(AccessFlags::from_bits(attr.access.bits()).ok_or_else(|| {
            Refused::new(
                libc::EOPNOTSUPP,
                format!("access flags {:#x} are not known", attr.access.bits()),
            )
        })?),
        false => None,
    };
    Ok(QpAttributes {
        state: given(QpAttrMask::STATE).then(|| state(attr.state)).flatten(),
        cur_state: given(QpAttrMask::CUR_STATE)
            .then(|| state(attr.cur_state))
            .flatten(),
        en_sqd_async_notify: given(QpAttrMask::EN_SQD_ASYNC_NOTIFY).then_some(attr.en_sqd_async_notify),
        access_flags,
        pkey_index: given(QpAttrMask::PKEY_INDEX).then_some(attr.pkey_index),
        port_num: pick(QpAttrMask::PORT, attr.port_num),
        qkey: given(QpAttrMask::QKEY).then_some(attr.qkey),
        av,
        path_mtu,
        timeout: pick(QpAttrMask::TIMEOUT, attr.timeout),
        retry_cnt: pick(QpAttrMask::RETRY_CNT, attr.retry_cnt),
        rnr_retry: pick(QpAttrMask::RNR_RETRY, attr.rnr_retry),
        rq_psn: given(QpAttrMask::RQ_PSN).then_some(Psn::new(attr.rq_psn)),
        max_rd_atomic: pick(QpAttrMask::MAX_QP_RD_ATOMIC, attr.max_rd_atomic),
        min_rnr_timer: pick(QpAttrMask::MIN_RNR_TIMER, attr.min_rnr_timer),
        sq_psn: given(QpAttrMask::SQ_PSN).then_some(Psn::new(attr.sq_psn)),
        max_dest_rd_atomic: pick(QpAttrMask::MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic),
        dest_qpn: given(QpAttrMask::DEST_QPN).then_some(Qpn::new(attr.dest_qpn)),
    })
}

fn address_vector(device: &Device, av: &AddressVector) -> Result<verbatim_roce::AddressVector, Refused> {
    path::check(device, av)?;
    Ok(verbatim_roce::AddressVector {
        dgid: av.dgid,
        sgid_index: av.sgid_index,
        flow_label: av.flow_label,
        hop_limit: av.hop_limit,
        traffic_class: av.traffic_class,
        sl: av.sl,
        port_num: av.port_num,
    })
}
