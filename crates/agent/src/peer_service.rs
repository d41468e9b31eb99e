//! The service that agents offer each other: gRPC in, [`crate::session`] out.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::Mutex;
use tokio_stream::{Stream, StreamExt, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use crate::PROTOCOL;
use crate::agent::{Shared, status};
use crate::instances::record::Record;
use crate::journal::{Event, Role};
use crate::proto::peer_server::Peer;
use crate::proto::*;
use crate::session::destination::{self, Destination, Destinations};
use crate::session::partner::{Partner, Partners};
use crate::session::{decode, encode};

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
    reply(result.map(|count| CountReply { count }))
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

    async fn abort_session(agent: &Shared, session: u64) -> anyhow::Result<()> {
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
        Ok(Response::new(HelloReply {
            protocol: PROTOCOL,
            host: self.0.name().to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }))
    }

    async fn resolve(&self, request: Request<ResolveRequest>) -> Reply<ResolveReply> {
        let endpoint = request.into_inner().endpoint;
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

    async fn moved(&self, request: Request<MovedRequest>) -> Reply<Done> {
        let agent = self.0.clone();
        let endpoints = decode(&request.into_inner().endpoints).map_err(|error| status(&error))?;
        agent.datagrams_moved(endpoints).await;
        Ok(Response::new(Done {}))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<Alive, Status>> + Send>>;

    async fn watch(&self, request: Request<SessionId>) -> Reply<Self::WatchStream> {
        let session = request.into_inner().session;
        let (sender, receiver) = tokio::sync::mpsc::channel::<Result<Alive, Status>>(1);
        let agent = self.0.clone();
        tokio::spawn(async move {
            // The source's end closes when its session is over, and when it dies.
            sender.closed().await;
            if let Err(error) = Self::abort_session(&agent, session).await {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "undoing the session of a source that is gone"
                );
            }
            agent.destinations.close(session);
            agent.partners.close(session);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn abort(&self, request: Request<SessionId>) -> Reply<Done> {
        let (agent, session) = (self.0.clone(), request.into_inner().session);
        done(step(async move { Self::abort_session(&agent, session).await }).await)
    }

    async fn check_instance(&self, request: Request<OpenRequest>) -> Reply<CheckInstanceReply> {
        let request = request.into_inner();
        let record: Record = serde_json::from_str(&request.instance)
            .map_err(|error| Status::invalid_argument(format!("a malformed instance record: {error}")))?;
        let blockers = destination::blockers(&self.0, &record, request.memory_bytes);
        Ok(Response::new(CheckInstanceReply { blockers }))
    }

    async fn open(&self, request: Request<OpenRequest>) -> Reply<Done> {
        let (agent, request) = (self.0.clone(), request.into_inner());
        done(step(async move { Destinations::open(&agent, &request).await }).await)
    }

    async fn place(&self, request: Request<Streaming<FilePart>>) -> Reply<PlaceReply> {
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
                Some(Event::Committed | Event::Running) => Ok(Response::new(Done {})),
                _ => Err(Status::failed_precondition(
                    "the session was undone here before it was committed",
                )),
            };
        };
        done(step(async move { session.lock().await.commit().await }).await)
    }

    async fn claim(&self, request: Request<SessionId>) -> Reply<CountReply> {
        let session = self.destination(request.into_inner().session)?;
        count(step(async move { session.lock().await.claim().await }).await)
    }

    async fn resume(&self, request: Request<SessionId>) -> Reply<CountReply> {
        let session = self.destination(request.into_inner().session)?;
        count(step(async move { session.lock().await.resume().await }).await)
    }

    async fn partner_prepare(&self, request: Request<PartnerPrepareRequest>) -> Reply<PartnerPrepareReply> {
        let (agent, request) = (self.0.clone(), request.into_inner());
        let prepared = step(async move { Partners::prepare(&agent, request).await }).await;
        reply(prepared.map(|standbys| PartnerPrepareReply { standbys }))
    }

    async fn partner_connect(&self, request: Request<PartnerConnectRequest>) -> Reply<Done> {
        let request = request.into_inner();
        let session = self.partner(request.session)?;
        done(step(async move { session.lock().await.connect(request).await }).await)
    }

    async fn partner_suspend(&self, request: Request<SessionId>) -> Reply<Counts> {
        let (agent, session) = (self.0.clone(), self.partner(request.into_inner().session)?);
        let counts = step(async move { session.lock().await.suspend(&agent).await }).await;
        reply(counts.map(|counts| Counts { counts }))
    }

    async fn partner_drain(&self, request: Request<DrainRequest>) -> Reply<Done> {
        let request = request.into_inner();
        let (agent, session) = (self.0.clone(), self.partner(request.session)?);
        done(step(async move { session.lock().await.drain(&agent, request).await }).await)
    }

    async fn partner_switch(&self, request: Request<PartnerSwitchRequest>) -> Reply<CountReply> {
        let request = request.into_inner();
        let session = self.partner(request.session)?;
        count(step(async move { session.lock().await.switch(request).await }).await)
    }

    async fn partner_resume(&self, request: Request<SessionId>) -> Reply<CountReply> {
        let session = self.partner(request.into_inner().session)?;
        count(step(async move { session.lock().await.resume().await }).await)
    }
}
