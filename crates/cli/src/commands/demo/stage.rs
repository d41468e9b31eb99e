//! The lab of one demo, with a way to each agent and each RNIC's counters.

use anyhow::Context;
use verbatim_agent::client::Client;
use verbatim_nic::StatsReader;

use super::super::lab;
use super::progress::Progress;
use crate::args::READY_TIMEOUT;

const HOSTS: [&str; 3] = ["src", "dst", "peer"];
const API_SOCKET: &str = "/run/verbatim/api.sock";
const NIC_STATS: &str = "/run/verbatim/nic.stats";

/// A lab that goes down with this value.
pub struct Stage {
    lab: lab::TakenDown,
    clients: Vec<Client>,
}

impl Stage {
    /// Brings up a lab that is this process's own, so that two demos do not meet.
    pub async fn open(progress: &Progress) -> anyhow::Result<Self> {
        let name = format!("demo-{}", std::process::id());
        progress.now(&format!("bringing up the hosts {}", HOSTS.join(", ")));
        // A guard within: should nobody wait for it any more, what it brought up goes down at once.
        let up = tokio::task::spawn_blocking(move || {
            let hosts = HOSTS.map(str::to_owned).to_vec();
            lab::up(&name, hosts, READY_TIMEOUT).map(lab::TakenDown::new)
        });
        let lab = up
            .await?
            .context("the lab did not come up; `./setup.sh --check` says what this machine lacks")?;
        let mut clients = Vec::new();
        for host in HOSTS {
            clients.push(Client::connect(&lab.get().host_path(host, API_SOCKET)?).await?);
        }
        let status = lab.get().status()?;
        let hosts: Vec<_> = status
            .hosts
            .iter()
            .map(|host| format!("{} ({})", host.name, host.address))
            .collect();
        progress.step(&format!("lab {} is up: {}", lab.get().name(), hosts.join(", ")));
        Ok(Self { lab, clients })
    }

    /// The agent of a host.
    pub fn agent(&self, host: &str) -> anyhow::Result<&Client> {
        self.clients
            .iter()
            .find(|client| client.host() == host)
            .with_context(|| format!("there is no host {host}"))
    }

    /// The counters of a host's RNIC.
    pub fn counters(&self, host: &str) -> anyhow::Result<StatsReader> {
        Ok(StatsReader::open(&self.path(host, NIC_STATS)?)?)
    }

    /// Where a path of a host lies on the machine.
    pub fn path(&self, host: &str, path: &str) -> anyhow::Result<std::path::PathBuf> {
        Ok(self.lab.get().host_path(host, path)?)
    }

    /// Takes the lab down.
    pub async fn close(self) -> anyhow::Result<()> {
        let lab = self.lab;
        tokio::task::spawn_blocking(move || lab.down()).await?
    }
}

/// Bytes of messages that have passed an RNIC, in both directions.
pub fn payload(counters: &StatsReader) -> u64 {
    let counters = counters.read();
    counters.tx_payload_bytes + counters.rx_payload_bytes
}
