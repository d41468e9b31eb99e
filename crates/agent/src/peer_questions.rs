//! What an agent keeps to answer its RNIC's questions about other ends ([`crate::confirming`]).

mod rnic;

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tonic::transport::Channel;

pub use self::rnic::{Rnic, Taken, take_questions};
use crate::proto::peer_client::PeerClient;

/// Of each tenant, and of each host, so much is in the log, however often something is wrong.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Whose lines are remembered.
const MOST_LOGGED: usize = 1024;

/// What an agent keeps for it.
#[derive(Debug, Default)]
pub struct Confirming {
    /// This host's RNIC.
    pub rnic: Rnic,
    /// The agents of other hosts that can answer.
    clients: Mutex<HashMap<String, PeerClient<Channel>>>,
    logged: Mutex<HashMap<String, Instant>>,
}

impl Confirming {
    /// The agent of a host, if it is known to answer.
    pub fn client(&self, host: &str) -> Option<PeerClient<Channel>> {
        self.lock_clients().get(host).cloned()
    }

    /// The agent of this host answers.
    pub fn keep(&self, host: &str, client: PeerClient<Channel>) {
        self.lock_clients().insert(host.to_owned(), client);
    }

    /// It does not any more.
    pub fn forget(&self, host: &str) {
        self.lock_clients().remove(host);
    }

    fn lock_clients(&self) -> std::sync::MutexGuard<'_, HashMap<String, PeerClient<Channel>>> {
        self.clients.lock().expect("no panic under this lock")
    }

    /// Whether a line of this one is due.
    pub fn may_log(&self, of: &str) -> bool {
        let mut logged = self.logged.lock().expect("no panic under this lock");
        let lately = |at: &Instant| at.elapsed() < LOG_INTERVAL;
        if logged.get(of).is_some_and(lately) {
            return false;
        }
        if logged.len() >= MOST_LOGGED {
            logged.retain(|_, at| lately(at));
        }
        logged.len() < MOST_LOGGED && {
            logged.insert(of.to_owned(), Instant::now());
            true
        }
    }
}
