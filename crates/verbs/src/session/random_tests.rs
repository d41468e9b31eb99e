//! A random program on both ends, with migrations at random points: each request completes exactly once, in order.

use proptest::prelude::*;

use crate::testing::{Migration, Shape, Story};
use crate::{SendOpcode, Wc};

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

#[derive(Debug, Clone, Copy, PartialEq)]
enum Step {
    PreSetup,
    Suspended,
    Drained,
    Quiesced,
    Claimed,
    Switched,
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
    story: Story,
    logs: [Log; 2],
    migration: Option<(Migration, Step)>,
    next: u32,
    migrations: usize,
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
                let number = self.next;
                if self.story.ends[end]
                    .send(number, opcode, signaled, inline)
                    .is_ok()
                {
                    self.next += 1;
                    let log = &mut self.logs[end];
                    log.signaled.extend(signaled.then_some(u64::from(number)));
                    log.messages.extend(opcode.is_two_sided().then_some(number));
                }
            }
            Act::Recv { end } => self.recv(end),
            Act::Poll { end } => self.poll(end),
            Act::Work => _ = self.story.world.step(),
            Act::Migrate { mover } => self.advance(mover),
            Act::TakeBack => self.take_back(),
        }
    }

    fn recv(&mut self, end: usize) {
        let log = &mut self.logs[end];
        if self.story.ends[end].recv(log.receives).is_ok() {
            log.receives += 1;
        }
    }

    fn poll(&mut self, end: usize) {
        let number = self.story.ends[end].qp.number();
        for Wc {
            wr_id,
            opcode,
            imm,
            qp_num,
            status,
            ..
        } in self.story.ends[end].poll()
        {
            assert_eq!((qp_num, status), (number, 0));
            let log = &mut self.logs[end];
            if opcode == 128 {
                log.completed_receives.push(wr_id);
                log.received_messages.push(imm);
            } else {
                log.completed_sends.push(wr_id);
            }
        }
    }

    fn advance(&mut self, mover: usize) {
        let story = &mut self.story;
        let next = match self.migration.take() {
            None => Some((story.pre_setup(mover), Step::PreSetup)),
            Some((mut migration, step)) => match step {
                Step::PreSetup => {
                    story.suspend(&mut migration);
                    Some((migration, Step::Suspended))
                }
                // SENDs may wait for RECVs that the program posts later, or never.
                Step::Suspended if !story.drain(&migration, 0) => {
                    story.abort(&migration);
                    None
                }
                Step::Suspended => Some((migration, Step::Drained)),
                Step::Drained => {
                    story.quiesce(&mut migration);
                    Some((migration, Step::Quiesced))
                }
                Step::Quiesced => {
                    story.claim(&mut migration);
                    Some((migration, Step::Claimed))
                }
                Step::Claimed => {
                    story.switch(&migration);
                    Some((migration, Step::Switched))
                }
                Step::Switched => {
                    story.resume(&migration);
                    self.migrations += 1;
                    None
                }
            },
        };
        self.migration = next;
    }

    fn take_back(&mut self) {
        self.migration = match self.migration.take() {
            Some((migration, Step::PreSetup | Step::Suspended | Step::Drained)) => {
                self.story.abort(&migration);
                None
            }
            Some((migration, Step::Quiesced)) => {
                self.story.roll_back(migration);
                None
            }
            other => other,
        };
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
            let worked = self.story.world.step();
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
        acts in prop::collection::vec(act(), 1..120),
    ) {
        let mut run = Run {
            story: Story::with(Shape { srq, unreliable, made_again, ..Shape::default() }),
            logs: Default::default(),
            migration: None,
            next: 0,
            migrations: 0,
        };
        acts.iter().for_each(|act| run.act(act));
        run.finish();
        let [first, second] = &run.logs;
        for (log, other) in [(first, second), (second, first)] {
            prop_assert_eq!(&log.signaled, &log.completed_sends);
            prop_assert_eq!(&log.received_messages, &other.messages);
            let in_order: Vec<u64> = (0..log.completed_receives.len() as u64).collect();
            prop_assert_eq!(&log.completed_receives, &in_order);
        }
        prop_assert_eq!(run.story.world.unfinished(), 0);
    }
}
