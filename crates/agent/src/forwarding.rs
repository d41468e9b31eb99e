//! Where the connections went that left this host: the forwarding entries (DESIGN: identities).
//!
//! A program that connects to a moved one with the numbers that it published before asks, through its own agent, the
//! agent of the host whose GID it holds.
//!
//! Entries are in a file, one JSON object per line, so that they outlive the agent. Each expires [`LIFETIME`] after the
//! instance left: numbers are published to be used soon, and what is wrong about an entry is that the RNIC may give its
//! number to somebody else one day.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use verbatim_channel::{Endpoint, KeyPair};

/// How long an entry is kept after the instance left.
pub const LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);

/// Where an endpoint is now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forward {
    /// The physical endpoint.
    pub endpoint: Endpoint,
    /// The process's remote keys there.
    pub keys: Vec<KeyPair>,
}

/// A line of the file: an entry, or that there is none any more.
#[derive(Serialize, Deserialize)]
struct Line {
    qpn: u32,
    forward: Option<Forward>,
    made: SystemTime,
}

/// The forwarding entries of one host.
#[derive(Debug)]
pub struct Forwarding(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    file: File,
    entries: HashMap<u32, (Forward, SystemTime)>,
}

fn is_fresh(made: SystemTime, now: SystemTime) -> bool {
    // One from the future was made before the clock was put back.
    now.duration_since(made).is_ok_and(|age| age < LIFETIME) || made > now
}

impl Inner {
    fn append(&mut self, line: &Line) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.file.write_all(&text)
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
                    entries.insert(line.qpn, (forward, line.made));
                }
                _ => {
                    entries.remove(&line.qpn);
                }
            }
        }
        // Written anew beside the old one, which is whole until the new one is.
        let fresh = path.with_extension("new");
        let file = OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(true)
            .open(&fresh)?;
        let mut inner = Inner {
            file,
            entries: HashMap::new(),
        };
        for (qpn, (forward, made)) in &entries {
            inner.append(&Line {
                qpn: *qpn,
                forward: Some(forward.clone()),
                made: *made,
            })?;
        }
        inner.file.sync_data()?;
        std::fs::rename(&fresh, path)?;
        inner.entries = entries;
        Ok(Self(Mutex::new(inner)))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.0.lock().expect("no panic under this lock")
    }

    /// From now on, the queue pair that was `qpn` on this host is found at `forward`.
    pub fn insert(&self, qpn: u32, forward: Forward) {
        let made = SystemTime::now();
        let mut inner = self.lock();
        inner.entries.insert(qpn, (forward.clone(), made));
        let line = Line {
            qpn,
            forward: Some(forward),
            made,
        };
        if let Err(error) = inner.append(&line) {
            tracing::warn!(%error, "a forwarding entry will not outlive this agent");
        }
    }

    /// The queue pair `qpn` lives on this host (again): there is nothing to forward.
    pub fn remove(&self, qpn: u32) {
        let mut inner = self.lock();
        if inner.entries.remove(&qpn).is_none() {
            return;
        }
        let line = Line {
            qpn,
            forward: None,
            made: SystemTime::now(),
        };
        if let Err(error) = inner.append(&line) {
            tracing::warn!(%error, "a forwarding entry may come back with another agent");
        }
    }

    /// Where the queue pair that was `qpn` on this host is now.
    pub fn get(&self, qpn: u32) -> Option<Forward> {
        self.get_at(qpn, SystemTime::now())
    }

    fn get_at(&self, qpn: u32, now: SystemTime) -> Option<Forward> {
        let mut inner = self.lock();
        let (forward, made) = inner.entries.get(&qpn)?;
        if is_fresh(*made, now) {
            return Some(forward.clone());
        }
        inner.entries.remove(&qpn);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forward(qpn: u32) -> Forward {
        Forward {
            endpoint: Endpoint { gid: [7; 16], qpn },
            keys: vec![KeyPair {
                virtual_key: 1,
                physical_key: 2,
            }],
        }
    }

    #[test]
    fn entries_outlive_the_agent_and_expire() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("forwarding");
        let now = SystemTime::now();
        let forwarding = Forwarding::open(&path, now).unwrap();
        for qpn in [1, 2, 3] {
            forwarding.insert(qpn, forward(qpn + 10));
        }
        forwarding.remove(2);
        forwarding.insert(3, forward(33));
        drop(forwarding);
        // A line that a crash has cut off.
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"qpn\":9,\"forw").unwrap();

        let forwarding = Forwarding::open(&path, now).unwrap();
        assert_eq!(forwarding.get(1), Some(forward(11)));
        assert_eq!(forwarding.get(2), None);
        assert_eq!(forwarding.get(3), Some(forward(33)));
        assert_eq!(forwarding.get(9), None);
        let later = now + LIFETIME + Duration::from_secs(60);
        assert_eq!(forwarding.get_at(1, later), None);
        drop(forwarding);
        let forwarding = Forwarding::open(&path, later).unwrap();
        assert_eq!(forwarding.get(3), None);
        assert_eq!(
            std::fs::read(&path).unwrap(),
            b"",
            "what has expired is forgotten"
        );
    }
}
