//! The end of a turn: errors that concern several queue pairs, timers, counters.

use std::time::Duration;

use verbatim_device::control::{AsyncEventType, QpClass};
use verbatim_roce::{Counters, QpAttributes, QpState, Time};

use super::Nic;
use crate::objects::Objects;
use crate::qp::{Effects, FLUSH_INTERVAL, QueuePair, Turn};
use crate::stats::NicCounters;

/// The longest time after which a queue pair in ERR is looked at again ([`FLUSH_INTERVAL`]).
const LONGEST_FLUSH_INTERVAL: Duration = Duration::from_millis(200);

impl Nic {
    /// Errors that take more than one queue pair with them.
    pub(super) fn apply_effects(&mut self, now: Time) {
        while !self.effects.is_empty() {
            let events = std::mem::take(&mut self.effects.events);
            let Effects {
                overrun_cqs,
                truncated_contexts,
                broken_qps,
                moved_peers,
                ..
            } = std::mem::take(&mut self.effects);
            self.effects.events = events;
            for (qpn, from) in moved_peers {
                self.objects.share_new_way(qpn, from);
            }
            self.counters.cq_overruns += overrun_cqs.len() as u64;
            self.counters.bad_indices += broken_qps.len() as u64;
            let mut doomed = broken_qps;
            let related = |qp: &QueuePair| {
                [qp.send_cq, qp.recv_cq].iter().any(|cq| overrun_cqs.contains(cq))
                    || truncated_contexts.contains(&qp.context)
            };
            if !overrun_cqs.is_empty() || !truncated_contexts.is_empty() {
                doomed.extend(
                    self.objects
                        .qps
                        .iter()
                        .filter(|(_, qp)| related(qp))
                        .map(|(qpn, _)| qpn),
                );
            }
            for cq in &overrun_cqs {
                if let Some(queue) = self.objects.shared.cqs.get(*cq) {
                    self.effects.tell(queue.context, AsyncEventType::CqErr, *cq);
                }
            }
            for context in &truncated_contexts {
                let name = self
                    .clients
                    .context(*context)
                    .map_or("", |context| context.name.as_str());
                tracing::warn!(
                    name,
                    "a file of registered memory was truncated: its queue pairs go to the error state"
                );
                self.counters.truncated_files += 1;
            }
            let to_error = QpAttributes {
                state: Some(QpState::Err),
                ..QpAttributes::default()
            };
            for qpn in doomed {
                let Self {
                    objects,
                    effects,
                    touched,
                    ..
                } = self;
                let Objects { qps, shared, .. } = objects;
                let Some(qp) = qps.get_mut(qpn) else {
                    continue;
                };
                if qp.stopped || qp.is_paused() {
                    // Nothing of it may change before it goes on.
                    qp.doomed = true;
                    continue;
                }
                touched.add(qpn, qp);
                let context = qp.context;
                let (transport, mut host) = qp.split(shared, effects, now);
                if transport.state() != QpState::Err {
                    transport
                        .modify(&to_error, &mut host)
                        .expect("there is a way to ERR from every state");
                    effects.tell(context, AsyncEventType::QpFatal, qpn);
                }
            }
        }
    }

    /// Brings timers and counters up to date, for those that were touched.
    pub(super) fn settle(&mut self, now: Time) {
        for qpn in self.touched.0.drain(..) {
            let Some(qp) = self.objects.qps.get_mut(qpn) else {
                continue;
            };
            qp.touched = false;
            let deadline = match qp.transport.state() {
                _ if qp.stopped || qp.is_awaiting() => None,
                // Time is looked at when it has its turn.
                _ if qp.line == Some(QpClass::Background) => None,
                QpState::Err => Some(now + qp.flush_interval),
                _ => qp.transport.next_timeout(),
            };
            self.timers.set(qpn, &mut qp.alarm, deadline);
            if let Some(route) = &qp.route {
                // What waits in the background takes no part of the users' windows.
                let sends = qp.line == Some(QpClass::User) || qp.transport.in_flight_bytes() > 0;
                let active = !qp.stopped && sends;
                if active != qp.active {
                    qp.active = active;
                    self.objects.peers.set_active(route.peer, active);
                }
            }
            let current = *qp.transport.counters();
            qp.flush_interval = match current.resp_cqe_flush_error == qp.counted.resp_cqe_flush_error {
                true => (qp.flush_interval * 2).min(LONGEST_FLUSH_INTERVAL),
                false => FLUSH_INTERVAL,
            };
            let turn = Turn {
                sent: current.sent_requests != qp.counted.sent_requests,
                heard: current.rcvd_requests != qp.counted.rcvd_requests,
                under_way: qp.rings.ends.send.under_way(),
            };
            if let Some(context) = self.clients.context_mut(qp.context) {
                context.gathers_until = qp.stream.follow(now, turn);
            }
            count(&mut self.counters, &current, &qp.counted);
            crate::names::add(&mut self.objects.counted, &current, &qp.counted);
            qp.counted = current;
        }
    }
}

/// Adds what a queue pair has counted since `before`.
fn count(total: &mut NicCounters, current: &Counters, before: &Counters) {
    macro_rules! add {
        ($($to:ident += $($from:ident)|+;)*) => {
            $(total.$to += 0 $(+ (current.$from - before.$from))+;)*
        };
    }
    add! {
        tx_payload_bytes += sent_request_bytes | sent_response_bytes;
        rx_payload_bytes += rcvd_request_bytes | rcvd_response_bytes;
        retransmitted_packets += retransmitted_requests;
        retry_exceeded += retry_exceeded_err;
        ack_timeouts += local_ack_timeout_err;
        rx_nak_sequence += packet_seq_err;
        rx_nak_access += req_remote_access_errors;
        rx_nak_invalid += req_remote_invalid_request;
        rx_rnr += rcvd_rnr_nak;
        tx_rnr += sent_rnr_nak;
        tx_nak_access += resp_remote_access_errors;
        tx_nak_invalid += resp_remote_invalid_request;
        rx_out_of_order += out_of_sequence;
        rx_duplicates += duplicate_request;
        rx_dropped += dropped_packets;
        rx_wrong_pkey += bad_pkey;
        rx_wrong_qkey += bad_qkey;
        rx_wrong_length += resp_bad_length;
        rx_no_receive += out_of_buffer;
    }
}
