//! The software RNIC: a process that behaves like a RoCEv2 NIC.
//!
//! It owns the state of its connections, which programs cannot see, reads and writes registered memory by itself, and
//! speaks standard packets over UDP port 4791. The transport (`verbatim-roce`) decides; this crate gives it sockets,
//! memory, rings and a clock.
//!
//! ```text
//!  program                                     this process, one thread, one loop (engine.rs)
//!  ───────                                     ─────────────────────────────────────────────
//!  control socket ── requests, answers ──────► authority.rs  requests/  objects.rs  context.rs
//!  arena: doorbells, send and receive rings ─► qp/host.rs    ◄──► verbatim_roce::Qp
//!         completion queues ◄───────────────── objects/queues.rs           │ ▲
//!  sockets of events ◄──────────────────────── outbox.rs                   │ │
//!  registered memory ◄───────────────────────► memory/                     ▼ │
//!                                              engine/transmit.rs  engine/receive.rs
//!                                                        └── socket.rs (GSO, GRO) ──► partner
//!                                    queue pair 1: cm.rs ◄──► verbatim_cm::Cm
//! ```
//!
//! It takes nothing on trust: not the rings, not the control messages, not the memory's files, not the packets. A
//! program that misbehaves loses its own queue pairs; one that dies leaves nothing behind, since all it had goes with
//! its control connection. There is no lock and no second thread. Modules that talk to the kernel or hold shared
//! memory may use `unsafe`, all others may not.
//!
//! Not here: XRC, alternate paths, changing the limits of a queue pair, flow labels of IPv6, and addresses that the
//! interface gets after the start. They are refused with `EOPNOTSUPP` or do not exist in the control messages.
//!
//! Start at [`run`], or at [`Nic`] to run one in a thread of your own.

#![deny(unsafe_code)]

mod account;
#[allow(unsafe_code)]
mod arena;
mod authority;
mod budget;
mod cm;
mod config;
mod confirming;
mod context;
mod device;
#[allow(unsafe_code)]
mod ends;
mod engine;
mod error;
#[allow(unsafe_code)]
mod interface;
mod jail;
mod leftovers;
mod link;
mod memory;
mod multicast;
mod named;
mod names;
mod objects;
mod outbox;
mod poller;
#[allow(unsafe_code)]
mod priority;
mod qp;
mod requests;
mod run_queue;
#[allow(unsafe_code)]
mod signals;
#[allow(unsafe_code)]
mod socket;
mod starvation;
#[allow(unsafe_code)]
mod stats;
mod table;
mod tenant;
mod timers;
mod wqe;

pub use config::{HostNumber, Limits, NicConfig, PerProgram, Port, TenantLimits};
pub use engine::Nic;
pub use error::NicError;
pub use jail::calls;
pub use stats::{NicCounters, NicStats, STATS_NAME, StatsReader};

/// Runs an RNIC until the process gets SIGTERM or SIGINT. One that is [jailed](NicConfig::jailed) takes the whole process into its jail.
pub fn run(config: NicConfig) -> Result<(), NicError> {
    let stop = signals::termination()?;
    signals::raise_descriptor_limit();
    let (is_locked, is_jailed) = (config.locked, config.jailed);
    let filtered = config.filters_users.then(|| config.runtime_dir.clone());
    // Before it has anything that a process of its own should not have.
    let leftovers = is_jailed
        .then(|| leftovers::Leftovers::watch(&config.runtime_dir))
        .flatten();
    match is_locked {
        true => verbatim_paging::enter(verbatim_paging::Urgency::RealTime)
            .iter()
            .for_each(|line| tracing::warn!("{line}")),
        false => priority::raise(config.nice),
    }
    if let Some(core) = config.core {
        priority::keep_to(core)?;
    }
    let mut nic = Nic::new(config)?;
    if is_locked && let Some(line) = verbatim_paging::lock() {
        tracing::warn!("{line}");
    }
    let filter = filtered.and_then(|folder| filter_users(&folder));
    if is_jailed {
        jail::enter(is_locked);
    }
    let ended = nic.run(&stop);
    if let Some(leftovers) = leftovers {
        // In its jail it cannot do that itself.
        leftovers.remove(filter.map(verbatim_filter::PortFilter::leave));
    }
    ended
}

/// Without the right to do so, or without nft(8), the RNIC works all the same, and users can write packets to partners.
fn filter_users(folder: &std::path::Path) -> Option<verbatim_filter::PortFilter> {
    let user = rustix::process::geteuid().as_raw();
    match verbatim_filter::PortFilter::put(folder, user) {
        Ok(filter) => Some(filter),
        Err(error) => {
            tracing::warn!(%error, "users of this host can send packets to RNICs in the name of this one: no filter could be put in front of UDP port 4791");
            None
        }
    }
}
