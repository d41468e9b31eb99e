//! What can go wrong with a lab.

use std::io;
use std::path::PathBuf;

/// The result of an operation on a lab.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation on a lab failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Namespaces need privileges.
    #[error("a lab needs root (namespaces, mounts, cgroups): run it as root or with sudo")]
    NotRoot,
    /// A name with characters that do not belong there.
    #[error("{name:?} is no {what} name: use 1 to 32 letters, digits and '-'")]
    Name {
        /// What was to be named.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// The configuration contradicts itself.
    #[error("{0}")]
    Config(String),
    /// [`crate::Lab::up`] of a lab that is up.
    #[error("lab {name} is up already (supervisor {pid}): use it, or end it with `verbatim lab down`")]
    Exists {
        /// The lab.
        name: String,
        /// Its supervisor.
        pid: u32,
    },
    /// There is no lab of that name.
    #[error("there is no lab {name} in {}: start it with `verbatim lab up`", root.display())]
    NoLab {
        /// The lab.
        name: String,
        /// Where labs keep their state.
        root: PathBuf,
    },
    /// The lab's supervisor has died.
    #[error("lab {name} does not run any more: clear it with `verbatim lab down`")]
    NotRunning {
        /// The lab.
        name: String,
    },
    /// There is no host of that name.
    #[error("lab {lab} has no host {host}, it has {hosts}")]
    NoHost {
        /// The lab.
        lab: String,
        /// The host asked for.
        host: String,
        /// The hosts there are.
        hosts: String,
    },
    /// The lab did not come up.
    #[error("lab {name} did not come up: {reason}\nlast lines of its logs:\n{log}")]
    Start {
        /// The lab.
        name: String,
        /// What failed.
        reason: String,
        /// The tails of the log files.
        log: String,
    },
    /// The supervisor or a host could not do what it was asked for.
    #[error("{0}")]
    Refused(String),
    /// A command of the system failed.
    #[error("`{command}` failed: {output}")]
    Command {
        /// The command line.
        command: String,
        /// What it wrote.
        output: String,
    },
    /// Making a certificate failed.
    #[error("cannot make a certificate for {name}")]
    Certificate {
        /// Whose.
        name: String,
        /// Why.
        #[source]
        source: verbatim_certificates::Error,
    },
    /// A system call failed.
    #[error("cannot {what}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// For `map_err`: `what` completes "cannot …".
    pub(crate) fn io<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::Io {
            what,
            source: source.into(),
        }
    }

    /// The error with all its sources, in one line.
    pub(crate) fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            text.push_str(": ");
            text.push_str(&cause.to_string());
            source = cause.source();
        }
        text
    }
}
