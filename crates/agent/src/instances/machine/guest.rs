//! What a virtual machine is, wherever it is.

use serde::{Deserialize, Serialize};
use verbatim_vm::{Arguments, Domain};

/// Who starts its QEMU, and from what.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Guest {
    /// The agent, by a command line: QEMU is the only program of the container. The workload says the rest.
    Qemu(Arguments),
    /// libvirt, by its own description, which is asked for when it moves ([`super::domain`]).
    Domain {
        /// Which one, by the same connection on each host.
        domain: Domain,
        /// In bytes.
        ram: u64,
    },
}

impl Guest {
    /// How many bytes of RAM it has.
    pub fn ram(&self) -> u64 {
        match self {
            Self::Qemu(arguments) => arguments.ram(),
            Self::Domain { ram, .. } => *ram,
        }
    }

    /// Whether it is libvirt's.
    pub fn is_domain(&self) -> bool {
        matches!(self, Self::Domain { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_known_again() {
        let qemu = Arguments::parse(&["qemu", "-m", "64"]).unwrap();
        let domain = serde_json::json!({"uri": "qemu:///system", "name": "web", "uuid": "u"});
        let domain = Guest::Domain {
            domain: serde_json::from_value(domain).unwrap(),
            ram: 1 << 30,
        };
        for guest in [Guest::Qemu(qemu.clone()), domain] {
            let text = serde_json::to_string(&guest).unwrap();
            assert_eq!(serde_json::from_str::<Guest>(&text).unwrap(), guest, "{text}");
        }
        // As agents write it that know no libvirt.
        let text = serde_json::to_string(&qemu).unwrap();
        assert_eq!(serde_json::from_str::<Guest>(&text).unwrap(), Guest::Qemu(qemu));
    }
}
