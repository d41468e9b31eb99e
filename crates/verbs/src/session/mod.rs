//! Migrations that this process takes part in: as the instance that moves ([`moved`]) or as a partner ([`partner`]).
//!
//! ```text
//!            PrepareStandby, ConnectStandby
//!   (none) ─────────────────────────────────► Prepared
//!      │ Suspend                                 │ Suspend
//!      └──────────────► Suspended ◄──────────────┘
//!                           │ Drain (past its limit: Stop ─► Stopped, Settle), or StopAndDump (instance)
//!                        Drained ── Switch (partner) ──────────────► Replaced ── Resume ──► (none)
//!                           │ Quiesce (instance)                        ▲
//!                        Quiesced ── gate, (MakeAgain, ConnectMade,) Claim ─┘
//! ```
//! `Hold` leads to Prepared, too. `Abort` leads from Prepared, Suspended, Stopped and Drained back to (none). All is done by
//! the helper thread, one order at a time; the program's threads see it only as a suspended queue or a completion that comes
//! from the fake queue.

mod decision;
#[cfg(test)]
mod decision_tests;
mod drain;
mod dumped;
#[cfg(test)]
mod every_step;
mod made_again;
#[cfg(test)]
mod made_again_tests;
mod moved;
mod partner;
mod pause;
#[cfg(test)]
mod random_tests;
mod rehearsal;
mod resolve;
mod stopped;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use verbatim_channel::{Answer, Order, QpCount, RoadMap, Scope, VERSIONS};
use verbatim_device::control::QpState;

use crate::backend::{Parked, QpPlace, Reopen};
use crate::dump;
use crate::error::VerbsError;
use crate::process::Process;
use crate::qp::Qp;
use crate::road_map;

use decision::Uncertain;
use dumped::AllDumped;
use made_again::AllMade;
pub(crate) use pause::blocker as paused;
pub(crate) use resolve::{publish, resolve, ways};
use stopped::Stopped;

/// Why an order was not carried out; what it had begun is undone.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    #[error("session {session:#x} is {phase:?}; {order} is not for then")]
    Phase {
        session: u64,
        phase: Phase,
        order: &'static str,
    },
    #[error("session {0:#x} is not known here")]
    Unknown(u64),
    #[error("queue pair {qpn} does not exist")]
    NoQp { qpn: u32 },
    #[error("queue pair {qpn} has a standby of session {other:#x} already; wait until that one is over")]
    StandbyTaken { qpn: u32, other: u64 },
    #[error("queue pair {qpn} cannot be stopped in the middle of its requests")]
    Stop {
        qpn: u32,
        #[source]
        source: VerbsError,
    },
    #[error("it is not certain which requests of queue pair {qpn} were executed")]
    Uncertain {
        qpn: u32,
        #[source]
        source: Uncertain,
    },
    #[error("the connections cannot be paused")]
    Pause {
        #[source]
        source: VerbsError,
    },
    #[error("the image of queue pair {qpn} has not the requests that it was given")]
    Image { qpn: u32 },
    #[error("the agent's claim does not fit: {0}")]
    Claim(String),
    #[error("{0}")]
    Blocked(String),
    #[error("the gate in the runtime folder cannot be used")]
    Gate(#[source] std::io::Error),
    #[error(transparent)]
    Verbs(#[from] VerbsError),
}

/// How far a session is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Prepared,
    Suspended,
    Stopped,
    Drained,
    Quiesced,
    Replaced,
}

/// One migration.
struct Session {
    phase: Phase,
    /// The whole process is suspended.
    all: bool,
    /// Control verbs of the whole process wait.
    held: bool,
    /// Those that are suspended.
    qps: Vec<Arc<Qp>>,
    /// Those for which a standby was made.
    prepared: Vec<Arc<Qp>>,
    /// Those that may post markers.
    marked: HashSet<u32>,
    /// Physical queue pairs that are no longer used.
    replaced: Vec<(Arc<Qp>, QpPlace)>,
    /// Those that were stopped before they were drained, as long as they are in use.
    stopped: Vec<Stopped>,
    /// Those that stand still within the protocol, with their images.
    dumped: AllDumped,
    /// Send requests of such that are posted, or will be, to the queue pairs that have taken their places.
    replayed_sends: u64,
    /// Per context, the way back to its device.
    let_go: Vec<LetGo>,
    /// What the restored process has made again, until it is claimed, and what the agent was told of it.
    made: Option<AllMade>,
    told_made: Option<Answer>,
    /// The way back to the context that the channels of rdma_cm share.
    reopen_cm: Option<Reopen>,
}

/// A context that was let go.
enum LetGo {
    /// The agent has its connection.
    Given(Reopen),
    /// The process keeps its device as it is, until it knows that it has moved.
    Kept(Option<Parked>),
}

impl Session {
    fn new() -> Self {
        Self {
            phase: Phase::Prepared,
            all: false,
            held: false,
            qps: Vec::new(),
            prepared: Vec::new(),
            marked: HashSet::new(),
            replaced: Vec::new(),
            stopped: Vec::new(),
            dumped: AllDumped::new(),
            replayed_sends: 0,
            let_go: Vec::new(),
            made: None,
            told_made: None,
            reopen_cm: None,
        }
    }
}

/// All migrations that this process takes part in.
pub(crate) struct Sessions {
    process: Arc<Process>,
    /// The version of the contract that the agent speaks.
    contract: u32,
    open: BTreeMap<u64, Session>,
}

impl Sessions {
    pub fn new(process: Arc<Process>) -> Self {
        Self {
            process,
            contract: VERSIONS.newest,
            open: BTreeMap::new(),
        }
    }

    /// The agent speaks this version of the contract.
    pub fn speak(&mut self, contract: u32) {
        self.contract = contract;
    }

    /// Carries out any order but `Quiesce`, which [`Self::quiesce`] does.
    pub fn handle(&mut self, order: Order, fds: Vec<OwnedFd>) -> Answer {
        let answer = self.answer(order, fds);
        self.clear();
        answer
    }

    /// As [`Self::handle`], but for what nobody waits for: [`Self::clear`] is for after the answer.
    pub fn answer(&mut self, order: Order, fds: Vec<OwnedFd>) -> Answer {
        self.carry_out(order, fds)
            .unwrap_or_else(|error| error_answer(&error))
    }

    /// Destroys queue pairs that nobody uses any more.
    pub fn clear(&mut self) {
        for context in self.process.contexts() {
            if let Ok(device) = context.device() {
                context.retired.destroy_all(&*device);
            }
        }
    }

    fn carry_out(&mut self, order: Order, fds: Vec<OwnedFd>) -> Result<Answer, SessionError> {
        self.check_paused(&order)?;
        match order {
            Order::Describe => {
                let mut road_map = self.describe()?;
                road_map.blockers.extend(road_map::too_new(&self.process));
                Ok(Answer::Described(road_map))
            }
            Order::DescribeAll => {
                let road_map = self.describe()?;
                let made_again = road_map::made_again(&self.process);
                Ok(Answer::DescribedAll { road_map, made_again })
            }
            Order::AllowMarkers { session } => self.allow_markers(session),
            Order::Mark { session, qpns } => {
                let record = self.find_in(session, Phase::Suspended, "Mark")?;
                record.marked = qpns.into_iter().collect();
                Ok(Answer::Done)
            }
            Order::MakeAgain { session } => self.make_again(session, fds),
            Order::ConnectMade { session, peers } => self.connect_made(session, &peers),
            Order::PrepareStandby { session, qpns } => self.prepare(session, &qpns),
            Order::ConnectStandby { session, peers } => self.connect(session, &peers),
            Order::Hold { session } => self.hold(session),
            Order::Suspend { session, scope } => self.suspend(session, &scope),
            Order::Drain {
                session,
                expected,
                timeout_ms,
                sends_only,
            } => self.drain(session, &expected, timeout_ms, sends_only),
            Order::Stop { session, qpns } => self.stop(session, &qpns),
            Order::Settle { session, peers } => self.settle(session, &peers),
            Order::StopAndDump { session, timeout_ms } => self.stop_and_dump(session, timeout_ms),
            Order::Relocate { peers } => self.relocate(&peers),
            Order::Quiesce { session } => Err(SessionError::Phase {
                session,
                phase: self.find(session)?.phase,
                order: "Quiesce",
            }),
            Order::Claim {
                session,
                contexts,
                key_tables,
            } => self.claim(session, &contexts, &key_tables, fds),
            Order::Switch {
                session,
                key_tables,
                tables,
            } => self.switch(session, &key_tables, &tables),
            Order::Moved { endpoints } => {
                for context in self.process.contexts() {
                    context.datagrams.learn(&endpoints);
                    context.make_ways();
                }
                Ok(Answer::Done)
            }
            Order::Resume { session } => self.resume(session),
            Order::Abort { session } => self.abort(session),
            Order::MeasureDrain { scope, limit_ms } => {
                let limit = Duration::from_millis(limit_ms.into());
                Ok(rehearsal::measure_drain(&self.process, &scope, limit))
            }
            Order::Share { secrets } => self.share(&secrets),
            Order::Pause { qpns, limit_s } => self.pause(&qpns, limit_s),
            Order::Unpause { qpns } => self.unpause(&qpns),
            Order::DescribeCm => Ok(Answer::CmDescribed(self.process.cm.lock().describe()?)),
        }
    }

    fn describe(&self) -> Result<RoadMap, SessionError> {
        // Whoever asks looks next at what speaks against a dump.
        if let Some(adopter) = self.process.adopter_in_use() {
            adopter.close_userfaultfds();
        }
        Ok(road_map::describe(&self.process, self.contract)?)
    }

    fn find(&mut self, session: u64) -> Result<&mut Session, SessionError> {
        self.open.get_mut(&session).ok_or(SessionError::Unknown(session))
    }

    fn find_in(
        &mut self,
        session: u64,
        phase: Phase,
        order: &'static str,
    ) -> Result<&mut Session, SessionError> {
        let found = self.find(session)?;
        if found.phase == phase {
            return Ok(found);
        }
        Err(SessionError::Phase {
            session,
            phase: found.phase,
            order,
        })
    }

    fn hold(&mut self, session: u64) -> Result<Answer, SessionError> {
        if self.open.contains_key(&session) {
            self.find_in(session, Phase::Prepared, "Hold")?;
        }
        let record = self.open.entry(session).or_insert_with(Session::new);
        if !std::mem::replace(&mut record.held, true) {
            self.process.control.close();
        }
        // Since [`Self::check_paused`] a dump may have been taken, which would have waited from here on.
        if self.process.qps().iter().any(|qp| qp.stands()) {
            self.process.control.open();
            record.held = false;
            if record.qps.is_empty() && record.prepared.is_empty() {
                self.open.remove(&session);
            }
            return Err(SessionError::Blocked(dump::blocker()));
        }
        Ok(Answer::Done)
    }

    fn suspend(&mut self, session: u64, scope: &Scope) -> Result<Answer, SessionError> {
        if self.open.contains_key(&session) {
            self.find_in(session, Phase::Prepared, "Suspend")?;
        }
        let process = self.process.clone();
        let all = *scope == Scope::All;
        let qps = match scope {
            Scope::All => {
                self.hold(session)?;
                process.qps()
            }
            Scope::Qps(qpns) => {
                let listed = qpns.iter().filter_map(|qpn| {
                    process.control.close_qp(*qpn);
                    let qp = process.qp(*qpn);
                    if qp.is_none() {
                        // Destroyed by the program meanwhile: nothing to suspend.
                        process.control.open_qp(*qpn);
                    }
                    qp
                });
                let listed: Vec<_> = listed.collect();
                if listed.iter().any(|qp| qp.stands()) {
                    listed.iter().for_each(|qp| process.control.open_qp(qp.number()));
                    return Err(SessionError::Blocked(dump::blocker()));
                }
                listed
            }
        };
        let record = self.open.entry(session).or_insert_with(Session::new);
        let prepared: HashSet<u32> = record.prepared.iter().map(|qp| qp.number()).collect();
        // What has failed will not come: the other end would wait for it. A program that does not poll has not seen it.
        for cq in drain::cqs_of(&qps) {
            cq.queue.lock().sweep();
        }
        let mut sent = Vec::new();
        for qp in &qps {
            let connected = matches!(qp.state(), QpState::Rtr | QpState::Rts | QpState::Sqd);
            // The program has changed it since it was prepared: it could not be switched.
            let lost_standby = prepared.contains(&qp.number()) && !qp.has_standby(session);
            let mut send = qp.send.lock();
            send.hold();
            if connected && !lost_standby && !qp.side.failed.load(Relaxed) {
                sent.push(QpCount {
                    qpn: qp.number(),
                    messages: send.messages(),
                });
            }
        }
        record.phase = Phase::Suspended;
        record.all = all;
        record.qps = qps;
        Ok(Answer::Suspended {
            sent,
            road_map_version: process.road_map_version(),
        })
    }

    fn resume(&mut self, session: u64) -> Result<Answer, SessionError> {
        if !self.open.contains_key(&session) {
            // It was resumed, and an agent that has died meanwhile could not say so.
            return Ok(Answer::Resumed {
                intercepted: 0,
                lost_rnic: false,
            });
        }
        self.find_in(session, Phase::Replaced, "Resume")?;
        let ended = self.open.remove(&session).ok_or(SessionError::Unknown(session))?;
        // Before the program runs: it may destroy their completion queues at once.
        for (qp, old) in &ended.replaced {
            qp.context().retired.add(qp.number(), old.qpn);
        }
        let intercepted = self.end(&ended);
        let lost_rnic = match ended.all {
            true => self
                .process
                .contexts()
                .iter()
                .any(|context| context.has_lost_rnic()),
            false => ended.qps.iter().any(|qp| qp.context().has_lost_rnic()),
        };
        Ok(Answer::Resumed {
            intercepted,
            lost_rnic,
        })
    }

    fn abort(&mut self, session: u64) -> Result<Answer, SessionError> {
        match self.open.get(&session).map(|found| found.phase) {
            None => return Ok(Answer::Done),
            Some(phase @ (Phase::Quiesced | Phase::Replaced)) => {
                return Err(SessionError::Phase {
                    session,
                    phase,
                    order: "Abort",
                });
            }
            Some(_) => {}
        }
        let ended = self.open.remove(&session).ok_or(SessionError::Unknown(session))?;
        destroy_standbys(session, &ended.prepared);
        if matches!(ended.phase, Phase::Stopped | Phase::Drained) {
            for qp in &ended.qps {
                qp.recv.lock().release();
            }
            drain::disallow_markers(&ended.qps);
            if ended.all {
                self.process.srqs().for_each(|srq| _ = srq.queue.lock().release());
            }
        }
        self.end(&ended);
        Ok(Answer::Done)
    }

    /// Lets the program's requests and control verbs go on. How many requests were intercepted.
    fn end(&self, ended: &Session) -> u64 {
        ended.stopped.iter().for_each(Stopped::restart);
        let given: u64 = ended.qps.iter().map(|qp| qp.send.lock().release()).sum();
        let intercepted = given.saturating_sub(ended.replayed_sends);
        // Their rings have all that the images name.
        dumped::go_on(&ended.dumped);
        if ended.held {
            self.process.control.open();
        }
        if !ended.all {
            for qp in &ended.qps {
                self.process.control.open_qp(qp.number());
            }
        }
        intercepted
    }

    /// Whether the process waits for [`Order::Claim`].
    pub fn is_quiesced(&self) -> bool {
        self.open.values().any(|session| session.phase == Phase::Quiesced)
    }

    /// The agent is gone. Sessions that cannot go on without it are aborted: at once those that are not drained; after
    /// a grace also a drained process that was to move, since nobody else moves it. A drained partner waits: the other
    /// end may have been moved, and then the old queue pairs lead nowhere; an agent that comes back finds out. What was
    /// replaced waits, too: only `Resume` may follow.
    pub fn agent_is_gone(&mut self, grace_is_over: bool) {
        let hopeless: Vec<u64> = self
            .open
            .iter()
            .filter(|(_, session)| match session.phase {
                Phase::Prepared | Phase::Suspended | Phase::Stopped => true,
                Phase::Drained => grace_is_over && session.all,
                Phase::Quiesced | Phase::Replaced => false,
            })
            .map(|(id, _)| *id)
            .collect();
        for session in hopeless {
            // Cannot fail in these phases.
            let _ = self.abort(session);
        }
    }
}

fn destroy_standbys(session: u64, qps: &[Arc<Qp>]) {
    for qp in qps {
        let mut control = qp.control.lock();
        let standby = control.standby.take_if(|standby| standby.session == session);
        if let (Some(standby), Ok(device)) = (standby, qp.context().device()) {
            standby.destroy(&*device);
        }
    }
}

/// An error for the operator, with its causes.
pub(crate) fn error_answer(error: &dyn std::error::Error) -> Answer {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        message = format!("{message}: {error}");
        cause = error.source();
    }
    Answer::Error { message }
}
