//! The part of a partner's host in a session.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, bail};
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use verbatim_channel::{Answer, Endpoint, KeyPair, Order, QpCount, Scope, StandbyPeer};

use super::{decode, in_time};
use crate::agent::Shared;
use crate::faults::Point;
use crate::guests::{Guest, unexpected};
use crate::journal::{Event, Role, Told};
use crate::proto::outcome_reply::Outcome;
use crate::proto::{Count, DrainRequest, PartnerConnectRequest, PartnerPrepareRequest, SessionId, Standby};

/// How long a process may take to come back after its agent was started.
const RETURN_TIMEOUT: Duration = Duration::from_secs(10);

/// How long another host may take to say what was decided.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// The pause before it is asked again.
const PAUSE: Duration = Duration::from_millis(200);

/// Sessions in which this host is a partner's.
#[derive(Default)]
pub struct Partners(Mutex<HashMap<u64, Arc<tokio::sync::Mutex<Partner>>>>);

/// A process with connections to the moving instance.
struct Member {
    /// Unset if an earlier agent has begun the session, and the process has not been asked for yet.
    guest: Option<Guest>,
    kept: KeptMember,
}

/// A process, as an agent that comes after this one finds it.
#[derive(Clone, Serialize, Deserialize)]
struct KeptMember {
    /// The instance that it belongs to, if any.
    instance: Option<String>,
    /// Its PID in its own PID namespace.
    pid: u32,
    /// The session's number of the connection, and the virtual number of this end.
    connections: Vec<(u32, u32)>,
}

/// What is kept of a session for an agent that comes after this one: `partners/SESSION` in the runtime folder.
#[derive(Serialize, Deserialize)]
struct Kept {
    members: Vec<KeptMember>,
    key_tables: Vec<Vec<KeyPair>>,
    /// Per connection, the index of its key table.
    tables: HashMap<u32, u32>,
}

impl Member {
    fn qpns(&self) -> Vec<u32> {
        self.kept.connections.iter().map(|(_, qpn)| *qpn).collect()
    }

    fn connection(&self, qpn: u32) -> anyhow::Result<u32> {
        let found = self.kept.connections.iter().find(|(_, known)| *known == qpn);
        Ok(found.context("a queue pair that is not part of the session")?.0)
    }

    fn qpn(&self, connection: u32) -> Option<u32> {
        self.kept
            .connections
            .iter()
            .find(|(known, _)| *known == connection)
            .map(|(_, qpn)| *qpn)
    }

    /// The process. One that an earlier agent knew is waited for a while; `None` if it does not come: it has ended.
    async fn guest(&self, agent: &Shared) -> Option<Guest> {
        let came = agent.guests.present(self.kept.instance.as_deref(), self.kept.pid);
        match &self.guest {
            Some(guest) => Some(guest.clone()),
            None => tokio::time::timeout(RETURN_TIMEOUT, came).await.ok(),
        }
    }

    async fn order(&self, agent: &Shared, what: &str, order: Order) -> anyhow::Result<Answer> {
        let guest = self.guest(agent).await;
        let guest = guest.with_context(|| format!("process {} is gone", self.kept.pid))?;
        Ok(in_time(what, guest.order(order, Vec::new())).await?.0)
    }

    /// Gives an order after the decision; `None` if the process has ended, and its connections with it.
    async fn order_if_alive(
        &self,
        agent: &Shared,
        what: &str,
        order: Order,
    ) -> anyhow::Result<Option<Answer>> {
        let Some(guest) = self.guest(agent).await else {
            return Ok(None);
        };
        match in_time(what, guest.order(order, Vec::new())).await {
            Ok((answer, _)) => Ok(Some(answer)),
            Err(_) if !agent.guests.is_here(&guest) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// One session, at a partner's host.
pub struct Partner {
    agent: Shared,
    session: u64,
    source: String,
    destination: String,
    members: Vec<Member>,
    key_tables: Vec<Vec<KeyPair>>,
    tables: HashMap<u32, u32>,
    /// Nothing is in flight, and the source may have decided: only its word, or the destination's, ends the wait.
    drained: bool,
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

    /// Whether the processes at the other ends can take part.
    pub async fn check(agent: &Shared, request: PartnerPrepareRequest) -> anyhow::Result<()> {
        find_members(agent, request).await.map(drop)
    }

    /// Opens a session: finds the processes and has their standby queue pairs made.
    pub async fn prepare(agent: &Shared, request: PartnerPrepareRequest) -> anyhow::Result<Vec<Standby>> {
        let session = request.session;
        let parties = Told::parties(&request.instance, &request.source, &request.destination);
        agent
            .journal
            .write(session, Role::Partner, Event::Opened, parties)
            .context("the journal cannot be written")?;
        let prepared = Self::prepare_members(agent, request).await;
        if prepared.is_err() {
            Self::abort(agent, session).await?;
        }
        prepared
    }

    async fn prepare_members(agent: &Shared, request: PartnerPrepareRequest) -> anyhow::Result<Vec<Standby>> {
        agent.faults.pass(Point::PartnerPrepare).await?;
        let session = request.session;
        let (source, destination) = (request.source.clone(), request.destination.clone());
        let members = find_members(agent, request).await?;
        let partner = Partner {
            agent: Arc::clone(agent),
            session,
            source,
            destination,
            members,
            key_tables: Vec::new(),
            tables: HashMap::new(),
            drained: false,
            switched: false,
            resumed: false,
        };
        partner.keep()?;
        let partner = Arc::new(tokio::sync::Mutex::new(partner));
        agent.partners.lock().insert(session, Arc::clone(&partner));
        partner.lock().await.prepare().await
    }

    /// Undoes a session, unless its queue pairs are switched, and forgets it.
    pub async fn abort(agent: &Shared, session: u64) -> anyhow::Result<()> {
        let Ok(partner) = agent.partners.get(session) else {
            return Self::undone(agent, session);
        };
        let partner = partner.lock().await;
        if partner.switched && !partner.resumed {
            // There is no way back, only on; whoever drives the session says when.
            return Ok(());
        }
        if agent.partners.lock().remove(&session).is_none() || partner.resumed {
            return Ok(());
        }
        let aborted = partner.abort().await;
        Self::undone(agent, session)?;
        aborted
    }

    fn undone(agent: &Shared, session: u64) -> anyhow::Result<()> {
        if agent.journal.last(session, Role::Partner) == Some(Event::Opened) {
            agent
                .journal
                .write(session, Role::Partner, Event::RolledBack, Told::default())
                .context("the journal cannot be written")?;
        }
        forget(agent, session);
        Ok(())
    }

    /// The source is gone, or has finished. What it cannot have decided is undone; else its successor, or the
    /// destination, is asked what it did.
    pub async fn source_is_lost(agent: &Shared, session: u64) -> anyhow::Result<()> {
        let Ok(partner) = agent.partners.get(session) else {
            return Ok(());
        };
        let (drained, resumed) = {
            let partner = partner.lock().await;
            (partner.drained, partner.resumed)
        };
        if drained && !resumed {
            Self::settle(agent, session).await
        } else {
            Self::abort(agent, session).await
        }
    }

    /// Asks until it is known whether the session was rolled back. If it was committed there is nothing to do here:
    /// whoever drives it comes by itself.
    pub async fn settle(agent: &Shared, session: u64) -> anyhow::Result<()> {
        while let Ok(partner) = agent.partners.get(session) {
            let (hosts, over) = {
                let partner = partner.lock().await;
                let hosts = [partner.destination.clone(), partner.source.clone()];
                (hosts, partner.switched || partner.resumed)
            };
            if over {
                return Ok(());
            }
            for host in &hosts {
                match ask(agent, host, session).await {
                    Ok(Outcome::RolledBack) => return Self::abort(agent, session).await,
                    Ok(Outcome::Committed) => return Ok(()),
                    Ok(Outcome::Unknown | Outcome::Undecided) => {}
                    Err(error) => {
                        tracing::debug!(host, error = format!("{error:#}"), "cannot say what was decided");
                    }
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Takes up the sessions that an earlier agent had begun.
    pub fn recover(agent: &Shared) -> anyhow::Result<()> {
        for known in agent.journal.sessions() {
            let session = known.session;
            if known.role != Role::Partner {
                continue;
            }
            if known.has_ended() {
                forget(agent, session);
                continue;
            }
            let Ok(text) = std::fs::read(kept_path(agent, session)) else {
                // It died before any process was asked for anything.
                Self::undone(agent, session)?;
                continue;
            };
            let Kept {
                members,
                key_tables,
                tables,
            } = serde_json::from_slice(&text)
                .with_context(|| format!("session {session:016x} is damaged"))?;
            let partner = Partner {
                agent: Arc::clone(agent),
                session,
                source: known.told.source.unwrap_or_default(),
                destination: known.told.destination.unwrap_or_default(),
                members: members
                    .into_iter()
                    .map(|kept| Member { guest: None, kept })
                    .collect(),
                key_tables,
                tables,
                drained: true,
                switched: known.last == Event::Committed,
                resumed: false,
            };
            let partner = Arc::new(tokio::sync::Mutex::new(partner));
            agent.partners.lock().insert(session, partner);
            let agent = Arc::clone(agent);
            tokio::spawn(async move {
                if let Err(error) = Self::settle(&agent, session).await {
                    tracing::error!(
                        error = format!("{error:#}"),
                        "a session of an earlier agent is not settled"
                    );
                }
            });
        }
        Ok(())
    }
}

async fn ask(agent: &Shared, host: &str, session: u64) -> anyhow::Result<Outcome> {
    let mut client = agent.peers.connect(host).await?;
    let mut request = tonic::Request::new(SessionId { session });
    request.set_timeout(ANSWER_TIMEOUT);
    Ok(client.outcome(request).await?.into_inner().outcome())
}

fn kept_path(agent: &Shared, session: u64) -> PathBuf {
    agent
        .config
        .runtime_dir
        .join("partners")
        .join(format!("{session:016x}"))
}

/// The session is over: an agent that comes after this one need not know of it.
fn forget(agent: &Shared, session: u64) {
    let path = kept_path(agent, session);
    if let Err(error) = std::fs::remove_file(&path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "cannot be removed");
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
            let kept = KeptMember {
                instance: guest.instance.clone(),
                pid: guest.pid,
                connections,
            };
            members.push(Member {
                guest: Some(guest),
                kept,
            });
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
        let agent = &self.agent;
        let prepared = self.members.iter().map(|member| async move {
            let order = Order::PrepareStandby {
                session,
                qpns: member.qpns(),
            };
            match member.order(agent, "making standby queue pairs", order).await? {
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
    pub async fn connect(&mut self, request: PartnerConnectRequest) -> anyhow::Result<()> {
        self.begin("Connect", Point::PartnerConnect).await?;
        self.key_tables = decode(&request.keys)?;
        let tables = request.tables.iter();
        self.tables = tables.map(|table| (table.connection, table.table)).collect();
        self.keep()?;
        let mut peers = HashMap::new();
        for peer in request.peers {
            let remote: Endpoint = peer.remote.context("a peer without address")?.try_into()?;
            peers.insert(peer.connection, (remote, peer.rq_psn));
        }
        let session = self.session;
        let agent = &self.agent;
        let connected = self.members.iter().map(|member| {
            let peers: anyhow::Result<Vec<_>> = member
                .kept
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
                done(
                    member
                        .order(agent, "connecting standby queue pairs", order)
                        .await?,
                )
            }
        });
        join_all(connected).await.into_iter().collect()
    }

    /// Suspends the connections; says how many messages each has sent.
    pub async fn suspend(&self) -> anyhow::Result<Vec<Count>> {
        self.begin("WaitBeforeStop", Point::PartnerSuspend).await?;
        let session = self.session;
        let agent = &self.agent;
        let suspended = self.members.iter().map(|member| async move {
            let order = Order::Suspend {
                session,
                scope: Scope::Qps(member.qpns()),
            };
            match member.order(agent, "suspending", order).await? {
                Answer::Suspended { sent, .. } if sent.len() == member.kept.connections.len() => sent
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
                        "process {} closed a connection meanwhile; try again",
                        member.kept.pid
                    )
                }
                other => Err(unexpected(&other, "Suspended")),
            }
        });
        let counts: anyhow::Result<Vec<_>> = join_all(suspended).await.into_iter().collect();
        Ok(counts?.concat())
    }

    /// Waits until nothing is in flight.
    pub async fn drain(&mut self, request: DrainRequest) -> anyhow::Result<()> {
        self.begin("Drain", Point::PartnerDrain).await?;
        let session = self.session;
        let agent = &self.agent;
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
            let timeout_ms = request.timeout_ms;
            async move {
                let order = Order::Drain {
                    session,
                    expected,
                    timeout_ms,
                };
                let limit = Duration::from_millis(timeout_ms.into()) + super::ORDER_TIMEOUT;
                let guest = member.guest(agent).await.context("a process has ended")?;
                let answer = tokio::time::timeout(limit, guest.order(order, Vec::new()));
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
        // Before the source hears of it, and also if one of several processes is not: the others are.
        let drained = join_all(drained).await;
        self.drained = true;
        drained.into_iter().collect::<anyhow::Result<()>>()?;
        self.begin("Drained", Point::PartnerDrained).await
    }

    /// Puts the standby queue pairs in place; says how many RECVs were posted again.
    pub async fn switch(&mut self) -> anyhow::Result<u64> {
        self.begin("RestoreRDMA", Point::PartnerSwitch).await?;
        if !self.switched {
            self.write(Event::Committed)?;
            self.switched = true;
        }
        let session = self.session;
        let agent = &self.agent;
        let switched = self.members.iter().map(|member| {
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

    /// Lets the requests reach the RNIC; says how many had been intercepted.
    pub async fn resume(&mut self) -> anyhow::Result<u64> {
        self.begin("Replay", Point::PartnerResume).await?;
        if self.resumed {
            return Ok(0);
        }
        let session = self.session;
        let agent = &self.agent;
        let resumed = self.members.iter().map(|member| async move {
            let order = Order::Resume { session };
            match member.order_if_alive(agent, "resuming", order).await? {
                Some(Answer::Resumed { intercepted }) => Ok(intercepted),
                Some(other) => Err(unexpected(&other, "Resumed")),
                None => Ok(0),
            }
        });
        let intercepted = join_all(resumed).await.into_iter().sum::<anyhow::Result<u64>>()?;
        self.write(Event::Closed)?;
        self.resumed = true;
        forget(&self.agent, session);
        Ok(intercepted)
    }

    /// Writes down what an agent that comes after this one must know.
    fn keep(&self) -> anyhow::Result<()> {
        let path = kept_path(&self.agent, self.session);
        let kept = Kept {
            members: self.members.iter().map(|member| member.kept.clone()).collect(),
            key_tables: self.key_tables.clone(),
            tables: self.tables.clone(),
        };
        let fresh = path.with_extension("new");
        std::fs::create_dir_all(path.parent().expect("it has a folder"))
            .and_then(|()| std::fs::write(&fresh, serde_json::to_vec(&kept)?))
            .and_then(|()| std::fs::rename(&fresh, &path))
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// A step begins.
    async fn begin(&self, step: &str, point: Point) -> anyhow::Result<()> {
        self.agent.journal.step(self.session, Role::Partner, step);
        self.agent.faults.pass(point).await.map(drop)
    }

    fn write(&self, event: Event) -> anyhow::Result<()> {
        let journal = &self.agent.journal;
        let written = journal.write(self.session, Role::Partner, event, Told::default());
        written.context("the journal cannot be written")
    }

    /// Takes everything back; the queue pairs are not switched.
    async fn abort(&self) -> anyhow::Result<()> {
        let session = self.session;
        let aborted = self.members.iter().map(|member| async move {
            let Some(guest) = &member.guest else {
                return Ok(());
            };
            let order = guest.order(Order::Abort { session }, Vec::new());
            done(in_time("aborting", order).await?.0)
        });
        if self.members.iter().any(|member| member.guest.is_none()) {
            // Those whom an earlier agent knew hear of it when they come.
            self.agent.guests.undo(session);
        }
        join_all(aborted).await.into_iter().collect()
    }
}

fn done(answer: Answer) -> anyhow::Result<()> {
    match answer {
        Answer::Done => Ok(()),
        other => Err(unexpected(&other, "Done")),
    }
}
