//! What this agent decided, one JSON object per line, on disk before anyone is told.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// What is worth writing down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// A session began here.
    Opened,
    /// From now on the instance is the destination's.
    Committed,
    /// At the destination: its tasks run.
    Running,
    /// The instance is the source's.
    RolledBack,
    /// Everything is cleared away.
    Closed,
}

/// This host's part in a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The instance was here.
    Source,
    /// The instance comes here.
    Destination,
}

#[derive(Serialize, Deserialize)]
struct Line {
    unix_ms: u64,
    session: String,
    role: Role,
    event: Event,
    instance: String,
    other_host: String,
}

/// The journal.
#[derive(Debug)]
pub struct Journal(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    file: File,
    last: HashMap<(u64, Role), (Event, String)>,
}

impl Journal {
    /// Goes on in the file at `path`. A line that was cut off by a crash, or is damaged, is passed over.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(path)?;
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        let text = String::from_utf8_lossy(&text);
        let mut last = HashMap::new();
        for line in text.lines() {
            let Ok(line) = serde_json::from_str::<Line>(line) else {
                continue;
            };
            let Ok(session) = u64::from_str_radix(&line.session, 16) else {
                continue;
            };
            last.insert((session, line.role), (line.event, line.instance));
        }
        if !text.is_empty() && !text.ends_with('\n') {
            file.write_all(b"\n")?;
        }
        Ok(Self(Mutex::new(Inner { file, last })))
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
            .as_millis() as u64;
        let line = Line {
            unix_ms,
            session: format!("{session:016x}"),
            role,
            event,
            instance: instance.to_owned(),
            other_host: other_host.to_owned(),
        };
        let mut text = serde_json::to_vec(&line)?;
        text.push(b'\n');
        let mut inner = self.0.lock().expect("no panic under this lock");
        inner.file.write_all(&text)?;
        inner.file.sync_data()?;
        inner.last.insert((session, role), (event, line.instance));
        Ok(())
    }

    /// The last word on this host's part in a session.
    pub fn last(&self, session: u64, role: Role) -> Option<Event> {
        let inner = self.0.lock().expect("no panic under this lock");
        inner.last.get(&(session, role)).map(|(event, _)| *event)
    }

    /// Sessions of which this is the last word, with their instances.
    pub fn with_last(&self, role: Role, event: Event) -> Vec<(u64, String)> {
        let inner = self.0.lock().expect("no panic under this lock");
        let matching = inner
            .last
            .iter()
            .filter(|((_, its), (last, _))| *its == role && *last == event);
        matching
            .map(|((session, _), (_, instance))| (*session, instance.clone()))
            .collect()
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
        // A crash in the middle of a line costs that line only.
        std::fs::write(&path, format!("{text}{{\"unix_ms\":1,\"sess")).unwrap();
        let journal = Journal::open(&path).unwrap();
        assert_eq!(journal.last(7, Role::Source), Some(Event::RolledBack));
        assert_eq!(journal.last(7, Role::Destination), None);
        journal
            .write(8, Role::Destination, Event::Committed, "web", "b")
            .unwrap();
        let journal = Journal::open(&path).unwrap();
        assert_eq!(
            journal.with_last(Role::Destination, Event::Committed),
            [(8, "web".to_owned())]
        );
    }
}
