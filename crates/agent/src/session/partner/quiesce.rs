//! Bringing connections to a stop at a partner's host: wait-before-stop (MigrRDMA §3.4), and past its limit the stop in the
//! middle of requests.

use std::time::Duration;

use verbatim_channel::QpProgress;
use verbatim_session::Phase;

use super::Partner;
use crate::faults::Point;
use crate::proto::{Count, Counts, DrainReply, DrainRequest, SettleReply};
use crate::session::members::Settled;

impl Partner {
    /// Suspends the connections; says how many messages each has sent. Those that pause go on.
    pub async fn suspend(&mut self) -> anyhow::Result<Counts> {
        self.begin(Phase::Quiesce, "WaitBeforeStop", Point::PartnerSuspend)
            .await?;
        if self.pauses {
            self.quiesced().await?;
            return Ok(Counts::default());
        }
        let sent = self.members.suspend().await?.into_iter();
        let counts = sent.map(|(connection, messages)| Count { connection, messages });
        Ok(Counts {
            counts: counts.collect(),
            marks: match self.marks {
                true => self.members.allow_markers().await?,
                false => Vec::new(),
            },
        })
    }

    /// Waits until nothing is in flight, or the limit has come: which connections are not drained then.
    pub async fn drain(&mut self, request: DrainRequest) -> anyhow::Result<DrainReply> {
        self.begin(Phase::Quiesce, "Drain", Point::PartnerDrain).await?;
        let expected = request.expected.iter();
        let expected: Vec<_> = expected.map(|count| (count.connection, count.messages)).collect();
        let limit = Duration::from_millis(request.timeout_ms.into());
        if !request.marks.is_empty() {
            self.members.mark(&request.marks).await?;
        }
        let drained = self.members.drain(&expected, limit, request.sends_only).await;
        if !request.sends_only {
            // Before the source hears of it, and also if one of several processes is not: the others are.
            self.quiesced().await?;
        }
        let undrained = drained?;
        self.begin(Phase::Quiesce, "Drained", Point::PartnerDrained)
            .await?;
        Ok(DrainReply {
            undrained: undrained.connections.into_iter().collect(),
            left: undrained.left,
        })
    }

    /// Stops connections in the middle of their requests; says where their ends here stand.
    pub async fn stop(&self, connections: &[u32]) -> anyhow::Result<Vec<(u32, QpProgress)>> {
        self.begin(Phase::Quiesce, "Stop", Point::PartnerStop).await?;
        self.members.stop(connections).await
    }

    /// Finds out what was executed, from where the other ends stand.
    pub async fn settle(&self, peers: &[(u32, QpProgress)]) -> anyhow::Result<SettleReply> {
        self.begin(Phase::Quiesce, "Settle", Point::PartnerSettle).await?;
        let Settled { replayed, completed } = self.members.settle(peers).await?;
        Ok(SettleReply { replayed, completed })
    }
}
