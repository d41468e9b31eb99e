//! Two hosts on this machine: an agent each, and no software RNIC.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use verbatim_agent::client::Client;
use verbatim_lab::{Lab, LabConfig, Service};

use crate::commands::lab;

/// The hosts; the program goes from the first to the second.
pub const HOSTS: [&str; 2] = ["here", "there"];
/// What to do where they do not come up.
pub const REMEDY: &str = "`./setup.sh --check` says what this machine lacks";
const API_SOCKET: &str = "/run/verbatim/api.sock";
/// How much of an agent's log goes into a report.
const LOG_BYTES: usize = 16 << 10;

/// They go down with this value.
pub struct Stage {
    lab: lab::TakenDown,
    clients: Vec<Client>,
}

impl Stage {
    /// Brings them up, within this limit.
    pub async fn open(limit: Duration) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's own path")?;
        let library = lab::library()?.display().to_string();
        let arguments = ["-v", "agent", "--mtu", "9000", "--library", &library];
        let agent = Service::new("agent", program, arguments).socket(API_SOCKET);
        let name = format!("self-test-{}", std::process::id());
        let config = LabConfig {
            ready_timeout: limit,
            ..LabConfig::new(name, vec![agent])?
        };
        let up = tokio::task::spawn_blocking(move || {
            // A guard within: should nobody wait for it any more, what it brought up goes down at once.
            Lab::up(config.with_hosts(HOSTS)).map(lab::TakenDown::new)
        });
        let lab = up.await?.context("the hosts did not come up")?;
        let mut clients = Vec::new();
        for host in HOSTS {
            clients.push(Client::connect(&lab.get().host_path(host, API_SOCKET)?).await?);
        }
        Ok(Self { lab, clients })
    }

    /// The agents, in the order of [`HOSTS`].
    pub fn agents(&self) -> &[Client] {
        &self.clients
    }

    /// The ends of all logs, by file.
    pub async fn logs(&self) -> BTreeMap<String, String> {
        let mut logs = BTreeMap::new();
        for (host, client) in HOSTS.iter().zip(&self.clients) {
            let log = self
                .lab
                .get()
                .state_dir()
                .join("hosts")
                .join(host)
                .join("agent.log");
            logs.insert(format!("agent on {host}"), tail(&log));
            let mut output = Vec::new();
            let said = client.logs(super::play::NAME, false, |part| {
                output.extend_from_slice(part);
                Ok(())
            });
            if said.await.is_ok() {
                let text = String::from_utf8_lossy(&output).into_owned();
                logs.insert(format!("program on {host}"), last(&text));
            }
        }
        logs
    }

    /// Takes them down.
    pub async fn close(self) -> anyhow::Result<()> {
        let lab = self.lab;
        tokio::task::spawn_blocking(move || lab.down()).await?
    }
}

fn tail(path: &Path) -> String {
    match std::fs::read(path) {
        Ok(bytes) => last(&String::from_utf8_lossy(&bytes)),
        Err(error) => format!("{}: {error}", path.display()),
    }
}

fn last(text: &str) -> String {
    let from = (text.len().saturating_sub(LOG_BYTES)..=text.len()).find(|at| text.is_char_boundary(*at));
    text[from.unwrap_or(0)..].to_owned()
}
