//! What else is to be known of a process's memory before it is tracked.

use std::io;

use crate::error::Error;
use crate::maps;

/// What writes to the memory of a process without one of its threads, in words for an operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Writer {
    /// Rings of asynchronous reads and writes: they may write at any time, also while the threads stand still.
    Ring(String),
    /// A device.
    Device(String),
}

impl std::fmt::Display for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ring(words) | Self::Device(words) => f.write_str(words),
        }
    }
}

/// What writes so, if anything does: to pages that are pinned, past their protection.
pub fn pinned_writers(pid: u32) -> Result<Option<Writer>, Error> {
    let ring = |what: &str| {
        Writer::Ring(format!(
            "process {pid} has asynchronous reads and writes ({what}), which the kernel does not track"
        ))
    };
    let text = maps::read(pid)?;
    if maps::parse(&text).any(|mapping| mapping.name.starts_with("/[aio]")) {
        return Ok(Some(ring("io_setup")));
    }
    let descriptors = format!("/proc/{pid}/fd");
    let descriptors =
        std::fs::read_dir(descriptors).map_err(Error::io("look at the descriptors of a process"))?;
    for descriptor in descriptors.flatten() {
        let target = std::fs::read_link(descriptor.path()).unwrap_or_default();
        if target.as_os_str() == "anon_inode:[io_uring]" {
            return Ok(Some(ring("io_uring")));
        }
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
    let status = status.map_err(Error::io("look at the status of a process"))?;
    let pinned = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    let pinned = pinned.and_then(|kib| kib.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    Ok(pinned.filter(|kib| *kib > 0).map(|kib| {
        Writer::Device(format!(
            "process {pid} has {kib} KiB of memory pinned for a device, whose writes the kernel does not track"
        ))
    }))
}

/// By how many bytes the memory of these processes would grow if each of them had its own copy of what they share since they were
/// forked: `Anonymous` less `Pss_Anon` of proc_pid_smaps_rollup(5).
pub fn shared_by_fork(pids: &[u32]) -> Result<u64, Error> {
    let mut shared = 0;
    for pid in pids {
        match std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")) {
            Ok(text) => shared += shared_bytes(&text),
            // It has ended.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => {
                return Err(Error::Io {
                    what: "look at what a process shares",
                    source,
                });
            }
        }
    }
    Ok(shared)
}

fn shared_bytes(text: &str) -> u64 {
    let kib = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name));
        let value = value.and_then(|value| value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
        value.unwrap_or(0)
    };
    kib("Anonymous:").saturating_sub(kib("Pss_Anon:")) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shared_is_more_than_each_ones_part() {
        let text = "Rss:  900 kB\nPss_Anon:  60 kB\nAnonymous:  100 kB\nAnonHugePages: 7 kB\n";
        assert_eq!(shared_bytes(text), 40 << 10);
        assert_eq!(shared_bytes("Rss: 900 kB\n"), 0);
        assert_eq!(shared_by_fork(&[u32::MAX >> 1]).unwrap(), 0);
    }

    #[test]
    fn an_ordinary_process_has_no_pinned_memory() {
        assert_eq!(pinned_writers(std::process::id()).unwrap(), None);
        assert!(matches!(pinned_writers(u32::MAX >> 1), Err(Error::Gone)));
    }
}
