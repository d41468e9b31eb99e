//! Requests that happen here, without a packet, in their turn: LOCAL_INV, BIND_MW, and what was executed earlier.

use super::Requester;
use crate::gather::execute_local;
use crate::{Host, Operation};

impl Requester {
    /// Executes the request at the cursor, if its turn has come; says whether sending can go on behind it.
    ///
    /// - LOCAL_INV waits until all earlier requests are complete, since sending one of them again may need the memory
    ///   (IBA §10.6.5.1: the local invalidate fence, which a device may always apply).
    /// - What was executed earlier waits for nothing, only its completion does; but the value that an atomic found comes
    ///   after the data of earlier READs, as it would have on the wire.
    /// - BIND_MW comes after what was sent before; with a fence, after READs and atomics are complete (§10.8.3.3).
    pub(super) fn pass_local(&mut self, host: &mut impl Host) -> bool {
        let oldest = self.cursor == 0;
        let wqe = &mut self.queue[self.cursor];
        if !wqe.executed {
            let must_wait = match wqe.request.operation {
                Operation::LocalInvalidate { .. } => !oldest,
                Operation::Executed { value, .. } => value.is_some() && !oldest,
                _ => wqe.request.fence && !self.reads.is_empty(),
            };
            if must_wait {
                return false;
            }
            wqe.executed = true;
            wqe.failure = execute_local(&wqe.request, host).err();
        }
        if wqe.failure.is_some() {
            return false;
        }
        self.cursor += 1;
        self.retire_done(host);
        true
    }
}
