//! Where a queue pair stands in the middle of its requests: what whoever takes it away must know, to tell which of them
//! were executed. The model is `rq_psn` and `sq_psn` of a query (IBA §11.2.5.3), with what a lost answer would have said.

use super::requester::Requester;
use super::responder::Responder;
use crate::Psn;

/// Where a reliable connection stands at one end. Exact, and of use, only while the queue pair neither sends nor takes in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    /// The oldest PSN without an answer.
    pub acknowledged: Psn,
    /// The first PSN that was never sent.
    pub sent: Psn,
    /// The requests that were taken off the ring and are not complete, oldest first.
    pub requests: Vec<Outstanding>,
    /// The PSN that must come next from the partner: all before it is executed, and nothing else is.
    pub expected: Psn,
    /// The partner's latest atomics, oldest first: PSN, and what was there before; nothing is said of that for an atomic WRITE.
    pub atomics: Vec<(Psn, Option<u64>)>,
    /// The `wr_id` of the RECV that a message of which only a part has come is put into.
    pub receive: Option<u64>,
}

/// A request that is not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outstanding {
    /// As the program posted it.
    pub wr_id: u64,
    /// Its first PSN.
    pub first: Psn,
    /// How many PSNs it has: none if it happens here.
    pub packets: u32,
    /// It happens here, and has happened.
    pub executed: bool,
}

impl Position {
    pub(super) fn of(requester: &Requester, responder: &Responder) -> Position {
        let (acknowledged, sent) = requester.progress();
        Position {
            acknowledged,
            sent,
            requests: requester.outstanding().collect(),
            expected: responder.expected(),
            atomics: responder.atomics().collect(),
            receive: responder.receive(),
        }
    }
}
