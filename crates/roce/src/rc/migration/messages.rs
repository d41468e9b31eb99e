//! The three messages, written and read.

use super::counter::Counter;
use super::{Migration, Standing};
use crate::link::{Link, Outlet, SendError};
use crate::wire::aeth::{Aeth, CREDITS_UNLIMITED, Syndrome};
use crate::wire::migeth::{MAC_BYTES, MIGETH_BYTES, MIGETH_VERSION, MOST_HOPS, MigrationEth};
use crate::wire::opcode::Opcode;
use crate::wire::packet::Head;
use crate::{Location, Packet, Psn, Qpn};

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// The sender is stopped.
    Stopped,
    /// The sender goes on, and this is its first PSN without an answer.
    Resume {
        /// `None` if its requester has not begun.
        acknowledged: Option<Psn>,
    },
    /// The sender has accepted a RESUME with this counter.
    Resumed { about: Counter },
}

/// A message that only the partner's RNIC can have sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Received {
    pub message: Message,
    pub counter: Counter,
    pub source: Location,
    /// No RNIC has passed it on.
    pub is_direct: bool,
    /// The PSN that the sender's responder expects.
    pub expected: Psn,
}

/// No message of the partner's RNIC: a forged one, or one of a version that is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unverified;

/// Where this end stands when it sends a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Own {
    pub qpn: Qpn,
    /// The oldest PSN without an answer, if the requester has begun.
    pub acknowledged: Option<Psn>,
    /// The PSN that the responder expects.
    pub expected: Psn,
    /// Messages completed.
    pub msn: u32,
}

const ACK: Syndrome = Syndrome::Ack {
    credits: CREDITS_UNLIMITED,
};

impl Migration {
    /// Reads a message and finds out whether it is the partner's.
    pub(super) fn open(&self, packet: &Packet<'_>) -> Result<Received, Unverified> {
        let secret = self.secret.as_ref().ok_or(Unverified)?;
        let bytes: &[u8; MIGETH_BYTES] = packet.payload.try_into().map_err(|_| Unverified)?;
        let header = MigrationEth::parse(bytes);
        let syndrome = packet.aeth.map(|aeth| aeth.syndrome);
        if header.version != MIGETH_VERSION || !secret.verifies(&packet.bth, byte(syndrome), &header) {
            return Err(Unverified);
        }
        let message = match (packet.bth.opcode, syndrome) {
            (Opcode::RC_RESUME, None) => Message::Resume {
                acknowledged: header.begun.then_some(packet.bth.psn),
            },
            (Opcode::RC_ACKNOWLEDGE, Some(Syndrome::Stopped)) => Message::Stopped,
            (Opcode::RC_ACKNOWLEDGE, Some(Syndrome::Ack { .. })) => Message::Resumed {
                about: header.about.into(),
            },
            _ => return Err(Unverified),
        };
        Ok(Received {
            message,
            counter: header.counter.into(),
            source: header.source,
            is_direct: header.hops == MOST_HOPS,
            expected: header.expected,
        })
    }

    /// Sends a message. None is sent without a secret, or when no counter is left: who waits for it then waits to its limit.
    pub(super) fn send(
        &mut self,
        message: Message,
        own: &Own,
        outlet: &mut Outlet<'_>,
    ) -> Result<(), SendError> {
        let (Some(secret), Some(counter)) = (&self.secret, self.sent.next()) else {
            return Ok(());
        };
        let (bth, aeth) = head(&message, own, outlet.link);
        let mut header = MigrationEth {
            version: MIGETH_VERSION,
            hops: MOST_HOPS,
            begun: own.acknowledged.is_some(),
            expected: own.expected,
            source: Location {
                address: outlet.batch.flow().source().ip(),
                qpn: own.qpn,
            },
            counter: counter.into(),
            about: match message {
                Message::Resumed { about } => about.into(),
                _ => 0,
            },
            mac: [0; MAC_BYTES],
        };
        header.mac = secret.seal(&bth, byte(aeth.map(|aeth| aeth.syndrome)), &header);
        let head = Head {
            aeth,
            ..Head::new(bth)
        };
        outlet.send(&head, MIGETH_BYTES as u32, |payload| {
            header.emit(payload.try_into().expect("its size was asked for"));
            Ok(())
        })?;
        self.sent = counter;
        Ok(())
    }

    /// Is it the first message since the partner has gone on? Then it is the first that says where.
    pub(super) fn is_new_epoch(&self, counter: Counter) -> bool {
        counter.epoch > self.accepted.epoch
    }

    /// Does the acknowledgement mean a RESUME that was said since this end has gone on?
    pub(super) fn awaits(&self, about: Counter) -> bool {
        self.standing == Standing::Resuming && about.epoch == self.sent.epoch
    }
}

/// The syndrome as the MAC sees it.
fn byte(syndrome: Option<Syndrome>) -> u8 {
    syndrome.map_or(0, u8::from)
}

fn head(message: &Message, own: &Own, link: &Link) -> (crate::wire::bth::Bth, Option<Aeth>) {
    let acknowledge = |psn, syndrome| {
        let aeth = Aeth {
            syndrome,
            msn: own.msn,
        };
        (link.bth(Opcode::RC_ACKNOWLEDGE, psn), Some(aeth))
    };
    match message {
        Message::Stopped => acknowledge(own.expected, Syndrome::Stopped),
        Message::Resumed { .. } => acknowledge(own.expected.sub(1), ACK),
        Message::Resume { acknowledged } => {
            let psn = acknowledged.unwrap_or_default();
            (link.bth(Opcode::RC_RESUME, psn), None)
        }
    }
}
