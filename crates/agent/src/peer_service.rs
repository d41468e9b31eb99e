//! The service that agents offer each other: gRPC in, [`crate::session`] out.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::{Mutex, mpsc};
use tokio_stream::{Stream, StreamExt, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};
use verbatim_bulk::Incoming;
use verbatim_channel::{Endpoint, MovedEndpoint, QpProgress};
use verbatim_session::Role;
use verbatim_session::decision::Outcome;
use verbatim_session::record::Standing;

use crate::PROTOCOLS;
use crate::agent::{Shared, status};
use crate::authority::{Admitted, Says};
use crate::caller;
use crate::confirming;
use crate::faults::Point;
use crate::forwarding::{self, Forward};
use crate::instances::machine::fits;
use crate::instances::record::Record;
use crate::instances::storage::images;
use crate::load;
use crate::memory::others::Others;
use crate::pause;
use crate::proto::peer_server::Peer;
use crate::proto::*;
use crate::protocol;
use crate::quotas;
use crate::rpcs::PeerRpc;
use crate::secrets;
use crate::session::destination::{self, Destination, Destinations, landed};
use crate::session::partner::{Partner, Partners};
use crate::session::{Resumed, decode, encode};
use crate::session::{outcome, rnics};

/// How long a question when an instance is let go is left open before it is to be asked again.
const LET_GO_PATIENCE: std::time::Duration = std::time::Duration::from_secs(5);

/// Parts and answers that may wait for each other.
const LANDED_PARTS: usize = 16;

/// The service of one agent.
pub struct PeerService(pub Shared);

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;
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
        ..CountReply::default()
    }))
}

fn resumed(result: anyhow::Result<Resumed>) -> Reply<CountReply> {
    reply(result.map(|resumed| CountReply {
        count: resumed.intercepted,
        lost_rnic: resumed.lost_rnic,
        ..CountReply::default()
    }))
}

/// An error unless the protocol that the source of a session has pinned is spoken here.
#[allow(clippy::result_large_err, reason = "tonic's own type")]
fn spoken_here(protocol: u32, source: &str) -> Result<(), Status> {
    let pinned = protocol::pinned(protocol, source);
    pinned.map(drop).map_err(|error| status(&error))
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

    /// The message of a request, if its sender may ask that.
    async fn admit<T: Says>(&self, rpc: PeerRpc, request: Request<T>) -> Result<T, Status> {
        Ok(self.0.admit(rpc, request).await?.message)
    }

    /// Whether this host's part in a session has come to its good end: whoever asks again has lost the answer.
    fn is_over(&self, session: u64, role: Role) -> bool {
        self.0.journal.standing(session, role) == Some(Standing::Closed(Outcome::Committed))
    }

    /// The answer to a step after the commit where this host's part is over, one way or the other.
    fn partner_is_over(&self, session: u64) -> Option<CountReply> {
        match self.0.journal.standing(session, Role::Partner)? {
            Standing::Closed(outcome) => Some(CountReply {
                nothing_left: outcome != Outcome::Committed,
                ..CountReply::default()
            }),
            _ => None,
        }
    }

    async fn abort_session(agent: &Shared, session: u64) -> anyhow::Result<()> {
        agent.watched.end(session);
        Destinations::abort(agent, session).await;
        Partners::abort(agent, session).await
    }
}

/// Gives parts to the thread that places them, until there are no more or one cannot be placed.
async fn place_landed(
    destination: &Arc<Mutex<Destination>>,
    mut parts: impl Stream<Item = Result<FilePart, Status>> + Unpin,
    answers: mpsc::Sender<Result<Freed, Status>>,
    others: Others,
    is_to_damage: bool,
) -> Result<(), Status> {
    let incoming = destination.lock().await.lend_bulk();
    let canceller = incoming.as_ref().map(Incoming::canceller);
    let (to_place, mut waiting) = mpsc::channel(LANDED_PARTS);
    let place = Arc::clone(destination);
    let placing = tokio::task::spawn_blocking(move || {
        let mut incoming = incoming;
        let placed = landed::place_all(
            &place,
            &mut incoming,
            &mut waiting,
            &answers,
            others,
            is_to_damage,
        );
        if placed.is_ok() {
            place.blocking_lock().take_bulk_back(incoming);
        }
        placed
    });
    let mut cut_off = Ok(());
    while let Some(part) = parts.next().await {
        match part {
            // It says why it takes no more.
            Ok(part) => {
                if to_place.send(part).await.is_err() {
                    break;
                }
            }
            Err(status) => {
                cut_off = Err(status);
                if let Some(canceller) = &canceller {
                    canceller.cancel();
                }
                break;
            }
        }
    }
    drop(to_place);
    let placed = placing.await;
    placed.unwrap_or_else(|error| Err(Status::internal(format!("placing files panicked: {error}"))))?;
    cut_off
}

#[tonic::async_trait]
impl Peer for PeerService {
    async fn hello(&self, request: Request<HelloRequest>) -> Reply<HelloReply> {
        let request = self.admit(PeerRpc::Hello, request).await?;
        let (mut reply, agreed) = protocol::answer_hello(PROTOCOLS, &request, self.0.name());
        if agreed.is_none() {
            tracing::warn!(
                host = request.host,
                newest = request.protocol,
                oldest = request.oldest,
                "an agent speaks no protocol that is known here"
            );
        }
        let older = self.0.faults.pass(Point::Hello).await;
        if older.map_err(|error| status(&error))? {
            // That of a release which is too old, and had no ranges.
            reply = HelloReply {
                protocol: PROTOCOLS.oldest - 1,
                host: reply.host,
                ..HelloReply::default()
            };
        }
        Ok(Response::new(reply))
    }

    async fn gids(&self, request: Request<GidsRequest>) -> Reply<GidsReply> {
        let names_instances = self.admit(PeerRpc::Gids, request).await?.instances;
        if names_instances {
            // Also where there is no RNIC to ask.
            return Ok(Response::new(GidsReply {
                instances: self.0.instance_names().into_iter().collect(),
                names_instances,
                gids: Vec::new(),
            }));
        }
        reply(self.0.own_gids().await.map(|gids| GidsReply {
            gids: gids.iter().map(|gid| gid.to_vec()).collect(),
            ..GidsReply::default()
        }))
    }

    async fn resolve(&self, request: Request<ResolveRequest>) -> Reply<ResolveReply> {
        let endpoint = self.admit(PeerRpc::Resolve, request).await?.endpoint;
        if let Some(endpoint) = &endpoint {
            self.0.held.released(endpoint.qpn, None).await;
        }
        let forward = match endpoint {
            Some(endpoint) => forwarding::current(&self.0, endpoint.qpn).await,
            None => None,
        };
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
        let Admitted { caller, message } = self.0.admit(PeerRpc::Publish, request).await?;
        let now = message.now.map(Endpoint::try_from).transpose();
        let now = now.map_err(|error| status(&error))?;
        let endpoint = now.ok_or_else(|| Status::invalid_argument("a queue pair without its number"))?;
        let keys = decode(&message.keys).map_err(|error| status(&error))?;
        let published = self
            .0
            .forwarding
            .publish(Forward { endpoint, keys }, &caller.name);
        let qpn = published
            .ok_or_else(|| Status::resource_exhausted(format!("no number is left for {}", caller.name)))?;
        Ok(Response::new(PublishReply { qpn }))
    }

    async fn moved(&self, request: Request<MovedRequest>) -> Reply<Done> {
        let Admitted { caller, message } = self.0.admit(PeerRpc::Moved, request).await?;
        let endpoints: Vec<MovedEndpoint> = decode(&message.endpoints).map_err(|error| status(&error))?;
        self.0.told_of_datagrams(&caller, endpoints).await?;
        Ok(Response::new(Done {}))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<Alive, Status>> + Send>>;

    async fn watch(&self, request: Request<SessionId>) -> Reply<Self::WatchStream> {
        let Admitted { caller, message } = self.0.admit(PeerRpc::Watch, request).await?;
        let (agent, session) = (self.0.clone(), message.session);
        let begun = agent.watched.begin(session, &caller.name);
        begun.map_err(|error| status(&error))?;
        let (sender, receiver) = tokio::sync::mpsc::channel::<Result<Alive, Status>>(1);
        tokio::spawn(async move {
            // The source's end closes when its session is over, and when it dies.
            sender.closed().await;
            agent.watched.end(session);
            Destinations::source_is_lost(&agent, session).await;
            Partners::source_is_lost(&agent, session).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn abort(&self, request: Request<SessionId>) -> Reply<Done> {
        let session = self.admit(PeerRpc::Abort, request).await?.session;
        let agent = self.0.clone();
        done(step(async move { Self::abort_session(&agent, session).await }).await)
    }

    async fn outcome(&self, request: Request<SessionId>) -> Reply<OutcomeReply> {
        let session = self.admit(PeerRpc::Outcome, request).await?.session;
        let is_asking = self.0.destinations.is_asking(session);
        Ok(Response::new(outcome::known(&self.0.journal, session, is_asking)))
    }

    async fn check_instance(&self, request: Request<OpenRequest>) -> Reply<CheckInstanceReply> {
        let request = self.admit(PeerRpc::CheckInstance, request).await?;
        spoken_here(request.protocol, &request.source)?;
        let record: Record = serde_json::from_str(&request.instance)
            .map_err(|error| Status::invalid_argument(format!("a malformed instance record: {error}")))?;
        let mut blockers = destination::blockers(&self.0, &record, &request);
        // Opening a session finds this out by itself.
        let gids = self.0.gids_of(self.0.name()).await;
        blockers.extend(gids.err().map(|error| format!("{}: {error:#}", self.0.name())));
        let fit = fits::compare(&self.0, &record, &request.machine).await;
        blockers.extend(fit.blockers);
        let mut reply = CheckInstanceReply {
            blockers,
            notes: fit.notes,
            images_elsewhere: tokio::task::block_in_place(|| images::elsewhere(&request.images)),
            ..Default::default()
        };
        rnics::describe_host(&mut reply);
        Ok(Response::new(reply))
    }

    async fn open(&self, request: Request<OpenRequest>) -> Reply<Done> {
        let request = self.admit(PeerRpc::Open, request).await?;
        spoken_here(request.protocol, &request.source)?;
        let agent = self.0.clone();
        done(step(async move { Destinations::open(&agent, &request).await }).await)
    }

    async fn place(&self, request: Request<Streaming<FilePart>>) -> Reply<PlaceReply> {
        let caller = caller::identify(&request, self.0.peers.directory())?.clone();
        let passed = self.0.faults.pass(Point::DestinationPlace).await;
        passed.map_err(|error| status(&error))?;
        let mut parts = request.into_inner();
        let mut bytes = 0;
        let mut session = None;
        while let Some(part) = parts.next().await {
            let part = part?;
            let (_, destination) = match &session {
                Some((of, _)) if *of != part.session => {
                    return Err(Status::invalid_argument("parts of several sessions in one call"));
                }
                Some(session) => session,
                None => {
                    self.0.permit(PeerRpc::Place, &caller, &part).await?;
                    session.insert((part.session, self.destination(part.session)?))
                }
            };
            let placed = destination.lock().await.place(&part, None);
            bytes += placed.map_err(|error| status(&error))?;
        }
        Ok(Response::new(PlaceReply { bytes }))
    }

    async fn offer_bulk(&self, request: Request<OfferBulkRequest>) -> Reply<OfferBulkReply> {
        let request = self.admit(PeerRpc::OfferBulk, request).await?;
        let session = self.destination(request.session)?;
        let accepted = step(async move { session.lock().await.offer_bulk(&request.offer).await });
        reply(accepted.await.map(|accepted| OfferBulkReply {
            accepted,
            waiting_percent: load::waiting_percent(),
        }))
    }

    async fn lack(&self, request: Request<LackRequest>) -> Reply<Done> {
        let request = self.admit(PeerRpc::Lack, request).await?;
        let session = self.destination(request.session)?;
        done(step(async move { session.lock().await.lack(request).await }).await)
    }

    async fn read_behind(&self, request: Request<ReadBehindRequest>) -> Reply<ReadBehindReply> {
        let Admitted { caller, message } = self.0.admit(PeerRpc::ReadBehind, request).await?;
        quotas::may_be_told(message.length, message.described)?;
        reply(self.0.behinds.read(&caller.name, &message).await)
    }

    async fn lend_behind(&self, request: Request<LendBehindRequest>) -> Reply<LendBehindReply> {
        let Admitted { caller, message } = self.0.admit(PeerRpc::LendBehind, request).await?;
        quotas::may_be_lent(message.wishes.len())?;
        let rnic = Arc::clone(&self.0.rnic);
        let open = move || rnic.device();
        reply(self.0.behinds.lend(&caller.name, message, open).await)
    }

    type PlaceLandedStream = Answers<Freed>;

    async fn place_landed(&self, request: Request<Streaming<FilePart>>) -> Reply<Self::PlaceLandedStream> {
        let caller = caller::identify(&request, self.0.peers.directory())?.clone();
        let passed = self.0.faults.pass(Point::DestinationPlace).await;
        let is_to_damage = passed.map_err(|error| status(&error))?;
        let mut parts = request.into_inner();
        let (answers, receiver) = mpsc::channel(LANDED_PARTS);
        if let Some(first) = parts.next().await {
            let first = first?;
            self.0.permit(PeerRpc::PlaceLanded, &caller, &first).await?;
            let session = first.session;
            let destination = self.destination(session)?;
            let others = Others::new(self.0.config.nic_socket());
            tokio::spawn(async move {
                let rest = parts.map(move |part| match part {
                    Ok(part) if part.session != session => {
                        Err(Status::invalid_argument("parts of several sessions in one call"))
                    }
                    part => part,
                });
                let all = tokio_stream::once(Ok(first)).chain(rest);
                if let Err(status) =
                    place_landed(&destination, all, answers.clone(), others, is_to_damage).await
                {
                    // If the source is gone, nobody wants to know.
                    let _ = answers.send(Err(status)).await;
                }
            });
        }
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn pre_setup(&self, request: Request<PreSetupRequest>) -> Reply<PreSetupReply> {
        let request = self.admit(PeerRpc::PreSetup, request).await?;
        let session = self.destination(request.session)?;
        reply(step(async move { session.lock().await.pre_setup(&request).await }).await)
    }

    async fn connect_standby(&self, request: Request<ConnectRequest>) -> Reply<Done> {
        let request = self.admit(PeerRpc::ConnectStandby, request).await?;
        let session = self.destination(request.session)?;
        done(step(async move { session.lock().await.connect(request).await }).await)
    }

    async fn prepare_restore(&self, request: Request<SessionId>) -> Reply<Done> {
        let id = self.admit(PeerRpc::PrepareRestore, request).await?.session;
        let session = self.destination(id)?;
        done(step(async move { session.lock().await.prepare_restore().await }).await)
    }

    async fn restore(&self, request: Request<SessionId>) -> Reply<RestoreReply> {
        let id = self.admit(PeerRpc::Restore, request).await?.session;
        let session = self.destination(id)?;
        let restored = step(async move { session.lock().await.restore().await }).await;
        reply(restored.map(|restore_ms| RestoreReply { restore_ms }))
    }

    async fn commit(&self, request: Request<SessionId>) -> Reply<OutcomeReply> {
        let id = self.admit(PeerRpc::Commit, request).await?.session;
        let Ok(session) = self.0.destinations.get(id) else {
            // It has ended, or an agent that comes later has not looked at it yet.
            return match self.0.journal.standing(id, Role::Destination) {
                Some(_) => Ok(Response::new(outcome::known(&self.0.journal, id, false))),
                None => Err(Status::not_found(format!(
                    "{} is not the destination of session {id:016x}",
                    self.0.name()
                ))),
            };
        };
        let answer = step(async move { Ok(session.lock().await.commit().await) }).await;
        reply(answer)
    }

    async fn claim(&self, request: Request<SessionId>) -> Reply<CountReply> {
        let id = self.admit(PeerRpc::Claim, request).await?.session;
        if self.is_over(id, Role::Destination) {
            return count(Ok(0));
        }
        let session = self.destination(id)?;
        reply(step(async move { session.lock().await.claim().await }).await)
    }

    async fn resume(&self, request: Request<SessionId>) -> Reply<CountReply> {
        let id = self.admit(PeerRpc::Resume, request).await?.session;
        if self.is_over(id, Role::Destination) {
            return count(Ok(0));
        }
        let session = self.destination(id)?;
        resumed(step(async move { session.lock().await.resume().await }).await)
    }

    async fn check_partner(&self, request: Request<PartnerPrepareRequest>) -> Reply<CheckInstanceReply> {
        let request = self.admit(PeerRpc::CheckPartner, request).await?;
        spoken_here(request.protocol, &request.source)?;
        let found = Partners::check(&self.0, request).await;
        let blockers = found.err().map(|error| format!("{error:#}"));
        Ok(Response::new(CheckInstanceReply {
            blockers: blockers.into_iter().collect(),
            ..Default::default()
        }))
    }

    async fn partner_join(&self, request: Request<PartnerPrepareRequest>) -> Reply<JoinReply> {
        let request = self.admit(PeerRpc::PartnerJoin, request).await?;
        spoken_here(request.protocol, &request.source)?;
        let agent = self.0.clone();
        let joined = step(async move { Partners::join(&agent, request).await }).await;
        reply(joined.map(|moving| JoinReply {
            moving: moving.unwrap_or_default(),
        }))
    }

    async fn partner_leave(&self, request: Request<SessionId>) -> Reply<Done> {
        let session = self.admit(PeerRpc::PartnerLeave, request).await?.session;
        self.0.turns.leave(session);
        Ok(Response::new(Done {}))
    }

    async fn let_go(&self, request: Request<LetGoRequest>) -> Reply<Done> {
        let instance = self.admit(PeerRpc::LetGo, request).await?.instance;
        let let_go = self.0.turns.let_go(&instance);
        let _ = tokio::time::timeout(LET_GO_PATIENCE, let_go).await;
        Ok(Response::new(Done {}))
    }

    async fn measure_drain(&self, request: Request<MeasureDrainRequest>) -> Reply<MeasureDrainReply> {
        let request = self.admit(PeerRpc::MeasureDrain, request).await?;
        let (agent, of, limit_ms) = (self.0.clone(), request.session, request.limit_ms);
        let of = of.unwrap_or_default();
        let measured = step(async move { Partners::measure_drain(&agent, of, limit_ms).await }).await;
        reply(measured.map(|us| MeasureDrainReply { us }))
    }

    async fn partner_prepare(&self, request: Request<PartnerPrepareRequest>) -> Reply<PartnerPrepareReply> {
        let request = self.admit(PeerRpc::PartnerPrepare, request).await?;
        spoken_here(request.protocol, &request.source)?;
        let agent = self.0.clone();
        reply(step(async move { Partners::prepare(&agent, request).await }).await)
    }

    async fn find_partners(&self, request: Request<FindPartnersRequest>) -> Reply<FindPartnersReply> {
        let request = self.admit(PeerRpc::FindPartners, request).await?;
        let ends = request.ends.into_iter().map(Endpoint::try_from);
        let ends: Vec<_> = ends
            .collect::<anyhow::Result<_>>()
            .map_err(|error| status(&error))?;
        reply(
            Partners::find(&self.0, &ends)
                .await
                .map(|found| FindPartnersReply { found }),
        )
    }

    async fn partner_connect(&self, request: Request<PartnerConnectRequest>) -> Reply<Done> {
        let request = self.admit(PeerRpc::PartnerConnect, request).await?;
        if self.is_over(request.session, Role::Partner) {
            // Whoever drives the session does not know that this host has nothing left to do.
            return done(Ok(()));
        }
        let session = self.partner(request.session)?;
        done(step(async move { session.lock().await.connect(request).await }).await)
    }

    async fn partner_suspend(&self, request: Request<SessionId>) -> Reply<Counts> {
        let id = self.admit(PeerRpc::PartnerSuspend, request).await?.session;
        let session = self.partner(id)?;
        let counts = step(async move { session.lock().await.suspend().await }).await;
        reply(counts)
    }

    async fn partner_drain(&self, request: Request<DrainRequest>) -> Reply<DrainReply> {
        let request = self.admit(PeerRpc::PartnerDrain, request).await?;
        let session = self.partner(request.session)?;
        reply(step(async move { session.lock().await.drain(request).await }).await)
    }

    async fn partner_stop(&self, request: Request<StopRequest>) -> Reply<StopReply> {
        let request = self.admit(PeerRpc::PartnerStop, request).await?;
        let session = self.partner(request.session)?;
        let stopped = step(async move { session.lock().await.stop(&request.connections).await }).await;
        reply(stopped.map(|progress| StopReply {
            progress: encode(&progress),
        }))
    }

    async fn partner_settle(&self, request: Request<SettleRequest>) -> Reply<SettleReply> {
        let request = self.admit(PeerRpc::PartnerSettle, request).await?;
        let session = self.partner(request.session)?;
        let settled = async move {
            let peers: Vec<(u32, QpProgress)> = decode(&request.progress)?;
            session.lock().await.settle(&peers).await
        };
        reply(step(settled).await)
    }

    async fn partner_switch(&self, request: Request<SessionId>) -> Reply<CountReply> {
        let id = self.admit(PeerRpc::PartnerSwitch, request).await?.session;
        if let Some(over) = self.partner_is_over(id) {
            return Ok(Response::new(over));
        }
        let session = self.partner(id)?;
        count(step(async move { session.lock().await.switch().await }).await)
    }

    async fn partner_resume(&self, request: Request<SessionId>) -> Reply<CountReply> {
        let id = self.admit(PeerRpc::PartnerResume, request).await?.session;
        if let Some(over) = self.partner_is_over(id) {
            return Ok(Response::new(over));
        }
        let session = self.partner(id)?;
        resumed(step(async move { session.lock().await.resume().await }).await)
    }

    async fn share_secrets(&self, request: Request<LinksRequest>) -> Reply<Done> {
        let request = self.admit(PeerRpc::ShareSecrets, request).await?;
        let agent = self.0.clone();
        done(step(async move { secrets::accept(&agent, request).await }).await)
    }

    async fn pause_ends(&self, request: Request<LinksRequest>) -> Reply<Done> {
        let request = self.admit(PeerRpc::PauseEnds, request).await?;
        let agent = self.0.clone();
        done(step(async move { pause::stop_ends(&agent, request).await }).await)
    }

    async fn resume_ends(&self, request: Request<LinksRequest>) -> Reply<ResumeEndsReply> {
        let request = self.admit(PeerRpc::ResumeEnds, request).await?;
        let agent = self.0.clone();
        let gone = step(async move { pause::resume_ends(&agent, request).await }).await;
        reply(gone.map(|gone| ResumeEndsReply {
            gone: gone.into_iter().map(Into::into).collect(),
        }))
    }

    async fn confirm_peers(&self, request: Request<LinksRequest>) -> Reply<ConfirmPeersReply> {
        let request = self.admit(PeerRpc::ConfirmPeers, request).await?;
        reply(confirming::confirm(&self.0, request).await)
    }

    async fn peers_gone(&self, request: Request<LinksRequest>) -> Reply<Done> {
        let request = self.admit(PeerRpc::PeersGone, request).await?;
        done(confirming::gone(&self.0, request).await)
    }

    async fn retarget(&self, request: Request<RetargetRequest>) -> Reply<CountReply> {
        let Admitted { caller, message } = self.0.admit(PeerRpc::Retarget, request).await?;
        let moved = forwarding::decode(message, caller.gid());
        count(moved.map(|moved| self.0.forwarding.retarget(&moved)))
    }
}
