//! What follows from the decision, and what is left to do after it.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::bail;
use tokio::task::JoinHandle;
use verbatim_channel::Endpoint;
use verbatim_session::decision::Outcome;
use verbatim_session::decision::source::Event;

use super::Source;
use crate::faults::Point;
use crate::forwarding::{self, Forward, Moved};
use crate::session::behind;

impl Source {
    /// The decision, and what must be known at once when the instance is the destination's.
    pub(super) async fn commit(&mut self) -> anyhow::Result<()> {
        if self.watches.values().any(JoinHandle::is_finished) {
            // A host that lost sight of this one has undone its part, or will.
            bail!("another host lost this one, and with it the session; try again");
        }
        if self.pauses() {
            self.forward_resumes().await?;
        }
        self.send_messages_on().await?;
        self.decision().await?;
        self.control.committed();
        // There is no way back any more: nothing that fails from here on may look like one.
        if let Err(error) = self.pass(Point::SourceCommitted).await {
            tracing::warn!("{error:#}");
        }
        self.timeline.running();
        self.instance.moved(&self.request.destination);
        // Connections that ask for the instance here are sent on.
        self.agent.forwarding.insert(self.forwarding());
        self.hold = None;
        Ok(())
    }

    /// Where the instance's queue pairs are found if it moves: by their numbers here.
    pub(super) fn forwarding(&self) -> Vec<(u32, Forward)> {
        let Some(destination) = self.agent.peers.directory().host(&self.request.destination) else {
            return Vec::new();
        };
        let gid = destination.gid();
        let mut entries = Vec::new();
        for process in &self.processes {
            let pid = process.guest.pid;
            let keys = self.keys.iter().find(|(owner, _)| *owner == pid);
            let keys = keys.map(|(_, keys)| keys.clone()).unwrap_or_default();
            for qp in process.road_map.contexts.iter().flat_map(|context| &context.qps) {
                if let Some(new) = self.new_qp(pid, qp.qpn) {
                    let endpoint = Endpoint {
                        // Of one that was made again, that of its RNIC.
                        gid: new.gid.as_slice().try_into().unwrap_or(gid),
                        qpn: new.physical_qpn,
                    };
                    let keys = keys.clone();
                    entries.push((qp.physical_qpn, Forward { endpoint, keys }));
                }
            }
        }
        entries
    }

    /// Entries on other hosts that led to the instance here lead to where it is now, so that who asks for it asks once,
    /// however often it has moved.
    async fn retarget(&self) {
        let gid = self.agent.gid();
        let left = self.forwarding();
        let moved = left.into_iter().map(|(qpn, forward)| Moved {
            from: Endpoint { gid, qpn },
            to: forward.endpoint,
            keys: Some(forward.keys),
        });
        let moved: Vec<_> = moved.collect();
        let visited = self.record().visited.iter().map(String::as_str);
        if forwarding::tell(&self.agent, visited, &moved).await {
            // Nothing leads here but what was told a moment ago: older numbers of this host are not asked for.
            let keep = self.processes.iter().flat_map(|process| {
                let pid = process.guest.pid;
                let qps = process.road_map.contexts.iter().flat_map(|context| &context.qps);
                qps.map(move |qp| ((pid, qp.qpn), [qp.qpn, qp.physical_qpn]))
            });
            let keep: HashMap<_, _> = keep.collect();
            let by_place = self.new_qps.values().filter_map(|new| {
                let keep = keep.get(&(new.pid, new.qpn))?;
                let gid = self
                    .agent
                    .peers
                    .directory()
                    .host(&self.request.destination)?
                    .gid();
                let qpn = new.physical_qpn;
                Some((Endpoint { gid, qpn }, *keep))
            });
            self.agent.forwarding.prune(&by_place.collect());
        }
    }

    /// Removes what is left here: the frozen tasks, the old contexts, the place.
    pub(super) async fn reclaim(&mut self) {
        if let Err(error) = self.pass(Point::SourceReclaim).await {
            tracing::warn!("{error:#}");
        }
        self.retarget().await;
        self.leave_volumes().await;
        // Closing the connections destroys the contexts.
        if let Some(keeper) = self.keeper.take() {
            keeper.end();
        }
        self.quiesced.clear();
        if let Some(dumped) = self.dumped.take()
            && let Err(error) = dumped.commit().await
        {
            tracing::warn!(error = format!("{error:#}"), "removing the moved container");
        }
        let instance = Arc::clone(&self.instance);
        let _ = tokio::task::spawn_blocking(move || instance.home.remove()).await;
        behind::over(&self.agent, self.session, Outcome::Committed);
        // Before another session may bring the instance back under its name.
        self.decide(Event::Cleared).await;
        self.reservation = None;
    }
}
