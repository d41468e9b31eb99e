//! A nemesis for real moves: random faults by seed, several at once, in any order.
//!
//! [`schedule`] is what a seed says, [`strike`] how it is carried out in a lab, [`tally`] what came of it. `processes` finds whom it
//! strikes.

mod processes;
mod schedule;
mod strike;
mod tally;

pub use processes::copies;
pub use schedule::{Aim, Disk, Fault, Moment, Schedule, Side, Strike, Tool, Way};
pub use strike::{Hosts, Story, heal, prepare, struck_move};
pub use tally::{Step, Struck, Tally};
