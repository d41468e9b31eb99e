//! Whether the queue pairs at both ends of a connection name each other.
//!
//! ```text
//!  RNIC ── PeerQuestion ──► this agent ── ConfirmPeers, by TLS ──► the other host's agent ── MeetPeers ──► its RNIC
//!       ◄─ AnswerPeerQuestions ─┘     ◄── NAMED, UNCONNECTED … ───┘
//! ```
//!
//! An RNIC sends nothing to a queue pair of another host before that host has said that this queue pair names it. Questions are few at a
//! time, of each tenant and in all: the RNIC sees to that. An RNIC that has been told so is told, too, when the queue pair is gone, and
//! until it has heard the number goes to no other one:
//!
//! ```text
//!  RNIC ── Gone ──► this agent ── PeersGone, by TLS ──► the other host's agent ── PeersGone ──► its RNIC
//!       ◄─ PeersHeard ─┘      ◄─────────────────────────┘
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use futures_util::future::join_all;
use tokio::sync::mpsc;
use tonic::Code;
use verbatim_channel::Endpoint;
use verbatim_device::control::{
    MAX_PEER_PAIRS, PeerAnswer, PeerNews, PeerPair, PeerQuestion, PeerStanding, PeerVerdict, QpEnd,
};

use crate::agent::{Agent, Shared};
use crate::confirm_peers::ConfirmPeers;
use crate::directory::address_of;
use crate::gids::Whose;
use crate::kernel_rnics;
use crate::nic_listeners::{Arrivals, hangup, is_absent};
use crate::peer_questions::{Taken, take_questions};
use crate::proto::confirm_peers_reply::Standing;
use crate::proto::{self, ConfirmPeersReply, LinksRequest, links_request};
use crate::protocol::CONFIRM_PEERS;
use crate::session::told;

/// How long another host may take to answer. Its RNIC asks again.
const ASK_LIMIT: Duration = Duration::from_secs(3);

/// An RNIC that is there and does not do its part is asked again after this time at the latest.
const AGAIN: Duration = Duration::from_secs(1);

/// Questions that wait for a task: as many as an RNIC has under way.
const QUESTIONS: usize = 4096;

/// Answers each RNIC that comes, for ever.
pub async fn watch(agent: Shared) -> anyhow::Result<()> {
    if agent.config.confirm_peers == ConfirmPeers::Off {
        return std::future::pending().await;
    }
    let nic = agent.config.nic_socket();
    // Before the first look, so that no RNIC is missed.
    let arrivals = Arrivals::of(&nic).context("cannot watch for the RNIC")?;
    loop {
        let path = nic.clone();
        let taken = tokio::task::spawn_blocking(move || take_questions(&path, QUESTIONS));
        match taken.await.context("connecting to the RNIC panicked")? {
            Ok(Taken::News(news)) => answer_all(&agent, news).await,
            Ok(Taken::TooOld(connection)) => {
                tracing::warn!(
                    "the RNIC is of an earlier release: it sends to other hosts' queue pairs without their word; upgrade it"
                );
                hangup(connection).await?;
            }
            Err(error) if is_absent(&error) => arrivals.next().await?,
            Err(error) => {
                let error = format!("{error:#}");
                tracing::warn!(
                    error,
                    "the RNIC does not ask whether other hosts confirm its connections"
                );
                tokio::select! {
                    arrived = arrivals.next() => arrived?,
                    () = tokio::time::sleep(AGAIN) => {}
                }
            }
        }
    }
}

async fn answer_all(agent: &Shared, mut news: mpsc::Receiver<PeerNews>) {
    while let Some(first) = news.recv().await {
        let (mut questions, mut gone) = (Vec::new(), Vec::new());
        let mut next = Some(first);
        while let Some(news_item) = next {
            match news_item {
                PeerNews::Question(question) => questions.push(question),
                PeerNews::Gone(pair) => gone.push(pair),
            }
            next = match questions.len() + gone.len() < MAX_PEER_PAIRS {
                true => news.try_recv().ok(),
                false => None,
            };
        }
        if !questions.is_empty() {
            tokio::spawn(answer(agent.clone(), questions));
        }
        if !gone.is_empty() {
            tokio::spawn(tell_gone(agent.clone(), gone));
        }
    }
}

/// Tells other hosts that ends of this one name theirs no more, and the RNIC of this one who has heard it. It says the rest again.
async fn tell_gone(agent: Shared, pairs: Vec<PeerPair>) {
    let mut by_host: BTreeMap<String, Vec<PeerPair>> = BTreeMap::new();
    let mut nobodys = Vec::new();
    for pair in pairs {
        match agent.whose(pair.other.gid).await {
            Whose::Host(host) => by_host.entry(host.name.clone()).or_default().push(pair),
            // It has left the list of hosts, and its RNIC with it.
            Whose::Nobodys => nobodys.push(pair),
            Whose::Unknown(error) => {
                tracing::debug!(
                    error = format!("{error:#}"),
                    "cannot say that a queue pair is gone"
                );
            }
        }
    }
    let nic = agent.config.nic_socket();
    let told = by_host.into_iter().map(|(host, pairs)| {
        let (agent, nic) = (agent.clone(), nic.clone());
        async move {
            match told_gone(&agent, &host, &pairs).await {
                Ok(()) => agent.confirming.rnic.peers_heard(&nic, pairs).await,
                Err(error) => {
                    tracing::debug!(
                        host,
                        error = format!("{error:#}"),
                        "cannot say that queue pairs are gone"
                    );
                }
            }
        }
    });
    join_all(told).await;
    if !nobodys.is_empty() {
        agent.confirming.rnic.peers_heard(&nic, nobodys).await;
    }
}

async fn told_gone(agent: &Shared, host: &str, pairs: &[PeerPair]) -> anyhow::Result<()> {
    if host == agent.name() {
        return Ok(());
    }
    let request = links(pairs.iter().copied());
    let told = tokio::time::timeout(ASK_LIMIT, async {
        let mut client = agent.peers.connect(host).await?;
        // An agent of an earlier release has confirmed nothing to its RNIC.
        if agent.peers.can(host, CONFIRM_PEERS) {
            told(
                host,
                "hear of queue pairs that are gone",
                client.peers_gone(request).await,
            )?;
        }
        anyhow::Ok(())
    });
    told.await.context("no answer in time")?
}

fn links(pairs: impl Iterator<Item = PeerPair>) -> LinksRequest {
    let links = pairs.map(|pair| links_request::Link {
        asker: Some(end(pair.own).into()),
        asked: Some(end(pair.other).into()),
        secret: Vec::new(),
    });
    LinksRequest {
        links: links.collect(),
        ..LinksRequest::default()
    }
}

async fn answer(agent: Shared, questions: Vec<PeerQuestion>) {
    let mut by_host: BTreeMap<String, Vec<PeerQuestion>> = BTreeMap::new();
    let (mut answers, mut unknown) = (Vec::new(), Vec::new());
    for question in questions {
        let gid = question.pair.other.gid;
        match agent.peers.directory().by_gid(&gid) {
            _ if !agent.config.confirm_peers.concerns(&gid) => {
                answers.push(answer_of(&question, PeerVerdict::Confirmed))
            }
            Some(host) => by_host.entry(host.name.clone()).or_default().push(question),
            None => unknown.push(question),
        }
    }
    let known = by_host.into_iter().map(|(host, questions)| {
        let agent = agent.clone();
        async move {
            let answers = ask(&agent, &host, &questions).await;
            agent
                .confirming
                .rnic
                .tell(&agent.config.nic_socket(), answers)
                .await;
        }
    });
    // All hosts may have to be asked whose GID it is: nobody else waits for that.
    let unknown = unknown.into_iter().map(|question| {
        let agent = agent.clone();
        async move {
            let answers = match agent.whose(question.pair.other.gid).await {
                Whose::Host(host) => {
                    let host = host.name.clone();
                    ask(&agent, &host, &[question]).await
                }
                Whose::Nobodys => vec![answer_of(&question, foreign(&agent, &question))],
                Whose::Unknown(error) => vec![answer_of(&question, unknown_host(&agent, &question, &error))],
            };
            agent
                .confirming
                .rnic
                .tell(&agent.config.nic_socket(), answers)
                .await;
        }
    });
    let nic = agent.config.nic_socket();
    let at_once = agent.confirming.rnic.tell(&nic, answers);
    tokio::join!(at_once, join_all(known), join_all(unknown));
}

fn answer_of(question: &PeerQuestion, verdict: PeerVerdict) -> PeerAnswer {
    PeerAnswer {
        number: question.number,
        pair: question.pair,
        verdict,
    }
}

/// What holds for an end that is at no known host.
fn foreign(agent: &Agent, question: &PeerQuestion) -> PeerVerdict {
    if !agent.config.confirm_peers.demands(&question.pair.other.gid) {
        return PeerVerdict::Confirmed;
    }
    if agent.confirming.may_log(&question.tenant) {
        tracing::warn!(
            tenant = question.tenant,
            qpn = question.pair.own.qpn,
            address = %address_of(&question.pair.other.gid),
            "a queue pair is connected to an address that --confirm-peers names, and no host has it: new connections there send nothing"
        );
    }
    PeerVerdict::NotYet
}

/// What holds for an end that may be at a host that never said which addresses it has.
fn unknown_host(agent: &Agent, question: &PeerQuestion, error: &anyhow::Error) -> PeerVerdict {
    if agent.confirming.may_log(&question.tenant) {
        tracing::warn!(
            tenant = question.tenant,
            qpn = question.pair.own.qpn,
            error = format!("{error:#}"),
            "a queue pair is connected to an address that may be another host's, which cannot be asked: new connections there send \
             nothing; start the agent there, take that host off the list, or name the networks of the hosts by --confirm-peers"
        );
    }
    PeerVerdict::NotYet
}

/// What the agent of `host` says. Its RNIC's queue pairs are the others'.
async fn ask(agent: &Shared, host: &str, questions: &[PeerQuestion]) -> Vec<PeerAnswer> {
    let all = |verdict| {
        questions
            .iter()
            .map(|question| answer_of(question, verdict))
            .collect()
    };
    if host == agent.name() {
        // An RNIC of the kernel's on this host.
        return all(PeerVerdict::Confirmed);
    }
    let request = links(questions.iter().map(|question| question.pair));
    let asked = tokio::time::timeout(ASK_LIMIT, call(agent, host, request)).await;
    let said = asked.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer in {} s", ASK_LIMIT.as_secs())));
    match said {
        Ok(Said::Nothing) => all(PeerVerdict::Confirmed),
        Ok(Said::Refuses(_)) if questions.len() > 1 => {
            // One of them may be refused because of an address that has just gone: that is nothing to the others.
            let (first, second) = questions.split_at(questions.len() / 2);
            let halves = [first, second].map(|half| Box::pin(ask(agent, host, half)));
            join_all(halves).await.concat()
        }
        Ok(Said::Refuses(error)) => {
            if agent.confirming.may_log(&questions[0].tenant) {
                tracing::warn!(
                    host,
                    error,
                    tenant = questions[0].tenant,
                    "a queue pair is not confirmed"
                );
            }
            all(PeerVerdict::NotYet)
        }
        Ok(Said::Standings(reply)) => {
            // One of a later release may say what is not known here.
            let standing = |said: &i32| Standing::try_from(*said).unwrap_or(Standing::Unknown);
            let standings = reply.standings.iter().map(standing);
            let standings = standings.chain(std::iter::repeat(Standing::Unknown));
            let answered = questions.iter().zip(standings);
            answered
                .map(|(question, standing)| {
                    note(agent, host, question, standing);
                    answer_of(question, verdict(standing))
                })
                .collect()
        }
        Err(error) => {
            if agent.confirming.may_log(&format!("host {host}")) {
                tracing::warn!(
                    host,
                    error = format!("{error:#}"),
                    "cannot ask whether its queue pairs name those of this host: new connections to it wait"
                );
            }
            all(PeerVerdict::NotYet)
        }
    }
}

/// What another agent says.
enum Said {
    Standings(ConfirmPeersReply),
    /// It does not take the question, and why.
    Refuses(String),
    /// It is of an earlier release.
    Nothing,
}

async fn call(agent: &Agent, host: &str, request: LinksRequest) -> anyhow::Result<Said> {
    let mut kept = agent.confirming.client(host);
    loop {
        let (mut client, is_kept) = match kept.take() {
            Some(client) => (client, true),
            None => {
                let client = agent.peers.connect(host).await?;
                if !agent.peers.can(host, CONFIRM_PEERS) {
                    return Ok(Said::Nothing);
                }
                (client, false)
            }
        };
        match client.confirm_peers(request.clone()).await {
            Ok(reply) => {
                if !is_kept {
                    agent.confirming.keep(host, client);
                }
                return Ok(Said::Standings(reply.into_inner()));
            }
            Err(status) => {
                if let Code::PermissionDenied | Code::InvalidArgument = status.code() {
                    return Ok(Said::Refuses(crate::peers::reason(&status)));
                }
                agent.confirming.forget(host);
                match status.code() {
                    // Another one has come, or it was exchanged for an earlier one.
                    Code::Unavailable | Code::Unimplemented if is_kept => {}
                    Code::Unimplemented => return Ok(Said::Nothing),
                    _ => return Err(anyhow::Error::msg(crate::peers::reason(&status))),
                }
            }
        }
    }
}

fn verdict(standing: Standing) -> PeerVerdict {
    match standing {
        Standing::Named | Standing::Foreign => PeerVerdict::Confirmed,
        Standing::Unknown | Standing::Unconnected => PeerVerdict::NotYet,
        Standing::Elsewhere | Standing::Missing => PeerVerdict::Refused,
    }
}

/// One that names somebody else's queue pair is told to the operator.
fn note(agent: &Agent, host: &str, question: &PeerQuestion, standing: Standing) {
    if standing == Standing::Elsewhere && !question.again && agent.confirming.may_log(&question.tenant) {
        let PeerPair { own, other } = question.pair;
        tracing::warn!(
            tenant = question.tenant,
            qpn = own.qpn,
            host,
            names = other.qpn,
            "a queue pair names one of another host that is connected to something else: nothing of it is sent"
        );
    }
}

fn end(end: QpEnd) -> Endpoint {
    let QpEnd { gid, qpn } = end;
    Endpoint { gid, qpn }
}

/// What another host's agent asks: do these of this host's queue pairs name the caller's, which name them?
pub async fn confirm(agent: &Agent, request: LinksRequest) -> anyhow::Result<ConfirmPeersReply> {
    let pairs = pairs_of(request)?;
    let asked: Vec<_> = pairs.iter().map(|pair| pair.own.gid).collect();
    let standings = match agent
        .confirming
        .rnic
        .meet(&agent.config.nic_socket(), pairs)
        .await
    {
        Ok(Some(standings)) => standings.into_iter().map(standing_of).collect(),
        // The RNIC here is of an earlier release, or one of the kernel's.
        Ok(None) => vec![Standing::Foreign; asked.len()],
        Err(error) => {
            tracing::debug!(error = format!("{error:#}"), "no RNIC to ask");
            // The kernel's RNICs name nobody. One that hangs, or is about to come back, may have the same address.
            let kernel_s: Vec<_> = match is_absent(&error) {
                true => kernel_rnics::all(),
                false => Vec::new(),
            };
            let is_kernel_s = |gid: &[u8; 16]| kernel_s.iter().any(|rnic| rnic.gids.contains(gid));
            let standing = |gid| match is_kernel_s(gid) {
                true => Standing::Foreign,
                false => Standing::Unconnected,
            };
            asked.iter().map(standing).collect()
        }
    };
    Ok(ConfirmPeersReply {
        standings: standings.into_iter().map(Into::into).collect(),
    })
}

/// What another host's agent says: these of the caller's queue pairs name these of this host's no more.
pub async fn gone(agent: &Agent, request: LinksRequest) -> anyhow::Result<()> {
    let pairs = pairs_of(request)?;
    let nic = agent.config.nic_socket();
    match agent.confirming.rnic.peers_gone(&nic, pairs).await {
        // Nothing was confirmed to an RNIC that is not there.
        Err(error) if is_absent(&error) => Ok(()),
        heard => heard,
    }
}

/// The ends at this host, and the caller's.
fn pairs_of(request: LinksRequest) -> anyhow::Result<Vec<PeerPair>> {
    let qp_end = |end: Option<proto::Endpoint>| {
        let Endpoint { gid, qpn } = Endpoint::try_from(end.unwrap_or_default())?;
        anyhow::Ok(QpEnd { gid, qpn })
    };
    let pairs = request.links.into_iter().map(|link| {
        anyhow::Ok(PeerPair {
            own: qp_end(link.asked)?,
            other: qp_end(link.asker)?,
        })
    });
    let pairs: Vec<PeerPair> = pairs.collect::<anyhow::Result<_>>()?;
    if pairs.len() > MAX_PEER_PAIRS {
        anyhow::bail!("one question names at most {MAX_PEER_PAIRS} connections");
    }
    Ok(pairs)
}

fn standing_of(standing: PeerStanding) -> Standing {
    match standing {
        PeerStanding::Named => Standing::Named,
        PeerStanding::Unconnected => Standing::Unconnected,
        PeerStanding::Elsewhere => Standing::Elsewhere,
        PeerStanding::Missing => Standing::Missing,
        PeerStanding::Foreign => Standing::Foreign,
    }
}

#[cfg(test)]
mod tests;
