//! What the communication manager asks of queue pairs.

use verbatim_cm::{Gid, Qpn, QueuePairs};

use super::QueuePair;
use crate::table::Table;

impl QueuePairs for Table<QueuePair> {
    /// A program that has moved knows its queue pairs by other numbers than this RNIC: for those it is false.
    fn are_connected(&self, local: Qpn, remote: Gid, remote_qpn: Qpn) -> bool {
        let Some(qp) = self.get(local.get()) else {
            return false;
        };
        let there = qp.route.is_some_and(|route| Gid::from(route.remote) == remote);
        there && qp.transport.query().dest_qpn == Some(remote_qpn)
    }
}
