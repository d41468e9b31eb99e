//! The volumes of an instance that moves, as far as the session decides about them (`docs/volumes.md`).
//!
//! Each host's volume daemon waits for its agent's word on what became of the session. What it has to be told is noted on a disk before it is
//! asked for anything, and the note is removed when it has heard: so whichever agent finds the note sees to it, by the journal.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use tokio::task::JoinHandle;
use verbatim_session::Role;
use verbatim_session::decision::Outcome;
use verbatim_volume::control::{self, Order};

use super::PAUSE;
use crate::agent::Shared;
use crate::instances::volumes::{Mounted, SOCKET_NAME};

/// The folder of the notes, in the folder of what outlives a restart of the machine.
const FOLDER: &str = "volumes-that-move";

/// That a daemon has to be told of a volume what became of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Note {
    session: u64,
    role: Role,
    volume: String,
}

impl Note {
    fn name(&self) -> String {
        let role = match self.role {
            Role::Source => "source",
            _ => "destination",
        };
        format!("{:016x}.{role}.{}", self.session, self.volume)
    }

    fn parse(name: &str) -> Option<Self> {
        let mut parts = name.splitn(3, '.');
        let session = u64::from_str_radix(parts.next()?, 16).ok()?;
        let role = match parts.next()? {
            "source" => Role::Source,
            "destination" => Role::Destination,
            _ => return None,
        };
        let volume = parts.next()?.to_owned();
        Some(Self {
            session,
            role,
            volume,
        })
    }
}

fn folder(agent: &Shared) -> PathBuf {
    agent.config.state_dir.join(FOLDER)
}

/// Notes that the daemon of this host has to be told of these volumes what becomes of the session.
pub fn note(agent: &Shared, session: u64, role: Role, volumes: &[Mounted]) -> anyhow::Result<()> {
    if volumes.is_empty() {
        return Ok(());
    }
    let folder = folder(agent);
    let write = || {
        std::fs::create_dir_all(&folder)?;
        for mounted in volumes {
            let volume = mounted.volume.clone();
            let note = Note {
                session,
                role,
                volume,
            };
            File::create(folder.join(note.name()))?;
        }
        File::open(&folder)?.sync_all()
    };
    write().with_context(|| format!("cannot write to {}", folder.display()))
}

fn notes(agent: &Shared) -> Vec<Note> {
    let entries = std::fs::read_dir(folder(agent)).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Note::parse(entry.file_name().to_str()?))
        .collect()
}

/// Tells the daemon of this host, as often as it must, what became of the session. Ends when it has heard all of it.
pub fn settle(agent: &Shared, session: u64, role: Role, outcome: Outcome) -> JoinHandle<()> {
    let mut all = notes(agent);
    all.retain(|note| (note.session, note.role) == (session, role));
    let agent = Arc::clone(agent);
    tokio::spawn(async move {
        for note in all {
            tell(&agent, &note, outcome).await;
        }
    })
}

async fn tell(agent: &Shared, note: &Note, outcome: Outcome) {
    let order = Order::Settle {
        name: note.volume.clone(),
        by: note.session,
        is_committed: outcome == Outcome::Committed,
    };
    let mut is_told = false;
    while let Err(error) = give(agent, &order).await {
        if !std::mem::replace(&mut is_told, true) {
            tracing::warn!(
                session = format!("{:016x}", note.session),
                volume = note.volume,
                error = format!("{error:#}"),
                "told again what became of its session until it has heard it"
            );
        }
        tokio::time::sleep(PAUSE).await;
    }
    let path = folder(agent).join(note.name());
    if let Err(error) = std::fs::remove_file(&path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "a note is left behind");
    }
}

/// Gives an order to this host's daemon.
pub async fn give(agent: &Shared, order: &Order) -> anyhow::Result<()> {
    let socket = agent.config.runtime_dir.join(SOCKET_NAME);
    match control::order(&socket, order).await? {
        control::Outcome::Volumes(_) => Ok(()),
        other => bail!("the volume daemon answers {other:?}"),
    }
}

/// Sees to what an earlier agent has not told any more. Sessions that have not ended see to it themselves.
pub fn take_up(agent: &Shared) {
    for note in notes(agent) {
        let parts = agent.journal.parts(note.session);
        let part = parts.iter().find(|part| part.role == note.role);
        match part.map(|part| (part.has_ended(), part.is_decided())) {
            Some((true, Some(outcome))) => {
                let agent = Arc::clone(agent);
                tokio::spawn(async move { tell(&agent, &note, outcome).await });
            }
            Some(_) => {}
            None => tracing::error!(
                session = format!("{:016x}", note.session),
                volume = note.volume,
                "the journal does not know what became of its session, and the volume waits for that"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_says_what_it_is_about() {
        for (role, volume) in [(Role::Source, "db"), (Role::Destination, "db.old-1")] {
            let note = Note {
                session: u64::MAX - 9,
                role,
                volume: volume.to_owned(),
            };
            assert_eq!(Note::parse(&note.name()), Some(note));
        }
        for other in ["", "x", "0.partner.db", "0.source", "zz.source.db"] {
            assert_eq!(Note::parse(other), None, "{other}");
        }
    }
}
