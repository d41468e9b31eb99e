//! The files of an instance's runtime folder, adopted memory above all: what must be sent, and how it is put in place.
//!
//! - [`tracker`]: which pages of a file differ from what was last sent;
//! - [`beneath`]: how files are opened that a program can replace;
//! - [`tree`]: which files of a folder are there, changed or gone;
//! - [`send`]: both together, as a stream of parts;
//! - [`place`]: the other end of that stream.

pub mod beneath;
pub mod place;
pub mod send;
pub mod tracker;
pub mod tree;
