//! What mapped files take of the RNIC's address space, and how much of it is left.
//!
//! The kernel gives a process so many mappings and so many addresses. Without them the RNIC could open no context, and not
//! even replace a page of a truncated file; so no program may use them up.

use std::cell::Cell;

use crate::error::Refused;

/// Of one program, or of all.
#[derive(Debug)]
pub struct Account {
    /// Whose, for messages.
    whose: &'static str,
    mappings: Cell<u32>,
    bytes: Cell<u64>,
    most_mappings: u32,
    most_bytes: u64,
}

impl Account {
    pub fn new(whose: &'static str, most_mappings: u32, most_bytes: u64) -> Self {
        Self {
            whose,
            mappings: Cell::new(0),
            bytes: Cell::new(0),
            most_mappings,
            most_bytes,
        }
    }

    /// The RNIC's own: at most what the kernel gives, less what else needs mappings.
    pub fn of_all(most_mappings: u32, most_bytes: u64) -> Self {
        let kernel = std::fs::read_to_string("/proc/sys/vm/max_map_count");
        let kernel = kernel.ok().and_then(|count| count.trim().parse::<u32>().ok());
        let most = kernel.map_or(most_mappings, |kernel| most_mappings.min(kernel / 8 * 5));
        Self::new("this RNIC", most, most_bytes)
    }

    /// Whether there may be one more mapping, of so many bytes.
    pub fn check(&self, bytes: u64) -> Result<(), Refused> {
        let (mappings, mapped) = (self.mappings.get(), self.bytes.get());
        if mappings < self.most_mappings && bytes <= self.most_bytes.saturating_sub(mapped) {
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
