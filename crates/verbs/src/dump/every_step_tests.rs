//! Two programs with requests of every kind under way in both directions, of which one is dumped and restored, or both are, at each
//! step of the network: what they see must be what they see without.

use std::path::Path;
use std::sync::Arc;

use verbatim_device::control::QpSecret;

use super::{Owner, QpUser, Record, Restored, check};
use crate::session::Sessions;
use crate::testing::{End, Shape, Wire};
use crate::{
    Body, Cq, Process, Qp, RecvWr, SEND_FENCE, SEND_SIGNALED, SendOpcode, SendWr, Srq, UdAddress, Wc,
};

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

/// Dumps it and clears it away: what is left of it.
fn leave(end: &End) -> Vec<u8> {
    let dump = end.context.dump(&Words).unwrap();
    assert!(end.context.stands() && dump.count == 4);
    end.qp.destroy().unwrap();
    dump.bytes
}

/// The same on another device, or on the same again.
fn arrive(end: &mut End, wire: &Wire, device: u8, dump: &[u8]) {
    let process = Process::new(Path::new("/proc/none"));
    let context = process.open_on(|| Ok(wire.device(device))).unwrap();
    let records = check(dump).unwrap();
    let (mut pds, mut mrs, mut cqs, mut qps) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for record in &records {
        match context.restore(record).unwrap() {
            Restored::Cq(cq, 0xc0) => cqs.push(cq),
            Restored::Qp(qp, user) => {
                assert_eq!(user, Words.qp(&qp));
                qps.push(qp);
            }
            Restored::Mr(mr) => {
                let key = end.mr.lkey();
                assert_eq!((mr.lkey(), mr.rkey()), (key, key));
                mrs.push(mr);
            }
            Restored::Pd(pd) => {
                assert_eq!(pd.number(), 1);
                pds.push(pd);
            }
            other => panic!("{other:?}"),
        }
        // A record is what it says.
        let encoded = record.encode().unwrap();
        assert_eq!(Record::parse(&encoded).as_ref(), Ok(record));
    }
    let qp = context.refill(records.last().unwrap()).unwrap();
    assert!(Arc::ptr_eq(&qp, &qps[0]) && qp.number() == end.qp.number());
    *end = End {
        sessions: Sessions::new(process.clone()),
        process,
        context,
        pd: pds.remove(0),
        mr: mrs.remove(0),
        cq: cqs.remove(0),
        srq: None,
        qp,
        device,
        memory: end.memory,
        remote: end.remote,
    };
}

fn post(end: &End) {
    let (start, rkey) = end.remote;
    for n in 0..3 {
        let sges = [end.sge(1024 + 700 * n, 700)];
        let request = RecvWr {
            wr_id: 100 + n,
            sges: &sges,
        };
        end.qp.post_recv([request]).unwrap();
    }
    let long = [end.sge(0, 700)];
    let short = [end.sge(0, 300)];
    let into = [end.sge(3520, 300)];
    let old = [end.sge(3848, 8)];
    let inline: [&[u8]; 1] = [b"in a line"];
    use SendOpcode::*;
    let list: [(_, _, Body<'_>, u64); 6] = [
        (Send, SEND_SIGNALED, Body::Sges(&long), 0),
        (Write, 0, Body::Sges(&short), 3200),
        (Read, SEND_SIGNALED, Body::Sges(&into), 0),
        (FetchAdd, SEND_SIGNALED, Body::Sges(&old), 3840),
        (Send, SEND_SIGNALED | SEND_FENCE, Body::Inline(&inline), 0),
        (SendWithImm, SEND_SIGNALED, Body::Sges(&long), 0),
    ];
    for (wr_id, (opcode, flags, body, offset)) in (0..).zip(list) {
        let request = SendWr {
            wr_id,
            opcode,
            flags,
            imm: wr_id as u32,
            remote_address: start + offset,
            rkey,
            compare_add: 5,
            swap: 0,
            ud: UdAddress::default(),
            body,
        };
        end.qp.post_send([request]).unwrap();
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
    let mut ends = [0, 1].map(|end| End::new(&wire, end, Shape::LONG));
    let psns = [0xff_fffd, 0xff_ffff];
    let [one, two] = &mut ends;
    one.connect(two, psns, 7);
    two.connect(one, [psns[1], psns[0]], 7);
    for (number, end) in ends.iter().enumerate() {
        let bytes: Vec<u8> = (0..1024)
            .map(|n| (n % 251) as u8 ^ (number as u8 * 0x80))
            .collect();
        wire.fill(number, 0, &bytes);
        let (key, first) = ([3; 32], number == 0);
        end.qp.set_secret(Some(QpSecret { key, first })).unwrap();
        post(end);
    }
    wire.lose(losses.iter().copied());
    let mut completions: [[Vec<Wc>; 2]; 2] = Default::default();
    let mut step = 0;
    loop {
        if step == at {
            match act {
                Act::Nothing => {}
                Act::Elsewhere(end) => {
                    let dump = leave(&ends[end]);
                    arrive(&mut ends[end], &wire, 3 + end as u8, &dump);
                }
                Act::BothHere => {
                    let dumps = [leave(&ends[0]), leave(&ends[1])];
                    for (end, dump) in dumps.iter().enumerate() {
                        arrive(&mut ends[end], &wire, 1 + end as u8, dump);
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
            while let Some(wc) = end.poll_one() {
                seen[usize::from(wc.wr_id >= 100)].push(wc);
            }
        }
        step += 1;
        assert!(step < MOST_STEPS, "it does not end");
        if !worked && step > at + 7 {
            break;
        }
    }
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
