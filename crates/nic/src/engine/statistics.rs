//! The counters for people: `Request::QueryStatistics`; and whose queue pairs are, for the agent: `Request::QueryOwners`.

use verbatim_device::control::{MAX_OWNERS, QpClass, QpOwner, QpState, QpStatistics, Reply};
use verbatim_roce::Counters;
use verbatim_seqpacket::Credentials;

use super::Nic;
use crate::device::gid;
use crate::error::Refused;
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
        let mut device = device_counters(
            &self.counters,
            &self.objects.counted,
            &self.objects.shared.migration,
        );
        device.push(("starved".to_owned(), self.core.times()));
        let confirming = self.objects.confirming.counters();
        device.extend(confirming.map(|(name, count)| (name.to_owned(), count)));
        let kept_back = self.objects.named.kept_back() as u64;
        device.push(("numbers_kept_back".to_owned(), kept_back));
        Reply::Statistics {
            device,
            qps,
            next: visible.next().map(|(qpn, _)| qpn),
        }
    }

    /// Whose queue pairs these are.
    pub(super) fn query_owners(&self, qpns: &[u32]) -> Result<Reply, Refused> {
        if qpns.len() > MAX_OWNERS {
            return Err(Refused::invalid(format!(
                "one question names at most {MAX_OWNERS} queue pairs"
            )));
        }
        let owner = |qpn: &u32| match self.objects.qps.get(*qpn) {
            None => QpOwner::None,
            Some(qp) => {
                let context = self.clients.context(qp.context);
                let pid = context.and_then(|context| context.owner.pid());
                pid.map_or(QpOwner::Unknown, QpOwner::Process)
            }
        };
        Ok(Reply::Owners(qpns.iter().map(owner).collect()))
    }

    fn qp_statistics(&self, qpn: u32, qp: &QueuePair) -> QpStatistics {
        let context = self.clients.context(qp.context);
        let query = qp.transport.query();
        let dest_qpn = query.dest_qpn.map_or(0, |qpn| qpn.get());
        let counters: &Counters = qp.transport.counters();
        let migration = qp.transport.as_rc().map(|rc| *rc.migration_counters());
        let turns: &[_] = match qp.class {
            QpClass::User => &[],
            QpClass::Background => &[
                ("background_turns", qp.background.all),
                ("background_starved_turns", qp.background.starved),
            ],
        };
        let migration: Vec<_> = migration
            .unwrap_or_default()
            .iter()
            .chain(turns.iter().copied())
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        QpStatistics {
            qpn,
            context: context.map_or_else(String::new, |context| context.name.clone()),
            pid: context.map_or(0, |context| context.credentials.pid),
            qp_type: qp.qp_type,
            state: QpState::from_raw(qp.transport.state() as u32).unwrap_or(QpState::Reset),
            remote: qp.route.map(|route| (gid(route.remote), dest_qpn)),
            counters: qp_counters(counters).into_iter().chain(migration).collect(),
        }
    }
}
