//! The part of a partner's host in a session.

mod decision;
pub mod find;
mod quiesce;
mod relocated;
mod switched;

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use verbatim_channel::{Answer, Endpoint, KeyPair, Order, StandbyPeer};
use verbatim_seqpacket::Socket;
use verbatim_session::decision::partner::{Event, Partner as Machine, State};
use verbatim_session::decision::{Fact, Outcome};
use verbatim_session::record::{Parties, Standing, What};
use verbatim_session::turns::Joined;
use verbatim_session::{Phase, Role};

use super::decode;
use super::members::{KeptMember, Member, Members, NOT_ASKED_FOR};
use super::writer::Writer;
use crate::agent::{Changed, Shared};
use crate::faults::Point;
use crate::guests::unexpected;
use crate::instances::recovery::make_private;
use crate::proto::{
    PartnerConnectRequest, PartnerConnection, PartnerPrepareReply, PartnerPrepareRequest, Standby,
};
use crate::standby;
use crate::whole;

use find::{Found, connected_to, find_members, instances_of};

/// How long the end of an earlier move of the same instance may take here.
const EARLIER_TIMEOUT: Duration = Duration::from_secs(20);

/// Sessions in which this host is a partner's.
#[derive(Default)]
pub struct Partners(Mutex<HashMap<u64, Arc<tokio::sync::Mutex<Partner>>>>);

/// What is kept of a session for an agent that comes after this one: `partners/SESSION` in the runtime folder.
#[derive(Serialize, Deserialize)]
pub(crate) struct Kept {
    members: Vec<KeptMember>,
    #[serde(default)]
    late: BTreeSet<u32>,
    #[serde(default)]
    numbers: HashMap<u32, (u32, u32)>,
    /// The connections pause.
    #[serde(default)]
    pauses: bool,
    /// Where their other ends will be.
    #[serde(default)]
    moved_to: HashMap<u32, Endpoint>,
    key_tables: Vec<Vec<KeyPair>>,
    /// Per connection, the index of its key table.
    tables: HashMap<u32, u32>,
    /// Connections whose new other ends are made after the decision, until they are told.
    #[serde(default)]
    awaited: BTreeSet<u32>,
}

/// One session, at a partner's host.
pub struct Partner {
    agent: Shared,
    session: u64,
    source: String,
    destination: String,
    members: Members,
    /// Connections whose moving end is not connected yet: its program knows this end's number as it is now.
    late: BTreeSet<u32>,
    key_tables: Vec<Vec<KeyPair>>,
    tables: HashMap<u32, u32>,
    /// The physical numbers of the queue pairs by connection: as they were, and as they will be.
    numbers: HashMap<u32, (u32, u32)>,
    /// The connections pause: nothing is made for them here, and their programs go on.
    pauses: bool,
    /// By connection, where the other end of one that pauses will be.
    moved_to: HashMap<u32, Endpoint>,
    /// Connections whose new other ends are made after the decision, until they are told.
    awaited: BTreeSet<u32>,
    /// Ends need markers.
    marks: bool,
    machine: Machine,
    writer: Writer,
    /// The source was not told that nothing is in flight.
    refused: bool,
    /// What came of putting the standby queue pairs in place, until it is told.
    switched: Option<anyhow::Result<u64>>,
    resumed: bool,
    /// A connection to the RNIC, for as long as that lives; an agent that comes later has none.
    nic: Option<Socket>,
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

    /// Joins the instances at the other ends for a session, so that nobody moves them meanwhile. Which of them another
    /// session moves, if one does.
    pub async fn join(agent: &Shared, request: PartnerPrepareRequest) -> anyhow::Result<Option<String>> {
        let (session, moving) = (request.session, request.instance.clone());
        let earlier = agent.turns.earlier_ended(session, &moving);
        tokio::time::timeout(EARLIER_TIMEOUT, earlier)
            .await
            .with_context(|| format!("an earlier move of {moving} has not ended on {}", agent.name()))?;
        let instances = match instances_of(agent, &request).await {
            Ok(instances) => instances,
            // Processes that wait at the gate, or are about to come, are not here: whoever moves them brings them back.
            Err(error) => return agent.turns.anyone(session).map(Some).ok_or(error),
        };
        match agent.turns.join(&agent.watched, session, &moving, instances)? {
            Joined::Yes => Ok(None),
            Joined::Moving(other) => Ok(Some(other)),
        }
    }

    /// How long takes what is under way at the other ends, in microseconds; `None` if longer than the limit.
    pub async fn measure_drain(
        agent: &Shared,
        request: PartnerPrepareRequest,
        limit_ms: u32,
    ) -> anyhow::Result<Option<u64>> {
        let session = request.session;
        let found = find_members(agent, request).await?;
        Members::new(agent, session, found.members)
            .measure_drain(limit_ms)
            .await
    }

    /// Opens a session: finds the processes and has their standby queue pairs made.
    pub async fn prepare(
        agent: &Shared,
        request: PartnerPrepareRequest,
    ) -> anyhow::Result<PartnerPrepareReply> {
        let session = request.session;
        if agent.journal.standing(session, Role::Partner).is_some() {
            anyhow::bail!("a session of that number was opened here already");
        }
        let parties = Parties {
            instance: request.instance.clone(),
            source: request.source.clone(),
            destination: request.destination.clone(),
        };
        agent
            .journal
            .write(session, Role::Partner, What::Opened(parties))
            .context("the journal cannot be written")?;
        let prepared = Self::prepare_members(agent, request).await;
        if prepared.is_err() {
            Self::abort(agent, session).await?;
        }
        prepared
    }

    async fn prepare_members(
        agent: &Shared,
        request: PartnerPrepareRequest,
    ) -> anyhow::Result<PartnerPrepareReply> {
        agent.faults.pass(Point::PartnerPrepare).await?;
        let session = request.session;
        let (source, destination) = (request.source.clone(), request.destination.clone());
        let connections = request.connections.iter();
        let late = connections.filter(|connection| connection.late);
        let late = late.map(|connection| connection.connection).collect();
        let old = request.connections.iter().filter_map(|connection| {
            let qpn = connection.partner.as_ref()?.qpn;
            Some((connection.connection, (qpn, qpn)))
        });
        let numbers = old.collect();
        let pauses = request.pauses;
        let Found {
            members,
            senders,
            unconnected,
        } = find_members(agent, request).await?;
        let nic = standby::connect(&agent.config.nic_socket()).ok();
        let partner = Partner {
            agent: Arc::clone(agent),
            session,
            nic,
            source,
            destination,
            members: Members::new(agent, session, members),
            late,
            key_tables: Vec::new(),
            tables: HashMap::new(),
            numbers,
            pauses,
            moved_to: HashMap::new(),
            awaited: BTreeSet::new(),
            marks: false,
            machine: Machine::begin(),
            writer: Writer::new(&agent.journal, session, Role::Partner),
            refused: false,
            switched: None,
            resumed: false,
        };
        let partner = Arc::new(tokio::sync::Mutex::new(partner));
        // Whoever undoes the session from here on waits for what is begun below.
        let mut prepared = partner.lock().await;
        {
            let mut partners = agent.partners.lock();
            agent.watched.ensure(session)?;
            partners.insert(session, Arc::clone(&partner));
        }
        prepared.keep()?;
        if pauses {
            return Ok(PartnerPrepareReply {
                standbys: Vec::new(),
                unconnected,
                marks: false,
            });
        }
        let mut standbys = prepared.prepare().await?;
        for standby in &mut standbys {
            standby.sends = senders.contains(&standby.connection);
        }
        Ok(PartnerPrepareReply {
            standbys,
            unconnected,
            marks: prepared.members.need_markers(),
        })
    }

    /// Connections of this host's programs that lead to one of `ends`.
    pub async fn find(agent: &Shared, ends: &[Endpoint]) -> anyhow::Result<Vec<PartnerConnection>> {
        connected_to(agent, ends).await
    }

    /// Undoes a session, unless its queue pairs are switched, and forgets it.
    pub async fn abort(agent: &Shared, session: u64) -> anyhow::Result<()> {
        if agent.partners.get(session).is_err() {
            return Self::undone(agent, session);
        }
        decision::hear(agent, session, Event::Abort).await;
        Ok(())
    }

    /// Nothing was asked of any program yet.
    fn undone(agent: &Shared, session: u64) -> anyhow::Result<()> {
        agent.turns.leave(session);
        if agent.journal.standing(session, Role::Partner) == Some(Standing::Opened) {
            let over = What::Closed(Outcome::RolledBack);
            agent
                .journal
                .write(session, Role::Partner, over)
                .context("the journal cannot be written")?;
        }
        forget(agent, session);
        Ok(())
    }

    /// The source is gone, or has finished. What it cannot have decided is undone; else its successor, or the
    /// destination, is asked what it did.
    pub async fn source_is_lost(agent: &Shared, session: u64) {
        if agent.partners.get(session).is_err() {
            agent.turns.leave(session);
        }
        decision::hear(agent, session, Event::SourceLost).await;
    }

    /// Forgets a session that has come to its end.
    fn close(&self, session: u64) {
        self.lock().remove(&session);
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
                // It died before any process was asked for anything, or the machine was restarted, and the processes are gone.
                let outcome = known.is_decided().unwrap_or(Outcome::RolledBack);
                let over = What::Closed(outcome);
                agent.journal.write(session, Role::Partner, over)?;
                continue;
            };
            let Kept {
                members,
                late,
                numbers,
                pauses,
                moved_to,
                key_tables,
                tables,
                awaited,
            } = serde_json::from_slice(&text)
                .with_context(|| format!("session {session:016x} is damaged"))?;
            let joined: BTreeSet<String> = members
                .iter()
                .filter_map(|member| member.instance.clone())
                .collect();
            let moving = known.told.instance.as_deref().unwrap_or_default();
            agent.turns.join_again(session, moving, joined);
            let partner = Partner {
                agent: Arc::clone(agent),
                session,
                source: known.told.source.unwrap_or_default(),
                destination: known.told.destination.unwrap_or_default(),
                members: Members::new(agent, session, members.into_iter().map(Member::known).collect()),
                late,
                key_tables,
                tables,
                numbers,
                pauses,
                moved_to,
                awaited,
                marks: false,
                // An earlier agent may have died where it is looked at.
                machine: Machine::recover(known.part.standing).0,
                writer: Writer::new(&agent.journal, session, Role::Partner),
                refused: false,
                switched: None,
                resumed: false,
                nic: None,
            };
            let partner = Arc::new(tokio::sync::Mutex::new(partner));
            agent.partners.lock().insert(session, partner);
            let agent = Arc::clone(agent);
            // Orders wait for programs that have not come back.
            tokio::spawn(async move { decision::hear(&agent, session, Event::Fact(Fact::Running)).await });
        }
        Ok(())
    }
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

impl Partner {
    async fn prepare(&mut self) -> anyhow::Result<Vec<Standby>> {
        let session = self.session;
        let agent = &self.agent;
        let prepared = self.members.all.iter().map(|member| async move {
            let order = Order::PrepareStandby {
                session,
                qpns: member.qpns(),
            };
            match member.order(agent, "making standby queue pairs", order).await? {
                Answer::StandbyPrepared(standbys) => {
                    let connections = member.by_qpn();
                    let standbys = standbys.iter().map(|standby| {
                        Ok(Standby {
                            connection: *connections.get(&standby.qpn).context(NOT_ASKED_FOR)?,
                            physical_qpn: standby.physical_qpn,
                            sq_psn: standby.sq_psn,
                            sends: false,
                        })
                    });
                    standbys.collect::<anyhow::Result<Vec<_>>>()
                }
                other => Err(unexpected(&other, "StandbyPrepared")),
            }
        });
        let standbys: anyhow::Result<Vec<_>> = join_all(prepared).await.into_iter().collect();
        let standbys = match standbys {
            Ok(standbys) => standbys.concat(),
            Err(error) => return Err(self.or_changed(error).await),
        };
        find::must_own(agent, &self.members.all, &standbys).await?;
        for standby in &standbys {
            if let Some((_, new)) = self.numbers.get_mut(&standby.connection) {
                *new = standby.physical_qpn;
            }
        }
        Ok(standbys)
    }

    /// Connects the standby queue pairs.
    pub async fn connect(&mut self, request: PartnerConnectRequest) -> anyhow::Result<()> {
        self.begin(Phase::Prepare, "Connect", Point::PartnerConnect)
            .await?;
        self.key_tables = decode(&request.keys)?;
        let tables = request.tables.iter();
        self.tables
            .extend(tables.map(|table| (table.connection, table.table)));
        self.awaited.extend(&request.made_again);
        self.marks = request.marks;
        let (mut peers, mut lost) = (HashMap::new(), BTreeSet::new());
        for peer in request.peers {
            match peer.remote {
                Some(remote) => _ = peers.insert(peer.connection, (remote.try_into()?, peer.rq_psn)),
                None if self.after_decision() || self.awaited.contains(&peer.connection) => {
                    lost.insert(peer.connection);
                }
                None => anyhow::bail!("a peer without address"),
            }
        }
        if self.awaited.iter().any(|connection| lost.contains(connection)) {
            tracing::error!(
                session = format!("{:016x}", self.session),
                connections = lost.len(),
                "the other ends of connections were lost with their RNIC after the decision; programs here see that as they see a peer \
                 that does not answer any more"
            );
        }
        if self.pauses {
            let moved_to = peers
                .iter()
                .map(|(connection, (remote, _))| (*connection, *remote));
            self.moved_to = moved_to.collect();
            return self.keep();
        }
        self.keep()?;
        let session = self.session;
        let agent = &self.agent;
        let connected = self.members.all.iter().map(|member| {
            let of_member = member.kept.connections.iter();
            // Those that are awaited are told of after the decision; then, of nothing else.
            let named = |(connection, _): &&(u32, u32)| {
                let told_of = self.after_decision() || self.awaited.contains(connection);
                peers.contains_key(connection) || !(told_of || lost.contains(connection))
            };
            let peers: anyhow::Result<Vec<_>> = of_member
                .filter(named)
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
        let connected: anyhow::Result<()> = join_all(connected).await.into_iter().collect();
        if let Err(error) = connected {
            return Err(match self.after_decision() {
                true => error,
                false => self.or_changed(error).await,
            });
        }
        self.awaited
            .retain(|connection| !peers.contains_key(connection) && !lost.contains(connection));
        self.keep()
    }

    /// Why an order to the members has failed: that one of them has destroyed a queue pair since they were found is worth another attempt.
    async fn or_changed(&self, error: anyhow::Error) -> anyhow::Error {
        match find::has_destroyed(&self.members.all).await {
            Some(who) => Changed { who }.into(),
            None => error,
        }
    }

    /// Nothing can be taken back any more, as far as this host knows.
    fn after_decision(&self) -> bool {
        !matches!(self.machine.state(), State::Prepared)
    }

    /// Writes down what an agent that comes after this one must know.
    fn keep(&self) -> anyhow::Result<()> {
        let path = kept_path(&self.agent, self.session);
        let kept = Kept {
            members: self
                .members
                .all
                .iter()
                .map(|member| member.kept.clone())
                .collect(),
            late: self.late.clone(),
            numbers: self.numbers.clone(),
            pauses: self.pauses,
            moved_to: self.moved_to.clone(),
            key_tables: self.key_tables.clone(),
            tables: self.tables.clone(),
            awaited: self.awaited.clone(),
        };
        let folder = path.parent().expect("it has a folder");
        // Key tables are in it.
        make_private(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        whole::write_json(&path, &kept)
    }

    /// A step begins.
    async fn begin(&self, phase: Phase, step: &str, point: Point) -> anyhow::Result<()> {
        self.agent.journal.step(self.session, Role::Partner, phase, step);
        self.agent.faults.pass(point).await.map(drop)
    }
}

fn done(answer: Answer) -> anyhow::Result<()> {
    match answer {
        Answer::Done => Ok(()),
        other => Err(unexpected(&other, "Done")),
    }
}
