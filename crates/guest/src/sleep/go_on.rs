//! The rule: who was interrupted without a handler waits for what is left.

use std::time::{Duration, Instant};

use super::witness::Outcome;

/// What the kernel returns then.
pub const INTERRUPTED: isize = -(libc::EINTR as isize);

/// Makes a system call, and makes it again as long as it is interrupted and no handler has run; what it returned last.
///
/// The first call has the arguments that the program gave. `limit` is asked only after the kernel has accepted them: how long
/// that one was to wait, or for ever. `again` gets what is left of it.
pub fn go_on(
    first: impl FnOnce() -> Outcome,
    limit: impl FnOnce() -> Option<Duration>,
    mut again: impl FnMut(Option<Duration>) -> Outcome,
) -> isize {
    let started = Instant::now();
    let is_over = |outcome: &Outcome| outcome.returned != INTERRUPTED || outcome.handler_ran;
    let mut outcome = first();
    if is_over(&outcome) {
        return outcome.returned;
    }
    let limit = limit();
    while !is_over(&outcome) {
        outcome = again(limit.map(|limit| limit.saturating_sub(started.elapsed())));
    }
    outcome.returned
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interrupted(handler_ran: bool) -> Outcome {
        Outcome {
            returned: INTERRUPTED,
            handler_ran,
        }
    }

    const DONE: Outcome = Outcome {
        returned: 0,
        handler_ran: false,
    };

    #[test]
    fn a_handler_ends_it() {
        let returned = go_on(|| interrupted(true), || unreachable!(), |_| unreachable!());
        assert_eq!(returned, INTERRUPTED);
        let mut calls = 0;
        let limit = Some(Duration::from_secs(1));
        let returned = go_on(
            || interrupted(false),
            || limit,
            |_| {
                calls += 1;
                interrupted(calls == 3)
            },
        );
        assert_eq!((returned, calls), (INTERRUPTED, 3));
    }

    #[test]
    fn a_freeze_does_not_and_what_is_left_gets_less() {
        let limit = Duration::from_secs(100);
        let mut last = limit;
        let mut calls = 0;
        let again = |left: Option<Duration>| {
            let left = left.unwrap();
            assert!(left < last, "{left:?} is left after {last:?}");
            last = left;
            calls += 1;
            if calls < 3 { interrupted(false) } else { DONE }
        };
        assert_eq!(go_on(|| interrupted(false), || Some(limit), again), 0);
    }

    #[test]
    fn what_has_no_limit_gets_none() {
        let again = |left: Option<Duration>| {
            assert_eq!(left, None);
            DONE
        };
        assert_eq!(go_on(|| interrupted(false), || None, again), 0);
    }

    #[test]
    fn nothing_is_left_in_the_end() {
        let again = |left: Option<Duration>| {
            assert_eq!(left, Some(Duration::ZERO));
            DONE
        };
        assert_eq!(go_on(|| interrupted(false), || Some(Duration::ZERO), again), 0);
    }
}
