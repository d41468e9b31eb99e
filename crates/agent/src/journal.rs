//! What this agent did and decided. Decisions are on disk before anyone is told.
//!
//! The records are those of `verbatim_session::record`, in a log (`verbatim_journal`) below the agent's state folder, which
//! is on a disk: they outlive a restart of the machine. Each says in which boot it was written.
//!
//! The journal does not grow for ever: of sessions that ended long ago only their end is kept, and of those before them nothing.
//!
//! ```text
//!  source:       Opened ─ step… ─► Deciding ─► Ran ─► Cleared ► Closed
//!  destination:  Opened ─ step… ─► Committed ─► Ran ─────────► Closed
//!  partner:      Opened ─ step… ─► Drained ─► Switched ──────► Closed
//!                   └─────────────────┴────► RolledBack ─────► Closed
//! ```
//!
//! The order of sessions is that of their first records. The time that a record names is for the operator alone: clocks are put back.
//!
//! Where tasks run before they have all of their memory (`verbatim_session::fill`), a destination's Committed says so, and Filled that nothing is missing any more:
//! before or after Closed.

mod known;

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use verbatim_journal::{AppendError, Durability, Folder, Log};
use verbatim_session::decision::Outcome;
use verbatim_session::fill::Noted;
use verbatim_session::record::{Entry, Note, Standing, Unreadable, What};
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
    /// How many parts of sessions have begun.
    begun: u64,
    /// Those that have ended, in that order.
    ended: VecDeque<(u64, Role)>,
}

impl Inner {
    fn add(&mut self, entry: Entry) {
        let key = (entry.session, entry.role);
        let begun = &mut self.begun;
        let known = self.known.entry(key).or_insert_with(|| {
            *begun += 1;
            Known::new(*begun, &entry)
        });
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

    /// Records are missing here: they may have said more of what is known so far.
    fn damaged(&mut self) {
        for known in self.known.values_mut() {
            known.part.damaged();
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
            .any(|known| known.part.standing == Standing::Damaged)
        {
            // The damaged segments say so as long as they are there.
            return Ok(());
        }
        self.rewrite()
    }

    /// Writes what is known as a new log, in the order in which sessions began: nothing else tells that order.
    fn rewrite(&mut self) -> anyhow::Result<()> {
        let mut all: Vec<_> = self.known.values().collect();
        all.sort_unstable_by_key(|known| known.part.sequence);
        let records = all.into_iter().flat_map(Known::entries);
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
    /// concluded from what is missing: the sessions that had begun before, and of which no later record says how they stand, are
    /// [`Standing::Damaged`]. A record of a later release is no damage: the journal is that release's.
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
            begun: 0,
            ended: VecDeque::new(),
        };
        let mut damage = replayed.damage.map(|damage| damage.to_string());
        let mut gaps = replayed.gaps.iter().peekable();
        for (number, record) in replayed.records.iter().enumerate() {
            while gaps.next_if(|gap| **gap <= number).is_some() {
                inner.damaged();
            }
            match Entry::decode(record) {
                Ok(entry) => inner.add(entry),
                Err(newer @ Unreadable::Newer(_)) => bail!(
                    "{} has {newer}: a later release of verbatim has written it. Start the agent of that release, or a later one",
                    located()
                ),
                Err(Unreadable::Damaged(why)) => {
                    inner.damaged();
                    damage.get_or_insert(why);
                }
            }
        }
        if gaps.next().is_some() {
            inner.damaged();
        }
        if let Some(damage) = damage {
            let open = inner.known.values();
            let open = open.filter(|known| known.part.standing == Standing::Damaged);
            tracing::error!(
                damage,
                sessions = open.count(),
                "{}: records are missing; what was decided in the sessions that they may have been about is asked of the other hosts",
                located()
            );
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
            .map(|known| known.part.standing)
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
            .max_by_key(|known| known.part.sequence);
        latest.map_or((None, Noted::Unknown), |known| {
            (Some(known.session), known.part.memory_here())
        })
    }

    /// Whose session's part of moving an instance has begun last on this host.
    pub fn latest(&self, instance: &str) -> Option<(u64, Role)> {
        let inner = self.lock();
        let moves =
            |known: &&Known| known.role != Role::Partner && known.told.instance.as_deref() == Some(instance);
        let latest = inner
            .known
            .values()
            .filter(moves)
            .max_by_key(|known| known.part.sequence);
        latest.map(|known| (known.session, known.role))
    }

    /// Sessions whose tasks lacked memory when it was last written down, and the instances that they have brought here.
    pub fn filling(&self) -> Vec<(u64, String)> {
        let inner = self.lock();
        let filling = inner
            .known
            .values()
            .filter(|known| known.part.memory == Noted::Missing);
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
mod tests;
