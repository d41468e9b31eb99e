//! Queue pairs: making, asking, destroying. Changing them: `modify.rs`.

use verbatim_device::control::{
    Access, AddressVector, AsyncEventType, MOST_QPS, QpAttr, QpCap, QpClass, QpState, QpType, Reply,
};
use verbatim_roce::{Counters, MAX_INLINE, MAX_SGE, Mtu, Qp, QpAttributes, Qpn};

use super::Desk;
use crate::confirming::Confirmation;
use crate::context::Context;
use crate::ends::QpEnds;
use crate::error::Refused;
use crate::qp::FLUSH_INTERVAL;
use crate::qp::{QueuePair, Rings, Stream, Turns};
use crate::timers::Alarm;

/// `Request::CreateQp`.
#[derive(Debug)]
pub(super) struct Wanted {
    pub pd: u32,
    pub send_cq: u32,
    pub recv_cq: u32,
    pub qp_type: QpType,
    pub cap: QpCap,
    pub srq: Option<u32>,
    pub qpn: Option<u32>,
}

impl Desk<'_> {
    pub(super) fn create_qp(
        &mut self,
        id: u32,
        wanted: Wanted,
        context: &mut Context,
    ) -> Result<Reply, Refused> {
        self.use_pd(wanted.pd, id)?;
        self.own_cq(wanted.send_cq, id)?;
        self.own_cq(wanted.recv_cq, id)?;
        if let Some(srq) = wanted.srq {
            self.own_srq(srq, id)?;
        }
        let limits = &self.device.limits;
        let cap = grant(&wanted.cap, limits.max_qp_wr, wanted.srq.is_some())?;
        context.check_qp(limits.per_program.max_qp)?;
        if !self.objects.qps.has_room()
            && let Some(oldest) = self.objects.named.give_up_oldest()
        {
            self.objects.qps.give_again(oldest);
        }
        let qps = &self.objects.qps;
        qps.check(wanted.qpn)
            .map_err(|why| Refused::number("queue pair", wanted.qpn, why))?;
        let ends = QpEnds::new(&context.arena, &cap)?;
        let offset = ends.offset();
        let slot = context.free_slot()?;
        let mtu = Mtu::try_from(self.device.port.active_mtu).expect("the port has an MTU of the table");
        let config = QueuePair::transport_config(limits, mtu, wanted.srq.is_some());
        let transport_type = match wanted.qp_type {
            QpType::Rc => verbatim_roce::QpType::Rc,
            QpType::Uc => verbatim_roce::QpType::Uc,
            QpType::Ud => verbatim_roce::QpType::Ud,
        };
        let make = |qpn: u32| QueuePair {
            context: id,
            slot,
            pd: wanted.pd,
            send_cq: wanted.send_cq,
            recv_cq: wanted.recv_cq,
            srq: wanted.srq,
            qp_type: wanted.qp_type,
            cap,
            config,
            transport: Qp::new(transport_type, Qpn::new(qpn), config),
            rings: Rings::new(ends, cap),
            route: None,
            groups: 0,
            parked: context.parked,
            stopped: false,
            confirmation: Confirmation::default(),
            serves_host: context.serves_host,
            doomed: false,
            class: QpClass::User,
            line: None,
            background: Turns::default(),
            touched: false,
            active: false,
            alarm: Alarm::default(),
            flush_interval: FLUSH_INTERVAL,
            stream: Stream::default(),
            counted: Counters::default(),
        };
        let qps = &mut self.objects.qps;
        let qpn = match wanted.qpn {
            Some(qpn) => qps.insert_at(qpn, 0, || make(qpn)).map(|()| qpn).ok(),
            None => qps.insert_with(|qpn, _| make(qpn)),
        };
        let qpn = qpn.expect("there was room");
        self.objects.named.take_back(qpn);
        self.objects.forwarding.remove(Qpn::new(qpn));
        context.assign_slot(slot, Some(qpn));
        self.use_pd(wanted.pd, id)?.users += 1;
        self.own_cq(wanted.send_cq, id)?.users += 1;
        self.own_cq(wanted.recv_cq, id)?.users += 1;
        if let Some(srq) = wanted.srq {
            self.own_srq(srq, id)?.users += 1;
        }
        Ok(Reply::Qp {
            qpn,
            cap,
            slot,
            offset,
        })
    }

    pub(super) fn query_qp(&mut self, id: u32, qpn: u32) -> Result<Reply, Refused> {
        let qp = self.own_qp(qpn, id)?;
        Ok(Reply::QpAttr {
            attr: attributes(&qp.transport.query()),
            cap: qp.cap,
            paused: qp.is_paused(),
        })
    }

    pub(super) fn set_qp_class(&mut self, id: u32, qpn: u32, class: QpClass) -> Result<Reply, Refused> {
        let qp = self.own_qp(qpn, id)?;
        if class == QpClass::Background && qp.qp_type != QpType::Rc {
            return Err(Refused::invalid(format!(
                "queue pair {qpn} is {:?}: only a reliable connection can be in the background",
                qp.qp_type
            )));
        }
        qp.class = class;
        // It changes lines in the next turn.
        self.changed_qps.push(qpn);
        Ok(Reply::Done)
    }

    pub(super) fn query_qps(&mut self, id: u32, qpns: &[u32]) -> Result<Reply, Refused> {
        let states = self.each_qp(qpns, |desk, qpn| {
            let query = desk.own_qp(qpn, id)?.transport.query();
            Ok(attributes(&query).state)
        });
        states.map(Reply::QpStates)
    }

    /// Something with each of them, whatever becomes of one; an error is the first one's.
    fn each_qp<Q: Copy, T>(
        &mut self,
        qps: &[Q],
        mut act: impl FnMut(&mut Self, Q) -> Result<T, Refused>,
    ) -> Result<Vec<T>, Refused> {
        at_most(qps.len())?;
        let results: Vec<_> = qps.iter().map(|qp| act(self, *qp)).collect();
        results.into_iter().collect()
    }

    pub(super) fn each_done<Q: Copy>(
        &mut self,
        qps: &[Q],
        act: impl FnMut(&mut Self, Q) -> Result<(), Refused>,
    ) -> Result<Reply, Refused> {
        self.each_qp(qps, act).map(|_| Reply::Done)
    }

    pub(super) fn destroy_qp(&mut self, id: u32, qpn: u32, context: &mut Context) -> Result<Reply, Refused> {
        let slot = self.own_qp(qpn, id)?.slot;
        self.objects.remove_qp(qpn, self.now);
        context.assign_slot(slot, None);
        if let Some(events) = &mut context.events {
            events.forget(|event| event.object == qpn && is_of_qp(event.event));
        }
        Ok(Reply::Done)
    }

    /// The queue pair, if the context has it.
    pub(super) fn own_qp(&mut self, qpn: u32, id: u32) -> Result<&mut QueuePair, Refused> {
        let known = self.objects.qps.get_mut(qpn).filter(|known| known.context == id);
        known.ok_or_else(|| Refused::no_such("queue pair", qpn))
    }
}

/// A request that names so many queue pairs is allowed.
pub(super) fn at_most(qps: usize) -> Result<(), Refused> {
    match qps <= MOST_QPS {
        true => Ok(()),
        false => Err(Refused::invalid(format!(
            "{qps} queue pairs are more than the {MOST_QPS} of one request"
        ))),
    }
}

/// Whether the object of such an event is a queue pair.
fn is_of_qp(event: AsyncEventType) -> bool {
    use AsyncEventType as E;
    matches!(
        event,
        E::QpFatal | E::QpReqErr | E::QpAccessErr | E::CommEst | E::SqDrained | E::QpLastWqeReached
    )
}

/// What is given for what is asked: that, and at least one of each, though nothing of an own receive queue beside a shared
/// one. Programs rely on a full queue being full.
fn grant(wanted: &QpCap, max_wr: u32, shared_recv: bool) -> Result<QpCap, Refused> {
    let wanted = match shared_recv {
        true => QpCap {
            max_recv_wr: 0,
            max_recv_sge: 0,
            ..*wanted
        },
        false => *wanted,
    };
    let limits = [
        ("max_send_wr", wanted.max_send_wr, max_wr),
        ("max_recv_wr", wanted.max_recv_wr, max_wr),
        ("max_send_sge", wanted.max_send_sge, MAX_SGE as u32),
        ("max_recv_sge", wanted.max_recv_sge, MAX_SGE as u32),
        ("max_inline_data", wanted.max_inline_data, MAX_INLINE as u32),
    ];
    for (name, value, most) in limits {
        if value > most {
            return Err(Refused::invalid(format!(
                "{name} is {value}, and at most {most} is possible"
            )));
        }
    }
    Ok(QpCap {
        max_send_wr: wanted.max_send_wr.max(1),
        max_recv_wr: if shared_recv { 0 } else { wanted.max_recv_wr.max(1) },
        max_send_sge: wanted.max_send_sge.max(1),
        max_recv_sge: if shared_recv {
            0
        } else {
            wanted.max_recv_sge.max(1)
        },
        max_inline_data: wanted.max_inline_data,
    })
}

/// The address vector in the terms of the contract.
pub(super) fn address_vector(av: &verbatim_roce::AddressVector) -> AddressVector {
    AddressVector {
        dgid: av.dgid,
        sgid_index: av.sgid_index,
        hop_limit: av.hop_limit,
        traffic_class: av.traffic_class,
        flow_label: av.flow_label,
        sl: av.sl,
        port_num: av.port_num,
    }
}

fn attributes(query: &QpAttributes) -> QpAttr {
    let state = |state: Option<verbatim_roce::QpState>| {
        state
            .and_then(|state| QpState::from_raw(state as u32))
            .unwrap_or(QpState::Reset)
    };
    let av = query.av.unwrap_or_default();
    QpAttr {
        state: state(query.state),
        cur_state: state(query.state),
        en_sqd_async_notify: query.en_sqd_async_notify.unwrap_or_default(),
        path_mtu: query.path_mtu.unwrap_or_default() as u8,
        qkey: query.qkey.unwrap_or_default(),
        rq_psn: query.rq_psn.unwrap_or_default().get(),
        sq_psn: query.sq_psn.unwrap_or_default().get(),
        dest_qpn: query.dest_qpn.unwrap_or_default().get(),
        access: Access::from_bits_truncate(query.access_flags.unwrap_or_default().bits()),
        av: address_vector(&av),
        pkey_index: query.pkey_index.unwrap_or_default(),
        port_num: query.port_num.unwrap_or_default(),
        max_rd_atomic: query.max_rd_atomic.unwrap_or_default(),
        max_dest_rd_atomic: query.max_dest_rd_atomic.unwrap_or_default(),
        min_rnr_timer: query.min_rnr_timer.unwrap_or_default(),
        timeout: query.timeout.unwrap_or_default(),
        retry_cnt: query.retry_cnt.unwrap_or_default(),
        rnr_retry: query.rnr_retry.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_is_at_least_what_was_asked_for_and_lies_the_same() {
        let wanted = QpCap {
            max_send_wr: 100,
            max_recv_wr: 0,
            max_send_sge: 0,
            max_recv_sge: 3,
            max_inline_data: 200,
        };
        let given = grant(&wanted, 32_768, false).unwrap();
        assert_eq!((given.max_send_wr, given.max_recv_wr), (100, 1));
        assert_eq!(
            (given.max_send_sge, given.max_recv_sge, given.max_inline_data),
            (1, 3, 200)
        );
        assert_eq!(
            grant(&given, 32_768, false).unwrap(),
            given,
            "asking for it again gives the same"
        );
        let shared = grant(&wanted, 32_768, true).unwrap();
        assert_eq!((shared.max_recv_wr, shared.max_recv_sge), (0, 0));
        assert_eq!(grant(&shared, 32_768, true).unwrap(), shared);
        let too_many = QpCap {
            max_send_wr: 32_769,
            ..wanted
        };
        assert_eq!(grant(&too_many, 32_768, false).unwrap_err().errno, libc::EINVAL);
    }
}
