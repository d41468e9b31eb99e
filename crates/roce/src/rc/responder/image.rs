//! What is saved of a responder, and what must hold of it when it comes back.
//!
//! Not saved: what came behind a packet that is missing. The partner begins again there when the queue pair goes on.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::answers::{Answer, Answers, AtomicAnswer};
use super::{PendingNak, Responder};
use crate::rc::image::ImageError;
use crate::receive::Message;
use crate::{MAX_MESSAGE, Mtu, Psn, QpAttributes};

/// The most answers that wait, and results of atomics, in an image. `max_dest_rd_atomic` has eight bits; a few more may be
/// asked for again, with an acknowledgement behind each.
const MOST_ANSWERS: usize = 1024;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::rc) struct ResponderImage {
    expected: Psn,
    last_data: Option<Psn>,
    /// The results of the latest atomics: for a partner that asks again.
    atomics: VecDeque<AtomicAnswer>,
    msn: u32,
    message: Option<Message>,
    /// READ data that is still to be sent, results of atomics, acknowledgements.
    answers: VecDeque<Answer>,
    nak: Option<PendingNak>,
    /// Always false. Earlier releases kept packets that came early, and noted here how the partner sends again.
    repairs_singly: bool,
    ending: bool,
}

impl ResponderImage {
    /// The `wr_id` of the RECV that it holds.
    pub fn receive(&self) -> Option<u64> {
        match &self.message {
            Some(Message::Send { receive, .. }) => Some(receive.wr_id),
            Some(Message::Write(_)) | None => None,
        }
    }

    /// Is nothing under way?
    pub fn is_idle(&self) -> bool {
        self.message.is_none() && self.answers.is_empty() && self.nak.is_none() && !self.ending
    }

    fn check(&self, mtu: Mtu) -> Result<(), ImageError> {
        let message = match &self.message {
            None => true,
            Some(Message::Send { receive, received }) => u64::from(*received) <= receive.sges.len_bytes(),
            Some(Message::Write(write)) => write.received <= write.len && write.len <= MAX_MESSAGE,
        };
        ImageError::unless(
            message,
            "the message that is being received is longer than its place",
        )?;
        let bounded = self.answers.len() <= MOST_ANSWERS && self.atomics.len() <= MOST_ANSWERS;
        ImageError::unless(
            bounded && self.msn <= Psn::MASK,
            "there are more answers than there can be",
        )?;
        let reads = self.answers.iter().all(|answer| match answer {
            Answer::Read(read) => read.len <= MAX_MESSAGE && read.packets == mtu.packets(read.len),
            Answer::Ack { .. } | Answer::Atomic(_) => true,
        });
        ImageError::unless(reads, "an answer is not as long as its packets")
    }
}

impl Responder {
    /// What is saved of it while no packet is taken in.
    pub fn save(&self) -> ResponderImage {
        ResponderImage {
            expected: self.expected,
            last_data: self.last_data,
            atomics: self.atomics.clone(),
            msn: self.msn,
            message: self.message.clone(),
            answers: self.answers.iter().copied().collect(),
            nak: self.nak,
            repairs_singly: false,
            ending: self.ending,
        }
    }

    /// A responder that goes on from there.
    pub fn restore(image: ResponderImage, attributes: &QpAttributes) -> Result<Responder, ImageError> {
        image.check(attributes.path_mtu.unwrap_or_default())?;
        let mut responder = Responder {
            expected: image.expected,
            last_data: image.last_data,
            atomics: image.atomics,
            msn: image.msn,
            message: image.message,
            answers: Answers::from(image.answers),
            nak: image.nak,
            ending: image.ending,
            ..Responder::default()
        };
        responder.configure(attributes);
        Ok(responder)
    }
}
