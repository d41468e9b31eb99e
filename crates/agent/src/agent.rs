//! What the parts of one agent share.

use std::sync::Arc;
use std::time::SystemTime;

use anyhow::Context;
use verbatim_bulk::Which;
use verbatim_channel::{Endpoint, KeyPair, MovedEndpoint, Resolved};
use verbatim_container::Host;
use verbatim_device::gids::counterpart;
use verbatim_seqpacket::Process;

use crate::behind::Behinds;
use crate::config::Config;
use crate::datagrams::{self, Datagrams};
use crate::directory::HostEntry;
use crate::faults::Faults;
use crate::forwarding::{self, Forward, Forwarding};
use crate::gids::{Gids, gid_of};
use crate::guests::{Guests, Resolver};
use crate::held::Held;
use crate::identity;
use crate::instances::Instances;
use crate::instances::away::Away;
use crate::journal::Journal;
use crate::memory::bulk::Rnic;
use crate::memory::promised::Room;
use crate::nic_listeners::NicListeners;
use crate::peer_questions::Confirming;
use crate::peers::Peers;
use crate::proto;
use crate::session::control::Controls;
use crate::session::deep::DeepChecks;
use crate::session::destination::Destinations;
use crate::session::driver::Unfinished;
use crate::session::partner::Partners;
use crate::session::watched::Watched;
use crate::session::{decode, encode};
use crate::turns::Turns;

/// How often an endpoint is followed from host to host before it is taken for lost.
const MAX_HOPS: usize = 32;

/// One host's agent.
pub struct Agent {
    /// What it was told.
    pub config: Config,
    /// The other agents.
    pub peers: Peers,
    /// The programs' guest libraries.
    pub guests: Guests,
    /// Connections that left this host.
    pub forwarding: Forwarding,
    /// Datagram queue pairs that have moved, of all hosts.
    pub datagrams: Datagrams,
    /// The GIDs of all hosts, as far as they were asked for.
    pub gids: Gids,
    /// Queue pairs whose whereabouts are about to change.
    pub held: Held,
    /// runc and CRIU.
    pub tools: Host,
    /// The instances.
    pub instances: Instances,
    /// The sockets over which they reach the RNIC.
    pub nic_listeners: Arc<NicListeners>,
    /// Whether queue pairs here and at other hosts name each other.
    pub confirming: Confirming,
    /// This host's RNIC, for memory on its way.
    pub rnic: Arc<Rnic>,
    /// Migrations that this host drives.
    pub controls: Controls,
    /// Sessions that are finished here.
    pub unfinished: Unfinished,
    /// Sessions in which this host is the destination.
    pub destinations: Destinations,
    /// RAM that virtual machines have left here.
    pub behinds: Behinds,
    /// Sessions in which this host is a partner's.
    pub partners: Partners,
    /// Sessions whose source is there.
    pub watched: Watched,
    /// Sessions that would meet at a connection.
    pub turns: Turns,
    /// Dumps that were tried and went well.
    pub deep_checks: DeepChecks,
    /// What was decided.
    pub journal: Arc<Journal>,
    /// What fails where: nothing, but in tests.
    pub faults: Faults,
}

impl Agent {
    /// One that goes on with what is in the runtime folder.
    pub fn open(config: Config, peers: Peers, tools: Host) -> anyhow::Result<Self> {
        let journal = config.state_dir.join("journal");
        let forwarding = config.runtime_dir.join("forwarding");
        Ok(Self {
            guests: Guests::default(),
            forwarding: Forwarding::open(&forwarding, SystemTime::now())
                .with_context(|| format!("cannot write {}", forwarding.display()))?,
            datagrams: Default::default(),
            gids: Default::default(),
            held: Default::default(),
            tools,
            instances: Instances::new(Away::open(&config.state_dir.join("away"))?),
            confirming: Confirming::default(),
            nic_listeners: Arc::new(NicListeners::new(config.nic_socket())),
            rnic: Arc::new(Rnic::new(Which {
                runtime: config.runtime_dir.clone(),
                name: config.memory_device.clone(),
                address: Some(peers.directory().own().address),
            })),
            controls: Default::default(),
            unfinished: Default::default(),
            destinations: Default::default(),
            behinds: Behinds::new(config.runtime_dir.join("behind")),
            partners: Default::default(),
            watched: Default::default(),
            turns: Default::default(),
            deep_checks: Default::default(),
            journal: Arc::new(Journal::open(&journal)?),
            faults: Faults::default(),
            peers,
            config,
        })
    }

    /// This host's name.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// How much of this host's memory may be promised.
    pub fn room(&self) -> anyhow::Result<Room> {
        Room::of_host(self.config.memory_overcommit).context("cannot read /proc/meminfo")
    }

    /// This host's GID: its RNIC's first.
    pub fn gid(&self) -> [u8; 16] {
        self.peers.directory().own().gid()
    }

    /// One step of an endpoint's way: where `host` says that it is.
    async fn hop(
        &self,
        host: &str,
        endpoint: Endpoint,
        asker: Option<&str>,
    ) -> anyhow::Result<Option<Resolved>> {
        if host == self.name() {
            self.held.released(endpoint.qpn, asker).await;
            let forward = forwarding::current(self, endpoint.qpn).await;
            return Ok(forward.map(|forward| Resolved {
                endpoint: forward.endpoint,
                keys: forward.keys,
            }));
        }
        let request = proto::ResolveRequest {
            endpoint: Some(endpoint.into()),
        };
        let reply = self
            .peers
            .connect(host)
            .await?
            .resolve(request)
            .await?
            .into_inner();
        let Some(endpoint) = reply.endpoint else {
            return Ok(None);
        };
        let keys = decode(&reply.keys).context("malformed keys in a forwarding entry")?;
        Ok(Some(Resolved {
            endpoint: endpoint.try_into()?,
            keys,
        }))
    }
}

impl Agent {
    /// The datagram queue pair `qpn` of this host is found as `number` at `host`: under each GID by which programs may know
    /// that host.
    async fn known_at(&self, host: &HostEntry, number: u32, qpn: u32, moves: u32) -> Vec<MovedEndpoint> {
        let (there, here) = (self.gids_of(&host.name).await, self.own_gids().await);
        let there = there.unwrap_or_else(|_| vec![host.gid()]);
        let here = here.unwrap_or_else(|_| vec![self.gid()]);
        let ways = there.iter().filter_map(|gid| {
            let now = here[counterpart(&there, *gid, &here)?];
            let (known, now) = (
                Endpoint {
                    gid: *gid,
                    qpn: number,
                },
                Endpoint { gid: now, qpn },
            );
            Some(MovedEndpoint { known, now, moves })
        });
        ways.collect()
    }
}

impl Resolver for Agent {
    async fn may_know(&self, asker: &Process, now: Endpoint) -> bool {
        let Some(pid) = asker.pid() else { return false };
        identity::may_connect_to(self, pid, now)
            .await
            .unwrap_or_else(|error| {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "cannot ask the RNIC where a program's queue pairs lead to; it is told no keys"
                );
                false
            })
    }

    fn ways(&self, gid: [u8; 16]) -> Vec<MovedEndpoint> {
        self.datagrams.under(gid)
    }

    async fn publish(
        &self,
        gid: [u8; 16],
        qpn: u32,
        keys: Vec<KeyPair>,
        datagram: Option<u32>,
    ) -> Option<u32> {
        let host = self.host_of(gid).await.ok()?;
        let now = Endpoint { gid: self.gid(), qpn };
        let published = async {
            if host.name == self.name() {
                let endpoint = now;
                let number = self.forwarding.publish(Forward { endpoint, keys }, self.name());
                return number.context("no number is left");
            }
            let request = proto::PublishRequest {
                now: Some(now.into()),
                keys: encode(&keys),
            };
            let reply = self.peers.connect(&host.name).await?.publish(request).await?;
            anyhow::Ok(reply.into_inner().qpn)
        };
        let published = published.await.inspect_err(|error| {
            tracing::warn!(
                host = host.name,
                error = format!("{error:#}"),
                "a new queue pair is not found under the number that its program will tell"
            );
        });
        let number = published.ok()?;
        if let Some(moves) = datagram {
            let moved = self.known_at(host, number, qpn, moves).await;
            datagrams::tell(self, &moved).await;
        }
        Some(number)
    }

    async fn resolve(&self, endpoint: Endpoint, asker: Option<&str>) -> Resolved {
        let Followed {
            mut resolved,
            from,
            at,
            lost,
        } = self.follow(endpoint, asker, |_, _| false).await;
        if let (Some(host), Some(error)) = (at, lost) {
            tracing::warn!(
                host = host.name,
                error = format!("{error:#}"),
                "cannot ask where an endpoint is; taking it for unmoved"
            );
        }
        // Entries name the hosts' addresses. Who knows the queue pair by another GID reaches it by one of that kind.
        if let (Some(from), Some(at)) = (from, at)
            && resolved.endpoint != endpoint
        {
            resolved.endpoint.gid = self.gid_at(from, endpoint.gid, at).await;
        }
        resolved
    }
}

/// Where the way of an endpoint leads.
pub struct Followed<'h> {
    /// The last place on it that is known.
    pub resolved: Resolved,
    /// The host whose GID the endpoint had.
    pub from: Option<&'h HostEntry>,
    /// The host where it is.
    pub at: Option<&'h HostEntry>,
    /// Why that host could not be asked whether the way goes on.
    pub lost: Option<anyhow::Error>,
}

impl Agent {
    /// Follows an endpoint from host to host: where a queue pair that left a host is now, that host says. `there`: no
    /// need to ask any more.
    pub async fn follow(
        &self,
        endpoint: Endpoint,
        asker: Option<&str>,
        there: impl Fn(&HostEntry, Endpoint) -> bool,
    ) -> Followed<'_> {
        let mut followed = Followed {
            resolved: Resolved {
                endpoint,
                keys: Vec::new(),
            },
            from: None,
            at: None,
            lost: None,
        };
        for _ in 0..MAX_HOPS {
            let at = followed.resolved.endpoint;
            let Ok(host) = self.host_of(at.gid).await else {
                break;
            };
            followed.from.get_or_insert(host);
            followed.at = Some(host);
            if there(host, at) {
                break;
            }
            match self.hop(&host.name, at, asker).await {
                // Keys are those that the program published, on every hop: the last host's are the ones that count. Where only
                // the number has changed, there are none.
                Ok(Some(next)) => {
                    followed.resolved.endpoint = next.endpoint;
                    if !next.keys.is_empty() {
                        followed.resolved.keys = next.keys;
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    followed.lost = Some(error);
                    break;
                }
            }
        }
        followed
    }
}

impl From<Endpoint> for proto::Endpoint {
    fn from(endpoint: Endpoint) -> Self {
        Self {
            gid: endpoint.gid.to_vec(),
            qpn: endpoint.qpn,
        }
    }
}

impl TryFrom<proto::Endpoint> for Endpoint {
    type Error = anyhow::Error;

    fn try_from(endpoint: proto::Endpoint) -> anyhow::Result<Self> {
        Ok(Self {
            gid: gid_of(endpoint.gid)?,
            qpn: endpoint.qpn,
        })
    }
}

/// A program has changed its objects since they were looked at: another attempt may succeed.
#[derive(Debug, thiserror::Error)]
#[error("{who} has changed a connection meanwhile; try again")]
pub struct Changed {
    /// The process, in words.
    pub who: String,
}

/// An error as another agent, or the command line, should see it.
pub fn status(error: &anyhow::Error) -> tonic::Status {
    if error.is::<Changed>() {
        return tonic::Status::aborted(format!("{error:#}"));
    }
    tonic::Status::failed_precondition(format!("{error:#}"))
}

/// All of an agent's parts hold it like this.
pub type Shared = Arc<Agent>;
