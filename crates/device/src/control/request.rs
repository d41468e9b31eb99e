//! What the RNIC is asked for.

use serde::{Deserialize, Serialize};
use strum::{EnumDiscriminants, EnumIter, IntoStaticStr};
use verbatim_seqpacket::Carried;

use super::{
    Access, AddressVector, CmRequest, ForwardedQp, MwState, MwType, PeerAnswer, PeerPair, QpAttr, QpAttrMask,
    QpCap, QpClass, QpSecret, QpType, RestoredQp, Segment, SrqAttr, Translation,
};

/// A request to the RNIC. Handles are the RNIC's numbers, unique within the context for PDs and CQs, within the RNIC
/// for QPs and memory keys.
///
/// Queue pair numbers and memory keys, which peers know, can be asked for: by root, over the RNIC's own control socket, in the
/// process that has opened the context, until that is attached to (an agent makes objects for a program that comes). Otherwise it is refused with `EPERM`; with
/// `EEXIST` if another object has the number or a key with the same upper 24 bits, with `EINVAL` if none can have it. What
/// was destroyed can be asked for at once, though it is not given unasked for long.
///
/// Who may send which request is in one place, `verbatim-nic`'s `authority`.
#[derive(Debug, Clone, Serialize, Deserialize, EnumDiscriminants)]
#[strum_discriminants(name(RequestKind), derive(EnumIter, IntoStaticStr, Hash))]
#[strum_discriminants(doc = "The kinds of [`Request`], to go through all of them.")]
#[strum_discriminants(allow(missing_docs, reason = "each is named after its request"))]
pub enum Request {
    /// The first request on a connection: makes a context. Answered by [`Reply::Context`](super::Reply::Context) with two descriptors: the
    /// arena (a sealed memfd) and the doorbell (an eventfd that wakes the RNIC).
    ///
    /// One descriptor may come with it: a `SOCK_SEQPACKET` Unix socket on which the RNIC sends [`AsyncEvent`](super::AsyncEvent)s, never
    /// waiting for room. Without it nobody is told.
    OpenContext {
        /// [`VERSION`](super::VERSION) of the asking side.
        version: u32,
        /// A name for statistics and logs: the program's, or the instance's.
        name: String,
    },
    /// On a connection that was handed over: answered as `OpenContext` was, and from now on [`Backing::Process`](super::Backing::Process) means
    /// the memory of the process that sent this request. A descriptor is as with `OpenContext`, in the place of the
    /// earlier one.
    AttachContext {
        /// [`VERSION`](super::VERSION) of the asking side.
        version: u32,
    },
    /// From now on, until `AttachContext`, the context's queue pairs take no packet in: they are lost, as on any link. So
    /// nothing changes while nobody looks after it, whatever its peers do. Answered by [`Reply::Done`](super::Reply::Done).
    ParkContext,
    /// From root of the host only, on a connection without a context: accept programs at this listening socket
    /// too (one descriptor), in the place of an earlier one of the same instance, until `RemoveListener`. It outlives the connection.
    /// Answered by [`Reply::Done`](super::Reply::Done).
    ///
    /// Whoever asks keeps no copy of the descriptor. So when the RNIC dies, who connects is refused by the kernel, and nobody waits
    /// for an answer that never comes.
    AddListener {
        /// Whose it is, at most [`MAX_INSTANCE_NAME`](super::MAX_INSTANCE_NAME) bytes.
        instance: String,
    },
    /// Answered by [`Reply::Pd`](super::Reply::Pd).
    AllocPd,
    /// Answered by [`Reply::Done`](super::Reply::Done); `EBUSY` while in use.
    DeallocPd {
        /// Which.
        pd: u32,
    },
    /// Answered by [`Reply::Mr`](super::Reply::Mr). Descriptors: one per distinct file.
    RegMr {
        /// The protection domain.
        pd: u32,
        /// Start in the program's address space.
        address: u64,
        /// Length in bytes.
        length: u64,
        /// The address that keys refer to (`ibv_reg_mr_iova`); equal to `address` for `ibv_reg_mr`.
        iova: u64,
        /// What the keys allow.
        access: Access,
        /// Where the bytes are.
        segments: Vec<Segment>,
        /// The key that is asked for, local and remote.
        key: Option<u32>,
    },
    /// Answered by [`Reply::Done`](super::Reply::Done).
    DeregMr {
        /// The region's local key.
        lkey: u32,
    },
    /// Changes a region under its keys (`ibv_rereg_mr`). Answered by [`Reply::Mr`](super::Reply::Mr) with the same keys. Descriptors as
    /// with `RegMr`, if `translation` is there.
    ReregMr {
        /// The region's local key.
        lkey: u32,
        /// Another protection domain.
        pd: Option<u32>,
        /// Other rights.
        access: Option<Access>,
        /// Other memory.
        translation: Option<Translation>,
    },
    /// Answered by [`Reply::Mw`](super::Reply::Mw). A type 1 window starts unbound and invalid.
    AllocMw {
        /// The protection domain.
        pd: u32,
        /// Its type.
        mw_type: MwType,
        /// The remote key that is asked for; its low eight bits change with each bind.
        rkey: Option<u32>,
    },
    /// Answered by [`Reply::Done`](super::Reply::Done), bound or not.
    DeallocMw {
        /// The window's remote key; its low eight bits do not count, since the last bind may have failed or not.
        rkey: u32,
    },
    /// Answered by [`Reply::MwState`](super::Reply::MwState).
    QueryMw {
        /// The window's remote key; its low eight bits do not count.
        rkey: u32,
    },
    /// Makes a window what another one was, whatever it is now; for a program that has moved. All that a bind is refused for
    /// this is refused for. Answered by [`Reply::Done`](super::Reply::Done).
    RestoreMw {
        /// With the window's index and the other's tag in its key.
        state: MwState,
    },
    /// Comes with one descriptor: a `SOCK_SEQPACKET` Unix socket on which the RNIC sends [`CompletionEvent`](super::CompletionEvent)s; it never
    /// waits for room: what does not fit it sends later. Answered by [`Reply::CompChannel`](super::Reply::CompChannel).
    CreateCompChannel,
    /// On a connection that was handed over: from now on the channel's events go to the descriptor that comes with it. Answered
    /// by [`Reply::Done`](super::Reply::Done).
    AttachCompChannel {
        /// Which.
        channel: u32,
    },
    /// Answered by [`Reply::Done`](super::Reply::Done); `EBUSY` while a CQ uses it.
    DestroyCompChannel {
        /// Which.
        channel: u32,
    },
    /// Answered by [`Reply::Cq`](super::Reply::Cq).
    CreateCq {
        /// The least number of entries.
        entries: u32,
        /// Where its events go, if it is ever armed ([`crate::layout::CqHeader::armed`]).
        channel: Option<u32>,
        /// What its events say in the place of its number: the program's own, which it keeps when the queue is made again
        /// elsewhere.
        event: Option<u32>,
    },
    /// Answered by [`Reply::Cq`](super::Reply::Cq) with a new place, where the entries that nobody has read are, in order, from counter 0
    /// on. The caller reads nothing from the queue meanwhile. `EINVAL` if the entries would not fit.
    ResizeCq {
        /// Which.
        cq: u32,
        /// The least number of entries.
        entries: u32,
    },
    /// Answered by [`Reply::Done`](super::Reply::Done); `EBUSY` while a QP uses it.
    DestroyCq {
        /// Which.
        cq: u32,
    },
    /// Answered by [`Reply::Qp`](super::Reply::Qp).
    CreateQp {
        /// The protection domain.
        pd: u32,
        /// Where send completions go.
        send_cq: u32,
        /// Where receive completions go.
        recv_cq: u32,
        /// The transport.
        qp_type: QpType,
        /// What is asked for; the answer tells what was given.
        cap: QpCap,
        /// The shared receive queue in place of an own one; `cap.max_recv_wr` and `cap.max_recv_sge` do not count.
        srq: Option<u32>,
        /// The number that is asked for.
        qpn: Option<u32>,
    },
    /// Answered by [`Reply::Srq`](super::Reply::Srq).
    CreateSrq {
        /// The protection domain.
        pd: u32,
        /// What is asked for, its limit included; the answer tells what was given.
        attr: SrqAttr,
    },
    /// Arms the limit (`IBV_SRQ_LIMIT`). Answered by [`Reply::Done`](super::Reply::Done).
    ModifySrq {
        /// Which.
        srq: u32,
        /// When so few requests are left, [`AsyncEventType::SrqLimitReached`](super::AsyncEventType::SrqLimitReached) is sent, once. 0 disarms.
        limit: u32,
    },
    /// Answered by [`Reply::Srq`](super::Reply::Srq).
    QuerySrq {
        /// Which.
        srq: u32,
    },
    /// Answered by [`Reply::Done`](super::Reply::Done); `EBUSY` while a QP uses it.
    DestroySrq {
        /// Which.
        srq: u32,
    },
    /// Answered by [`Reply::Ah`](super::Reply::Ah).
    CreateAh {
        /// The protection domain.
        pd: u32,
        /// The way.
        av: AddressVector,
    },
    /// Answered by [`Reply::Done`](super::Reply::Done). Requests that were posted with it before may fail.
    DestroyAh {
        /// Which.
        ah: u32,
    },
    /// Lets a UD queue pair receive what is sent to a multicast group. Answered by [`Reply::Done`](super::Reply::Done).
    AttachMcast {
        /// Which queue pair.
        qpn: u32,
        /// The group, network byte order.
        gid: [u8; 16],
    },
    /// Undoes `AttachMcast`. Answered by [`Reply::Done`](super::Reply::Done).
    DetachMcast {
        /// Which queue pair.
        qpn: u32,
        /// The group, network byte order.
        gid: [u8; 16],
    },
    /// The counters, over the RNIC's own control socket, on a connection that was not handed over. Answered by
    /// [`Reply::Statistics`](super::Reply::Statistics). Root sees all queue pairs, others those of processes of their own user.
    QueryStatistics {
        /// Queue pairs with at least this number.
        from_qpn: u32,
    },
    /// From root of the host only, on a connection without a context: from now on the RNIC sends a copy of every packet
    /// that it sends or takes in, as [`Captured`](super::Captured), on this connection, until that is closed. It never waits for room: what does
    /// not fit is counted. Answered by [`Reply::Done`](super::Reply::Done).
    StartCapture {
        /// Bytes of each packet, from its IP header on; at least 64.
        snap_bytes: u32,
        /// Only packets of this queue pair.
        qpn: Option<u32>,
    },
    /// Answered by [`Reply::Done`](super::Reply::Done), `EINVAL` for a transition that the standard does not allow (IBA Vol 1 §11.2.5.2).
    ModifyQp {
        /// Which.
        qpn: u32,
        /// Which fields count.
        mask: QpAttrMask,
        /// Their values.
        attr: QpAttr,
    },
    /// Answered by [`Reply::QpAttr`](super::Reply::QpAttr).
    QueryQp {
        /// Which.
        qpn: u32,
    },
    /// The states of queue pairs, all of the same moment. Answered by [`Reply::QpStates`](super::Reply::QpStates), or by the first error.
    QueryQps {
        /// Which, at most [`MOST_QPS`](super::MOST_QPS).
        qpns: Vec<u32>,
    },
    /// From now on, until `RestartQp`, a reliable connection neither sends nor takes packets, and completes nothing: what
    /// comes for it is lost, as on any link. One in ERR stays as it is. Answered by [`Reply::QpStopped`](super::Reply::QpStopped); asked again, it
    /// answers the same. `EINVAL` for other transports.
    StopQp {
        /// Which.
        qpn: u32,
    },
    /// Goes on after `StopQp`, as if what was under way then had been lost. Answered by [`Reply::Done`](super::Reply::Done).
    RestartQp {
        /// Which.
        qpn: u32,
    },
    /// The secret that this RNIC shares with the partner's, for pause and resume: the partner's RNIC is given the same key, and
    /// the other `first`. Without one nothing of that is sent. It ends with the connection (RESET), and moves with an image.
    /// Answered by [`Reply::Done`](super::Reply::Done); `EINVAL` for other transports than the reliable connection.
    SetQpSecret {
        /// Which.
        qpn: u32,
        /// The secret; `None` takes it away.
        secret: Option<QpSecret>,
    },
    /// From now on, until `ResumeQps`, reliable connections stand still (MigrOS §3.2), all at the same moment: they take nothing
    /// in, complete nothing, and tell their partners, if there is a secret, that they are stopped: those then wait. Unlike after
    /// `StopQp`, a connection may go on at another RNIC. It does so even if the context is parked. Answered by [`Reply::Done`](super::Reply::Done),
    /// also for what was paused already; else by the first error, `EINVAL` for other transports, and in a state in which nothing
    /// can be sent or received, when all the others have been paused.
    PauseQps {
        /// Which, at most [`MOST_QPS`](super::MOST_QPS).
        qpns: Vec<u32>,
        /// After so many seconds from now each goes on by itself, as by `ResumeQps`. The latest request counts.
        limit_s: Option<u32>,
    },
    /// The whole states of connections that `PauseQps` has stopped. Answered by [`Reply::QpImages`](super::Reply::QpImages), with a descriptor if they
    /// are long; else by the first error, `EBUSY` if one runs.
    DumpQps {
        /// Which, at most [`MOST_QPS`](super::MOST_QPS).
        qpns: Vec<u32>,
    },
    /// Gives reliable connections in RESET the states of images. They are then paused, as those were that the images are of.
    ///
    /// The rings of each must hold, oldest first, the requests that the [`QpImage`](crate::image::QpImage) names (`requests` in the send ring; `receive` in
    /// its own receive ring) and behind them those that were not taken: the RNIC takes the named ones off, and only looks
    /// at their `wr_id`s. Answered by [`Reply::QpsRestored`](super::Reply::QpsRestored): one is refused with `EINVAL` for an image that is damaged, or does
    /// not fit the queue pair, its rings or this RNIC: then nothing has changed of it. `EINVAL` for all if the lengths are wrong.
    RestoreQps {
        /// Which, at most [`MOST_QPS`](super::MOST_QPS).
        qps: Vec<RestoredQp>,
        /// [`QpImage::image`](crate::image::QpImage::image) of each, one behind the other. A descriptor may bring that of one that
        /// is too long for a message, and of one only ([`crate::image`]).
        images: Carried,
    },
    /// They go on after `PauseQps` or `RestoreQps`, all at the same moment: with a secret, as soon as the partner has acknowledged
    /// where. Answered by [`Reply::Done`](super::Reply::Done) at once; else by the first error, when all the others go on.
    ResumeQps {
        /// Which, at most [`MOST_QPS`](super::MOST_QPS).
        qpns: Vec<u32>,
    },
    /// Paused connections go on at another RNIC: what the partner of one says of its own new place, if that has moved at the same
    /// time, is passed on there, also when the queue pair is destroyed. Answered by [`Reply::Done`](super::Reply::Done); else by the first error,
    /// `EBUSY` if one is not paused, `ENOMEM` if there are too many such entries, when all the others have theirs.
    ForwardQps {
        /// Which, at most [`MOST_QPS`](super::MOST_QPS).
        qps: Vec<ForwardedQp>,
        /// For how long.
        seconds: u32,
    },
    /// Answered by [`Reply::Done`](super::Reply::Done). Its completions that are still in the ring stay there.
    DestroyQp {
        /// Which.
        qpn: u32,
    },
    /// From root of the host only, on a connection without a context: whose queue pairs are these? Answered by [`Reply::Owners`](super::Reply::Owners).
    QueryOwners {
        /// At most [`MAX_OWNERS`].
        qpns: Vec<u32>,
    },
    /// From root of the host only, on a connection without a context: an instance's listener is closed; connections that came over it
    /// stay. Answered by [`Reply::Done`](super::Reply::Done), also where there is none.
    RemoveListener {
        /// Whose.
        instance: String,
    },
    /// From root of the host only, on a connection without a context: which instances have a listener? Answered by
    /// [`Reply::Listeners`](super::Reply::Listeners).
    QueryListeners {
        /// Only those whose names come after this one.
        after: Option<String>,
    },
    /// Who goes first when several queue pairs have something to send. The class is the queue pair's until it is changed or the
    /// queue pair is destroyed, RESET or not; no image has it. Answered by [`Reply::Done`](super::Reply::Done); `EINVAL` for a transport other than
    /// the reliable connection in the background. From version 12 on ([`CLASS_VERSION`](super::CLASS_VERSION)).
    SetQpClass {
        /// Which.
        qpn: u32,
        /// Its class from now on.
        class: QpClass,
    },
    /// Connections by address and port. Answered by [`Reply::Cm`](super::Reply::Cm). From version 12 on
    /// ([`CM_VERSION`](super::CM_VERSION)).
    Cm(CmRequest),
    /// From root of the host only, on a connection without a context: from now on a reliable connection to another host sends only
    /// after the other end is known to name it, and the RNIC asks that as [`PeerNews`](super::PeerNews) on this connection, which has no
    /// answers beside the one to this request. It takes the place of an earlier one. When it is closed, the questions wait for the next.
    /// Answered by [`Reply::Done`](super::Reply::Done).
    TakePeerQuestions,
    /// From root of the host only, on a connection without a context: the answers to questions. Those to a question that does not stand
    /// any more change nothing. Answered by [`Reply::Done`](super::Reply::Done).
    AnswerPeerQuestions {
        /// At most [`MAX_PEER_PAIRS`](super::MAX_PEER_PAIRS).
        answers: Vec<PeerAnswer>,
    },
    /// From root of the host only, on a connection without a context: queue pairs of another host name these of this RNIC. Where the
    /// answer is *named*, the number at this RNIC is given to no other queue pair before the other host has heard that it names that
    /// one no more. Answered by [`Reply::PeerStandings`](super::Reply::PeerStandings).
    MeetPeers {
        /// At most [`MAX_PEER_PAIRS`](super::MAX_PEER_PAIRS).
        pairs: Vec<PeerPair>,
    },
    /// From root of the host only, on a context of its own that is not handed over: the host's own services use it, and nobody is asked
    /// whether the other ends of its queue pairs name them. Answered by [`Reply::Done`](super::Reply::Done).
    ServeHost,
    /// From root of the host only, on a connection without a context: the other ends name these of this RNIC no more. Nothing is sent
    /// to them from now on, and no answer that is under way counts. Answered by [`Reply::Done`](super::Reply::Done).
    PeersGone {
        /// At most [`MAX_PEER_PAIRS`](super::MAX_PEER_PAIRS).
        pairs: Vec<PeerPair>,
    },
    /// From root of the host only, on a connection without a context: the RNICs of the other ends know that these of this RNIC name
    /// them no more ([`PeerNews::Gone`](super::PeerNews::Gone)). Answered by [`Reply::Done`](super::Reply::Done).
    PeersHeard {
        /// At most [`MAX_PEER_PAIRS`](super::MAX_PEER_PAIRS).
        pairs: Vec<PeerPair>,
    },
}

/// How many queue pairs one [`Request::QueryOwners`] can name.
pub const MAX_OWNERS: usize = 8192;
