//! Which of root's rights a process keeps (capabilities(7)).

use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// Capabilities of Linux have numbers below this.
const NUMBERS: u32 = 64;

/// Capabilities that stay with this thread, and with those that it starts.
#[derive(Debug, Clone, Copy)]
pub struct Capabilities(CapabilitySet);

impl Capabilities {
    /// None at first.
    pub fn none() -> Self {
        Self(CapabilitySet::empty())
    }

    /// And this one, if the process has it.
    pub fn and(self, capability: CapabilitySet) -> Self {
        Self(self.0 | capability)
    }

    /// Gives all others up, for good: no program that this thread executes gets them back either.
    pub fn keep(self) -> io::Result<()> {
        set_no_new_privs(true)?;
        // Without the right to change the bounding set there is nothing that a program could get by it.
        for number in 0..NUMBERS {
            let one = CapabilitySet::from_bits_retain(1 << number);
            if self.0.contains(one) || !matches!(capability_is_in_bounding_set(one), Ok(true)) {
                continue;
            }
            match remove_capability_from_bounding_set(one) {
                Ok(()) => {}
                Err(rustix::io::Errno::PERM) => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        match clear_ambient_capability_set() {
            // A kernel without ambient capabilities.
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(errno) => return Err(errno.into()),
        }
        let permitted = capabilities(None)?.permitted & self.0;
        set_capabilities(
            None,
            CapabilitySets {
                effective: permitted,
                permitted,
                inheritable: CapabilitySet::empty(),
            },
        )?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `/proc/PID/status` writes a set.
    fn hexadecimal(set: CapabilitySet) -> String {
        format!("{:016x}", set.bits())
    }

    fn of_thread(key: &str) -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        line.unwrap().trim().to_owned()
    }

    /// Of a thread of its own, which ends with it.
    #[test]
    fn what_is_not_kept_is_gone_for_good() {
        let had = capabilities(None).unwrap().permitted;
        std::thread::spawn(move || {
            let kept = CapabilitySet::SYS_PTRACE;
            Capabilities::none().and(kept).keep().unwrap();
            let expected = hexadecimal(kept & had);
            for set in ["CapPrm:", "CapEff:"] {
                assert_eq!(of_thread(set), expected, "{set}");
            }
            for set in ["CapInh:", "CapAmb:"] {
                assert_eq!(of_thread(set), hexadecimal(CapabilitySet::empty()), "{set}");
            }
            if had.contains(CapabilitySet::SETPCAP) {
                assert_eq!(of_thread("CapBnd:"), expected);
            }
            assert_eq!(of_thread("NoNewPrivs:"), "1");
            let all = CapabilitySets {
                effective: had,
                permitted: had,
                inheritable: CapabilitySet::empty(),
            };
            assert_eq!(set_capabilities(None, all).is_ok(), had == kept & had);
        })
        .join()
        .unwrap();
    }
}
