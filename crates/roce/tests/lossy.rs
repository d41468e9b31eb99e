//! Any mix of operations, in both directions, over a link with every fault: all of them complete once, in order, and
//! with the right content. On a link so bad that the connection may end, what completed before the end is right, and
//! everything still completes once.

mod pair;

use std::time::Duration;

use pair::{By, Faults, Pair, Setup, Side, sge};
use proptest::prelude::*;
use verbatim_roce::{
    AccessFlags, AtomicOp, Bind, Completion, Immediate, Lkey, Mtu, Operation, QpConfig, QpState, Queue, Rkey,
    SendData, WcOpcode, WcStatus,
};

/// Memory of each side, under its key: a source of bytes, slots that the partner writes, a place for received messages,
/// and one for READs.
const BASE: u64 = 0x100_0000;
const SLOT: u64 = 8192;
const SLOTS: u64 = 4;
const SOURCE: u64 = BASE + SLOT * SLOTS;
const SOURCE_LEN: u64 = 0x2_0000;
const RECEIVED: u64 = SOURCE + SOURCE_LEN;
const RECEIVES: u64 = 300;
const READ: u64 = RECEIVED + SLOT * RECEIVES;
/// A region of its own with numbers for atomics, under the key of the side and [`CELL_KEY`].
const CELLS: u64 = 0x800;
const CELL_COUNT: u64 = 3;
const CELL_KEY: u32 = 10;
/// The first of the keys that a request ends or makes: one for each request and who has it.
const SHORT_LIVED_KEY: u32 = 1000;
const END: u64 = READ + SLOT * RECEIVES;

#[derive(Clone, Copy, Debug)]
enum Op {
    Send {
        from: u64,
        len: u32,
        imm: bool,
        inline: bool,
    },
    Write {
        from: u64,
        slot: u64,
        len: u32,
        imm: bool,
    },
    /// Reads a slot back after all WRITEs to it; what follows is fenced, so that a repeated READ finds the same.
    ReadSlot {
        slot: u64,
        len: u32,
    },
    ReadSource {
        from: u64,
        len: u32,
    },
    FetchAdd {
        cell: u64,
        add: u64,
    },
    /// Compares with what is there, or not.
    CompareSwap {
        cell: u64,
        matches: bool,
        swap: u64,
    },
    AtomicWrite {
        cell: u64,
        from: u64,
    },
    SendInvalidate {
        from: u64,
        len: u32,
    },
    LocalInvalidate,
    Bind,
}

fn op() -> impl Strategy<Value = Op> {
    let len = prop_oneof![Just(0u32), 1u32..64, 1u32..5000, Just(4096), Just(8192)];
    let from = 0..SOURCE_LEN - SLOT;
    prop_oneof![
        (from.clone(), len.clone(), any::<bool>(), any::<bool>()).prop_map(|(from, len, imm, inline)| {
            Op::Send {
                from,
                len,
                imm,
                inline,
            }
        }),
        (from.clone(), 0..SLOTS, len.clone(), any::<bool>()).prop_map(|(from, slot, len, imm)| Op::Write {
            from,
            slot,
            len,
            imm
        }),
        (0..SLOTS, len.clone()).prop_map(|(slot, len)| Op::ReadSlot { slot, len }),
        (from.clone(), len.clone()).prop_map(|(from, len)| Op::ReadSource { from, len }),
        (0..CELL_COUNT, any::<u64>()).prop_map(|(cell, add)| Op::FetchAdd { cell, add }),
        (0..CELL_COUNT, any::<bool>(), any::<u64>()).prop_map(|(cell, matches, swap)| Op::CompareSwap {
            cell,
            matches,
            swap
        }),
        (0..CELL_COUNT, from.clone()).prop_map(|(cell, from)| Op::AtomicWrite { cell, from }),
        (from, len).prop_map(|(from, len)| Op::SendInvalidate { from, len }),
        Just(Op::LocalInvalidate),
        Just(Op::Bind),
    ]
}

impl Op {
    fn brings_data(&self) -> bool {
        matches!(
            self,
            Op::ReadSlot { .. } | Op::ReadSource { .. } | Op::FetchAdd { .. } | Op::CompareSwap { .. }
        )
    }

    fn is_atomic(&self) -> bool {
        matches!(self, Op::FetchAdd { .. } | Op::CompareSwap { .. })
    }
}

/// What one direction is to bring about.
struct Plan {
    side: Side,
    ops: Vec<Op>,
    /// What the slots at the partner hold when all is done.
    slots: Vec<u8>,
    /// What the cells at the partner hold when all is done.
    cells: [u64; CELL_COUNT as usize],
    /// For each READ and atomic, where its data must be and what it is.
    reads: Vec<(u64, Vec<u8>)>,
    /// For each message that consumes a RECV: the operation and its number.
    messages: Vec<(Op, u64)>,
    posted_receives: u64,
}

fn source(side: Side) -> Vec<u8> {
    let salt = 17 + side as u64 * 100;
    (0..SOURCE_LEN)
        .map(|i| (i.wrapping_mul(i + salt) >> 5) as u8 ^ (i >> 9) as u8)
        .collect()
}

fn key(side: Side) -> u32 {
    side as u32 + 1
}

fn short_lived(wr_id: u64, at_partner: bool) -> Rkey {
    Rkey(SHORT_LIVED_KEY * (1 + u32::from(at_partner)) + wr_id as u32)
}

fn imm(wr_id: u64) -> Option<Immediate> {
    Some(Immediate((wr_id as u32).to_be_bytes()))
}

impl Plan {
    /// Posts all operations at `side`.
    fn post(pair: &mut Pair, side: Side, ops: &[Op]) -> Plan {
        let (own, theirs) = (source(side), source(side.other()));
        let host = &mut pair.end(side).host;
        let rkey = Rkey(key(side.other()));
        let mut plan = Plan {
            side,
            ops: ops.to_vec(),
            slots: vec![0; (SLOT * SLOTS) as usize],
            cells: [0; CELL_COUNT as usize],
            reads: vec![],
            messages: vec![],
            posted_receives: 0,
        };
        let mut fence = false;
        for (wr_id, op) in ops.iter().enumerate().map(|(i, op)| (i as u64, *op)) {
            let local = |addr: u64, len| {
                SendData::Sges(
                    verbatim_roce::SgeList::new(&[
                        sge(key(side), addr, len / 2),
                        sge(key(side), addr + u64::from(len / 2), len - len / 2),
                    ])
                    .unwrap(),
                )
            };
            let bytes = |all: &[u8], from: u64, len: u32| all[from as usize..][..len as usize].to_vec();
            let (operation, data) = match op {
                Op::Send {
                    from,
                    len,
                    imm: with_imm,
                    inline,
                } => {
                    plan.messages.push((op, wr_id));
                    let data = if inline {
                        SendData::inline(&bytes(&own, from, len))
                    } else {
                        None
                    };
                    let data = data.unwrap_or_else(|| local(SOURCE + from, len));
                    (
                        Operation::Send {
                            imm: imm(wr_id).filter(|_| with_imm),
                        },
                        data,
                    )
                }
                Op::Write {
                    from,
                    slot,
                    len,
                    imm: with_imm,
                } => {
                    if with_imm {
                        plan.messages.push((op, wr_id));
                    }
                    plan.slots[(slot * SLOT) as usize..][..len as usize]
                        .copy_from_slice(&bytes(&own, from, len));
                    let (remote_addr, imm) = (BASE + slot * SLOT, imm(wr_id).filter(|_| with_imm));
                    (
                        Operation::Write {
                            remote_addr,
                            rkey,
                            imm,
                        },
                        local(SOURCE + from, len),
                    )
                }
                Op::ReadSlot { slot, len } => {
                    let target = READ + SLOT * plan.reads.len() as u64;
                    plan.reads.push((target, bytes(&plan.slots, slot * SLOT, len)));
                    (
                        Operation::Read {
                            remote_addr: BASE + slot * SLOT,
                            rkey,
                        },
                        local(target, len),
                    )
                }
                Op::ReadSource { from, len } => {
                    let target = READ + SLOT * plan.reads.len() as u64;
                    plan.reads.push((target, bytes(&theirs, from, len)));
                    (
                        Operation::Read {
                            remote_addr: SOURCE + from,
                            rkey,
                        },
                        local(target, len),
                    )
                }
                Op::FetchAdd { cell, .. } | Op::CompareSwap { cell, .. } => {
                    let target = READ + SLOT * plan.reads.len() as u64;
                    let value = &mut plan.cells[cell as usize];
                    let atomic = match op {
                        Op::FetchAdd { add, .. } => AtomicOp::FetchAdd { add },
                        Op::CompareSwap { matches, swap, .. } => AtomicOp::CompareSwap {
                            compare: value.wrapping_add(u64::from(!matches)),
                            swap,
                        },
                        _ => unreachable!("it is one of the two"),
                    };
                    plan.reads.push((target, value.to_ne_bytes().to_vec()));
                    *value = atomic.apply(*value);
                    (
                        Operation::Atomic {
                            remote_addr: CELLS + 8 * cell,
                            rkey: Rkey(key(side.other()) + CELL_KEY),
                            op: atomic,
                        },
                        local(target, 8),
                    )
                }
                Op::AtomicWrite { cell, from } => {
                    let value = bytes(&own, from, 8);
                    plan.cells[cell as usize] = u64::from_ne_bytes(value.try_into().expect("eight bytes"));
                    (
                        Operation::AtomicWrite {
                            remote_addr: CELLS + 8 * cell,
                            rkey: Rkey(key(side.other()) + CELL_KEY),
                        },
                        local(SOURCE + from, 8),
                    )
                }
                Op::SendInvalidate { from, len } => {
                    plan.messages.push((op, wr_id));
                    let rkey = short_lived(wr_id, true);
                    (Operation::SendInvalidate { rkey }, local(SOURCE + from, len))
                }
                Op::LocalInvalidate => {
                    let rkey = short_lived(wr_id, false);
                    host.register(rkey.0, 0, vec![]);
                    (Operation::LocalInvalidate { rkey }, local(SOURCE, 0))
                }
                Op::Bind => {
                    let bind = Bind {
                        window: Rkey(0),
                        rkey: short_lived(wr_id, false),
                        lkey: Lkey(key(side)),
                        addr: SOURCE,
                        len: 1,
                        access: AccessFlags::empty(),
                    };
                    (Operation::Bind(bind), local(SOURCE, 0))
                }
            };
            host.post_with(wr_id, operation, data, |request| request.fence = fence);
            fence = matches!(op, Op::ReadSlot { .. });
        }
        let partner = &mut pair.end(side.other()).host;
        for (op, number) in &plan.messages {
            if matches!(op, Op::SendInvalidate { .. }) {
                partner.register(short_lived(*number, true).0, 0, vec![]);
            }
        }
        plan
    }

    /// Keeps at most `depth` RECVs posted at the partner.
    fn feed(&mut self, pair: &mut Pair, depth: u64) {
        let side = self.side.other();
        let host = &mut pair.end(side).host;
        let done = host.outcomes(Queue::Receive).len() as u64;
        while self.posted_receives < (done + depth).min(RECEIVES) {
            let addr = RECEIVED + SLOT * self.posted_receives;
            host.post_receive(
                self.posted_receives,
                &[sge(key(side), addr, 100), sge(key(side), addr + 100, 8092)],
            );
            self.posted_receives += 1;
        }
    }

    fn check(&self, pair: &mut Pair) -> Result<(), TestCaseError> {
        let own = source(self.side);
        let sent = pair.end(self.side).host.outcomes(Queue::Send);
        let done = sent
            .iter()
            .take_while(|(_, status)| *status == WcStatus::Success)
            .count();
        let ended = pair.end(self.side).qp.state() == QpState::Err;
        let flushed = sent
            .iter()
            .skip(done + 1)
            .all(|(_, status)| *status == WcStatus::WrFlushErr);
        prop_assert!(
            sent.iter().map(|(wr_id, _)| *wr_id).eq(0..self.ops.len() as u64),
            "each once, in order"
        );
        prop_assert!(flushed && (ended || done == self.ops.len()), "{:?}", sent);
        prop_assert_eq!(pair.end(self.side).host.retired as usize, self.ops.len());

        let at = |addr: u64, len: usize| (addr - BASE) as usize..(addr - BASE) as usize + len;
        let reads = self.ops[..done].iter().filter(|op| op.brings_data()).count();
        for (addr, expected) in &self.reads[..reads] {
            let memory = pair.end(self.side).host.bytes(key(self.side));
            prop_assert_eq!(&memory[at(*addr, expected.len())], &expected[..]);
        }
        let count = |wanted: fn(&Op) -> bool, ops: &[Op]| ops.iter().filter(|op| wanted(op)).count();
        let host = &pair.end(self.side).host;
        let locally = host
            .invalidated
            .iter()
            .filter(|(_, by)| *by == By::Program)
            .count();
        for (wanted, happened) in [
            (
                (|op| matches!(op, Op::LocalInvalidate)) as fn(&Op) -> bool,
                locally,
            ),
            (|op| matches!(op, Op::Bind), host.binds.len()),
        ] {
            prop_assert!((count(wanted, &self.ops[..done])..=count(wanted, &self.ops)).contains(&happened));
        }
        let side = self.side.other();
        let end = pair.end(side);
        let (state, host) = (end.qp.state(), &end.host);
        let executed = count(Op::is_atomic, &self.ops[..done])..=count(Op::is_atomic, &self.ops);
        prop_assert!(executed.contains(&host.atomics.len()), "each atomic once");
        let memory = host.bytes(key(side));
        if done == self.ops.len() {
            let cells: Vec<u8> = self.cells.iter().flat_map(|cell| cell.to_ne_bytes()).collect();
            prop_assert_eq!(host.bytes(key(side) + CELL_KEY), &cells[..]);
            prop_assert_eq!(&memory[at(BASE, self.slots.len())], &self.slots[..]);
        }
        let of_queue = host
            .completions
            .iter()
            .filter(|done| done.queue == Queue::Receive);
        let (received, lost): (Vec<&Completion>, Vec<_>) =
            of_queue.partition(|done| done.status == WcStatus::Success);
        let sure = self
            .messages
            .iter()
            .take_while(|(_, number)| *number < done as u64)
            .count();
        prop_assert!(
            (sure..=self.messages.len()).contains(&received.len()),
            "{} of {}",
            received.len(),
            sure
        );
        prop_assert_eq!(lost.is_empty(), state == QpState::Rts);
        prop_assert!(lost.iter().all(|done| done.status == WcStatus::WrFlushErr));
        for (i, (done, (op, number))) in received.iter().zip(&self.messages).enumerate() {
            prop_assert_eq!((done.wr_id, done.status), (i as u64, WcStatus::Success));
            match *op {
                Op::Send {
                    from,
                    len,
                    imm: with_imm,
                    ..
                } => {
                    prop_assert_eq!((done.opcode, done.byte_len), (WcOpcode::Recv, len));
                    prop_assert_eq!(done.imm, imm(*number).filter(|_| with_imm));
                    let data = &memory[at(RECEIVED + SLOT * i as u64, len as usize)];
                    prop_assert_eq!(data, &own[from as usize..][..len as usize]);
                }
                Op::Write { len, .. } => {
                    prop_assert_eq!((done.opcode, done.byte_len), (WcOpcode::RecvRdmaWithImm, len));
                    prop_assert_eq!(done.imm, imm(*number));
                }
                Op::SendInvalidate { from, len } => {
                    prop_assert_eq!(done.invalidated, Some(short_lived(*number, true)));
                    let data = &memory[at(RECEIVED + SLOT * i as u64, len as usize)];
                    prop_assert_eq!(data, &own[from as usize..][..len as usize]);
                }
                _ => unreachable!("others consume no RECV"),
            }
        }
        Ok(())
    }
}

fn scenario(setup: Setup, ops: [Vec<Op>; 2], depth: u64) -> Result<Pair, TestCaseError> {
    let mut pair = Pair::new(setup);
    for side in [Side::A, Side::B] {
        let mut memory = vec![0; (END - BASE) as usize];
        memory[(SOURCE - BASE) as usize..][..SOURCE_LEN as usize].copy_from_slice(&source(side));
        let host = &mut pair.end(side).host;
        host.register(key(side), BASE, memory);
        host.register(key(side) + CELL_KEY, CELLS, vec![0; 8 * CELL_COUNT as usize]);
    }
    let [a, b] = ops;
    let mut plans = [
        Plan::post(&mut pair, Side::A, &a),
        Plan::post(&mut pair, Side::B, &b),
    ];
    let mut steps = 0;
    loop {
        for plan in &mut plans {
            plan.feed(&mut pair, depth);
        }
        if !pair.step() {
            break;
        }
        steps += 1;
        prop_assert!(
            steps < 1_000_000,
            "no end in sight: {:?} {:?}",
            pair.a.qp,
            pair.b.qp
        );
    }
    for plan in &plans {
        plan.check(&mut pair)?;
    }
    Ok(pair)
}

/// Eight losses in a row end a connection: `worst_loss` says whether that is to be expected.
fn setups(worst_loss: u32) -> impl Strategy<Value = Setup> {
    let faults = (0..worst_loss, 0u32..10, 0u32..10, 0u32..3).prop_map(
        |(loss, duplication, reordering, corruption)| Faults {
            loss,
            duplication,
            reordering,
            corruption,
        },
    );
    let mtu = prop::sample::select(Mtu::ALL.to_vec());
    let psn = prop::array::uniform2(prop_oneof![any::<u32>(), 0xff_ff00u32..=0xff_ffff]);
    let window = prop::sample::select(vec![4096u32, 16 * 1024, 512 * 1024]);
    let patience = prop::sample::select(vec![
        (40u64, 0),
        (100, 8192),
        (100, 512 * 1024),
        (1000, 512 * 1024),
    ]);
    (
        faults,
        mtu,
        psn,
        window,
        1u8..5,
        1usize..40,
        patience,
        any::<u64>(),
    )
        .prop_map(
            |(faults, mtu, psn, window_bytes, max_rd_atomic, budget, (min_rto, hold_bytes), seed)| Setup {
                mtu,
                psn,
                faults,
                max_rd_atomic,
                budget,
                seed,
                timeout: 6,
                min_rnr_timer: 8,
                config: QpConfig {
                    window_bytes,
                    min_ack_timeout: Duration::from_micros(260),
                    min_rto: Duration::from_micros(min_rto),
                    hold_bytes,
                    max_outstanding_sends: 12,
                    ack_delay: Duration::from_micros(30 * (seed % 2)),
                    ..QpConfig::default()
                },
                ..Setup::default()
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn everything_arrives_once_and_in_order(
        setup in setups(4),
        ops in prop::array::uniform2(prop::collection::vec(op(), 0..60)),
        depth in 1u64..20,
    ) {
        let pair = scenario(setup, ops, depth)?;
        for end in [&pair.a, &pair.b] {
            prop_assert_eq!(end.qp.state(), QpState::Rts, "{:?} {:?}", end.qp.counters(), end.host.events);
        }
    }

    #[test]
    fn a_connection_that_ends_has_completed_everything_once(
        setup in setups(60),
        ops in prop::array::uniform2(prop::collection::vec(op(), 0..60)),
        depth in 1u64..20,
    ) {
        scenario(setup, ops, depth)?;
    }
}

/// Without faults there is nothing to repeat: a retransmission would be a defect of the protocol, not of the link.
#[test]
fn nothing_is_sent_twice_without_faults() {
    let ops: Vec<Op> = (0..200)
        .map(|i| match i % 4 {
            0 => Op::Send {
                from: i * 3,
                len: 5000,
                imm: true,
                inline: false,
            },
            1 => Op::Write {
                from: i * 5,
                slot: i % SLOTS,
                len: 8192,
                imm: false,
            },
            2 => Op::ReadSource {
                from: i * 7,
                len: 8000,
            },
            _ if i % 3 == 0 => Op::FetchAdd {
                cell: i % CELL_COUNT,
                add: i,
            },
            _ => Op::Write {
                from: i,
                slot: i % SLOTS,
                len: 10,
                imm: true,
            },
        })
        .collect();
    let setup = Setup {
        psn: [0xff_fff0, 5],
        ..Setup::default()
    };
    let pair = scenario(setup, [ops.clone(), ops], RECEIVES).unwrap();
    for counters in [pair.a.qp.counters(), pair.b.qp.counters()] {
        assert_eq!(
            (counters.retransmitted_requests, counters.duplicate_request),
            (0, 0)
        );
        assert_eq!((counters.out_of_sequence, counters.stale_responses), (0, 0));
    }
}
