//! A report to try things on.

use std::time::Duration;

use crate::model::{Blackout, Move, Output, Phase, Report, Run};
use crate::trace::Trace;

const PHASES: [(&str, u64, bool); 9] = [
    ("PreCopy", 41, false),
    ("PreSetup", 18, false),
    ("WaitBeforeStop", 9, true),
    ("DumpRDMA", 3, true),
    ("DumpOthers", 31, true),
    ("Transfer", 5, true),
    ("FullRestore", 44, true),
    ("RestoreRDMA", 6, true),
    ("Replay", 1, true),
];

/// 12 Gbit/s, and a gap of 99 ms after one second.
pub fn run() -> Run {
    let suspended = Duration::from_millis(1000);
    let frozen = suspended + Duration::from_millis(12);
    let ms = Duration::from_millis;
    let mut trace = Trace::default();
    let mut bytes = 0;
    for sample in 0..400_u64 {
        let at = sample * 5;
        if !(1005..1100).contains(&at) {
            bytes += 7_500_000 + sample * 7919 % 13 * 20_000;
        }
        trace.push(ms(at), bytes);
    }
    Run {
        number: 1,
        title: "the sender moves".into(),
        story: "ib_write_bw writes over 16 queue pairs from src to peer. While it does, it moves to dst.".into(),
        partner: "peer".into(),
        trace,
        moves: vec![Move {
            source: "src".into(),
            destination: "dst".into(),
            committed: true,
            phases: PHASES
                .iter()
                .map(|(name, time, in_blackout)| Phase {
                    name: (*name).into(),
                    time: ms(*time),
                    in_blackout: *in_blackout,
                })
                .collect(),
            service: Blackout { begun: Some(frozen), time: ms(80) },
            communication: Blackout { begun: Some(suspended), time: ms(99) },
            total: ms(190),
            bytes_pre_copy: 34 << 20,
            bytes_stop_and_copy: 1 << 20,
            connections: 16,
            intercepted: 128,
            replayed: 128,
        }],
        outputs: vec![Output {
            program: "ib_write_bw on peer".into(),
            exit_status: Some(0),
            text: " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]\n 65536      342000           0.00               11.9\n".into(),
        }],
        problems: Vec::new(),
    }
}

/// That run, and one with four moves.
pub fn report() -> Report {
    let mut second = run();
    second.number = 2;
    second.title = "a check program moves four times".into();
    let one = second.moves[0].clone();
    second.moves = (0..4)
        .map(|index| {
            let mut one = one.clone();
            if index % 2 == 1 {
                std::mem::swap(&mut one.source, &mut one.destination);
            }
            one.phases[2].time += Duration::from_millis(4 * index);
            one
        })
        .collect();
    Report {
        machine: "2 cores, Linux 6.18".into(),
        runs: vec![run(), second],
        problems: Vec::new(),
    }
}
