//! Connections that are stopped in the middle of their requests, at a partner's host.

use futures_util::future::join_all;
use verbatim_channel::{Answer, Order, QpProgress};

use super::Partner;
use crate::faults::Point;
use crate::guests::unexpected;
use crate::proto::SettleReply;
use verbatim_session::Phase;

impl Partner {
    /// Stops connections in the middle of their requests; says where their ends here stand.
    pub async fn stop(&self, connections: &[u32]) -> anyhow::Result<Vec<(u32, QpProgress)>> {
        self.begin(Phase::Quiesce, "Stop", Point::PartnerStop).await?;
        let stopped = self.members.iter().map(|member| async move {
            let qpns = member.by_connection();
            let named = connections.iter();
            let ends: Vec<_> = named
                .filter_map(|index| Some((*index, *qpns.get(index)?)))
                .collect();
            if ends.is_empty() {
                return Ok(Vec::new());
            }
            let order = Order::Stop {
                session: self.session,
                qpns: ends.iter().map(|(_, qpn)| *qpn).collect(),
            };
            match member.order(&self.agent, "stopping connections", order).await? {
                Answer::Stopped(progress) => {
                    let numbers = ends.into_iter().map(|(index, _)| index);
                    anyhow::Ok(numbers.zip(progress).collect())
                }
                other => Err(unexpected(&other, "Stopped")),
            }
        });
        let stopped: anyhow::Result<Vec<_>> = join_all(stopped).await.into_iter().collect();
        Ok(stopped?.concat())
    }

    /// Finds out what was executed, from where the other ends stand.
    pub async fn settle(&self, peers: &[(u32, QpProgress)]) -> anyhow::Result<SettleReply> {
        self.begin(Phase::Quiesce, "Settle", Point::PartnerSettle).await?;
        let settled = self.members.iter().map(|member| async move {
            let qpns = member.by_connection();
            let of_member = peers.iter().filter_map(|(connection, progress)| {
                Some(QpProgress {
                    qpn: *qpns.get(connection)?,
                    ..progress.clone()
                })
            });
            let peers: Vec<_> = of_member.collect();
            if peers.is_empty() {
                return Ok(SettleReply::default());
            }
            let order = Order::Settle {
                session: self.session,
                peers,
            };
            match member.order(&self.agent, "settling connections", order).await? {
                Answer::Settled { replayed, completed } => Ok(SettleReply { replayed, completed }),
                other => Err(unexpected(&other, "Settled")),
            }
        });
        let mut sum = SettleReply::default();
        for settled in join_all(settled).await {
            let SettleReply { replayed, completed } = settled?;
            sum.replayed += replayed;
            sum.completed += completed;
        }
        Ok(sum)
    }
}
