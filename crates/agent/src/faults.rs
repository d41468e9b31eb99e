//! The points of a migration at which a test can make something fail.
//!
//! The shipped program passes them all. A program for tests gives the agent somebody who decides what happens there
//! ([`Inject`]).

use std::future::Future;
use std::pin::Pin;

use verbatim_session::Phase;

macro_rules! points {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal, $phase:ident, $time:ident;)+) => {
        /// Where failures can be ordered.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Point {
            $($(#[doc = $doc])+ $name,)+
        }

        impl Point {
            /// All of them, in the order in which a migration passes them, host by host.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// Its name in the file.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)+
                }
            }

            /// The session's phase.
            pub fn phase(self) -> Phase {
                match self {
                    $(Self::$name => Phase::$phase,)+
                }
            }

            /// Before the decision, or after it.
            pub fn time(self) -> Time {
                match self {
                    $(Self::$name => Time::$time,)+
                }
            }
        }
    };
}

/// When a point is passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Time {
    /// A failure there rolls the migration back.
    BeforeCommit,
    /// The decision is under way: who can say what became of it is the destination, and nothing can be refused.
    AtCommit,
    /// The instance is the destination's, and what fails is tried again.
    AfterCommit,
}

impl Time {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::BeforeCommit => "before-commit",
            Self::AtCommit => "at-commit",
            Self::AfterCommit => "after-commit",
        }
    }
}

points! {
    /// Another agent greets this one; damaged, the answer is that of an older version.
    Hello = "hello", Open, BeforeCommit;
    /// The source has tried the dump, and the instance is frozen for that (deep checks only).
    SourceDeep = "source-deep", Freeze, BeforeCommit;
    /// The source is about to open the session.
    SourceOpen = "source-open", Open, BeforeCommit;
    /// The source is about to send memory ahead.
    SourcePreCopy = "source-pre-copy", Converge, BeforeCommit;
    /// The source is about to track private memory; damaged, the kernel cannot.
    SourceTrack = "source-track", Converge, BeforeCommit;
    /// The source is about to have the new connections made.
    SourcePreSetup = "source-pre-setup", Prepare, BeforeCommit;
    /// The source is about to suspend all connections.
    SourceSuspend = "source-suspend", Quiesce, BeforeCommit;
    /// The source has suspended them and is about to wait until nothing is in flight.
    SourceDrain = "source-drain", Quiesce, BeforeCommit;
    /// The drain has come to its limit, and the source is about to stop connections in the middle of their requests.
    SourceStop = "source-stop", Quiesce, BeforeCommit;
    /// The source is about to pause all connections in the middle of what is under way (pause-resume only).
    SourcePause = "source-pause", Quiesce, BeforeCommit;
    /// The source is about to let the processes give up their RNIC.
    SourceQuiesce = "source-quiesce", Quiesce, BeforeCommit;
    /// The source has the processes' RNIC connections and is about to freeze them.
    SourceFreeze = "source-freeze", Freeze, BeforeCommit;
    /// The instance is frozen, and its last pages are about to be sent.
    SourceTransfer = "source-transfer", Transfer, BeforeCommit;
    /// The source is about to have the instance restored.
    SourceRestore = "source-restore", Restore, BeforeCommit;
    /// The source is about to write its decision down.
    SourceCommit = "source-commit", Verify, BeforeCommit;
    /// The source has written it down, and has not asked the destination yet.
    SourceAsk = "source-ask", Decide, AtCommit;
    /// The source has the destination's answer.
    SourceCommitted = "source-committed", Decide, AtCommit;
    /// The source is about to let everybody take the new connections.
    SourceSwitch = "source-switch", Switch, AfterCommit;
    /// The source is about to let the requests flow.
    SourceResume = "source-resume", Resume, AfterCommit;
    /// The source is about to clear the old place.
    SourceReclaim = "source-reclaim", Reclaim, AfterCommit;
    /// The destination is about to make the instance's place.
    DestinationOpen = "destination-open", Open, BeforeCommit;
    /// The destination is about to place files; damaged, what comes by RDMA is changed on the way.
    DestinationPlace = "destination-place", Converge, BeforeCommit;
    /// The destination is about to make the standby contexts.
    DestinationPreSetup = "destination-pre-setup", Prepare, BeforeCommit;
    /// The destination is about to connect them.
    DestinationConnect = "destination-connect", Prepare, BeforeCommit;
    /// The destination is about to start runc and CRIU; damaged, it loses memory that has come.
    DestinationPrepareRestore = "destination-prepare-restore", Prepare, BeforeCommit;
    /// The destination has all images and is about to restore.
    DestinationRestore = "destination-restore", Restore, BeforeCommit;
    /// The destination is about to write its decision down.
    DestinationCommit = "destination-commit", Decide, BeforeCommit;
    /// The destination has written it down; the tasks do not run yet.
    DestinationCommitted = "destination-committed", Decide, BeforeCommit;
    /// The tasks run, and the source has not been told.
    DestinationRunning = "destination-running", Decide, AtCommit;
    /// The destination is about to give the processes their contexts.
    DestinationClaim = "destination-claim", Switch, AfterCommit;
    /// The destination is about to let their requests flow.
    DestinationResume = "destination-resume", Resume, AfterCommit;
    /// The destination is about to ask for RAM that a virtual machine has left behind (post-copy only; before the decision, too).
    DestinationBring = "destination-bring", Resume, AfterCommit;
    /// A partner is about to make its standby queue pairs.
    PartnerPrepare = "partner-prepare", Prepare, BeforeCommit;
    /// A partner is about to connect them.
    PartnerConnect = "partner-connect", Prepare, BeforeCommit;
    /// A partner is about to suspend.
    PartnerSuspend = "partner-suspend", Quiesce, BeforeCommit;
    /// A partner is about to wait until nothing is in flight.
    PartnerDrain = "partner-drain", Quiesce, BeforeCommit;
    /// Nothing is in flight at a partner, and the source has not been told.
    PartnerDrained = "partner-drained", Quiesce, BeforeCommit;
    /// A partner is about to stop connections in the middle of their requests.
    PartnerStop = "partner-stop", Quiesce, BeforeCommit;
    /// They are stopped, and a partner is about to find out what was executed.
    PartnerSettle = "partner-settle", Quiesce, BeforeCommit;
    /// A partner is about to put the standby queue pairs in place.
    PartnerSwitch = "partner-switch", Switch, AfterCommit;
    /// A partner is about to let its requests flow.
    PartnerResume = "partner-resume", Resume, AfterCommit;
}

/// What comes of a point: an error fails the step; true tells the caller to damage what it works with.
pub type Passed<'a> = Pin<Box<dyn Future<Output = anyhow::Result<bool>> + Send + 'a>>;

/// Decides what happens at the points.
pub trait Inject: Send + Sync {
    /// An agent is at a point.
    fn pass(&self, point: Point) -> Passed<'_>;
}

/// What happens at the points of one agent.
#[derive(Default)]
pub struct Faults(Option<Box<dyn Inject>>);

impl Faults {
    /// What a test decides.
    pub fn injected(by: Box<dyn Inject>) -> Self {
        Self(Some(by))
    }

    /// Passes a point: goes on, fails, or waits. True tells the caller to damage what it works with. Where nothing can be refused
    /// any more ([`Time::AtCommit`]) no failure may be injected.
    pub async fn pass(&self, point: Point) -> anyhow::Result<bool> {
        match &self.0 {
            None => Ok(false),
            Some(by) => by.pass(point).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = Point::ALL.iter().map(|point| point.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Point::ALL.len());
    }
}
