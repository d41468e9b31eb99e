//! What an agent asks of a guest library, and what it answers.

use serde::{Deserialize, Serialize};
use verbatim_device::control::{QpCap, QpSecret, SrqAttr};

use crate::Endpoint;

/// The first message on a connection. It says the version of all that follows, so that what there is of it here has the same form
/// in every version.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Greeting {
    /// From the guest library's helper thread: orders may be sent here.
    Process {
        /// [`crate::VERSION`] of the guest library.
        version: u32,
        /// The process, in its own PID namespace.
        pid: u32,
        /// The program's name.
        program: String,
        /// The [`crate::Gate`]'s value; it tells a process that waited at the gate from a new one.
        generation: u32,
        /// The process was quiesced and waits for [`Order::Claim`].
        quiesced: bool,
    },
    /// From an application thread about to connect a queue pair: where is this endpoint today? Answered by
    /// [`Resolved`].
    Resolve {
        /// [`crate::VERSION`] of the guest library.
        version: u32,
        /// As the program knows it.
        endpoint: Endpoint,
    },
    /// From an application thread about to make an address handle: which datagram queue pairs that programs know under
    /// this GID are elsewhere? Answered by a `Vec` of [`MovedEndpoint`].
    Ways {
        /// [`crate::VERSION`] of the guest library.
        version: u32,
        /// In network byte order.
        gid: [u8; 16],
    },
    /// From an application thread that has made a queue pair after its context has moved: the program will tell others its
    /// number, under the GID of another host, where they will look for it. Answered by an `Option<u32>`: the number under
    /// which it is found there; none if that host is out of reach.
    Publish {
        /// [`crate::VERSION`] of the guest library.
        version: u32,
        /// Under which it is to be found, in network byte order.
        gid: [u8; 16],
        /// Its physical number on this host.
        qpn: u32,
        /// The process's remote keys, as far as they differ.
        keys: Vec<KeyPair>,
        /// Of a datagram queue pair: how often its context has moved.
        datagram: Option<u32>,
    },
}

/// A datagram queue pair that is elsewhere now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedEndpoint {
    /// By what programs know it.
    pub known: Endpoint,
    /// Where it is.
    pub now: Endpoint,
    /// How often it has moved: of two such, the one with more is the newer.
    pub moves: u32,
}

/// A remote key as a program knows it, and as the RNIC does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyPair {
    /// What the program knows.
    pub virtual_key: u32,
    /// What the RNIC knows.
    pub physical_key: u32,
    /// It is a memory window's: each bind gives it another tag, which both keys have.
    #[serde(default)]
    pub any_tag: bool,
}

/// Where an endpoint is today; the same as asked for if it never moved.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Resolved {
    /// The physical endpoint.
    pub endpoint: Endpoint,
    /// The remote keys of the process there, as far as they differ.
    pub keys: Vec<KeyPair>,
}

/// Which queue pairs an order concerns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scope {
    /// All of the process, as for an instance that moves. Control verbs wait, too, until the session ends.
    All,
    /// These virtual numbers, as for a partner.
    Qps(Vec<u32>),
}

/// A partner's queue pair that stands ready to be used in the place of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandbyQp {
    /// The virtual number of the one that it will replace.
    pub qpn: u32,
    /// Its own physical number.
    pub physical_qpn: u32,
    /// The PSN with which it starts to send.
    pub sq_psn: u32,
}

/// To what a standby queue pair is to be connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandbyPeer {
    /// The virtual number, as in [`StandbyQp`].
    pub qpn: u32,
    /// The physical other end.
    pub remote: Endpoint,
    /// The PSN with which the other end starts to send; `None`: both PSNs are those that the programs have agreed on, since
    /// one of the two cannot have sent yet, and its program may still name its own.
    pub rq_psn: Option<u32>,
}

/// Where the other end of a connection is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relocated {
    /// The virtual number of the end here.
    pub qpn: u32,
    /// The physical other end.
    pub remote: Endpoint,
}

/// How many messages that consume a RECV a queue pair has sent since it was made or reset: SENDs and WRITEs with
/// immediate (`n_sent` in MigrRDMA §3.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpCount {
    /// The virtual number.
    pub qpn: u32,
    /// The count.
    pub messages: u64,
}

/// Where a stopped queue pair stands, as far as its other end must know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpProgress {
    /// The virtual number.
    pub qpn: u32,
    /// It is in ERR: it executes nothing any more, and neither will its successor.
    pub failed: bool,
    /// Messages that it was given and that consume a RECV of the other end, as [`QpCount::messages`].
    pub sent: u64,
    /// Messages of the other end that have consumed a RECV here, and completed it (`n_recv`).
    pub received: u64,
    /// The PSN that would have to come next from the other end: all before it is executed, and nothing else is.
    pub expected_psn: u32,
    /// The other end's latest ATOMICs, oldest first: PSN, and what was in memory before; nothing is said of that for an ATOMIC WRITE.
    pub atomics: Vec<(u32, Option<u64>)>,
}

/// A context on another RNIC that replaces one of the process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClaimedContext {
    /// [`crate::ContextRecord::id`].
    pub id: u32,
    /// Protection domains.
    pub pds: Vec<ClaimedPd>,
    /// Memory regions.
    pub mrs: Vec<ClaimedMr>,
    /// Memory windows.
    pub mws: Vec<ClaimedMw>,
    /// Completion channels.
    pub channels: Vec<ClaimedChannel>,
    /// Completion queues.
    pub cqs: Vec<ClaimedCq>,
    /// Shared receive queues.
    pub srqs: Vec<ClaimedSrq>,
    /// Queue pairs.
    pub qps: Vec<ClaimedQp>,
}

/// The new number of a protection domain.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct ClaimedPd {
    /// As in the road map.
    pub pd: u32,
    /// The RNIC's.
    pub physical_pd: u32,
}

/// The new keys of a memory region.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct ClaimedMr {
    /// The virtual local key.
    pub lkey: u32,
    /// The RNIC's local key.
    pub physical_lkey: u32,
    /// The RNIC's remote key.
    pub physical_rkey: u32,
}

/// The new key of a memory window, which is not bound yet.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct ClaimedMw {
    /// The virtual key, of which only the index counts.
    pub rkey: u32,
    /// The RNIC's, likewise.
    pub physical_rkey: u32,
}

/// The new number of a completion channel.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct ClaimedChannel {
    /// As in the road map.
    pub channel: u32,
    /// The RNIC's.
    pub physical_channel: u32,
}

/// The new completion queue.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct ClaimedCq {
    /// As in the road map.
    pub cq: u32,
    /// The RNIC's number.
    pub physical_cq: u32,
    /// How many entries it has.
    pub entries: u32,
    /// Where in the new arena it is.
    pub offset: u64,
}

/// The new shared receive queue.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct ClaimedSrq {
    /// As in the road map.
    pub srq: u32,
    /// The RNIC's number.
    pub physical_srq: u32,
    /// Its limits, at least those of the old one.
    pub attr: SrqAttr,
    /// Where in the new arena it is.
    pub offset: u64,
}

/// The new queue pair.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct ClaimedQp {
    /// The virtual number.
    pub qpn: u32,
    /// The RNIC's number.
    pub physical_qpn: u32,
    /// Its limits, at least those of the old one.
    pub cap: QpCap,
    /// Its doorbell bit.
    pub slot: u32,
    /// Where in the new arena it is.
    pub offset: u64,
    /// The physical other end, if it is connected.
    pub remote: Option<Endpoint>,
    /// The index of its own GID on the RNIC, if it is connected.
    pub sgid_index: Option<u8>,
    /// Which of [`Order::Claim`]'s key tables translates its remote keys; `None`: as before the move.
    pub key_table: Option<u32>,
}

/// An agent's order.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Order {
    /// Tell the road map. Answer: [`Answer::Described`].
    Describe,
    /// As a partner: make a queue pair with the PD, the CQs and the limits of each of these, not connected yet.
    /// Answer: [`Answer::StandbyPrepared`].
    PrepareStandby {
        /// The migration.
        session: u64,
        /// Virtual numbers.
        qpns: Vec<u32>,
    },
    /// As a partner: connect the standby queue pairs, with the attributes of those they will replace. Answer:
    /// [`Answer::Done`].
    ConnectStandby {
        /// The migration.
        session: u64,
        /// One for each standby queue pair.
        peers: Vec<StandbyPeer>,
    },
    /// Intercept new send requests without blocking. Answer: [`Answer::Suspended`].
    Suspend {
        /// The migration.
        session: u64,
        /// Which queue pairs.
        scope: Scope,
    },
    /// Wait until every send request of the suspended queue pairs has completed and they have received as many
    /// messages as their other ends sent. RECVs that the program posts meanwhile still go to the RNIC: what is in
    /// flight may need them. Answer: [`Answer::Drained`], or [`Answer::Undrained`] after the time limit.
    Drain {
        /// The migration.
        session: u64,
        /// `n_sent` of the other ends; a suspended queue pair that is not named expects nothing.
        expected: Vec<QpCount>,
        /// The limit in milliseconds.
        timeout_ms: u32,
        /// Only until the own send requests are finished; the rest will be asked for when those of the other ends are, too.
        /// Unreliable connections need that: nothing tells how much of what was sent is still to come.
        sends_only: bool,
    },
    /// These datagram queue pairs of other programs, or of its own, are elsewhere now: send there, and show what comes from
    /// there under the numbers that programs know. Answer: [`Answer::Done`].
    Moved {
        /// Which, and where they are.
        endpoints: Vec<MovedEndpoint>,
    },
    /// After a drain that came to its limit, at either end: stop these queue pairs, which are all that are not drained
    /// here, and those whose other ends are not. They neither send nor take packets until the session ends, or for ever
    /// if it replaces them. RECVs are not given to the RNIC any more. Answer: [`Answer::Stopped`].
    Stop {
        /// The migration.
        session: u64,
        /// Virtual numbers.
        qpns: Vec<u32>,
    },
    /// When both ends of all stopped connections are: find out which of the requests that are not complete were executed.
    /// Those are completed, in their turn, and the others posted again when the new queue pairs are in use. Answer:
    /// [`Answer::Settled`], or an error if it is not certain.
    Settle {
        /// The migration.
        session: u64,
        /// Where the other ends stand; each `qpn` is that of the end here.
        peers: Vec<QpProgress>,
    },
    /// In the place of [`Order::Drain`], of a suspended process: its reliable connections stand still in the middle of what is
    /// under way, and their whole state is taken along (MigrOS §3.3, "stop" and "dump"). Datagrams are drained. Answer: [`Answer::Dumped`].
    StopAndDump {
        /// The migration.
        session: u64,
        /// The limit for datagrams, in milliseconds.
        timeout_ms: u32,
    },
    /// As a partner: the other ends of these connections are elsewhere now, which the RNICs have found out between
    /// themselves. Answer: [`Answer::Done`].
    Relocate {
        /// Which, and where.
        peers: Vec<Relocated>,
    },
    /// Give the RNIC connections away, let go of everything that is not the process's own, answer, close this
    /// connection and wait at the gate. Answer: [`Answer::Quiesced`] with one descriptor per context, in the order of
    /// the road map. Nothing that the program calls may block longer than until the gate opens; data verbs never block.
    Quiesce {
        /// The migration.
        session: u64,
    },
    /// After the gate opened: take these RNIC connections, one descriptor per context. With new numbers after a move;
    /// with an empty list of contexts after a rollback: the same connections as were given away. RECVs that no message
    /// has consumed are posted; send requests stay intercepted. Answer: [`Answer::Claimed`].
    Claim {
        /// The migration.
        session: u64,
        /// The replacements, or nothing if the contexts are the old ones.
        contexts: Vec<ClaimedContext>,
        /// Tables of remote keys.
        key_tables: Vec<Vec<KeyPair>>,
    },
    /// As a partner: put the standby queue pairs in the place of the old ones and post the RECVs that no message has
    /// consumed. Send requests stay intercepted. Answer: [`Answer::Claimed`].
    Switch {
        /// The migration.
        session: u64,
        /// The moved instance's remote keys; per queue pair, which table translates them.
        key_tables: Vec<Vec<KeyPair>>,
        /// (virtual QPN, index into `key_tables`).
        tables: Vec<(u32, u32)>,
    },
    /// Post the intercepted requests, in order, and intercept no more. Answer: [`Answer::Resumed`].
    Resume {
        /// The migration.
        session: u64,
    },
    /// As a partner, at any time before `Switch`: destroy the standby queue pairs and resume on the old ones. Without
    /// effect if the session is not known. Answer: [`Answer::Done`].
    Abort {
        /// The migration.
        session: u64,
    },
    /// Let control verbs wait from now on until the session ends: the road map stays as it is. Answer: [`Answer::Done`].
    Hold {
        /// The migration.
        session: u64,
    },
    /// Find out how long a drain would take: how long it takes until all that is posted now is finished. Nothing is stopped, and
    /// the program goes on. Answer: [`Answer::DrainMeasured`].
    MeasureDrain {
        /// Of which queue pairs.
        scope: Scope,
        /// The longest time that is of interest, in milliseconds.
        limit_ms: u32,
    },
    /// Give the RNIC secrets that the other ends' RNICs share, for pause and resume. Answer: [`Answer::Done`].
    Share {
        /// Virtual numbers of reliable connections, and their secrets.
        secrets: Vec<(u32, QpSecret)>,
    },
    /// An operator's pause: let the RNIC stop these reliable connections, which stay in use. Again for what is paused already:
    /// with a new limit. Refused for what a migration has; and what is paused no migration gets. Answer: [`Answer::Done`].
    Pause {
        /// Virtual numbers.
        qpns: Vec<u32>,
        /// After so many seconds they go on by themselves.
        limit_s: u32,
    },
    /// Let what is paused of these go on. Answer: [`Answer::Done`].
    Unpause {
        /// Virtual numbers.
        qpns: Vec<u32>,
    },
    /// What the program's ids of rdma_cm need at another RNIC. From version 8 on ([`crate::CM_VERSION`]). Answer: [`Answer::CmDescribed`].
    DescribeCm,
    /// As [`Order::Describe`], by an agent that knows of contexts which their process makes again. Answer:
    /// [`Answer::DescribedAll`].
    DescribeAll,
    /// In a restored process that waits at the gate: open the devices of [`MadeAgain`] contexts, and make their objects there.
    /// Asked again, it gives the same answer. With it comes, from an agent that has one, what
    /// [`hung_up_terminal`](crate::hung_up_terminal) gives: by it the process forgets what it had. Answer: [`Answer::Made`].
    MakeAgain {
        /// The migration.
        session: u64,
    },
    /// After it, and before [`Order::Claim`]: connect the new queue pairs, with the attributes of those that they replace.
    /// Answer: [`Answer::Made`], with what could not be connected.
    ConnectMade {
        /// The migration.
        session: u64,
        /// One for each queue pair that is connected.
        peers: Vec<MadePeer>,
    },
    /// After [`Order::Suspend`]: let the other ends post markers, by which an RNIC tells that all it was given is done also where
    /// the program has not asked. Answer: [`Answer::MarkersAllowed`].
    AllowMarkers {
        /// The migration.
        session: u64,
    },
    /// Before [`Order::Drain`]: these may post markers, for their other ends allow it. Answer: [`Answer::Done`].
    Mark {
        /// The migration.
        session: u64,
        /// Virtual numbers.
        qpns: Vec<u32>,
    },
}

/// A context that nobody but its own process can make at another host: its RNIC is driven by a library in the process. The process
/// does so after it has been restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeAgain {
    /// [`crate::ContextRecord::id`].
    pub id: u32,
    /// The device's name.
    pub device: String,
    /// The name of its kernel driver, if the kernel says it.
    pub driver: Option<String>,
}

/// A context that its process has made again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeContext {
    /// [`crate::ContextRecord::id`].
    pub id: u32,
    /// The GID table of its RNIC.
    pub gids: Vec<[u8; 16]>,
    /// Its queue pairs.
    pub qps: Vec<MadeQp>,
    /// Its remote keys.
    pub keys: Vec<KeyPair>,
}

/// A queue pair of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeQp {
    /// The virtual number.
    pub qpn: u32,
    /// By which GID it is connected, and its physical number.
    pub own: Endpoint,
    /// The PSN with which it starts to send.
    pub sq_psn: u32,
}

/// To what a queue pair of it is to be connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadePeer {
    /// As of a standby queue pair.
    pub peer: StandbyPeer,
    /// Which of [`Order::Claim`]'s key tables translates its remote keys; `None`: as before the move.
    pub key_table: Option<u32>,
}

/// A guest library's answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Answer {
    /// It failed; what it had begun is undone.
    Error {
        /// What and why, for an operator.
        message: String,
    },
    /// Done.
    Done,
    /// The road map.
    Described(crate::RoadMap),
    /// The standby queue pairs, in the order asked for.
    StandbyPrepared(Vec<StandbyQp>),
    /// New send requests are intercepted.
    Suspended {
        /// `n_sent` of each suspended queue pair that is connected; final from now on.
        sent: Vec<QpCount>,
        /// The road map's version, which shows whether anything changed since it was told.
        road_map_version: u64,
    },
    /// Nothing is in flight.
    Drained,
    /// These queue pairs are not drained after the time limit; everything is as before.
    Undrained {
        /// Virtual numbers.
        qpns: Vec<u32>,
        /// What is left, for an operator.
        left: String,
    },
    /// What was posted when it was asked for is finished.
    DrainMeasured {
        /// After so many microseconds; `None` if it was not within the limit.
        us: Option<u64>,
    },
    /// The queue pairs are stopped, in the order asked for.
    Stopped(Vec<QpProgress>),
    /// The connections stand still, and the process has their images.
    Dumped {
        /// How many.
        connections: u64,
        /// Requests that are under way, which move as they are.
        requests: u64,
        /// Bytes of the connections' images.
        bytes: u64,
    },
    /// What becomes of the requests of stopped queue pairs.
    Settled {
        /// They were not executed, or are READs without their data: they will be posted again.
        replayed: u64,
        /// They were executed, and only their completions will be made.
        completed: u64,
    },
    /// Everything was let go.
    Quiesced,
    /// The new queues are in use.
    Claimed {
        /// RECVs that were posted again.
        replayed_receives: u64,
    },
    /// The program's requests reach the RNIC again.
    Resumed {
        /// Send requests that were intercepted and have now been posted.
        intercepted: u64,
        /// The RNIC of one of its opened devices died on the way: the program has lost the connections there.
        lost_rnic: bool,
    },
    /// The road map, and which of its contexts their process makes again.
    DescribedAll {
        /// The road map.
        road_map: crate::RoadMap,
        /// Some of its contexts.
        made_again: Vec<MadeAgain>,
    },
    /// The contexts stand ready.
    Made {
        /// Those that could be made.
        contexts: Vec<MadeContext>,
        /// What could not, for an operator: the program has lost these as if their RNICs had died.
        lost: Vec<String>,
    },
    /// The other ends of these queue pairs may post markers.
    MarkersAllowed {
        /// Virtual numbers.
        qpns: Vec<u32>,
    },
    /// What the RNIC says of its ids; none if it has no context for them. With one, [`Answer::Quiesced`] has one descriptor more, which
    /// comes last.
    CmDescribed(Option<Vec<u8>>),
}
