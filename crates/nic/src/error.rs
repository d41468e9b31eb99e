//! Why the RNIC cannot start or go on, and why it refuses a request.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use crate::table::Unavailable;

/// Why the RNIC cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum NicError {
    /// The port's interface is not there, or has no address.
    #[error("the interface {name} has no address: name another with --interface or --address")]
    NoAddress {
        /// The interface.
        name: String,
    },
    /// No interface has the address.
    #[error("no interface of this host has the address {address}")]
    NoInterface {
        /// The address.
        address: IpAddr,
    },
    /// The core is not there, or is not for this process.
    #[error("cannot run on core {core}: `taskset -p $$` lists those that there are")]
    Core {
        /// The core.
        core: usize,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Packets of the smallest path MTU do not fit the interface.
    #[error("the MTU of {name} is {mtu} bytes, and RoCEv2 needs at least 384")]
    MtuTooSmall {
        /// The interface.
        name: String,
        /// Its MTU in bytes.
        mtu: u32,
    },
    /// The UDP port is taken.
    #[error("cannot bind UDP port {port} of {address}: is another RNIC running on this address?")]
    Bind {
        /// The port's address.
        address: IpAddr,
        /// UDP port.
        port: u16,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The control socket cannot be made.
    #[error("cannot listen at {}", path.display())]
    Listen {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: verbatim_seqpacket::Error,
    },
    /// A file in the runtime folder cannot be made or read.
    #[error("cannot use {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file is not a statistics file of this version.
    #[error("{} is not a statistics file of this version", path.display())]
    NotStatistics {
        /// The file.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("{call} failed")]
    Os {
        /// The system call.
        call: &'static str,
        /// Its error.
        #[source]
        source: io::Error,
    },
}

impl NicError {
    pub(crate) fn os(call: &'static str, source: impl Into<io::Error>) -> Self {
        Self::Os {
            call,
            source: source.into(),
        }
    }
}

/// A request that is refused and changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message} (errno {errno})")]
pub(crate) struct Refused {
    pub errno: i32,
    pub message: String,
}

impl Refused {
    pub fn new(errno: i32, message: impl Into<String>) -> Self {
        Self {
            errno,
            message: message.into(),
        }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(libc::EINVAL, message)
    }

    /// There is no object with the number or key that is asked for, or none at all.
    pub fn number(what: &str, asked: Option<u32>, why: Unavailable) -> Self {
        let asked = asked.unwrap_or_default();
        match why {
            Unavailable::Full => Self::new(libc::ENOMEM, format!("no {what} is left")),
            Unavailable::Taken => Self::new(
                libc::EEXIST,
                format!("a {what} is to be {asked:#x}, and that is taken"),
            ),
            Unavailable::Impossible => Self::invalid(format!("no {what} can be {asked:#x}")),
        }
    }

    pub fn no_such(what: &str, id: u32) -> Self {
        Self::invalid(format!("this context has no {what} {id:#x}"))
    }

    pub fn os(call: &str, errno: rustix::io::Errno) -> Self {
        Self::new(errno.raw_os_error(), format!("{call} failed"))
    }
}
