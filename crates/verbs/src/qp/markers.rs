//! Markers of a drain ([`crate::backend::SendRing::mark`]): each end of a connection posts its own, and lets the other do so.
//!
//! On a connection a marker is a WRITE of no bytes, which goes where remote writes are allowed and breaks the connection
//! elsewhere. So each end allows them while the other drains. What the program has set stays what it is told.

use std::sync::atomic::Ordering::Relaxed;

use verbatim_device::control::{Access, QpAttr, QpAttrMask, QpState, QpType};

use super::{Control, Qp};
use crate::error::VerbsError;

impl Qp {
    /// Brings about that the RNIC finishes all that it was given. The other end has allowed markers. To be called at each
    /// look of a drain.
    pub(crate) fn mark(&self) {
        if !self.send.lock().mark_end() {
            self.side.failed.store(true, Relaxed);
        }
    }

    /// Lets the other end post markers. False: it must not, since the rights of a queue pair in this state cannot be changed.
    pub(crate) fn allow_markers(&self) -> Result<bool, VerbsError> {
        let mut control = self.control.lock();
        let allowed = control.markers_allowed
            || self.qp_type == QpType::Ud
            || control.attr.access.contains(Access::REMOTE_WRITE);
        if allowed || control.attr.state != QpState::Rts {
            return Ok(allowed);
        }
        let access = control.attr.access | Access::REMOTE_WRITE;
        control.markers_allowed = self.set_access(&control, access)?;
        Ok(control.markers_allowed)
    }

    /// Takes that back. Only when no marker of the other end can be under way any more.
    pub(crate) fn disallow_markers(&self) -> Result<(), VerbsError> {
        let mut control = self.control.lock();
        if std::mem::take(&mut control.markers_allowed) {
            self.set_access(&control, control.attr.access)?;
        }
        Ok(())
    }

    /// False if it has failed meanwhile.
    fn set_access(&self, control: &Control, access: Access) -> Result<bool, VerbsError> {
        let device = self.context.device()?;
        let attr = QpAttr {
            state: QpState::Rts,
            access,
            ..control.attr
        };
        let mask = QpAttrMask::STATE | QpAttrMask::ACCESS_FLAGS;
        match device.modify_qp(control.physical_qpn(), mask, &attr) {
            Ok(()) => Ok(true),
            Err(error) if error.is_loss_of_device() => Err(error),
            // RTS is what it was told to be; it may be in ERR.
            Err(error) => match device.query_qp(control.physical_qpn())?.state {
                QpState::Rts => Err(error),
                _ => Ok(false),
            },
        }
    }
}
