//! The files of an instance's runtime folder, adopted memory above all: what must be sent, and how it is put in place.
//!
//! - [`tracker`]: which pages of a file differ from what was last sent;
//! - [`tree`]: which files of a folder are there, changed or gone;
//! - [`transport`]: whether they go over TLS or by RDMA;
//! - [`bulk`]: the session's connection for the latter;
//! - [`parts`]: how they are packed;
//! - [`send`]: both together, as a stream of parts;
//! - [`others`]: who else uses the RNIC;
//! - [`pace`]: at which rate, while the program runs;
//! - [`pieces`]: what is in a part;
//! - [`place`]: the other end of that stream;
//! - [`convergence`]: when further rounds are of no use;
//! - [`ram`]: that of a virtual machine, which QEMU shares;
//! - [`private`]: how much memory is in no file, and so in no round;
//! - [`private_tmpfs`]: where it lies at the destination, until its tasks have it;
//! - [`promised`]: how much of the host's memory may be promised to instances;
//! - [`tracked`]: which pages of it were written, seen from outside, and so what of it is sent ahead in rounds;
//! - [`moves`]: whether a program has moved pages, which pre-dumps do not see;
//! - [`pre_dump`]: when that is worth sending ahead, too, as images of CRIU.

pub mod bulk;
pub mod compared;
pub mod convergence;
pub mod moves;
pub mod others;
pub mod pace;
pub mod parts;
pub mod pieces;
pub mod place;
pub mod pre_dump;
pub mod private;
pub mod private_tmpfs;
pub mod promised;
pub mod ram;
pub mod send;
pub mod tracked;
pub mod tracker;
pub mod transport;
pub mod tree;
