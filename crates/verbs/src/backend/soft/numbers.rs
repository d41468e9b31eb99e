//! Making objects whose numbers or keys peers know: with those that the RNIC gives, or those that are asked for
//! ([`verbatim_device::control::Request`] says who may).

use verbatim_channel::SegmentRecord;
use verbatim_device::control::{Backing, MwType, Reply, Request, Segment};

use super::control::wrong;
use super::device::SoftDevice;
use crate::backend::{PhysicalMemory, PhysicalMrInit, PhysicalQpInit, QpPlace};
use crate::error::VerbsError;

impl SoftDevice {
    pub(super) fn register(
        &self,
        init: &PhysicalMrInit<'_>,
        key: Option<u32>,
    ) -> Result<(u32, u32), VerbsError> {
        let memory = &init.memory;
        let request = Request::RegMr {
            pd: init.pd,
            address: memory.address,
            length: memory.length,
            iova: memory.iova,
            access: init.access,
            segments: segments(memory),
            key,
        };
        let file: Vec<_> = memory.file.into_iter().collect();
        match self.control.call_with("reg_mr", &request, &file)? {
            Reply::Mr { lkey, rkey } => Ok((lkey, rkey)),
            reply => wrong("reg_mr", reply),
        }
    }

    pub(super) fn make_window(&self, pd: u32, mw_type: MwType, rkey: Option<u32>) -> Result<u32, VerbsError> {
        match self
            .control
            .call("alloc_mw", &Request::AllocMw { pd, mw_type, rkey })?
        {
            Reply::Mw { rkey } => Ok(rkey),
            reply => wrong("alloc_mw", reply),
        }
    }

    pub(super) fn make_qp(&self, init: &PhysicalQpInit, qpn: Option<u32>) -> Result<QpPlace, VerbsError> {
        let request = Request::CreateQp {
            pd: init.pd,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            qp_type: init.qp_type,
            cap: init.cap,
            srq: init.srq,
            qpn,
        };
        match self.control.call("create_qp", &request)? {
            Reply::Qp {
                qpn,
                cap,
                slot,
                offset,
            } => Ok(QpPlace {
                qpn,
                cap,
                slot,
                offset,
            }),
            reply => wrong("create_qp", reply),
        }
    }
}

pub fn segments(memory: &PhysicalMemory<'_>) -> Vec<Segment> {
    memory.segments.iter().map(segment).collect()
}

fn segment(record: &SegmentRecord) -> Segment {
    Segment {
        address: record.address,
        length: record.length,
        backing: match record.offset {
            Some(offset) => Backing::File { fd_index: 0, offset },
            None => Backing::Process,
        },
    }
}
