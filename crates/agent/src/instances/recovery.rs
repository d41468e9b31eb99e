//! What an agent finds that comes after one that died.
//!
//! Instances that run are taken over. What a migration of theirs left unfinished is brought to its end first
//! ([`crate::session::recovery`]). Everything else that lies about is what an instance that has ended since left behind, and is
//! removed. What cannot be looked at, since the RNIC is not there yet for one, is left alone and looked at again.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use verbatim_container::{ContainerName, Init, Status, Tasks};
use verbatim_session::Role;
use verbatim_session::decision::Keep;
use verbatim_session::record::Standing;

use super::filling;
use super::home::{Home, Kept, Paths, Undecided};
use super::machine::attached::{self, Attached};
use super::machine::{domain, leaving};
use super::{Instance, Recovering};
use crate::agent::Shared;
use crate::session::recovery;

/// The pause before something is looked at again.
const PAUSE: Duration = Duration::from_millis(500);

/// What there is of instances, one entry for each.
const FOLDERS: [&str; 9] = [
    "instances",
    "bundles",
    "net",
    "images",
    "private",
    "criu",
    "disks",
    "swaps",
    "records",
];

/// An instance that was found.
pub struct Found {
    /// It is this agent's.
    pub instance: Arc<Instance>,
    /// Its tasks are frozen for a decision.
    pub undecided: Option<Undecided>,
}

/// Makes a folder for root alone: what programs write, and their memory in CRIU's images, is no other user's of the host.
pub(crate) fn make_private(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    // Also one that an earlier agent has made.
    std::fs::set_permissions(folder, Permissions::from_mode(0o700))
}

/// What the record of the tasks says that are found under a name, if there is one: which session has brought them, and which one holds them.
pub fn recorded(agent: &Shared, name: &str) -> anyhow::Result<Option<verbatim_session::recovery::Record>> {
    let path = Paths::new(&agent.config.runtime_dir, name).record;
    let text = match std::fs::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        text => text.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let kept: Kept =
        serde_json::from_slice(&text).with_context(|| format!("{} is damaged", path.display()))?;
    Ok(Some(kept.tasks()))
}

/// The instances whose tasks are held for a decision, by their records. One that cannot be read is passed over: whoever wants it says so.
pub fn held(agent: &Shared) -> anyhow::Result<Vec<(String, Undecided)>> {
    let folder = agent.config.runtime_dir.join("records");
    let entries = match std::fs::read_dir(&folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("cannot read {}", folder.display()))?,
    };
    let held = entries.flatten().filter_map(|entry| {
        let kept: Kept = serde_json::from_slice(&std::fs::read(entry.path()).ok()?).ok()?;
        Some((entry.file_name().into_string().ok()?, kept.undecided?))
    });
    Ok(held.collect())
}

/// Takes over what runs and removes the rest.
pub async fn recover(agent: &Shared) -> anyhow::Result<()> {
    let mut names = BTreeSet::new();
    for folder in FOLDERS {
        let folder = agent.config.runtime_dir.join(folder);
        make_private(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let entries = std::fs::read_dir(&folder);
        let entries = entries.with_context(|| format!("cannot read {}", folder.display()))?;
        names.extend(
            entries
                .flatten()
                .filter_map(|entry| entry.file_name().into_string().ok()),
        );
    }
    names.extend(agent.tools.runc().list()?.iter().map(ToString::to_string));
    let in_sessions = recovery::take_up(agent)?;
    let mut later = BTreeSet::new();
    for name in names {
        if in_sessions.contains(&name) {
            continue;
        }
        if let Err(error) = settle(agent, &name).await {
            later.insert(name.clone());
            expect(agent, &name, None);
            tracing::error!(
                instance = name,
                error = format!("{error:#}"),
                "cannot be taken over yet; it is tried again"
            );
            tokio::spawn(settle_later(Arc::clone(agent), name));
        }
    }
    filling::note_what_is_gone(agent, |name| {
        agent.instances.get(name).is_some() || in_sessions.contains(name) || later.contains(name)
    });
    Ok(())
}

/// Takes an instance over, or removes what is left of one.
async fn settle(agent: &Shared, name: &str) -> anyhow::Result<()> {
    match take_over(agent, name, false).await? {
        Some(_) => tracing::info!(instance = name, "taken over"),
        None => {
            tracing::info!(instance = name, "leftovers are removed");
            clear(agent, name)
                .await
                .with_context(|| format!("removing what is left of {name}"))?;
        }
    }
    Ok(())
}

async fn settle_later(agent: Shared, name: String) {
    // Nobody makes another one of that name meanwhile.
    let _reservation = agent.instances.reserve(&name);
    loop {
        tokio::time::sleep(PAUSE).await;
        match settle(&agent, &name).await {
            Ok(()) => return,
            Err(error) => tracing::debug!(instance = name, error = format!("{error:#}"), "not yet"),
        }
    }
}

/// Lists an instance as one that is being taken over, until that is known, if its record and its first process
/// exist. `session`: this host's part in one that an earlier agent had begun.
pub fn expect(agent: &Shared, name: &str, session: Option<(u64, Role)>) {
    let paths = Paths::new(&agent.config.runtime_dir, name);
    let Ok(text) = std::fs::read(&paths.record) else {
        return;
    };
    // A damaged record is reported by the take-over.
    let Ok(Kept { record, init_pid, .. }) = serde_json::from_slice(&text) else {
        return;
    };
    if !Path::new(&format!("/proc/{init_pid}")).exists() {
        return;
    }
    let expected = Recovering {
        record,
        pid: init_pid,
        session,
    };
    agent.instances.recovering().insert(name.to_owned(), expected);
}

/// Whether an instance is this host's by the journal: also one that may have begun to run elsewhere.
fn is_here(role: Role, standing: Standing) -> bool {
    match (role, standing) {
        (_, Standing::Closed(_)) | (Role::Partner, _) => false,
        (Role::Source, Standing::Ran | Standing::Cleared | Standing::Resolved(Keep::Destination)) => false,
        (Role::Source, _) => true,
        (Role::Destination, standing) => matches!(
            standing,
            Standing::Committed | Standing::Ran | Standing::Resolved(Keep::Destination)
        ),
    }
}

/// The instances that have not been taken over yet.
pub fn unsettled(agent: &Shared) -> Vec<Recovering> {
    let mut all = agent.instances.recovering();
    all.retain(|name, expected| {
        let is_its = |(session, role)| {
            let standing = agent.journal.standing(session, role);
            standing.is_some_and(|standing| is_here(role, standing))
        };
        agent.instances.get(name).is_none() && expected.session.is_none_or(is_its)
    });
    all.values().cloned().collect()
}

/// The instance of that name. The error says why there is none.
pub fn find(agent: &Shared, name: &str) -> anyhow::Result<Arc<Instance>> {
    let expected = unsettled(agent);
    if expected
        .iter()
        .any(|expected| expected.record.name.as_str() == name)
    {
        bail!(
            "{name} is being taken over by the agent of this host, which has just been started; try again in a moment \
             (`verbatim ps` says when it is no longer `recovering`)"
        );
    }
    agent.instances.find(name)
}

/// The instance, if it lives here; it is this agent's from now on. `moving`: a session has still to do with it.
///
/// An error says that this is not known.
pub async fn take_over(agent: &Shared, name: &str, moving: bool) -> anyhow::Result<Option<Found>> {
    let found = look_for(agent, name, moving).await?;
    agent.instances.recovering().remove(name);
    Ok(found)
}

async fn look_for(agent: &Shared, name: &str, moving: bool) -> anyhow::Result<Option<Found>> {
    let paths = Paths::new(&agent.config.runtime_dir, name);
    let text = match std::fs::read(&paths.record) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            verbatim_container::outlast(&paths.work).await?;
            return Ok(None);
        }
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", paths.record.display())),
    };
    let Kept {
        record,
        init_pid,
        undecided,
        arrival,
    } = serde_json::from_slice(&text).with_context(|| format!("{} is damaged", paths.record.display()))?;
    if undecided.is_none() {
        // A checkpoint is being aborted by its proxy, or a restore is being ended, one way or the other.
        verbatim_container::outlast(&paths.work).await?;
    }
    let state = agent.tools.runc().state(&record.name).await?;
    // Frozen ones are there, too.
    let is_there = state.is_some_and(|state| state.status != Status::Stopped && state.pid == init_pid);
    if !is_there {
        return Ok(None);
    }
    // Those of a move that came to nothing, or of the arrival here.
    if undecided.is_none()
        && let Err(error) = paths.clear_images()
    {
        tracing::warn!(%error, "images are left behind");
    }
    let init = Init::open(init_pid)?;
    let home = Home::open(
        &agent.config,
        record,
        arrival,
        &agent.nic_listeners,
        &agent.guests,
        agent,
    )?;
    let init = std::future::ready(Ok(init));
    let instance = Instance::take_over(home, init_pid, init, moving);
    filling::take_over(agent, &instance);
    agent.instances.insert(Arc::clone(&instance));
    attached::watch(agent, &instance)?;
    if !moving && instance.home.record.machine.is_some() {
        // An earlier agent may have died while it asked.
        tokio::spawn({
            let instance = Arc::clone(&instance);
            async move { leaving::take_back(&instance).await }
        });
    }
    Ok(Some(Found { instance, undecided }))
}

/// Removes what is left of an instance that does not run here.
pub async fn clear(agent: &Shared, name: &str) -> anyhow::Result<()> {
    let container = ContainerName::new(name);
    let paths = Paths::new(&agent.config.runtime_dir, name);
    if let Ok(container) = &container {
        let tasks = Tasks::of(&agent.tools, container, &paths.work);
        if domain::is_arriving(&paths)? {
            // Its guest never runs here.
            tasks.kill().await?;
            domain::end(&paths).await?;
        }
        if let Some(attached) = Attached::of(&paths)? {
            // An agent has died before it was an instance. One that has moved away is gone.
            attached.leave(&tasks, &paths).await?;
        }
    }
    if let Ok(container) = container
        && agent.tools.runc().state(&container).await?.is_some()
    {
        agent.tools.runc().delete(&container, true).await?;
    }
    let (agent, name) = (Arc::clone(agent), name.to_owned());
    tokio::task::spawn_blocking(move || {
        Home::clear(&agent.config, &agent.nic_listeners, &name)?;
        filling::note_what_is_gone(&agent, |other| other != name);
        Ok(())
    })
    .await?
}

#[cfg(test)]
mod tests {
    use verbatim_session::decision::Outcome;

    use super::*;

    #[test]
    fn an_instance_is_listed_where_the_journal_has_it() {
        let (committed, rolled_back) = (Outcome::Committed, Outcome::RolledBack);
        for (role, standing, expected) in [
            (Role::Source, Standing::Opened, true),
            (Role::Source, Standing::Deciding, true),
            (Role::Source, Standing::RolledBack, true),
            (Role::Source, Standing::Damaged, true),
            (Role::Source, Standing::Ran, false),
            (Role::Source, Standing::Cleared, false),
            (Role::Source, Standing::Resolved(Keep::Source), true),
            (Role::Source, Standing::Resolved(Keep::Destination), false),
            (Role::Source, Standing::Closed(rolled_back), false),
            (Role::Destination, Standing::Opened, false),
            (Role::Destination, Standing::Committed, true),
            (Role::Destination, Standing::Ran, true),
            (Role::Destination, Standing::RolledBack, false),
            (Role::Destination, Standing::Closed(committed), false),
            (Role::Partner, Standing::Drained, false),
        ] {
            assert_eq!(is_here(role, standing), expected, "{role:?} {standing:?}");
        }
    }

    #[test]
    fn a_folder_that_an_earlier_agent_has_opened_to_all_is_roots_again() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("instances");
        for _ in 0..2 {
            make_private(&folder).unwrap();
            let mode = std::fs::metadata(&folder).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700);
            std::fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
        }
    }
}
