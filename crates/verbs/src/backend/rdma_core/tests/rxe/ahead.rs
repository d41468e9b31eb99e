//! A context that a helper has made, and another library goes on with.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use rustix::mm::{MapFlags, ProtFlags, mmap};
use verbatim_channel::ahead::{self, MadeAhead};
use verbatim_channel::{
    ChannelRecord, ContextRecord, CqRecord, Endpoint, MadePeer, MrRecord, PdRecord, QpRecord, SegmentRecord,
    SrqRecord, StandbyPeer,
};
use verbatim_device::control::{QpState, SrqAttr};
use verbatim_device::layout::{self, SendWqe};
use verbatim_device::ring::Body;

use super::super::super::port::way_to_itself;
use super::*;
use crate::backend::rdma_core::ahead::answered;
use crate::backend::{PhysicalMemory, PhysicalMrInit};
use crate::maker::Made;
use crate::trial;
use crate::work::{RECV_BIT, SendOpcode};

const PAGES: usize = 4;
const BYTES: u64 = (PAGES * 4096) as u64;
/// Where the program has the region.
const AT: u64 = 0x7000_0000_0000;

/// A file of registered memory, as the process maps it.
struct Memory {
    file: File,
    mapped: *mut u8,
}

impl Memory {
    fn new() -> Self {
        // SAFETY: a new file, and a new mapping of it.
        unsafe {
            let fd = libc::memfd_create(c"adopted".as_ptr(), libc::MFD_CLOEXEC);
            let file: File = std::os::fd::FromRawFd::from_raw_fd(fd);
            file.set_len(BYTES).unwrap();
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            let mapped = mmap(
                std::ptr::null_mut(),
                BYTES as usize,
                rights,
                MapFlags::SHARED,
                file.as_fd(),
                0,
            );
            Self {
                file,
                mapped: mapped.unwrap().cast(),
            }
        }
    }

    fn byte(&self, at: usize) -> u8 {
        // SAFETY: within the mapping, to which the RNIC writes.
        unsafe { self.mapped.add(at).read_volatile() }
    }

    fn set(&self, at: usize, byte: u8) {
        // SAFETY: within the mapping, of which the RNIC reads.
        unsafe { self.mapped.add(at).write_volatile(byte) };
    }
}

/// Of each kind one, and two queue pairs that are connected.
fn record() -> ContextRecord {
    let device = open();
    let way = way_to_itself(device.attributes().1);
    let qp = |qpn| QpRecord {
        qpn,
        pd: 1,
        send_cq: 3,
        recv_cq: 3,
        srq: None,
        qp_type: QpType::Rc,
        cap: cap(),
        attr: QpAttr {
            state: QpState::Rts,
            ..attributes(&way, 0, Access::LOCAL_WRITE)
        },
        groups: Vec::new(),
        physical_qpn: qpn,
        local_gid: None,
        remote: Some(Endpoint {
            gid: way.dgid,
            qpn: 99,
        }),
        paused: false,
    };
    ContextRecord {
        id: 5,
        gids: device.attributes().1.gid_table(),
        pds: vec![PdRecord { pd: 1 }],
        mrs: vec![MrRecord {
            lkey: 0x100,
            rkey: 0x101,
            physical_lkey: 0x100,
            physical_rkey: 0x101,
            pd: 1,
            address: AT,
            length: BYTES,
            iova: AT,
            access: Access::LOCAL_WRITE,
            segments: vec![SegmentRecord {
                address: AT,
                length: BYTES,
                offset: Some(0),
            }],
        }],
        channels: vec![ChannelRecord { channel: 2 }],
        cqs: vec![CqRecord {
            cq: 3,
            entries: 100,
            channel: Some(2),
        }],
        srqs: vec![SrqRecord {
            srq: 4,
            pd: 1,
            attr: SrqAttr {
                max_wr: 8,
                max_sge: 1,
                limit: 0,
            },
        }],
        qps: vec![qp(0x11), qp(0x12)],
        ..ContextRecord::default()
    }
}

/// As a helper makes it, which is killed then: what its library has is not given back.
fn made_by_a_helper(record: &ContextRecord, memory: &Memory) -> (MadeAhead, Vec<OwnedFd>) {
    let (trial, ahead) = trial::make(DEVICE, record, Some(&memory.file)).unwrap();
    std::mem::forget(trial);
    let (ahead, descriptors) = ahead.unwrap();
    assert_eq!(descriptors.len(), 3, "commands, asynchronous events, the channel");
    let packed = ahead::pack(&[ahead]).unwrap();
    (ahead::unpack(packed).unwrap().remove(0), descriptors)
}

fn make(device: Arc<dyn Device>, record: &ContextRecord, memory: &Memory) -> Result<Made, String> {
    let mut register = |device: &dyn Device, mr: &MrRecord, pd: u32| {
        device.reg_mr(&PhysicalMrInit {
            pd,
            access: mr.access,
            memory: PhysicalMemory {
                address: memory.mapped as u64,
                length: mr.length,
                iova: mr.iova,
                segments: &mr.segments,
                file: None,
            },
        })
    };
    Made::make(device, record, &Default::default(), &mut register).map_err(|error| error.to_string())
}

/// A SEND from one queue pair to the other, with an event.
fn works(mut made: Made, memory: &Memory, byte: u8) {
    let ends = made.unconnected();
    for (own, other) in [(0, 1), (1, 0)] {
        made.connect(&MadePeer {
            peer: StandbyPeer {
                qpn: ends[own].qpn,
                remote: ends[other].own,
                rq_psn: Some(ends[other].sq_psn),
            },
            key_table: None,
        })
        .unwrap();
    }
    let device = &made.device;
    // The program's, which goes from device to device.
    let before = open();
    let channel = before.create_comp_channel().unwrap();
    device
        .attach_comp_channel(made.claimed.channels[0].physical_channel, &*channel)
        .unwrap();
    let cq = &made.claimed.cqs[0];
    let place = CqPlace {
        cq: cq.physical_cq,
        entries: cq.entries,
        offset: cq.offset,
    };
    let mut cq = device.cq_end(&place).unwrap();
    let mut ends = made.claimed.qps.iter().map(|qp| {
        let place = QpPlace {
            qpn: qp.physical_qpn,
            cap: qp.cap,
            slot: qp.slot,
            offset: qp.offset,
        };
        device.qp_ends(&place).unwrap()
    });
    let (mut sender, mut receiver) = (ends.next().unwrap(), ends.next().unwrap());
    let sge = |offset| Sge {
        address: AT + offset,
        length: 100,
        lkey: made.claimed.mrs[0].physical_lkey,
    };
    memory.set(7, byte);
    cq.arm(false);
    receiver.recv.push(RECV_BIT, &[sge(8192)]);
    receiver.recv.publish().unwrap();
    let wqe = SendWqe {
        wr_id: 0,
        opcode: SendOpcode::Send as u8,
        flags: layout::SEND_SIGNALED,
        ..SendWqe::default()
    };
    sender.send.push(&wqe, Body::Sges(&[sge(0)]));
    sender.send.publish().unwrap();
    let mut completed = 0;
    until("completions are missing", || {
        completed += cq.pop().inspect(|cqe| assert_eq!(cqe.status, 0)).iter().count();
        completed == 2
    });
    assert_eq!(memory.byte(8192 + 7), byte, "it was written to the file's pages");
    assert_eq!(
        channel.next().unwrap(),
        3,
        "the event names the queue by its number"
    );
}

#[test]
#[ignore = "needs rxe0"]
fn rxe_another_library_goes_on_with_what_a_helper_has_made() {
    let (record, memory) = (record(), Memory::new());
    let (ahead, descriptors) = made_by_a_helper(&record, &memory);
    let rkeys = ahead.rkeys.clone();
    let made = answered(ahead, descriptors, || make(open(), &record, &memory)).unwrap();
    let now: Vec<_> = made.claimed.mrs.iter().map(|mr| mr.physical_rkey).collect();
    assert_eq!(now, rkeys, "the same region");
    works(made, &memory, 0x5a);
}

#[test]
#[ignore = "needs rxe0"]
fn rxe_a_library_that_asks_for_something_else_makes_all_by_itself() {
    let (mut record, memory) = (record(), Memory::new());
    let (ahead, descriptors) = made_by_a_helper(&record, &memory);
    record.cqs[0].entries = 50;
    let refused = answered(ahead, descriptors, || make(open(), &record, &memory));
    let why = refused.map(drop).unwrap_err();
    assert!(why.starts_with("attribute 1 of Cq is another"), "{why}");
    works(make(open(), &record, &memory).unwrap(), &memory, 0xa5);
}

#[test]
#[ignore = "needs rxe0"]
fn rxe_pages_of_no_file_are_not_handed_over() {
    let (trial, ahead) = trial::make(DEVICE, &record(), None).unwrap();
    let why = ahead.map(drop).unwrap_err();
    assert!(why.contains("has not come"), "{why}");
    drop(trial);
}
