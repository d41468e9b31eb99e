//! Framed messages over `SOCK_SEQPACKET` Unix sockets.
//!
//! Every control channel on one host speaks this way: guest library to software RNIC, guest library to agent, agent to
//! software RNIC, CRIU proxy to agent. One packet is one message, encoded with postcard; file descriptors travel beside
//! it (`SCM_RIGHTS`), and the kernel names the sender of each message (`SCM_CREDENTIALS`), so that a descriptor handed
//! from one process to another never lends the first one's identity.
//!
//! The crate knows no message of its own, starts no thread and keeps no clock. Start at [`Socket`].

mod carried;
mod process;
mod socket;

pub use carried::Carried;
pub use process::{Credentials, Process};
pub use socket::{Error, Listener, Received, Socket};

/// The longest message in bytes; a longer one is refused by the sender.
///
/// It stays well below the default socket buffer (`net.core.wmem_default`), so that one message always fits.
pub const MAX_MESSAGE_BYTES: usize = 128 * 1024;

/// The most memory in bytes that what one message says may take.
pub const MAX_MESSAGE_MEMORY: usize = 16 * MAX_MESSAGE_BYTES;

/// The most file descriptors one message can carry.
pub const MAX_FDS: usize = 16;
