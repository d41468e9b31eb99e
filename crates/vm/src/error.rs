//! What can go wrong.

use std::io;
use std::time::Duration;

/// Why something could not be done with a virtual machine.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// QEMU has ended, or has closed its QMP socket.
    #[error("QEMU has ended")]
    Gone,
    /// QEMU does not answer.
    #[error("QEMU has not {what} in {limit:?}; it may be stopped, or hang")]
    Silent {
        /// What it was to do.
        what: String,
        /// How long it was waited for.
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
    /// What comes from QEMU is no QMP.
    #[error("QEMU says what is no QMP: {0}")]
    Malformed(String),
    /// QEMU gave a migration up.
    #[error("QEMU has given the migration up ({status}){}", .reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default())]
    GivenUp {
        /// Its state then.
        status: String,
        /// QEMU's words.
        reason: Option<String>,
    },
    /// The virtual machine cannot be moved as it is.
    #[error("{}", .0.join("; "))]
    Unmovable(Vec<String>),
    /// Memory that had not come yet reads as zeros: the guest must not go on.
    #[error("{} KiB of the guest's memory have not come, and nobody waits for them any more: end it", .bytes >> 10)]
    Lost {
        /// How much is missing.
        bytes: u64,
    },
    /// Something of post-copy was done in another order than it must be.
    #[error("post-copy: {0}")]
    PostCopy(String),
    /// libvirt cannot do something, or is not there.
    #[error("{0}")]
    Libvirt(String),
    /// A command line that cannot be taken.
    #[error("{0}")]
    Arguments(String),
    /// What the process does cannot be tracked.
    #[error("QEMU's memory cannot be tracked: {0}")]
    Tracking(#[from] verbatim_tracking::Error),
    /// Anything else.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

/// What this crate returns.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// That this could not be done, for the reason that the system gives.
    pub fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}
