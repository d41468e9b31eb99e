//! The ids that have gone to another place.

use std::collections::{BTreeMap, HashMap};

use crate::num::{CommId, Gid, ServiceId};
use crate::table::{Found, Listeners};
use crate::talk::Keys;
use crate::wire::IpHeader;

/// By what their messages are known.
#[derive(Debug, Default)]
pub(crate) struct Away {
    /// With the place in the order of going.
    ids: HashMap<CommId, (u64, Keys)>,
    order: BTreeMap<u64, CommId>,
    next: u64,
    listeners: Listeners,
    peers: HashMap<(u64, CommId), CommId>,
    askers: HashMap<(Gid, CommId), CommId>,
}

impl Away {
    /// At most `most` are kept.
    pub fn insert(&mut self, id: CommId, keys: Keys, most: usize) {
        keys.peer.map(|key| self.peers.insert(key, id));
        keys.asker.map(|key| self.askers.insert(key, id));
        for listen in &keys.listens {
            self.listeners.insert(listen, id);
        }
        self.order.insert(self.next, id);
        self.ids.insert(id, (self.next, keys));
        self.next += 1;
        while self.ids.len() > most
            && let Some((_, oldest)) = self.order.first_key_value()
        {
            self.remove(*oldest);
        }
    }

    pub fn remove(&mut self, id: CommId) {
        let Some((place, keys)) = self.ids.remove(&id) else {
            return;
        };
        self.order.remove(&place);
        keys.peer.map(|key| self.peers.remove(&key));
        keys.asker.map(|key| self.askers.remove(&key));
        for listen in &keys.listens {
            self.listeners.remove(listen, id);
        }
    }

    pub fn contains(&self, id: CommId) -> bool {
        self.ids.contains_key(&id)
    }

    pub fn peer(&self, guid: u64, remote: CommId) -> Option<CommId> {
        self.peers.get(&(guid, remote)).copied()
    }

    pub fn asker(&self, from: Gid, remote: CommId) -> Option<CommId> {
        self.askers.get(&(from, remote)).copied()
    }

    pub fn listener(&self, service: ServiceId, header: Option<IpHeader>) -> Option<CommId> {
        match self.listeners.find(service, header, |_| true) {
            Found::Listener(id, _) => Some(id),
            Found::NotForThis | Found::Nobody => None,
        }
    }
}
