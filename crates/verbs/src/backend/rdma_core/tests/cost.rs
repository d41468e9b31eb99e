//! What the way through costs, against the library called directly, whose fake completes at once; before and after a move:
//! `cargo test --release -p verbatim-verbs --lib -- --ignored cost --nocapture`.
//!
//! Cycles of the time-stamp counter for one operation, in batches, of which the best tenth counts, each way in turn.

use std::time::Instant;

use super::through_the_objects::{Program, program};
use super::*;
use crate::tables::KeyTable;
use crate::work::{Body, RECV_BIT, RecvWr, SEND_SIGNALED, SendOpcode, SendWr, UdAddress, Wc};

const BATCH: u64 = 8;
const TURNS: usize = 100;
const BATCHES: usize = 200;
const KEY: u32 = 0x4207;
const SGES: [Sge; 1] = [Sge {
    address: 4096,
    length: 64,
    lkey: KEY,
}];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Directly,
    Through,
    ThroughAfterAMove,
}

const WAYS: [Way; 3] = [Way::Directly, Way::Through, Way::ThroughAfterAMove];

/// The time-stamp counter, after everything before it.
#[cfg(target_arch = "x86_64")]
fn now() -> u64 {
    // SAFETY: every x86-64 processor has them.
    unsafe {
        std::arch::x86_64::_mm_lfence();
        let now = std::arch::x86_64::_rdtsc();
        std::arch::x86_64::_mm_lfence();
        now
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn now() -> u64 {
    crate::sys::monotonic_ns()
}

struct Subject<'a> {
    way: Way,
    fake: &'a Fake,
    program: Program,
    base: *mut ffi::ibv_qp,
    sge: Sge,
    wr: ffi::ibv_send_wr,
    /// Cycles of batches of posting sends, RECVs, and polling.
    batches: [Vec<u64>; 3],
}

impl<'a> Subject<'a> {
    fn new(fake: &'a Fake, way: Way) -> Self {
        let program = program(fake);
        if way == Way::ThroughAfterAMove {
            let keys = Arc::new(KeyTable::new());
            keys.set(KEY, KEY);
            let mut send = program.qp.send.lock();
            send.set_local_keys(keys.clone());
            send.set_remote_keys(Some(keys.clone()));
            program.qp.recv.lock().set_local_keys(keys);
        }
        let base = fake.qp(program.qp.number());
        program.qp.post_send([write(0)]).unwrap();
        assert_eq!(program.cq.poll(&mut [Wc::default()]), 1);
        let wr = fake.last(1)[0].wr;
        Self {
            way,
            fake,
            program,
            base,
            sge: SGES[0],
            wr,
            batches: Default::default(),
        }
    }

    fn post_sends(&mut self) {
        for n in 0..BATCH {
            if self.way != Way::Directly {
                self.program.qp.post_send([write(n)]).unwrap();
                continue;
            }
            let mut bad = std::ptr::null_mut();
            self.wr.wr_id = n;
            self.wr.next = std::ptr::null_mut();
            self.wr.sg_list = &raw mut self.sge;
            // SAFETY: the fake's queue pair is alive, the request is whole.
            unsafe {
                let ops = &(*(*self.base).context).ops;
                assert_eq!(ops.post_send.unwrap()(self.base, &mut self.wr, &mut bad), 0);
            }
        }
    }

    fn post_recvs(&mut self) {
        for n in 0..BATCH {
            if self.way != Way::Directly {
                self.program
                    .qp
                    .post_recv([RecvWr {
                        wr_id: n,
                        sges: &SGES,
                    }])
                    .unwrap();
                continue;
            }
            let mut bad = std::ptr::null_mut();
            let mut wr = ffi::ibv_recv_wr {
                wr_id: n | RECV_BIT,
                next: std::ptr::null_mut(),
                sg_list: &raw mut self.sge,
                num_sge: 1,
            };
            // SAFETY: as above.
            unsafe {
                let ops = &(*(*self.base).context).ops;
                assert_eq!(ops.post_recv.unwrap()(self.base, &mut wr, &mut bad), 0);
            }
        }
    }

    fn polls(&mut self) {
        let mut wc = [Wc::default()];
        for _ in 0..BATCH {
            let found = if self.way != Way::Directly {
                self.program.cq.poll(&mut wc)
            } else {
                // SAFETY: the fake's queue is alive.
                unsafe {
                    let ops = &(*(*self.base).context).ops;
                    ops.poll_cq.unwrap()((*self.base).send_cq, 1, wc.as_mut_ptr()) as usize
                }
            };
            assert_eq!(found, 1);
        }
    }

    fn turn(&mut self) {
        for _ in 0..BATCHES {
            let start = now();
            self.post_sends();
            let sent = now();
            self.polls();
            let polled = now();
            self.post_recvs();
            let received = now();
            for _ in 0..BATCH {
                assert!(self.fake.receive(self.program.qp.number(), 1, false));
            }
            self.polls();
            for (batches, cycles) in
                self.batches
                    .iter_mut()
                    .zip([sent - start, received - polled, polled - sent])
            {
                batches.push(cycles);
            }
        }
    }

    fn best(&mut self) -> [f64; 3] {
        self.batches.each_mut().map(|batches| {
            batches.sort_unstable();
            batches[batches.len() / 10] as f64 / BATCH as f64
        })
    }
}

fn write(wr_id: u64) -> SendWr<'static> {
    SendWr {
        wr_id,
        opcode: SendOpcode::Write,
        flags: SEND_SIGNALED,
        imm: 0,
        remote_address: 8192,
        rkey: KEY,
        compare_add: 0,
        swap: 0,
        ud: UdAddress::default(),
        body: Body::Sges(&SGES),
    }
}

#[test]
#[ignore = "prints cycles and checks nothing"]
fn cost_of_a_request_and_its_completion() {
    let fake = Fake::new();
    let mut subjects = WAYS.map(|way| Subject::new(&fake, way));
    for _ in 0..TURNS {
        subjects.iter_mut().for_each(Subject::turn);
    }
    let (begun, cycles) = (Instant::now(), now());
    while begun.elapsed().as_millis() < 50 {
        std::hint::spin_loop();
    }
    let rate = (now() - cycles) as f64 / begun.elapsed().as_nanos() as f64;
    let best = subjects.each_mut().map(Subject::best);
    println!(
        "cycles of an operation of 64 B, {rate:.2} to the ns: directly, through the objects, after a move"
    );
    for (index, operation) in ["write", "recv", "poll"].iter().enumerate() {
        let [directly, through, moved] = best.map(|of| of[index]);
        println!("{operation:6} {directly:7.1} {through:7.1} {moved:7.1}");
    }
}
