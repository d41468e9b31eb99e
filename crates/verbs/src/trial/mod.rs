//! Whether the objects of a context can be made on this host, tried before their process comes here.
//!
//! After the decision of a migration there is no way back: what the restored process cannot make at its new RNIC is lost to it. So a
//! helper of the destination's agent makes the very same objects ahead, by the same code ([`crate::maker`]), in an order and number that
//! reaches the same limits, and ends; with its descriptors the kernel destroys them.
//!
//! - Registered memory is the file that has come ahead, mapped and pinned as the process will have it: so what is locked, in whole, is
//!   counted against the same limits, and no page is needed twice. Memory without such a file is anonymous, of the same sizes.
//! - Connected queue pairs are taken to their states, each connected to itself: nothing is sent.
//! - What another process can go on with is handed over instead ([`crate::backend::rdma_core::ahead`]), but for queue pairs and windows.

pub(crate) mod memory;

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use verbatim_channel::ahead::MadeAhead;
use verbatim_channel::{ContextRecord, MadePeer, MrRecord, StandbyPeer};
use verbatim_device::control::QpState;

use self::memory::Mapped;
use crate::backend::{Device, PhysicalMemory, PhysicalMrInit, Provider, rdma_core};
use crate::maker::{Made, NotMade};

/// What cannot be made, in words for an operator.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// The device cannot be opened.
    #[error("{device} cannot be opened: {why}")]
    Open {
        /// Its name.
        device: String,
        /// The library's words.
        why: String,
    },
    /// An object cannot be made.
    #[error("{device} refuses what the program has: {why}")]
    Object {
        /// The device.
        device: String,
        /// The object, and the library's words.
        why: String,
    },
}

/// What has been made, for as long as it lives.
pub struct Trial {
    // Objects before the memory that they lie in.
    made: Made,
    _memory: Vec<Mapped>,
}

/// What the process can go on with, and its descriptors. It stays if the caller ends without dropping the [`Trial`].
pub type Ahead = (MadeAhead, Vec<OwnedFd>);

/// Makes all objects of `record` at the device of that name of the system's libibverbs. `memory` is the process's file of adopted memory. With
/// it comes what the process can go on with, or why it has to make all by itself.
pub fn make(
    device: &str,
    record: &ContextRecord,
    memory: Option<&File>,
) -> Result<(Trial, Result<Ahead, String>), TrialError> {
    let (made, noted) = rdma_core::ahead::noted(|| try_all(device, record, memory));
    let mut trial = made?;
    let ahead = can_be_handed_over(record, memory).and_then(|memory| {
        // Queue pairs go by what was noted, too: the kernel destroys them.
        let destroyed = trial.made.destroy_queue_pairs();
        destroyed.map_err(|error| error.to_string())?;
        let (mut ahead, descriptors) = noted.finish(record.id, memory)?;
        let regions = trial.made.claimed.mrs.iter();
        ahead.rkeys = regions.map(|mr| mr.physical_rkey).collect();
        Ok((ahead, descriptors))
    });
    Ok((trial, ahead))
}

fn try_all(device: &str, record: &ContextRecord, memory: Option<&File>) -> Result<Trial, TrialError> {
    let provider = rdma_core::RdmaCoreProvider::default();
    let opened = provider.open(device).map_err(|error| TrialError::Open {
        device: device.to_owned(),
        why: error.to_string(),
    })?;
    if let Some(why) = opened.blocker() {
        return Err(TrialError::Open {
            device: device.to_owned(),
            why,
        });
    }
    let limits = limits(&opened);
    make_at(opened, record, memory).map_err(|not_made| TrialError::Object {
        device: device.to_owned(),
        why: format!("{not_made}; the device has {limits}"),
    })
}

/// The file whose pages are registered, by device and inode number, if all registered memory is in one.
fn can_be_handed_over(record: &ContextRecord, memory: Option<&File>) -> Result<Option<(u64, u64)>, String> {
    let in_file = |mr: &MrRecord| {
        let mut with_memory = mr.segments.iter().filter(|segment| segment.length > 0);
        with_memory.all(|segment| segment.offset.is_some())
    };
    if let Some(mr) = record.mrs.iter().find(|mr| !in_file(mr)) {
        return Err(format!(
            "region {:#x} has memory that is in no file, and that nobody else can register",
            mr.lkey
        ));
    }
    if memory.is_none() && record.mrs.iter().any(|mr| mr.length > 0) {
        return Err(
            "the file of its registered memory has not come, so other pages were registered".to_owned(),
        );
    }
    let metadata = memory.map(File::metadata).transpose();
    let metadata = metadata.map_err(|error| format!("the file of registered memory: {error}"))?;
    Ok(metadata.map(|metadata| (metadata.dev(), metadata.ino())))
}

/// What a device says that it can have, by the names of `ibv_query_device`.
fn limits(device: &Arc<dyn Device>) -> String {
    let attr = device.attributes().0;
    format!(
        "max_qp {}, max_qp_wr {}, max_sge {}, max_cq {}, max_cqe {}, max_srq {}, max_srq_wr {}, max_mr {}, max_mr_size {}, max_mw {}, \
         max_pd {}, max_qp_rd_atom {}, max_qp_init_rd_atom {}",
        attr.max_qp,
        attr.max_qp_wr,
        attr.max_sge,
        attr.max_cq,
        attr.max_cqe,
        attr.max_srq,
        attr.max_srq_wr,
        attr.max_mr,
        attr.max_mr_size,
        attr.max_mw,
        attr.max_pd,
        attr.max_qp_rd_atom,
        attr.max_qp_init_rd_atom
    )
}

pub(crate) fn make_at(
    device: Arc<dyn Device>,
    record: &ContextRecord,
    memory: Option<&File>,
) -> Result<Trial, NotMade> {
    let mut mapped = Vec::new();
    let mut register = |device: &dyn Device, mr: &MrRecord, pd: u32| {
        let there = Mapped::new(mr, memory)?;
        let keys = device.reg_mr(&PhysicalMrInit {
            pd,
            access: mr.access,
            memory: PhysicalMemory {
                address: there.address(),
                length: mr.length,
                iova: mr.iova,
                segments: &mr.segments,
                file: None,
            },
        });
        mapped.push(there);
        keys
    };
    let mut made = Made::make(device, &as_it_will_be(record), &HashMap::new(), &mut register)?;
    for qp in made.unconnected() {
        let peer = StandbyPeer {
            qpn: qp.qpn,
            remote: qp.own,
            rq_psn: Some(qp.sq_psn),
        };
        made.connect(&MadePeer {
            peer,
            key_table: None,
        })?;
    }
    Ok(Trial {
        made,
        _memory: mapped,
    })
}

/// A queue pair that is in SQE now is taken back to RTS when it is parked.
fn as_it_will_be(record: &ContextRecord) -> ContextRecord {
    let mut record = record.clone();
    let in_sqe = record.qps.iter_mut().map(|qp| &mut qp.attr.state);
    for state in in_sqe.filter(|state| **state == QpState::Sqe) {
        *state = QpState::Rts;
    }
    record
}
