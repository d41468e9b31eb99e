//! What an instance's programs make of their network namespace.

use std::fs::File;
use std::path::PathBuf;

use verbatim_netns::{Found, Reader, State};

use super::{INSIDE, NetworkError, inside};

/// A namespace, to be read or to be made what another one was. It is that of the instance's also while somebody else changes its
/// [`Network`](super::Network).
#[derive(Debug)]
pub struct Contents {
    namespace: File,
    path: PathBuf,
    mac: [u8; 6],
}

impl Contents {
    pub(super) fn new(namespace: File, path: PathBuf, mac: [u8; 6]) -> Self {
        Self { namespace, path, mac }
    }

    /// Reads it. Takes some ms, and more if there are rules of nftables.
    pub fn read(&self, reader: &Reader) -> Result<Found, NetworkError> {
        let read = inside(&self.namespace, || reader.read());
        let mut found = read.map_err(|source| NetworkError::Step {
            action: "read what is in it",
            path: self.path.clone(),
            source,
        })?;
        if found.state.mac(INSIDE).is_some_and(|mac| mac != self.mac) {
            let [a, b, c, d, e, f] = self.mac;
            found.obstacles.push(format!(
                "the Ethernet address of {INSIDE} was changed, and nothing leaves with it: \
                 `ip link set {INSIDE} address {a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}` gives it its own"
            ));
        }
        Ok(found)
    }

    /// Reads how it was made, before anything runs in it.
    pub fn as_made(&self) -> Result<State, NetworkError> {
        let read = inside(&self.namespace, verbatim_netns::read);
        let found = read.map_err(|source| NetworkError::Step {
            action: "read what is in it",
            path: self.path.clone(),
            source,
        })?;
        Ok(found.state)
    }

    /// Makes of it, which was read as `own`, what another one was. Nothing may run in it yet.
    pub fn place(&self, wanted: &State, own: &State) -> Result<(), NetworkError> {
        if let (Some(wanted), Some(mtu)) = (wanted.mtu(INSIDE), own.mtu(INSIDE))
            && wanted > mtu
        {
            return Err(NetworkError::Mtu { wanted, mtu });
        }
        let placed = inside(&self.namespace, || Ok(verbatim_netns::place(wanted, own)));
        let placed = placed.map_err(|source| NetworkError::Step {
            action: "enter",
            path: self.path.clone(),
            source,
        })?;
        placed.map_err(|source| NetworkError::Contents {
            path: self.path.clone(),
            source,
        })
    }
}
