//! Physical queue pairs that standbys have taken the places of (MigrRDMA §3.2), until they are destroyed.
//!
//! They are destroyed after the program runs again, which need not wait for it. Until then they use the completion queues, the
//! shared receive queue and the protection domain of the queue pair that they were of. So whoever destroys that one sees to it
//! that they are gone as well, or the RNIC would say of the rest that it is in use.

use parking_lot::Mutex;

use crate::backend::Device;

/// Those of a context.
#[derive(Debug, Default)]
pub(crate) struct Retired(Mutex<Vec<Old>>);

#[derive(Debug)]
struct Old {
    /// The number by which the program knows the queue pair that it was of.
    of: u32,
    qpn: u32,
}

impl Retired {
    /// Another has taken the place of physical queue pair `qpn`, which was of the program's queue pair `of`.
    pub fn add(&self, of: u32, qpn: u32) {
        self.0.lock().push(Old { of, qpn });
    }

    /// Destroys all. Those that the RNIC will not destroy go with the context.
    pub fn destroy_all(&self, device: &dyn Device) {
        let mut all = self.0.lock();
        if all.is_empty() {
            return;
        }
        let qpns: Vec<u32> = all.iter().map(|old| old.qpn).collect();
        _ = device.destroy_qps(&qpns);
        // Nobody must find that there are none before they are gone.
        all.clear();
    }

    /// Destroys those that were of queue pair `of`. When it returns, there are none.
    pub fn destroy_of(&self, of: u32, device: &dyn Device) {
        self.0.lock().retain(|old| {
            if old.of == of {
                _ = device.destroy_qp(old.qpn);
            }
            old.of != of
        });
    }
}
