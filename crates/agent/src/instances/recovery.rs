//! What an agent finds that comes after one that died.
//!
//! Instances that run are taken over, and migrations of theirs are brought to an end ([`crate::session::recovery`]).
//! Everything else that lies about is what a migration to this host, or an instance that has ended since, left behind,
//! and is removed.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Context, bail};
use verbatim_container::{ContainerName, Init, Status};

use super::Instance;
use super::home::{Home, Kept, Paths, Undecided};
use crate::agent::Shared;
use crate::journal::Role;
use crate::session::recovery;

/// An instance that was found.
struct Found {
    instance: Arc<Instance>,
    undecided: Option<Undecided>,
}

/// Takes over what runs and removes the rest.
pub async fn recover(agent: &Shared) -> anyhow::Result<()> {
    let mut names = BTreeSet::new();
    for folder in ["instances", "bundles", "net", "images", "criu", "records"] {
        let Ok(entries) = std::fs::read_dir(agent.config.runtime_dir.join(folder)) else {
            continue;
        };
        names.extend(
            entries
                .flatten()
                .filter_map(|entry| entry.file_name().into_string().ok()),
        );
    }
    names.extend(agent.tools.runc().list()?.iter().map(ToString::to_string));
    for name in names {
        match take_over(agent, &name).await {
            Ok(Some(Found { instance, undecided })) => {
                tracing::info!(instance = name, "taken over");
                recovery::take_up(agent, instance, undecided);
            }
            Ok(None) => {
                tracing::info!(instance = name, "leftovers are removed");
                clear(agent, &name)
                    .await
                    .with_context(|| format!("removing what is left of {name}"))?;
            }
            Err(error) => {
                tracing::error!(
                    instance = name,
                    error = format!("{error:#}"),
                    "runs, but cannot be taken over"
                );
            }
        }
    }
    recovery::close_the_rest(agent)
}

/// The instance, if it lives here; it is this agent's from now on.
async fn take_over(agent: &Shared, name: &str) -> anyhow::Result<Option<Found>> {
    let paths = Paths::new(&agent.config.runtime_dir, name);
    let Ok(text) = std::fs::read(&paths.record) else {
        verbatim_container::outlast(&paths.work).await?;
        return Ok(None);
    };
    let Kept {
        record,
        init_pid,
        undecided,
    } = serde_json::from_slice(&text).with_context(|| format!("{} is damaged", paths.record.display()))?;
    if undecided.is_none() {
        // A checkpoint is being aborted by its proxy, or a restore is being ended, one way or the other.
        verbatim_container::outlast(&paths.work).await?;
    }
    let state = agent.tools.runc().state(&record.name).await?;
    let alive = state.is_some_and(|state| {
        let runs = state.status == Status::Running || undecided.is_some() && state.status != Status::Stopped;
        runs && state.pid == init_pid
    });
    if !alive {
        // If it was undecided: the tasks are gone, so there is nothing that could run twice.
        return Ok(None);
    }
    // Those of a move that came to nothing, or of the arrival here.
    if undecided.is_none()
        && let Err(error) = paths.clear_images()
    {
        tracing::warn!(%error, "images are left behind");
    }
    let init = Init::open(init_pid)?;
    let home = Home::open(&agent.config, record, &agent.guests, agent)?;
    let moving = agent.journal.sessions().iter().any(|known| {
        !known.has_ended()
            && known.role != Role::Partner
            && known.told.instance.as_deref() == Some(home.record.name.as_str())
    });
    if undecided.is_some() && !moving {
        bail!(
            "the journal does not know the migration that it was frozen for; see `verbatim sessions --all`"
        );
    }
    let init = std::future::ready(Ok(init));
    let instance = Instance::take_over(home, init_pid, init, moving);
    agent.instances.insert(Arc::clone(&instance));
    Ok(Some(Found { instance, undecided }))
}

async fn clear(agent: &Shared, name: &str) -> anyhow::Result<()> {
    if let Ok(container) = ContainerName::new(name)
        && agent.tools.runc().state(&container).await?.is_some()
    {
        agent.tools.runc().delete(&container, true).await?;
    }
    let (agent, name) = (Arc::clone(agent), name.to_owned());
    tokio::task::spawn_blocking(move || Home::clear(&agent.config, &name)).await?
}
