//! The responder: executes the partner's requests and answers them (IBA §9.7.4 and §9.7.5.1).
//!
//! - [`request`]: a request packet goes through a chain of checks in the order of IBA §9.7.4, each of which may refuse
//!   it; what passes all of them is executed.
//! - [`duplicate`]: what was executed before is answered again, and only READs are executed again.
//! - [`early`]: what comes behind a packet that is missing is dropped, and the partner is told.
//! - [`answers`]: what is to be answered, in the order of PSNs; acknowledgements merge.
//! - [`respond`]: makes packets of the answers, READ data a bit at a time.
//!
//! A refusal that ends the connection is sent after all earlier answers; then the queue pair goes into the error state.

mod answers;
mod duplicate;
mod early;
mod image;
mod request;
mod respond;

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use self::answers::{Answers, AtomicAnswer};
use self::early::Early;
pub(super) use self::image::ResponderImage;
use crate::receive::{Message, flush_receive};
use crate::wire::aeth::Syndrome;
use crate::{AccessFlags, Counters, Host, Psn, QpAttributes};

/// A negative acknowledgement that waits to be sent.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct PendingNak {
    psn: Psn,
    syndrome: Syndrome,
}

/// The state of the partner's requests here.
#[derive(Debug, Default)]
pub(super) struct Responder {
    access: AccessFlags,
    min_rnr_timer: u8,
    max_dest_rd_atomic: u8,
    /// The PSN that must come next.
    expected: Psn,
    /// The first PSN of the latest READ or atomic.
    last_data: Option<Psn>,
    /// The results of the latest atomics, as many as the partner may ask for again (IBA §9.4.5).
    atomics: VecDeque<AtomicAnswer>,
    /// Messages completed, modulo 2^24.
    msn: u32,
    /// The message of which some packets have come.
    message: Option<Message>,
    answers: Answers,
    nak: Option<PendingNak>,
    /// What came behind `expected`.
    early: Early,
    /// The connection is at its end: nothing more is executed, and after the NAK comes the error state.
    ending: bool,
}

impl Responder {
    /// Takes over attributes that may change while the queue pair runs.
    pub fn configure(&mut self, attributes: &QpAttributes) {
        self.access = attributes.access_flags.unwrap_or_default();
        self.min_rnr_timer = attributes.min_rnr_timer.unwrap_or(0);
        self.max_dest_rd_atomic = attributes.max_dest_rd_atomic.unwrap_or(0);
    }

    /// The queue pair goes to RTR.
    pub fn start(&mut self, expected: Psn) {
        self.expected = expected;
    }

    /// Was the NAK that ends the connection sent? Then the queue pair must go into the error state.
    pub fn has_ended(&self) -> bool {
        self.ending && self.nak.is_none()
    }

    /// Is nothing more executed, whether or not the partner has been told?
    pub fn is_ending(&self) -> bool {
        self.ending
    }

    /// Messages completed, modulo 2^24.
    pub fn msn(&self) -> u32 {
        self.msn
    }

    /// The PSN that must come next.
    pub fn expected(&self) -> Psn {
        self.expected
    }

    /// The latest atomics, oldest first, and what was there before each.
    pub fn atomics(&self) -> impl Iterator<Item = (Psn, Option<u64>)> {
        self.atomics.iter().map(|atomic| (atomic.psn, atomic.value))
    }

    /// The `wr_id` of the RECV of the message of which some packets have come.
    pub fn receive(&self) -> Option<u64> {
        match &self.message {
            Some(Message::Send { receive, .. }) => Some(receive.wr_id),
            Some(Message::Write(_)) | None => None,
        }
    }

    /// Is there nothing to send but an acknowledgement?
    pub fn owes_only_acknowledgement(&self) -> bool {
        self.nak.is_none() && self.answers.is_only_acknowledgement()
    }

    /// Forgets the partner's requests, but not which were executed, and flushes the RECV of a message that is not complete.
    pub fn flush(&mut self, host: &mut impl Host, counters: &mut Counters) {
        if let Some(Message::Send { receive, .. }) = self.message.take() {
            flush_receive(&receive, host, counters);
        }
        *self = Responder {
            expected: self.expected,
            atomics: std::mem::take(&mut self.atomics),
            ..Responder::default()
        };
    }
}
