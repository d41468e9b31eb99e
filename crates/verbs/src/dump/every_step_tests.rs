//! Two programs with requests of every kind under way in both directions, of which one is dumped and restored, or both are, at each
//! step of the network: what they see must be what they see without.

use std::path::Path;
use std::sync::Arc;

use verbatim_device::control::{Access, AddressVector, QpAttr, QpCap, QpSecret, QpState, QpType};
use verbatim_device::layout::Sge;
use verbatim_device::transitions::steps;

use super::{Owner, QpUser, Record, Restored, check};
use crate::testing::wire::{MEMORY, Wire, memory};
use crate::{
    Body, Context, Cq, Process, Qp, QpInit, RecvWr, SEND_FENCE, SEND_SIGNALED, SendOpcode, SendWr, Srq,
    UdAddress, Wc,
};

const CAP: QpCap = QpCap {
    max_send_wr: 16,
    max_recv_wr: 16,
    max_send_sge: 2,
    max_recv_sge: 2,
    max_inline_data: 64,
};
const REMOTE: Access = Access::REMOTE_READ
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_ATOMIC);
/// A run that takes more steps does not end.
const MOST_STEPS: usize = 5_000;

/// The words of a program that says where it is.
struct Words;

impl Owner for Words {
    fn cq(&self, _: &Cq) -> u64 {
        0xc0
    }
    fn srq(&self, _: &Srq) -> u64 {
        unreachable!("there is none here")
    }
    fn qp(&self, _: &Qp) -> QpUser {
        QpUser {
            context: 0x9b,
            extended: true,
        }
    }
}

struct End {
    process: Arc<Process>,
    context: Arc<Context>,
    cq: Arc<Cq>,
    qp: Arc<Qp>,
    key: u32,
    device: u8,
}

impl End {
    fn new(wire: &Wire, end: usize) -> Self {
        let device = end as u8 + 1;
        let process = Process::new(Path::new("/proc/none"));
        let context = process.open_on(|| Ok(wire.device(device))).unwrap();
        let pd = context.alloc_pd().unwrap();
        let start = memory(end);
        let mr = pd
            .reg_mr(start, MEMORY as u64, start, Access::LOCAL_WRITE | REMOTE)
            .unwrap();
        let cq = context.create_cq(64, None).unwrap();
        let init = QpInit {
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            qp_type: QpType::Rc,
            cap: CAP,
            signal_all: false,
            srq: None,
        };
        let qp = pd.create_qp(&init).unwrap();
        Self {
            process,
            context,
            cq,
            qp,
            key: mr.lkey(),
            device,
        }
    }

    fn connect(&self, other: &Self, psns: [u32; 2], first: bool) {
        let mut dgid = [0; 16];
        dgid[15] = other.device;
        let attr = QpAttr {
            path_mtu: 1,
            access: REMOTE,
            av: AddressVector {
                dgid,
                port_num: 1,
                ..AddressVector::default()
            },
            port_num: 1,
            max_rd_atomic: 2,
            max_dest_rd_atomic: 2,
            min_rnr_timer: 1,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            dest_qpn: other.qp.number(),
            sq_psn: psns[0],
            rq_psn: psns[1],
            ..QpAttr::default()
        };
        for (state, mask) in steps(QpType::Rc, QpState::Rts).unwrap() {
            self.qp.modify(mask, &QpAttr { state, ..attr }).unwrap();
        }
        self.qp
            .set_secret(Some(QpSecret { key: [3; 32], first }))
            .unwrap();
    }

    /// Dumps it and clears it away: what is left of it.
    fn leave(&self) -> Vec<u8> {
        let dump = self.context.dump(&Words).unwrap();
        assert!(self.context.stands() && dump.count == 4);
        self.qp.destroy().unwrap();
        dump.bytes
    }

    /// The same on another device, or on the same again.
    fn arrive(&mut self, wire: &Wire, device: u8, dump: &[u8]) {
        let process = Process::new(Path::new("/proc/none"));
        let context = process.open_on(|| Ok(wire.device(device))).unwrap();
        let records = check(dump).unwrap();
        let (mut cqs, mut qps) = (Vec::new(), Vec::new());
        for record in &records {
            match context.restore(record).unwrap() {
                Restored::Cq(cq, 0xc0) => cqs.push(cq),
                Restored::Qp(qp, user) => {
                    assert_eq!(user, Words.qp(&qp));
                    qps.push(qp);
                }
                Restored::Mr(mr) => assert_eq!((mr.lkey(), mr.rkey()), (self.key, self.key)),
                Restored::Pd(pd) => assert_eq!(pd.number(), 1),
                other => panic!("{other:?}"),
            }
            // A record is what it says.
            let encoded = record.encode().unwrap();
            assert_eq!(Record::parse(&encoded).as_ref(), Ok(record));
        }
        let qp = context.refill(records.last().unwrap()).unwrap();
        assert!(Arc::ptr_eq(&qp, &qps[0]) && qp.number() == self.qp.number());
        self.close();
        (self.process, self.context, self.qp) = (process, context, qp);
        (self.cq, self.device) = (cqs.remove(0), device);
    }

    fn post(&self, other: &Self, end: usize) {
        let at = |end: usize, offset: u64| memory(end) + offset;
        let sge = |offset, length| Sge {
            address: at(end, offset),
            length,
            lkey: self.key,
        };
        for n in 0..3 {
            let sges = [sge(1024 + 700 * n, 700)];
            self.qp
                .post_recv([RecvWr {
                    wr_id: 100 + n,
                    sges: &sges,
                }])
                .unwrap();
        }
        let long = [sge(0, 700)];
        let into = [sge(3520, 300)];
        let old = [sge(3848, 8)];
        let inline: [&[u8]; 1] = [b"in a line"];
        let to = |offset| at(1 - end, offset);
        use SendOpcode::*;
        let list: [(_, _, Body<'_>, u64); 6] = [
            (Send, SEND_SIGNALED, Body::Sges(&long), 0),
            (Write, 0, Body::Sges(&long[..]), to(3200)),
            (Read, SEND_SIGNALED, Body::Sges(&into), to(0)),
            (FetchAdd, SEND_SIGNALED, Body::Sges(&old), to(3840)),
            (Send, SEND_SIGNALED | SEND_FENCE, Body::Inline(&inline), 0),
            (SendWithImm, SEND_SIGNALED, Body::Sges(&long), 0),
        ];
        let short = [sge(0, 300)];
        for (wr_id, (opcode, flags, body, remote_address)) in (0..).zip(list) {
            let body = match opcode {
                Write => Body::Sges(&short),
                _ => body,
            };
            let request = SendWr {
                wr_id,
                opcode,
                flags,
                imm: wr_id as u32,
                remote_address,
                rkey: other.key,
                compare_add: 5,
                swap: 0,
                ud: UdAddress::default(),
                body,
            };
            self.qp.post_send([request]).unwrap();
        }
    }

    fn close(&self) {
        self.context.close().expect("a device in use");
        if let Some(helper) = self.process.helper.lock().take() {
            helper.stop(&self.process);
        }
    }
}

/// What the programs see: completions of sends and of RECVs, and what is in memory afterwards.
#[derive(Debug, PartialEq)]
struct Trace {
    completions: [[Vec<Wc>; 2]; 2],
    memory: [Vec<u8>; 2],
}

/// What is done at a step.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Act {
    Nothing,
    /// Dumped, and restored elsewhere.
    Elsewhere(usize),
    /// Both are dumped, and restored where they were.
    BothHere,
    /// Dumped; after a while it goes on.
    Stand(usize),
}

/// The trace, and how many steps there were.
fn run(at: usize, act: Act, losses: &[bool]) -> (Trace, usize) {
    let wire = Wire::new();
    let mut ends = [End::new(&wire, 0), End::new(&wire, 1)];
    let psns = [0xff_fffd, 0xff_ffff];
    ends[0].connect(&ends[1], psns, true);
    ends[1].connect(&ends[0], [psns[1], psns[0]], false);
    for end in 0..2 {
        let bytes: Vec<u8> = (0..1024).map(|n| (n % 251) as u8 ^ (end as u8 * 0x80)).collect();
        wire.fill(end, 0, &bytes);
        ends[end].post(&ends[1 - end], end);
    }
    wire.lose(losses.iter().copied());
    let mut completions: [[Vec<Wc>; 2]; 2] = Default::default();
    let mut step = 0;
    loop {
        if step == at {
            match act {
                Act::Nothing => {}
                Act::Elsewhere(end) => {
                    let dump = ends[end].leave();
                    ends[end].arrive(&wire, 3 + end as u8, &dump);
                }
                Act::BothHere => {
                    let dumps = [ends[0].leave(), ends[1].leave()];
                    for (end, dump) in dumps.iter().enumerate() {
                        ends[end].arrive(&wire, 1 + end as u8, dump);
                    }
                }
                Act::Stand(end) => {
                    // The partner waits for the end of that, and not for the limit.
                    wire.count_move(true);
                    ends[end].context.dump(&Words).unwrap();
                }
            }
        }
        if let (Act::Stand(end), true) = (act, step == at + 7) {
            ends[end].context.go_on().unwrap();
            wire.count_move(false);
        }
        let worked = wire.step();
        for (end, seen) in ends.iter().zip(&mut completions) {
            while let Some(completion) = end.cq.poll_one() {
                let wc = completion.wc;
                seen[usize::from(wc.wr_id >= 100)].push(wc);
            }
        }
        step += 1;
        assert!(step < MOST_STEPS, "it does not end");
        if !worked && step > at + 7 {
            break;
        }
    }
    ends.iter().for_each(End::close);
    let memory = [0, 1].map(|end| wire.ram(end));
    (Trace { completions, memory }, step)
}

fn at_every_step(losses: &[bool]) {
    let (plain, count) = run(0, Act::Nothing, losses);
    for [sends, recvs] in &plain.completions {
        assert_eq!((sends.len(), recvs.len()), (5, 3), "it all happens");
        assert!(sends.iter().chain(recvs).all(|wc| wc.status == 0));
    }
    for at in 0..count {
        for act in [
            Act::Elsewhere(0),
            Act::Elsewhere(1),
            Act::BothHere,
            Act::Stand(0),
            Act::Stand(1),
        ] {
            let (trace, _) = run(at, act, losses);
            assert_eq!(trace.completions, plain.completions, "{act:?} at step {at}");
            assert!(
                trace.memory == plain.memory,
                "{act:?} at step {at}: memory differs"
            );
        }
    }
}

#[test]
fn dumped_at_any_step_nobody_notices() {
    at_every_step(&[]);
}

#[test]
fn nor_where_packets_are_lost() {
    let losses: Vec<bool> = (0..60).map(|n| n % 5 == 3).collect();
    at_every_step(&losses);
}
