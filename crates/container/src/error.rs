//! What can go wrong with a container.

use std::io;
use std::path::{Path, PathBuf};

use crate::criu::CriuError;

/// What can go wrong with a container.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A tool is missing.
    #[error("{tool} was not found in PATH; run ./setup.sh to install it")]
    ToolMissing {
        /// Its name.
        tool: &'static str,
    },
    /// CRIU is missing or does not work here.
    #[error(transparent)]
    Criu(#[from] CriuError),
    /// A tool could not be started.
    #[error("cannot start {tool}")]
    Start {
        /// Its name.
        tool: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A call of runc failed.
    #[error("runc {command} {container} failed ({status}): {output}")]
    Runc {
        /// The subcommand.
        command: &'static str,
        /// The container.
        container: String,
        /// How it ended.
        status: String,
        /// What it printed, shortened to its end.
        output: String,
    },
    /// CRIU or runc gave up on a checkpoint, pre-dump or restore. The container is as it was before.
    #[error("{operation} of {container} failed at {stage}: {reason}{}", tail(.criu_log))]
    Operation {
        /// `checkpoint`, `pre-dump` or `restore`.
        operation: &'static str,
        /// The container.
        container: String,
        /// The last moment that was reached (a [`Mark`](crate::Mark)'s name, or `start`).
        stage: String,
        /// What is known of the reason.
        reason: String,
        /// The end of CRIU's log: its errors and warnings.
        criu_log: Vec<String>,
    },
    /// A container's tasks could not be frozen, thawed, killed or found out about. What becomes of them is not known.
    #[error("cannot {action} the tasks of {container}")]
    Tasks {
        /// What was tried.
        action: &'static str,
        /// The container.
        container: String,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// A file operation failed.
    #[error("cannot {action} {}", .path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// A configuration is not usable.
    #[error("{}: {reason}", .path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// CRIU's plugin for the kernel's RNICs is missing.
    #[error("CRIU's plugin {} is missing, without which no container with RNICs moves; build it, or name it with --criu-plugin", .path.display())]
    PluginMissing {
        /// Where it should be.
        path: PathBuf,
    },
    /// An RNIC that the container is to have is not there.
    #[error("this host has no RNIC {name}; `rdma link` lists those that it has")]
    NoRnic {
        /// Its name.
        name: String,
    },
    /// The gate between the agent and the proxy failed.
    #[error("the gate to the CRIU proxy failed")]
    Gate(#[from] verbatim_seqpacket::Error),
}

/// Why CRIU refused a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Complaint {
    /// In one line for an operator.
    pub why: String,
    /// It may be over by the next time.
    pub passes: bool,
}

impl Error {
    /// Why CRIU refused a container, in one line for an operator; `None` if it was not CRIU that did.
    pub fn complaint(&self) -> Option<Complaint> {
        let Self::Operation { criu_log, .. } = self else {
            return None;
        };
        // Where CRIU has warned only, somebody else has failed.
        let errors: Vec<String> = criu_log
            .iter()
            .filter(|line| line.contains("Error"))
            .cloned()
            .collect();
        let why = crate::complaint::explain(&errors, |pid| {
            let name = std::fs::read(format!("/proc/{pid}/comm")).ok()?;
            Some(String::from_utf8_lossy(&name).trim_end().to_owned())
        })?;
        Some(Complaint {
            passes: crate::complaint::passes(&why),
            why,
        })
    }

    pub(crate) fn file(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::File {
            action,
            path: path.to_owned(),
            source,
        }
    }
}

/// `mkdir -p`, with the path in the error.
pub(crate) fn make_dir(path: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(path).map_err(|source| Error::file("create", path, source))
}

/// The same for folders that a container's programs see: all of them may read these and pass through.
pub(crate) fn make_open_dir(path: &Path) -> Result<(), Error> {
    verbatim_jail::folders::make_open(path).map_err(|source| Error::file("create", path, source))
}

fn tail(lines: &[String]) -> String {
    if lines.is_empty() {
        String::new()
    } else {
        format!("; CRIU says: {}", lines.join(" / "))
    }
}
