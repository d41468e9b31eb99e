//! The service that agents offer each other: gRPC in, [`crate::session`] out.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::Mutex;
use tokio_stream::{Stream, StreamExt, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};
use verbatim_channel::{Endpoint, MovedEndpoint, QpProgress};

use crate::PROTOCOL;
use crate::agent::{Shared, status};
use crate::caller;
use crate::directory::HostEntry;
use crate::faults::Point;
use crate::forwarding::{self, Forward};
use crate::instances::record::Record;
use crate::journal::{Event, Role};
use crate::pause;
use crate::proto::peer_server::Peer;
use crate::proto::*;
use crate::secrets;
use crate::session::destination::{self, Destination, Destinations};
use crate::session::partner::{Partner, Partners};
use crate::session::{self, Resumed, decode, encode};

/// How long a question when an instance is let go is left open before it is to be asked again.
const LET_GO_PATIENCE: std::time::Duration = std::time::Duration::from_secs(5);

/// The service of one agent.
pub struct PeerService(pub Shared);

type Reply<T> = Result<Response<T>, Status>;

fn reply<T>(result: anyhow::Result<T>) -> Reply<T> {
    result.map(Response::new).map_err(|error| {
        tracing::debug!(error = format!("{error:#}"), "refused to another agent");
        status(&error)
    })
}

fn count(result: anyhow::Result<u64>) -> Reply<CountReply> {
    reply(result.map(|count| CountReply {
        count,
        lost_rnic: false,
    }))
}

fn resumed(result: anyhow::Result<Resumed>) -> Reply<CountReply> {
    reply(result.map(|resumed| CountReply {
        count: resumed.intercepted,
        lost_rnic: resumed.lost_rnic,
    }))
}

fn done(result: anyhow::Result<()>) -> Reply<Done> {
    reply(result.map(|()| Done {}))
}

/// Takes a step of a session in a task of its own: it is not cut off when the caller goes away, so that what it has begun
/// is noted in the session before that is undone.
async fn step<T: Send + 'static>(
    step: impl Future<Output = anyhow::Result<T>> + Send + 'static,
) -> anyhow::Result<T> {
    tokio::spawn(step)
        .await
        .unwrap_or_else(|error| Err(anyhow::anyhow!("a step of the session panicked: {error}")))
}

impl PeerService {
    #[allow(clippy::result_large_err, reason = "tonic's own type")]
    fn destination(&self, session: u64) -> Result<Arc<Mutex<Destination>>, Status> {
        self.0.destinations.get(session).map_err(|error| status(&error))
    }

    #[allow(clippy::result_large_err, reason = "tonic's own type")]
    fn partner(&self, session: u64) -> Result<Arc<Mutex<Partner>>, Status> {
        self.0.partners.get(session).map_err(|error| status(&error))
    }

    /// A session's first request: does it come from the host that it names as its source?
    #[allow(clippy::result_large_err, reason = "tonic's own type")]
    fn source<T>(&self, request: &Request<T>, source: &str) -> Result<&HostEntry, Status> {
        let caller = caller::identify(request, self.0.peers.directory())?;
        caller::is_source(caller, source)?;
        Ok(caller)
    }

    /// Do all of these ends lie on the caller's host?
    async fn owns(&self, caller: &HostEntry, ends: &[Endpoint]) -> Result<(), Status> {
        let gids = ends.iter().map(|end| end.gid);
        let gids = self.0.gids_among(caller, gids).await;
        caller::owns(caller, &gids, ends)
    }

    /// A request about links: do they lead to the caller's host?
    async fn links(&self, request: Request<LinksRequest>) -> Result<LinksRequest, Status> {
        let caller = caller::identify(&request, self.0.peers.directory())?;
        let request_ends = caller::asking_ends(&request.get_ref().links)?;
        self.owns(caller, &request_ends).await?;
        Ok(request.into_inner())
    }

    /// A request about connections: does it come from the source that it names, and do they lead there?
    async fn of_source<T>(&self, request: &Request<T>, of: &PartnerPrepareRequest) -> Result<(), Status> {
        let source = self.source(request, &of.source)?;
        let ends = caller::moving_ends(&of.connections)?;
        self.owns(source, &ends).await
    }

    /// Whether this host's part in a session has come to its good end: whoever asks again has lost the answer.
    fn is_over(&self, session: u64, role: Role) -> bool {
        self.0.journal.last(session, role) == Some(Event::Closed)
    }

    async fn abort_session(agent: &Shared, session: u64) -> anyhow::Result<()> {
        agent.watched.end(session);
        Destinations::abort(agent, session).await;
        Partners::abort(agent, session).await
    }
}

#[tonic::async_trait]
impl Peer for PeerService {
    async fn hello(&self, request: Request<HelloRequest>) -> Reply<HelloReply> {
        let request = request.into_inner();
        if request.protocol != PROTOCOL {
            tracing::warn!(
                host = request.host,
                protocol = request.protocol,
                "an agent speaks another protocol"
            );
        }
        let older = self.0.faults.pass(Point::Hello).await;
        let older = older.map_err(|error| status(&error))?;
        Ok(Response::new(HelloReply {
            protocol: if older { PROTOCOL - 1 } else { PROTOCOL },
            host: self.0.name().to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }))
    }

    async fn gids(&self, request: Request<GidsRequest>) -> Reply<GidsReply> {
        caller::identify(&request, self.0.peers.directory())?;
        reply(self.0.own_gids().await.map(|gids| GidsReply {
            gids: gids.iter().map(|gid| gid.to_vec()).collect(),
        }))
    }

    async fn resolve(&self, request: Request<ResolveRequest>) -> Reply<ResolveReply> {
        caller::identify(&request, self.0.peers.directory())?;
        let endpoint = request.into_inner().endpoint;
        if let Some(endpoint) = &endpoint {
            self.0.held.released(endpoint.qpn, None).await;
        }
        let forward = endpoint.and_then(|endpoint| self.0.forwarding.get(endpoint.qpn));
        Ok(Response::new(match forward {
            Some(forward) => ResolveReply {
                endpoint: Some(forward.endpoint.into()),
                keys: encode(&forward.keys),
            },
            None => ResolveReply {
                endpoint: None,
                keys: Vec::new(),
            },
        }))
    }

    async fn publish(&self, request: Request<PublishRequest>) -> Reply<PublishReply> {
        let caller = caller::identify(&request, self.0.peers.directory())?.clone();
        let request = request.into_inner();
        let now = request.now.map(Endpoint::try_from).transpose();
        let now = now.map_err(|error| status(&error))?;
        let endpoint = now.ok_or_else(|| Status::invalid_argument("a queue pair without its number"))?;
        self.owns(&caller, &[endpoint]).await?;
        let keys = decode(&request.keys).map_err(|error| status(&error))?;
        let published = self.0.forwarding.publish(Forward { endpoint, keys });
        let qpn = published.ok_or_else(|| Status::resource_exhausted("no number is left"))?;
        Ok(Response::new(PublishReply { qpn }))
    }

    async fn moved(&self, request: Request<MovedRequest>) -> Reply<Done> {
        let agent = self.0.clone();
        let caller = caller::identify(&request, agent.peers.directory())?.clone();
        let endpoints: Vec<MovedEndpoint> =
            decode(&request.into_inner().endpoints).map_err(|error| status(&error))?;
        let now: Vec<_> = endpoints.iter().map(|moved| moved.now).collect();
        self.owns(&caller, &now).await?;
        agent.datagrams_moved(endpoints).await;
        Ok(Response::new(Done {}))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<Alive, Status>> + Send>>;

    async fn watch(&self, request: Request<SessionId>) -> Reply<Self::WatchStream> {
        let session = request.into_inner().session;
        let (sender, receiver) = tokio::sync::mpsc::channel::<Result<Alive, Status>>(1);
        let agent = self.0.clone();
        agent.watched.begin(session);
        tokio::spawn(async move {
            // The source's end closes when its session is over, and when it dies.
            sender.closed().await;
            agent.watched.end(session);
            Destinations::abort(&agent, session).await;
            if let Err(error) = Partners::source_is_lost(&agent, session).await {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "undoing the session of a source that is gone"
                );
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn abort(&self, request: Request<SessionId>) -> Reply<Done> {
        let (agent, session) = (self.0.clone(), request.into_inner().session);
        done(step(async move { Self::abort_session(&agent, session).await }).await)
    }

    async fn outcome(&self, request: Request<SessionId>) -> Reply<OutcomeReply> {
        caller::identify(&request, self.0.peers.directory())?;
        let session = request.into_inner().session;
        Ok(Response::new(OutcomeReply {
            outcome: session::outcome(&self.0.journal.parts(session)).into(),
        }))
    }

    async fn check_instance(&self, request: Request<OpenRequest>) -> Reply<CheckInstanceReply> {
        self.source(&request, &request.get_ref().source)?;
        let request = request.into_inner();
        let record: Record = serde_json::from_str(&request.instance)
            .map_err(|error| Status::invalid_argument(format!("a malformed instance record: {error}")))?;
        let mut blockers = destination::blockers(&self.0, &record, request.memory_bytes);
        // Opening a session finds this out by itself.
        let gids = self.0.gids_of(self.0.name()).await;
        blockers.extend(gids.err().map(|error| format!("{}: {error:#}", self.0.name())));
        Ok(Response::new(CheckInstanceReply { blockers }))
    }

    async fn open(&self, request: Request<OpenRequest>) -> Reply<Done> {
        self.source(&request, &request.get_ref().source)?;
        let (agent, request) = (self.0.clone(), request.into_inner());
        done(step(async move { Destinations::open(&agent, &request).await }).await)
    }

    async fn place(&self, request: Request<Streaming<FilePart>>) -> Reply<PlaceReply> {
        let passed = self.0.faults.pass(Point::DestinationPlace).await;
        passed.map_err(|error| status(&error))?;
        let mut parts = request.into_inner();
        let mut bytes = 0;
        let mut session = None;
        while let Some(part) = parts.next().await {
            let part = part?;
            let session = match &mut session {
                Some(session) => session,
                none => none.insert(
                    self.0
                        .destinations
                        .get(part.session)
                        .map_err(|error| status(&error))?,
                ),
            };
            bytes += session
                .lock()
                .await
                .place(&part)
                .map_err(|error| status(&error))?;
        }
        Ok(Response::new(PlaceReply { bytes }))
    }

    async fn pre_setup(&self, request: Request<PreSetupRequest>) -> Reply<PreSetupReply> {
        let request = request.into_inner();
        let session = self.destination(request.session)?;
        reply(step(async move { session.lock().await.pre_setup(&request).await }).await)
    }

    async fn connect_standby(&self, request: Request<ConnectRequest>) -> Reply<Done> {
        let request = request.into_inner();
        let session = self.destination(request.session)?;
        done(step(async move { session.lock().await.connect(request).await }).await)
    }

    async fn prepare_restore(&self, request: Request<SessionId>) -> Reply<Done> {
        let session = self.destination(request.into_inner().session)?;
        done(step(async move { session.lock().await.prepare_restore().await }).await)
    }

    async fn restore(&self, request: Request<SessionId>) -> Reply<RestoreReply> {
        let session = self.destination(request.into_inner().session)?;
        let restored = step(async move { session.lock().await.restore().await }).await;
        reply(restored.map(|restore_ms| RestoreReply { restore_ms }))
    }

    async fn commit(&self, request: Request<SessionId>) -> Reply<Done> {
        let id = request.into_inner().session;
        let Ok(session) = self.0.destinations.get(id) else {
            // The source asks again after it, or this agent, lost the answer.
            return match self.0.journal.last(id, Role::Destination) {
                Some(Event::Committed | Event::Running | Event::Closed) => Ok(Response::new(Done {})),
                Some(Event::RolledBack) => Err(Status::failed_precondition(
                    "the session was undone here before it was committed",
                )),
                // Whoever asks must not take that for a refusal.
                Some(Event::Opened | Event::Step) => {
                    Err(Status::unavailable("the session is being undone here"))
                }
                None => Err(Status::not_found(
                    "the journal here does not know the session; was it lost with a restart of the machine?",
                )),
            };
        };
        done(step(async move { session.lock().await.commit().await }).await)
    }

    async fn claim(&self, request: Request<SessionId>) -> Reply<CountReply> {
        let id = request.into_inner().session;
        if self.is_over(id, Role::Destination) {
            return count(Ok(0));
        }
        let session = self.destination(id)?;
        count(step(async move { session.lock().await.claim().await }).await)
    }

    async fn resume(&self, request: Request<SessionId>) -> Reply<CountReply> {
        let id = request.into_inner().session;
        if self.is_over(id, Role::Destination) {
            return count(Ok(0));
        }
        let session = self.destination(id)?;
        resumed(step(async move { session.lock().await.resume().await }).await)
    }

    async fn check_partner(&self, request: Request<PartnerPrepareRequest>) -> Reply<CheckInstanceReply> {
        self.of_source(&request, request.get_ref()).await?;
        let found = Partners::check(&self.0, request.into_inner()).await;
        let blockers = found.err().map(|error| format!("{error:#}"));
        Ok(Response::new(CheckInstanceReply {
            blockers: blockers.into_iter().collect(),
        }))
    }

    async fn partner_join(&self, request: Request<PartnerPrepareRequest>) -> Reply<JoinReply> {
        self.of_source(&request, request.get_ref()).await?;
        let (agent, request) = (self.0.clone(), request.into_inner());
        let joined = step(async move { Partners::join(&agent, request).await }).await;
        reply(joined.map(|moving| JoinReply {
            moving: moving.unwrap_or_default(),
        }))
    }

    async fn partner_leave(&self, request: Request<SessionId>) -> Reply<Done> {
        caller::identify(&request, self.0.peers.directory())?;
        self.0.turns.leave(request.into_inner().session);
        Ok(Response::new(Done {}))
    }

    async fn let_go(&self, request: Request<LetGoRequest>) -> Reply<Done> {
        caller::identify(&request, self.0.peers.directory())?;
        let instance = request.into_inner().instance;
        let let_go = self.0.turns.let_go(&instance);
        let _ = tokio::time::timeout(LET_GO_PATIENCE, let_go).await;
        Ok(Response::new(Done {}))
    }

    async fn measure_drain(&self, request: Request<MeasureDrainRequest>) -> Reply<MeasureDrainReply> {
        let of = request.get_ref().session.clone().unwrap_or_default();
        self.of_source(&request, &of).await?;
        let (agent, limit_ms) = (self.0.clone(), request.get_ref().limit_ms);
        let measured = step(async move { Partners::measure_drain(&agent, of, limit_ms).await }).await;
        reply(measured.map(|us| MeasureDrainReply { us }))
    }

    async fn partner_prepare(&self, request: Request<PartnerPrepareRequest>) -> Reply<PartnerPrepareReply> {
        self.of_source(&request, request.get_ref()).await?;
        let (agent, request) = (self.0.clone(), request.into_inner());
        reply(step(async move { Partners::prepare(&agent, request).await }).await)
    }

    async fn find_partners(&self, request: Request<FindPartnersRequest>) -> Reply<FindPartnersReply> {
        let caller = caller::identify(&request, self.0.peers.directory())?.clone();
        let ends = request.into_inner().ends.into_iter().map(Endpoint::try_from);
        let ends: Vec<_> = ends
            .collect::<anyhow::Result<_>>()
            .map_err(|error| status(&error))?;
        self.owns(&caller, &ends).await?;
        reply(
            Partners::find(&self.0, &ends)
                .await
                .map(|found| FindPartnersReply { found }),
        )
    }

    async fn partner_connect(&self, request: Request<PartnerConnectRequest>) -> Reply<Done> {
        let request = request.into_inner();
        let session = self.partner(request.session)?;
        done(step(async move { session.lock().await.connect(request).await }).await)
    }

    async fn partner_suspend(&self, request: Request<SessionId>) -> Reply<Counts> {
        let session = self.partner(request.into_inner().session)?;
        let counts = step(async move { session.lock().await.suspend().await }).await;
        reply(counts.map(|counts| Counts { counts }))
    }

    async fn partner_drain(&self, request: Request<DrainRequest>) -> Reply<DrainReply> {
        let request = request.into_inner();
        let session = self.partner(request.session)?;
        reply(step(async move { session.lock().await.drain(request).await }).await)
    }

    async fn partner_stop(&self, request: Request<StopRequest>) -> Reply<StopReply> {
        let request = request.into_inner();
        let session = self.partner(request.session)?;
        let stopped = step(async move { session.lock().await.stop(&request.connections).await }).await;
        reply(stopped.map(|progress| StopReply {
            progress: encode(&progress),
        }))
    }

    async fn partner_settle(&self, request: Request<SettleRequest>) -> Reply<SettleReply> {
        let request = request.into_inner();
        let session = self.partner(request.session)?;
        let settled = async move {
            let peers: Vec<(u32, QpProgress)> = decode(&request.progress)?;
            session.lock().await.settle(&peers).await
        };
        reply(step(settled).await)
    }

    async fn partner_switch(&self, request: Request<SessionId>) -> Reply<CountReply> {
        let id = request.into_inner().session;
        if self.is_over(id, Role::Partner) {
            return count(Ok(0));
        }
        let session = self.partner(id)?;
        count(step(async move { session.lock().await.switch().await }).await)
    }

    async fn partner_resume(&self, request: Request<SessionId>) -> Reply<CountReply> {
        let id = request.into_inner().session;
        if self.is_over(id, Role::Partner) {
            return count(Ok(0));
        }
        let session = self.partner(id)?;
        resumed(step(async move { session.lock().await.resume().await }).await)
    }

    async fn share_secrets(&self, request: Request<LinksRequest>) -> Reply<Done> {
        let (agent, request) = (self.0.clone(), self.links(request).await?);
        done(step(async move { secrets::accept(&agent, request).await }).await)
    }

    async fn pause_ends(&self, request: Request<LinksRequest>) -> Reply<Done> {
        let (agent, request) = (self.0.clone(), self.links(request).await?);
        done(step(async move { pause::stop_ends(&agent, request).await }).await)
    }

    async fn resume_ends(&self, request: Request<LinksRequest>) -> Reply<ResumeEndsReply> {
        let (agent, request) = (self.0.clone(), self.links(request).await?);
        let gone = step(async move { pause::resume_ends(&agent, request).await }).await;
        reply(gone.map(|gone| ResumeEndsReply {
            gone: gone.into_iter().map(Into::into).collect(),
        }))
    }

    async fn retarget(&self, request: Request<RetargetRequest>) -> Reply<CountReply> {
        let from = caller::identify(&request, self.0.peers.directory())?.gid();
        let moved = forwarding::decode(request.into_inner(), from);
        count(moved.map(|moved| self.0.forwarding.retarget(&moved)))
    }
}
