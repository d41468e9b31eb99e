//! Kind and owner of a virtual machine, the same on every host.

use serde::{Deserialize, Serialize};
use verbatim_vm::{Arguments, Domain};

/// The program that starts the machine's QEMU, and its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Guest {
    /// The agent, by a command line: QEMU is the only program of the container. The workload has the rest.
    Qemu(Arguments),
    /// libvirt, by its own description, which is requested when the machine moves ([`super::domain`]).
    Domain(Owned),
}

/// A virtual machine that libvirt owns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owned {
    /// Name and connection, the same on each host.
    pub domain: Domain,
    /// Size of the RAM in bytes.
    pub ram: u64,
}

impl Guest {
    /// Size of the RAM in bytes.
    pub fn ram(&self) -> u64 {
        match self {
            Self::Qemu(arguments) => arguments.ram(),
            Self::Domain(owned) => owned.ram,
        }
    }

    /// Whether libvirt owns the machine.
    pub fn is_domain(&self) -> bool {
        matches!(self, Self::Domain(_))
    }
}
