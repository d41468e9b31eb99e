//! A partner's physical queue pair that stands ready to take the place of the one in use (MigrRDMA §3.2).

use verbatim_channel::{Endpoint, StandbyPeer, StandbyQp};
use verbatim_device::control::{QpAttr, QpAttrMask, QpState};

use super::Qp;
use crate::backend::{Device, QpPlace};
use crate::error::VerbsError;

const TO_INIT: QpAttrMask = QpAttrMask::STATE
    .union(QpAttrMask::PKEY_INDEX)
    .union(QpAttrMask::PORT)
    .union(QpAttrMask::ACCESS_FLAGS);
const TO_RTR: QpAttrMask = QpAttrMask::STATE
    .union(QpAttrMask::AV)
    .union(QpAttrMask::PATH_MTU)
    .union(QpAttrMask::DEST_QPN)
    .union(QpAttrMask::RQ_PSN)
    .union(QpAttrMask::MAX_DEST_RD_ATOMIC)
    .union(QpAttrMask::MIN_RNR_TIMER);
const TO_RTS: QpAttrMask = QpAttrMask::STATE
    .union(QpAttrMask::TIMEOUT)
    .union(QpAttrMask::RETRY_CNT)
    .union(QpAttrMask::RNR_RETRY)
    .union(QpAttrMask::SQ_PSN)
    .union(QpAttrMask::MAX_QP_RD_ATOMIC);

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
        let place = device.create_qp(&qp.init_attr().physical(qp.pd()))?;
        // Any PSN will do on a connection that is new on both sides; a varying one shows stray packets in captures.
        let sq_psn = (session as u32 ^ place.qpn.rotate_left(12)).wrapping_mul(0x9e37_79b1) & 0x00ff_ffff;
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

    /// Connects it, with the attributes of the queue pair that it stands for, and takes it to that one's state.
    pub fn connect(
        &mut self,
        device: &dyn Device,
        attr: &QpAttr,
        peer: &StandbyPeer,
    ) -> Result<(), VerbsError> {
        let mut wanted = *attr;
        wanted.av.dgid = peer.remote.gid;
        wanted.dest_qpn = peer.remote.qpn;
        wanted.rq_psn = peer.rq_psn;
        wanted.sq_psn = self.sq_psn;
        let steps: &[(QpState, QpAttrMask)] = match attr.state {
            QpState::Reset | QpState::Err | QpState::Sqe => &[],
            QpState::Init => &[(QpState::Init, TO_INIT)],
            QpState::Rtr => &[(QpState::Init, TO_INIT), (QpState::Rtr, TO_RTR)],
            QpState::Rts | QpState::Sqd => &[
                (QpState::Init, TO_INIT),
                (QpState::Rtr, TO_RTR),
                (QpState::Rts, TO_RTS),
            ],
        };
        for (state, mask) in steps {
            let step = QpAttr {
                state: *state,
                ..wanted
            };
            device.modify_qp(self.place.qpn, *mask, &step)?;
        }
        self.remote = Some(peer.remote);
        Ok(())
    }

    /// Destroys it. What the RNIC will not destroy it keeps until the context is closed; nobody else knows of it.
    pub fn destroy(&self, device: &dyn Device) {
        let _ = device.destroy_qp(self.place.qpn);
    }
}
