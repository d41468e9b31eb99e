//! Answers become packets.

use super::answers::{Answer, AtomicAnswer, ReadAnswer};
use super::request::Refusal;
use super::{PendingNak, Responder};
use crate::link::{Link, Outlet, SendError};
use crate::wire::aeth::{Aeth, CREDITS_UNLIMITED, NakCode, Syndrome};
use crate::wire::opcode::Opcode;
use crate::wire::packet::Head;
use crate::{Counters, Host, Key, Psn, Transmit};

impl Responder {
    /// Sends answers, of READ data at most `budget` packets. Acknowledgements are few and small, and go at once.
    pub fn respond(&mut self, host: &mut impl Host, outlet: &mut Outlet<'_>) -> Transmit {
        loop {
            let sent = match self.answers.front() {
                Some(Answer::Ack { psn }) => {
                    let ack = Syndrome::Ack {
                        credits: CREDITS_UNLIMITED,
                    };
                    let sent = self.send_acknowledge(*psn, ack, outlet);
                    if sent.is_ok() {
                        outlet.counters.sent_acks += 1;
                        self.answers.pop();
                    }
                    sent
                }
                Some(Answer::Atomic(atomic)) => {
                    let sent = self.send_atomic(atomic, outlet);
                    if sent.is_ok() {
                        self.answers.pop();
                    }
                    sent
                }
                Some(Answer::Read(_)) if outlet.budget == 0 => return Transmit::More,
                Some(Answer::Read(read)) => {
                    let read = *read;
                    let sent = send_read_data(&read, self.msn, host, outlet);
                    if sent.is_ok() {
                        outlet.budget -= 1;
                        self.note_sent(outlet.link);
                    }
                    sent
                }
                None => {
                    self.answers.shrink();
                    let Some(PendingNak { psn, syndrome }) = self.nak else {
                        return Transmit::Idle;
                    };
                    let sent = self.send_acknowledge(psn, syndrome, outlet);
                    if sent.is_ok() {
                        self.nak = None;
                    }
                    sent
                }
            };
            match sent {
                Ok(bytes) => {
                    outlet.counters.sent_responses += 1;
                    outlet.counters.sent_response_bytes += bytes as u64;
                }
                Err(SendError::Full) => return Transmit::Full,
                Err(SendError::Access) => self.fail_read(host, outlet.counters),
            }
        }
    }

    fn send_acknowledge(
        &self,
        psn: Psn,
        syndrome: Syndrome,
        outlet: &mut Outlet<'_>,
    ) -> Result<usize, SendError> {
        let bth = outlet.link.bth(Opcode::RC_ACKNOWLEDGE, psn);
        let aeth = Some(Aeth {
            syndrome,
            msn: self.msn,
        });
        let head = Head {
            aeth,
            ..Head::new(bth)
        };
        outlet.send(&head, 0, |_| Ok(()))
    }

    fn send_atomic(&self, atomic: &AtomicAnswer, outlet: &mut Outlet<'_>) -> Result<usize, SendError> {
        let opcode = match atomic.value {
            Some(_) => Opcode::RC_ATOMIC_ACKNOWLEDGE,
            None => Opcode::RC_READ_RESPONSE_ONLY,
        };
        let bth = outlet.link.bth(opcode, atomic.psn);
        let aeth = Some(Aeth {
            syndrome: Syndrome::Ack {
                credits: CREDITS_UNLIMITED,
            },
            msn: self.msn,
        });
        let head = Head {
            aeth,
            atomic_ack: atomic.value,
            ..Head::new(bth)
        };
        outlet.send(&head, 0, |_| Ok(()))
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
    host: &mut impl Host,
    outlet: &mut Outlet<'_>,
) -> Result<usize, SendError> {
    let link = outlet.link;
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
        aeth: Some(aeth),
        ..Head::new(link.bth(opcode, read.psn))
    };
    outlet.send(&head, read.len.min(link.mtu.bytes()), |payload| {
        host.read(Key::Remote(read.rkey), read.addr, payload)
    })
}
