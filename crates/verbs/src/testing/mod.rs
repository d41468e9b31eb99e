//! For tests: the world in which programs with this library, RNICs and an agent meet in memory.
//!
//! The RNICs are the transport of the software RNIC ([`wire`]): packets go between them one at a time, and can be lost. Two programs
//! on them are connected ([`pair`]), and the tests order what an agent would ([`moves`]). What an RNIC does only now and then, and the
//! transport in memory never does by itself, a test asks for ([`faults`]).

mod device;
mod end;
mod faults;
mod host;
mod memory;
mod moves;
mod pair;
mod rings;
mod rnic;
mod wire;

pub use end::{End, Shape, connect, outcomes, wr_ids};
pub use memory::MEMORY;
pub use moves::Move;
pub use pair::{Outcome, Pair, Patience};
pub use wire::Wire;
