//! All ids, and the ways to find them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use verbatim_roce::{Qpn, Time};

use crate::command::{Accepts, Listen, ListenAddress};
use crate::num::{CommId, Gid, Owner, ServiceId};
use crate::talk::{Id, Keys, Kind, Talk};
use crate::wire::IpHeader;

/// The listeners of one kind: those here, or those that have gone.
#[derive(Debug, Default)]
pub(crate) struct Listeners(BTreeMap<ServiceId, BTreeMap<ListenAddress, CommId>>);

/// Who takes a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// This listener, with or without addresses in front of the private data.
    Listener(CommId, Option<IpHeader>),
    /// There is one for the service, but not for this request.
    NotForThis,
    /// Nobody.
    Nobody,
}

impl Listeners {
    pub fn contains(&self, listen: &Listen) -> bool {
        let service = self.0.get(&listen.service);
        service.is_some_and(|addresses| addresses.contains_key(&listen.address))
    }

    pub fn insert(&mut self, listen: &Listen, id: CommId) {
        let service = self.0.entry(listen.service).or_default();
        service.entry(listen.address).or_insert(id);
    }

    /// As [`Self::insert`], in the place of another one.
    pub fn replace(&mut self, listen: &Listen, id: CommId) {
        let service = self.0.entry(listen.service).or_default();
        service.insert(listen.address, id);
    }

    pub fn remove(&mut self, listen: &Listen, id: CommId) {
        if let Some(service) = self.0.get_mut(&listen.service) {
            if service.get(&listen.address) == Some(&id) {
                service.remove(&listen.address);
            }
            if service.is_empty() {
                self.0.remove(&listen.service);
            }
        }
    }

    /// The listener that fits best: the one with that address, then those of any.
    pub fn find(
        &self,
        service: ServiceId,
        header: Option<IpHeader>,
        suits: impl Fn(CommId) -> bool,
    ) -> Found {
        let Some(addresses) = self.0.get(&service) else {
            return Found::Nobody;
        };
        let candidates = header.into_iter().flat_map(|header| {
            let family = match header.destination.is_ipv4() {
                true => ListenAddress::AnyV4,
                false => ListenAddress::AnyV6,
            };
            [ListenAddress::One(header.destination), family, ListenAddress::Any]
                .map(|address| (address, Some(header)))
        });
        candidates
            .chain([(ListenAddress::Native, None)])
            .find_map(|(address, header)| {
                let id = addresses.get(&address).copied().filter(|id| suits(*id))?;
                Some(Found::Listener(id, header))
            })
            .unwrap_or(Found::NotForThis)
    }
}

/// The ids that are here.
#[derive(Debug, Default)]
pub(crate) struct Table {
    ids: HashMap<CommId, Id>,
    owners: BTreeMap<Owner, BTreeSet<CommId>>,
    owned: usize,
    /// Ids without an owner, the one that has waited longest first.
    lingering: BTreeMap<u64, CommId>,
    lingering_since: HashMap<CommId, u64>,
    next_lingering: u64,
    timers: BTreeSet<(Time, CommId)>,
    listeners: Listeners,
    peers: HashMap<(u64, CommId), CommId>,
    peer_qps: HashMap<(u64, Qpn), CommId>,
    askers: HashMap<(Gid, CommId), CommId>,
    pending: BTreeMap<CommId, BTreeSet<CommId>>,
    pending_count: usize,
}

impl Table {
    pub fn get(&self, id: CommId) -> Option<&Id> {
        self.ids.get(&id)
    }

    /// The conversation that has this number.
    pub fn talk(&self, id: CommId) -> Option<&Talk> {
        match &self.ids.get(&id)?.kind {
            Kind::Talk(talk) => Some(talk),
            Kind::Listener(_) => None,
        }
    }

    /// Who asks something of this address, and has no answer.
    pub fn asking(&self, peer: IpAddr) -> Vec<CommId> {
        let from_it = |entry: &Id| match &entry.kind {
            Kind::Talk(talk) => talk.state.asks() && talk.path.remote.ip() == peer,
            Kind::Listener(_) => false,
        };
        let waiting = self.timers.iter().map(|(_, id)| *id);
        waiting
            .filter(|id| self.ids.get(id).is_some_and(from_it))
            .collect()
    }

    pub fn insert(&mut self, id: CommId, entry: Id) {
        let (keys, deadline, owner) = (entry.keys(), entry.deadline, entry.owner);
        let before = self.ids.insert(id, entry);
        debug_assert!(before.is_none(), "numbers are given once");
        self.index(id, &keys);
        self.set_timer(id, None, deadline);
        self.set_owner(id, None, owner);
    }

    pub fn remove(&mut self, id: CommId) -> Option<Id> {
        let entry = self.ids.remove(&id)?;
        self.unindex(id, &entry.keys());
        self.set_timer(id, entry.deadline, None);
        self.set_owner(id, entry.owner, None);
        if let Some(since) = self.lingering_since.remove(&id) {
            self.lingering.remove(&since);
        }
        Some(entry)
    }

    /// Changes an id, and the ways to find it with it.
    pub fn update<R>(&mut self, id: CommId, change: impl FnOnce(&mut Id) -> R) -> Option<R> {
        let entry = self.ids.get_mut(&id)?;
        let (keys, deadline, owner) = (entry.keys(), entry.deadline, entry.owner);
        let result = change(entry);
        let (new_keys, new_deadline, new_owner) = (entry.keys(), entry.deadline, entry.owner);
        if keys != new_keys {
            self.unindex(id, &keys);
            self.index(id, &new_keys);
        }
        self.set_timer(id, deadline, new_deadline);
        if owner != new_owner {
            self.set_owner(id, owner, new_owner);
            if new_owner.is_none() {
                self.lingering.insert(self.next_lingering, id);
                self.lingering_since.insert(id, self.next_lingering);
                self.next_lingering += 1;
            }
        }
        Some(result)
    }

    /// [`Table::update`] of a conversation and its deadline.
    pub fn update_talk<R>(
        &mut self,
        id: CommId,
        change: impl FnOnce(&mut Talk, &mut Option<Time>) -> R,
    ) -> Option<R> {
        self.update(id, |entry| match &mut entry.kind {
            Kind::Talk(talk) => Some(change(talk, &mut entry.deadline)),
            Kind::Listener(_) => None,
        })
        .flatten()
    }

    fn set_timer(&mut self, id: CommId, before: Option<Time>, after: Option<Time>) {
        if before != after {
            before.map(|time| self.timers.remove(&(time, id)));
            after.map(|time| self.timers.insert((time, id)));
        }
    }

    fn set_owner(&mut self, id: CommId, before: Option<Owner>, after: Option<Owner>) {
        if let Some(owner) = before {
            self.owned -= 1;
            if let Some(ids) = self.owners.get_mut(&owner) {
                ids.remove(&id);
                if ids.is_empty() {
                    self.owners.remove(&owner);
                }
            }
        }
        if let Some(owner) = after {
            self.owned += 1;
            self.owners.entry(owner).or_default().insert(id);
        }
    }

    fn index(&mut self, id: CommId, keys: &Keys) {
        keys.peer.map(|key| *self.peers.entry(key).or_insert(id));
        keys.peer_qp.map(|key| *self.peer_qps.entry(key).or_insert(id));
        keys.asker.map(|key| *self.askers.entry(key).or_insert(id));
        for listen in &keys.listens {
            self.listeners.insert(listen, id);
        }
        if let Some(listener) = keys.pending_at {
            self.pending.entry(listener).or_default().insert(id);
            self.pending_count += 1;
        }
    }

    fn unindex(&mut self, id: CommId, keys: &Keys) {
        fn remove<K: std::hash::Hash + Eq>(map: &mut HashMap<K, CommId>, key: Option<K>, id: CommId) {
            if let Some(key) = key
                && map.get(&key) == Some(&id)
            {
                map.remove(&key);
            }
        }
        remove(&mut self.peers, keys.peer, id);
        remove(&mut self.peer_qps, keys.peer_qp, id);
        remove(&mut self.askers, keys.asker, id);
        for listen in &keys.listens {
            self.listeners.remove(listen, id);
        }
        if let Some(listener) = keys.pending_at {
            self.pending_count -= 1;
            if let Some(waiting) = self.pending.get_mut(&listener) {
                waiting.remove(&id);
                if waiting.is_empty() {
                    self.pending.remove(&listener);
                }
            }
        }
    }

    pub fn peer(&self, guid: u64, remote: CommId) -> Option<CommId> {
        self.peers.get(&(guid, remote)).copied()
    }

    pub fn peer_qp(&self, guid: u64, qpn: Qpn) -> Option<CommId> {
        self.peer_qps.get(&(guid, qpn)).copied()
    }

    pub fn asker(&self, from: Gid, remote: CommId) -> Option<CommId> {
        self.askers.get(&(from, remote)).copied()
    }

    pub fn listens(&self, listen: &Listen) -> bool {
        self.listeners.contains(listen)
    }

    /// The listener for a request about connections, or about datagrams.
    pub fn listener(&self, service: ServiceId, header: Option<IpHeader>, datagrams: bool) -> Found {
        self.listeners.find(service, header, |id| {
            let accepts = match self.ids.get(&id).map(|entry| &entry.kind) {
                Some(Kind::Listener(listener)) => listener.listen.accepts,
                _ => return false,
            };
            match accepts {
                Accepts::Connections => !datagrams,
                Accepts::Datagrams => datagrams,
                Accepts::Both => true,
            }
        })
    }

    /// The requests that wait at a listener until the program knows of them.
    pub fn pending_at(&self, listener: CommId) -> Vec<CommId> {
        self.pending
            .get(&listener)
            .map_or(Vec::new(), |waiting| waiting.iter().copied().collect())
    }

    pub fn pending_count_at(&self, listener: CommId) -> usize {
        self.pending.get(&listener).map_or(0, BTreeSet::len)
    }

    pub fn pending_count(&self) -> usize {
        self.pending_count
    }

    pub fn owned_count(&self) -> usize {
        self.owned
    }

    pub fn owned_by(&self, owner: Owner) -> Vec<CommId> {
        self.owners
            .get(&owner)
            .map_or(Vec::new(), |ids| ids.iter().copied().collect())
    }

    pub fn owned_count_by(&self, owner: Owner) -> usize {
        self.owners.get(&owner).map_or(0, BTreeSet::len)
    }

    pub fn lingering_count(&self) -> usize {
        self.lingering.len()
    }

    pub fn longest_lingering(&self) -> Option<CommId> {
        self.lingering.first_key_value().map(|(_, id)| *id)
    }

    pub fn first_timer(&self) -> Option<(Time, CommId)> {
        self.timers.first().copied()
    }

    pub fn len(&self) -> usize {
        self.ids.len()
    }
}
