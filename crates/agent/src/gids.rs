//! Whose a GID is.
//!
//! An RNIC has a GID for each address of its interface, and a program may be connected by any of them. The first is its host's
//! address, which the list of hosts has. The others only the host itself knows: its agent asks its RNIC, and tells other agents.
//! So when one turns up that is no host's address, all hosts are asked. What they say is kept for a while.
//!
//! A host is believed what it says of itself, unless another one says the same of itself: then neither is.

use std::collections::{HashMap, HashSet};
use std::net::Ipv6Addr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use futures_util::future::join_all;
use verbatim_channel::RoadMap;
use verbatim_device::gids::counterpart;

use crate::agent::Agent;
use crate::directory::HostEntry;
use crate::kernel_rnics;
use crate::proto::GidsRequest;
use crate::session::told;
use crate::standby::{self, is_connected};

/// A GID in network byte order.
pub type Gid = [u8; 16];

/// How long one of many hosts may take to answer.
const ASK_TIMEOUT: Duration = Duration::from_secs(3);

/// The same of one without whose answer nothing goes on; it may be busy.
const NEED_TIMEOUT: Duration = Duration::from_secs(20);

/// For so long what a host has said holds.
const HOLDS: Duration = Duration::from_secs(10);

/// A host that has answered so lately is not asked again for a GID that was not in its answer.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// The GID tables of the hosts, as far as they were asked.
#[derive(Debug, Default)]
pub struct Gids {
    known: Mutex<HashMap<String, Answer>>,
    /// Held by whoever asks all hosts: others then find the answers, whatever GIDs they are after.
    round: tokio::sync::Mutex<()>,
}

/// Whose a GID is, by all that can be known.
#[derive(Debug)]
pub enum Whose<'h> {
    /// This host's.
    Host(&'h HostEntry),
    /// Every host of the list has said that it is not its own; one that is out of reach now, when it was asked last.
    Nobodys,
    /// Some host has not said it, or two say that it is theirs: why.
    Unknown(anyhow::Error),
}

/// What follows from the answers of all hosts of the list.
fn whose<'h>(gid: Gid, answers: &[(&'h HostEntry, Answer)]) -> Whose<'h> {
    let last = |answer: &Answer| answer.last.as_ref().map(|table| table.contains(&gid));
    match owner(gid, answers) {
        Ok(Some(host)) => Whose::Host(host),
        Ok(None) if answers.iter().all(|(_, answer)| last(answer) == Some(false)) => Whose::Nobodys,
        Ok(None) => Whose::Unknown(nobody(gid, answers)),
        Err(error) => Whose::Unknown(error),
    }
}

#[derive(Debug, Clone)]
struct Answer {
    at: Instant,
    /// Or why there is none.
    table: Result<Vec<Gid>, String>,
    /// The last table that there was, however long ago.
    last: Option<Vec<Gid>>,
}

impl Answer {
    fn new(table: Result<Vec<Gid>, String>, before: Option<Vec<Gid>>) -> Self {
        Self {
            at: Instant::now(),
            last: table.as_ref().ok().cloned().or(before),
            table,
        }
    }
}

impl Gids {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Answer>> {
        self.known.lock().expect("no panic under this lock")
    }

    fn note(&self, host: &str, table: &anyhow::Result<Vec<Gid>>) {
        let table = table.as_ref().map_err(|error| format!("{error:#}")).cloned();
        let mut known = self.lock();
        let before = known.remove(host).and_then(|answer| answer.last);
        known.insert(host.to_owned(), Answer::new(table, before));
    }

    /// What a host has said at any time.
    fn last(&self, host: &str) -> Option<Vec<Gid>> {
        self.lock().get(host)?.last.clone()
    }

    /// Whether a host has said lately that it has this one.
    fn is_known(&self, host: &str, gid: &Gid) -> bool {
        let known = self.known(host, HOLDS);
        known.is_some_and(|answer| answer.table.is_ok_and(|table| table.contains(gid)))
    }

    /// What a host has said lately: within `recently`, or, if there was no answer, within [`HOLDS`].
    fn known(&self, host: &str, recently: Duration) -> Option<Answer> {
        let answer = self.lock().get(host).cloned()?;
        let limit = match answer.table {
            Ok(_) => recently,
            Err(_) => HOLDS,
        };
        (answer.at.elapsed() < limit).then_some(answer)
    }
}

/// The first of a host's GIDs is that of its address, by which hosts know each other.
fn own_address_first(mut gids: Vec<Gid>, own: Gid) -> Vec<Gid> {
    gids.sort_by_key(|gid| *gid != own);
    gids
}

/// Which of the hosts has `gid`, by what they have answered; `None` if none has.
fn owner<'h>(gid: Gid, answers: &[(&'h HostEntry, Answer)]) -> anyhow::Result<Option<&'h HostEntry>> {
    let has = |answer: &Answer| answer.table.as_ref().is_ok_and(|table| table.contains(&gid));
    let mut owners = answers.iter().filter(|(_, answer)| has(answer));
    match (owners.next(), owners.next()) {
        (Some((one, _)), Some((other, _))) => bail!(
            "both {} and {} say that {} is their RNIC's: a GID by which programs are connected must be that of one host",
            one.name,
            other.name,
            Ipv6Addr::from(gid)
        ),
        (found, _) => Ok(found.map(|(host, _)| *host)),
    }
}

/// Why nobody has it.
fn nobody(gid: Gid, answers: &[(&HostEntry, Answer)]) -> anyhow::Error {
    let (mut asked, mut unknown) = (Vec::new(), Vec::new());
    for (host, answer) in answers {
        match &answer.table {
            Ok(_) => asked.push(host.name.as_str()),
            Err(error) => unknown.push(format!("{} cannot say ({error})", host.name)),
        }
    }
    let mut text = format!(
        "{} is the GID of no known host: asked were {}",
        Ipv6Addr::from(gid),
        asked.join(", ")
    );
    if !unknown.is_empty() {
        text = format!("{text}; {}", unknown.join("; "));
    }
    anyhow::Error::msg(text)
}

impl Agent {
    /// The GIDs of this host's RNICs: those of the software RNIC first.
    pub async fn own_gids(&self) -> anyhow::Result<Vec<Gid>> {
        let (nic, self_gid) = (self.config.nic_socket(), self.gid());
        let asked = tokio::task::spawn_blocking(move || {
            let kernel_s = kernel_rnics::all().into_iter().flat_map(|rnic| rnic.gids);
            let kernel_s = kernel_s.filter(|gid| *gid != Gid::default());
            match standby::gids(&nic) {
                Ok(mut gids) => {
                    gids.extend(kernel_s);
                    Ok(gids)
                }
                // Hosts with RNICs of the kernel's need no other.
                Err(error) => match kernel_s.collect::<Vec<_>>() {
                    gids if gids.is_empty() => Err(error),
                    gids => Ok(own_address_first(gids, self_gid)),
                },
            }
        });
        let gids = asked.await.context("asking the RNIC panicked")??;
        if gids.is_empty() {
            bail!("the RNIC has no GID");
        }
        Ok(gids)
    }

    /// The GID table of a host's RNIC as it is now.
    pub async fn gids_of(&self, host: &str) -> anyhow::Result<Vec<Gid>> {
        self.ask_gids(host, NEED_TIMEOUT).await
    }

    async fn ask_gids(&self, host: &str, limit: Duration) -> anyhow::Result<Vec<Gid>> {
        let asked = tokio::time::timeout(limit, async {
            if host == self.name() {
                return self.own_gids().await;
            }
            let mut client = self.peers.connect(host).await?;
            let reply = told(host, "tell its GIDs", client.gids(GidsRequest::default()).await)?;
            reply.gids.into_iter().map(gid_of).collect()
        });
        let table = asked.await.unwrap_or_else(|_| {
            Err(anyhow::anyhow!(
                "{host} does not tell its GIDs: no answer in {limit:?}"
            ))
        });
        self.gids.note(host, &table);
        table
    }

    /// What all hosts have said within `recently`; those that have not are asked.
    async fn all_gids(&self, recently: Duration) -> Vec<(&HostEntry, Answer)> {
        let hosts = self.peers.directory().all().iter();
        let known = hosts
            .clone()
            .map(|host| Some((host, self.gids.known(&host.name, recently)?)));
        if let Some(known) = known.collect() {
            return known;
        }
        // However many GIDs are looked for, each host is asked once.
        let _round = self.gids.round.lock().await;
        let asked = hosts.map(|host| async move {
            if let Some(answer) = self.gids.known(&host.name, recently) {
                return (host, answer);
            }
            let table = self.ask_gids(&host.name, ASK_TIMEOUT).await;
            let table = table.map_err(|error| format!("{error:#}"));
            (host, Answer::new(table, self.gids.last(&host.name)))
        });
        join_all(asked).await
    }

    /// Whose `gid` is. That it is nobody's is said only if all hosts have answered, at some time.
    pub async fn whose(&self, gid: Gid) -> Whose<'_> {
        if let Some(host) = self.peers.directory().by_gid(&gid) {
            return Whose::Host(host);
        }
        match whose(gid, &self.all_gids(HOLDS).await) {
            // It may be new.
            Whose::Nobodys | Whose::Unknown(_) => whose(gid, &self.all_gids(ASK_AGAIN).await),
            host => host,
        }
    }

    /// The host whose RNIC has `gid`. An error names the GID, and who was asked.
    pub async fn host_of(&self, gid: Gid) -> anyhow::Result<&HostEntry> {
        if let Some(host) = self.peers.directory().by_gid(&gid) {
            return Ok(host);
        }
        if let Some(host) = owner(gid, &self.all_gids(HOLDS).await)? {
            return Ok(host);
        }
        // It may be new.
        let answers = self.all_gids(ASK_AGAIN).await;
        owner(gid, &answers)?.ok_or_else(|| nobody(gid, &answers))
    }

    /// Those of `gids` that are `host`'s, by its address or since it says so and nobody else is known to do. Only that host is
    /// asked: others that are out of reach keep nobody waiting.
    pub async fn gids_among(&self, host: &HostEntry, gids: impl IntoIterator<Item = Gid>) -> HashSet<Gid> {
        let (directory, own) = (self.peers.directory(), host.gid());
        let mut gids: HashSet<Gid> = gids.into_iter().collect();
        gids.retain(|gid| *gid == own || directory.by_gid(gid).is_none());
        if gids.iter().any(|gid| *gid != own) {
            let is_known = |gid: &Gid| *gid == own || self.gids.is_known(&host.name, gid);
            if !gids.iter().all(is_known) {
                // Noted, whatever it is.
                let _ = self.gids_of(&host.name).await;
            }
            let hosts = directory.all().iter();
            let known = hosts.filter_map(|host| Some((host, self.gids.known(&host.name, HOLDS)?)));
            let known: Vec<_> = known.collect();
            let is_host_s = |gid: &Gid| {
                *gid == own || matches!(owner(*gid, &known), Ok(Some(found)) if found.name == host.name)
            };
            gids.retain(is_host_s);
        }
        gids
    }

    /// Where the other ends of the connections in road maps are.
    pub async fn places(&self, road_maps: &[&RoadMap]) -> anyhow::Result<Places> {
        let own = self.own_gids().await?;
        let contexts = road_maps.iter().flat_map(|road_map| &road_map.contexts);
        let connected = contexts
            .flat_map(|context| &context.qps)
            .filter(|qp| is_connected(qp));
        let remotes: HashSet<Gid> = connected.filter_map(|qp| Some(qp.remote?.gid)).collect();
        let mut hosts = HashMap::new();
        for gid in remotes {
            let host = match own.contains(&gid) {
                true => Ok(self.name().to_owned()),
                false => self.host_of(gid).await.map(|host| host.name.clone()),
            };
            hosts.insert(gid, host.map_err(|error| format!("{error:#}")));
        }
        Ok(Places { own, hosts })
    }

    /// By what GID the RNIC of `to` is reached by those that know the RNIC of `from` by `gid`: of the same kind; its address if
    /// it has none such, or cannot be asked.
    pub async fn gid_at(&self, from: &HostEntry, gid: Gid, to: &HostEntry) -> Gid {
        if gid == from.gid() || from.name == to.name {
            return if from.name == to.name { gid } else { to.gid() };
        }
        let (here, there) = (self.gids_of(&from.name).await, self.gids_of(&to.name).await);
        match (here, there) {
            (Ok(here), Ok(there)) => counterpart(&here, gid, &there).map_or(to.gid(), |index| there[index]),
            _ => to.gid(),
        }
    }
}

/// A GID from another agent's message.
pub fn gid_of(bytes: Vec<u8>) -> anyhow::Result<Gid> {
    let length = bytes.len();
    bytes
        .try_into()
        .map_err(|_| anyhow::anyhow!("a GID of {length} bytes, not 16"))
}

/// The hosts behind the GIDs of connections.
#[derive(Debug)]
pub struct Places {
    /// The GID table of this host's RNIC, not empty.
    pub own: Vec<Gid>,
    hosts: HashMap<Gid, Result<String, String>>,
}

impl Places {
    /// The host with that GID, or why there is none.
    pub fn host(&self, gid: &Gid) -> Result<&str, &str> {
        match self.hosts.get(gid) {
            Some(Ok(host)) => Ok(host),
            Some(Err(error)) => Err(error),
            None => Err("it was not asked for"),
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Places of a host whose RNIC has these GIDs.
    pub fn places(own: Vec<Gid>, hosts: &[(Gid, &str)]) -> Places {
        let hosts = hosts.iter().map(|(gid, host)| (*gid, Ok((*host).to_owned())));
        Places {
            own,
            hosts: hosts.collect(),
        }
    }

    fn gid(text: &str) -> Gid {
        text.parse::<Ipv6Addr>().unwrap().octets()
    }

    fn hosts() -> [HostEntry; 3] {
        ["a", "b", "c"].map(|name| HostEntry {
            name: name.to_owned(),
            address: "10.0.0.1".parse().unwrap(),
            trusted_network: false,
        })
    }

    fn answer(table: Result<&[&str], &str>) -> Answer {
        let table = table
            .map(|table| table.iter().map(|text| gid(text)).collect())
            .map_err(str::to_owned);
        Answer::new(table, None)
    }

    #[test]
    fn a_gid_is_the_host_s_that_says_so() {
        let hosts = hosts();
        let answers = [
            (&hosts[0], answer(Ok(&["::ffff:10.0.0.1", "fd00::1", "fe80::1"]))),
            (&hosts[1], answer(Ok(&["::ffff:10.0.0.2", "fd00::2", "fe80::1"]))),
            (&hosts[2], answer(Err("no route"))),
        ];
        let found = owner(gid("fd00::2"), &answers).unwrap();
        assert_eq!(found.map(|host| host.name.as_str()), Some("b"));
        assert_eq!(owner(gid("fd00::3"), &answers).unwrap(), None);
        let error = nobody(gid("fd00::3"), &answers).to_string();
        assert_eq!(
            error,
            "fd00::3 is the GID of no known host: asked were a, b; c cannot say (no route)"
        );
        let error = owner(gid("fe80::1"), &answers).unwrap_err().to_string();
        assert!(error.starts_with("both a and b say that fe80::1 is"), "{error}");
    }

    #[test]
    fn a_gid_is_nobody_s_only_if_every_host_has_said_so() {
        let hosts = hosts();
        let table = answer(Ok(&["::ffff:10.0.0.1"]));
        let mut answers = [
            (&hosts[0], table.clone()),
            (&hosts[1], table.clone()),
            (&hosts[2], answer(Err("no route"))),
        ];
        let unknown = whose(gid("fd00::3"), &answers);
        assert!(matches!(&unknown, Whose::Unknown(error) if error.to_string().contains("c cannot say")));
        // Whoever is out of reach, or two at once.
        assert!(matches!(
            whose(gid("::ffff:10.0.0.1"), &answers),
            Whose::Unknown(_)
        ));
        answers[2].1 = table.clone();
        assert!(matches!(whose(gid("fd00::3"), &answers), Whose::Nobodys));
        // Out of reach now, and asked before.
        answers[2].1 = Answer::new(Err("no route".to_owned()), table.last.clone());
        assert!(matches!(whose(gid("fd00::3"), &answers), Whose::Nobodys));
        assert!(matches!(
            whose(gid("::ffff:10.0.0.1"), &answers[2..]),
            Whose::Unknown(_)
        ));
        answers[1].1 = answer(Ok(&["fd00::3"]));
        assert!(matches!(whose(gid("fd00::3"), &answers), Whose::Host(host) if host.name == "b"));
    }

    #[test]
    fn what_a_host_has_said_holds_for_a_while() {
        let gids = Gids::default();
        assert!(gids.known("a", HOLDS).is_none());
        gids.note("a", &Ok(vec![gid("fd00::1")]));
        gids.note("b", &Err(anyhow::anyhow!("no route")));
        let known = gids.known("a", HOLDS).expect("it was just said");
        assert_eq!(known.table, Ok(vec![gid("fd00::1")]));
        assert!(gids.known("a", Duration::ZERO).is_none());
        let failed = gids
            .known("b", Duration::ZERO)
            .expect("who is out of reach is left alone");
        assert_eq!(failed.table, Err("no route".to_owned()));
    }
}
