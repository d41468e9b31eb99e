//! Scenarios of every kind of request, moved at each of their steps.

use super::calls::{LONG, post, recv, wait};
use super::{Call, How, Plan, Request, Run, Who, run};
use crate::SendOpcode::{CompareSwap, FetchAdd, Read, Send as PlainSend, SendWithImm, Write, WriteWithImm};
use crate::testing::{Outcome, Patience};

/// What a drain may have to wait for.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Waits {
    /// What is on its way.
    ForTheNetwork,
    /// Something that the program does later, or a message that failed after the program was suspended: then the move is
    /// taken back, and can be tried again.
    ForTheProgram,
}

/// Moved at each step, by whom and however. So many completions of it are errors.
fn every_step(errors: usize, rnr_retry: u8, waits: Waits, calls: &[Call]) {
    let (plain, run_plainly) = run(calls, rnr_retry, &[], &[]);
    let seen = || plain.completions.iter().flatten().flatten();
    assert_eq!(seen().filter(|wc| wc.status != 0).count(), errors, "{plain:?}");
    assert!(
        seen().count() > 0,
        "a scenario in which nothing is seen proves nothing"
    );
    for patience in [Patience::LONG, Patience::Stops, Patience::Pauses] {
        let (mut moves, mut stuck) = (0, Vec::new());
        let mut replayed = 0;
        for step in 0..run_plainly.steps {
            for (who, how) in ways() {
                let plan = Plan {
                    step,
                    who,
                    how,
                    patience,
                };
                let (moved, done) = run(calls, rnr_retry, &[plan], &[]);
                // What is on its way when a connection is stopped is lost, and may have been the reason of a failure.
                if patience != Patience::LONG && errors > 0 {
                    let plain = plain.clone().with_any_failure();
                    assert_eq!(moved.with_any_failure(), plain, "{plan:?}");
                } else {
                    assert_eq!(moved, plain, "{plan:?}");
                }
                let went_back = done.taken_back > 0;
                if went_back && how == How::AtOnce {
                    stuck.push(plan);
                }
                assert!(done.moves > 0 || went_back, "{plan:?}: nothing has moved");
                moves += done.moves;
                replayed += done.pair.replayed.iter().sum::<u64>();
            }
        }
        // Who stops it need not wait for anybody.
        let may_wait = waits == Waits::ForTheProgram && patience == Patience::LONG;
        assert!(may_wait || stuck.is_empty(), "{stuck:?}");
        assert!(
            moves > run_plainly.steps,
            "{moves} moves in {} steps",
            run_plainly.steps
        );
        assert_eq!(replayed > 0, patience != Patience::LONG, "{replayed} replayed");
    }
}

fn ways() -> impl Iterator<Item = (Who, How)> {
    let who = [Who::One(0), Who::One(1), Who::Both];
    who.into_iter().flat_map(|who| How::ALL.map(|how| (who, how)))
}

#[test]
fn sends() {
    every_step(
        0,
        7,
        Waits::ForTheNetwork,
        &[
            recv(1, 0, LONG),
            recv(1, 1, LONG),
            recv(1, 2, 64),
            Call::Send(post(1, SendWithImm, LONG)),
            Call::Send(post(2, PlainSend, LONG)),
            wait(1, 1),
            Call::Send(post(3, SendWithImm, 0)),
            wait(0, 3),
            wait(1, 3),
        ],
    );
}

#[test]
fn sends_both_ways() {
    every_step(
        0,
        7,
        Waits::ForTheNetwork,
        &[
            recv(1, 0, 64),
            recv(0, 0, LONG),
            recv(0, 1, 64),
            Call::Send(post(1, SendWithImm, 64)),
            Call::Send(Request {
                end: 1,
                ..post(1, SendWithImm, LONG)
            }),
            recv(1, 1, LONG),
            Call::Send(post(2, SendWithImm, LONG)),
            Call::Send(Request {
                end: 1,
                ..post(2, SendWithImm, 8)
            }),
            wait(0, 4),
            wait(1, 4),
        ],
    );
}

#[test]
fn writes() {
    every_step(
        0,
        7,
        Waits::ForTheProgram,
        &[
            recv(1, 0, 8),
            Call::Send(post(1, Write, LONG)),
            Call::Send(post(2, WriteWithImm, LONG)),
            Call::Send(post(3, Write, 8)),
            Call::Send(post(4, WriteWithImm, 0)),
            recv(1, 1, 8),
            wait(1, 2),
            wait(0, 4),
        ],
    );
}

#[test]
fn reads_and_atomics() {
    every_step(
        0,
        7,
        Waits::ForTheNetwork,
        &[
            // A READ may be executed again, so later requests do not change what it reads (IBA §10.8.3.3: they would need a
            // fence).
            Call::Send(Request {
                remote: 3000,
                ..post(1, Read, LONG)
            }),
            Call::Send(post(2, FetchAdd, 8)),
            Call::Send(Request {
                remote: 3800,
                ..post(3, Read, 64)
            }),
            Call::Send(post(4, CompareSwap, 8)),
            Call::Send(post(5, FetchAdd, 8)),
            wait(0, 2),
            Call::Send(post(2, FetchAdd, 8)),
            Call::Send(post(2, FetchAdd, 8)),
            wait(0, 7),
        ],
    );
}

#[test]
fn unsignaled_and_fenced() {
    every_step(
        0,
        7,
        Waits::ForTheNetwork,
        &[
            recv(1, 0, LONG),
            Call::Send(post(1, Write, LONG).unsignaled()),
            Call::Send(post(2, Read, LONG).unsignaled()),
            Call::Send(post(3, SendWithImm, 64).fenced()),
            Call::Send(post(4, Write, 64).fenced().unsignaled()),
            Call::Send(post(5, FetchAdd, 8).unsignaled()),
            wait(0, 1),
            Call::Send(post(6, Write, 8).fenced()),
            wait(0, 2),
            wait(1, 1),
        ],
    );
}

#[test]
fn inline_data_are_those_of_the_call() {
    let fill = |value| Call::Fill { end: 0, at: 0, value };
    every_step(
        0,
        7,
        Waits::ForTheNetwork,
        &[
            recv(1, 0, 64),
            Call::Send(Request {
                inline: true,
                ..post(1, Write, 64)
            }),
            fill(1),
            Call::Send(Request {
                inline: true,
                ..post(2, Write, 16)
            }),
            fill(2),
            Call::Send(Request {
                inline: true,
                ..post(3, PlainSend, 24)
            }),
            fill(3),
            wait(0, 3),
            wait(1, 1),
        ],
    );
}

#[test]
fn receiver_not_ready() {
    every_step(
        0,
        7,
        Waits::ForTheProgram,
        &[
            Call::Send(post(1, SendWithImm, LONG)),
            Call::Send(post(2, WriteWithImm, 8)),
            recv(1, 0, LONG),
            wait(0, 1),
            Call::Send(post(3, Read, 64)),
            recv(1, 1, 8),
            wait(0, 3),
            wait(1, 2),
        ],
    );
}

#[test]
fn receiver_not_ready_too_often() {
    every_step(
        3,
        0,
        Waits::ForTheProgram,
        &[
            Call::Send(post(1, Write, 8)),
            Call::Send(post(2, SendWithImm, 8)),
            Call::Send(post(3, Write, 8).unsignaled()),
            wait(0, 3),
            Call::Send(post(4, Write, 8)),
            wait(0, 4),
        ],
    );
}

#[test]
fn refused_by_the_other_end() {
    every_step(
        6,
        7,
        Waits::ForTheNetwork,
        &[
            recv(1, 0, 64),
            recv(1, 1, 64),
            Call::Send(post(1, SendWithImm, 8)),
            Call::Send(Request {
                bad_rkey: true,
                ..post(2, Write, LONG)
            }),
            Call::Send(post(3, SendWithImm, 8)),
            Call::Send(post(4, Write, 8).unsignaled()),
            wait(0, 4),
            wait(1, 2),
            Call::Send(post(5, Read, 8)),
            recv(1, 2, 64),
            wait(0, 5),
            wait(1, 3),
        ],
    );
}

#[test]
fn refused_here() {
    every_step(
        4,
        7,
        Waits::ForTheNetwork,
        &[
            Call::Send(post(1, Write, LONG)),
            Call::Send(Request {
                bad_lkey: true,
                ..post(2, Write, LONG)
            }),
            Call::Send(post(3, Write, 8)),
            wait(0, 3),
            recv(0, 0, 8),
            Call::Send(post(4, Write, 8)),
            wait(0, 5),
        ],
    );
}

#[test]
fn longer_than_its_receive() {
    every_step(
        4,
        7,
        Waits::ForTheNetwork,
        &[
            recv(1, 0, 8),
            recv(1, 1, 64),
            Call::Send(post(1, SendWithImm, LONG)),
            Call::Send(post(2, Write, 8)),
            wait(0, 2),
            wait(1, 2),
        ],
    );
}

#[test]
fn flushed_by_the_program() {
    every_step(
        5,
        7,
        Waits::ForTheNetwork,
        &[
            recv(0, 0, 8),
            recv(0, 1, 8),
            Call::Send(post(1, Write, 64)),
            wait(0, 1),
            Call::Fail { end: 0 },
            Call::Send(post(2, Write, 8)),
            Call::Send(post(3, Write, 8).unsignaled()),
            recv(0, 2, 8),
            wait(0, 6),
        ],
    );
}

/// An end that has not polled does not know that its connection is broken, and its partner does not wait for what was never
/// delivered.
#[test]
fn what_has_failed_is_not_waited_for() {
    let mut run = Run::new(0, &[]);
    run.call(&Call::Send(post(1, SendWithImm, 8)));
    while run.pair.wire.step() {}
    let mut one = run.pair.begin(0);
    while !one.is_drained() {
        one = match run.pair.advance(one) {
            Outcome::Under(one) => one,
            other => panic!("{other:?}"),
        };
    }
    run.pair.abort(one);
}

/// An ATOMIC has been executed, and its answer is lost when the connection is stopped.
fn an_unanswered_atomic() -> Run {
    let mut run = Run::new(7, &[]);
    run.pair.patience = Patience::Stops;
    let before = run.pair.wire.ram(1);
    run.call(&Call::Send(post(1, FetchAdd, 8)));
    while run.pair.wire.ram(1) == before {
        assert!(run.pair.wire.step());
    }
    run.pair.wire.lose([true]);
    run
}

/// Takes its only move as far as it goes; says whether it was made.
fn moves(run: &mut Run, mover: usize) -> bool {
    let mut one = run.pair.begin(mover);
    loop {
        one = match run.pair.advance(one) {
            Outcome::Under(one) => one,
            Outcome::Done => return true,
            Outcome::TakenBack => return false,
        };
    }
}

/// The rest of a run with one ATOMIC: it completes once, and has added once.
fn completes_once(run: Run, before: [Vec<u8>; 2]) {
    let (trace, _) = run.run(&[wait(0, 1)]);
    let [[sends, _], [_, receives]] = &trace.completions;
    assert_eq!((sends.len(), sends[0].status, receives.len()), (1, 0, 0));
    let word = |ram: &[u8], at: usize| u64::from_ne_bytes(ram[at..at + 8].try_into().unwrap());
    let request = post(1, FetchAdd, 8);
    let old = word(&before[1], request.remote);
    assert_eq!(word(&trace.memory[1], request.remote), old + 3);
    assert_eq!(word(&trace.memory[0], request.local.0), old);
}

#[test]
fn an_atomic_whose_answer_is_lost_is_completed_with_it() {
    let before = [0, 1].map(|end| Run::new(7, &[]).pair.wire.ram(end));
    for mover in 0..2 {
        let mut run = an_unanswered_atomic();
        assert!(moves(&mut run, mover), "{:?}", run.pair.refusal);
        assert_eq!(run.pair.replayed, [0, 1]);
        completes_once(run, before.clone());
    }
}

#[test]
fn an_atomic_of_which_nobody_can_say_what_was_there_takes_the_move_back() {
    let before = [0, 1].map(|end| Run::new(7, &[]).pair.wire.ram(end));
    for mover in 0..2 {
        let mut run = an_unanswered_atomic();
        run.pair.wire.forget_atomics();
        assert!(!moves(&mut run, mover), "it cannot be certain");
        let refusal = run.pair.refusal.clone().unwrap();
        let number = run.pair.ends[0].qp.number();
        assert!(
            refusal.contains(&format!("queue pair {number}")) && refusal.contains("ATOMIC"),
            "{refusal}"
        );
        completes_once(run, before.clone());
    }
}

/// What an end posts only when its own requests complete, those of the other end wait for: no drain ends, but a stop does.
#[test]
fn a_drain_that_waits_for_the_program_itself() {
    let mut run = Run::new(7, &[]);
    run.pair.patience = Patience::Stops;
    run.call(&Call::Send(post(1, SendWithImm, LONG)));
    for _ in 0..20 {
        run.pair.wire.step();
    }
    assert!(moves(&mut run, 1), "{:?}", run.pair.refusal);
    assert_eq!(run.pair.replayed, [1, 0]);
    let (trace, _) = run.run(&[recv(1, 0, LONG), wait(0, 1), wait(1, 1)]);
    assert_eq!(trace.completions[1][1][0].byte_len, LONG);
}
