//! Past the limit of wait-before-stop: connections that are not drained are stopped in the middle of their requests at both
//! ends, and each end finds out from where the other one stands which of its requests were executed. What was not is posted
//! again after the commit. Where that is not certain the migration is rolled back, and the connections go on.

use std::collections::{BTreeSet, HashMap};

use anyhow::{Context, bail};
use futures_util::future::try_join_all;
use verbatim_channel::{Answer, Order, QpProgress};

use super::connections::{Connected, OtherEnd};
use super::{Source, told};
use crate::faults::Point;
use crate::guests::unexpected;
use crate::proto::{SettleRequest, StopRequest};
use crate::session::{decode, encode, in_time};

/// What a drain has left.
#[derive(Debug, Default)]
pub(super) struct Undrained {
    /// Connections of which an end is not drained.
    pub connections: BTreeSet<usize>,
    /// What is left of them, in words.
    pub left: Vec<String>,
}

impl Undrained {
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
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Settled {
    /// Posted again.
    pub replayed: u64,
    /// Only completed.
    pub completed: u64,
}

impl Source {
    /// Which connections a process's undrained queue pairs belong to.
    pub(super) fn undrained(&self, pid: u32, qpns: &[u32], left: String) -> anyhow::Result<Undrained> {
        let own = self.connections.iter().enumerate();
        let named = own.filter(|(_, connection)| connection.pid == pid && qpns.contains(&connection.qpn));
        let connections: BTreeSet<usize> = named.map(|(index, _)| index).collect();
        if connections.len() < qpns.len() {
            let limit = self.request.drain_timeout;
            bail!(
                "not drained after {limit:?}, and not all of it has another end that could be asked: {left}"
            );
        }
        Ok(Undrained {
            connections,
            left: vec![left],
        })
    }

    /// Stops the connections that are not drained, and finds out what becomes of their requests.
    pub(super) async fn settle(&mut self, undrained: Undrained) -> anyhow::Result<()> {
        let limit = self.request.drain_timeout;
        let left = undrained.left.join("; ");
        let mut ends = undrained.connections.iter();
        if ends.any(|index| self.connections[*index].connected != Connected::Both) {
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

    async fn stop_and_settle(&self, undrained: &BTreeSet<usize>) -> anyhow::Result<Settled> {
        self.pass(Point::SourceStop).await?;
        // Both ends of a connection within the instance are connections of it.
        let mut stopped = undrained.clone();
        stopped.extend(
            undrained
                .iter()
                .filter_map(|index| match self.connections[*index].other_end {
                    OtherEnd::Own(other) => Some(other),
                    OtherEnd::Host(_) | OtherEnd::OwnUnconnected { .. } => None,
                }),
        );
        let (own, partners) = tokio::try_join!(self.stop_own(&stopped), self.stop_partners(&stopped))?;
        // Each end is told of the other one.
        let own_peers = stopped.iter().map(|index| {
            let peer = match self.connections[*index].other_end {
                OtherEnd::Own(other) => own.get(&other),
                OtherEnd::Host(_) => partners.get(index),
                OtherEnd::OwnUnconnected { .. } => None,
            };
            let peer = peer.context("an end of a connection does not say where it stands")?;
            anyhow::Ok((*index, peer.clone()))
        });
        let own_peers = own_peers.collect::<anyhow::Result<HashMap<_, _>>>()?;
        let (own, partners) = tokio::try_join!(self.settle_own(&own_peers), self.settle_partners(&own))?;
        Ok(Settled {
            replayed: own.replayed + partners.replayed,
            completed: own.completed + partners.completed,
        })
    }

    /// The instance's ends of these connections, by process.
    fn by_process(&self, connections: impl IntoIterator<Item = usize>) -> HashMap<u32, Vec<usize>> {
        let mut ends: HashMap<u32, Vec<usize>> = HashMap::new();
        for index in connections {
            ends.entry(self.connections[index].pid).or_default().push(index);
        }
        ends
    }

    async fn stop_own(&self, stopped: &BTreeSet<usize>) -> anyhow::Result<HashMap<usize, QpProgress>> {
        let mut ends = self.by_process(stopped.iter().copied());
        let session = self.session;
        let orders = self.processes.iter().filter_map(|process| {
            let ends = ends.remove(&process.guest.pid)?;
            let qpns = ends.iter().map(|index| self.connections[*index].qpn).collect();
            Some(async move {
                let order = process.guest.order(Order::Stop { session, qpns }, Vec::new());
                match in_time("stopping connections", order).await?.0 {
                    Answer::Stopped(progress) => Ok(ends.into_iter().zip(progress)),
                    other => Err(unexpected(&other, "Stopped")),
                }
            })
        });
        Ok(try_join_all(orders).await?.into_iter().flatten().collect())
    }

    async fn stop_partners(&self, stopped: &BTreeSet<usize>) -> anyhow::Result<HashMap<usize, QpProgress>> {
        let orders = self.partners.iter().filter_map(|partner| {
            let ends = partner.connections.iter().filter(|index| stopped.contains(index));
            let connections: Vec<_> = ends.map(|index| *index as u32).collect();
            let request = StopRequest {
                session: self.session,
                connections,
            };
            if request.connections.is_empty() {
                return None;
            }
            Some(async move {
                let mut client = partner.client.clone();
                let reply = client.partner_stop(request).await;
                let reply = told(
                    &partner.host,
                    "stop connections in the middle of their requests",
                    reply,
                )?;
                decode::<Vec<(u32, QpProgress)>>(&reply.progress)
            })
        });
        let progress = try_join_all(orders).await?.into_iter().flatten();
        Ok(progress
            .map(|(index, progress)| (index as usize, progress))
            .collect())
    }

    async fn settle_own(&self, peers: &HashMap<usize, QpProgress>) -> anyhow::Result<Settled> {
        let mut ends = self.by_process(peers.keys().copied());
        let session = self.session;
        let orders = self.processes.iter().filter_map(|process| {
            let ends = ends.remove(&process.guest.pid)?;
            let of_end = |index: &usize| QpProgress {
                qpn: self.connections[*index].qpn,
                ..peers[index].clone()
            };
            let peers = ends.iter().map(of_end).collect();
            Some(async move {
                let order = process.guest.order(Order::Settle { session, peers }, Vec::new());
                match in_time("settling connections", order).await?.0 {
                    Answer::Settled { replayed, completed } => Ok(Settled { replayed, completed }),
                    other => Err(unexpected(&other, "Settled")),
                }
            })
        });
        Ok(sum(try_join_all(orders).await?))
    }

    /// `own`: where the instance's ends stand.
    async fn settle_partners(&self, own: &HashMap<usize, QpProgress>) -> anyhow::Result<Settled> {
        let orders = self.partners.iter().filter_map(|partner| {
            let ends = partner.connections.iter();
            let progress: Vec<(u32, QpProgress)> = ends
                .filter_map(|index| Some((*index as u32, own.get(index)?.clone())))
                .collect();
            if progress.is_empty() {
                return None;
            }
            Some(async move {
                let request = SettleRequest {
                    session: self.session,
                    progress: encode(&progress),
                };
                let mut client = partner.client.clone();
                let reply = client.partner_settle(request).await;
                let reply = told(&partner.host, "tell what was executed", reply)?;
                anyhow::Ok(Settled {
                    replayed: reply.replayed,
                    completed: reply.completed,
                })
            })
        });
        Ok(sum(try_join_all(orders).await?))
    }
}

fn sum(all: Vec<Settled>) -> Settled {
    all.into_iter().fold(Settled::default(), |sum, one| Settled {
        replayed: sum.replayed + one.replayed,
        completed: sum.completed + one.completed,
    })
}
