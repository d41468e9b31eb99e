//! Everything that programs have made, and its way out.

use crate::config::Limits;
use crate::context::Context;
use crate::ends::CqEnd;
use crate::memory::Regions;
use crate::qp::QueuePair;
use crate::table::Table;

/// A protection domain.
#[derive(Debug)]
pub struct Pd {
    pub context: u32,
    /// Regions and queue pairs that refer to it.
    pub users: u32,
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    pub context: u32,
    /// Queue pairs that refer to it, once for each direction.
    pub users: u32,
    pub ring: CqEnd,
    /// It lost a completion, and is of no use any more.
    pub overrun: bool,
}

/// All objects of all contexts. Who asks for one by its number must also be its owner.
#[derive(Debug)]
pub struct Objects {
    pub pds: Table<Pd>,
    pub cqs: Table<Cq>,
    pub qps: Table<QueuePair>,
    pub regions: Regions,
}

impl Objects {
    pub fn new(limits: &Limits) -> Self {
        Self {
            pds: Table::new(1, limits.max_pd, 0),
            cqs: Table::new(1, limits.max_cq, 0),
            qps: Table::random(limits.max_qp),
            regions: Regions::new(limits.max_mr),
        }
    }

    /// Removes a queue pair; whoever still refers to its number finds nothing.
    pub fn remove_qp(&mut self, qpn: u32) -> Option<QueuePair> {
        let qp = self.qps.remove(qpn)?;
        for cq in [qp.send_cq, qp.recv_cq] {
            if let Some(cq) = self.cqs.get_mut(cq) {
                cq.users -= 1;
            }
        }
        self.release_pd(qp.pd);
        Some(qp)
    }

    /// Removes a region; accesses with its key fail from now on.
    pub fn remove_region(&mut self, key: u32) -> bool {
        let Some(region) = self.regions.remove(key) else {
            return false;
        };
        self.release_pd(region.pd);
        true
    }

    fn release_pd(&mut self, pd: u32) {
        if let Some(pd) = self.pds.get_mut(pd) {
            pd.users -= 1;
        }
    }

    /// Removes all that a context has made, in the order of their dependencies.
    pub fn remove_all(&mut self, context: Context) {
        for qpn in context.qps() {
            self.remove_qp(qpn);
        }
        for key in &context.regions {
            self.remove_region(*key);
        }
        for cq in &context.cqs {
            self.cqs.remove(*cq);
        }
        for pd in &context.pds {
            self.pds.remove(*pd);
        }
    }
}
