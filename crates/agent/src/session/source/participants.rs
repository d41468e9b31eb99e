//! Who has ends of the instance's connections, as the source asks them: the instance's own processes, and the hosts of the
//! partners. What is asked is the same ([`Members`]); a partner's agent does there what this one does here.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tonic::transport::Channel;
use verbatim_channel::QpProgress;

use super::Source;
use super::plan::End;
use crate::proto::peer_client::PeerClient;
use crate::proto::{self, Count, DrainRequest, SessionId, SettleRequest, StopRequest};
use crate::session::members::{Member, Members, Settled, Undrained, in_milliseconds};
use crate::session::{decode, encode, told};

/// A partner's host.
#[derive(Clone)]
pub struct PartnerHost {
    pub host: String,
    pub client: PeerClient<Channel>,
    /// Its connections, by number.
    pub connections: Vec<u32>,
}

/// What was said when requests were intercepted.
#[derive(Default)]
pub struct Suspended {
    /// How many messages each end has sent.
    pub sent: HashMap<End, u64>,
    /// Ends whose other ends may post markers.
    pub allows: HashSet<End>,
}

/// Who has ends of the connections.
pub enum Participant {
    /// The instance's own processes.
    Own(Members),
    /// A host of partners, and the session's number there.
    Partner(PartnerHost, u64),
}

impl Source {
    /// The instance's processes, with their ends.
    pub(super) fn members(&self) -> Members {
        let member = |process: &super::Process| {
            let ends = self.connections.iter().enumerate();
            let own = ends.filter(|(_, end)| end.pid == process.guest.pid);
            let own = own.map(|(connection, end)| (connection as u32, end.qpn));
            Member {
                moves: Some(process.road_map.version),
                ..Member::here(&process.guest, own.collect())
            }
        };
        let all = self.processes.iter().map(member).collect();
        Members::new(&self.agent, self.session, all)
    }

    /// All who have ends.
    pub(super) fn participants(&self) -> Vec<Participant> {
        let partners = self.partners.iter().cloned();
        let partners = partners.map(|partner| Participant::Partner(partner, self.session));
        [Participant::Own(self.members())]
            .into_iter()
            .chain(partners)
            .collect()
    }
}

impl Participant {
    /// Its ends.
    pub fn ends(&self) -> Vec<End> {
        match self {
            Self::Own(members) => {
                let connections = members.all.iter().flat_map(|member| &member.kept.connections);
                connections
                    .map(|(connection, _)| End::Moving(*connection))
                    .collect()
            }
            Self::Partner(partner, _) => partner.connections.iter().copied().map(End::Partner).collect(),
        }
    }

    /// Its end of a connection.
    pub fn end(&self, connection: u32) -> End {
        match self {
            Self::Own(_) => End::Moving(connection),
            Self::Partner(..) => End::Partner(connection),
        }
    }

    /// Intercepts requests: how many messages each end has sent; of connections that pause a partner's host says nothing.
    pub async fn suspend(self, marks: bool) -> anyhow::Result<Suspended> {
        let (sent, allows) = match &self {
            Self::Own(members) => {
                let sent = members.suspend().await?;
                let allows = match marks {
                    true => members.allow_markers().await?,
                    false => Vec::new(),
                };
                (sent, allows)
            }
            Self::Partner(PartnerHost { host, client, .. }, session) => {
                let id = SessionId { session: *session };
                let reply = client.clone().partner_suspend(id).await;
                let counts = told(host, "suspend its connections", reply)?;
                let sent = counts.counts.into_iter();
                let sent = sent.map(|count| (count.connection, count.messages));
                (sent.collect::<Vec<_>>(), counts.marks)
            }
        };
        let sent = sent.into_iter();
        let sent = sent.map(|(connection, messages)| (self.end(connection), messages));
        let allows = allows.into_iter().map(|connection| self.end(connection));
        Ok(Suspended {
            sent: sent.collect(),
            allows: allows.collect(),
        })
    }

    /// Waits until nothing is in flight, or the limit has come ([`Members::drain`]).
    pub async fn drain(
        self,
        expected: Vec<(u32, u64)>,
        marks: Vec<u32>,
        limit: Duration,
        sends_only: bool,
    ) -> anyhow::Result<Undrained> {
        let (PartnerHost { host, mut client, .. }, session) = match self {
            Self::Own(members) => {
                if !marks.is_empty() {
                    members.mark(&marks).await?;
                }
                return members.drain(&expected, limit, sends_only).await;
            }
            Self::Partner(partner, session) => (partner, session),
        };
        let expected = expected
            .into_iter()
            .map(|(connection, messages)| Count { connection, messages });
        let request = DrainRequest {
            session,
            expected: expected.collect(),
            timeout_ms: in_milliseconds(limit),
            sends_only,
            marks,
        };
        let reply = told(
            &host,
            "finish what is in flight",
            client.partner_drain(request).await,
        )?;
        let at = |left| format!("on {host}, {left}");
        Ok(Undrained {
            connections: reply.undrained.into_iter().collect(),
            left: reply.left.into_iter().map(at).collect(),
        })
    }

    /// Stops connections in the middle of their requests: where its ends stand.
    pub async fn stop(self, connections: Vec<u32>) -> anyhow::Result<Vec<(End, QpProgress)>> {
        if connections.is_empty() {
            return Ok(Vec::new());
        }
        let progress = match &self {
            Self::Own(members) => members.stop(&connections).await?,
            Self::Partner(PartnerHost { host, client, .. }, session) => {
                let session = *session;
                let request = StopRequest { session, connections };
                let reply = client.clone().partner_stop(request).await;
                let what = "stop connections in the middle of their requests";
                decode::<Vec<(u32, QpProgress)>>(&told(host, what, reply)?.progress)?
            }
        };
        Ok(progress
            .into_iter()
            .map(|(connection, progress)| (self.end(connection), progress))
            .collect())
    }

    /// Finds out what was executed, from where the other ends stand.
    pub async fn settle(self, peers: Vec<(u32, QpProgress)>) -> anyhow::Result<Settled> {
        if peers.is_empty() {
            return Ok(Settled::default());
        }
        match self {
            Self::Own(members) => members.settle(&peers).await,
            Self::Partner(PartnerHost { host, mut client, .. }, session) => {
                let progress = encode(&peers);
                let reply = client.partner_settle(SettleRequest { session, progress }).await;
                let reply = told(&host, "tell what was executed", reply)?;
                Ok(Settled {
                    replayed: reply.replayed,
                    completed: reply.completed,
                })
            }
        }
    }

    /// How long takes what is under way at its ends, in microseconds; `None` if longer than the limit. `asked` names the
    /// session's connections to a host that has not heard of them yet.
    pub async fn measure_drain(
        self,
        limit_ms: u32,
        asked: impl FnOnce(&PartnerHost) -> proto::PartnerPrepareRequest,
    ) -> anyhow::Result<Option<u64>> {
        match self {
            Self::Own(members) => members.measure_drain(limit_ms).await,
            Self::Partner(partner, _) => {
                let session = Some(asked(&partner));
                let PartnerHost { host, mut client, .. } = partner;
                let request = proto::MeasureDrainRequest { session, limit_ms };
                let reply = client.measure_drain(request).await;
                Ok(told(&host, "look at what is under way", reply)?.us)
            }
        }
    }
}
