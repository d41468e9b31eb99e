//! The contract between the guest library in a program and the agent of its host.
//!
//! The guest library connects to `agent.sock` in its runtime folder ([`RUNTIME_DIR`] unless `VERBATIM_RUNTIME` names
//! another) when the program first opens a device, sends a [`Greeting`] and waits for an [`Order`]. Each order has one
//! [`Answer`]. An application thread that needs to know where a peer lives today opens a second, short connection
//! ([`Greeting::Resolve`]).
//!
//! ```text
//!  moved instance                source agent              partner's agent            partner
//!   Describe  ◄──────────────────────┤
//!                                    ├── (agents) ─────────────────► PrepareStandby, ConnectStandby ─►
//!   Suspend   ◄──────────────────────┤                             Suspend ─►      n_sent each way
//!   Drain     ◄──────────────────────┤                             Drain ─►        n_recv = n_sent
//!  (Stop, Settle ◄───────────────────┤                             Stop, Settle ─► past the limit of the drain)
//!   Quiesce   ◄──────────────────────┤      gives its RNIC connections, closes its sockets, waits at the gate
//!   ── frozen, dumped, restored; the destination's agent opens the gate ──
//!   Greeting, Claim ◄── destination's agent                        Switch ─►       RECVs replayed on both sides
//!   Resume    ◄──────────────────────┤                             Resume ─►       intercepted requests replayed
//! ```
//! When the migration is rolled back: the source's agent opens the gate and sends [`Order::Claim`] with the same
//! connections and no new numbers; the partner gets [`Order::Abort`]. Both then take up where they stopped.
//!
//! *Virtual* numbers are those that the program knows; *physical* ones are the RNIC's. They are equal until an instance
//! has moved.

use verbatim_versions::{Versioned, Versions};

pub mod ahead;
mod gate;
mod hung_up;
mod message;
mod orders;
mod road_map;

pub use gate::Gate;
pub use hung_up::hung_up_terminal;
pub use message::{Arrived, MAX_LONG_BYTES, arrived, recv, recv_as, recv_at_most, send, send_as};
pub use orders::{
    Answer, ClaimedChannel, ClaimedContext, ClaimedCq, ClaimedMr, ClaimedMw, ClaimedPd, ClaimedQp,
    ClaimedSrq, Greeting, KeyPair, MadeAgain, MadeContext, MadePeer, MadeQp, MovedEndpoint, Order, QpCount,
    QpProgress, Relocated, Resolved, Scope, StandbyPeer, StandbyQp,
};
pub use road_map::{
    ChannelRecord, ContextRecord, CqRecord, Endpoint, MrRecord, MwRecord, PdRecord, QpRecord, RoadMap,
    SegmentRecord, SrqRecord,
};

/// The version of this contract. What is sent under it is recorded, and `docs/versions.md` says when it rises.
///
/// A guest library asks its agent something ([`Greeting::Ways`]) in one version after the other, from its newest down, until it is
/// answered, and greets for its process in that one: agents of the release before remember who greets in another. The
/// agent takes any in its range, and then speaks that one to that process.
pub const VERSION: u32 = 8;

/// The first version with [`Order::DescribeCm`].
pub const CM_VERSION: u32 = 8;

/// [`ClaimedContext::id`] of the context that the channels of rdma_cm share. It is in no road map; its connection comes last.
pub const CM_CONTEXT: u32 = u32::MAX;

/// The oldest version that is spoken, too. A container keeps the guest library that it started with: containers of a
/// release whose version is below this have to be started again.
pub const OLDEST: u32 = 7;

/// What a guest library speaks that greets with `version`: those of this release speak the earlier ones, too.
pub fn spoken_by_library(version: u32) -> Versions {
    Versions::new(OLDEST.min(version), version)
}

/// Both.
pub const VERSIONS: Versions = Versions::new(OLDEST, VERSION);

impl Versioned for Order {}
impl Versioned for Answer {}
impl Versioned for Resolved {}

/// The runtime folder as a program in a container sees it.
pub const RUNTIME_DIR: &str = "/run/verbatim";

/// The environment variable that names another runtime folder.
pub const RUNTIME_DIR_VARIABLE: &str = "VERBATIM_RUNTIME";

/// The agent's socket in a runtime folder.
pub const SOCKET_NAME: &str = "agent.sock";

/// The file of the [`Gate`] in a runtime folder.
pub const GATE_NAME: &str = "gate";

/// The folder of adopted memory in a runtime folder; one file per process, named by its PID in its own namespace.
pub const MEMORY_DIR: &str = "mem";
