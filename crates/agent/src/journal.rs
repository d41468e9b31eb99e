//! What this agent decided, one JSON object per line, on disk before anyone is told.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// What is worth writing down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// A session began here.
    Opened,
    /// From now on the instance is the destination's.
    Committed,
    /// The instance is the source's.
    RolledBack,
    /// Nobody knows: the hosts lost each other at the commit.
    Undecided,
    /// Everything is cleared away.
    Closed,
}

/// This host's part in a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The instance was here.
    Source,
    /// The instance comes here.
    Destination,
}

#[derive(Serialize)]
struct Line<'a> {
    unix_ms: u128,
    session: &'a str,
    role: Role,
    event: Event,
    instance: &'a str,
    other_host: &'a str,
}

/// The journal.
#[derive(Debug)]
pub struct Journal(Mutex<File>);

impl Journal {
    /// Goes on in the file at `path`.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(Mutex::new(
            OpenOptions::new().append(true).create(true).open(path)?,
        )))
    }

    /// Writes a line; it is on disk when this returns.
    pub fn write(
        &self,
        session: u64,
        role: Role,
        event: Event,
        instance: &str,
        other_host: &str,
    ) -> io::Result<()> {
        let unix_ms = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_millis();
        let session = format!("{session:016x}");
        let line = Line {
            unix_ms,
            session: &session,
            role,
            event,
            instance,
            other_host,
        };
        let mut text = serde_json::to_vec(&line)?;
        text.push(b'\n');
        let mut file = self.0.lock().expect("no panic under this lock");
        file.write_all(&text)?;
        file.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_appended_across_restarts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        for event in [Event::Opened, Event::RolledBack] {
            Journal::open(&path)
                .unwrap()
                .write(7, Role::Source, event, "web", "b")
                .unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let events: Vec<_> = text
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["event"].clone())
            .collect();
        assert_eq!(events, ["opened", "rolled-back"]);
    }
}
