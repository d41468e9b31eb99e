//! Everything of an instance that is not RDMA: its OCI bundle, runc, CRIU and its network namespace.
//!
//! The host agent drives it. A container is started from a [`Bundle`] in a [`Network`] with [`Runc::run`]; it moves
//! with a [`Checkpoint`] on one host and a [`Restore`] on the other. runc and CRIU are the distribution's own; between
//! them stands a small proxy ([`criu_proxy_main`]) that lets both be started, and do their probing, long before the
//! freeze, and that keeps the way back open until the agent commits.
//!
//! ```text
//!  agent ── Checkpoint::prepare ──► runc checkpoint ──► proxy ──► criu: pre-dump (held)
//!        ── Checkpoint::freeze_and_dump_with ─────────► proxy ──► criu: freeze … query-ext-files (network is cut off)
//!                                                                  … images … post-dump (held)
//!        ── Dumped::hold                               the container's cgroup is frozen: nobody's death lets it run
//!        ── Dumped::commit / Dumped::abort ───────────► proxy ──► criu: kill the tasks / let them go on
//!
//!  agent ── pre_dump ──────────► runc checkpoint --pre-dump ─► proxy ──► criu: freeze … thaw … images
//!
//!  agent ── Restore::prepare ─────► runc restore ─────► proxy (holds RESTORE; the images may still be missing)
//!        ── Restore::restore ─────────────────────────► proxy ──► criu: tasks made … post-restore (held)
//!        ── Restored::resume_with / Restored::abort ──► proxy     the marker says: they may have run from now on
//!                                                                  network is connected
//!                                                       proxy ──► criu: … tasks run / tasks are killed
//! ```
//!
//! Dropping a handle of an operation that is not committed or held aborts it; so does the agent's death. What is left when somebody
//! was killed [`Tasks`] finds out.
//!
//! The crate knows no RDMA, copies no images between hosts and decides nothing: that is the agent's part. Functions
//! that are not `async` do a few system calls and return; the slow ones say so. Start at [`Host`].

mod beside;
mod blocking;
mod bundle;
mod cgroup;
mod check;
mod checkpoint;
mod clocks;
mod complaint;
mod criu;
mod descriptors;
mod error;
mod fdinfo;
mod fingerprint;
mod gate;
mod host;
mod images;
mod init;
mod kept;
mod marker;
mod memberships;
mod name;
mod namespace;
mod needed_file;
mod netlink;
mod network;
mod operation;
mod pre_dump;
mod proxy;
mod restore;
mod rnic;
mod room;
mod runc;
mod sock_diag;
mod sockopt;
mod tasks;
mod tcp_repair;
mod timings;
mod waits;
mod watch;

/// Doors for the fuzz targets (`fuzz/`) to what reads bytes of others and is nobody else's business.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::bundle::fuzzing::bundle_config;
    pub use crate::proxy::fuzzing::criu_messages;
}

pub use bundle::{Bind, Bundle, BundleConfig, FolderMount, STARTED_NAME, Workload, has_device};
pub use cgroup::{Cgroup, CgroupBeside, CgroupVersion, remove_cgroup_parent};
pub use check::{
    Carried, Pages, added, blockers, huge_pages, lack_of_huge_pages, memory_policies, notes, of_users,
    with_rnics, with_terminals,
};
pub use checkpoint::{Checkpoint, CheckpointConfig, Dumped};
pub use criu::{Criu, CriuError, Version};
pub use descriptors::Descriptors;
pub use error::{Complaint, Error};
pub use fingerprint::{Size, fingerprint};
pub use host::{Host, HostConfig};
pub use images::FileImages;
pub use init::{Exit, Init};
pub use kept::{Connection, Kept};
pub use marker::released;
pub use memberships::{Membership, MembershipError, join_again, memberships};
pub use name::{BadName, ContainerName};
pub use needed_file::NeededFile;
pub use network::{Contents, Link, Network, NetworkConfig, NetworkError, TAP, mac_of};
pub use operation::{outlast, started_at};
pub use pre_dump::{PreDumpConfig, PreDumped, drop_pages, pre_dump};
pub use proxy::criu_proxy_main;
pub use restore::{Restore, RestoreConfig, Restored, Resumed};
pub use rnic::{Rnic, find_rnic, handed_over};
pub use room::no_room;
pub use runc::{Runc, State, Status};
pub use tasks::{Ended, Fact, NotRun, Tasks};
pub use timings::{Mark, Timings};
pub use waits::unreached as unreached_waits;
