//! The counters for people: `Request::QueryStatistics`.

use verbatim_device::control::{QpState, QpStatistics, Reply};
use verbatim_roce::Counters;
use verbatim_seqpacket::Credentials;

use super::Nic;
use crate::device::gid;
use crate::names::{device_counters, qp_counters};
use crate::qp::QueuePair;

/// Queue pairs in one answer: a message has room for about twice as many.
const QPS_PER_ANSWER: usize = 48;

impl Nic {
    /// Counters of the device, and of the queue pairs from a number on that the asker may see.
    pub(super) fn query_statistics(&self, from_qpn: u32, asker: Credentials) -> Reply {
        let mut visible = self.objects.qps.iter().filter(|(qpn, qp)| {
            *qpn >= from_qpn
                && (asker.uid == 0
                    || self
                        .clients
                        .context(qp.context)
                        .is_some_and(|context| context.credentials.uid == asker.uid))
        });
        let qps = visible
            .by_ref()
            .take(QPS_PER_ANSWER)
            .map(|(qpn, qp)| self.qp_statistics(qpn, qp))
            .collect();
        Reply::Statistics {
            device: device_counters(&self.counters, &self.objects.counted),
            qps,
            next: visible.next().map(|(qpn, _)| qpn),
        }
    }

    fn qp_statistics(&self, qpn: u32, qp: &QueuePair) -> QpStatistics {
        let context = self.clients.context(qp.context);
        let query = qp.transport.query();
        let dest_qpn = query.dest_qpn.map_or(0, |qpn| qpn.get());
        let counters: &Counters = qp.transport.counters();
        QpStatistics {
            qpn,
            context: context.map_or_else(String::new, |context| context.name.clone()),
            pid: context.map_or(0, |context| context.credentials.pid),
            qp_type: qp.qp_type,
            state: QpState::from_raw(qp.transport.state() as u32).unwrap_or(QpState::Reset),
            remote: qp.route.map(|route| (gid(route.remote), dest_qpn)),
            counters: qp_counters(counters),
        }
    }
}
