//! For the measurement of what virtualisation costs on the data path (`bench/run cost`): the objects of this crate and a
//! provider without virtualisation, above the same rings.
//!
//! The RNIC's side is played by the same thread between the measured stretches, so that no other core's caches are
//! measured, and every run executes the same instructions.

#![allow(unsafe_code)]

mod system;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::event::EventfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use verbatim_device::control::{DeviceAttr, PortAttr, QpAttr, QpAttrMask, QpCap, QpState, QpType};
use verbatim_device::layout::{
    self, CONTEXT_BYTES, CqLayout, Cqe, QpLayout, SEND_SIGNALED, SIGNS_OFFSET, SendWqe, Sge,
};
use verbatim_device::ring::{Body, CqProducer, RecvConsumer, SendConsumer, SentWqe, SignsWriter};

use crate::backend::soft::map::Arena;
use crate::backend::soft::rings::{SoftCompletions, SoftRecvs, SoftSends};
use crate::backend::{
    CompletionRing, CqPlace, Device, Parked, PhysicalMrInit, PhysicalQpInit, QpEnds, QpPlace, RecvRing,
    SendRing,
};
use crate::error::{PostError, VerbsError};
use crate::lock::Mutex;
use crate::tables::KeyTable;
use crate::work::{self, RECV_BIT, RecvWr, SendWr, Wc};
use crate::{Cq, Process, Qp, QpInit};

pub use self::system::System;

const ARENA_BYTES: u64 = 2 << 20;
/// Of the objects, and of the provider.
const QP_OFFSETS: [u64; 2] = [CONTEXT_BYTES, 1 << 20];
const CQ_OFFSETS: [u64; 2] = [512 << 10, (1 << 20) + (512 << 10)];
const CQ_ENTRIES: u32 = 256;
const QPN: u32 = 0x0012_3456;
/// The key of the one region, local and remote.
pub const KEY: u32 = 0x4207;

const CAP: QpCap = QpCap {
    max_send_wr: 64,
    max_recv_wr: 64,
    max_send_sge: 2,
    max_recv_sge: 2,
    max_inline_data: 64,
};

/// One queue pair with its completion queue, in two ways.
pub struct Rig {
    /// Through the objects.
    pub qp: Arc<Qp>,
    /// Its completions.
    pub cq: Arc<Cq>,
    /// Without virtualisation.
    pub provider: Provider,
    /// The RNIC of the objects, and of the provider.
    hardware: [Hardware; 2],
    signs: SignsWriter,
}

impl Rig {
    /// Makes all of it.
    #[allow(clippy::new_without_default, reason = "it maps memory")]
    pub fn new() -> Self {
        let (device, hardware, signs) = Bare::new();
        let arena = device.arena.clone();
        let provider = Provider::new(&arena);
        let process = Process::new(Path::new("/proc/none"));
        let context = process
            .open_on(|| Ok(Arc::new(device)))
            .expect("nothing can fail there");
        let pd = context.alloc_pd().expect("as above");
        let cq = context.create_cq(CQ_ENTRIES, None).expect("as above");
        let init = QpInit {
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            qp_type: QpType::Rc,
            cap: CAP,
            signal_all: false,
            srq: None,
        };
        let qp = pd.create_qp(&init).expect("as above");
        let attr = QpAttr {
            state: QpState::Rts,
            ..QpAttr::default()
        };
        qp.modify(QpAttrMask::STATE, &attr).expect("as above");
        Self {
            qp,
            cq,
            provider,
            hardware,
            signs,
        }
    }

    /// From now on keys are translated, as after a move of this process and of its peer.
    pub fn is_moved(&self) {
        let keys = Arc::new(KeyTable::new());
        keys.set(KEY, KEY);
        let mut send = self.qp.send.lock();
        send.set_local_keys(keys.clone());
        send.set_remote_keys(Some(keys.clone()));
        drop(send);
        self.qp.recv.lock().set_local_keys(keys);
    }

    /// The RNICs complete all that was posted.
    pub fn complete(&mut self) {
        self.hardware.iter_mut().for_each(Hardware::complete);
    }

    /// The RNIC has to wait for a core, or not any more.
    pub fn set_starved(&self, starved: bool) {
        self.signs.set_starved(starved);
    }
}

/// What an RNIC's library does that virtualises nothing: it locks, checks, writes requests into rings and reads completions
/// out of them. The RNIC keeps the `wr_id`.
pub struct Provider {
    send: Mutex<ProviderSends>,
    recv: Mutex<ProviderRecvs>,
    cq: Mutex<SoftCompletions>,
}

struct ProviderSends {
    ring: SoftSends,
    state: QpState,
    cap: QpCap,
    signal_all: bool,
}

struct ProviderRecvs {
    ring: SoftRecvs,
    state: QpState,
    cap: QpCap,
}

impl Provider {
    fn new(arena: &Arc<Arena>) -> Self {
        let place = QpPlace {
            qpn: QPN,
            cap: CAP,
            slot: 1,
            offset: QP_OFFSETS[1],
        };
        let (send, recv) = arena.qp_ends(&place).expect("it is in the arena");
        let place = CqPlace {
            cq: 2,
            entries: CQ_ENTRIES,
            offset: CQ_OFFSETS[1],
        };
        let cq = arena.cq_end(&place).expect("it is in the arena");
        Self {
            send: Mutex::new(ProviderSends {
                ring: SoftSends::new(arena.clone(), send, 1),
                state: QpState::Rts,
                cap: CAP,
                signal_all: false,
            }),
            recv: Mutex::new(ProviderRecvs {
                ring: SoftRecvs::new(arena.clone(), recv),
                state: QpState::Rts,
                cap: CAP,
            }),
            cq: Mutex::new(SoftCompletions::new(arena.clone(), cq)),
        }
    }

    /// Posts one request.
    #[inline]
    pub fn post_send(&self, wr: &SendWr<'_>) -> Result<(), PostError> {
        let mut queue = self.send.lock();
        queue.push(wr)?;
        queue.ring.publish().expect("this RNIC refuses nothing");
        Ok(())
    }

    /// Posts one RECV.
    #[inline]
    pub fn post_recv(&self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let mut queue = self.recv.lock();
        if queue.state == QpState::Reset {
            return Err(PostError::State(queue.state));
        }
        if wr.sges.len() > queue.cap.max_recv_sge as usize {
            return Err(PostError::TooManyEntries);
        }
        if queue.ring.room() == 0 {
            return Err(PostError::Full);
        }
        queue.ring.push(wr.wr_id | RECV_BIT, wr.sges);
        queue.ring.publish().expect("this RNIC refuses nothing");
        Ok(())
    }

    /// Takes completions, as many as there are and `out` holds; how many.
    pub fn poll(&self, out: &mut [Wc]) -> usize {
        let mut ring = self.cq.lock();
        let mut taken = 0;
        while taken < out.len() {
            let Some(cqe) = ring.pop() else { break };
            out[taken] = Wc {
                wr_id: cqe.wr_id,
                status: cqe.status,
                opcode: cqe.opcode,
                vendor_err: cqe.vendor_err,
                byte_len: cqe.byte_len,
                imm: cqe.imm,
                qp_num: cqe.qpn,
                src_qp: cqe.src_qpn,
                wc_flags: cqe.wc_flags,
                pkey_index: 0,
                slid: 0,
                sl: cqe.sl as u8,
                dlid_path_bits: 0,
            };
            taken += 1;
        }
        taken
    }
}

impl ProviderSends {
    #[inline]
    fn push(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        if !matches!(
            self.state,
            QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Err
        ) {
            return Err(PostError::State(self.state));
        }
        let (num_sge, inline_bytes) = match wr.body {
            Body::Sges(sges) if sges.len() > self.cap.max_send_sge as usize => {
                return Err(PostError::TooManyEntries);
            }
            Body::Sges(sges) => (sges.len() as u16, 0),
            Body::Inline(pieces) => {
                let bytes: usize = pieces.iter().map(|piece| piece.len()).sum();
                if bytes > self.cap.max_inline_data as usize {
                    return Err(PostError::InlineTooLong);
                }
                (0, bytes as u32)
            }
        };
        let bit = |set: bool, flag: u8| if set { flag } else { 0 };
        let signaled = wr.flags & work::SEND_SIGNALED != 0 || self.signal_all;
        let wqe = SendWqe {
            wr_id: wr.wr_id,
            opcode: wr.opcode as u8,
            flags: bit(signaled, SEND_SIGNALED)
                | bit(wr.flags & work::SEND_SOLICITED != 0, layout::SEND_SOLICITED)
                | bit(wr.flags & work::SEND_FENCE != 0, layout::SEND_FENCE)
                | bit(matches!(wr.body, Body::Inline(_)), layout::SEND_INLINE),
            num_sge,
            imm: wr.imm,
            remote_address: wr.remote_address,
            rkey: wr.rkey,
            inline_bytes,
            compare_add: wr.compare_add,
            swap: wr.swap,
            remote_qpn: wr.ud.remote_qpn,
            remote_qkey: wr.ud.remote_qkey,
            ah: wr.ud.ah,
            reserved: 0,
        };
        match self.ring.try_push(&wqe, wr.body) {
            true => Ok(()),
            false => Err(PostError::Full),
        }
    }
}

/// The RNIC's side of a queue pair: completes all at once.
struct Hardware {
    sends: SendConsumer,
    recvs: RecvConsumer,
    completions: CqProducer,
    wqe: SentWqe,
    sges: Vec<Sge>,
}

impl Hardware {
    fn complete(&mut self) {
        while self.sends.pop(&mut self.wqe).expect("the indices are ours") {
            self.sends.complete(1);
            push(&mut self.completions, self.wqe.head.wr_id);
        }
        while let Some(wr_id) = self.recvs.pop(&mut self.sges).expect("the indices are ours") {
            push(&mut self.completions, wr_id.expect("the entries fit"));
        }
    }
}

fn push(completions: &mut CqProducer, wr_id: u64) {
    let cqe = Cqe {
        wr_id,
        qpn: QPN,
        ..Cqe::default()
    };
    assert!(completions.push(&cqe), "whoever measures polls in time");
}

/// A device with one queue pair and one completion queue in an arena of its own.
#[derive(Debug)]
struct Bare {
    arena: Arc<Arena>,
    device: DeviceAttr,
    port: PortAttr,
}

impl Bare {
    fn new() -> (Self, [Hardware; 2], SignsWriter) {
        let memory = rustix::fs::memfd_create("measure", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
        rustix::fs::ftruncate(&memory, ARENA_BYTES).expect("memory");
        let wake: OwnedFd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor");
        // SAFETY: a new mapping, at an address that the kernel chooses; it stays until the process ends.
        let base = unsafe {
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(
                std::ptr::null_mut(),
                ARENA_BYTES as usize,
                rights,
                MapFlags::SHARED,
                &memory,
                0,
            )
        };
        let base =
            NonNull::new(base.expect("memory").cast::<u8>()).expect("mmap never returns the null page");
        let queues = QpLayout::new(&CAP);
        // SAFETY: both queues lie inside of the mapping and apart from each other; of each there is one end of this role.
        let hardware = [0, 1].map(|index| unsafe {
            let qp = base.add(QP_OFFSETS[index] as usize);
            let cq = base.add(CQ_OFFSETS[index] as usize);
            Hardware {
                sends: SendConsumer::new(qp, &queues),
                recvs: RecvConsumer::new(qp, &queues.recv),
                completions: CqProducer::new(cq, &CqLayout::new(CQ_ENTRIES)),
                wqe: SentWqe::default(),
                sges: Vec::new(),
            }
        });
        // SAFETY: they lie behind the context page and in front of both queues.
        let signs = unsafe { SignsWriter::new(base.add(SIGNS_OFFSET as usize).cast()) };
        let bare = Self {
            arena: Arc::new(Arena::map(&memory, ARENA_BYTES, wake).expect("memory")),
            device: DeviceAttr::default(),
            port: PortAttr::default(),
        };
        (bare, hardware, signs)
    }
}

impl Device for Bare {
    fn attributes(&self) -> (&DeviceAttr, &PortAttr) {
        (&self.device, &self.port)
    }
    fn alloc_pd(&self) -> Result<u32, VerbsError> {
        Ok(1)
    }
    fn dealloc_pd(&self, _: u32) -> Result<(), VerbsError> {
        Ok(())
    }
    fn reg_mr(&self, _: &PhysicalMrInit<'_>) -> Result<(u32, u32), VerbsError> {
        Ok((KEY, KEY))
    }
    fn dereg_mr(&self, _: u32) -> Result<(), VerbsError> {
        Ok(())
    }
    fn create_cq(&self, _: u32, _: Option<(u32, u32)>) -> Result<CqPlace, VerbsError> {
        Ok(CqPlace {
            cq: 1,
            entries: CQ_ENTRIES,
            offset: CQ_OFFSETS[0],
        })
    }
    fn destroy_cq(&self, _: u32) -> Result<(), VerbsError> {
        Ok(())
    }
    fn create_qp(&self, _: &PhysicalQpInit) -> Result<QpPlace, VerbsError> {
        Ok(QpPlace {
            qpn: QPN,
            cap: CAP,
            slot: 0,
            offset: QP_OFFSETS[0],
        })
    }
    fn modify_qp(&self, _: u32, _: QpAttrMask, _: &QpAttr) -> Result<(), VerbsError> {
        Ok(())
    }
    fn query_qp(&self, _: u32) -> Result<QpAttr, VerbsError> {
        Ok(QpAttr::default())
    }
    fn destroy_qp(&self, _: u32) -> Result<(), VerbsError> {
        Ok(())
    }
    fn qp_ends(&self, place: &QpPlace) -> Result<QpEnds, VerbsError> {
        let (send, recv) = self.arena.qp_ends(place).expect("it is in the arena");
        Ok(QpEnds {
            send: Box::new(SoftSends::new(self.arena.clone(), send, place.slot)),
            recv: Box::new(SoftRecvs::new(self.arena.clone(), recv)),
        })
    }
    fn cq_end(&self, place: &CqPlace) -> Result<Box<dyn CompletionRing>, VerbsError> {
        let end = self.arena.cq_end(place).expect("it is in the arena");
        Ok(Box::new(SoftCompletions::new(self.arena.clone(), end)))
    }
    fn park(self: Arc<Self>) -> Result<Parked, VerbsError> {
        Err(VerbsError::Invalid("a measurement does not move".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SendOpcode, UdAddress};

    #[test]
    fn both_ways_complete_what_they_are_given() {
        let mut rig = Rig::new();
        for moved in [false, true] {
            if moved {
                rig.is_moved();
            }
            let sges = [Sge {
                address: 4096,
                length: 64,
                lkey: KEY,
            }];
            let send = SendWr {
                wr_id: 7,
                opcode: SendOpcode::Write,
                flags: work::SEND_SIGNALED,
                imm: 0,
                remote_address: 0,
                rkey: KEY,
                compare_add: 0,
                swap: 0,
                ud: UdAddress::default(),
                body: Body::Sges(&sges),
            };
            let recv = RecvWr {
                wr_id: 8,
                sges: &sges,
            };
            rig.qp.post_send([send]).unwrap();
            rig.qp.post_recv([recv]).unwrap();
            rig.provider.post_send(&send).unwrap();
            rig.provider.post_recv(&recv).unwrap();
            rig.complete();
            let mut wcs = [Wc::default(); 4];
            assert_eq!(rig.cq.poll(&mut wcs), 2);
            assert_eq!((wcs[0].wr_id, wcs[1].wr_id), (7, 8));
            assert_eq!(rig.provider.poll(&mut wcs), 2);
            assert_eq!((wcs[0].wr_id, wcs[1].wr_id), (7, 8 | RECV_BIT));
        }
    }
}
