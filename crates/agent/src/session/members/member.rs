//! One process with ends of a session's connections.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use verbatim_channel::{Answer, Order, Scope};

use crate::agent::Shared;
use crate::guests::Guest;
use crate::session::in_time;

/// How long a process may take to come back after its agent was started.
const RETURN_TIMEOUT: Duration = Duration::from_secs(10);

/// A process with ends of a session's connections, at whichever side of the move.
#[derive(Clone)]
pub struct Member {
    /// Unset if an earlier agent has begun the session, and the process has not been asked for yet.
    pub guest: Option<Guest>,
    /// What an agent that comes later must know of the process.
    pub kept: KeptMember,
    /// The process moves: all of its queue pairs take part, as its road map of this version has them. Of a partner's
    /// process only the connections' queue pairs do.
    pub moves: Option<u64>,
}

/// A process, as an agent that comes after this one finds it.
#[derive(Clone, Serialize, Deserialize)]
pub struct KeptMember {
    /// The instance that it belongs to, if any.
    pub instance: Option<String>,
    /// Its PID in its own PID namespace.
    pub pid: u32,
    /// The session's number of the connection, and the virtual number of this end.
    pub connections: Vec<(u32, u32)>,
    /// The same of ends that are not connected yet: they stay so until the session is over.
    #[serde(default)]
    pub unconnected: Vec<(u32, u32)>,
}

impl Member {
    /// A process that is here, with these connections.
    pub fn here(guest: &Guest, connections: Vec<(u32, u32)>) -> Self {
        Self {
            guest: Some(guest.clone()),
            kept: KeptMember {
                instance: guest.instance.clone(),
                pid: guest.pid,
                connections,
                unconnected: Vec::new(),
            },
            moves: None,
        }
    }

    /// A process that an earlier agent knew.
    pub fn known(kept: KeptMember) -> Self {
        Self {
            guest: None,
            kept,
            moves: None,
        }
    }

    /// The virtual numbers of its queue pairs.
    pub fn qpns(&self) -> Vec<u32> {
        self.kept.connections.iter().map(|(_, qpn)| *qpn).collect()
    }

    /// All that is suspended: also ends that are not connected yet.
    pub fn suspended(&self) -> Scope {
        if self.moves.is_some() {
            return Scope::All;
        }
        let unconnected = self.kept.unconnected.iter().map(|(_, qpn)| *qpn);
        Scope::Qps(self.qpns().into_iter().chain(unconnected).collect())
    }

    /// The queue pairs of its connections.
    pub fn measured(&self) -> Scope {
        match self.moves {
            Some(_) => Scope::All,
            None => Scope::Qps(self.qpns()),
        }
    }

    /// The connections of its queue pairs.
    pub fn by_qpn(&self) -> HashMap<u32, u32> {
        let connections = self.kept.connections.iter();
        connections.map(|(connection, qpn)| (*qpn, *connection)).collect()
    }

    /// The queue pairs of its connections.
    pub fn by_connection(&self) -> HashMap<u32, u32> {
        self.kept.connections.iter().copied().collect()
    }

    /// The process. One that an earlier agent knew is waited for a while; `None` if it does not come: it has ended.
    pub async fn guest(&self, agent: &Shared) -> Option<Guest> {
        let came = agent.guests.present(self.kept.instance.as_deref(), self.kept.pid);
        match &self.guest {
            Some(guest) => Some(guest.clone()),
            None => tokio::time::timeout(RETURN_TIMEOUT, came).await.ok(),
        }
    }

    /// The process; an error if it has ended.
    pub async fn must_be_here(&self, agent: &Shared) -> anyhow::Result<Guest> {
        let guest = self.guest(agent).await;
        guest.with_context(|| format!("process {} is gone", self.kept.pid))
    }

    /// Gives an order.
    pub async fn order(&self, agent: &Shared, what: &str, order: Order) -> anyhow::Result<Answer> {
        let guest = self.must_be_here(agent).await?;
        Ok(in_time(what, guest.order(order, Vec::new())).await?.0)
    }

    /// Gives an order after the decision; `None` if the process has ended, and its connections with it.
    pub async fn order_if_alive(
        &self,
        agent: &Shared,
        what: &str,
        order: Order,
    ) -> anyhow::Result<Option<Answer>> {
        let Some(guest) = self.guest(agent).await else {
            return Ok(None);
        };
        match in_time(what, guest.order(order, Vec::new())).await {
            Ok((answer, _)) => Ok(Some(answer)),
            Err(_) if !agent.guests.is_here(&guest) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
