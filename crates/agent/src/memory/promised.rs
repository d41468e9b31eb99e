//! How much of a host's memory may be promised to instances.
//!
//! A virtual machine's RAM is a file whose pages are allocated when the guest touches them. So a host's free
//! memory says nothing about the memory that its guests may yet touch. A guest is admitted by the sum of all
//! promises: its memory is there when it touches it.

use std::io;

/// Least part of a host's memory that is not promised. It is for the kernel, the daemons, and images of
/// instances that move.
const LEAST_RESERVE: u64 = 256 << 20;

/// How much of a host's memory may be promised.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Room {
    /// The host's memory without reserved huge pages.
    pub total: u64,
    /// Factor between the promises and the memory that may be promised: above 1 more is promised than there
    /// is.
    pub overcommit: f64,
}

impl Room {
    /// The room of this machine.
    pub fn of_host(overcommit: f64) -> io::Result<Self> {
        let text = std::fs::read_to_string("/proc/meminfo")?;
        let total = total_bytes(&text);
        let total =
            total.ok_or_else(|| io::Error::other("/proc/meminfo does not say how much memory there is"))?;
        Ok(Self { total, overcommit })
    }

    /// Limit of the sum of all promises.
    pub fn limit(&self) -> u64 {
        let reserve = (self.total / 16).max(LEAST_RESERVE).min(self.total / 2);
        ((self.total - reserve) as f64 * self.overcommit) as u64
    }

    /// The reason why `host` cannot promise `wanted` bytes to the instance `name`, if it cannot; `promised`
    /// is the sum of the promises to others.
    pub fn lack(&self, host: &str, name: &str, wanted: u64, promised: u64) -> Option<String> {
        let limit = self.limit();
        (promised.saturating_add(wanted) > limit).then(|| {
            format!(
                "{host} has {} MiB of memory, of which {} MiB may be promised to instances; {} MiB are promised already, and {name} is to \
                 have {} MiB: give it less, end or move another one, or start the agent of {host} with a greater --memory-overcommit \
                 (now {})",
                self.total >> 20,
                limit >> 20,
                promised >> 20,
                wanted >> 20,
                self.overcommit
            )
        })
    }

    /// Memory that must be available at once for a user of up to `bytes`. With overcommitment only a part of
    /// it is expected to be used.
    pub fn at_once(&self, bytes: u64) -> u64 {
        (bytes as f64 / self.overcommit.max(1.0)) as u64
    }
}

/// `MemTotal` without `Hugetlb` of proc_meminfo(5).
fn total_bytes(meminfo: &str) -> Option<u64> {
    let kib = |name: &str| {
        let value = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    let huge = kib("Hugetlb:").unwrap_or(0);
    Some(kib("MemTotal:")?.saturating_sub(huge) * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_sum_counts_and_not_what_is_free() {
        let room = Room {
            total: 16 * GIB,
            overcommit: 1.0,
        };
        assert_eq!(room.limit(), 15 * GIB);
        assert_eq!(room.lack("h", "web", 5 * GIB, 10 * GIB), None);
        let lack = room.lack("h", "web", 5 * GIB + 1, 10 * GIB).unwrap();
        for word in [
            "h has 16384 MiB",
            "15360 MiB may be promised",
            "10240 MiB are promised",
            "5120 MiB",
        ] {
            assert!(lack.contains(word), "{lack}");
        }
        assert!(room.lack("h", "web", u64::MAX, u64::MAX).is_some());
        let twice = Room {
            overcommit: 2.0,
            ..room
        };
        assert_eq!(twice.lack("h", "web", 15 * GIB, 15 * GIB), None);
        assert_eq!((room.at_once(GIB), twice.at_once(GIB)), (GIB, GIB / 2));
        let less = Room {
            overcommit: 0.5,
            ..room
        };
        assert_eq!(less.at_once(GIB), GIB);
    }

    #[test]
    fn a_machine_says_what_it_has() {
        let text = "MemTotal:       1000 kB\nMemFree: 5 kB\nHugetlb:         200 kB\n";
        assert_eq!(total_bytes(text), Some(800 * 1024));
        assert_eq!(total_bytes("MemFree: 5 kB\n"), None);
        assert!(Room::of_host(1.0).unwrap().limit() > LEAST_RESERVE / 2);
    }
}
