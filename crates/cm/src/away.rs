//! The ids that have gone to another place.

use std::collections::{BTreeMap, HashMap};

use crate::num::{CommId, Gid, ServiceId};
use crate::table::{Found, Listeners};
use crate::talk::Keys;
use crate::wire::IpHeader;

/// One of them.
#[derive(Debug)]
struct Gone {
    keys: Keys,
    /// Its place in the order of going; none of one that may still come back, which is kept.
    place: Option<u64>,
    /// Where it is now, if somebody has said so.
    to: Option<Gid>,
}

/// By what their messages are known.
#[derive(Debug, Default)]
pub(crate) struct Away {
    ids: HashMap<CommId, Gone>,
    order: BTreeMap<u64, CommId>,
    next: u64,
    listeners: Listeners,
    peers: HashMap<(u64, CommId), CommId>,
    askers: HashMap<(Gid, CommId), CommId>,
}

impl Away {
    /// One that may still come back.
    pub fn hold(&mut self, id: CommId, keys: Keys) {
        keys.peer.map(|key| self.peers.insert(key, id));
        keys.asker.map(|key| self.askers.insert(key, id));
        for listen in &keys.listens {
            // Of several that were there one after the other, the latest.
            self.listeners.replace(listen, id);
        }
        let gone = Gone {
            keys,
            place: None,
            to: None,
        };
        self.ids.insert(id, gone);
    }

    /// It does not come back by itself. At most `most` of those are kept.
    pub fn let_go(&mut self, id: CommId, to: Option<Gid>, most: usize) {
        let Some(gone) = self.ids.get_mut(&id) else { return };
        gone.to = to;
        if gone.place.is_some() {
            return;
        }
        gone.place = Some(self.next);
        self.order.insert(self.next, id);
        self.next += 1;
        self.keep_within(most);
    }

    fn keep_within(&mut self, most: usize) {
        while self.order.len() > most
            && let Some((_, oldest)) = self.order.first_key_value()
        {
            self.remove(*oldest);
        }
    }

    pub fn remove(&mut self, id: CommId) {
        let Some(Gone { keys, place, .. }) = self.ids.remove(&id) else {
            return;
        };
        place.map(|place| self.order.remove(&place));
        if let Some(key) = keys.peer {
            forget(&mut self.peers, key, id);
        }
        if let Some(key) = keys.asker {
            forget(&mut self.askers, key, id);
        }
        for listen in &keys.listens {
            self.listeners.remove(listen, id);
        }
    }

    pub fn contains(&self, id: CommId) -> bool {
        self.ids.contains_key(&id)
    }

    /// Where it is, if that is known.
    pub fn place(&self, id: CommId) -> Option<Gid> {
        self.ids.get(&id)?.to
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

fn forget<K: std::hash::Hash + Eq>(map: &mut HashMap<K, CommId>, key: K, id: CommId) {
    if map.get(&key) == Some(&id) {
        map.remove(&key);
    }
}
