//! Requests of the control path and their answers.
//!
//! Strictly one answer per request, in order. Errors carry an errno as the verbs return it. The numbers of enumerations
//! and bit masks are those of `<infiniband/verbs.h>`, since both sides are asked in these terms.

mod cm;
mod device;
mod events;
mod memory;
mod migration;
mod peer;
mod qp;
mod reply;
mod request;

pub use self::cm::*;
pub use self::device::*;
pub use self::events::*;
pub use self::memory::*;
pub use self::migration::*;
pub use self::peer::*;
pub use self::qp::*;
pub use self::reply::*;
pub use self::request::*;

use verbatim_versions::{Versioned, Versions};

/// The version of this contract. What is sent under it is recorded, and `docs/versions.md` says when it rises.
pub const VERSION: u32 = 12;

/// The oldest version that is spoken, too.
pub const OLDEST: u32 = 11;

/// Both. A program's side asks for the newest version first ([`Connection::begin`](crate::Connection::begin)), and the RNIC takes any.
pub const VERSIONS: Versions = Versions::new(OLDEST, VERSION);

impl Versioned for Request {}
impl Versioned for Reply {}

/// The first version with [`Request::SetQpClass`]: nobody sends it under an older one.
pub const CLASS_VERSION: u32 = 12;

/// The most queue pairs in one request; more are `EINVAL`. The RNIC does nothing else meanwhile.
pub const MOST_QPS: usize = 1024;

/// From here on queue pair numbers are not the RNIC's to give, asked for or not: they are for queue pairs that programs which
/// have moved away make elsewhere, under the GID of this host.
pub const FIRST_PUBLISHED_QPN: u32 = 1 << 23;

/// Hosts have numbers from 0 to one less than this. What an RNIC gives unasked begins in the part of its host, so that an
/// object which goes to another RNIC with its number and keys rarely finds them taken there:
///
/// | | part of host N begins at | the RNIC begins at a random place in the first half | can be asked for |
/// | --- | --- | --- | --- |
/// | queue pair number | N × [`QPNS_PER_HOST`] | of 65,536 | 2 to [`FIRST_PUBLISHED_QPN`] - 1 |
/// | memory key (its upper 24 bits) | N × [`KEYS_PER_HOST`] | of 131,072 | all but 0 |
///
/// An RNIC with more objects than the other half has room for goes on into the parts behind: limits do not depend on this.
pub const HOST_NUMBERS: u8 = 120;

/// See [`HOST_NUMBERS`].
pub const QPNS_PER_HOST: u32 = 1 << 16;

/// See [`HOST_NUMBERS`].
pub const KEYS_PER_HOST: u32 = 1 << 17;

/// The longest name of an instance in bytes, see [`Request::AddListener`].
pub const MAX_INSTANCE_NAME: usize = 255;

/// The control socket's name in a runtime folder.
pub const SOCKET_NAME: &str = "nic.sock";
