//! The part of a partner's host in a session.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, bail};
use verbatim_channel::{Answer, Endpoint, KeyPair, Order, QpCount, Scope, StandbyPeer};

use super::{decode, in_time};
use crate::agent::Shared;
use crate::faults::Point;
use crate::guests::{Guest, unexpected};
use crate::proto::{
    Count, DrainRequest, PartnerConnectRequest, PartnerPrepareRequest, PartnerSwitchRequest, Standby,
};
use futures_util::future::join_all;

/// Sessions in which this host is a partner's.
#[derive(Default)]
pub struct Partners(Mutex<HashMap<u64, Arc<tokio::sync::Mutex<Partner>>>>);

/// A process with connections to the moving instance.
struct Member {
    guest: Guest,
    /// The session's number of the connection, and the virtual number of this end.
    connections: Vec<(u32, u32)>,
}

impl Member {
    fn qpns(&self) -> Vec<u32> {
        self.connections.iter().map(|(_, qpn)| *qpn).collect()
    }

    fn connection(&self, qpn: u32) -> anyhow::Result<u32> {
        let found = self.connections.iter().find(|(_, known)| *known == qpn);
        Ok(found.context("a queue pair that is not part of the session")?.0)
    }

    fn qpn(&self, connection: u32) -> Option<u32> {
        self.connections
            .iter()
            .find(|(known, _)| *known == connection)
            .map(|(_, qpn)| *qpn)
    }

    async fn order(&self, what: &str, order: Order) -> anyhow::Result<Answer> {
        Ok(in_time(what, self.guest.order(order, Vec::new())).await?.0)
    }
}

/// One session, at a partner's host.
pub struct Partner {
    session: u64,
    members: Vec<Member>,
    switched: bool,
    resumed: bool,
}

impl Partners {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<tokio::sync::Mutex<Partner>>>> {
        self.0.lock().expect("no panic under this lock")
    }

    /// The session of that number.
    pub fn get(&self, session: u64) -> anyhow::Result<Arc<tokio::sync::Mutex<Partner>>> {
        self.lock()
            .get(&session)
            .cloned()
            .context("there is no such session here (any more)")
    }

    /// Opens a session: finds the processes and has their standby queue pairs made.
    pub async fn prepare(agent: &Shared, request: PartnerPrepareRequest) -> anyhow::Result<Vec<Standby>> {
        agent.faults.pass(Point::PartnerPrepare)?;
        let session = request.session;
        let members = find_members(agent, request).await?;
        let partner = Arc::new(tokio::sync::Mutex::new(Partner {
            session,
            members,
            switched: false,
            resumed: false,
        }));
        agent.partners.lock().insert(session, Arc::clone(&partner));
        partner.lock().await.prepare().await
    }

    /// Undoes a session, unless its queue pairs are switched, and forgets it.
    pub async fn abort(agent: &Shared, session: u64) -> anyhow::Result<()> {
        let Some(partner) = agent.partners.lock().remove(&session) else {
            return Ok(());
        };
        partner.lock().await.abort().await
    }

    /// Forgets a session that has come to its end.
    pub fn close(&self, session: u64) {
        self.lock().remove(&session);
    }
}

/// Which process has which of the connections.
async fn find_members(agent: &Shared, request: PartnerPrepareRequest) -> anyhow::Result<Vec<Member>> {
    let mut wanted: HashMap<(Endpoint, Endpoint), u32> = HashMap::new();
    for connection in request.connections {
        let moving = connection
            .moving
            .context("a connection without its moving end")?
            .try_into()?;
        let partner = connection
            .partner
            .context("a connection without its partner's end")?
            .try_into()?;
        wanted.insert((partner, moving), connection.connection);
    }
    let gid = agent.gid();
    let mut members = Vec::new();
    for guest in agent.guests.all() {
        // A process that ends while we ask has no connections.
        let Ok(road_map) = in_time("describing", guest.describe()).await else {
            continue;
        };
        let mut connections = Vec::new();
        for qp in road_map.contexts.iter().flat_map(|context| &context.qps) {
            let Some(remote) = qp.remote else { continue };
            let own = Endpoint {
                gid,
                qpn: qp.physical_qpn,
            };
            if let Some(connection) = wanted.remove(&(own, remote)) {
                connections.push((connection, qp.qpn));
            }
        }
        if !connections.is_empty() {
            members.push(Member { guest, connections });
        }
    }
    if let Some(((partner, _), _)) = wanted.iter().next() {
        bail!(
            "{} connection(s) of {} lead to programs on {} that do not use the guest library or are not connected \
             back (queue pair {:#x}, for one); run them with LD_PRELOAD=libverbatim.so",
            wanted.len(),
            request.instance,
            agent.name(),
            partner.qpn
        );
    }
    Ok(members)
}

impl Partner {
    async fn prepare(&self) -> anyhow::Result<Vec<Standby>> {
        let session = self.session;
        let prepared = self.members.iter().map(|member| async move {
            let order = Order::PrepareStandby {
                session,
                qpns: member.qpns(),
            };
            match member.order("making standby queue pairs", order).await? {
                Answer::StandbyPrepared(standbys) => standbys
                    .iter()
                    .map(|standby| {
                        Ok(Standby {
                            connection: member.connection(standby.qpn)?,
                            physical_qpn: standby.physical_qpn,
                            sq_psn: standby.sq_psn,
                        })
                    })
                    .collect::<anyhow::Result<Vec<_>>>(),
                other => Err(unexpected(&other, "StandbyPrepared")),
            }
        });
        let standbys: anyhow::Result<Vec<_>> = join_all(prepared).await.into_iter().collect();
        Ok(standbys?.concat())
    }

    /// Connects the standby queue pairs.
    pub async fn connect(&self, request: PartnerConnectRequest) -> anyhow::Result<()> {
        let mut peers = HashMap::new();
        for peer in request.peers {
            let remote: Endpoint = peer.remote.context("a peer without address")?.try_into()?;
            peers.insert(peer.connection, (remote, peer.rq_psn));
        }
        let session = self.session;
        let connected = self.members.iter().map(|member| {
            let peers: anyhow::Result<Vec<_>> = member
                .connections
                .iter()
                .map(|(connection, qpn)| {
                    let (remote, rq_psn) = *peers
                        .get(connection)
                        .context("a connection without its new peer")?;
                    Ok(StandbyPeer {
                        qpn: *qpn,
                        remote,
                        rq_psn,
                    })
                })
                .collect();
            async move {
                let order = Order::ConnectStandby {
                    session,
                    peers: peers?,
                };
                done(member.order("connecting standby queue pairs", order).await?)
            }
        });
        join_all(connected).await.into_iter().collect()
    }

    /// Suspends the connections; says how many messages each has sent.
    pub async fn suspend(&self, agent: &Shared) -> anyhow::Result<Vec<Count>> {
        agent.faults.pass(Point::PartnerSuspend)?;
        let session = self.session;
        let suspended = self.members.iter().map(|member| async move {
            let order = Order::Suspend {
                session,
                scope: Scope::Qps(member.qpns()),
            };
            match member.order("suspending", order).await? {
                Answer::Suspended { sent, .. } if sent.len() == member.connections.len() => sent
                    .iter()
                    .map(|count| {
                        Ok(Count {
                            connection: member.connection(count.qpn)?,
                            messages: count.messages,
                        })
                    })
                    .collect::<anyhow::Result<Vec<_>>>(),
                Answer::Suspended { .. } => {
                    bail!(
                        "{} closed a connection meanwhile; try again",
                        member.guest.program
                    )
                }
                other => Err(unexpected(&other, "Suspended")),
            }
        });
        let counts: anyhow::Result<Vec<_>> = join_all(suspended).await.into_iter().collect();
        Ok(counts?.concat())
    }

    /// Waits until nothing is in flight.
    pub async fn drain(&self, agent: &Shared, request: DrainRequest) -> anyhow::Result<()> {
        agent.faults.pass(Point::PartnerDrain)?;
        let session = self.session;
        let drained = self.members.iter().map(|member| {
            let expected = request
                .expected
                .iter()
                .filter_map(|count| {
                    Some(QpCount {
                        qpn: member.qpn(count.connection)?,
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
                let limit = Duration::from_millis(timeout_ms.into()) + super::ORDER_TIMEOUT;
                let answer = tokio::time::timeout(limit, member.guest.order(order, Vec::new()));
                match answer
                    .await
                    .context("waiting for what is in flight took too long")??
                    .0
                {
                    Answer::Drained => Ok(()),
                    other => Err(unexpected(&other, "Drained")),
                }
            }
        });
        join_all(drained).await.into_iter().collect()
    }

    /// Puts the standby queue pairs in place; says how many RECVs were posted again.
    pub async fn switch(&mut self, request: PartnerSwitchRequest) -> anyhow::Result<u64> {
        self.switched = true;
        let key_tables: Vec<Vec<KeyPair>> = decode(&request.keys)?;
        let tables: HashMap<u32, u32> = request
            .tables
            .iter()
            .map(|table| (table.connection, table.table))
            .collect();
        let session = self.session;
        let switched = self.members.iter().map(|member| {
            let key_tables = key_tables.clone();
            let tables = member
                .connections
                .iter()
                .filter_map(|(connection, qpn)| Some((*qpn, *tables.get(connection)?)))
                .collect();
            async move {
                match member
                    .order(
                        "switching",
                        Order::Switch {
                            session,
                            key_tables,
                            tables,
                        },
                    )
                    .await?
                {
                    Answer::Claimed { replayed_receives } => Ok(replayed_receives),
                    other => Err(unexpected(&other, "Claimed")),
                }
            }
        });
        join_all(switched).await.into_iter().sum()
    }

    /// Lets the requests reach the RNIC; says how many had been intercepted.
    pub async fn resume(&mut self) -> anyhow::Result<u64> {
        self.resumed = true;
        let session = self.session;
        let resumed = self.members.iter().map(|member| async move {
            match member.order("resuming", Order::Resume { session }).await? {
                Answer::Resumed { intercepted } => Ok(intercepted),
                other => Err(unexpected(&other, "Resumed")),
            }
        });
        join_all(resumed).await.into_iter().sum()
    }

    async fn abort(&self) -> anyhow::Result<()> {
        if self.resumed {
            return Ok(());
        }
        let session = self.session;
        let aborted = self.members.iter().map(|member| async move {
            // After the switch there is no way back, only on; a process that has not switched refuses that.
            if self.switched && member.order("resuming", Order::Resume { session }).await.is_ok() {
                return Ok(());
            }
            done(member.order("aborting", Order::Abort { session }).await?)
        });
        join_all(aborted).await.into_iter().collect()
    }
}

fn done(answer: Answer) -> anyhow::Result<()> {
    match answer {
        Answer::Done => Ok(()),
        other => Err(unexpected(&other, "Done")),
    }
}
