//! Names, addresses and memory that are kept for instances while they are made or cleared.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use anyhow::bail;
use tokio::sync::watch;

use super::record::Record;
use super::{Instance, Instances, State};

/// Addresses and memory kept for an instance that is being made.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Held {
    addresses: Vec<IpAddr>,
    /// Memory that it is to have.
    promised: u64,
}

/// A name, and with it the place of an instance, that is one session's or one request's until this is dropped.
#[derive(Debug)]
pub struct Reservation {
    name: String,
    reserved: watch::Sender<BTreeMap<String, Held>>,
}

impl Reservation {
    fn hold(&self, change: impl FnOnce(&mut Held)) {
        self.reserved
            .send_modify(|reserved| _ = reserved.get_mut(&self.name).map(change));
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.reserved
            .send_modify(|reserved| _ = reserved.remove(&self.name));
    }
}

impl Instances {
    /// Reserves a name while its place is made or cleared.
    pub fn reserve(&self, name: &str) -> anyhow::Result<Reservation> {
        let new = |reserved: &mut BTreeMap<String, Held>| match reserved.entry(name.to_owned()) {
            Entry::Occupied(_) => false,
            Entry::Vacant(free) => {
                free.insert(Held::default());
                true
            }
        };
        if !self.reserved.send_if_modified(new) {
            bail!(
                "an instance {name} is being made or cleared there right now; try again when that has ended"
            );
        }
        Ok(Reservation {
            name: name.to_owned(),
            reserved: self.reserved.clone(),
        })
    }

    /// Whether a name is reserved.
    pub fn is_reserved(&self, name: &str) -> bool {
        self.reserved.borrow().contains_key(name)
    }

    /// All names that are reserved.
    pub fn reserved_names(&self) -> Vec<String> {
        self.reserved.borrow().keys().cloned().collect()
    }

    /// Waits until a name is not reserved.
    pub async fn unreserved(&self, name: &str) {
        // The sender is part of self.
        let _ = self
            .reserved
            .subscribe()
            .wait_for(|reserved| !reserved.contains_key(name))
            .await;
    }

    /// Picks the first of these addresses that no instance has, here or [moved from here](super::away), and that no other
    /// reservation holds. It is kept as long as the name is reserved.
    pub fn pick_address(
        &self,
        reservation: &Reservation,
        mut candidates: impl Iterator<Item = Ipv4Addr>,
    ) -> Option<Ipv4Addr> {
        // This lock is kept until the reservation holds the address: two callers never pick the same one.
        let known = self.lock();
        let taken: BTreeSet<_> = known
            .values()
            .flat_map(|instance| instance.home.record.addresses().collect::<Vec<_>>())
            .collect();
        let held: BTreeSet<_> = self.held().flat_map(|(_, held)| held.addresses).collect();
        let is_free = |address: &Ipv4Addr| {
            let address = IpAddr::V4(*address);
            !taken.contains(&address) && !held.contains(&address) && self.away.whose(&address).is_none()
        };
        let address = candidates.find(is_free)?;
        reservation.hold(|held| held.addresses = vec![IpAddr::V4(address)]);
        Some(address)
    }

    /// Reserves an instance's address, and memory for it. An error if another one has the name or the
    /// address, or if `fits`, given the sum of the memory promised to others, returns a reason against it.
    pub fn claim(
        &self,
        reservation: &Reservation,
        record: &Record,
        promised: u64,
        fits: impl FnOnce(u64) -> Option<String>,
    ) -> Result<(), String> {
        let known = self.lock();
        if let Some(conflict) = self.conflict_among(&known, record) {
            return Err(conflict);
        }
        if let Some(lack) = fits(self.promised_among(&known, record.name.as_str())) {
            return Err(lack);
        }
        reservation.hold(|held| {
            *held = Held {
                addresses: record.addresses().collect(),
                promised,
            }
        });
        Ok(())
    }

    /// Sum of this host's memory that is promised to all instances but `except`: those that are here, and
    /// those that are being made.
    pub fn promised(&self, except: &str) -> u64 {
        self.promised_among(&self.lock(), except)
    }

    fn promised_among(&self, known: &BTreeMap<String, Arc<Instance>>, except: &str) -> u64 {
        let here = known
            .iter()
            .filter(|(name, instance)| *name != except && instance.is_here());
        let in_making = self.held().filter(|(name, _)| {
            name != except && !known.get(name).is_some_and(|instance| instance.is_here())
        });
        let here = here.map(|(_, instance)| instance.promised());
        here.chain(in_making.map(|(_, held)| held.promised)).sum()
    }

    fn held(&self) -> impl Iterator<Item = (String, Held)> {
        let held = self.reserved.borrow().clone();
        held.into_iter()
    }

    /// Why an instance of this record cannot be made here, if it cannot.
    pub fn conflict(&self, record: &Record) -> Option<String> {
        self.conflict_among(&self.lock(), record)
    }

    fn conflict_among(&self, known: &BTreeMap<String, Arc<Instance>>, record: &Record) -> Option<String> {
        let alive = |instance: &Instance| !matches!(instance.state(), State::MovedTo(_));
        for instance in known.values().filter(|instance| alive(instance)) {
            let other = &instance.home.record;
            if other.name == record.name {
                return Some(format!(
                    "the name {} is taken by another instance there",
                    record.name
                ));
            }
            let mut addresses = record.addresses();
            if let Some(address) = addresses.find(|own| other.addresses().any(|taken| taken == *own)) {
                return Some(format!("the address {address} is taken by {} there", other.name));
            }
        }
        let others = self.held().filter(|(name, _)| *name != record.name.as_str());
        others.into_iter().find_map(|(name, held)| {
            let address = record.addresses().find(|own| held.addresses.contains(own))?;
            Some(format!(
                "the address {address} is being given to {name} there just now"
            ))
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn record(name: &str, address: Ipv4Addr) -> Record {
        let record = serde_json::json!({
            "name": name,
            "workload": {"Command": {"args": [], "env": [], "cwd": "/", "binds": []}},
            "address": address,
            "prefix": 16,
        });
        serde_json::from_value(record).unwrap()
    }

    fn range() -> impl Iterator<Item = Ipv4Addr> {
        (1..=254).map(|last| Ipv4Addr::new(10, 77, 1, last))
    }

    #[test]
    fn an_address_is_kept_free_from_the_moment_it_is_picked() {
        let instances = Instances::default();
        let picked: Vec<_> = std::thread::scope(|scope| {
            let pick = |number| {
                let instances = &instances;
                scope.spawn(move || {
                    let reservation = instances.reserve(&format!("i{number}")).unwrap();
                    let address = instances.pick_address(&reservation, range()).unwrap();
                    (reservation, address)
                })
            };
            let threads: Vec<_> = (0..16).map(pick).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let different: BTreeSet<_> = picked.iter().map(|(_, address)| *address).collect();
        assert_eq!(different.len(), 16);
        let other = record("other", picked[3].1);
        let conflict = instances.conflict(&other).unwrap();
        assert!(conflict.contains("is being given to i"), "{conflict}");
        let reservation = instances.reserve("other").unwrap();
        assert!(instances.claim(&reservation, &other, 0, |_| None).is_err());
        let (own, address) = &picked[3];
        let own_record = record(&own.name, *address);
        instances.claim(own, &own_record, 0, |_| None).unwrap();
        drop(picked);
        assert_eq!(instances.conflict(&other), None, "they came to nothing");
        assert_eq!(instances.pick_address(&reservation, range()), range().next());
    }

    #[test]
    fn an_address_that_left_is_not_given_again() {
        let instances = Instances::default();
        let reservation = instances.reserve("web").unwrap();
        let first = instances.pick_address(&reservation, range()).unwrap();
        instances.away.leaves(&record("web", first)).unwrap();
        drop(reservation);
        let other = instances.reserve("other").unwrap();
        assert_ne!(instances.pick_address(&other, range()), Some(first));
        instances.away.ended("web").unwrap();
        assert_eq!(instances.pick_address(&other, range()), Some(first));
    }

    #[test]
    fn what_is_promised_to_one_is_not_promised_to_another() {
        let instances = Instances::default();
        let limit = 10;
        let claim = |reservation: &Reservation, bytes: u64| {
            let last = reservation.name.len() as u8;
            let record = record(&reservation.name, Ipv4Addr::new(10, 77, 1, last));
            instances.claim(reservation, &record, bytes, |others| {
                (others + bytes > limit).then(|| format!("{others} are promised"))
            })
        };
        let (a, bb) = (instances.reserve("a").unwrap(), instances.reserve("bb").unwrap());
        claim(&a, 6).unwrap();
        assert_eq!(claim(&bb, 6).unwrap_err(), "6 are promised");
        assert_eq!((instances.promised("bb"), instances.promised("a")), (6, 0));
        claim(&bb, 4).unwrap();
        drop(a);
        assert_eq!(instances.promised(""), 4);
    }
}
