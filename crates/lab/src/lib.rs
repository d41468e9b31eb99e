//! Virtual hosts on one machine: what the demo, the end-to-end tests and the benches run on.
//!
//! A *lab* is one supervisor process and one process tree per *host*. Each host has its own network, mount, pid, UTS
//! and IPC namespace, its own tmpfs on `/run`, and runs the services it was given (`verbatim nic`, `verbatim agent`)
//! with the same paths as on a real host. The hosts hang on one Ethernet switch:
//!
//! ```text
//!  machine ─ `verbatim lab up` ──starts──► supervisor (daemon; its network namespace holds the bridge `switch`)
//!                                           │ control.sock            │ port1        │ port2        │ port3
//!                                  ┌────────┴───────┐        ┌────────┴──────┐  ┌────┴────┐    ┌────┴────┐
//!                                  │ CLI, tests     │        │ src           │  │ dst     │    │ peer    │
//!                                  └────────────────┘        │ uplink ─ br0  │  │ …       │    │ …       │
//!                                                            │ 10.77.0.1/16  │  └─────────┘    └─────────┘
//!                                                            │ pid 1: init   │
//!                                                            │  ├ nic, agent │
//!                                                            └───────────────┘
//! ```
//!
//! # Invariants
//!
//! - Nothing of a lab has a name on the machine but its state directory and its cgroups (`verbatim/LAB/…` in each
//!   hierarchy): no interface, no named network namespace, no mount. Labs of different names never meet.
//! - A host dies with its pid 1, and every pid 1 dies with the supervisor, even if that is killed: kernel namespaces and
//!   mounts go with the last process in them. [`Lab::down`] and the next [`Lab::up`] of that name remove the rest.
//!
//! # Roles
//!
//! Supervisor, hosts and the helper that enters a host are the calling program itself, started again under another
//! `argv[0]`. So `main` of every program that brings up a lab begins with [`run_role`].
//!
//! Where to start: [`Lab`], then `supervisor`, then `host`.

mod cgroup;
mod config;
mod enter;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod host;
mod lab;
mod network;
mod process;
mod protocol;
mod state;
mod status;
mod supervisor;
mod sys;

pub use config::{HostConfig, LabConfig, Service, Subnet};
pub use error::{Error, Result};
pub use lab::{Lab, VOLUMES};
pub use process::ProcessId;
pub use status::{HostStatus, LabStatus, ServiceState, ServiceStatus};

use std::ffi::OsString;

/// `argv[0]` of the process that holds a lab together.
const SUPERVISOR: &str = "verbatim-lab-supervisor";
/// `argv[0]` of pid 1 of a host.
const HOST: &str = "verbatim-lab-host";
/// `argv[0]` of the helper that runs a command in a host.
const ENTER: &str = "verbatim-lab-enter";

/// Runs this process in the lab role that its `argv[0]` names, and then ends it; returns at once if it has none.
///
/// Call it first in `main`, before threads are started: namespaces belong to threads.
pub fn run_role() {
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_default();
    let rest: Vec<OsString> = args.collect();
    let code = match name.to_str() {
        Some(SUPERVISOR) => supervisor::main(&rest),
        Some(HOST) => host::main(&rest),
        Some(ENTER) => enter::main(&rest),
        _ => return,
    };
    std::process::exit(code)
}
