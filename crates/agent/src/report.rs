//! The report of a migration: what `verbatim migrate --json` prints.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};

use crate::memory::convergence::Round;
use crate::memory::pre_dump::PreDump;
use crate::memory::transport::Transport;
use crate::method::Method;

/// The phases, by the names of the paper (MigrRDMA §5.2) where it has one.
///
/// All but the first two are parts of the communication blackout; the service blackout begins with `DumpOthers` and ends
/// with `FullRestore`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Phase {
    /// Private memory, files and adopted memory are sent ahead.
    PreCopy,
    /// The new contexts and connections are made.
    PreSetup,
    /// Requests are intercepted until nothing is in flight.
    WaitBeforeStop,
    /// In its place: the RNICs pause the connections in the middle of what is under way.
    Pause,
    /// The guest library lets go of its RNIC.
    DumpRDMA,
    /// CRIU freezes the tasks and writes its images; meanwhile the last changes of adopted memory go to the destination.
    DumpOthers,
    /// The images go to the destination.
    Transfer,
    /// The restored processes take their new contexts.
    RestoreRDMA,
    /// CRIU makes the tasks, until they run.
    FullRestore,
    /// RECVs that nothing had consumed and intercepted requests are posted.
    Replay,
}

impl Phase {
    /// All of them, in the order of the report.
    pub const ALL: [Self; 10] = [
        Self::PreCopy,
        Self::PreSetup,
        Self::WaitBeforeStop,
        Self::Pause,
        Self::DumpRDMA,
        Self::DumpOthers,
        Self::Transfer,
        Self::RestoreRDMA,
        Self::FullRestore,
        Self::Replay,
    ];

    /// The session's phase that it is a span of.
    pub fn of_session(self) -> verbatim_session::Phase {
        use verbatim_session::Phase as Session;
        match self {
            Self::PreCopy => Session::Converge,
            Self::PreSetup => Session::Prepare,
            Self::WaitBeforeStop | Self::Pause | Self::DumpRDMA => Session::Quiesce,
            Self::DumpOthers => Session::Freeze,
            Self::Transfer => Session::Transfer,
            Self::FullRestore => Session::Restore,
            Self::RestoreRDMA => Session::Switch,
            Self::Replay => Session::Resume,
        }
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::PreCopy => "PreCopy",
            Self::PreSetup => "PreSetup",
            Self::WaitBeforeStop => "WaitBeforeStop",
            Self::Pause => "Pause",
            Self::DumpRDMA => "DumpRDMA",
            Self::DumpOthers => "DumpOthers",
            Self::Transfer => "Transfer",
            Self::RestoreRDMA => "RestoreRDMA",
            Self::FullRestore => "FullRestore",
            Self::Replay => "Replay",
        }
    }
}

/// How long each phase took; phases that did not begin count 0.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PhaseTimes(BTreeMap<Phase, Duration>);

impl PhaseTimes {
    /// Adds to a phase.
    pub fn add(&mut self, phase: Phase, time: Duration) {
        *self.0.entry(phase).or_default() += time;
    }

    /// How long a phase took.
    pub fn get(&self, phase: Phase) -> Duration {
        self.0.get(&phase).copied().unwrap_or_default()
    }
}

impl Serialize for PhaseTimes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(Phase::ALL.len()))?;
        for phase in Phase::ALL {
            map.serialize_entry(phase.name(), &milliseconds(self.get(phase)))?;
        }
        map.end()
    }
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The instance lives at the destination.
    Committed,
    /// The instance lives at the source, as if nothing had happened.
    RolledBack,
}

/// Bytes of content that were sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bytes {
    /// Before anything stopped.
    pub pre_copy: u64,
    /// While the instance was frozen.
    pub stop_and_copy: u64,
}

/// How pre-copy went.
#[derive(Debug, Clone, Serialize)]
pub struct PreCopy {
    /// Its rounds, those of the phases between pre-copy and suspension among them.
    pub rounds: Vec<Round>,
    /// Whether further rounds would have gained nothing, and the limit of the blackout was kept.
    pub converged: bool,
    /// The service blackout as predicted before the connections were suspended.
    pub predicted_blackout_ms: f64,
    /// Memory that is the processes' own and was expected to be left for the blackout, in bytes.
    pub private_bytes: u64,
    /// What was sent ahead of it.
    pub pre_dumps: Vec<PreDump>,
    /// Why all of it went in the blackout, in one piece; `None` if it did not.
    pub private_in_one_piece: Option<String>,
    /// How it went if the tasks were restored without it, and have got it since; `None` if it was part of the images.
    pub private_tracked: Option<PrivateTracked>,
    /// Why it was not tracked from outside, or not any more; `None` if it was.
    pub private_not_tracked: Option<String>,
}

/// Private memory that was tracked from outside, or compared.
#[derive(Debug, Clone, Serialize)]
pub struct PrivateTracked {
    /// What was sent while the program ran.
    pub rounds: Vec<PreDump>,
    /// All of it was compared with what was sent, while the program ran and while it stood still.
    pub compared: bool,
    /// What was sent while it stood still, in bytes.
    pub last_bytes: u64,
}

/// The report of a migration. Times in milliseconds, all by the source's clock.
#[derive(Debug, Clone, Serialize)]
pub struct Migration {
    /// The instance's name.
    pub instance: String,
    /// Where it was.
    pub source: String,
    /// Where it was to go.
    pub destination: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Why it was rolled back, or what went wrong after the decision.
    pub error: Option<String>,
    /// By phase.
    pub phases_ms: PhaseTimes,
    /// From the order to freeze the instance until its tasks are known to run at the destination (or, after a
    /// rollback, at the source).
    pub service_blackout_ms: f64,
    /// From the order to suspend its connections until both sides are known to use the new ones.
    pub communication_blackout_ms: f64,
    /// From the request to the end.
    pub total_ms: f64,
    /// What was sent.
    pub bytes: Bytes,
    /// How much of it in which round, and whether that converged.
    pub pre_copy: PreCopy,
    /// Queue pairs that were connected.
    pub connections: usize,
    /// Send requests that were intercepted, on both sides.
    pub intercepted_wrs: u64,
    /// Requests that were posted to the new queues: RECVs that nothing had consumed, and the intercepted ones.
    pub replayed_wrs: u64,
    /// Send requests that were not complete at the limit of wait-before-stop and had not been executed, or were READs without
    /// their data: posted again to the new queues.
    pub unfinished_replayed_wrs: u64,
    /// Those that had been executed: only completed.
    pub unfinished_completed_wrs: u64,
    /// How memory went while the program ran.
    pub memory_transport: Transport,
    /// Why by that.
    pub memory_transport_reason: String,
    /// Bytes that went by RDMA, of those above.
    pub rdma_bytes: u64,
    /// Bytes of a virtual machine's RAM that were left behind, and came or come when the guest runs already.
    pub post_copy_bytes: u64,
    /// How the connections were brought to a stop.
    pub method: Method,
    /// Why by that.
    pub method_reason: String,
    /// What moved of connections as it was.
    pub paused: Paused,
    /// TCP connections that no process had: not accepted when the instance was frozen, or closed before all was sent. Their clients were
    /// told so by a reset.
    pub reset_connections: usize,
    /// How long no task ran when the dump was tried before anything was sent; `None` if it was not. It is no part of the blackouts.
    pub deep_check_ms: Option<f64>,
}

/// Of connections that were paused and not drained.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Paused {
    /// Send requests that were under way, or waited for it.
    pub requests: u64,
    /// The images of the connections, in bytes.
    pub image_bytes: u64,
}

/// Milliseconds with three decimals.
pub fn milliseconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

/// The clock of one session: which phase runs, and the two blackouts.
#[derive(Debug)]
pub struct Timeline {
    begun: Instant,
    times: PhaseTimes,
    running: Option<(Phase, Instant)>,
    suspended: Option<Instant>,
    frozen: Option<Instant>,
    service: Duration,
    communication: Duration,
}

impl Default for Timeline {
    fn default() -> Self {
        Self {
            begun: Instant::now(),
            times: PhaseTimes::default(),
            running: None,
            suspended: None,
            frozen: None,
            service: Duration::ZERO,
            communication: Duration::ZERO,
        }
    }
}

impl Timeline {
    /// Ends the running phase and begins another.
    pub fn enter(&mut self, phase: Phase) {
        self.leave();
        self.running = Some((phase, Instant::now()));
    }

    /// Ends the running phase.
    pub fn leave(&mut self) {
        if let Some((phase, since)) = self.running.take() {
            self.times.add(phase, since.elapsed());
        }
    }

    /// The communication blackout begins.
    pub fn suspended(&mut self) {
        self.suspended = Some(Instant::now());
    }

    /// The service blackout begins.
    pub fn frozen(&mut self) {
        self.frozen = Some(Instant::now());
    }

    /// The service blackout is over.
    pub fn running(&mut self) {
        self.service += self.frozen.take().map_or(Duration::ZERO, |since| since.elapsed());
    }

    /// The communication blackout is over.
    pub fn resumed(&mut self) {
        self.communication += self
            .suspended
            .take()
            .map_or(Duration::ZERO, |since| since.elapsed());
    }

    /// By phase; the service blackout, the communication blackout, all.
    pub fn totals(mut self) -> (PhaseTimes, Duration, Duration, Duration) {
        self.leave();
        self.running();
        self.resumed();
        (self.times, self.service, self.communication, self.begun.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_has_every_key_by_its_name() {
        let mut times = PhaseTimes::default();
        times.add(Phase::DumpRDMA, Duration::from_micros(1_500));
        let migration = Migration {
            instance: "a".into(),
            source: "s".into(),
            destination: "d".into(),
            outcome: Outcome::RolledBack,
            error: Some("why".into()),
            phases_ms: times,
            service_blackout_ms: 0.0,
            communication_blackout_ms: 0.0,
            total_ms: 1.0,
            bytes: Bytes::default(),
            pre_copy: PreCopy {
                rounds: vec![Round {
                    bytes: 5,
                    time: Duration::from_micros(1_250),
                }],
                converged: true,
                predicted_blackout_ms: 51.25,
                private_bytes: 0,
                pre_dumps: Vec::new(),
                private_in_one_piece: Some("the kernel".into()),
                private_tracked: None,
                private_not_tracked: Some("the kernel".into()),
            },
            connections: 0,
            intercepted_wrs: 0,
            replayed_wrs: 0,
            unfinished_replayed_wrs: 0,
            unfinished_completed_wrs: 0,
            memory_transport: Transport::Tls,
            memory_transport_reason: "asked for".to_owned(),
            rdma_bytes: 0,
            post_copy_bytes: 0,
            method: Method::PauseResume,
            method_reason: "asked for".into(),
            paused: Paused::default(),
            reset_connections: 3,
            deep_check_ms: Some(12.5),
        };
        let json = serde_json::to_value(&migration).unwrap();
        assert_eq!(json["outcome"], "rolled-back");
        assert_eq!(json["phases_ms"].as_object().unwrap().len(), 10);
        assert_eq!(json["method"], "pause-resume");
        assert_eq!(json["phases_ms"]["DumpRDMA"], 1.5);
        assert_eq!(json["reset_connections"], 3);
        assert_eq!(json["deep_check_ms"], 12.5);
        assert_eq!(json["phases_ms"]["Replay"], 0.0);
        assert_eq!(json["pre_copy"]["rounds"][0]["bytes"], 5);
        assert_eq!(json["pre_copy"]["rounds"][0]["ms"], 1.25);
        assert_eq!(json["pre_copy"]["private_in_one_piece"], "the kernel");
    }
}
