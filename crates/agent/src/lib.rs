//! The host agent: knows the programs on its host that use verbs, and moves instances between hosts.
//!
//! ```text
//!  verbatim (CLI) ── api.sock ──► api          Control service
//!                                  │
//!                                  ▼
//!                               session::source ── peers ──► session::destination   on the destination's agent
//!                                  │      └──────────────► session::partner       on each partner's agent
//!                                  ▼
//!            guests (agent.sock) · standby (nic.sock) · memory · verbatim-container (runc, CRIU, network)
//! ```
//!
//! One migration is one session, driven by its source ([`session`]). Start at [`run`], or at
//! [`client::Client`] for the other end of `api.sock`.

mod agent;
mod allocator;
mod api;
mod authority;
mod behind;
mod beneath;
mod caller;
pub mod client;
mod config;
mod confirm_peers;
mod confirming;
mod datagrams;
mod directory;
pub mod faults;
mod forwarding;
#[doc(hidden)]
pub mod fuzzing;
mod gids;
mod guests;
mod held;
mod identity;
mod instances;
mod journal;
pub mod keeper;
mod kernel_rnics;
mod load;
mod memory;
mod method;
mod mtu;
mod nic_listeners;
mod own_files;
mod own_state;
mod pause;
mod peer_questions;
mod peer_service;
mod peers;
mod protocol;
mod quotas;
#[cfg(test)]
mod recorded;
pub mod report;
pub mod rpcs;
mod run;
mod secrets;
mod session;
mod standby;
#[cfg(test)]
mod testing;
pub mod trial;
mod turns;
mod vacant;
mod whole;

/// The gRPC messages and services.
#[allow(
    missing_docs,
    clippy::all,
    reason = "generated; the documentation is in proto/"
)]
pub mod proto {
    tonic::include_proto!("verbatim.v1");
}

pub use allocator::share_freed_memory;
pub use config::Config;
pub use confirm_peers::ConfirmPeers;
pub use protocol::{PROTOCOL, PROTOCOLS};
pub use run::{raise_priority, run};

/// Usual default of the bytes that an instance may have in files of its own.
pub fn usual_instance_files() -> anyhow::Result<u64> {
    let room = memory::promised::Room::of_host(1.0)?;
    Ok(own_files::usual(room.total))
}

/// The TCP port on which agents listen for each other.
pub const PORT: u16 = 4793;

/// The command line's socket in the runtime folder.
pub const API_SOCKET_NAME: &str = "api.sock";
