//! What is left to do after the decision, whoever does it: the source, or the destination when the source is gone.
//!
//! First all ends take their new queues, then all let their requests flow: a message that arrives before its RECV would
//! be refused with an RNR NAK, and those may be counted. There is no way back, so a host that is out of reach is asked
//! again until it is there; every host takes what it is asked twice for done. Two answers end the asking without it: the host
//! has nothing left of the session, or an operator has given the session up ([`Unfinished`]).

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::transport::Channel;

use super::made_again::partner_request;
use super::{PAUSE, ProcessKeys, decode, told};
use crate::agent::Shared;
use crate::proto::peer_client::PeerClient;
use crate::proto::{CountReply, MadeEnd, NewQp, SessionId};

/// How long one question may take: longer than a process has to come for its contexts.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// One of the two things to do, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Take the new queues; post RECVs that nothing has consumed.
    Switch,
    /// Let the requests flow.
    Resume,
}

/// A host that takes part.
#[derive(Clone)]
struct Host {
    name: String,
    is_destination: bool,
    /// A connection that has worked before.
    client: Option<PeerClient<Channel>>,
    /// It did not take a step in time: the next one is not for it yet.
    behind: bool,
    /// Nothing is left of the session there: it is not asked any more.
    has_ended: bool,
}

/// Sessions after their decision that hosts out of reach keep from their end.
#[derive(Debug, Default)]
pub struct Unfinished(Arc<Mutex<HashMap<u64, watch::Sender<bool>>>>);

impl Unfinished {
    fn begin(&self, session: u64) -> GivenUp {
        let sender = watch::Sender::new(false);
        let receiver = sender.subscribe();
        let mut all = self.0.lock().expect("no panic under this lock");
        all.insert(session, sender);
        GivenUp {
            session,
            receiver,
            all: Arc::clone(&self.0),
        }
    }

    /// Ends the asking; false if nobody is asked in that session.
    pub fn give_up(&self, session: u64) -> bool {
        let all = self.0.lock().expect("no panic under this lock");
        all.get(&session)
            .map(|session| session.send_replace(true))
            .is_some()
    }
}

/// Whether an operator has given a session up. It is known to [`Unfinished`] until this is dropped.
#[derive(Debug)]
struct GivenUp {
    session: u64,
    receiver: watch::Receiver<bool>,
    all: Arc<Mutex<HashMap<u64, watch::Sender<bool>>>>,
}

impl GivenUp {
    async fn asked(&self) {
        let mut receiver = self.receiver.clone();
        if receiver.wait_for(|given_up| *given_up).await.is_err() {
            // Another driver of the same session has taken the place.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for GivenUp {
    fn drop(&mut self) {
        let mut all = self.all.lock().expect("no panic under this lock");
        if all
            .get(&self.session)
            .is_some_and(|sender| sender.subscribe().same_channel(&self.receiver))
        {
            all.remove(&self.session);
        }
    }
}

/// One session after its decision.
#[derive(Clone)]
pub struct Driver {
    agent: Shared,
    session: u64,
    hosts: Vec<Host>,
    /// Hosts whose RNIC died on the way.
    lost: Vec<String>,
    /// Something may be made again at the destination, so that partners switch after it.
    makes_again: bool,
    /// What was, once the destination has said it.
    made: Arc<Mutex<Made>>,
}

/// What the destination's processes have made again.
#[derive(Debug, Clone, Default)]
struct Made {
    qps: Vec<NewQp>,
    ends: Vec<MadeEnd>,
    keys: ProcessKeys,
}

impl Driver {
    /// Of a session that these hosts take part in; connections to them, if there are any, spare a greeting.
    pub fn new(
        agent: &Shared,
        session: u64,
        destination: (String, Option<PeerClient<Channel>>),
        partners: impl IntoIterator<Item = (String, Option<PeerClient<Channel>>)>,
    ) -> Self {
        let host = |(name, client), is_destination| Host {
            name,
            is_destination,
            client,
            behind: false,
            has_ended: false,
        };
        let mut hosts: Vec<_> = partners.into_iter().map(|partner| host(partner, false)).collect();
        hosts.push(host(destination, true));
        Self {
            agent: agent.clone(),
            session,
            hosts,
            lost: Vec::new(),
            makes_again: true,
            made: Arc::default(),
        }
    }

    /// Nothing is made again: partners need not wait for the destination.
    pub fn made_nothing_again(&mut self) {
        self.makes_again = false;
    }

    /// What was made again, and the remote keys of all processes, if something was.
    pub fn made(&self) -> Option<(Vec<NewQp>, ProcessKeys)> {
        let made = self.made.lock().expect("no panic under this lock");
        (!made.qps.is_empty()).then(|| (made.qps.clone(), made.keys.clone()))
    }

    /// Which hosts take a step together: first those, then these.
    fn waves(&self, step: Step) -> [Vec<usize>; 2] {
        let all = (0..self.hosts.len()).filter(|index| !self.hosts[*index].has_ended);
        let first =
            |index: &usize| step != Step::Switch || !self.makes_again || self.hosts[*index].is_destination;
        all.partition::<Vec<_>, _>(first).into()
    }

    /// Takes a step at all hosts that are not behind. Those that have not taken it after `limit` are from then on, and
    /// are the error. Also says how many requests the others posted, and notes whose RNIC was lost.
    pub async fn take(&mut self, step: Step, limit: Duration) -> (u64, anyhow::Result<()>) {
        let deadline = Some(Instant::now() + limit);
        let (mut asked, mut answers) = (Vec::new(), Vec::new());
        for wave in self.waves(step) {
            let wave: Vec<_> = wave
                .into_iter()
                .filter(|index| !self.hosts[*index].behind)
                .collect();
            let asking = wave
                .iter()
                .map(|index| self.insist(&self.hosts[*index], step, deadline));
            answers.extend(join_all(asking).await);
            asked.extend(wave);
        }
        let (mut posted, mut outcome) = (0, Ok(()));
        for (index, answer) in asked.into_iter().zip(answers) {
            match answer {
                Ok(reply) => {
                    posted += reply.count;
                    if reply.lost_rnic {
                        self.lost.push(self.hosts[index].name.clone());
                    }
                    self.hosts[index].has_ended |= reply.nothing_left;
                }
                Err(error) => {
                    self.hosts[index].behind = true;
                    outcome = Err(error);
                }
            }
        }
        (posted, outcome)
    }

    /// An error if an RNIC died on the way, or a host's processes.
    pub fn must_have_lost_nothing(&self) -> anyhow::Result<()> {
        let ended = self.hosts.iter().filter(|host| host.has_ended);
        let ended: Vec<_> = ended.map(|host| host.name.as_str()).collect();
        match &self.lost[..] {
            [] if ended.is_empty() => Ok(()),
            [] => anyhow::bail!(
                "the instance has moved, but {} has nothing left of its part in the session: its machine was started anew, or its \
                 journal was lost; the connections to its programs are lost, start those programs again",
                ended.join(" and ")
            ),
            lost => anyhow::bail!(
                "the instance has moved, but the RNIC of {} died after the decision, and the programs have lost their \
                 connections there, as whenever an RNIC dies; start it (`verbatim nic`), and those programs, again",
                lost.join(" and of ")
            ),
        }
    }

    /// Takes both steps at all hosts, however long that takes, unless an operator gives the session up.
    pub async fn finish(&self) {
        let given_up = self.agent.unfinished.begin(self.session);
        tokio::select! {
            () = self.take_all() => {}
            () = given_up.asked() => tracing::warn!(
                session = format!("{:016x}", self.session),
                "an operator has given the session up: hosts that have not answered are not asked any more"
            ),
        }
    }

    async fn take_all(&self) {
        for step in [Step::Switch, Step::Resume] {
            for wave in self.waves(step) {
                // Without a limit it does not fail.
                join_all(
                    wave.iter()
                        .map(|index| self.insist(&self.hosts[*index], step, None)),
                )
                .await;
            }
        }
    }

    async fn insist(&self, host: &Host, step: Step, deadline: Option<Instant>) -> anyhow::Result<CountReply> {
        let mut known = host.client.clone();
        let mut told = false;
        loop {
            let answer_by = Instant::now() + ANSWER_TIMEOUT;
            let by = deadline.map_or(answer_by, |deadline| deadline.min(answer_by));
            let asked = timeout_at(by, self.ask(host, known.take(), step)).await;
            let error = match asked {
                Ok(Ok(reply)) => return Ok(reply),
                Ok(Err(error)) => error,
                Err(_) => anyhow::anyhow!("{} takes too long", host.name),
            };
            if !std::mem::replace(&mut told, true) {
                tracing::warn!(
                    session = format!("{:016x}", self.session),
                    error = format!("{error:#}"),
                    "asked again until it is done"
                );
            }
            if deadline.is_some_and(|deadline| Instant::now() + PAUSE >= deadline) {
                return Err(error);
            }
            sleep(PAUSE).await;
        }
    }

    async fn ask(
        &self,
        host: &Host,
        known: Option<PeerClient<Channel>>,
        step: Step,
    ) -> anyhow::Result<CountReply> {
        let mut client = match known {
            Some(client) => client,
            None => self.agent.peers.connect(&host.name).await?,
        };
        let id = SessionId {
            session: self.session,
        };
        let (what, reply) = match (host.is_destination, step) {
            (true, Step::Switch) => ("give the processes their queues", client.claim(id).await),
            (true, Step::Resume) => ("resume the instance's connections", client.resume(id).await),
            (false, Step::Switch) => {
                let made = self.made.lock().expect("no panic under this lock").clone();
                if let Some(request) = partner_request(self.session, &host.name, &made.ends, &made.keys)? {
                    told(
                        &host.name,
                        "connect its new queue pairs",
                        client.partner_connect(request).await,
                    )?;
                }
                ("switch to the new connections", client.partner_switch(id).await)
            }
            (false, Step::Resume) => ("resume its connections", client.partner_resume(id).await),
        };
        let reply = match reply {
            // That host had a part in the session, so its journal is lost, and it will never know more.
            Err(status) if status.code() == tonic::Code::NotFound => CountReply {
                nothing_left: true,
                ..CountReply::default()
            },
            reply => told(&host.name, what, reply)?,
        };
        if reply.nothing_left {
            tracing::error!(
                session = format!("{:016x}", self.session),
                host = host.name,
                "nothing is left there of the session: the connections to its programs are lost"
            );
        }
        if !reply.made.is_empty() || !reply.ends.is_empty() {
            *self.made.lock().expect("no panic under this lock") = Made {
                qps: reply.made.clone(),
                ends: reply.ends.clone(),
                keys: decode(&reply.keys)?,
            };
        }
        if reply.lost_rnic {
            tracing::error!(
                session = format!("{:016x}", self.session),
                host = host.name,
                "its RNIC died after the decision: the programs have lost their connections there"
            );
        }
        Ok(reply)
    }
}
