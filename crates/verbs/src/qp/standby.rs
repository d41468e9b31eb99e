//! A partner's physical queue pair that stands ready to take the place of the one in use (MigrRDMA §3.2).

use verbatim_channel::{Endpoint, StandbyPeer, StandbyQp};
use verbatim_device::control::{QpAttr, QpState, QpType};
use verbatim_device::transitions::steps;

use super::Qp;
use crate::backend::{Device, QpPlace};
use crate::error::VerbsError;
use crate::reach::Patience;
use crate::sys::start_psn;

/// A standby queue pair.
#[derive(Debug, Clone, Copy)]
pub struct Standby {
    /// The migration.
    pub session: u64,
    pub place: QpPlace,
    /// With which PSN it starts to send.
    sq_psn: u32,
    /// To what it is connected.
    pub remote: Option<Endpoint>,
}

impl Standby {
    /// Makes one for `qp`: same PD, same completion queues, same limits.
    pub fn create(qp: &Qp, device: &dyn Device, session: u64) -> Result<Self, VerbsError> {
        let sq_psn = start_psn()?;
        let place = device.create_qp(&qp.init_attr().physical(qp.pd()))?;
        Ok(Self {
            session,
            place,
            sq_psn,
            remote: None,
        })
    }

    /// As the agent is told.
    pub fn describe(&self, qp: &Qp) -> StandbyQp {
        StandbyQp {
            qpn: qp.number(),
            physical_qpn: self.place.qpn,
            sq_psn: self.sq_psn,
        }
    }

    /// Connects it, with the attributes of the queue pair that it stands for and by the same GID of the RNIC, and takes it to
    /// that one's state.
    pub fn connect(
        &mut self,
        device: &dyn Device,
        qp_type: QpType,
        attr: &QpAttr,
        sgid_index: u8,
        peer: &StandbyPeer,
        patience: &mut Patience,
    ) -> Result<(), VerbsError> {
        let mut wanted = *attr;
        wanted.av.sgid_index = sgid_index;
        wanted.av.dgid = peer.remote.gid;
        wanted.dest_qpn = peer.remote.qpn;
        if let Some(rq_psn) = peer.rq_psn {
            wanted.rq_psn = rq_psn;
            wanted.sq_psn = self.sq_psn;
        }
        // One that has failed is not switched to.
        let steps = match attr.state {
            QpState::Err => Vec::new(),
            state => steps(qp_type, state).ok_or_else(|| {
                VerbsError::Invalid(format!(
                    "queue pair {} is in SQE after a failed request; a peer of it can be moved when the program has taken it back to RTS",
                    peer.qpn
                ))
            })?,
        };
        for (state, mask) in steps {
            let step = QpAttr { state, ..wanted };
            patience.with(|| device.modify_qp(self.place.qpn, mask, &step))?;
        }
        self.remote = Some(peer.remote);
        Ok(())
    }

    /// Destroys it. What the RNIC will not destroy it keeps until the context is closed; nobody else knows of it.
    pub fn destroy(&self, device: &dyn Device) {
        let _ = device.destroy_qp(self.place.qpn);
    }
}
