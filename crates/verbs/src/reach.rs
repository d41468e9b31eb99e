//! Verbs for which the kernel asks the network where another host is: a queue pair that goes to RTR, an address handle.
//!
//! It asks by ARP or neighbour discovery, and gives up with `ETIMEDOUT` after a second (`ib_resolve_eth_dmac`), which is as long as it takes it to
//! repeat a question that was lost. A program that is told so tries again or ends. What Verbatim makes in its place, after a decision that nobody
//! can take back, must not be lost with one packet.

use std::time::{Duration, Instant};

use crate::error::VerbsError;

/// How long one context asks, in all: a host that is gone is not waited for any longer.
const LIMIT: Duration = Duration::from_secs(5);

/// How long hosts are still asked for.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    /// Since a question was not answered for the first time.
    until: Option<Instant>,
}

impl Patience {
    /// Gives a verb until the network answers, or patience ends. Each try takes the kernel a second.
    pub fn with<T>(&mut self, mut verb: impl FnMut() -> Result<T, VerbsError>) -> Result<T, VerbsError> {
        loop {
            match verb() {
                Err(error) if is_unanswered(&error) => {
                    let until = *self.until.get_or_insert_with(|| Instant::now() + LIMIT);
                    if Instant::now() >= until {
                        return Err(error);
                    }
                }
                done => return done,
            }
        }
    }
}

/// Whether nobody has answered.
pub(crate) fn is_unanswered(error: &VerbsError) -> bool {
    error.errno() == libc::ETIMEDOUT
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unanswered() -> VerbsError {
        VerbsError::os("modify_qp", rustix::io::Errno::TIMEDOUT)
    }

    #[test]
    fn who_does_not_answer_at_once_is_asked_again() {
        let mut answers = vec![Ok(7), Err(unanswered()), Err(unanswered())];
        let answer = Patience::default().with(|| answers.pop().unwrap());
        assert_eq!((answer.unwrap(), answers.len()), (7, 0));
    }

    #[test]
    fn what_is_refused_for_another_reason_is_refused() {
        let mut tries = 0;
        let refused = Patience::default().with(|| {
            tries += 1;
            Err::<(), _>(VerbsError::Invalid("no".to_owned()))
        });
        assert!(refused.is_err() && tries == 1);
    }

    #[test]
    fn patience_ends_for_all_at_once() {
        let mut patience = Patience {
            until: Some(Instant::now()),
        };
        let mut tries = 0;
        for _ in 0..3 {
            let given_up = patience.with(|| {
                tries += 1;
                Err::<(), _>(unanswered())
            });
            assert!(is_unanswered(&given_up.unwrap_err()));
        }
        assert_eq!(tries, 3, "each is tried once");
    }
}
