//! Answers become packets.

use super::super::link::{Link, SendError};
use super::answers::{Answer, ReadAnswer};
use super::request::Refusal;
use super::{PendingNak, Responder};
use crate::wire::aeth::{Aeth, CREDITS_UNLIMITED, NakCode, Syndrome};
use crate::wire::opcode::Opcode;
use crate::wire::packet::Head;
use crate::{Counters, Host, Key, Psn, Transmit, TxBatch};

impl Responder {
    /// Sends answers, of READ data at most `budget` packets. Acknowledgements are few and small, and go at once.
    pub fn respond(
        &mut self,
        link: &Link,
        host: &mut impl Host,
        counters: &mut Counters,
        batch: &mut TxBatch,
        budget: &mut usize,
    ) -> Transmit {
        loop {
            let sent = match self.answers.front() {
                Some(Answer::Ack { psn }) => {
                    let ack = Syndrome::Ack {
                        credits: CREDITS_UNLIMITED,
                    };
                    let sent = self.send_acknowledge(*psn, ack, link, batch);
                    if sent.is_ok() {
                        counters.sent_acks += 1;
                        self.answers.pop();
                    }
                    sent
                }
                Some(Answer::Read(_)) if *budget == 0 => return Transmit::More,
                Some(Answer::Read(read)) => {
                    let read = *read;
                    let sent = send_read_data(&read, self.msn, link, host, batch);
                    if sent.is_ok() {
                        *budget -= 1;
                        self.note_sent(link);
                    }
                    sent
                }
                None => {
                    let Some(PendingNak { psn, syndrome }) = self.nak else {
                        return Transmit::Idle;
                    };
                    let sent = self.send_acknowledge(psn, syndrome, link, batch);
                    if sent.is_ok() {
                        self.nak = None;
                    }
                    sent
                }
            };
            match sent {
                Ok(bytes) => {
                    counters.sent_responses += 1;
                    counters.sent_response_bytes += bytes as u64;
                }
                Err(SendError::Full) => return Transmit::Full,
                Err(SendError::Access) => self.fail_read(host, counters),
            }
        }
    }

    fn send_acknowledge(
        &self,
        psn: Psn,
        syndrome: Syndrome,
        link: &Link,
        batch: &mut TxBatch,
    ) -> Result<usize, SendError> {
        let bth = link.bth(Opcode::RC_ACKNOWLEDGE, psn);
        let aeth = Some(Aeth {
            syndrome,
            msn: self.msn,
        });
        link.send(
            batch,
            &Head {
                bth,
                reth: None,
                aeth,
                imm: None,
            },
            0,
            |_| Ok(()),
        )
    }

    /// A packet of the oldest READ is sent.
    fn note_sent(&mut self, link: &Link) {
        let Some(Answer::Read(read)) = self.answers.front_mut() else {
            return;
        };
        if read.packets == 1 {
            return self.answers.pop();
        }
        read.psn = read.psn.next();
        read.packets -= 1;
        read.addr = read.addr.wrapping_add(u64::from(link.mtu.bytes()));
        read.len -= link.mtu.bytes();
        read.started = true;
    }

    /// The memory of the oldest READ has gone away since the READ came: the connection ends there.
    fn fail_read(&mut self, host: &mut impl Host, counters: &mut Counters) {
        if let Some(Answer::Read(read)) = self.answers.front() {
            let psn = read.psn;
            self.answers.clear();
            self.refuse(Refusal::Fatal(NakCode::RemoteAccessError), host, counters);
            if let Some(nak) = &mut self.nak {
                nak.psn = psn;
            }
        }
    }
}

fn send_read_data(
    read: &ReadAnswer,
    msn: u32,
    link: &Link,
    host: &mut impl Host,
    batch: &mut TxBatch,
) -> Result<usize, SendError> {
    let opcode = match (read.started, read.packets == 1) {
        (false, true) => Opcode::RC_READ_RESPONSE_ONLY,
        (false, false) => Opcode::RC_READ_RESPONSE_FIRST,
        (true, false) => Opcode::RC_READ_RESPONSE_MIDDLE,
        (true, true) => Opcode::RC_READ_RESPONSE_LAST,
    };
    let aeth = Aeth {
        syndrome: Syndrome::Ack {
            credits: CREDITS_UNLIMITED,
        },
        msn,
    };
    let head = Head {
        bth: link.bth(opcode, read.psn),
        reth: None,
        aeth: Some(aeth),
        imm: None,
    };
    link.send(batch, &head, read.len.min(link.mtu.bytes()), |payload| {
        host.read(Key::Remote(read.rkey), read.addr, payload)
    })
}
