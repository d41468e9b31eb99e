//! Past the limit of wait-before-stop: connections that are not drained are stopped in the middle of their requests at both
//! ends, and each end finds out from where the other one stands which of its requests were executed. What was not is posted
//! again after the commit. Where that is not certain the migration is rolled back, and the connections go on.

use std::collections::{BTreeSet, HashMap};

use anyhow::{Context, bail};
use futures_util::future::try_join_all;

use super::connections::Connected;
use super::plan::{self, End};
use super::{Source, participants::Participant};
use crate::faults::Point;
use crate::session::members::{Settled, Undrained};

impl Source {
    /// Stops the connections that are not drained, and finds out what becomes of their requests.
    pub(super) async fn settle(&mut self, undrained: Undrained) -> anyhow::Result<()> {
        let limit = self.request.drain_timeout;
        let left = undrained.left.join("; ");
        let mut ends = undrained.connections.iter();
        if ends.any(|index| self.connections[*index as usize].connected != Connected::Both) {
            bail!("not drained after {limit:?}, and not all of it is connected at both ends: {left}");
        }
        let settled = self.stop_and_settle(&undrained.connections).await;
        self.settled = settled.with_context(|| format!("not drained after {limit:?}: {left}"))?;
        let Settled { replayed, completed } = self.settled;
        self.note(&format!(
            "not drained after {limit:?}: {left}; {replayed} requests that were not executed will be posted again, and \
             {completed} that were only completed"
        ));
        Ok(())
    }

    async fn stop_and_settle(&self, undrained: &BTreeSet<u32>) -> anyhow::Result<Settled> {
        self.pass(Point::SourceStop).await?;
        let stopped = plan::stopped(&self.connections, undrained);
        let ends = |participant: &Participant| {
            let ends = participant.ends().into_iter();
            let stopped = ends.filter(|end| stopped.contains(&end.connection()));
            stopped.collect::<Vec<End>>()
        };
        let progress = self.participants().into_iter().map(|participant| {
            let connections = ends(&participant).into_iter().map(End::connection).collect();
            participant.stop(connections)
        });
        let progress: HashMap<_, _> = try_join_all(progress).await?.into_iter().flatten().collect();
        let settled = self.participants().into_iter().map(|participant| {
            let ends = ends(&participant);
            let peers = plan::said_at_the_other_end(&self.connections, ends, &progress);
            async move { participant.settle(peers?).await }
        });
        Ok(try_join_all(settled).await?.into_iter().sum())
    }
}
