//! Wait-before-stop (MigrRDMA §3.4) at a partner's host.

use std::time::Duration;

use anyhow::Context;
use futures_util::future::join_all;
use verbatim_channel::{Answer, Order, QpCount, Scope};

use super::{NOT_ASKED_FOR, Partner};
use crate::agent::Changed;
use crate::faults::Point;
use crate::guests::unexpected;
use crate::proto::{Count, DrainReply, DrainRequest};
use crate::session::ORDER_TIMEOUT;
use verbatim_session::Phase;

impl Partner {
    /// Suspends the connections; says how many messages each has sent. Those that pause go on.
    pub async fn suspend(&mut self) -> anyhow::Result<Vec<Count>> {
        self.begin(Phase::Quiesce, "WaitBeforeStop", Point::PartnerSuspend)
            .await?;
        if self.pauses {
            self.quiesced().await?;
            return Ok(Vec::new());
        }
        let session = self.session;
        let agent = &self.agent;
        let suspended = self.members.iter().map(|member| async move {
            let order = Order::Suspend {
                session,
                scope: Scope::Qps(member.all_qpns()),
            };
            let (connections, unconnected) = (&member.kept.connections, &member.kept.unconnected);
            let is_unconnected = |qpn| unconnected.iter().any(|(_, known)| *known == qpn);
            match member.order(agent, "suspending", order).await? {
                Answer::Suspended { sent, .. }
                    if sent.len() == connections.len()
                        && !sent.iter().any(|count| is_unconnected(count.qpn)) =>
                {
                    let connections = member.by_qpn();
                    let counts = sent.iter().map(|count| {
                        Ok(Count {
                            connection: *connections.get(&count.qpn).context(NOT_ASKED_FOR)?,
                            messages: count.messages,
                        })
                    });
                    counts.collect::<anyhow::Result<Vec<_>>>()
                }
                Answer::Suspended { .. } => Err(Changed { pid: member.kept.pid }.into()),
                other => Err(unexpected(&other, "Suspended")),
            }
        });
        let counts: anyhow::Result<Vec<_>> = join_all(suspended).await.into_iter().collect();
        Ok(counts?.concat())
    }

    /// Waits until nothing is in flight, or the limit has come: which connections are not drained then.
    pub async fn drain(&mut self, request: DrainRequest) -> anyhow::Result<DrainReply> {
        self.begin(Phase::Quiesce, "Drain", Point::PartnerDrain).await?;
        let session = self.session;
        let agent = &self.agent;
        let drained = self.members.iter().map(|member| {
            let qpns = member.by_connection();
            let expected = request
                .expected
                .iter()
                .filter_map(|count| {
                    Some(QpCount {
                        qpn: *qpns.get(&count.connection)?,
                        messages: count.messages,
                    })
                })
                .collect();
            let (timeout_ms, sends_only) = (request.timeout_ms, request.sends_only);
            async move {
                let order = Order::Drain {
                    session,
                    expected,
                    timeout_ms,
                    sends_only,
                };
                let limit = Duration::from_millis(timeout_ms.into()) + ORDER_TIMEOUT;
                let guest = member.guest(agent).await.context("a process has ended")?;
                let answer = tokio::time::timeout(limit, guest.order(order, Vec::new()));
                match answer
                    .await
                    .context("waiting for what is in flight took too long")??
                    .0
                {
                    Answer::Drained => Ok(DrainReply::default()),
                    Answer::Undrained { qpns, left } => {
                        let connections = member.by_qpn();
                        let undrained = qpns.iter().map(|qpn| connections.get(qpn).copied());
                        let undrained: Option<Vec<_>> = undrained.collect();
                        anyhow::Ok(DrainReply {
                            undrained: undrained.context(NOT_ASKED_FOR)?,
                            left: vec![left],
                        })
                    }
                    other => Err(unexpected(&other, "Drained")),
                }
            }
        });
        let drained = join_all(drained).await;
        if !request.sends_only {
            // Before the source hears of it, and also if one of several processes is not: the others are.
            self.quiesced().await?;
        }
        let mut reply = DrainReply::default();
        for drained in drained {
            let DrainReply { undrained, left } = drained?;
            reply.undrained.extend(undrained);
            reply.left.extend(left);
        }
        self.begin(Phase::Quiesce, "Drained", Point::PartnerDrained)
            .await?;
        Ok(reply)
    }
}
