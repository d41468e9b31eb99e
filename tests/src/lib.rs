//! What the end-to-end tests and the benches share: labs that go away, programs with a time limit, reports.
//!
//! Everything here is a black box around the built `verbatim` binary: it brings up a lab, starts unmodified programs in
//! its hosts or in instances, moves these, and reads what they print. It builds nothing; [`Tools::find`] says what is
//! missing.
//!
//! Nothing sleeps for a fixed time in the hope that something has happened: the end of a process is an event
//! ([`Running::wait`]), and where there is no event a condition is looked at again and again until it holds or its time
//! is over ([`eventually`]).
//!
//! Start at [`TestLab`].

mod bandwidth;
mod bundle;
mod capture;
mod check;
mod faults;
mod footprint;
mod icrc;
mod instance;
mod lab;
mod migration;
pub mod nemesis;
mod perftest;
mod programs;
mod releases;
mod running;
mod shim;
mod simulation;
mod stolen;
mod tools;
mod traffic;
mod turns;
mod ungrouped;
mod verdict;
mod wait;

pub use bandwidth::Bandwidth;
pub use bundle::bundle_of;
pub use capture::{Capture, Frame, check_icrc, decode};
pub use check::{CheckReport, VCHECK_PORT};
pub use faults::{Action, OrderedFaults};
pub use footprint::left_behind;
pub use instance::{Instance, Row, words};
pub use lab::TestLab;
pub use migration::{MOVED, Migration, PHASES, ROLLED_BACK};
pub use perftest::{BandwidthRow, LatencyRow, PATIENCE, PERFTEST_PORT};
pub use programs::{ENDS_PORT, PYTHON, text_of};
pub use releases::{PREVIOUS_VARIABLE, Release};
pub use running::{Finished, Running, told};
pub use shim::Shim;
pub use simulation::{Found, STEPS_PER_LINE, Simulation, UCX_SETTING};
pub use stolen::Stolen;
pub use tools::Tools;
pub use traffic::Traffic;
pub use turns::Turns;
pub use ungrouped::Ungrouped;
pub use verdict::{Counts, Expected, Outcome, SuiteReport, SuiteTest, Table, Verdict, table};
pub use wait::{eventually, patience};
