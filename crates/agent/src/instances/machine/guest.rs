//! What a virtual machine is, wherever it is.

use serde::{Deserialize, Serialize};
use verbatim_vm::{Arguments, Domain};

/// Who starts its QEMU, and from what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Guest {
    /// The agent, by a command line: QEMU is the only program of the container. The workload says the rest.
    Qemu(Arguments),
    /// libvirt, by its own description, which is asked for when it moves ([`super::domain`]).
    Domain(Owned),
}

/// A virtual machine of libvirt's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owned {
    /// Which one, by the same connection on each host.
    pub domain: Domain,
    /// Its RAM, in bytes.
    pub ram: u64,
}

impl Guest {
    /// How many bytes of RAM it has.
    pub fn ram(&self) -> u64 {
        match self {
            Self::Qemu(arguments) => arguments.ram(),
            Self::Domain(owned) => owned.ram,
        }
    }

    /// Whether it is libvirt's.
    pub fn is_domain(&self) -> bool {
        matches!(self, Self::Domain(_))
    }
}
