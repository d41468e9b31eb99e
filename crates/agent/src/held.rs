//! Queue pairs of this host whose whereabouts are not told right now: they are about to move, and not connected yet. Who asks
//! in order to connect to one gets the answer when it is known where it stays.

use std::collections::HashMap;

use tokio::sync::watch;

use crate::agent::Shared;

/// By physical number, the instance that has it.
#[derive(Debug)]
pub struct Held(watch::Sender<HashMap<u32, String>>);

impl Default for Held {
    fn default() -> Self {
        Self(watch::Sender::new(HashMap::new()))
    }
}

/// Holds some of them for as long as it exists.
pub struct Hold {
    agent: Shared,
    qpns: Vec<u32>,
}

impl Hold {
    /// Holds these queue pairs of an instance.
    pub fn new(agent: &Shared, instance: &str, qpns: Vec<u32>) -> Self {
        agent.held.0.send_modify(|held| {
            held.extend(qpns.iter().map(|qpn| (*qpn, instance.to_owned())));
        });
        Self {
            agent: Shared::clone(agent),
            qpns,
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.agent.held.0.send_modify(|held| {
            self.qpns.iter().for_each(|qpn| _ = held.remove(qpn));
        });
    }
}

impl Held {
    /// Waits until the queue pair is not held. The instance itself does not wait: its control verbs do.
    pub async fn released(&self, qpn: u32, asker: Option<&str>) {
        let free = |held: &HashMap<u32, String>| held.get(&qpn).is_none_or(|by| Some(by.as_str()) == asker);
        // The sender is part of self.
        let _ = self.0.subscribe().wait_for(free).await;
    }
}
