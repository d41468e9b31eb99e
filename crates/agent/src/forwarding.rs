//! Where the connections went that left this host: the forwarding entries (DESIGN: identities).
//!
//! A program that connects to a moved one with the numbers that it published before asks, through its own agent, the
//! agent of the host whose GID it holds.

use std::collections::HashMap;
use std::sync::Mutex;

use verbatim_channel::{Endpoint, KeyPair};

/// Where an endpoint is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forward {
    /// The physical endpoint.
    pub endpoint: Endpoint,
    /// The process's remote keys there.
    pub keys: Vec<KeyPair>,
}

/// The forwarding entries of one host.
#[derive(Debug, Default)]
pub struct Forwarding(Mutex<HashMap<u32, Forward>>);

impl Forwarding {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u32, Forward>> {
        self.0.lock().expect("no panic under this lock")
    }

    /// From now on, the queue pair that was `qpn` on this host is found at `forward`.
    pub fn insert(&self, qpn: u32, forward: Forward) {
        self.lock().insert(qpn, forward);
    }

    /// The queue pair `qpn` lives on this host (again): there is nothing to forward.
    pub fn remove(&self, qpn: u32) {
        self.lock().remove(&qpn);
    }

    /// Where the queue pair that was `qpn` on this host is now.
    pub fn get(&self, qpn: u32) -> Option<Forward> {
        self.lock().get(&qpn).cloned()
    }
}
