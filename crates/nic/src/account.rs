//! What mapped files take of the RNIC's address space, and how much of it is left.
//!
//! The kernel gives a process so many mappings and so many addresses. Without them the RNIC could open no context, and not
//! even replace a page of a truncated file; so no program may use them up.

use std::cell::Cell;

use crate::config::Limits;
use crate::error::Refused;

/// Of the machine's memory; without limit where the kernel does not tell.
fn three_quarters_of_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = total.and_then(|total| total.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map_or(u64::MAX, |kib| kib * 1024 / 4 * 3)
}

/// Of one program, or of all.
#[derive(Debug)]
pub struct Account {
    /// Whose, for messages.
    whose: String,
    mappings: Cell<u32>,
    bytes: Cell<u64>,
    most_mappings: u32,
    most_bytes: u64,
}

impl Account {
    pub fn new(whose: impl Into<String>, most_mappings: u32, most_bytes: u64) -> Self {
        Self {
            whose: whose.into(),
            mappings: Cell::new(0),
            bytes: Cell::new(0),
            most_mappings,
            most_bytes,
        }
    }

    /// The RNIC's own: at most what the kernel gives, less what else needs mappings; and, if all of it is locked, what the
    /// machine has.
    pub fn of_all(limits: &Limits, locked: bool) -> Self {
        let most_mappings = limits.max_mappings;
        let most_bytes = match locked {
            true => limits.max_locked_bytes.unwrap_or_else(three_quarters_of_memory),
            false => u64::MAX,
        };
        let most_bytes = most_bytes.min(limits.max_mapped_bytes);
        let kernel = std::fs::read_to_string("/proc/sys/vm/max_map_count");
        let kernel = kernel.ok().and_then(|count| count.trim().parse::<u32>().ok());
        let most = kernel.map_or(most_mappings, |kernel| most_mappings.min(kernel / 8 * 5));
        Self::new("this RNIC", most, most_bytes)
    }

    /// An account of somebody who may have a part of what this one may have.
    pub fn part(&self, whose: String, part: impl Fn(u64) -> u64) -> Self {
        let most_mappings = part(self.most_mappings.into()) as u32;
        Self::new(whose, most_mappings, part(self.most_bytes))
    }

    /// Whether there may be one more mapping, of so many bytes.
    pub(crate) fn check(&self, bytes: u64) -> Result<(), Refused> {
        self.check_leaving(bytes, |_| 0)
    }

    /// The same, if a part of all that there may be is kept.
    pub(crate) fn check_leaving(&self, bytes: u64, reserve: impl Fn(u64) -> u64) -> Result<(), Refused> {
        let (mappings, mapped) = (self.mappings.get(), self.bytes.get());
        let usable = |most: u64| most - reserve(most);
        let left_bytes = usable(self.most_bytes).saturating_sub(mapped);
        if u64::from(mappings) < usable(self.most_mappings.into()) && bytes <= left_bytes {
            return Ok(());
        }
        Err(Refused::new(
            libc::ENOMEM,
            format!(
                "{} has {mappings} mapped files of {mapped} bytes, and may have {} of {}: register memory in fewer \
                 pieces",
                self.whose, self.most_mappings, self.most_bytes
            ),
        ))
    }

    pub fn begin(&self, bytes: u64) {
        self.mappings.set(self.mappings.get() + 1);
        self.bytes.set(self.bytes.get() + bytes);
    }

    pub fn end(&self, bytes: u64) {
        self.mappings.set(self.mappings.get() - 1);
        self.bytes.set(self.bytes.get() - bytes);
    }
}
