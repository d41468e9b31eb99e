//! What the parts of one agent share.

use std::sync::Arc;

use anyhow::Context;
use verbatim_channel::{Endpoint, MovedEndpoint, Resolved};
use verbatim_container::Host;

use crate::config::Config;
use crate::datagrams::Datagrams;
use crate::faults::Faults;
use crate::forwarding::Forwarding;
use crate::guests::{Guests, Resolver};
use crate::instances::Instances;
use crate::journal::Journal;
use crate::peers::Peers;
use crate::proto;
use crate::session::destination::Destinations;
use crate::session::partner::Partners;

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
    /// runc and CRIU.
    pub tools: Host,
    /// The instances.
    pub instances: Instances,
    /// Sessions in which this host is the destination.
    pub destinations: Destinations,
    /// Sessions in which this host is a partner's.
    pub partners: Partners,
    /// What was decided.
    pub journal: Journal,
    /// Failures to order, for tests.
    pub faults: Faults,
}

impl Agent {
    /// This host's name.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// This host's GID.
    pub fn gid(&self) -> [u8; 16] {
        self.peers.directory().own().gid()
    }

    /// One step of an endpoint's way: where `host` says that it is.
    async fn hop(&self, host: &str, endpoint: Endpoint) -> anyhow::Result<Option<Resolved>> {
        if host == self.name() {
            let forward = self.forwarding.get(endpoint.qpn);
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
        let keys = postcard::from_bytes(&reply.keys).context("malformed keys in a forwarding entry")?;
        Ok(Some(Resolved {
            endpoint: endpoint.try_into()?,
            keys,
        }))
    }
}

impl Resolver for Agent {
    fn ways(&self, gid: [u8; 16]) -> Vec<MovedEndpoint> {
        self.datagrams.under(gid)
    }

    async fn resolve(&self, endpoint: Endpoint) -> Resolved {
        let mut resolved = Resolved {
            endpoint,
            keys: Vec::new(),
        };
        for _ in 0..MAX_HOPS {
            let Some(host) = self.peers.directory().by_gid(&resolved.endpoint.gid) else {
                break;
            };
            match self.hop(&host.name, resolved.endpoint).await {
                // Keys are those that the program published, on every hop: the last host's are the ones that count.
                Ok(Some(next)) => resolved = next,
                Ok(None) => break,
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::warn!(
                        host = host.name,
                        error,
                        "cannot ask where an endpoint is; taking it for unmoved"
                    );
                    break;
                }
            }
        }
        resolved
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
        let length = endpoint.gid.len();
        let gid = endpoint
            .gid
            .try_into()
            .map_err(|_| anyhow::anyhow!("a GID of {length} bytes, not 16"))?;
        Ok(Self {
            gid,
            qpn: endpoint.qpn,
        })
    }
}

/// An error as another agent, or the command line, should see it.
pub fn status(error: &anyhow::Error) -> tonic::Status {
    tonic::Status::failed_precondition(format!("{error:#}"))
}

/// All of an agent's parts hold it like this.
pub type Shared = Arc<Agent>;
