//! Addresses of instances that have left this host, or began to: nobody else gets one while its instance may live.
//!
//! They outlive the agent, in a file of its state. An instance that ends here gives its address back. What ended elsewhere
//! stays on the list until the hosts are asked ([`Agent::vacate`](crate::agent::Agent::vacate)).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::Context;

use super::record::Record;
use crate::whole;

/// The list, by address: which instance has it.
#[derive(Default)]
pub struct Away {
    /// `None`: it is not kept.
    file: Option<PathBuf>,
    known: Mutex<BTreeMap<IpAddr, String>>,
}

impl Away {
    /// The list in a file, which need not be there.
    pub fn open(file: &Path) -> anyhow::Result<Self> {
        let known = whole::read_json(file, "which addresses went away with instances")?;
        Ok(Self {
            file: Some(file.to_owned()),
            known: Mutex::new(known.unwrap_or_default()),
        })
    }

    /// An instance is about to leave.
    pub fn leaves(&self, record: &Record) -> anyhow::Result<()> {
        self.change(|known| {
            for address in record.addresses() {
                known.insert(address, record.name.to_string());
            }
        })
    }

    /// An instance has ended here.
    pub fn ended(&self, name: &str) -> anyhow::Result<()> {
        self.change(|known| known.retain(|_, theirs| theirs != name))
    }

    /// The instances whose addresses are on the list.
    pub fn names(&self) -> BTreeSet<String> {
        self.lock().values().cloned().collect()
    }

    /// Whose an address is.
    pub fn whose(&self, address: &IpAddr) -> Option<String> {
        self.lock().get(address).cloned()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<IpAddr, String>> {
        self.known.lock().expect("no panic under this lock")
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<IpAddr, String>)) -> anyhow::Result<()> {
        let mut known = self.lock();
        let mut changed = known.clone();
        change(&mut changed);
        if changed == *known {
            return Ok(());
        }
        if let Some(file) = &self.file {
            whole::write_json(file, &changed)
                .context("the addresses of instances that leave cannot be kept")?;
        }
        *known = changed;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::super::reserved::tests::record;
    use super::*;

    #[test]
    fn an_address_that_left_is_known_to_the_agent_that_comes_after() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("away");
        let address = |last| IpAddr::V4(Ipv4Addr::new(10, 77, 1, last));
        let away = Away::open(&file).unwrap();
        for (name, last) in [("web", 1), ("db", 2)] {
            away.leaves(&record(name, Ipv4Addr::new(10, 77, 1, last)))
                .unwrap();
        }
        let after = Away::open(&file).unwrap();
        assert_eq!(after.whose(&address(1)).as_deref(), Some("web"));
        after.ended("web").unwrap();
        let last = Away::open(&file).unwrap();
        assert_eq!(
            (last.whose(&address(1)), last.whose(&address(2)).as_deref()),
            (None, Some("db"))
        );
        std::fs::write(&file, "{").unwrap();
        assert!(Away::open(&file).is_err(), "a damaged list is not an empty one");
    }
}
