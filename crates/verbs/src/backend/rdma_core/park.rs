//! Standing still beside a dump, and going on.
//!
//! The device stays as it is while the process is dumped: descriptors and mappings are passed over, and going on after a
//! dump is going on with the same queue pairs. Who stands still is written to by none of its partners, since they are held
//! too; but datagrams come from anywhere. So queue pairs for datagrams go to RESET meanwhile, which takes their RECVs from
//! them, and are taken back afterwards. Messages that arrive too late to be seen are lost, as datagrams may be.

use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};
use verbatim_device::control::{QpAttr, QpAttrMask, QpState, QpType};
use verbatim_device::transitions::steps;

use super::device::RdmaCoreDevice;
use super::objects::{Cq, Qp};
use crate::backend::{Device, Parked};
use crate::error::VerbsError;
use crate::work::{RECV_BIT, Wc};

/// A queue pair that went to RESET.
#[derive(Debug)]
pub struct Rested {
    qp: Arc<Qp>,
    /// The state to which it goes back.
    state: QpState,
}

impl RdmaCoreDevice {
    /// Lets it stand still. On an error all goes on.
    pub fn rest(self: Arc<Self>) -> Result<Parked, VerbsError> {
        self.rest_datagrams().inspect_err(|_| _ = self.rouse())?;
        for channel in self.objects.channels.all() {
            if let Some(shell) = channel.shell.lock().upgrade() {
                shell.detach();
            }
        }
        // The contract has a descriptor for each context; what keeps this one's objects is the device itself.
        let connection =
            eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| VerbsError::os("eventfd", errno))?;
        let device = self.clone();
        Ok(Parked {
            connection,
            reopen: Box::new(move |_| {
                device.rouse()?;
                Ok(device.clone())
            }),
            kept: Some(self),
        })
    }

    fn rest_datagrams(&self) -> Result<(), VerbsError> {
        self.lost_recvs.lock().clear();
        for qp in self.objects.qps.all() {
            if qp.qp_type != QpType::Ud {
                continue;
            }
            let state = match self.query_qp(qp.number)?.state {
                // These take nothing in.
                QpState::Reset | QpState::Init | QpState::Err => continue,
                // It failed to send, and receives; there is no way back to that.
                QpState::Sqe => QpState::Rts,
                state => state,
            };
            self.set_state(&qp, QpAttrMask::STATE, QpState::Reset)?;
            self.resting.lock().push(Rested {
                qp: qp.clone(),
                state,
            });
            for cq in &qp.cqs {
                keep_what_counts(cq, &qp);
            }
            qp.progress.send.reset();
            qp.forget_marks();
            if qp.srq.is_none() {
                qp.progress.recv.reset();
                self.lost_recvs.lock().push(qp.number);
            }
        }
        Ok(())
    }

    /// All goes on.
    fn rouse(&self) -> Result<(), VerbsError> {
        while let Some(rested) = self.resting.lock().pop() {
            // There is one: SQE was none of the states.
            for (state, mask) in steps(QpType::Ud, rested.state).unwrap_or_default() {
                self.set_state(&rested.qp, mask, state)?;
            }
        }
        for channel in self.objects.channels.all() {
            if let Some(shell) = channel.shell.lock().upgrade() {
                shell.attach(channel.source.clone())?;
            }
        }
        Ok(())
    }

    /// Takes a queue pair to a state with the attributes that it was told last.
    fn set_state(&self, qp: &Qp, mask: QpAttrMask, state: QpState) -> Result<(), VerbsError> {
        let attr = QpAttr {
            state,
            ..*qp.attr.lock()
        };
        self.modify(qp, mask, &attr)
    }
}

/// Takes what a queue has, but for messages that arrived at `qp` since the last look: their RECVs are posted again. Those of a shared
/// queue stay consumed, and count.
fn keep_what_counts(cq: &Cq, qp: &Qp) {
    let counts = |wc: &Wc| wc.qp_num != qp.number || wc.wr_id & RECV_BIT == 0 || qp.srq.is_some();
    let mut left = cq.left.lock();
    // Looks after other queue pairs have put them there.
    left.retain(counts);
    while let Some(wc) = cq.next() {
        if counts(&wc) {
            left.push_back(wc);
        }
    }
}
