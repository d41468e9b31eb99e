//! What the manager asks of the RNIC's queue pairs.

use verbatim_roce::Qpn;

use crate::num::Gid;

/// The queue pairs of the RNIC, which knows where they are connected to now. A connection that was made by messages may have moved
/// at either end since.
pub trait QueuePairs {
    /// Whether this queue pair of the RNIC's sends to that one at that GID.
    fn are_connected(&self, local: Qpn, remote: Gid, remote_qpn: Qpn) -> bool;
}
