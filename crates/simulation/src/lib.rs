//! Simulated worlds: the core of `verbatim-session` on hosts that fail. [`simulated::Simulated`] is what they have in common.
//!
//! The world of the decision, [`world::World`], is a small value: the machines of one session's source, destination and
//! partner, and of each host what a machine cannot see but through its driver: the tasks, their cgroup, CRIU, the proxy
//! and its marker, the journal on its disk, the RNIC with its listeners, the boot. [`turns::World`] is another one: several sessions that meet; [`fill::World`] a third: memory that
//! comes to an instance when it runs; [`post_copy::World`] a fourth: the same where its source has it; [`history::World`] a fifth: sessions of one instance,
//! one after the other. Each lists everything that can happen next, faults among it. So one description serves two searches:
//!
//! - [`explore`]: every world that can be reached with a limited number of faults, and whether each can still end well;
//! - [`seeds`]: long random walks, by seed, which find what lies deep; a failing one is shrunk and told as a short story.
//!
//! After every step of a decision [`check`] looks: at most one copy runs; once the instance has run there, it does not run here; no
//! records that contradict each other; no partner on the wrong connection.
//!
//! [`fill::check`] looks whether an instance ever goes on, or moves on, without memory of its own that nobody gives it any more.
//!
//! [`post_copy::check`] looks at the same, and whether the source ever gives away what is still needed.
//!
//! [`history::check`] looks whether a session that is still being finished does anything to an instance that has come back, and whether a destination ever takes back
//! what it has said.
//!
//! [`turns::check`] looks whether two sessions ever move both ends of one connection at once, or one waits for ever.
//!
//! Quirks put faults back that were in the code once. Each must be found: that tests the simulator. They change the world,
//! not the machines, so that what is shipped has no switch for a fault.
//!
//! A simulator proves only its world. What it takes for granted about CRIU, runc, the kernel and the RNIC is tested
//! against the real ones (`docs/assumptions.md`).

pub mod check;
pub mod coverage;
pub mod explore;
pub mod fill;
pub mod history;
pub mod post_copy;
pub mod seeds;
pub mod simulated;
pub mod turns;
pub mod walked;
pub mod world;
