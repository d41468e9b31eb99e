//! What `verbatim migrate --json` prints.

use std::collections::BTreeMap;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use crate::running::Finished;

/// The outcome of a migration that took place.
pub const MOVED: &str = "committed";

/// The outcome of one that was undone.
pub const ROLLED_BACK: &str = "rolled-back";

/// The phases of a migration, in the order of the report.
pub const PHASES: [&str; 10] = [
    "PreCopy",
    "PreSetup",
    "WaitBeforeStop",
    "Pause",
    "DumpRDMA",
    "DumpOthers",
    "Transfer",
    "RestoreRDMA",
    "FullRestore",
    "Replay",
];

/// The report. A key that is missing or that is not known here is an error: programs rely on them.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Migration {
    /// The instance's name.
    pub instance: String,
    /// Where it was.
    pub source: String,
    /// Where it was to go.
    pub destination: String,
    /// [`MOVED`] or [`ROLLED_BACK`].
    pub outcome: String,
    /// Why it was rolled back.
    pub error: Option<String>,
    /// Milliseconds by phase.
    pub phases_ms: BTreeMap<String, f64>,
    /// How long no task ran.
    pub service_blackout_ms: f64,
    /// How long no connection carried data.
    pub communication_blackout_ms: f64,
    /// From the request to the end.
    pub total_ms: f64,
    /// What was sent.
    pub bytes: Bytes,
    /// How memory was sent ahead.
    pub pre_copy: PreCopy,
    /// Queue pairs that moved.
    pub connections: u64,
    /// Requests that were posted while the connections were suspended.
    pub intercepted_wrs: u64,
    /// Requests that were posted again.
    pub replayed_wrs: u64,
    /// Not complete at the limit of the drain, and posted again.
    pub unfinished_replayed_wrs: u64,
    /// Not complete either, but executed.
    pub unfinished_completed_wrs: u64,
    /// How memory went while the program ran: `tls` or `rdma`. The release before this one does not say it.
    #[serde(default)]
    pub memory_transport: String,
    /// Why by that.
    #[serde(default)]
    pub memory_transport_reason: String,
    /// Bytes that went by RDMA.
    #[serde(default)]
    pub rdma_bytes: u64,
    /// Bytes of RAM that were left behind.
    #[serde(default)]
    pub post_copy_bytes: u64,
    /// By which method.
    pub method: String,
    /// Why by that.
    pub method_reason: String,
    /// What moved of connections as it was.
    pub paused: Paused,
    /// TCP connections whose clients were told that they are gone; releases before say nothing of them.
    #[serde(default)]
    pub reset_connections: u64,
    /// How long no task ran for a deep check beforehand, if there was one; releases before make none.
    #[serde(default)]
    pub deep_check_ms: Option<f64>,
}

/// Of connections that paused and were not drained.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Paused {
    /// Send requests that were under way, or waited for it.
    pub requests: u64,
    /// The images of the connections, in bytes.
    pub image_bytes: u64,
}

/// Bytes that were sent.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bytes {
    /// Before anything stopped.
    pub pre_copy: u64,
    /// In the blackout.
    pub stop_and_copy: u64,
}

/// How memory was sent ahead.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PreCopy {
    /// In these rounds.
    pub rounds: Vec<Round>,
    /// More would have gained nothing, and the limit of the blackout was kept.
    pub converged: bool,
    /// By prediction, in milliseconds.
    pub predicted_blackout_ms: f64,
    /// What was not sent ahead.
    pub private_bytes: u64,
    /// What was sent ahead of private memory.
    pub pre_dumps: Vec<PreDump>,
    /// Why all of that went in the blackout, if it did.
    pub private_in_one_piece: Option<String>,
    /// What was sent of it beside the images, if it was.
    pub private_tracked: Option<PrivateTracked>,
    /// Why it was not tracked from outside, if it was not.
    pub private_not_tracked: Option<String>,
}

/// Private memory that was no part of the images.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrivateTracked {
    /// While the program ran.
    pub rounds: Vec<PreDump>,
    /// It was compared with what was sent, since nobody tracked it. The previous release does not.
    #[serde(default)]
    pub compared: bool,
    /// While it stood still, in bytes.
    pub last_bytes: u64,
}

/// A pre-dump of private memory.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PreDump {
    /// What it had.
    pub bytes: u64,
    /// How long it took.
    pub ms: f64,
    /// How long the program stood still for it.
    pub frozen_ms: Option<f64>,
}

/// A round of pre-copy.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Round {
    /// What it sent.
    pub bytes: u64,
    /// How long it took.
    pub ms: f64,
}

impl Migration {
    /// That of a `verbatim migrate --json` that has ended.
    pub fn of(finished: &Finished) -> anyhow::Result<Self> {
        let report: Self = serde_json::from_str(&finished.stdout)
            .with_context(|| format!("`{}` prints no report{}", finished.what, finished.output()))?;
        let phases: Vec<_> = report.phases_ms.keys().map(String::as_str).collect();
        let mut expected = PHASES;
        expected.sort_unstable();
        if phases != expected {
            bail!("the phases of the report are {phases:?}");
        }
        // The exit status says the same as the report.
        if (finished.code == 0) != (report.outcome == MOVED && report.error.is_none()) || finished.code > 1 {
            bail!(
                "`{}` ended with status {} and the report {}",
                finished.what,
                finished.code,
                finished.stdout
            );
        }
        Ok(report)
    }

    /// Fails unless it took place, and well.
    pub fn must_be_committed(&self) -> anyhow::Result<()> {
        match (self.outcome.as_str(), &self.error) {
            (MOVED, None) => Ok(()),
            (outcome, error) => bail!(
                "moving {} from {} to {}: {outcome}{}",
                self.instance,
                self.source,
                self.destination,
                error
                    .as_ref()
                    .map(|error| format!(", {error}"))
                    .unwrap_or_default()
            ),
        }
    }

    /// Fails unless it was undone with an error that contains each of `reasons`.
    pub fn must_be_rolled_back(&self, reasons: &[&str]) -> anyhow::Result<()> {
        let error = self.error.as_deref().unwrap_or_default();
        if self.outcome != ROLLED_BACK || !reasons.iter().all(|reason| error.contains(reason)) {
            bail!(
                "moving {} from {} to {} should be rolled back because of {reasons:?}: {}, {error:?}",
                self.instance,
                self.source,
                self.destination,
                self.outcome
            );
        }
        Ok(())
    }
}
