//! A model of a connection that is cut at any packet: whatever has happened by then, each request is executed exactly once.

use proptest::prelude::*;
use verbatim_channel::QpProgress;
use verbatim_device::control::{OutstandingRequest, QpPosition, QpState};

use super::decision::{Fate, Uncertain, fates, undecided};
use crate::work::SendOpcode::{self, *};

const PSN_MASK: u32 = 0x00ff_ffff;

#[derive(Debug, Clone, Copy)]
struct Request {
    opcode: SendOpcode,
    packets: u32,
}

fn request() -> impl Strategy<Value = Request> {
    let opcode = prop::sample::select(vec![
        Write,
        WriteWithImm,
        Send,
        SendWithImm,
        SendWithInvalidate,
        Read,
        CompareSwap,
        FetchAdd,
        AtomicWrite,
        LocalInvalidate,
        BindMw,
    ]);
    (opcode, 1u32..5).prop_map(|(opcode, packets)| Request {
        opcode,
        packets: match opcode {
            CompareSwap | FetchAdd | AtomicWrite => 1,
            LocalInvalidate | BindMw => 0,
            _ => packets,
        },
    })
}

#[derive(Debug, Clone, Copy)]
enum Event {
    /// The RNIC takes the next request off the ring.
    Take,
    /// It sends the next packet, which arrives or is lost.
    Packet { arrives: bool },
    /// An answer arrives that says so many packets of what there is to say.
    Answer { packets: u32 },
    /// It begins again at the oldest that has no answer.
    GoBack,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => Just(Event::Take),
        8 => prop::bool::weighted(0.9).prop_map(|arrives| Event::Packet { arrives }),
        3 => (1u32..6).prop_map(|packets| Event::Answer { packets }),
        1 => Just(Event::GoBack),
    ]
}

/// PSNs count from 0 here.
struct Model {
    requests: Vec<Request>,
    /// Of each request taken off the ring.
    first: Vec<u32>,
    /// The requests before this one are complete.
    complete: usize,
    acknowledged: u32,
    next: u32,
    sent: u32,
    expected: u32,
    /// How often each request was executed by the responder, or here.
    executed: Vec<u32>,
    /// Original values that the responder keeps.
    atomics: Vec<(u32, Option<u64>)>,
    kept: usize,
}

impl Model {
    fn new(requests: Vec<Request>, kept: usize) -> Self {
        Self {
            first: Vec::new(),
            complete: 0,
            acknowledged: 0,
            next: 0,
            sent: 0,
            expected: 0,
            executed: vec![0; requests.len()],
            atomics: Vec::new(),
            requests,
            kept,
        }
    }

    fn end(&self, index: usize) -> u32 {
        self.first[index] + self.requests[index].packets
    }

    fn unsent(&self) -> u32 {
        self.first.len().checked_sub(1).map_or(0, |last| self.end(last))
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Take if self.first.len() < self.requests.len() => {
                let first = self.unsent();
                self.first.push(first);
            }
            Event::Packet { arrives } if self.next < self.unsent() => {
                if arrives && self.next == self.expected {
                    self.execute_packet();
                }
                self.next += 1;
                self.sent = self.sent.max(self.next);
            }
            // Whatever is to be said of what was executed, and no READ beyond its data.
            Event::Answer { packets } => {
                self.acknowledged = self.expected.min(self.acknowledged + packets);
                self.next = self.next.max(self.acknowledged);
            }
            Event::GoBack => self.next = self.acknowledged,
            Event::Take | Event::Packet { .. } => {}
        }
        // What happens here does so when all before it was sent, and completes in its turn.
        for index in 0..self.first.len() {
            let is_local = self.requests[index].packets == 0;
            if is_local && self.executed[index] == 0 && self.first[index] <= self.next {
                self.executed[index] = 1;
            }
        }
        while self.complete < self.first.len()
            && self.end(self.complete) <= self.acknowledged
            && self.executed[self.complete] > 0
        {
            self.complete += 1;
        }
    }

    fn execute_packet(&mut self) {
        let psn = self.expected;
        self.expected += 1;
        let owner = (0..self.first.len()).find(|index| (self.first[*index]..self.end(*index)).contains(&psn));
        let owner = owner.expect("a packet of a request");
        if self.expected < self.end(owner) {
            return;
        }
        self.executed[owner] += 1;
        let value = match self.requests[owner].opcode {
            CompareSwap | FetchAdd => Some(original(owner)),
            AtomicWrite => None,
            _ => return,
        };
        self.atomics.push((psn, value));
        let surplus = self.atomics.len().saturating_sub(self.kept);
        self.atomics.drain(..surplus);
    }

    /// What both ends say when it is cut, with the first PSN that it has in truth.
    fn cut(&self, base: u32) -> (QpPosition, QpProgress, u64, Vec<u8>) {
        let psn = |psn: u32| base.wrapping_add(psn) & PSN_MASK;
        let taken = self.complete..self.first.len();
        let outstanding = taken.map(|index| OutstandingRequest {
            wr_id: index as u64,
            first_psn: psn(self.first[index]),
            packets: self.requests[index].packets,
            executed: self.requests[index].packets == 0 && self.executed[index] > 0,
        });
        let own = QpPosition {
            state: QpState::Rts,
            acknowledged_psn: psn(self.acknowledged),
            sent_psn: psn(self.sent),
            requests: outstanding.collect(),
            expected_psn: 0,
            atomics: Vec::new(),
            receive: None,
        };
        let messages = |executed_only: bool| {
            let all = self.requests.iter().zip(&self.executed);
            all.filter(|(request, executed)| {
                request.opcode.is_two_sided() && !(executed_only && **executed == 0)
            })
            .count() as u64
        };
        // Where there is room, the other end still has results from before the PSNs went round.
        let room = self.kept.saturating_sub(self.atomics.len());
        let before = self.atomics.iter().take(room).map(|(at, _)| (*at, Some(STALE)));
        let kept = before.chain(self.atomics.iter().copied());
        let peer = QpProgress {
            qpn: 1,
            failed: false,
            sent: 0,
            received: messages(true),
            expected_psn: psn(self.expected),
            atomics: kept.map(|(at, value)| (psn(at), value)).collect(),
        };
        let opcodes = self.requests[self.complete..].iter();
        (
            own,
            peer,
            messages(false),
            opcodes.map(|request| request.opcode as u8).collect(),
        )
    }
}

/// What was in memory before an ATOMIC of the same PSN, 2^24 PSNs ago.
const STALE: u64 = 999;

/// What was in memory before an ATOMIC.
fn original(index: usize) -> u64 {
    1000 + index as u64
}

fn run(requests: Vec<Request>, kept: usize, events: &[Event]) -> Model {
    let mut model = Model::new(requests, kept);
    events.iter().for_each(|event| model.happen(*event));
    model
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_executed_twice_and_nothing_is_lost(
        requests in prop::collection::vec(request(), 1..12),
        events in prop::collection::vec(event(), 0..80),
        base in prop_oneof![0u32..10, (PSN_MASK - 20)..=PSN_MASK],
        kept in 1usize..5,
    ) {
        let model = run(requests, kept, &events);
        let (own, peer, sent, opcodes) = model.cut(base);
        let unanswered = |index: usize| {
            let executed = model.executed[index] > 0;
            let at = model.first.get(index).map(|first| base.wrapping_add(*first) & PSN_MASK);
            let is_atomic = matches!(model.requests[index].opcode, CompareSwap | FetchAdd);
            is_atomic && executed && !peer.atomics.iter().any(|(psn, _)| Some(*psn) == at)
        };
        let lost_answer = (model.complete..model.requests.len()).any(unanswered);
        match fates(&own, &opcodes, sent, &peer) {
            Ok(fates) => {
                prop_assert!(!lost_answer);
                for (index, fate) in (model.complete..).zip(&fates) {
                    let Request { opcode, .. } = model.requests[index];
                    let executed = model.executed[index];
                    match fate {
                        Fate::Complete(value) => {
                            prop_assert_eq!(executed, 1);
                            prop_assert!(opcode != Read, "its data would be missing");
                            let is_atomic = matches!(opcode, CompareSwap | FetchAdd);
                            prop_assert_eq!(*value, is_atomic.then(|| original(index)));
                        }
                        Fate::Replay => prop_assert!(executed == 0 || opcode == Read),
                    }
                }
                prop_assert_eq!(fates.len(), model.requests.len() - model.complete);
            }
            Err(Uncertain::AtomicAnswer { .. }) => prop_assert!(lost_answer),
            Err(error) => prop_assert!(false, "{}", error),
        }
    }

    /// An end that only receives has no PSNs of its own that the other one could confirm.
    #[test]
    fn one_that_never_sent_has_nothing_to_replay(expected in 0..=PSN_MASK) {
        let (own, peer, ..) = run(Vec::new(), 1, &[]).cut(0);
        let own = QpPosition { state: QpState::Rtr, ..own };
        let peer = QpProgress { expected_psn: expected, ..peer };
        prop_assert_eq!(fates(&own, &[], 0, &peer), Ok(Vec::new()));
    }

    /// Where one end says what cannot be, nothing is done.
    #[test]
    fn contradictions_are_found(
        requests in prop::collection::vec(request(), 1..12),
        events in prop::collection::vec(event(), 0..80),
        off in 1u32..1000,
    ) {
        let model = run(requests, 12, &events);
        let (own, peer, sent, opcodes) = model.cut(0);
        let ahead = QpProgress {
            expected_psn: own.sent_psn + off,
            ..peer.clone()
        };
        let found = fates(&own, &opcodes, sent, &ahead);
        prop_assert!(matches!(found, Err(Uncertain::Position { .. })), "{:?}", found);
        let behind = QpProgress {
            expected_psn: own.acknowledged_psn.wrapping_sub(off) & PSN_MASK,
            ..peer.clone()
        };
        let found = fates(&own, &opcodes, sent, &behind);
        prop_assert!(matches!(found, Err(Uncertain::Position { .. })), "{:?}", found);
        let other_count = QpProgress {
            received: peer.received + u64::from(off),
            ..peer.clone()
        };
        let found = fates(&own, &opcodes, sent, &other_count);
        prop_assert!(matches!(found, Err(Uncertain::Counts { .. })), "{:?}", found);
        // An end that has failed says what it executed, and nothing else is ever executed there.
        let failed = QpProgress {
            failed: true,
            ..other_count
        };
        prop_assert!(fates(&own, &opcodes, sent, &failed).is_ok());
        if !own.requests.is_empty() {
            let fewer = &opcodes[..own.requests.len() - 1];
            prop_assert_eq!(fates(&own, fewer, sent, &peer), Err(Uncertain::Requests));
        }
    }
}

/// A second stop comes before what the first one found executed is complete, since a READ before it is not.
#[test]
fn what_was_found_executed_stays_so_at_the_next_stop() {
    let request = |wr_id, first_psn, packets| OutstandingRequest {
        wr_id,
        first_psn,
        packets,
        executed: false,
    };
    let (own, peer, ..) = run(Vec::new(), 1, &[]).cut(0);
    let own = QpPosition {
        acknowledged_psn: 10,
        sent_psn: 13,
        requests: vec![
            request(0, 10, 2),
            request(1, 12, 0),
            request(2, 12, 0),
            request(3, 12, 0),
            request(4, 12, 1),
        ],
        ..own
    };
    // The READ and the last SEND have not arrived again. The message among those that are decided was counted long ago.
    let peer = QpProgress {
        expected_psn: 10,
        received: 7,
        ..peer
    };
    let decided = [false, true, true, true, false];
    let open = undecided(&own, &decided).unwrap();
    let opcodes = [Read, Send].map(|opcode| opcode as u8);
    assert_eq!(
        fates(&open, &opcodes, 8, &peer),
        Ok(vec![Fate::Replay, Fate::Replay])
    );
    assert_eq!(undecided(&own, &decided[..4]), Err(Uncertain::Requests));
}
