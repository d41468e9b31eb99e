//! The program of the self-test: it takes nothing for good that is not.

use std::time::Duration;

use super::*;
use crate::loopback::{Loopback, RoundError};

/// It waits only where nothing comes at all.
const SHORT: Duration = Duration::from_millis(100);

/// What a round says that the fake was set up for.
fn round(change: impl FnOnce(&mut Knobs)) -> Result<(), RoundError> {
    let fake = Fake::new();
    let mut program = Loopback::on(fake.open(), SHORT)?;
    fake.set(|knobs| {
        knobs.carry = 1;
        change(knobs);
    });
    program.round()?;
    program.round()
}

#[test]
fn what_comes_as_it_was_sent_is_good() {
    round(|_| {}).unwrap();
}

#[test]
fn another_byte_is_found() {
    let error = round(|knobs| knobs.carry = 2).unwrap_err();
    assert!(
        matches!(
            error,
            RoundError::Content {
                what: "SEND",
                at: 1499
            }
        ),
        "{error:?}"
    );
}

#[test]
fn a_datagram_is_looked_at_too() {
    let error = round(|knobs| knobs.carry = 3).unwrap_err();
    assert_eq!(
        error.to_string(),
        "byte 199 of what the datagram brought is not what was sent"
    );
    let error = round(|knobs| knobs.carry = 4).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the datagram is said to be of queue pair 0x63 and 240 bytes long"
    );
}

/// As it would be where a queue pair has another number after a move than before.
#[test]
fn a_completion_names_the_queue_pair_that_the_program_knows() {
    let fake = Fake::new();
    let mut program = Loopback::on(fake.open(), SHORT).unwrap();
    fake.set(|knobs| knobs.carry = 1);
    program.round().unwrap();
    // The second queue pair: the region's key took the first number.
    let second = fake.qp(19);
    // SAFETY: the fake's queue pair, which nobody uses meanwhile.
    let number = unsafe { std::mem::replace(&mut (*second).qp_num, 30) };
    let error = program.round().unwrap_err();
    // SAFETY: as above.
    unsafe { (*second).qp_num = number };
    assert!(matches!(error, RoundError::Unknown { qpn: 30, .. }), "{error:?}");
}

#[test]
fn what_does_not_come_is_not_waited_for_long() {
    let error = round(|knobs| knobs.carry = 0).unwrap_err();
    assert_eq!(error.to_string(), "a completion did not come in time");
    let error = round(|knobs| (knobs.carry, knobs.hold) = (0, 1)).unwrap_err();
    assert_eq!(error.to_string(), "a completion event did not come in time");
}

#[test]
fn what_fails_is_named() {
    let error = round(|knobs| knobs.status = 12).unwrap_err().to_string();
    assert!(
        error.starts_with("request 0x0 of queue pair") && error.ends_with("with status 12"),
        "{error}"
    );
    let error = round(|knobs| (knobs.refuse_at, knobs.refuse_errno) = (0, libc::ENOMEM))
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("ibv_post_srq_recv") && error.contains("Cannot allocate memory"),
        "{error}"
    );
}
