//! What an agent finds that comes after one that died.
//!
//! Instances that run are taken over. Everything else that lies about is what a migration to this host, or an instance
//! that has ended since, left behind, and is removed.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Context, bail};
use verbatim_container::{ContainerName, Init, Status};

use super::Instance;
use super::home::{Home, Kept, Paths};
use crate::agent::Shared;
use crate::journal::{Event, Role};

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
    for (session, name) in agent.journal.with_last(Role::Destination, Event::Committed) {
        // The decision came, but not the word that the tasks ran: with the agent that restored them they are gone.
        agent
            .journal
            .write(session, Role::Destination, Event::RolledBack, &name, "")?;
    }
    for name in names {
        match take_over(agent, &name).await {
            Ok(true) => tracing::info!(instance = name, "taken over"),
            Ok(false) => {
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
    Ok(())
}

/// Whether the instance runs; if so it is this agent's from now on.
async fn take_over(agent: &Shared, name: &str) -> anyhow::Result<bool> {
    let path = Paths::new(&agent.config.runtime_dir, name).record;
    let Ok(text) = std::fs::read(&path) else {
        return Ok(false);
    };
    let Kept {
        record,
        init_pid,
        undecided,
    } = serde_json::from_slice(&text).with_context(|| format!("{} is damaged", path.display()))?;
    if undecided {
        bail!(
            "it was being moved when the agent died, and may run at its destination: it stays frozen here. Look there \
             with `verbatim ps`; if it runs there, kill the process `criu` that holds it here, then end it with \
             `runc delete --force`, and restart the agent"
        );
    }
    let state = agent.tools.runc().state(&record.name).await?;
    if !state.is_some_and(|state| state.status == Status::Running && state.pid == init_pid) {
        return Ok(false);
    }
    let init = Init::open(init_pid)?;
    let home = Home::open(&agent.config, record, &agent.guests, agent)?;
    agent.instances.insert(Instance::start(
        home,
        init_pid,
        std::future::ready(Ok(init)),
        false,
    ));
    Ok(true)
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
