//! Where the connections went that left this host: the forwarding entries (DESIGN: identities).
//!
//! A program that connects to a moved one with the numbers that it published before asks, through its own agent, the
//! agent of the host whose GID it holds.
//!
//! Entries are in a file, one JSON object per line, so that they outlive the agent. Each expires [`LIFETIME`] after the
//! instance left: numbers are published to be used soon.
//!
//! The RNIC gives the number of an entry to somebody else one day, who has it from then on ([`current`]). Until the queue pair that
//! left is destroyed here, the number is its own; the RNIC says when it is ([`watch`]).

mod given_again;

use std::collections::HashMap;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use verbatim_channel::{Endpoint, KeyPair};
use verbatim_device::control::FIRST_PUBLISHED_QPN;

use crate::agent::Agent;
use crate::proto::{RetargetRequest, retarget_request};
use crate::quotas::{self, Given};
use crate::session;

pub use given_again::{current, watch};

/// How long an entry is kept after the instance left.
pub const LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);

/// The file is written anew when it is longer than this, and most of it is over.
const COMPACT_BYTES: u64 = 1 << 20;

/// Permissions of the file: remote keys are in it.
const PRIVATE: u32 = 0o600;

/// How long another host may take to note where a queue pair is now.
const TELL_TIMEOUT: Duration = Duration::from_secs(2);

/// Queue pair numbers have 24 bits; the last is that of multicast groups.
const QPNS: u32 = (1 << 24) - 1;

/// So many entries at most are added for what programs make elsewhere.
const MAX_ENTRIES: usize = 1 << 20;

/// Where an endpoint is now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forward {
    /// The physical endpoint.
    pub endpoint: Endpoint,
    /// The process's remote keys there.
    pub keys: Vec<KeyPair>,
}

/// A queue pair that has moved once more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moved {
    /// Where it was.
    pub from: Endpoint,
    /// Where it is.
    pub to: Endpoint,
    /// The process's remote keys there; `None` if they have not changed.
    pub keys: Option<Vec<KeyPair>>,
}

/// What the host with the GID `from` says of queue pairs that have left it.
pub fn decode(request: RetargetRequest, from: [u8; 16]) -> anyhow::Result<Vec<Moved>> {
    let tables: Vec<Vec<KeyPair>> = session::decode(&request.keys)?;
    let moved = request.moved.into_iter().map(|moved| {
        let keys = moved
            .keys
            .map(|table| tables.get(table as usize).context("a key table is missing"));
        Ok(Moved {
            from: Endpoint {
                gid: from,
                qpn: moved.qpn,
            },
            to: moved.to.context("a queue pair that went nowhere")?.try_into()?,
            keys: keys.transpose()?.cloned(),
        })
    });
    moved.collect()
}

/// The same as a message. `moved` are of one host.
pub fn encode(moved: &[Moved]) -> RetargetRequest {
    let mut tables: Vec<&Vec<KeyPair>> = Vec::new();
    let moved = moved.iter().map(|moved| {
        // The queue pairs of a process follow each other and have the same keys.
        if let Some(keys) = &moved.keys
            && tables.last() != Some(&keys)
        {
            tables.push(keys);
        }
        retarget_request::Moved {
            qpn: moved.from.qpn,
            to: Some(moved.to.into()),
            keys: moved.keys.as_ref().map(|_| tables.len() as u32 - 1),
        }
    });
    RetargetRequest {
        moved: moved.collect(),
        keys: session::encode(&tables),
    }
}

/// Tells hosts that queue pairs have left this one, or have other numbers here. Whether all have noted it.
pub async fn tell(agent: &Agent, hosts: impl Iterator<Item = &str>, moved: &[Moved]) -> bool {
    agent.forwarding.retarget(moved);
    let others = hosts.filter(|host| *host != agent.name() && agent.peers.directory().host(host).is_some());
    let told = others.map(|host| {
        let request = encode(moved);
        async move {
            let told = async {
                let mut client = agent.peers.connect(host).await?;
                anyhow::Ok(client.retarget(request).await?)
            };
            let told = tokio::time::timeout(TELL_TIMEOUT, told).await;
            if !matches!(told, Ok(Ok(_))) {
                tracing::warn!(host, ?told, "asks this host where queue pairs are, from now on");
            }
            matches!(told, Ok(Ok(_)))
        }
    });
    join_all(told).await.into_iter().all(|told| told)
}

/// A line of the file: an entry, or that there is none any more.
#[derive(Serialize, Deserialize)]
struct Line {
    qpn: u32,
    forward: Option<Forward>,
    made: SystemTime,
    /// Files of earlier releases do not say it.
    #[serde(default)]
    destroyed: bool,
}

#[derive(Debug, Clone)]
struct Entry {
    forward: Forward,
    made: SystemTime,
    /// What left is destroyed here: whoever has the number at this host's RNIC is another one.
    destroyed: bool,
}

impl Entry {
    fn line(&self, qpn: u32) -> Line {
        Line {
            qpn,
            forward: Some(self.forward.clone()),
            made: self.made,
            destroyed: self.destroyed,
        }
    }
}

/// The forwarding entries of one host.
#[derive(Debug)]
pub struct Forwarding {
    inner: Mutex<Inner>,
    /// There are new entries.
    inserted: Notify,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    file: File,
    /// Its length, and what that was when nothing in it was over.
    bytes: u64,
    bytes_compact: u64,
    entries: HashMap<u32, Entry>,
    /// The next number for a queue pair that was never here.
    next: u32,
    /// Numbers that were given to the hosts.
    given: HashMap<String, Given>,
}

fn is_fresh(made: SystemTime, now: SystemTime) -> bool {
    // One from the future was made before the clock was put back.
    now.duration_since(made).is_ok_and(|age| age < LIFETIME) || made > now
}

impl Inner {
    fn append(&mut self, lines: &[Line]) -> io::Result<()> {
        let mut text = Vec::new();
        for line in lines {
            serde_json::to_writer(&mut text, line)?;
            text.push(b'\n');
        }
        self.bytes += text.len() as u64;
        self.file.write_all(&text)?;
        if self.bytes > COMPACT_BYTES && self.bytes > 2 * self.bytes_compact {
            self.compact()?;
        }
        Ok(())
    }

    fn remove(&mut self, qpn: u32) {
        if self.entries.remove(&qpn).is_none() {
            return;
        }
        let line = Line {
            qpn,
            forward: None,
            made: SystemTime::now(),
            destroyed: false,
        };
        if let Err(error) = self.append(&[line]) {
            tracing::warn!(%error, "a forwarding entry may come back with another agent");
        }
    }

    /// Writes the file anew, without what is over.
    fn compact(&mut self) -> io::Result<()> {
        // Beside the old one, which is whole until the new one is.
        let fresh = self.path.with_extension("new");
        let mut text = Vec::new();
        for (qpn, entry) in &self.entries {
            serde_json::to_writer(&mut text, &entry.line(*qpn))?;
            text.push(b'\n');
        }
        let options = OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(true)
            .mode(PRIVATE)
            .open(&fresh);
        let mut file = options?;
        // Also one that an earlier agent has left.
        file.set_permissions(Permissions::from_mode(PRIVATE))?;
        file.write_all(&text)?;
        file.sync_data()?;
        std::fs::rename(&fresh, &self.path)?;
        self.file = file;
        self.bytes = text.len() as u64;
        self.bytes_compact = self.bytes;
        Ok(())
    }
}

impl Forwarding {
    /// Goes on with the entries in the file at `path`, those that have expired left out. A damaged line is passed over.
    pub fn open(path: &Path, now: SystemTime) -> io::Result<Self> {
        let text = match std::fs::read(path) {
            Ok(text) => String::from_utf8_lossy(&text).into_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error),
        };
        let mut entries = HashMap::new();
        for line in text
            .lines()
            .filter_map(|line| serde_json::from_str::<Line>(line).ok())
        {
            match line.forward {
                Some(forward) if is_fresh(line.made, now) => {
                    let entry = Entry {
                        forward,
                        made: line.made,
                        destroyed: line.destroyed,
                    };
                    entries.insert(line.qpn, entry);
                }
                _ => {
                    entries.remove(&line.qpn);
                }
            }
        }
        let mut inner = Inner {
            path: path.to_owned(),
            file: OpenOptions::new()
                .create(true)
                .append(true)
                .mode(PRIVATE)
                .open(path)?,
            bytes: 0,
            bytes_compact: 0,
            entries,
            next: rand::random_range(FIRST_PUBLISHED_QPN..QPNS),
            given: HashMap::new(),
        };
        inner.compact()?;
        Ok(Self {
            inner: Mutex::new(inner),
            inserted: Notify::new(),
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    /// From now on, the queue pairs that were these on this host are found there.
    pub fn insert(&self, left: impl IntoIterator<Item = (u32, Forward)>) {
        let made = SystemTime::now();
        let entries = left.into_iter().map(|(qpn, forward)| {
            let entry = Entry {
                forward,
                made,
                destroyed: false,
            };
            (qpn, entry)
        });
        let entries: Vec<_> = entries.collect();
        let lines: Vec<_> = entries.iter().map(|(qpn, entry)| entry.line(*qpn)).collect();
        let mut inner = self.lock();
        inner.entries.extend(entries);
        if let Err(error) = inner.append(&lines) {
            tracing::warn!(%error, "forwarding entries will not outlive this agent");
        }
        drop(inner);
        self.inserted.notify_one();
    }

    /// A number of this host, which its RNIC does not give, asked for or not ([`FIRST_PUBLISHED_QPN`]), for a queue pair that is at
    /// `forward`, and that `host` asks for; none if there are too many, or if that host has too many.
    pub fn publish(&self, forward: Forward, host: &str) -> Option<u32> {
        let qpn = {
            let mut inner = self.lock();
            if inner.entries.len() >= MAX_ENTRIES {
                let now = SystemTime::now();
                inner.entries.retain(|_, entry| is_fresh(entry.made, now));
            }
            if inner.entries.len() >= MAX_ENTRIES {
                return None;
            }
            let bytes = forward.keys.len() * size_of::<KeyPair>();
            let (most, most_bytes) = (quotas::PUBLISHED_BY_HOST, quotas::PUBLISHED_BYTES_BY_HOST);
            let given = inner.given.entry(host.to_owned()).or_default();
            if !given.take(Instant::now(), bytes, most, most_bytes) {
                tracing::warn!(host, "was given too many numbers here, and gets no more");
                return None;
            }
            loop {
                let qpn = inner.next;
                inner.next = match qpn + 1 {
                    QPNS => FIRST_PUBLISHED_QPN,
                    next => next,
                };
                if !inner.entries.contains_key(&qpn) {
                    break qpn;
                }
            }
        };
        self.insert([(qpn, forward)]);
        Some(qpn)
    }

    /// The queue pair `qpn` lives on this host (again): there is nothing to forward.
    pub fn remove(&self, qpn: u32) {
        self.lock().remove(qpn);
    }

    /// Entries that lead to where queue pairs were lead to where they are. How many did.
    pub fn retarget(&self, moved: &[Moved]) -> u64 {
        let by_place: HashMap<Endpoint, &Moved> = moved.iter().map(|moved| (moved.from, moved)).collect();
        let mut inner = self.lock();
        let mut lines = Vec::new();
        for (qpn, entry) in &mut inner.entries {
            if let Some(moved) = by_place.get(&entry.forward.endpoint) {
                // It has left once more, so that it may be asked for as long as after it left first.
                entry.made = SystemTime::now();
                entry.forward.endpoint = moved.to;
                if let Some(keys) = &moved.keys {
                    entry.forward.keys.clone_from(keys);
                }
                lines.push(entry.line(*qpn));
            }
        }
        if let Err(error) = inner.append(&lines) {
            tracing::warn!(%error, "forwarding entries will lead astray after this agent");
        }
        lines.len() as u64
    }

    /// Removes entries that nobody asks for any more: of those that lead to the same endpoint, all but the ones from the
    /// numbers that are named.
    pub fn prune(&self, keep: &HashMap<Endpoint, [u32; 2]>) {
        let superfluous = |(qpn, entry): (&u32, &Entry)| {
            let keep = keep.get(&entry.forward.endpoint)?;
            (!keep.contains(qpn)).then_some(*qpn)
        };
        let superfluous: Vec<u32> = self.lock().entries.iter().filter_map(superfluous).collect();
        superfluous.into_iter().for_each(|qpn| self.remove(qpn));
    }

    /// Where the queue pair that was `qpn` on this host is now.
    pub fn get(&self, qpn: u32) -> Option<Forward> {
        self.get_at(qpn, SystemTime::now())
    }

    fn get_at(&self, qpn: u32, now: SystemTime) -> Option<Forward> {
        let mut inner = self.lock();
        let entry = inner.entries.get(&qpn)?;
        if is_fresh(entry.made, now) {
            return Some(entry.forward.clone());
        }
        inner.entries.remove(&qpn);
        None
    }
}

#[cfg(test)]
mod tests;
