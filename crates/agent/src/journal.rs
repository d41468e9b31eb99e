//! What this agent did and decided, one JSON object per line. Decisions are on disk before anyone is told.
//!
//! It does not grow for ever: of sessions that ended long ago only their end is kept, and of those before them nothing.
//!
//! ```text
//!  source:       opened ─ step… ─► committed (asked) ─► running (answered) ─► closed
//!  destination:  opened ─ step… ─► committed ─► running (its tasks run) ─────► closed
//!  partner:      opened ─ step… ─► committed (switching) ────────────────────► closed
//!                   └──────────────────┴─────────────────────────────────────► rolled-back
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::report::Bytes;

/// How many ended sessions are kept with all that happened in them.
const KEPT_WHOLE: usize = 256;

/// How many are kept with their end, which another host that lost an answer may still ask for.
const KEPT: usize = 16_384;

/// The file is written anew when it is longer than this, and most of it is over.
const COMPACT_BYTES: u64 = 2 << 20;

/// What is worth writing down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// A session began here.
    Opened,
    /// It has come to a step, or something about it became known. Decides nothing.
    Step,
    /// From now on the instance is the destination's, unless that says that it could not take it.
    Committed,
    /// The instance's tasks run at the destination.
    Running,
    /// The instance is the source's.
    RolledBack,
    /// Everything is cleared away.
    Closed,
}

/// This host's part in a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The instance was here.
    Source,
    /// The instance comes here.
    Destination,
    /// Programs with connections to the instance are here.
    Partner,
}

impl Role {
    /// Its name, as in the journal.
    pub fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
            Self::Partner => "partner",
        }
    }
}

/// What a line says beside its event.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    /// The instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// The host that it leaves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// The host that it goes to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub destination: Option<String>,
    /// The partners' hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partners: Option<Vec<String>>,
    /// The step that began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// What went wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What was sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Bytes>,
}

impl Told {
    /// Who takes part in a session, as its first line says.
    pub fn parties(instance: &str, source: &str, destination: &str) -> Self {
        Self {
            instance: Some(instance.to_owned()),
            source: Some(source.to_owned()),
            destination: Some(destination.to_owned()),
            ..Self::default()
        }
    }

    /// Something went wrong.
    pub fn error(error: &anyhow::Error) -> Self {
        Self {
            error: Some(format!("{error:#}")),
            ..Self::default()
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Line {
    unix_ms: u64,
    session: String,
    role: Role,
    event: Event,
    #[serde(flatten)]
    told: Told,
}

/// What is known of this host's part in a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// The session.
    pub session: u64,
    /// This host's part.
    pub role: Role,
    /// The last word on it.
    pub last: Event,
    /// All that the lines say; of each the latest.
    pub told: Told,
    /// The steps and when they began, in milliseconds since 1970.
    pub steps: Vec<(u64, String)>,
}

impl Known {
    /// Whether it has come to its end.
    pub fn has_ended(&self) -> bool {
        matches!(self.last, Event::Closed | Event::RolledBack)
    }

    /// Keeps nothing but how it ended, and whose it was: who may still ask.
    fn forget(&mut self) {
        self.steps = Vec::new();
        let Told {
            instance,
            source,
            destination,
            partners,
            ..
        } = std::mem::take(&mut self.told);
        self.told = Told {
            instance,
            source,
            destination,
            partners,
            ..Told::default()
        };
    }

    /// Lines that say all that is known.
    fn lines(&self) -> Vec<Line> {
        let line = |unix_ms, event, told| Line {
            unix_ms,
            session: format!("{:016x}", self.session),
            role: self.role,
            event,
            told,
        };
        let told = Told {
            step: None,
            ..self.told.clone()
        };
        let begun = self.steps.first().map_or(0, |(begun, _)| *begun);
        let mut lines = vec![line(begun, Event::Opened, told)];
        for (unix_ms, name) in &self.steps {
            let (event, step) = match name.as_str() {
                "Open" => continue,
                "Commit" => (Event::Committed, None),
                "Running" => (Event::Running, None),
                "RolledBack" => (Event::RolledBack, None),
                "Closed" => (Event::Closed, None),
                step => (Event::Step, Some(step.to_owned())),
            };
            let told = Told {
                step,
                ..Told::default()
            };
            lines.push(line(*unix_ms, event, told));
        }
        if self.steps.is_empty() {
            lines.push(line(0, self.last, Told::default()));
        }
        lines
    }

    fn add(&mut self, unix_ms: u64, event: Event, told: Told) {
        let name = match (event, &told.step) {
            (Event::Step, step) => step.clone(),
            (Event::Opened, _) => Some("Open".to_owned()),
            (Event::Committed, _) => Some("Commit".to_owned()),
            (Event::Running, _) => Some("Running".to_owned()),
            (Event::RolledBack, _) => Some("RolledBack".to_owned()),
            (Event::Closed, _) => Some("Closed".to_owned()),
        };
        self.steps.extend(name.map(|name| (unix_ms, name)));
        if event != Event::Step {
            self.last = event;
        }
        let Told {
            instance,
            source,
            destination,
            partners,
            step,
            error,
            bytes,
        } = told;
        let own = &mut self.told;
        own.instance = instance.or(own.instance.take());
        own.source = source.or(own.source.take());
        own.destination = destination.or(own.destination.take());
        own.partners = partners.or(own.partners.take());
        own.step = step.or(own.step.take());
        own.error = error.or(own.error.take());
        own.bytes = bytes.or(own.bytes);
    }
}

/// The journal.
#[derive(Debug)]
pub struct Journal(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    file: File,
    /// Its length, and what that was when nothing in it was over.
    bytes: u64,
    bytes_compact: u64,
    known: BTreeMap<(u64, Role), Known>,
    /// Those that have ended, in that order.
    ended: VecDeque<(u64, Role)>,
}

impl Inner {
    fn add(&mut self, session: u64, role: Role, unix_ms: u64, event: Event, told: Told) {
        let known = self.known.entry((session, role)).or_insert_with(|| Known {
            session,
            role,
            last: Event::Opened,
            told: Told::default(),
            steps: Vec::new(),
        });
        let had_ended = known.has_ended();
        known.add(unix_ms, event, told);
        if had_ended || !known.has_ended() {
            return;
        }
        self.ended.push_back((session, role));
        if let Some(index) = self.ended.len().checked_sub(KEPT_WHOLE + 1)
            && let Some(old) = self.known.get_mut(&self.ended[index])
        {
            old.forget();
        }
        if self.ended.len() > KEPT
            && let Some(oldest) = self.ended.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    /// Appends lines, which are on disk when this returns if `sync` is wanted.
    fn append(&mut self, text: &[u8], sync: bool) -> io::Result<()> {
        self.file.write_all(text)?;
        if sync {
            self.file.sync_data()?;
        }
        self.bytes += text.len() as u64;
        Ok(())
    }

    /// Writes the file anew if most of it is over: beside the old one, which is whole until the new one is.
    fn compact(&mut self) -> io::Result<()> {
        if self.bytes <= COMPACT_BYTES || self.bytes <= 2 * self.bytes_compact {
            return Ok(());
        }
        let mut text = Vec::new();
        let open = self.known.values().filter(|known| !known.has_ended());
        let ended = self.ended.iter().filter_map(|key| self.known.get(key));
        for line in ended.chain(open).flat_map(Known::lines) {
            serde_json::to_writer(&mut text, &line)?;
            text.push(b'\n');
        }
        let fresh = self.path.with_extension("new");
        let mut file = OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(true)
            .open(&fresh)?;
        file.write_all(&text)?;
        file.sync_data()?;
        std::fs::rename(&fresh, &self.path)?;
        self.file = file;
        self.bytes = text.len() as u64;
        self.bytes_compact = self.bytes;
        Ok(())
    }
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
        let text = String::from_utf8_lossy(&text).into_owned();
        if !text.is_empty() && !text.ends_with('\n') {
            file.write_all(b"\n")?;
        }
        let mut inner = Inner {
            path: path.to_owned(),
            file,
            bytes: text.len() as u64,
            bytes_compact: 0,
            known: BTreeMap::new(),
            ended: VecDeque::new(),
        };
        for line in text.lines() {
            let Ok(line) = serde_json::from_str::<Line>(line) else {
                continue;
            };
            let Ok(session) = u64::from_str_radix(&line.session, 16) else {
                continue;
            };
            inner.add(session, line.role, line.unix_ms, line.event, line.told);
        }
        Ok(Self(Mutex::new(inner)))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().expect("no panic under this lock")
    }

    /// Writes a line; it is on disk when this returns, unless it is a mere step.
    pub fn write(&self, session: u64, role: Role, event: Event, told: Told) -> io::Result<()> {
        let unix_ms = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_millis() as u64;
        let line = Line {
            unix_ms,
            session: format!("{session:016x}"),
            role,
            event,
            told,
        };
        let mut text = serde_json::to_vec(&line)?;
        match event {
            Event::Step => tracing::debug!("{}", String::from_utf8_lossy(&text)),
            _ => tracing::info!(session = line.session, ?role, "{event:?}"),
        }
        text.push(b'\n');
        let mut inner = self.lock();
        inner.append(&text, event != Event::Step)?;
        inner.add(session, role, unix_ms, event, line.told);
        // Never while an instance is frozen.
        if event == Event::Opened
            && let Err(error) = inner.compact()
        {
            tracing::warn!(%error, "the journal cannot be written anew, and grows");
        }
        Ok(())
    }

    /// Notes a step. What only explains may be missing: a journal that cannot be written fails at the next decision.
    pub fn step(&self, session: u64, role: Role, name: &str) {
        let told = Told {
            step: Some(name.to_owned()),
            ..Told::default()
        };
        self.note(session, role, told);
    }

    /// Notes something about a session, as [`Self::step`] does.
    pub fn note(&self, session: u64, role: Role, told: Told) {
        if let Err(error) = self.write(session, role, Event::Step, told) {
            tracing::warn!(%error, "the journal cannot be written");
        }
    }

    /// The last word on this host's part in a session.
    pub fn last(&self, session: u64, role: Role) -> Option<Event> {
        self.lock().known.get(&(session, role)).map(|known| known.last)
    }

    /// All that is known, by session and role.
    pub fn sessions(&self) -> Vec<Known> {
        self.lock().known.values().cloned().collect()
    }

    /// What is known of this host's parts in one session.
    pub fn parts(&self, session: u64) -> Vec<Known> {
        let inner = self.lock();
        let parts = inner
            .known
            .range((session, Role::Source)..=(session, Role::Partner));
        parts.map(|(_, known)| known.clone()).collect()
    }

    /// Sessions of which this is the last word, with their instances.
    pub fn with_last(&self, role: Role, event: Event) -> Vec<(u64, String)> {
        let inner = self.lock();
        let matching = inner
            .known
            .values()
            .filter(|known| known.role == role && known.last == event);
        matching
            .map(|known| (known.session, known.told.instance.clone().unwrap_or_default()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parties() -> Told {
        Told::parties("web", "a", "b")
    }

    #[test]
    fn lines_are_appended_across_restarts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        for (event, told) in [(Event::Opened, parties()), (Event::RolledBack, Told::default())] {
            Journal::open(&path)
                .unwrap()
                .write(7, Role::Source, event, told)
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
            .write(8, Role::Destination, Event::Committed, parties())
            .unwrap();
        let journal = Journal::open(&path).unwrap();
        assert_eq!(
            journal.with_last(Role::Destination, Event::Committed),
            [(8, "web".to_owned())]
        );
    }

    #[test]
    fn steps_are_kept_in_order_and_decide_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let journal = Journal::open(&path).unwrap();
        journal.write(1, Role::Source, Event::Opened, parties()).unwrap();
        journal.step(1, Role::Source, "PreCopy");
        let partners = Told {
            partners: Some(vec!["c".to_owned()]),
            ..Told::default()
        };
        journal.note(1, Role::Source, partners);
        journal
            .write(1, Role::Source, Event::Committed, Told::default())
            .unwrap();
        journal.step(1, Role::Source, "Replay");
        for journal in [journal, Journal::open(&path).unwrap()] {
            let [known] = &journal.parts(1)[..] else {
                panic!("one part")
            };
            assert_eq!(known.last, Event::Committed);
            let names: Vec<_> = known.steps.iter().map(|(_, name)| name.as_str()).collect();
            assert_eq!(names, ["Open", "PreCopy", "Commit", "Replay"]);
            assert_eq!(known.told.instance.as_deref(), Some("web"));
            assert_eq!(known.told.partners.as_deref(), Some(&["c".to_owned()][..]));
        }
    }

    #[test]
    fn what_is_long_over_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let journal = Journal::open(&path).unwrap();
        let undecided = 1 << 40;
        journal
            .write(undecided, Role::Destination, Event::Opened, parties())
            .unwrap();
        journal.step(undecided, Role::Destination, "PreSetup");
        journal
            .write(undecided, Role::Destination, Event::Committed, Told::default())
            .unwrap();
        let many = KEPT as u64 + 100;
        for session in 0..many {
            // Without the disk, which decisions otherwise wait for.
            let mut inner = journal.lock();
            for (event, step) in [
                (Event::Opened, None),
                (Event::Step, Some("Drain")),
                (Event::Closed, None),
            ] {
                let told = Told {
                    step: step.map(str::to_owned),
                    ..parties()
                };
                inner.add(session, Role::Partner, session, event, told);
            }
            inner.bytes += 400;
        }
        journal
            .write(many, Role::Partner, Event::Opened, parties())
            .unwrap();
        assert!(std::fs::metadata(&path).unwrap().len() < 2 * 180 * many);
        drop(journal);
        let journal = Journal::open(&path).unwrap();
        assert_eq!(journal.last(0, Role::Partner), None, "forgotten");
        assert_eq!(journal.last(200, Role::Partner), Some(Event::Closed));
        let steps = |session, role| {
            let parts = journal.parts(session);
            let part = parts.iter().find(|part| part.role == role).unwrap();
            part.steps
                .iter()
                .map(|(_, name)| name.clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(steps(many - 1, Role::Partner), ["Open", "Drain", "Closed"]);
        assert_eq!(
            steps(undecided, Role::Destination),
            ["Open", "PreSetup", "Commit"]
        );
        assert_eq!(journal.last(undecided, Role::Destination), Some(Event::Committed));
        assert_eq!(journal.parts(many)[0].told.instance.as_deref(), Some("web"));
    }
}
