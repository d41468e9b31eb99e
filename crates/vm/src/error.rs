//! Errors of this crate.

use std::io;
use std::time::Duration;

/// An error of an operation on a virtual machine.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// QEMU has ended, or has closed its QMP socket.
    #[error("QEMU has ended")]
    Gone,
    /// QEMU does not answer.
    #[error("QEMU has not {what} in {limit:?}; it may be stopped, or hang")]
    Silent {
        /// The operation.
        what: String,
        /// The limit of the wait.
        limit: Duration,
    },
    /// QEMU refused a command.
    #[error("QEMU refuses `{command}`: {description}")]
    Refused {
        /// The command.
        command: &'static str,
        /// QEMU's words.
        description: String,
    },
    /// QEMU's output is no QMP.
    #[error("QEMU says what is no QMP: {0}")]
    Malformed(String),
    /// QEMU gave a migration up.
    #[error("QEMU has given the migration up ({status}){}", .reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default())]
    GivenUp {
        /// The state of the migration.
        status: String,
        /// QEMU's words.
        reason: Option<String>,
    },
    /// The virtual machine cannot be moved as it is.
    #[error("{}", .0.join("; "))]
    Unmovable(Vec<String>),
    /// Memory that has not come yet reads as zeros: the guest must not go on.
    #[error("{} KiB of the guest's memory have not come, and nobody waits for them any more: end it", .bytes >> 10)]
    Lost {
        /// Number of missing bytes.
        bytes: u64,
    },
    /// A step of post-copy was done in the wrong order.
    #[error("post-copy: {0}")]
    PostCopy(String),
    /// libvirt cannot carry out an operation, or is not there.
    #[error("{0}")]
    Libvirt(String),
    /// A command line that cannot be taken.
    #[error("{0}")]
    Arguments(String),
    /// The writes of the process cannot be tracked.
    #[error("QEMU's memory cannot be tracked: {0}")]
    Tracking(#[from] verbatim_tracking::Error),
    /// Any other error.
    #[error("cannot {what}: {source}")]
    Io {
        /// The operation.
        what: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of this operation, with the system's error as its cause.
    pub fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}
