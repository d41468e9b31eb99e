//! The gate: what the proxy and the agent say to each other about one checkpoint or restore.
//!
//! ```text
//!  proxy ── Requested ──► agent      runc has sent its request, CRIU is started: with a dump's request, to `pre-dump`
//!  proxy ◄── Go ───────── agent      CRIU gets the request, or the answer to `pre-dump`
//!  proxy ── Reached ────► agent      one for each later notification of CRIU, and `connect`; at a stop it waits for an order
//!  proxy ◄── Go ───────── agent      go on: the network is cut off (dump), or connected (restore, after Commit)
//!  proxy ◄── Hold ─────── agent      the tasks are frozen and the decision is being made elsewhere: wait for it,
//!                                    whatever happens to the agent
//!  proxy ── Held ───────► agent      another agent has come to where the proxy can be found ([`held_path`])
//!  proxy ◄── Commit ───── agent      the decision is made   (Abort, or a lost gate: the notification is refused)
//!  proxy ── Finished ───► agent      CRIU's last word
//! ```
//!
//! A pre-dump has no stop after `Go`, and goes on to its end whatever happens to the agent.
//!
//! It is a `SOCK_SEQPACKET` Unix socket at the path in [`GATE_VARIABLE`], one connection for each operation.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The variable that tells the proxy where the gate is; without it the proxy is not there at all.
pub(crate) const GATE_VARIABLE: &str = "VERBATIM_CRIU_GATE";

/// The variable that tells the proxy of a dump which cgroup the container is in: the agent freezes it, and the proxy thaws
/// it where it gives up without the agent.
pub(crate) const CGROUP_VARIABLE: &str = "VERBATIM_CRIU_CGROUP";

/// The variable that tells the proxy that private memory is no part of the images (see [`CheckpointConfig::lazy`] and
/// [`RestoreConfig::lazy`]).
///
/// [`CheckpointConfig::lazy`]: crate::CheckpointConfig::lazy
/// [`RestoreConfig::lazy`]: crate::RestoreConfig::lazy
pub(crate) const LAZY_VARIABLE: &str = "VERBATIM_CRIU_LAZY";

/// The variable that tells the proxy in which network namespace CRIU is to work, by its file; without it CRIU stays where the agent
/// is (see [`CheckpointConfig::network`] and [`RestoreConfig::network`]).
///
/// [`CheckpointConfig::network`]: crate::CheckpointConfig::network
/// [`RestoreConfig::network`]: crate::RestoreConfig::network
pub(crate) const NETWORK_VARIABLE: &str = "VERBATIM_CRIU_NETWORK";

/// The variable that tells the proxy of a dump that the container's terminals' file system is no part of the images (see
/// [`CheckpointConfig::terminals`]).
///
/// [`CheckpointConfig::terminals`]: crate::CheckpointConfig::terminals
pub(crate) const NO_TERMINALS_VARIABLE: &str = "VERBATIM_CRIU_NO_TERMINALS";

/// The variable that tells the proxy of a dump how many seconds CRIU may try to stop the tasks (see [`CheckpointConfig::stop_limit`]).
///
/// [`CheckpointConfig::stop_limit`]: crate::CheckpointConfig::stop_limit
pub(crate) const STOP_LIMIT_VARIABLE: &str = "VERBATIM_CRIU_STOP_LIMIT";

/// The version of these messages: an agent finds the proxy of an earlier release's agent. They have had one form so far; who
/// changes one finds out first whether the other side is of this release.
#[cfg(test)]
const VERSION: u32 = 1;

/// What is asked of CRIU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// Write a container down.
    Dump,
    /// Write its memory down as it is now, while it runs on (`criu/cr-dump.c`, `cr_pre_dump_tasks`).
    PreDump,
    /// Make it from its images.
    Restore,
}

impl Kind {
    /// The notification at which both ways are still open (`criu/cr-dump.c`, `cr_dump_finish`; `criu/cr-restore.c`,
    /// `restore_root_task`); of a pre-dump there is nothing to decide.
    pub fn decision(self) -> Option<&'static str> {
        match self {
            Self::Dump => Some("post-dump"),
            Self::PreDump => None,
            Self::Restore => Some("post-restore"),
        }
    }

    /// The notification at which the network is cut off: the tasks of a dump are frozen and their sockets are not written down yet.
    /// CRIU's own word for it, `network-lock`, comes just before, and does not come where CRIU is in the tasks' network namespace.
    pub fn network_stop(self) -> Option<&'static str> {
        match self {
            Self::Dump => Some("query-ext-files"),
            Self::PreDump | Self::Restore => None,
        }
    }

    /// What the notification called `script` is to the agent.
    pub fn stop_at(self, script: &str) -> Option<Stop> {
        if self.decision() == Some(script) {
            Some(Stop::Decision)
        } else if self.network_stop() == Some(script) {
            Some(Stop::Network)
        } else {
            None
        }
    }

    /// runc's word for it.
    pub fn subcommand(self) -> &'static str {
        match self {
            Self::Dump => "checkpoint",
            Self::PreDump => "pre-dump",
            Self::Restore => "restore",
        }
    }

    /// The log that runc lets CRIU write into its work directory.
    pub fn log_file(self) -> &'static str {
        match self {
            Self::Dump | Self::PreDump => "dump.log",
            Self::Restore => "restore.log",
        }
    }
}

/// Why the proxy waits for an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Stop {
    /// The agent cuts the network off, or, after a restore's decision, connects it; then it says [`Order::Go`].
    Network,
    /// The agent says [`Order::Commit`] or [`Order::Abort`].
    Decision,
}

/// From the proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Report {
    /// runc's request is here.
    Requested {
        /// Which.
        kind: Kind,
    },
    /// A moment was reached.
    Reached {
        /// Its name (a [`Mark`](crate::Mark)'s).
        name: String,
        /// When, by `CLOCK_MONOTONIC`.
        at: Duration,
        /// The first process of what was restored, in the proxy's PID namespace.
        pid: Option<i32>,
        /// Whether the proxy waits, and for what.
        stop: Option<Stop>,
    },
    /// To an agent that comes after the one that said [`Order::Hold`]: the decision is still waited for.
    Held {
        /// runc, in the proxy's PID namespace.
        runc: i32,
    },
    /// CRIU is done, or gone.
    Finished {
        /// Whether it did what was asked.
        success: bool,
        /// What is known if not.
        reason: String,
        /// When.
        at: Duration,
    },
}

/// From the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Let the request through, or go on after [`Stop::Network`].
    Go,
    /// At [`Stop::Decision`]: a lost gate is no abort from now on. Whoever sends it has asked for a decision elsewhere.
    Hold,
    /// Go on after [`Stop::Decision`].
    Commit,
    /// Give up.
    Abort,
}

/// What [`Report::Reached`] calls the moment after a restore's decision, before CRIU hears of it: nothing keeps the tasks from running
/// any more, and their sockets are about to work again. CRIU's own word for it, `network-unlock`, comes later, and not always.
pub(crate) const CONNECT: &str = "connect";

/// Where a proxy that holds frozen tasks waits for another agent, when the one that started it with `gate` is gone.
pub(crate) fn held_path(gate: &Path) -> PathBuf {
    let mut path = gate.as_os_str().to_owned();
    path.push(".held");
    path.into()
}

/// `CLOCK_MONOTONIC` now.
pub(crate) fn monotonic_now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(
        now.tv_sec.try_into().expect("the monotonic clock starts at zero"),
        now.tv_nsec.try_into().expect("below 10^9"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use verbatim_recorded::Recording;

    /// A proxy that holds frozen tasks may be of the release before its agent's.
    #[test]
    fn messages_are_as_recorded() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recorded/proxy.txt");
        let mut recording = Recording::open(path, VERSION);
        recording.check::<Report>("Report");
        recording.check::<Order>("Order");
        recording.check_text("held_path", &held_path(Path::new("gate")).display().to_string());
        recording.finish();
    }
}
