//! Processes of this host that have the other ends of sockets, found by one look through `/proc` for all of them.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::time::Instant;

use super::sockets::inode;

/// Who has a socket.
pub(super) struct Owner {
    pub pid: i32,
    pub command: String,
}

impl Owner {
    /// It is one of our daemons, of whichever release.
    pub fn is_ours(&self) -> bool {
        let program = fs::read_link(format!("/proc/{}/exe", self.pid)).unwrap_or_default();
        let name = program.file_name().unwrap_or_default();
        self.pid == std::process::id() as i32 || name.as_encoded_bytes().starts_with(b"verbatim")
    }
}

/// By the sockets' inodes, the first process of each.
pub(super) struct Owners {
    found: HashMap<u32, Owner>,
    /// Whoever is not found has nobody.
    pub is_whole: bool,
}

impl Owners {
    /// Those of these sockets. Nobody is looked for after `until`.
    pub fn of(mut wanted: HashSet<u32>, until: Instant) -> Self {
        let mut owners = Self {
            found: HashMap::new(),
            is_whole: true,
        };
        if wanted.is_empty() {
            return owners;
        }
        let own = std::process::id() as i32;
        let all = fs::read_dir("/proc").into_iter().flatten().flatten();
        let others = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        // Most lead to this one.
        for pid in std::iter::once(own).chain(others) {
            if wanted.is_empty() {
                break;
            }
            if !owners.look(pid, &mut wanted, until) {
                owners.is_whole = false;
                break;
            }
        }
        owners
    }

    pub fn get(&self, socket: u32) -> Option<&Owner> {
        self.found.get(&socket)
    }

    /// Whether there was time for it.
    fn look(&mut self, pid: i32, wanted: &mut HashSet<u32>, until: Instant) -> bool {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd"));
        for entry in descriptors.into_iter().flatten().flatten() {
            if Instant::now() >= until {
                return false;
            }
            let target = fs::read_link(entry.path()).unwrap_or_default();
            let Some(socket) = inode(&target.to_string_lossy()).filter(|socket| wanted.remove(socket)) else {
                continue;
            };
            let command = super::read_text(format!("/proc/{pid}/comm")).unwrap_or_default();
            let owner = Owner {
                pid,
                command: command.trim().to_owned(),
            };
            self.found.insert(socket, owner);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    #[test]
    fn one_look_finds_all_that_are_there_and_ends_in_time() {
        let (one, other) = UnixStream::pair().unwrap();
        let of = |socket: &UnixStream| {
            let link = fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap();
            inode(&link.to_string_lossy()).unwrap()
        };
        let wanted = || HashSet::from([of(&one), of(&other), u32::MAX]);
        let found = Owners::of(wanted(), Instant::now() + Duration::from_secs(60));
        assert!(found.is_whole && found.get(u32::MAX).is_none());
        for socket in [&one, &other] {
            assert!(found.get(of(socket)).unwrap().is_ours());
        }
        assert!(!Owners::of(wanted(), Instant::now()).is_whole);
        assert!(Owners::of(HashSet::new(), Instant::now()).is_whole);
    }
}
