//! The processes of one host that have ends of a session's connections, and what is asked of them.
//!
//! Each order to the guest libraries is written here once, for whoever has such processes: the source for those of the
//! instance, the destination for the restored ones, a partner's host for those at the other ends. Ends are named by the
//! session's number of their connection.
//!
//! All processes are asked at once, and all answers awaited: nobody is left in the middle of an order because another one
//! failed.

mod member;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use futures_util::future::join_all;
use verbatim_channel::{Answer, Order, QpCount, QpProgress};

use super::{ORDER_TIMEOUT, Resumed, in_time};
use crate::agent::{Changed, Shared};
use crate::guests::{Guest, unexpected};

pub use member::{KeptMember, Member};

/// How long a process may take to come back from the gate, also to an agent that was just started.
const RETURN_TIMEOUT: Duration = Duration::from_secs(30);

/// What is wrong with an answer that names another queue pair.
pub const NOT_ASKED_FOR: &str = "a queue pair that is not part of the session";

/// The processes of one host in a session.
#[derive(Clone)]
pub struct Members {
    agent: Shared,
    session: u64,
    /// Each process.
    pub all: Vec<Member>,
}

/// What a drain has left.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Undrained {
    /// Connections of which an end is not drained.
    pub connections: BTreeSet<u32>,
    /// What is left of them, in words.
    pub left: Vec<String>,
}

impl Undrained {
    /// All is drained.
    pub fn is_empty(&self) -> bool {
        self.left.is_empty()
    }
}

impl FromIterator<Undrained> for Undrained {
    fn from_iter<T: IntoIterator<Item = Undrained>>(all: T) -> Self {
        let mut sum = Self::default();
        for Undrained { connections, left } in all {
            sum.connections.extend(connections);
            sum.left.extend(left);
        }
        sum
    }
}

/// What became of the requests that had no completion.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Settled {
    /// Posted again.
    pub replayed: u64,
    /// Only completed.
    pub completed: u64,
}

impl std::iter::Sum for Settled {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            replayed: sum.replayed + one.replayed,
            completed: sum.completed + one.completed,
        })
    }
}

impl Members {
    /// These processes of this agent's host.
    pub fn new(agent: &Shared, session: u64, all: Vec<Member>) -> Self {
        Self {
            agent: Arc::clone(agent),
            session,
            all,
        }
    }

    /// What each process answers; the first error, if one fails.
    async fn each<'a, T, F>(&'a self, order: impl Fn(&'a Member) -> F) -> anyhow::Result<Vec<T>>
    where
        F: Future<Output = anyhow::Result<T>>,
    {
        join_all(self.all.iter().map(order)).await.into_iter().collect()
    }

    /// Intercepts requests: how many messages each end has sent, by connection. [`Changed`] if a process's queue pairs are
    /// not those of its road map any more.
    pub async fn suspend(&self) -> anyhow::Result<Vec<(u32, u64)>> {
        let sent = self.each(|member| async move {
            let order = Order::Suspend {
                session: self.session,
                scope: member.suspended(),
            };
            match member.order(&self.agent, "suspending", order).await? {
                Answer::Suspended {
                    sent,
                    road_map_version,
                } => sent_by(member, &sent, road_map_version),
                other => Err(unexpected(&other, "Suspended")),
            }
        });
        Ok(sent.await?.concat())
    }

    /// Lets the other ends post markers: of which connections they may.
    pub async fn allow_markers(&self) -> anyhow::Result<Vec<u32>> {
        let allowed = self.each(|member| async move {
            let guest = member.must_be_here(&self.agent).await?;
            if !guest.knows_markers() {
                return Ok(Vec::new());
            }
            let order = Order::AllowMarkers {
                session: self.session,
            };
            match member.order(&self.agent, "allowing markers", order).await? {
                Answer::MarkersAllowed { qpns } => {
                    let connections = member.by_qpn();
                    // Of others, there is nobody to be told.
                    Ok(qpns
                        .iter()
                        .filter_map(|qpn| connections.get(qpn).copied())
                        .collect())
                }
                other => Err(unexpected(&other, "MarkersAllowed")),
            }
        });
        Ok(allowed.await?.concat())
    }

    /// The ends of these connections may post markers.
    pub async fn mark(&self, connections: &[u32]) -> anyhow::Result<()> {
        let marked = self.each(|member| async move {
            let guest = member.must_be_here(&self.agent).await?;
            let by_connection = member.by_connection();
            let qpns = connections
                .iter()
                .filter_map(|connection| by_connection.get(connection).copied());
            let qpns: Vec<_> = qpns.collect();
            if qpns.is_empty() || !guest.knows_markers() {
                return Ok(());
            }
            let session = self.session;
            match member
                .order(&self.agent, "marking", Order::Mark { session, qpns })
                .await?
            {
                Answer::Done => Ok(()),
                other => Err(unexpected(&other, "Done")),
            }
        });
        marked.await.map(drop)
    }

    /// Whether one of the processes has an RNIC that needs markers.
    pub fn need_markers(&self) -> bool {
        let guests = self.all.iter().filter_map(|member| member.guest.as_ref());
        guests.into_iter().any(|guest| !guest.made_again().is_empty())
    }

    /// Waits until nothing is in flight (MigrRDMA §3.4), or the limit has come: what is not drained then. `expected`: how many
    /// messages the other ends have sent, by connection. With `sends_only` only the ends' own send requests are waited for.
    pub async fn drain(
        &self,
        expected: &[(u32, u64)],
        limit: Duration,
        sends_only: bool,
    ) -> anyhow::Result<Undrained> {
        let expected: &HashMap<u32, u64> = &expected.iter().copied().collect();
        let timeout_ms = in_milliseconds(limit);
        let undrained = self.each(|member| async move {
            let ends = member.kept.connections.iter();
            let expected = ends.filter_map(|(connection, qpn)| {
                let messages = *expected.get(connection)?;
                Some(QpCount { qpn: *qpn, messages })
            });
            let order = Order::Drain {
                session: self.session,
                expected: expected.collect(),
                timeout_ms,
                sends_only,
            };
            let guest = member.must_be_here(&self.agent).await?;
            let answer = tokio::time::timeout(limit + ORDER_TIMEOUT, guest.order(order, Vec::new())).await;
            match answer.context("waiting for what is in flight took too long")??.0 {
                Answer::Drained => Ok(Undrained::default()),
                Answer::Undrained { qpns, left } => undrained(member, &qpns, left, limit),
                other => Err(unexpected(&other, "Drained")),
            }
        });
        Ok(undrained.await?.into_iter().collect())
    }

    /// Stops connections in the middle of their requests: where their ends here stand.
    pub async fn stop(&self, connections: &[u32]) -> anyhow::Result<Vec<(u32, QpProgress)>> {
        let stopped = self.each(|member| async move {
            let qpns = member.by_connection();
            let ends = connections.iter();
            let ends = ends.filter_map(|connection| Some((*connection, *qpns.get(connection)?)));
            let (connections, qpns): (Vec<u32>, Vec<u32>) = ends.unzip();
            if qpns.is_empty() {
                return Ok(Vec::new());
            }
            let order = Order::Stop {
                session: self.session,
                qpns,
            };
            match member.order(&self.agent, "stopping connections", order).await? {
                Answer::Stopped(progress) => Ok(connections.into_iter().zip(progress).collect()),
                other => Err(unexpected(&other, "Stopped")),
            }
        });
        Ok(stopped.await?.concat())
    }

    /// Finds out what was executed, from where the other ends stand.
    pub async fn settle(&self, peers: &[(u32, QpProgress)]) -> anyhow::Result<Settled> {
        let settled = self.each(|member| async move {
            let qpns = member.by_connection();
            let peers = peers.iter().filter_map(|(connection, progress)| {
                Some(QpProgress {
                    qpn: *qpns.get(connection)?,
                    ..progress.clone()
                })
            });
            let peers: Vec<_> = peers.collect();
            if peers.is_empty() {
                return Ok(Settled::default());
            }
            let order = Order::Settle {
                session: self.session,
                peers,
            };
            match member.order(&self.agent, "settling connections", order).await? {
                Answer::Settled { replayed, completed } => Ok(Settled { replayed, completed }),
                other => Err(unexpected(&other, "Settled")),
            }
        });
        Ok(settled.await?.into_iter().sum())
    }

    /// How long takes what is under way now, in microseconds; `None` if longer than the limit. Nothing is stopped for that.
    pub async fn measure_drain(&self, limit_ms: u32) -> anyhow::Result<Option<u64>> {
        let measured = self.each(|member| async move {
            let order = Order::MeasureDrain {
                scope: member.measured(),
                limit_ms,
            };
            let what = "looking at what is under way";
            match member.order(&self.agent, what, order).await? {
                Answer::DrainMeasured { us } => Ok(us),
                other => Err(unexpected(&other, "DrainMeasured")),
            }
        });
        Ok(longest(measured.await?))
    }

    /// After the decision: lets the requests reach the RNIC. A process that has ended meanwhile, of what it saw or of itself,
    /// has nothing to resume; for one that was not suspended the order is without effect.
    pub async fn resume(&self) -> anyhow::Result<Resumed> {
        let resumed = self.each(|member| async move {
            let order = Order::Resume {
                session: self.session,
            };
            match member.order_if_alive(&self.agent, "resuming", order).await? {
                Some(Answer::Resumed {
                    intercepted,
                    lost_rnic,
                }) => Ok(Resumed {
                    intercepted,
                    lost_rnic,
                }),
                Some(other) => Err(unexpected(&other, "Resumed")),
                None => Ok(Resumed::default()),
            }
        });
        Ok(resumed.await?.into_iter().fold(Resumed::default(), Resumed::and))
    }

    /// The session is undone: requests flow on the old connections again. `returned` are the processes that have been given their
    /// contexts back; for the others, which still have theirs, the session just ends.
    pub async fn take_back(&self, returned: &[u32]) -> anyhow::Result<()> {
        let session = self.session;
        if self.all.iter().any(|member| member.guest.is_none()) {
            // Those whom an earlier agent knew hear of it when they come.
            self.agent.guests.undo(session);
        }
        let taken_back = self.each(|member| async move {
            let Some(guest) = &member.guest else {
                return Ok(());
            };
            let order = match returned.contains(&member.kept.pid) {
                true => Order::Resume { session },
                false => Order::Abort { session },
            };
            let order = async {
                let order = guest.order(order, Vec::new());
                match in_time("going on with the old connections", order).await?.0 {
                    Answer::Done | Answer::Resumed { .. } => Ok(()),
                    other => Err(unexpected(&other, "Done")),
                }
            };
            order.await.inspect_err(|error| {
                let pid = member.kept.pid;
                tracing::error!(pid, error = format!("{error:#}"), "requests stay intercepted");
            })
        });
        taken_back.await.map(drop)
    }
}

/// What a member has sent, by connection.
fn sent_by(member: &Member, sent: &[QpCount], road_map_version: u64) -> anyhow::Result<Vec<(u32, u64)>> {
    let KeptMember {
        pid,
        connections,
        unconnected,
        ..
    } = &member.kept;
    let is_unconnected = |count: &QpCount| unconnected.iter().any(|(_, qpn)| *qpn == count.qpn);
    let is_as_described = match member.moves {
        Some(version) => version == road_map_version,
        None => sent.len() == connections.len() && !sent.iter().any(is_unconnected),
    };
    if !is_as_described {
        let who = format!("process {pid}");
        return Err(Changed { who }.into());
    }
    let by_qpn = member.by_qpn();
    let mut by_connection = Vec::new();
    for count in sent {
        match by_qpn.get(&count.qpn) {
            Some(connection) => by_connection.push((*connection, count.messages)),
            // Of a process that moves also those are suspended that are connected with nobody.
            None if member.moves.is_some() => {}
            None => bail!(NOT_ASKED_FOR),
        }
    }
    Ok(by_connection)
}

/// Which connections a member's undrained queue pairs belong to.
fn undrained(member: &Member, qpns: &[u32], left: String, limit: Duration) -> anyhow::Result<Undrained> {
    let by_qpn = member.by_qpn();
    let connections: Option<BTreeSet<u32>> = qpns.iter().map(|qpn| by_qpn.get(qpn).copied()).collect();
    let connections = match connections {
        Some(connections) => connections,
        None if member.moves.is_some() => {
            bail!(
                "not drained after {limit:?}, and not all of it has another end that could be asked: {left}"
            )
        }
        None => bail!(NOT_ASKED_FOR),
    };
    Ok(Undrained {
        connections,
        left: vec![left],
    })
}

/// The longest of these times; `None` if one is longer than the limit.
pub fn longest(measured: impl IntoIterator<Item = Option<u64>>) -> Option<u64> {
    measured
        .into_iter()
        .try_fold(0, |longest, us| Some(longest.max(us?)))
}

/// For a limit that is passed on in milliseconds.
pub fn in_milliseconds(limit: Duration) -> u32 {
    u32::try_from(limit.as_millis()).unwrap_or(u32::MAX)
}

/// Gives processes of an instance that wait at its open gate their own RNIC connections back. Each with its channel, unless it
/// has lost its queues.
pub async fn give_back(
    agent: &Shared,
    instance: &str,
    session: u64,
    contexts: Vec<(u32, Vec<std::os::fd::OwnedFd>)>,
) -> Vec<(u32, Option<Guest>)> {
    let claims = contexts.into_iter().map(|(pid, fds)| async move {
        let claim = async {
            let came = tokio::time::timeout(RETURN_TIMEOUT, agent.guests.returned(instance, pid)).await;
            let guest = came.context("it has not come back from the gate")?;
            let order = Order::Claim {
                session,
                contexts: Vec::new(),
                key_tables: Vec::new(),
            };
            match in_time("claiming", guest.order(order, fds)).await?.0 {
                Answer::Claimed { .. } => {}
                other => return Err(unexpected(&other, "Claimed")),
            }
            agent.guests.claimed(&guest);
            anyhow::Ok(guest)
        };
        let claimed = claim.await.inspect_err(|error| {
            tracing::error!(pid, error = format!("{error:#}"), "a process lost its queues");
        });
        (pid, claimed.ok())
    });
    join_all(claims).await
}

#[cfg(test)]
mod tests;
