//! What this agent did and decided. Decisions are on disk before anyone is told.
//!
//! The records are those of `verbatim_session::record`, in a log (`verbatim_journal`) below the agent's state folder, which
//! is on a disk: they outlive a restart of the machine. Each says in which boot it was written.
//!
//! The journal does not grow for ever: of sessions that ended long ago only their end is kept, and of those before them nothing.
//!
//! ```text
//!  source:       Opened ─ step… ─► Deciding ─► Ran ──────────► Closed
//!  destination:  Opened ─ step… ─► Committed ─► Ran ─────────► Closed
//!  partner:      Opened ─ step… ─► Drained ─► Switched ──────► Closed
//!                   └─────────────────┴────► RolledBack ─────► Closed
//! ```
//!
//! Where tasks run before they have all of their memory (`verbatim_session::fill`), a destination's Committed says so, and Filled that nothing is missing any more:
//! before or after Closed.

mod known;

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use verbatim_journal::{AppendError, Durability, Folder, Log};
use verbatim_session::decision::Outcome;
use verbatim_session::fill::Noted;
use verbatim_session::record::{Entry, Note, Standing, What};
use verbatim_session::{Phase, Role};

pub use known::Known;

/// How many ended sessions are kept with all that happened in them.
const KEPT_WHOLE: usize = 256;

/// How many are kept with their end, which another host that lost an answer may still ask for.
const KEPT: usize = 16_384;

/// The log is written anew when it is longer than this, and most of it is over.
const COMPACT_BYTES: u64 = 2 << 20;

/// What a session is sure to find room for, however full the disk is: its decisions and its steps.
const RESERVED_BYTES: u64 = 64 << 10;

/// Where the kernel says which boot this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The journal.
pub struct Journal(Mutex<Inner>);

struct Inner {
    log: Log<Folder>,
    /// This boot.
    boot: [u8; 16],
    /// How long the log was when nothing in it was over.
    bytes_compact: u64,
    known: BTreeMap<(u64, Role), Known>,
    /// Those that have ended, in that order.
    ended: VecDeque<(u64, Role)>,
}

impl Inner {
    fn add(&mut self, entry: Entry) {
        let key = (entry.session, entry.role);
        let known = self
            .known
            .entry(key)
            .or_insert_with(|| Known::new(entry.session, entry.role));
        let was_over = known.is_over();
        known.add(entry);
        if was_over || !known.is_over() {
            return;
        }
        self.ended.push_back(key);
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

    /// Writes the log anew if most of it is over.
    fn compact(&mut self) -> anyhow::Result<()> {
        let bytes = self.log.bytes();
        if bytes <= COMPACT_BYTES || bytes <= 2 * self.bytes_compact {
            return Ok(());
        }
        if self
            .known
            .values()
            .any(|known| known.standing == Standing::Damaged)
        {
            // The damaged segments say so as long as they are there.
            return Ok(());
        }
        let open = self.known.values().filter(|known| !known.is_over());
        let ended = self.ended.iter().filter_map(|key| self.known.get(key));
        let records = ended.chain(open).flat_map(Known::entries);
        self.log.rewrite(records.map(|entry| entry.encode()))?;
        self.bytes_compact = self.log.bytes();
        Ok(())
    }
}

/// The boot ID of this machine.
fn boot_id() -> anyhow::Result<[u8; 16]> {
    let text = std::fs::read_to_string(BOOT_ID).with_context(|| format!("cannot read {BOOT_ID}"))?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let id = u128::from_str_radix(&digits, 16).with_context(|| format!("{BOOT_ID} says {text:?}"))?;
    Ok(id.to_be_bytes())
}

impl Journal {
    /// Goes on in `folder`, which is made if it is not there.
    ///
    /// What a crash has cut off is passed over: nobody was told of it. Where records are damaged that others follow, nothing is
    /// concluded from what is missing: the sessions that were not over stand as [`Standing::Damaged`].
    pub fn open(folder: &Path) -> anyhow::Result<Self> {
        let located = || format!("the journal in {}", folder.display());
        if let Some(above) = folder.parent() {
            std::fs::create_dir_all(above).with_context(located)?;
        }
        let storage = Folder::open(folder).with_context(located)?;
        let (log, replayed) = Log::open(storage).with_context(located)?;
        let mut inner = Inner {
            log,
            boot: boot_id()?,
            bytes_compact: 0,
            known: BTreeMap::new(),
            ended: VecDeque::new(),
        };
        let mut damage = replayed.damage.map(|damage| damage.to_string());
        for record in &replayed.records {
            match Entry::decode(record) {
                Ok(entry) => inner.add(entry),
                Err(error) => damage = Some(error),
            }
        }
        if let Some(damage) = damage {
            tracing::error!(
                damage,
                "{}: records are missing; what was decided in open sessions is asked of the other hosts",
                located()
            );
            for known in inner.known.values_mut() {
                known.damaged();
            }
        }
        Ok(Self(Mutex::new(inner)))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().expect("no panic under this lock")
    }

    /// The boot that this is.
    pub fn boot(&self) -> [u8; 16] {
        self.lock().boot
    }

    /// Writes a record; it is on disk when this returns, unless it decides nothing. Blocks for as long as the disk takes.
    pub fn write(&self, session: u64, role: Role, what: What) -> Result<(), AppendError> {
        let unix_ms = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_millis() as u64;
        let decides = !matches!(what, What::Step { .. } | What::Note(_));
        match decides {
            true => tracing::info!(session = format!("{session:016x}"), %role, "{what:?}"),
            false => tracing::debug!(session = format!("{session:016x}"), %role, "{what:?}"),
        }
        let begins = matches!(what, What::Opened(_));
        let mut inner = self.lock();
        let entry = Entry {
            session,
            role,
            unix_ms,
            boot: inner.boot,
            what,
        };
        // Never while an instance is frozen.
        if begins {
            if let Err(error) = inner.compact() {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "the journal cannot be written anew, and grows"
                );
            }
            inner
                .log
                .reserve(RESERVED_BYTES)
                .map_err(|error| AppendError::NotWritten(std::io::Error::other(error)))?;
        }
        let durability = match decides {
            true => Durability::Synced,
            false => Durability::Later,
        };
        inner.log.append(&entry.encode(), durability)?;
        inner.add(entry);
        Ok(())
    }

    /// Notes a step. What only explains may be missing: a journal that cannot be written fails at the next decision.
    pub fn step(&self, session: u64, role: Role, phase: Phase, name: &str) {
        let name = name.to_owned();
        self.explain(session, role, What::Step { phase, name });
    }

    /// Notes something about a session, as [`Self::step`] does.
    pub fn note(&self, session: u64, role: Role, note: Note) {
        self.explain(session, role, What::Note(note));
    }

    /// Notes what went wrong.
    pub fn failed(&self, session: u64, role: Role, error: &anyhow::Error) {
        let error = Some(format!("{error:#}"));
        self.note(
            session,
            role,
            Note {
                error,
                ..Note::default()
            },
        );
    }

    fn explain(&self, session: u64, role: Role, what: What) {
        if let Err(error) = self.write(session, role, what) {
            tracing::warn!(%error, "the journal cannot be written");
        }
    }

    /// How this host's part in a session stands.
    pub fn standing(&self, session: u64, role: Role) -> Option<Standing> {
        self.lock()
            .known
            .get(&(session, role))
            .map(|known| known.standing)
    }

    /// What is noted of the memory of an instance that has come here in this boot, and by which session.
    pub fn memory(&self, instance: &str) -> (Option<u64>, Noted) {
        let inner = self.lock();
        let came = |known: &&Known| {
            known.role == Role::Destination
                && known.boot == inner.boot
                && known.told.instance.as_deref() == Some(instance)
                && known.is_decided() != Some(Outcome::RolledBack)
        };
        let latest = inner
            .known
            .values()
            .filter(came)
            .max_by_key(|known| known.begun());
        latest.map_or((None, Noted::Unknown), |known| {
            (Some(known.session), known.memory)
        })
    }

    /// Sessions whose tasks lacked memory when it was last written down, and the instances that they have brought here.
    pub fn filling(&self) -> Vec<(u64, String)> {
        let inner = self.lock();
        let filling = inner
            .known
            .values()
            .filter(|known| known.memory == Noted::Missing);
        filling
            .map(|known| (known.session, known.told.instance.clone().unwrap_or_default()))
            .collect()
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
}

#[cfg(test)]
mod tests {
    use verbatim_session::record::Parties;

    use super::*;

    fn opened() -> What {
        What::Opened(Parties {
            instance: "web".to_owned(),
            source: "a".to_owned(),
            destination: "b".to_owned(),
        })
    }

    fn names(journal: &Journal, session: u64, role: Role) -> Vec<String> {
        let parts = journal.parts(session);
        let part = parts.iter().find(|part| part.role == role).unwrap();
        part.steps.iter().map(|(_, name)| name.clone()).collect()
    }

    #[test]
    fn a_journal_goes_on_where_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state/journal");
        let journal = Journal::open(&path).unwrap();
        journal.write(1, Role::Source, opened()).unwrap();
        journal.step(1, Role::Source, Phase::Converge, "PreCopy");
        let partners = Note {
            partners: vec!["c".to_owned()],
            ..Note::default()
        };
        journal.note(1, Role::Source, partners);
        journal.write(1, Role::Source, What::Deciding).unwrap();
        journal.write(1, Role::Source, What::Ran).unwrap();
        journal.step(1, Role::Source, Phase::Resume, "Replay");
        journal.write(2, Role::Destination, opened()).unwrap();
        let boot = journal.boot();
        let check = |journal: &Journal| {
            assert_eq!(journal.standing(1, Role::Source), Some(Standing::Ran));
            assert_eq!(journal.standing(1, Role::Partner), None);
            assert_eq!(journal.standing(2, Role::Destination), Some(Standing::Opened));
            let expected = ["Open", "PreCopy", "Deciding", "Running", "Replay"];
            assert_eq!(names(journal, 1, Role::Source), expected);
            let known = &journal.parts(1)[0];
            assert_eq!(known.told.instance.as_deref(), Some("web"));
            assert_eq!(known.told.partners, ["c"]);
            assert_eq!(known.boot, boot);
        };
        check(&journal);
        drop(journal);
        check(&Journal::open(&path).unwrap());
    }

    #[test]
    fn two_agents_do_not_share_a_journal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let _first = Journal::open(&path).unwrap();
        assert!(Journal::open(&path).is_err());
    }

    #[test]
    fn a_damaged_journal_decides_nothing_about_open_sessions() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let journal = Journal::open(&path).unwrap();
        for session in [1, 2] {
            journal.write(session, Role::Destination, opened()).unwrap();
        }
        journal
            .write(1, Role::Destination, What::Committed(Noted::Nothing))
            .unwrap();
        let over = What::Closed(Outcome::RolledBack);
        journal.write(2, Role::Destination, over).unwrap();
        journal.write(3, Role::Source, opened()).unwrap();
        drop(journal);
        let (mut damaged, mut cut_off) = (0, 0);
        let length = std::fs::metadata(segment(&path)).unwrap().len() as usize;
        for offset in 0..length {
            // A copy, since what is found damaged is put aside.
            let copy = folder.path().join(format!("copy-{offset}"));
            std::fs::create_dir(&copy).unwrap();
            let mut bytes = std::fs::read(segment(&path)).unwrap();
            bytes[offset] ^= 0x40;
            std::fs::write(copy.join(segment(&path).file_name().unwrap()), bytes).unwrap();
            let Ok(journal) = Journal::open(&copy) else {
                continue;
            };
            let later = journal.standing(3, Role::Source);
            match journal.standing(1, Role::Destination) {
                Some(Standing::Damaged) => damaged += 1,
                Some(Standing::Committed) | None => {}
                // A record that nothing follows is one that was being written when the machine went down: nobody was told of it.
                Some(Standing::Opened) if later.is_none() => cut_off += 1,
                other => panic!("offset {offset}: {other:?}, and the last record says {later:?}"),
            }
        }
        assert!(damaged > 0, "{damaged} damaged, {cut_off} cut off");
    }

    /// The only segment of a journal.
    fn segment(path: &Path) -> std::path::PathBuf {
        let segments = std::fs::read_dir(path).unwrap();
        let mut segments = segments
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "log"));
        let only = segments.next().expect("a segment");
        assert!(segments.next().is_none());
        only
    }

    #[test]
    fn what_is_long_over_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let journal = Journal::open(&path).unwrap();
        let undecided = 1 << 40;
        journal.write(undecided, Role::Destination, opened()).unwrap();
        journal.step(undecided, Role::Destination, Phase::Prepare, "PreSetup");
        journal
            .write(undecided, Role::Destination, What::Committed(Noted::Nothing))
            .unwrap();
        let many = KEPT as u64 + 100;
        for session in 0..many {
            // Without waiting for the disk, which decisions otherwise do.
            let mut inner = journal.lock();
            let boot = inner.boot;
            let step = What::Step {
                phase: Phase::Quiesce,
                name: "Drain".to_owned(),
            };
            for what in [opened(), step, What::Closed(Outcome::Committed)] {
                let entry = Entry {
                    session,
                    role: Role::Partner,
                    unix_ms: session,
                    boot,
                    what,
                };
                inner.log.append(&entry.encode(), Durability::Later).unwrap();
                inner.add(entry);
            }
        }
        let before = journal.lock().log.bytes();
        journal.write(many, Role::Partner, opened()).unwrap();
        let after = journal.lock().log.bytes();
        let ends = 140 * many;
        assert!(
            after < before && after < ends,
            "it was written anew, and has little but ends: {before} bytes before, {after} after"
        );
        drop(journal);
        let journal = Journal::open(&path).unwrap();
        assert_eq!(journal.standing(0, Role::Partner), None, "forgotten");
        let over = Some(Standing::Closed(Outcome::Committed));
        assert_eq!(journal.standing(200, Role::Partner), over);
        assert_eq!(
            names(&journal, many - 1, Role::Partner),
            ["Open", "Drain", "Closed"]
        );
        let steps = names(&journal, undecided, Role::Destination);
        assert_eq!(steps, ["Open", "PreSetup", "Commit"]);
        let standing = journal.standing(undecided, Role::Destination);
        assert_eq!(standing, Some(Standing::Committed));
        assert_eq!(journal.parts(many)[0].told.instance.as_deref(), Some("web"));
    }

    #[test]
    fn what_memory_is_missing_is_known_until_it_is_not_and_then_forgotten_as_all_else() {
        let folder = tempfile::tempdir().unwrap();
        let journal = Journal::open(folder.path()).unwrap();
        let destination = Role::Destination;
        assert_eq!(journal.memory("web"), (None, Noted::Unknown));
        journal.write(1, destination, opened()).unwrap();
        journal
            .write(1, destination, What::Committed(Noted::Missing))
            .unwrap();
        let closed = What::Closed(Outcome::Committed);
        journal.write(1, destination, closed).unwrap();
        let must_be_missing = |journal: &Journal| {
            assert_eq!(journal.memory("web"), (Some(1), Noted::Missing));
            assert_eq!(journal.memory("other"), (None, Noted::Unknown));
            assert_eq!(journal.filling(), [(1, "web".to_owned())]);
            assert!(journal.lock().ended.is_empty(), "it is not over");
        };
        must_be_missing(&journal);
        drop(journal);
        let journal = Journal::open(folder.path()).unwrap();
        must_be_missing(&journal);
        // One that came to nothing says nothing of the instance that is here.
        journal.write(2, destination, opened()).unwrap();
        journal
            .write(2, destination, What::Committed(Noted::Missing))
            .unwrap();
        journal.write(2, destination, What::RolledBack).unwrap();
        assert_eq!(journal.memory("web").0, Some(1));
        assert_eq!(journal.filling().len(), 1);

        let boot = journal.parts(1)[0].boot;
        journal.write(1, destination, What::Filled).unwrap();
        drop(journal);
        let journal = Journal::open(folder.path()).unwrap();
        assert_eq!(journal.memory("web"), (Some(1), Noted::Nothing));
        assert!(journal.filling().is_empty());
        assert_eq!(journal.parts(1)[0].boot, boot);
        assert_eq!(journal.lock().ended, [(1, destination)]);
        // Its source may have been away for long.
        if let Some(known) = journal.lock().known.get_mut(&(1, destination)) {
            known.forget();
        }
        let kept: Vec<Entry> = journal.parts(1)[0].entries().collect();
        let mut again = Known::new(1, destination);
        kept.into_iter().for_each(|entry| again.add(entry));
        assert!(again.is_over() && again.memory == Noted::Nothing);
    }
}
