//! Numbers of queue pairs that left, which the RNIC gives to others one day.
//!
//! Until what left is destroyed here its number stays its own, whoever the RNIC says has it. After that whoever has it is another one,
//! and the entry is over.

use std::sync::Arc;
use std::time::Duration;

use verbatim_device::control::{FIRST_PUBLISHED_QPN, QpOwner};

use super::{Forward, Forwarding};
use crate::agent::Agent;
use crate::identity;

/// The RNIC is asked again after this time at first, and after twice the time each time that nothing has changed: nothing tells when it has
/// destroyed something. It gives a number again after a thousand others at the earliest.
const SOON: Duration = Duration::from_millis(20);

/// The longest time between two questions.
const LATE: Duration = Duration::from_secs(10);

/// Where the queue pair that was `qpn` on this host is now; nothing if the number is another one's here since.
pub async fn current(agent: &Agent, qpn: u32) -> Option<Forward> {
    let forward = agent.forwarding.get(qpn)?;
    // Those are the agents', and no RNIC's.
    if qpn >= FIRST_PUBLISHED_QPN {
        return Some(forward);
    }
    match identity::owners(agent, vec![qpn]).await {
        Ok(owners) => agent.forwarding.is_whose(qpn, owners[&qpn]),
        Err(error) => tracing::debug!(error = format!("{error:#}"), "whose a number is, is not known"),
    }
    agent.forwarding.get(qpn)
}

/// Notes when the RNIC has destroyed what has left, for as long as the agent lives.
pub async fn watch(agent: Arc<Agent>) -> anyhow::Result<()> {
    let mut pause = SOON;
    loop {
        let inserted = agent.forwarding.inserted.notified();
        let left = agent.forwarding.not_destroyed();
        if left.is_empty() {
            inserted.await;
            pause = SOON;
            continue;
        }
        match identity::owners(&agent, left).await {
            Ok(owners) => {
                let destroyed = owners.iter().filter(|(_, owner)| **owner == QpOwner::None);
                if agent.forwarding.are_destroyed(destroyed.map(|(qpn, _)| *qpn)) {
                    pause = SOON;
                }
            }
            // Another RNIC has none of them.
            Err(error) => tracing::debug!(error = format!("{error:#}"), "whose numbers are, is not known"),
        }
        tokio::select! {
            () = inserted => pause = SOON,
            () = tokio::time::sleep(pause) => pause = LATE.min(2 * pause),
        }
    }
}

impl Forwarding {
    /// Numbers of this host's RNIC whose queue pairs may still be there.
    fn not_destroyed(&self) -> Vec<u32> {
        let inner = self.lock();
        let there = inner
            .entries
            .iter()
            .filter(|(qpn, entry)| !entry.destroyed && **qpn < FIRST_PUBLISHED_QPN);
        there.map(|(qpn, _)| *qpn).collect()
    }

    /// This host's RNIC has none of these queue pairs any more. Whether that is news.
    pub(super) fn are_destroyed(&self, qpns: impl Iterator<Item = u32>) -> bool {
        let mut inner = self.lock();
        let mut lines = Vec::new();
        for qpn in qpns {
            if let Some(entry) = inner.entries.get_mut(&qpn)
                && !std::mem::replace(&mut entry.destroyed, true)
            {
                lines.push(entry.line(qpn));
            }
        }
        if let Err(error) = inner.append(&lines) {
            tracing::warn!(%error, "that queue pairs are destroyed will not be known after this agent");
        }
        !lines.is_empty()
    }

    /// The RNIC says whose the number is here now: another one's, if what left had been destroyed before.
    pub(super) fn is_whose(&self, qpn: u32, owner: QpOwner) {
        match owner {
            QpOwner::None => _ = self.are_destroyed([qpn].into_iter()),
            // An agent, or one that has ended, made it for what left and may come back ([`Forwarding::remove`]), or not.
            QpOwner::Unknown => {}
            QpOwner::Process(pid) if pid.cast_unsigned() == std::process::id() => {}
            QpOwner::Process(_) => {
                let mut inner = self.lock();
                if inner.entries.get(&qpn).is_some_and(|entry| entry.destroyed) {
                    inner.remove(qpn);
                }
            }
        }
    }
}
