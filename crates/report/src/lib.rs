//! What the demo shows: charts and tables of migrations, for a terminal and as one self-contained HTML page.
//!
//! Pure functions from data to text. Nothing here reads a clock, a file or the network, and the page loads nothing: its
//! charts are inline SVG, its style is inline, it has no script.
//!
//! Where to start: [`Report`] is all that is shown; [`terminal()`] and [`html()`] show it. [`Trace`] turns readings of a
//! byte counter into rates.

mod html;
mod model;
mod scale;
mod terminal;
#[cfg(test)]
mod testing;
mod text;
mod trace;

pub use html::html;
pub use model::{Blackout, Move, Output, Phase, Report, Run};
pub use terminal::{Terminal, terminal};
pub use trace::{Rate, Trace};
