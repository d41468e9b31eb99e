//! The files of an instance's runtime folder, adopted memory above all: what must be sent, and how it is put in place.
//!
//! - [`tracker`]: which pages of a file differ from what was last sent;
//! - [`fingerprint`]: what tells two contents of a page apart;
//! - [`beneath`]: how files are opened that a program can replace;
//! - [`tree`]: which files of a folder are there, changed or gone;
//! - [`send`]: both together, as a stream of parts;
//! - [`pace`]: at which rate, while the program runs;
//! - [`place`]: the other end of that stream;
//! - [`convergence`]: when further rounds are of no use;
//! - [`private`]: how much memory is in no file, and so in no round;
//! - [`tracked`]: which pages of it were written, seen from outside, and so what of it is sent ahead in rounds;
//! - [`moves`]: whether a program has moved pages, which pre-dumps do not see;
//! - [`pre_dump`]: when that is worth sending ahead, too, as images of CRIU.

pub mod beneath;
pub mod convergence;
pub mod fingerprint;
pub mod moves;
pub mod pace;
pub mod place;
pub mod pre_dump;
pub mod private;
pub mod send;
pub mod tracked;
pub mod tracker;
pub mod tree;
