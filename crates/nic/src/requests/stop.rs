//! Stopping a connection in the middle of its requests, and letting it go on.

use verbatim_device::control::{AsyncEventType, OutstandingRequest, QpPosition, Reply};
use verbatim_roce::{Position, QpAttributes, QpState};

use super::Desk;
use crate::error::Refused;
use crate::objects::Objects;

impl Desk<'_> {
    pub(super) fn stop_qp(&mut self, id: u32, qpn: u32) -> Result<Reply, Refused> {
        if self.own_qp(qpn, id)?.is_paused() {
            return Err(Refused::new(
                libc::EBUSY,
                "the queue pair is paused: let it go on first",
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
        let (transport, mut host) = qp.split(shared, effects, *now);
        let position = transport
            .stop(&mut host)
            .ok_or_else(|| Refused::invalid("only a reliable connection can be stopped"))?;
        let state = transport.state();
        // In ERR nothing is sent or taken in, but requests are still flushed.
        qp.stopped = state != QpState::Err;
        changed_qps.push(qpn);
        Ok(Reply::QpStopped(told(state, position)))
    }

    pub(super) fn restart_qp(&mut self, id: u32, qpn: u32) -> Result<Reply, Refused> {
        self.own_qp(qpn, id)?;
        let Self {
            objects,
            effects,
            changed_qps,
            now,
            ..
        } = self;
        let Objects { qps, shared, .. } = &mut **objects;
        let qp = qps.get_mut(qpn).expect("its owner was checked");
        if !std::mem::take(&mut qp.stopped) {
            return Ok(Reply::Done);
        }
        let doomed = std::mem::take(&mut qp.doomed);
        let (transport, mut host) = qp.split(shared, effects, *now);
        transport.restart(*now);
        if doomed {
            let to_error = QpAttributes {
                state: Some(QpState::Err),
                ..QpAttributes::default()
            };
            transport
                .modify(&to_error, &mut host)
                .expect("there is a way to ERR from every state");
            effects.tell(id, AsyncEventType::QpFatal, qpn);
        }
        changed_qps.push(qpn);
        Ok(Reply::Done)
    }
}

fn told(state: QpState, position: Position) -> QpPosition {
    let Position {
        acknowledged,
        sent,
        requests,
        expected,
        atomics,
        receive,
    } = position;
    let requests = requests.into_iter().map(|request| OutstandingRequest {
        wr_id: request.wr_id,
        first_psn: request.first.get(),
        packets: request.packets,
        executed: request.executed,
    });
    let state = verbatim_device::control::QpState::from_raw(state as u32);
    QpPosition {
        state: state.expect("both have the numbers of the verbs"),
        acknowledged_psn: acknowledged.get(),
        sent_psn: sent.get(),
        requests: requests.collect(),
        expected_psn: expected.get(),
        atomics: atomics
            .into_iter()
            .map(|(psn, value)| (psn.get(), value))
            .collect(),
        receive,
    }
}
