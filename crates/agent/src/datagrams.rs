//! The datagram queue pairs of the cluster that are elsewhere than programs think.
//!
//! Anybody may send to a datagram queue pair, so when one has moved, every agent is told, and tells its programs; those
//! that come later ask when they make an address handle.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use futures_util::future::join_all;
use verbatim_channel::{Endpoint, MovedEndpoint, Order};

use crate::agent::{Agent, Shared};
use crate::directory::HostEntry;
use crate::proto::MovedRequest;
use crate::session::{encode, in_time};

/// How long a program waits that has made one, until all hosts know of it.
const TELLING_TIMEOUT: Duration = Duration::from_secs(1);

/// What one agent knows of them.
#[derive(Debug, Default)]
pub struct Datagrams(Mutex<HashMap<Endpoint, MovedEndpoint>>);

impl Datagrams {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Endpoint, MovedEndpoint>> {
        self.0.lock().expect("no panic under this lock")
    }

    /// Notes those that are newer than what is known.
    pub fn learn(&self, moved: &[MovedEndpoint]) {
        let mut known = self.lock();
        for entry in moved {
            let earlier = known.get(&entry.known);
            if earlier.is_none_or(|earlier| earlier.moves < entry.moves) {
                known.insert(entry.known, *entry);
            }
        }
    }

    /// Those that programs know under this GID.
    pub fn under(&self, gid: [u8; 16]) -> Vec<MovedEndpoint> {
        let known = self.lock();
        let under = known.values().filter(|entry| entry.known.gid == gid);
        under.copied().collect()
    }

    /// All of them.
    pub fn all(&self) -> Vec<MovedEndpoint> {
        self.lock().values().copied().collect()
    }
}

impl Agent {
    /// Tells the programs of this host. One that does not take it sends where nobody is, and datagrams may be lost.
    pub async fn datagrams_moved(&self, endpoints: Vec<MovedEndpoint>) {
        self.datagrams.learn(&endpoints);
        let told = self.guests.all().into_iter().map(|guest| {
            let endpoints = endpoints.clone();
            async move {
                let order = guest.order(Order::Moved { endpoints }, Vec::new());
                if let Err(error) = in_time("telling where datagrams go", order).await {
                    tracing::debug!(
                        error = format!("{error:#}"),
                        pid = guest.pid,
                        "not told where datagrams go"
                    );
                }
            }
        });
        join_all(told).await;
    }
}

/// Tells all hosts, this one included; each in a task of its own, so that one that is out of reach keeps nobody waiting.
pub fn tell_all(agent: &Shared, endpoints: &[MovedEndpoint]) -> Vec<tokio::task::JoinHandle<()>> {
    let hosts = match endpoints {
        [] => Vec::new(),
        _ => agent.peers.directory().all().to_vec(),
    };
    let tell = |host: HostEntry| {
        let (agent, endpoints) = (agent.clone(), endpoints.to_vec());
        tokio::spawn(async move { tell_host(&agent, &host, &endpoints).await })
    };
    hosts.into_iter().map(tell).collect()
}

/// The same, and waits for those that answer within [`TELLING_TIMEOUT`].
pub async fn tell(agent: &Agent, endpoints: &[MovedEndpoint]) {
    let hosts = agent.peers.directory().all().iter();
    let told = hosts.map(|host| tokio::time::timeout(TELLING_TIMEOUT, tell_host(agent, host, endpoints)));
    join_all(told).await;
}

async fn tell_host(agent: &Agent, host: &HostEntry, endpoints: &[MovedEndpoint]) {
    if host.name == agent.name() {
        return agent.datagrams_moved(endpoints.to_vec()).await;
    }
    let endpoints = encode(&endpoints);
    let told = async {
        let mut peer = agent.peers.connect(&host.name).await?;
        peer.moved(MovedRequest { endpoints }).await?;
        anyhow::Ok(())
    };
    if let Err(error) = told.await {
        tracing::warn!(
            host = host.name,
            error = format!("{error:#}"),
            "its programs are not told where datagrams go; those that they send to the moved instance are lost"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_move_counts_whatever_comes_last() {
        let end = |host, qpn| Endpoint { gid: [host; 16], qpn };
        let moved = |now, moves| MovedEndpoint {
            known: end(1, 7),
            now,
            moves,
        };
        let known = Datagrams::default();
        known.learn(&[moved(end(3, 9), 2)]);
        known.learn(&[moved(end(2, 8), 1)]);
        assert_eq!(known.under([1; 16]), [moved(end(3, 9), 2)]);
        assert!(known.under([3; 16]).is_empty());
        assert_eq!(known.all().len(), 1);
    }
}
