//! What virtualisation costs on the data path: the same requests through bare ring ends, and through the objects.
//!
//! `cargo test --release -p verbatim-verbs cost -- --ignored --nocapture`. The RNIC's side is played by the same thread
//! between the timed stretches, so that no other core's caches are measured.

#![allow(unsafe_code)]

use std::os::fd::OwnedFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use verbatim_device::control::{DeviceAttr, PortAttr, QpAttr, QpAttrMask, QpCap, QpState, QpType};
use verbatim_device::layout::{CONTEXT_BYTES, CqLayout, Cqe, QpLayout, SEND_SIGNALED, SendWqe, Sge};
use verbatim_device::ring::{Body, CqProducer, SendConsumer, SentWqe};

use super::map::Arena;
use super::rings::{SoftCompletions, SoftRecvs, SoftSends};
use crate::backend::{
    CompletionRing, CqPlace, Device, Parked, PhysicalMrInit, PhysicalQpInit, QpEnds, QpPlace, SendRing,
};
use crate::error::VerbsError;
use crate::tables::KeyTable;
use crate::{Process, QpInit, SendOpcode, SendWr, UdAddress, Wc};

const BATCH: u64 = 32;
const ROUNDS: u32 = 100_000;
const ARENA_BYTES: u64 = 1 << 20;
const QP_OFFSET: u64 = CONTEXT_BYTES;
const CQ_OFFSET: u64 = 512 << 10;
const CQ_ENTRIES: u32 = 256;
const QPN: u32 = 0x1234;
const LKEY: u32 = 0x4207;

const CAP: QpCap = QpCap {
    max_send_wr: 64,
    max_recv_wr: 64,
    max_send_sge: 2,
    max_recv_sge: 2,
    max_inline_data: 64,
};

/// A device with one queue pair and one completion queue in an arena of its own.
#[derive(Debug)]
struct Bare {
    arena: Arc<Arena>,
    device: DeviceAttr,
    port: PortAttr,
}

/// The RNIC's side of it: completes all at once.
struct Hardware {
    sends: SendConsumer,
    completions: CqProducer,
    wqe: SentWqe,
}

fn bare() -> (Bare, Hardware) {
    let memory = rustix::fs::memfd_create("cost", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, ARENA_BYTES).unwrap();
    let wake: OwnedFd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    // SAFETY: a new mapping, which lives as long as the test; of each queue there is one end of this role.
    let (sends, completions) = unsafe {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let base = rustix::mm::mmap(
            std::ptr::null_mut(),
            ARENA_BYTES as usize,
            rights,
            MapFlags::SHARED,
            &memory,
            0,
        );
        let base = NonNull::new(base.unwrap().cast::<u8>()).unwrap();
        (
            SendConsumer::new(base.add(QP_OFFSET as usize), &QpLayout::new(&CAP)),
            CqProducer::new(base.add(CQ_OFFSET as usize), &CqLayout::new(CQ_ENTRIES)),
        )
    };
    let world = crate::testing::World::default();
    let model = world.device(1);
    let (device, port) = model.attributes();
    let bare = Bare {
        arena: Arc::new(Arena::map(&memory, ARENA_BYTES, wake).unwrap()),
        device: device.clone(),
        port: port.clone(),
    };
    let hardware = Hardware {
        sends,
        completions,
        wqe: SentWqe::default(),
    };
    (bare, hardware)
}

impl Hardware {
    fn work(&mut self) {
        while self.sends.pop(&mut self.wqe).unwrap() {
            self.sends.complete(1);
            let cqe = Cqe {
                wr_id: self.wqe.head.wr_id,
                qpn: QPN,
                ..Cqe::default()
            };
            assert!(self.completions.push(&cqe));
        }
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
        Ok((LKEY, LKEY))
    }
    fn dereg_mr(&self, _: u32) -> Result<(), VerbsError> {
        Ok(())
    }
    fn create_cq(&self, _: u32, _: Option<(u32, u32)>) -> Result<CqPlace, VerbsError> {
        Ok(CqPlace {
            cq: 1,
            entries: CQ_ENTRIES,
            offset: CQ_OFFSET,
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
            offset: QP_OFFSET,
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
        let (send, recv) = self.arena.qp_ends(place).unwrap();
        Ok(QpEnds {
            send: Box::new(SoftSends::new(self.arena.clone(), send, place.slot)),
            recv: Box::new(SoftRecvs::new(self.arena.clone(), recv)),
        })
    }
    fn cq_end(&self, place: &CqPlace) -> Result<Box<dyn CompletionRing>, VerbsError> {
        let end = self.arena.cq_end(place).unwrap();
        Ok(Box::new(SoftCompletions::new(self.arena.clone(), end)))
    }
    fn park(self: Arc<Self>) -> Result<Parked, VerbsError> {
        Err(VerbsError::Invalid("a measurement does not move".to_owned()))
    }
}

/// Nanoseconds per request, the best tenth of all rounds.
fn report(name: &str, mut post: Vec<Duration>, mut poll: Vec<Duration>) {
    let best = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 10].as_nanos() as f64 / BATCH as f64
    };
    println!(
        "{name:<28} post {:5.1} ns  poll {:5.1} ns",
        best(&mut post),
        best(&mut poll)
    );
}

fn time(times: &mut Vec<Duration>, work: impl FnOnce()) {
    let start = Instant::now();
    work();
    times.push(start.elapsed());
}

#[test]
#[ignore = "a measurement"]
fn cost_of_posting_and_polling() {
    let (device, mut hardware) = bare();
    let sges = [Sge {
        address: 4096,
        length: 8,
        lkey: LKEY,
    }];
    let (mut post, mut poll) = (Vec::new(), Vec::new());
    {
        let place = device
            .create_qp(&PhysicalQpInit {
                pd: 1,
                send_cq: 1,
                recv_cq: 1,
                srq: None,
                qp_type: QpType::Rc,
                cap: CAP,
            })
            .unwrap();
        let (send, _recv) = device.arena.qp_ends(&place).unwrap();
        let mut ring = SoftSends::new(device.arena.clone(), send, 0);
        let mut completions = device.arena.cq_end(&device.create_cq(1, None).unwrap()).unwrap();
        for _ in 0..ROUNDS {
            time(&mut post, || {
                for wr_id in 0..BATCH {
                    let wqe = SendWqe {
                        wr_id,
                        flags: SEND_SIGNALED,
                        num_sge: 1,
                        ..SendWqe::default()
                    };
                    assert!(ring.room() > 0);
                    ring.push(&wqe, Body::Sges(std::hint::black_box(&sges)));
                    ring.publish().unwrap();
                }
            });
            hardware.work();
            time(&mut poll, || {
                for _ in 0..BATCH {
                    std::hint::black_box(completions.pop().unwrap());
                }
            });
        }
    }
    report("bare ring ends", post, poll);

    let process = Process::new(Path::new("/proc/none"));
    let context = process.open_on(|| Ok(Arc::new(device))).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(CQ_ENTRIES, None).unwrap();
    let init = QpInit {
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        qp_type: QpType::Rc,
        cap: CAP,
        signal_all: false,
        srq: None,
    };
    let qp = pd.create_qp(&init).unwrap();
    let attr = QpAttr {
        state: QpState::Rts,
        ..QpAttr::default()
    };
    qp.modify(QpAttrMask::STATE, &attr).unwrap();
    for moved in [false, true] {
        if moved {
            let keys = Arc::new(KeyTable::new());
            keys.set(LKEY, LKEY);
            qp.send.lock().set_local_keys(keys.clone());
            qp.send.lock().set_remote_keys(Some(keys));
        }
        let (mut post, mut poll) = (Vec::new(), Vec::new());
        let mut wc = [Wc::default()];
        for _ in 0..ROUNDS {
            time(&mut post, || {
                for wr_id in 0..BATCH {
                    let request = SendWr {
                        wr_id,
                        opcode: SendOpcode::Write,
                        flags: crate::SEND_SIGNALED,
                        imm: 0,
                        remote_address: 0,
                        rkey: LKEY,
                        compare_add: 0,
                        swap: 0,
                        ud: UdAddress::default(),
                        body: Body::Sges(std::hint::black_box(&sges)),
                    };
                    qp.post_send([request]).unwrap();
                }
            });
            hardware.work();
            time(&mut poll, || {
                for _ in 0..BATCH {
                    assert_eq!(cq.poll(&mut wc), 1);
                }
            });
        }
        report(
            if moved { "objects, after a move" } else { "objects" },
            post,
            poll,
        );
    }
}
