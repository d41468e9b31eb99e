//! The volumes of an instance that moves, as far as the session decides about them (`docs/volumes.md`).
//!
//! So does the process of a swap disk (`docs/remote-memory.md`). Each host's volume daemon waits for its agent's word on what became of the session. What it has to be told is noted on a disk before it is
//! asked for anything, and the note is removed when it has heard: so whichever agent finds the note sees to it, by the journal.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::task::JoinHandle;
use verbatim_session::Role;
use verbatim_session::decision::Outcome;
use verbatim_swap::control::{Sockets, is_nobody_there};
use verbatim_swap::disk::Order as SwapOrder;
use verbatim_volume::control::{self, Order, Row};

use super::PAUSE;
use crate::agent::Shared;
use crate::instances::record::Record;
use crate::instances::recovery::make_private;
use crate::instances::volumes::SOCKET_NAME;
use crate::whole;

/// The folder of the notes, in the folder of what outlives a restart of the machine.
const FOLDER: &str = "volumes-that-move";

/// Limit for the volume daemon to say which state folder it has.
const FOLDER_LIMIT: Duration = Duration::from_secs(5);

/// That a daemon has to be told of a volume what became of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Note {
    session: u64,
    role: Role,
    /// The process of a swap disk is to be told, and not the volume daemon.
    is_swap: bool,
    /// The volume, or the swap disk.
    volume: String,
    /// The state folder that the volume daemon had when the session began; `None` if it did not say.
    state_folder: Option<String>,
}

impl Note {
    fn name(&self) -> String {
        let role = match (self.role, self.is_swap) {
            (Role::Source, false) => "source",
            (Role::Source, true) => "source-swap",
            (_, false) => "destination",
            (_, true) => "destination-swap",
        };
        format!("{:016x}.{role}.{}", self.session, self.volume)
    }

    fn parse(name: &str) -> Option<Self> {
        let mut parts = name.splitn(3, '.');
        let session = u64::from_str_radix(parts.next()?, 16).ok()?;
        let (role, is_swap) = match parts.next()? {
            "source" => (Role::Source, false),
            "source-swap" => (Role::Source, true),
            "destination" => (Role::Destination, false),
            "destination-swap" => (Role::Destination, true),
            _ => return None,
        };
        let volume = parts.next()?.to_owned();
        Some(Self {
            session,
            role,
            is_swap,
            volume,
            state_folder: None,
        })
    }
}

fn folder(agent: &Shared) -> PathBuf {
    agent.config.state_dir.join(FOLDER)
}

/// Notes that who serves the volumes and swap disks of an instance on this host has to be told what becomes of the session.
pub async fn note(agent: &Shared, session: u64, role: Role, record: &Record) -> anyhow::Result<()> {
    let volumes = record
        .volumes
        .iter()
        .map(|mounted| (false, mounted.volume.clone()));
    let swaps = record
        .swap
        .iter()
        .map(|disk| (true, disk.known_as(record.name.as_str())));
    let all: Vec<_> = volumes.chain(swaps).collect();
    if all.is_empty() {
        return Ok(());
    }
    let state_folder = match record.volumes.is_empty() {
        true => None,
        false => state_folder(agent).await,
    };
    let folder = folder(agent);
    let write = || {
        make_private(&folder)?;
        for (is_swap, volume) in &all {
            let note = Note {
                session,
                role,
                is_swap: *is_swap,
                volume: volume.clone(),
                state_folder: state_folder.clone().filter(|_| !is_swap),
            };
            let file = File::create(folder.join(note.name()))?;
            if let Some(text) = &note.state_folder {
                (&file).write_all(text.as_bytes())?;
                file.sync_all()?;
            }
        }
        File::open(&folder)?.sync_all()
    };
    whole::explained(&folder, write()).with_context(|| format!("cannot write to {}", folder.display()))
}

fn notes(agent: &Shared) -> Vec<Note> {
    let entries = std::fs::read_dir(folder(agent)).into_iter().flatten().flatten();
    let read = |entry: std::fs::DirEntry| {
        let mut note = Note::parse(entry.file_name().to_str()?)?;
        // An earlier release writes nothing into it.
        let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
        note.state_folder = Some(text).filter(|text| !text.is_empty());
        Some(note)
    };
    entries.filter_map(read).collect()
}

/// Which state folder this host's volume daemon has. One of an earlier release does not say.
async fn state_folder(agent: &Shared) -> Option<String> {
    let socket = agent.config.runtime_dir.join(SOCKET_NAME);
    let asking = control::order(&socket, &Order::StateFolder);
    let answer = tokio::time::timeout(FOLDER_LIMIT, asking).await.ok()?;
    answer.ok()?.rows().ok()?.into_iter().next()?.state_folder
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
    while let Err(error) = match note.is_swap {
        false => settle_volume(agent, note, &order).await,
        true => settle_swap(agent, note, outcome).await,
    } {
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

/// Tells the volume daemon the outcome. Success means that its copy no longer waits for this session. The
/// daemon's answer alone is not enough: a daemon that cannot read the copy's role answers, too, and settles
/// nothing.
async fn settle_volume(agent: &Shared, note: &Note, order: &Order) -> anyhow::Result<()> {
    let socket = agent.config.runtime_dir.join(SOCKET_NAME);
    let rows = control::order(&socket, order).await?.rows()?;
    let row = rows.iter().find(|row| row.name == note.volume);
    let is_committed = matches!(
        order,
        Order::Settle {
            is_committed: true,
            ..
        }
    );
    is_settled(row, note, is_committed)
        .with_context(|| format!("the note {} stays", folder(agent).join(note.name()).display()))
}

/// An error unless the copy no longer waits for the session.
fn is_settled(row: Option<&Row>, note: &Note, is_committed: bool) -> anyhow::Result<()> {
    let session = note.session;
    let row = row.context("the volume daemon does not show the copy (is it of an earlier release?)")?;
    match row.role.as_str() {
        "held" | "ready" if row.by.is_none_or(|by| by == session) => {
            bail!("the copy of {} is still {}", row.name, row.role)
        }
        "unknown" | "busy" => bail!(
            "the role of the copy of {} is not known: {}",
            row.name,
            row.trouble.as_deref().unwrap_or("no reason is given")
        ),
        // A destination that was rolled back may never have had a copy, if its daemon has the folder that it had when the session began.
        // A source had one, and so had a destination that was committed: it is in another folder than the daemon's present one.
        "none" if note.role == Role::Source || is_committed || is_elsewhere(row, note) => bail!(
            "the volume daemon has no copy of {}: {}",
            row.name,
            row.trouble
                .as_deref()
                .unwrap_or("is the file system of its state folder not mounted?")
        ),
        _ => Ok(()),
    }
}

/// Whether the copy may be in another folder than the one that the daemon has now.
fn is_elsewhere(row: &Row, note: &Note) -> bool {
    note.state_folder.is_some() && note.state_folder != row.state_folder
}

/// Tells the process of a swap disk; one that has ended has nothing any more that could be right or wrong.
async fn settle_swap(agent: &Shared, note: &Note, outcome: Outcome) -> anyhow::Result<()> {
    let order = SwapOrder::Settle {
        by: note.session,
        is_committed: outcome == Outcome::Committed,
    };
    match give_swap(agent, &note.volume, &order).await {
        Err(error) if is_nobody_there(&error) => Ok(()),
        told => told,
    }
}

/// Gives an order to the process of a swap disk, by the name under which this host has it.
pub async fn give_swap(agent: &Shared, disk: &str, order: &SwapOrder) -> anyhow::Result<()> {
    let sockets = Sockets::new(&agent.config.runtime_dir, disk);
    verbatim_swap::control::order(&sockets, order).await.map(drop)
}

/// Gives an order to this host's daemon.
pub async fn give(agent: &Shared, order: &Order) -> anyhow::Result<()> {
    let socket = agent.config.runtime_dir.join(SOCKET_NAME);
    control::order(&socket, order).await?.rows().map(drop)
}

/// An obstacle to the volume's move to another host, as far as the daemons know; the other daemon is asked
/// for room. An error if that is not known.
pub async fn obstacle(agent: &Shared, volume: &str, to: &str) -> anyhow::Result<Option<String>> {
    let order = Order::Check {
        name: volume.to_owned(),
        to: to.to_owned(),
    };
    let socket = agent.config.runtime_dir.join(SOCKET_NAME);
    let rows = control::order(&socket, &order).await?.rows()?;
    Ok(rows.into_iter().find_map(|row| row.trouble))
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
        for (role, is_swap, volume) in [
            (Role::Source, false, "db"),
            (Role::Source, true, "vm.swap"),
            (Role::Destination, false, "db.old-1"),
            (Role::Destination, true, "vm.swap"),
        ] {
            let note = Note {
                session: u64::MAX - 9,
                role,
                is_swap,
                volume: volume.to_owned(),
                state_folder: None,
            };
            assert_eq!(Note::parse(&note.name()), Some(note));
        }
        for other in ["", "x", "0.partner.db", "0.source", "zz.source.db"] {
            assert_eq!(Note::parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_daemon_has_heard_it_when_its_copy_does_not_wait_any_more() {
        let row = |role: &str, by| Row {
            name: "db".to_owned(),
            role: role.to_owned(),
            by,
            ..Row::default()
        };
        let note = |role| Note {
            session: 7,
            role,
            is_swap: false,
            volume: "db".to_owned(),
            state_folder: None,
        };
        for (of, is_committed) in [Role::Source, Role::Destination]
            .map(|of| [(of, true), (of, false)])
            .concat()
        {
            let note = note(of);
            let is_settled = |row: Option<&Row>| is_settled(row, &note, is_committed).is_ok();
            for role in ["serving", "moved", "incomplete", "gone"] {
                assert!(is_settled(Some(&row(role, None))), "{role}");
            }
            // A daemon of an earlier release does not name the session.
            for (role, by) in [
                ("held", None),
                ("ready", None),
                ("held", Some(7)),
                ("ready", Some(7)),
            ] {
                assert!(!is_settled(Some(&row(role, by))), "{role} {by:?}");
            }
            for role in ["held", "ready"] {
                assert!(is_settled(Some(&row(role, Some(8)))), "another session");
            }
            for role in ["unknown", "busy"] {
                assert!(!is_settled(Some(&row(role, None))), "{role}");
            }
            assert!(!is_settled(None), "nothing is no yes");
            // The folder of the daemon is not the one with the copy.
            let may_have_had_none = of == Role::Destination && !is_committed;
            assert_eq!(
                is_settled(Some(&row("none", None))),
                may_have_had_none,
                "{of:?} {is_committed}"
            );
        }
    }

    #[test]
    fn a_destination_has_not_heard_it_while_its_folder_is_another_one() {
        let note = |state_folder: Option<&str>| Note {
            session: 7,
            role: Role::Destination,
            is_swap: false,
            volume: "db".to_owned(),
            state_folder: state_folder.map(str::to_owned),
        };
        let row = |role: &str, state_folder: Option<&str>| Row {
            name: "db".to_owned(),
            role: role.to_owned(),
            state_folder: state_folder.map(str::to_owned),
            ..Row::default()
        };
        let has_heard = |row: Row, note: Note| is_settled(Some(&row), &note, false).is_ok();
        assert!(
            has_heard(row("none", Some("a")), note(Some("a"))),
            "it never had a copy"
        );
        assert!(
            !has_heard(row("none", Some("b")), note(Some("a"))),
            "that one is not mounted"
        );
        assert!(
            !has_heard(row("none", None), note(Some("a"))),
            "nor is it known to be"
        );
        assert!(
            has_heard(row("none", Some("b")), note(None)),
            "an earlier release noted none"
        );
        assert!(
            has_heard(row("gone", Some("b")), note(Some("a"))),
            "it was deleted"
        );
        assert!(has_heard(row("incomplete", None), note(Some("a"))));
    }
}
