//! What a new socket has, of each kind: only what differs from it is kept of a socket.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use super::options::Options;
use crate::namespace::inside_of;
use crate::sockopt;

/// A kind of socket, of IPv4 or IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Kind {
    pub family: i32,
    /// `SOCK_STREAM` and so on.
    pub kind: i32,
    pub protocol: i32,
}

impl Kind {
    /// `None` of other families.
    pub fn of(socket: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        let number = |name| {
            let mut value = [0; 4];
            sockopt::get(socket, libc::SOL_SOCKET, name, &mut value).map(|_| i32::from_ne_bytes(value))
        };
        let family = number(libc::SO_DOMAIN)?;
        if family != libc::AF_INET && family != libc::AF_INET6 {
            return Ok(None);
        }
        Ok(Some(Self {
            family,
            kind: number(libc::SO_TYPE)?,
            protocol: number(libc::SO_PROTOCOL)?,
        }))
    }

    fn socket(self) -> io::Result<OwnedFd> {
        // SAFETY: the call has no memory to misuse.
        let raw = unsafe { libc::socket(self.family, self.kind | libc::SOCK_CLOEXEC, self.protocol) };
        match raw {
            // SAFETY: it was just made, and is nobody else's.
            raw if raw >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(raw) }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// What new sockets have in a network namespace, whose sysctls say some of it.
#[derive(Debug)]
pub(super) struct Fresh {
    /// A process in it; this thread's if `None`.
    of: Option<i32>,
    known: HashMap<Kind, Options>,
}

impl Fresh {
    /// In the network namespace of a process.
    pub fn of_process(pid: i32) -> Self {
        Self {
            of: Some(pid),
            known: HashMap::new(),
        }
    }

    /// In this thread's.
    #[cfg(test)]
    pub fn here() -> Self {
        Self {
            of: None,
            known: HashMap::new(),
        }
    }

    /// Of one kind, as `read` finds it.
    pub fn of(
        &mut self,
        kind: Kind,
        read: impl FnOnce(BorrowedFd<'_>) -> Options + Send,
    ) -> io::Result<&Options> {
        if !self.known.contains_key(&kind) {
            let look = move || Ok(read(kind.socket()?.as_fd()));
            let found = match self.of {
                Some(pid) => inside_of(pid, look),
                None => look(),
            };
            // One that nobody can make any more: all of it is kept.
            self.known.insert(kind, found.unwrap_or_default());
        }
        Ok(&self.known[&kind])
    }
}
