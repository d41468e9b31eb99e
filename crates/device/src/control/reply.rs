//! What the RNIC answers.

use serde::{Deserialize, Serialize};
use verbatim_seqpacket::Carried;

use super::{
    CmReply, DeviceAttr, MwState, PeerStanding, PortAttr, QpAttr, QpCap, QpPosition, QpState, QpStatistics,
    SrqAttr,
};

/// An answer of the RNIC.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Reply {
    /// The request failed and changed nothing.
    Error {
        /// A positive errno.
        errno: i32,
        /// What was wrong, for logs.
        message: String,
    },
    /// Nothing to say but that it is done.
    Done,
    /// A context, with the descriptors of its arena and doorbell.
    Context {
        /// What the device is and can do.
        device: DeviceAttr,
        /// Its only port.
        port: PortAttr,
        /// The arena's length in bytes.
        arena_bytes: u64,
    },
    /// A protection domain.
    Pd {
        /// Its number.
        pd: u32,
    },
    /// A memory region.
    Mr {
        /// Local key.
        lkey: u32,
        /// Remote key.
        rkey: u32,
    },
    /// A completion queue.
    Cq {
        /// Its number.
        cq: u32,
        /// How many entries it has: what was asked for. Its ring has the next power of two.
        entries: u32,
        /// Where in the arena it is, see [`crate::layout::CqLayout`].
        offset: u64,
    },
    /// A queue pair.
    Qp {
        /// Its number.
        qpn: u32,
        /// What was given: at least what was asked for.
        cap: QpCap,
        /// Its doorbell bit, see [`crate::layout::ContextPage`].
        slot: u32,
        /// Where in the arena it is, see [`crate::layout::QpLayout`].
        offset: u64,
    },
    /// A shared receive queue.
    Srq {
        /// Its number.
        srq: u32,
        /// What was given, at least what was asked for; from a query, the limit as it is now.
        attr: SrqAttr,
        /// Where in the arena it is, see [`crate::layout::RecvLayout::shared`].
        offset: u64,
    },
    /// An address handle.
    Ah {
        /// Its number, for [`crate::layout::SendWqe::ah`].
        ah: u32,
    },
    /// A memory window.
    Mw {
        /// Its remote key, which allows nothing before the window is bound.
        rkey: u32,
    },
    /// How a memory window is.
    MwState(MwState),
    /// A completion channel.
    CompChannel {
        /// Its number.
        channel: u32,
    },
    /// Counters.
    Statistics {
        /// The device's.
        device: Vec<(String, u64)>,
        /// Queue pairs, by number.
        qps: Vec<QpStatistics>,
        /// Ask again from this number on.
        next: Option<u32>,
    },
    /// A queue pair's attributes.
    QpAttr {
        /// All of them.
        attr: QpAttr,
        /// Its limits.
        cap: QpCap,
        /// [`Request::PauseQps`](super::Request::PauseQps) has stopped it.
        paused: bool,
    },
    /// The states of queue pairs, in the order asked for.
    QpStates(Vec<QpState>),
    /// Whose the queue pairs are, in the order asked for.
    Owners(Vec<QpOwner>),
    /// Where a queue pair stands.
    QpStopped(QpPosition),
    /// [`QpImage`](crate::image::QpImage)s, in the order asked for, encoded ([`crate::image`]). They are those of the first ones: at
    /// least one, and all unless they are long.
    QpImages(Carried),
    /// All but these were given the states of their images.
    QpsRestored {
        /// By their places in the request, with an errno.
        refused: Vec<(u32, i32)>,
        /// Why the first was.
        message: String,
    },
    /// Instances that have a listener, by name.
    Listeners {
        /// Their names.
        instances: Vec<String>,
        /// There are more: ask again from behind the last one.
        more: bool,
    },
    /// To a [`Request::Cm`](super::Request::Cm). From version 12 on ([`CM_VERSION`](super::CM_VERSION)).
    Cm(CmReply),
    /// How queue pairs stand to those that name them, in the order asked for.
    PeerStandings(Vec<PeerStanding>),
}

/// Whose a queue pair is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum QpOwner {
    /// There is no such queue pair.
    None,
    /// The process that opened or attached its context has ended, or cannot be seen by the RNIC.
    Unknown,
    /// This process, in the RNIC's PID namespace. It runs.
    Process(i32),
}
