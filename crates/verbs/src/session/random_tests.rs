//! A random program on both ends, with migrations at random points, over a network that loses packets: each request completes exactly
//! once, in order.

use proptest::prelude::*;

use crate::testing::{Move, Outcome, Pair, Patience, Shape};
use crate::{QpType, SendOpcode, Wc};

/// Opcodes of completions from here on are of RECVs (`IBV_WC_RECV`).
const RECV_OPCODES: u32 = 128;

#[derive(Debug, Clone)]
enum Act {
    Send {
        end: usize,
        opcode: SendOpcode,
        signaled: bool,
        inline: bool,
    },
    Recv {
        end: usize,
    },
    Poll {
        end: usize,
    },
    Work,
    /// Starts a migration of that end, or takes the next step of the one under way.
    Migrate {
        mover: usize,
    },
    /// Takes the one under way back, where that is possible.
    TakeBack,
}

fn act() -> impl Strategy<Value = Act> {
    let opcode = prop::sample::select(vec![
        SendOpcode::Write,
        SendOpcode::SendWithImm,
        SendOpcode::WriteWithImm,
        SendOpcode::Read,
    ]);
    prop_oneof![
        6 => (0usize..2, opcode, any::<bool>(), any::<bool>())
            .prop_map(|(end, opcode, signaled, inline)| Act::Send { end, opcode, signaled, inline }),
        4 => (0usize..2).prop_map(|end| Act::Recv { end }),
        4 => (0usize..2).prop_map(|end| Act::Poll { end }),
        4 => Just(Act::Work),
        3 => (0usize..2).prop_map(|mover| Act::Migrate { mover }),
        1 => Just(Act::TakeBack),
    ]
}

/// What one end has done and seen.
#[derive(Debug, Default)]
struct Log {
    /// Signaled requests, in order.
    signaled: Vec<u64>,
    /// Two-sided messages, in order.
    messages: Vec<u32>,
    receives: u64,
    completed_sends: Vec<u64>,
    completed_receives: Vec<u64>,
    received_messages: Vec<u32>,
}

struct Run {
    pair: Pair,
    /// A message that finds no RECV is lost.
    unreliable: bool,
    logs: [Log; 2],
    migration: Option<Move>,
    next: u32,
}

impl Run {
    fn act(&mut self, act: &Act) {
        match *act {
            Act::Send {
                end,
                opcode,
                signaled,
                inline,
            } => {
                let reads = opcode == SendOpcode::Read;
                if reads && self.unreliable {
                    return;
                }
                let finds_recv = self.logs[1 - end].receives > self.logs[end].messages.len() as u64;
                if self.unreliable && opcode.is_two_sided() && !finds_recv {
                    return;
                }
                let number = self.next;
                let posted = self.pair.ends[end].send(number, opcode, signaled, inline && !reads);
                if posted.is_ok() {
                    self.next += 1;
                    let log = &mut self.logs[end];
                    log.signaled.extend(signaled.then_some(u64::from(number)));
                    log.messages.extend(opcode.is_two_sided().then_some(number));
                }
            }
            Act::Recv { end } => self.recv(end),
            Act::Poll { end } => self.poll(end),
            Act::Work => _ = self.pair.wire.step(),
            Act::Migrate { mover } => self.advance(mover),
            Act::TakeBack => self.take_back(),
        }
    }

    fn recv(&mut self, end: usize) {
        let log = &mut self.logs[end];
        if self.pair.ends[end].recv(log.receives).is_ok() {
            log.receives += 1;
        }
    }

    fn poll(&mut self, end: usize) {
        let number = self.pair.ends[end].qp.number();
        for Wc {
            wr_id,
            opcode,
            imm,
            qp_num,
            status,
            ..
        } in self.pair.ends[end].poll()
        {
            assert_eq!((qp_num, status), (number, 0));
            let log = &mut self.logs[end];
            if opcode >= RECV_OPCODES {
                log.completed_receives.push(wr_id);
                log.received_messages.push(imm);
            } else {
                log.completed_sends.push(wr_id);
            }
        }
    }

    fn advance(&mut self, mover: usize) {
        let outcome = match self.migration.take() {
            None => Outcome::Under(self.pair.begin(mover)),
            Some(migration) => self.pair.advance(migration),
        };
        self.migration = match outcome {
            Outcome::Under(migration) => Some(migration),
            Outcome::Done | Outcome::TakenBack => None,
        };
    }

    fn take_back(&mut self) {
        if let Some(migration) = self.migration.take_if(|one| one.can_be_taken_back()) {
            self.pair.take_back(migration);
        }
    }

    /// Ends the migration under way and lets everything arrive.
    fn finish(&mut self) {
        while self.migration.is_some() {
            self.advance(0);
        }
        loop {
            let before = (self.logs[0].receives, self.logs[1].receives);
            for end in 0..2 {
                self.poll(end);
                if self.logs[end].received_messages.len() < self.logs[1 - end].messages.len() {
                    self.recv(end);
                }
            }
            let worked = self.pair.wire.step();
            if !worked && before == (self.logs[0].receives, self.logs[1].receives) {
                break;
            }
        }
        (0..2).for_each(|end| self.poll(end));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn each_request_completes_once_and_in_order(
        srq: bool,
        unreliable: bool,
        made_again: bool,
        reuses_numbers: bool,
        acts in prop::collection::vec(act(), 1..120),
        losses in prop::collection::vec(prop::bool::weighted(0.1), 0..100),
    ) {
        let mut run = Run {
            pair: Pair::with(Shape {
                srq: srq.then_some(8),
                qp_type: if unreliable { QpType::Uc } else { QpType::Rc },
                made_again,
                reuses_numbers,
                ..Shape::PLAIN
            }),
            unreliable,
            logs: Default::default(),
            migration: None,
            next: 0,
        };
        // SENDs may wait for RECVs that the program posts later, or never.
        run.pair.patience = Patience::Waits(4);
        if !unreliable {
            run.pair.wire.lose(losses);
        }
        acts.iter().for_each(|act| run.act(act));
        run.finish();
        let [first, second] = &run.logs;
        for (log, other) in [(first, second), (second, first)] {
            prop_assert_eq!(&log.signaled, &log.completed_sends);
            prop_assert_eq!(&log.received_messages, &other.messages);
            let in_order: Vec<u64> = (0..log.completed_receives.len() as u64).collect();
            prop_assert_eq!(&log.completed_receives, &in_order);
        }
        prop_assert_eq!(run.pair.wire.unfinished(), 0);
    }
}
