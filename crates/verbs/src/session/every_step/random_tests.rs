//! Random programs, moved several times.

use proptest::prelude::*;

use super::calls::{LONG, post, recv, wait};
use super::{Call, How, Plan, Request, Who, run};
use crate::SendOpcode::{CompareSwap, FetchAdd, Read, Send as PlainSend, SendWithImm, Write, WriteWithImm};
use crate::testing::Patience;

/// A program for which losses and moves are no reason to fail or to wait.
fn random_program() -> impl Strategy<Value = Vec<Call>> {
    let opcode = prop::sample::select(vec![
        PlainSend,
        SendWithImm,
        Write,
        WriteWithImm,
        Read,
        FetchAdd,
        CompareSwap,
    ]);
    let request = (0usize..2, opcode, any::<[bool; 3]>(), 0u32..LONG, 0usize..4);
    prop::collection::vec(request, 1..20).prop_map(|requests| {
        let mut calls = Vec::new();
        let (mut counts, mut sent, mut received) = ([0; 2], [0; 2], [0; 2]);
        for (end, opcode, [signaled, is_fenced, is_inline], length, pause) in requests {
            let other = 1 - end;
            let two_sided = matches!(opcode, PlainSend | SendWithImm | WriteWithImm);
            if two_sided {
                calls.push(recv(other, received[other] % 8, LONG));
                (received[other], counts[other]) = (received[other] + 1, counts[other] + 1);
            }
            let takes_data = matches!(opcode, Read | FetchAdd | CompareSwap);
            let length = match opcode {
                FetchAdd | CompareSwap => 8,
                _ if is_inline && !takes_data => length % 64,
                _ => length,
            };
            sent[end] += 1;
            let mut request = Request {
                end,
                inline: is_inline && !takes_data,
                ..post(sent[end], opcode, length)
            };
            if is_fenced {
                request = request.fenced();
            }
            if signaled {
                counts[end] += 1;
            } else {
                request = request.unsignaled();
            }
            calls.push(Call::Send(request));
            if pause == 0 {
                calls.push(wait(0, counts[0]));
                calls.push(wait(1, counts[1]));
            }
        }
        // One that is signaled at the end of each queue says that those before it are complete.
        for end in 0..2 {
            let last = post(sent[end] + 1, Read, 8);
            calls.push(Call::Send(Request { end, ..last }));
            counts[end] += 1;
        }
        calls.extend([wait(0, counts[0]), wait(1, counts[1])]);
        calls
    })
}

fn plan() -> impl Strategy<Value = Plan> {
    let who = prop::sample::select(vec![Who::One(0), Who::One(1), Who::Both]);
    let how = prop::sample::select(How::ALL.to_vec());
    let patience = prop::sample::select(vec![Patience::LONG, Patience::Stops, Patience::Pauses]);
    (0usize..150, who, how, patience).prop_map(|(step, who, how, patience)| Plan {
        step,
        who,
        how,
        patience,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Over a network that loses packets. What is in memory in between depends on who was faster.
    #[test]
    fn a_random_program_sees_no_move_and_no_loss(
        calls in random_program(),
        plans in prop::collection::vec(plan(), 1..4),
        losses in prop::collection::vec(prop::bool::weighted(0.1), 0..200),
    ) {
        let (plain, _) = run(&calls, 7, &[], &[]);
        let (moved, _) = run(&calls, 7, &plans, &losses);
        prop_assert_eq!(moved.completions, plain.completions);
    }
}
