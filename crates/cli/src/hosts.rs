//! The agents that this command can reach: those of a lab's hosts, or the one of the host it runs on.

use std::path::Path;

use anyhow::{Context, bail};
use verbatim_agent::client::Client;
use verbatim_agent::proto::{Instance, Session};
use verbatim_lab::Lab;

/// The agent's socket on a host.
const API_SOCKET: &str = "/run/verbatim/api.sock";

/// The agents in reach.
pub struct Hosts {
    clients: Vec<Client>,
}

impl Hosts {
    /// All agents of the lab, or the one of this host if it has one.
    pub async fn connect(lab: &str) -> anyhow::Result<Self> {
        // Inside a lab's host the path leads to that host's agent, as on a real one.
        if Path::new(API_SOCKET).exists() {
            return Ok(Self {
                clients: vec![Client::connect(Path::new(API_SOCKET)).await?],
            });
        }
        let lab = Lab::open(lab)
            .context("there is no agent on this host, and no lab; start one with `verbatim lab up`")?;
        let mut clients = Vec::new();
        let mut failed = Vec::new();
        for host in lab.hosts() {
            match Client::connect(&lab.host_path(host, API_SOCKET)?).await {
                Ok(client) => clients.push(client),
                Err(error) => failed.push(format!("{host}: {error:#}")),
            }
        }
        if clients.is_empty() {
            bail!(
                "no agent of lab {} answers ({}); `verbatim lab status` tells more",
                lab.name(),
                failed.join("; ")
            );
        }
        for failure in failed {
            eprintln!("warning: {failure}");
        }
        Ok(Self { clients })
    }

    /// The agent of `name`, or the only one.
    pub fn host(&self, name: Option<&str>) -> anyhow::Result<&Client> {
        let names: Vec<_> = self.clients.iter().map(Client::host).collect();
        match (name, self.clients.as_slice()) {
            (None, [only]) => Ok(only),
            (None, _) => bail!("say on which host, with --host; there are: {}", names.join(", ")),
            (Some(name), clients) => clients
                .iter()
                .find(|client| client.host() == name)
                .with_context(|| {
                    format!(
                        "there is no host {name}, or its agent is down; there are: {}",
                        names.join(", ")
                    )
                }),
        }
    }

    /// All instances of all hosts.
    pub async fn instances(&self) -> anyhow::Result<Vec<Instance>> {
        let mut instances = Vec::new();
        for client in &self.clients {
            instances.extend(client.list().await?);
        }
        // One that is in doubt, or is not taken over yet, may run elsewhere, and then that is the one that is meant.
        let may_be_elsewhere =
            |instance: &Instance| ["in doubt", "recovering"].contains(&instance.state.as_str());
        instances.sort_by_key(|instance| (instance.name.clone(), may_be_elsewhere(instance)));
        Ok(instances)
    }

    /// The migrations in which these hosts take or took part, the latest first.
    pub async fn sessions(&self) -> anyhow::Result<Vec<Session>> {
        let mut sessions = Vec::new();
        for client in &self.clients {
            sessions.extend(client.sessions().await?);
        }
        let begun = |session: &Session| session.steps.first().map_or(0, |step| step.unix_ms);
        // The parts of one session together, its source first.
        let mut first = std::collections::HashMap::new();
        for session in &sessions {
            let begun = begun(session);
            let earliest: &mut u64 = first.entry(session.id.clone()).or_insert(begun);
            *earliest = begun.min(*earliest);
        }
        let role = |session: &Session| match session.role.as_str() {
            "source" => 0,
            "destination" => 1,
            _ => 2,
        };
        sessions.sort_by_key(|session| {
            let begun = std::cmp::Reverse(first[&session.id]);
            (begun, session.id.clone(), role(session), session.host.clone())
        });
        Ok(sessions)
    }

    /// The agent of the host on which the instance `name` is.
    pub async fn of_instance(&self, name: &str) -> anyhow::Result<(&Client, Instance)> {
        let instances = self.instances().await?;
        match instances.iter().find(|instance| instance.name == name) {
            Some(instance) => Ok((self.host(Some(&instance.host))?, instance.clone())),
            None if instances.is_empty() => {
                bail!("there is no instance {name}; start one with `verbatim run`")
            }
            None => {
                let names: Vec<_> = instances.iter().map(|instance| instance.name.as_str()).collect();
                bail!("there is no instance {name}; there are: {}", names.join(", "))
            }
        }
    }
}
