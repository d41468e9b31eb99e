//! Secrets that the two ends of a connection share: what their RNICs need to pause it and to go on (`docs/wire-extension.md`).
//!
//! ```text
//!   this agent                        the partner's agent
//!   makes a key for each link ──────► asks its RNIC whose the ends are, and their programs' road maps
//!      (gRPC, mutual TLS)             whether they lead to ours; gives them the key (Order::Share)
//!   gives our ends the key  ◄──────── done
//! ```
//!
//! The partner comes first: while only one end has the secret, what it says is ignored at the other as forged. An end whose RNIC has
//! no such thing, or whose program has no guest library, refuses, and nothing is paused.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Context, bail};
use futures_util::future::try_join_all;
use verbatim_channel::{Endpoint, Order};
use verbatim_device::control::QpSecret;

use crate::agent::Shared;
use crate::guests::Guest;
use crate::proto::{self, LinksRequest, PartnerConnection, PartnerPrepareRequest};
use crate::session::members::Member;
use crate::session::partner::find::find_members;
use crate::session::{in_time, told};

/// A reliable connection, seen from this host.
#[derive(Clone)]
pub struct Link {
    /// The process of the end here.
    pub guest: Guest,
    /// The virtual number of the end here.
    pub qpn: u32,
    /// The end here, physical.
    pub own: Endpoint,
    /// The other end, physical.
    pub partner: Endpoint,
    /// The host of the other end, which may be this one.
    pub host: String,
}

/// Gives both ends of each link a secret of their own, in the place of an earlier one. If it fails, some links may have one that
/// does not fit: share again before any of them is paused. A link both of whose ends are here may be named once only.
pub async fn share(agent: &Shared, instance: &str, links: &[Link]) -> anyhow::Result<()> {
    let keys: Vec<[u8; 32]> = links.iter().map(|_| rand::random()).collect();
    let mut by_host: BTreeMap<&str, Vec<proto::links_request::Link>> = BTreeMap::new();
    for (link, key) in links.iter().zip(&keys) {
        let there = named(link, Some(key));
        by_host.entry(&link.host).or_default().push(there);
    }
    let shared = by_host.into_iter().map(|(host, links)| async move {
        let request = LinksRequest {
            instance: instance.to_owned(),
            links,
            limit_s: 0,
        };
        let mut client = agent.peers.connect(host).await?;
        let shared = client.share_secrets(request).await;
        told(host, "share secrets with this host", shared)
    });
    try_join_all(shared).await?;
    let ours = links.iter().zip(keys).map(|(link, key)| {
        let secret = QpSecret { key, first: true };
        (link.guest.clone(), (link.qpn, secret))
    });
    let ours = ours.collect();
    give(ours).await
}

/// A link as the other end's agent is told of it.
pub fn named(link: &Link, key: Option<&[u8; 32]>) -> proto::links_request::Link {
    proto::links_request::Link {
        asker: Some(link.own.into()),
        asked: Some(link.partner.into()),
        secret: key.map(|key| key.to_vec()).unwrap_or_default(),
    }
}

/// The other end's part: the ends here are given what they are to share.
pub async fn accept(agent: &Shared, request: LinksRequest) -> anyhow::Result<()> {
    let secrets: Vec<QpSecret> = request
        .links
        .iter()
        .map(|link| {
            let key = link.secret.as_slice().try_into();
            let key = key.ok().context("a secret that is not of 32 bytes")?;
            Ok(QpSecret { key, first: false })
        })
        .collect::<anyhow::Result<_>>()?;
    let ends = Ends::find(agent, &request).await?;
    ends.must_be_all(agent)?;
    let given = |(guest, link, qpn): (Guest, u32, u32)| (guest, (qpn, secrets[link as usize]));
    let ours = ends.all().into_iter().map(given).collect();
    give(ours).await
}

async fn give(secrets: Vec<(Guest, (u32, QpSecret))>) -> anyhow::Result<()> {
    let given = by_guest(secrets).into_iter().map(|(guest, secrets)| async move {
        let order = guest.order(Order::Share { secrets }, Vec::new());
        in_time("sharing secrets", order).await.map(drop)
    });
    try_join_all(given).await.map(drop)
}

/// What belongs to the same process, together.
pub fn by_guest<T>(all: Vec<(Guest, T)>) -> Vec<(Guest, Vec<T>)> {
    let mut by_guest: HashMap<u64, (Guest, Vec<T>)> = HashMap::new();
    for (guest, one) in all {
        let entry = by_guest.entry(guest.id());
        entry.or_insert_with(|| (guest, Vec::new())).1.push(one);
    }
    by_guest.into_values().collect()
}

/// The ends on this host that another host speaks of. Only those are among them that the RNIC knows as their process's, and that
/// lead to the end that the asker says is its own.
pub struct Ends {
    pub members: Vec<Member>,
    /// The ends that are not connected to the asker's (any more), or are gone.
    pub unconnected: Vec<Endpoint>,
}

impl Ends {
    /// That the asker's ends are on its host has been checked.
    pub async fn find(agent: &Shared, request: &LinksRequest) -> anyhow::Result<Self> {
        let connections = (0..)
            .zip(&request.links)
            .map(|(connection, link)| PartnerConnection {
                connection,
                moving: link.asker.clone(),
                partner: link.asked.clone(),
                late: false,
            });
        let looked_for = PartnerPrepareRequest {
            session: 0,
            source: String::new(),
            instance: request.instance.clone(),
            destination: String::new(),
            connections: connections.collect(),
            pauses: false,
            protocol: 0,
        };
        let found = find_members(agent, looked_for).await?;
        let unconnected = found.unconnected.iter().map(|connection| {
            let link = request.links.get(*connection as usize);
            let end = link.and_then(|link| link.asked.clone());
            end.context("a link that nobody named")?.try_into()
        });
        let mut members = found.members;
        members.retain(|member| !member.kept.connections.is_empty());
        Ok(Self {
            unconnected: unconnected.collect::<anyhow::Result<_>>()?,
            members,
        })
    }

    /// Their processes, the indices of their links, and their virtual numbers.
    pub fn all(&self) -> Vec<(Guest, u32, u32)> {
        let mut all = Vec::new();
        for member in &self.members {
            let guest = member.guest.as_ref().expect("it was just asked");
            let connections = member.kept.connections.iter();
            all.extend(connections.map(|(link, qpn)| (guest.clone(), *link, *qpn)));
        }
        all
    }

    /// Refuses if one of them is missing.
    pub fn must_be_all(&self, agent: &Shared) -> anyhow::Result<()> {
        match self.unconnected.first() {
            None => Ok(()),
            Some(end) => bail!(
                "queue pair {:#x} on {} is not connected to the one here (yet, or any more)",
                end.qpn,
                agent.name()
            ),
        }
    }
}
