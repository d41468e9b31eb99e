//! After the commit: the standby queue pairs are put in place, and requests reach the RNIC.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::bail;
use futures_util::future::join_all;
use verbatim_channel::{Answer, Endpoint, Order};
use verbatim_session::Phase;
use verbatim_session::decision::partner::Event;

use super::{Partner, forget};
use crate::allocator;
use crate::faults::Point;
use crate::forwarding::{self, Forward, Moved};
use crate::guests::unexpected;
use crate::session::Resumed;
use crate::standby;

impl Partner {
    /// Puts the standby queue pairs in place; says how many RECVs were posted again. What is done is not done twice.
    pub(super) async fn put_in_place(&mut self) -> anyhow::Result<u64> {
        self.begin(Phase::Switch, "RestoreRDMA", Point::PartnerSwitch)
            .await?;
        if self.pauses {
            return self.relocate().await;
        }
        if !self.awaited.is_empty() {
            bail!(
                "{} connections wait for their new other ends, which the destination has not told yet",
                self.awaited.len()
            );
        }
        let session = self.session;
        let agent = &self.agent;
        let late = self.late.iter().filter_map(|connection| {
            let (old, new) = *self.numbers.get(connection)?;
            let endpoint = Endpoint {
                gid: agent.gid(),
                qpn: new,
            };
            // Its keys are what they were.
            let keys = Vec::new();
            (old != new).then_some((old, Forward { endpoint, keys }))
        });
        agent.forwarding.insert(late);
        let switched = self.members.all.iter().map(|member| {
            let connections = member.kept.connections.iter();
            let tables = connections
                .filter_map(|(connection, qpn)| Some((*qpn, *self.tables.get(connection)?)))
                .collect();
            let order = Order::Switch {
                session,
                key_tables: self.key_tables.clone(),
                tables,
            };
            async move {
                match member.order_if_alive(agent, "switching", order).await? {
                    Some(Answer::Claimed { replayed_receives }) => Ok(replayed_receives),
                    Some(other) => Err(unexpected(&other, "Claimed")),
                    None => Ok(0),
                }
            }
        });
        join_all(switched).await.into_iter().sum()
    }

    /// Lets the requests reach the RNIC.
    pub async fn resume(&mut self) -> anyhow::Result<Resumed> {
        self.begin(Phase::Resume, "Replay", Point::PartnerResume).await?;
        if self.resumed {
            return Ok(Resumed::default());
        }
        let session = self.session;
        // Of those that paused, nothing was suspended.
        let mut resumed = self.members.resume().await?;
        // A program may have ended of it before it could say so.
        let died = self.nic.take().is_some_and(|nic| !standby::is_open(&nic));
        resumed.lost_rnic |= died && !self.members.all.is_empty();
        self.resumed = true;
        self.decide(Event::Finished).await;
        forget(&self.agent, session);
        self.tell_numbers();
        Ok(resumed)
    }

    /// Hosts where the partners were before learn the new numbers of their queue pairs; then they may be moved.
    fn tell_numbers(&self) {
        let gid = self.agent.gid();
        let new = self.numbers.values().filter(|(old, new)| old != new);
        let moved = new.map(|(old, new)| Moved {
            from: Endpoint { gid, qpn: *old },
            to: Endpoint { gid, qpn: *new },
            keys: None,
        });
        let moved: Vec<_> = moved.collect();
        let instances = self
            .members
            .all
            .iter()
            .filter_map(|member| member.kept.instance.as_deref());
        let instances = instances.filter_map(|name| self.agent.instances.get(name));
        let visited: BTreeSet<String> = instances
            .flat_map(|instance| instance.home.record.visited.clone())
            .collect();
        let (agent, session) = (Arc::clone(&self.agent), self.session);
        tokio::spawn(async move {
            forwarding::tell(&agent, visited.iter().map(String::as_str), &moved).await;
            agent.turns.leave(session);
            allocator::return_freed_memory();
        });
    }
}
