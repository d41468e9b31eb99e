//! An operator's pause: connections of an instance stand still, at both ends, until they are told to go on (MigrOS §7).
//!
//! The RNICs of *both* ends are told to stop (`PauseQps`). A stopped end counts no retries and no time, whatever becomes of the link;
//! a partner that only heard NAK "stopped" would wait for the limit of its RNIC, and one that could not hear it would count the cut
//! for loss. Who is paused is known where it is: in the RNICs. Agents keep nothing, so an agent that was restarted finds all as it
//! was. What is never resumed goes on by itself after the limit of the pause, at both ends, so that a host or an operator that is
//! gone holds nobody for ever.
//!
//! ```text
//!            pause                                     resume
//!   1  secrets for both ends ([`crate::secrets`])    1  partners' ends go on
//!   2  partners' ends stop                           2  the ends here go on
//!   3  the ends here stop                            3  RESUME in both directions, until it is acknowledged
//! ```

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use anyhow::{Context, bail};
use futures_util::future::{join_all, try_join_all};
use verbatim_channel::{Endpoint, Order, QpRecord, RoadMap};
use verbatim_device::control::{QpState, QpType};

use crate::agent::Shared;
use crate::guests::Guest;
use crate::instances::{State, recovery};
use crate::proto::{self, LinksRequest, PauseReply};
use crate::secrets::{self, Ends, Link, by_guest, named};
use crate::session::{in_time, source, told};
use crate::standby::is_connected;

/// The longest pause.
pub const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// A link, and whether its end here is paused.
struct Known {
    link: Link,
    paused: bool,
}

/// The reliable connections of an instance, or the one that is named.
struct Links {
    all: Vec<Known>,
    /// Queue pairs of other transports.
    others: usize,
}

impl Links {
    async fn of(agent: &Shared, instance: &str, qpn: Option<u32>) -> anyhow::Result<Self> {
        match recovery::find(agent, instance)?.state() {
            State::Running => {}
            State::Moving => bail!("{instance} is being moved; wait until that has ended, or cancel it"),
            State::Exited(status) => bail!("{instance} has ended with status {status}"),
            State::MovedTo(host) => bail!("{instance} lives on {host}; ask the agent there"),
        }
        let described = source::describe_own(agent, instance).await?;
        let mut links = Self {
            all: Vec::new(),
            others: 0,
        };
        let mut ends = HashSet::new();
        for (guest, qp) in described.iter().flat_map(|(guest, map)| qps(guest, map)) {
            let wanted = qpn.is_none_or(|qpn| qpn == qp.physical_qpn);
            if !wanted {
                continue;
            }
            if qp.qp_type != QpType::Rc {
                links.others += 1;
                continue;
            }
            let Some(known) = known(agent, guest, qp).await? else {
                continue;
            };
            // Of a connection within the instance, one end stands for both.
            if !ends.contains(&known.link.partner) {
                ends.insert(known.link.own);
                links.all.push(known);
            }
        }
        match (qpn, links.all.is_empty()) {
            (Some(qpn), true) if links.others > 0 => {
                bail!("queue pair {qpn:#x} of {instance} is none of RC: only those can be paused")
            }
            (Some(qpn), true) => bail!(
                "{instance} has no connected queue pair {qpn:#x}; `verbatim nic stat` on {} shows those that there are",
                agent.name()
            ),
            _ => Ok(links),
        }
    }

    fn reply(self, agent: &Shared, mut notes: Vec<String>) -> PauseReply {
        if self.others > 0 {
            notes.push(format!(
                "{} queue pair(s) of UC or UD run on: what they lose is lost, as on any link",
                self.others
            ));
        }
        let links = self.all.into_iter().map(|known| proto::pause_reply::Link {
            qpn: known.link.own.qpn,
            partner_host: known.link.host,
            partner_qpn: known.link.partner.qpn,
        });
        PauseReply {
            host: agent.name().to_owned(),
            links: links.collect(),
            notes,
        }
    }
}

fn qps<'a>(guest: &'a Guest, map: &'a RoadMap) -> impl Iterator<Item = (&'a Guest, &'a QpRecord)> {
    let qps = map.contexts.iter().flat_map(|context| &context.qps);
    qps.filter(|qp| qp.attr.state != QpState::Reset && qp.attr.state != QpState::Err)
        .map(move |qp| (guest, qp))
}

async fn known(agent: &Shared, guest: &Guest, qp: &QpRecord) -> anyhow::Result<Option<Known>> {
    let Some(partner) = qp.remote.filter(|_| is_connected(qp)) else {
        return Ok(None);
    };
    let host = agent.host_of(partner.gid).await;
    let host = host.with_context(|| format!("where queue pair {:#x} leads is unknown", qp.physical_qpn))?;
    Ok(Some(Known {
        link: Link {
            guest: guest.clone(),
            qpn: qp.qpn,
            own: Endpoint {
                gid: qp.local_gid.unwrap_or_else(|| agent.gid()),
                qpn: qp.physical_qpn,
            },
            partner,
            host: host.name.clone(),
        },
        paused: qp.paused,
    }))
}

/// Pauses the connections of an instance, or the one with this physical queue pair here, for `limit` at most. Those that are paused
/// already get the new limit. If it fails, those that were not are not.
pub async fn pause(
    agent: &Shared,
    instance: &str,
    qpn: Option<u32>,
    limit: Duration,
) -> anyhow::Result<PauseReply> {
    if limit < Duration::from_secs(1) || limit > LONGEST {
        bail!("a pause lasts from one second to {LONGEST:?}");
    }
    let links = Links::of(agent, instance, qpn).await?;
    // A secret that two ends which are paused share stays.
    let fresh: Vec<Link> = links
        .all
        .iter()
        .filter(|known| !known.paused)
        .map(|known| known.link.clone())
        .collect();
    secrets::share(agent, instance, &fresh).await?;
    let all: Vec<&Link> = links.all.iter().map(|known| &known.link).collect();
    let limit_s = limit.as_secs() as u32;
    let paused = async {
        let there = by_host(&all).into_iter().map(|(host, links)| async move {
            let request = ends_request(instance, &links, limit_s);
            let mut client = agent.peers.connect(host).await?;
            told(host, "pause its ends", client.pause_ends(request).await)
        });
        try_join_all(there).await?;
        stop(own_ends(&all), limit_s).await
    };
    if let Err(error) = paused.await {
        let fresh: Vec<&Link> = fresh.iter().collect();
        let (_, left) = go_on_there(agent, instance, &fresh).await;
        for left in left {
            tracing::warn!(instance, left, "paused until the limit");
        }
        go_on(own_ends(&fresh)).await;
        return Err(error);
    }
    Ok(links.reply(agent, Vec::new()))
}

/// Lets what [`pause`] has paused go on. If a partner's agent is out of reach nothing is done, unless it is forced: the end there
/// then goes on when its limit has passed, and the one here waits for it as long as its RNIC waits for any partner.
pub async fn resume(
    agent: &Shared,
    instance: &str,
    qpn: Option<u32>,
    force: bool,
) -> anyhow::Result<PauseReply> {
    let mut links = Links::of(agent, instance, qpn).await?;
    links.all.retain(|known| known.paused);
    links.others = 0;
    let all: Vec<&Link> = links.all.iter().map(|known| &known.link).collect();
    let (mut notes, unreached) = go_on_there(agent, instance, &all).await;
    match unreached.first() {
        Some(unreached) if !force => {
            bail!("{unreached}; the ends here stay paused. Try again, or go on without it (--force)")
        }
        _ => notes.extend(unreached),
    }
    notes.extend(go_on(own_ends(&all)).await);
    Ok(links.reply(agent, notes))
}

/// The partners' ends go on: what there is to say of that, and whom nobody could tell.
async fn go_on_there(agent: &Shared, instance: &str, links: &[&Link]) -> (Vec<String>, Vec<String>) {
    let there = by_host(links).into_iter().map(|(host, links)| async move {
        let request = ends_request(instance, &links, 0);
        let mut client = agent.peers.connect(host).await?;
        let reply = told(host, "let its ends go on", client.resume_ends(request).await)?;
        let gone = reply.gone.into_iter();
        anyhow::Ok(gone.map(move |end| format!("queue pair {:#x} on {host} is gone", end.qpn)))
    });
    let (mut notes, mut unreached) = (Vec::new(), Vec::new());
    for answer in join_all(there).await {
        match answer {
            Ok(gone) => notes.extend(gone),
            Err(error) => unreached.push(format!("{error:#}")),
        }
    }
    (notes, unreached)
}

fn by_host<'a>(links: &[&'a Link]) -> BTreeMap<&'a str, Vec<&'a Link>> {
    let mut by_host: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for link in links {
        by_host.entry(link.host.as_str()).or_default().push(*link);
    }
    by_host
}

fn ends_request(instance: &str, links: &[&Link], limit_s: u32) -> LinksRequest {
    LinksRequest {
        instance: instance.to_owned(),
        links: links.iter().map(|link| named(link, None)).collect(),
        limit_s,
    }
}

/// Another host's pause: the ends here stop.
pub async fn stop_ends(agent: &Shared, request: LinksRequest) -> anyhow::Result<()> {
    let limit = Duration::from_secs(request.limit_s.into());
    if limit.is_zero() || limit > LONGEST {
        bail!("a pause of {limit:?}");
    }
    let ends = Ends::find(agent, &request).await?;
    ends.must_be_all(agent)?;
    stop(ends.qpns(), request.limit_s).await
}

/// Another host's resume: the ends here go on. Those that are not there any more.
pub async fn resume_ends(agent: &Shared, request: LinksRequest) -> anyhow::Result<Vec<Endpoint>> {
    let ends = Ends::find(agent, &request).await?;
    let failed = go_on(ends.qpns()).await;
    match failed.into_iter().next() {
        Some(failed) => bail!(failed),
        None => Ok(ends.unconnected),
    }
}

impl Ends {
    fn qpns(&self) -> Vec<(Guest, u32)> {
        let all = self.all().into_iter();
        all.map(|(guest, _, qpn)| (guest, qpn)).collect()
    }
}

fn own_ends(links: &[&Link]) -> Vec<(Guest, u32)> {
    let ends = links.iter().map(|link| (link.guest.clone(), link.qpn));
    ends.collect()
}

/// Stops ends here. If it fails, some may be stopped: who has asked lets them go on.
async fn stop(ends: Vec<(Guest, u32)>, limit_s: u32) -> anyhow::Result<()> {
    let orders = by_guest(ends).into_iter().map(|(guest, qpns)| async move {
        let order = guest.order(Order::Pause { qpns, limit_s }, Vec::new());
        in_time("pausing", order).await.map(drop)
    });
    try_join_all(orders).await.map(drop)
}

/// Lets ends here go on; what went wrong. A process that has ended has nothing that could.
async fn go_on(ends: Vec<(Guest, u32)>) -> Vec<String> {
    let orders = by_guest(ends).into_iter().map(|(guest, qpns)| async move {
        let order = guest.order(Order::Unpause { qpns }, Vec::new());
        in_time("going on", order).await.map(drop)
    });
    let failed = join_all(orders).await.into_iter().filter_map(Result::err);
    failed.map(|error| format!("{error:#}")).collect()
}
