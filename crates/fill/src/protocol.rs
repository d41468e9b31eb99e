//! What is said over the control socket.

use serde::{Deserialize, Serialize};

/// How far the filling is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// CRIU has sent no task yet.
    Waiting,
    /// Descriptors come in; what came is being filled.
    Restoring,
    /// CRIU said that all tasks are there.
    Filling,
    /// Every page is in its place, or no task needs it any more.
    Filled,
    /// The restore cannot be right: images or cache lack something, or CRIU ended too early. Nothing is filled any more and no
    /// fault is answered, so that no task reads a wrong page. Kill the tasks, then [`give_up`](crate::Filler::give_up).
    Refused(String),
    /// Guardian and worker are gone, so that pages that were not filled read as zeros. End the container at once.
    Lost(String),
}

/// How it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// How far it is.
    pub phase: Phase,
    /// Tasks, forked children among them, that lack pages.
    pub tasks: u32,
    /// Pages of all tasks that were to be filled.
    pub pages: u64,
    /// Those that still are.
    pub pages_left: u64,
    /// Faults that were answered.
    pub faults: u64,
    /// Of these, such that got a page of zeros: there was nothing in the dump.
    pub zero_faults: u64,
    /// Pages that could not be put anywhere, since nothing was mapped at their addresses any more.
    pub unplaced: u64,
    /// Workers that were started in the place of one that died.
    pub worker_restarts: u64,
    /// Why no page can be filled for the moment. The worker tries again, for as long as it takes.
    pub stalled: Option<String>,
    /// Process numbers of guardian and worker; 0 if they are gone.
    pub processes: [i32; 2],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Answered by a [`Status`].
    Status,
    /// Answered by a [`Status`] now and at each change of the phase.
    Watch,
    /// Map the cache. Answered by a [`Status`] when that is done.
    Prepare,
    /// All is filled: the processes end. Answered by a [`Status`]; it does nothing in another phase.
    End,
    /// The processes end, whatever is left. Answered by a [`Status`].
    GiveUp,
}
