//! A request packet: checked step by step, then executed.

use super::super::link::Link;
use super::answers::ReadAnswer;
use super::message::{Message, ScatterError, WriteMessage, complete_receive, payload_fits_position, scatter};
use super::{PendingNak, Responder};
use crate::wire::aeth::{NakCode, Syndrome};
use crate::wire::opcode::Kind;
use crate::{
    AccessError, AccessFlags, Counters, Event, Host, MAX_MESSAGE, Packet, ReceiveRequest, RemoteAccess,
    WcOpcode, WcStatus,
};

/// Why a request is not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// There is no RECV: the partner may come again.
    ReceiverNotReady,
    /// The connection ends with this code.
    Fatal(NakCode),
}

impl From<AccessError> for Refusal {
    fn from(AccessError: AccessError) -> Refusal {
        Refusal::Fatal(NakCode::RemoteAccessError)
    }
}

const INVALID: Refusal = Refusal::Fatal(NakCode::InvalidRequest);

fn valid(condition: bool) -> Result<(), Refusal> {
    if condition { Ok(()) } else { Err(INVALID) }
}

impl Responder {
    /// A request packet has arrived.
    pub fn handle_request(
        &mut self,
        packet: &Packet<'_>,
        link: &Link,
        host: &mut impl Host,
        counters: &mut Counters,
    ) {
        counters.rcvd_requests += 1;
        counters.rcvd_request_bytes += packet.payload.len() as u64;
        if self.ending {
            return;
        }
        match packet.bth.psn.distance_from(self.expected) {
            0 => {
                self.nak_given = false;
                self.nak = None;
                match self.execute(packet, link, host, counters) {
                    Ok(()) => {}
                    Err(refusal) => self.refuse(refusal, host, counters),
                }
            }
            ..0 => self.handle_duplicate(packet, link, host, counters),
            1.. => {
                counters.out_of_sequence += 1;
                self.give_nak(Syndrome::Nak(NakCode::PsnSequenceError));
            }
        }
    }

    /// The checks of IBA §9.7.4.1 in their order, then the operation.
    fn execute(
        &mut self,
        packet: &Packet<'_>,
        link: &Link,
        host: &mut impl Host,
        counters: &mut Counters,
    ) -> Result<(), Refusal> {
        self.check_sequence(packet)?;
        self.check_supported(packet)?;
        valid(packet.info.kind == Kind::ReadRequest || payload_fits_position(packet, link.mtu))?;
        match packet.info.kind {
            Kind::Send => self.receive_send(packet, host, counters)?,
            Kind::Write => self.receive_write(packet, host)?,
            Kind::ReadRequest => return self.receive_read(packet, link, host),
            _ => return Err(INVALID),
        }
        if packet.info.ends {
            self.complete_message();
        }
        let psn = self.expected;
        self.expected = psn.next();
        if packet.bth.ack_request {
            self.answers.acknowledge(psn);
        } else {
            self.answers.extend_acknowledgement(psn);
        }
        Ok(())
    }

    /// First comes after the end of a message, Middle and Last of the same kind within one (IBA §9.7.4.1.2).
    fn check_sequence(&self, packet: &Packet<'_>) -> Result<(), Refusal> {
        valid(match (&self.message, packet.info.kind) {
            (None, _) => packet.info.starts,
            (Some(Message::Send { .. }), Kind::Send) | (Some(Message::Write(_)), Kind::Write) => {
                !packet.info.starts
            }
            (Some(_), _) => false,
        })
    }

    /// Is the operation one that this queue pair lets in (IBA §9.7.4.1.5)?
    fn check_supported(&self, packet: &Packet<'_>) -> Result<(), Refusal> {
        valid(match packet.info.kind {
            Kind::Send => packet.invalidate.is_none(),
            Kind::Write => self.access.contains(AccessFlags::REMOTE_WRITE),
            Kind::ReadRequest => self.access.contains(AccessFlags::REMOTE_READ),
            _ => false,
        })
    }

    fn receive_send(
        &mut self,
        packet: &Packet<'_>,
        host: &mut impl Host,
        counters: &mut Counters,
    ) -> Result<(), Refusal> {
        let (receive, received) = match self.message {
            Some(Message::Send { receive, received }) => (receive, received),
            _ => (next_receive(host)?, 0),
        };
        let status = match scatter(&receive, received, packet.payload, host) {
            Ok(()) => WcStatus::Success,
            Err(ScatterError::Length) => WcStatus::LocLenErr,
            Err(ScatterError::Access) => WcStatus::LocProtErr,
        };
        let received = received + packet.payload.len() as u32;
        if packet.info.ends || status != WcStatus::Success {
            self.message = None;
            complete_receive(&receive, status, WcOpcode::Recv, received, packet, host);
        } else {
            self.message = Some(Message::Send { receive, received });
        }
        match status {
            WcStatus::Success => return Ok(()),
            WcStatus::LocLenErr => counters.resp_local_length_error += 1,
            _ => {}
        }
        counters.resp_cqe_error += 1;
        let length = status == WcStatus::LocLenErr;
        Err(Refusal::Fatal(if length {
            NakCode::InvalidRequest
        } else {
            NakCode::RemoteOperationalError
        }))
    }

    fn receive_write(&mut self, packet: &Packet<'_>, host: &mut impl Host) -> Result<(), Refusal> {
        let mut write = match (&self.message, packet.reth) {
            (Some(Message::Write(write)), _) => *write,
            (_, Some(reth)) => WriteMessage {
                addr: reth.virtual_addr,
                rkey: reth.rkey,
                len: reth.dma_len,
                received: 0,
            },
            (_, None) => return Err(INVALID),
        };
        valid(write.len <= MAX_MESSAGE && write.accepts(packet))?;
        // The RECV first (IBA §9.7.4.1.4): a request that comes again later must not have been executed.
        let receive = if packet.info.consumes_receive {
            Some(next_receive(host)?)
        } else {
            None
        };
        let mut stored = Ok(());
        if packet.info.starts && write.len > 0 {
            stored = host.check_remote(write.rkey, write.addr, write.len, RemoteAccess::Write);
        }
        let stored = stored.and_then(|()| write.store(packet.payload, host));
        if let Err(error) = stored {
            // The RECV was taken for a message that will never come.
            if let Some(receive) = receive {
                let opcode = WcOpcode::RecvRdmaWithImm;
                complete_receive(&receive, WcStatus::WrFlushErr, opcode, 0, packet, host);
            }
            return Err(error.into());
        }
        if let Some(receive) = receive {
            let opcode = WcOpcode::RecvRdmaWithImm;
            complete_receive(&receive, WcStatus::Success, opcode, write.len, packet, host);
        }
        self.message = (!packet.info.ends).then_some(Message::Write(write));
        Ok(())
    }

    fn receive_read(
        &mut self,
        packet: &Packet<'_>,
        link: &Link,
        host: &mut impl Host,
    ) -> Result<(), Refusal> {
        let reth = packet.reth.ok_or(INVALID)?;
        valid(reth.dma_len <= MAX_MESSAGE)?;
        valid(self.answers.new_reads() < usize::from(self.max_dest_rd_atomic))?;
        if reth.dma_len > 0 {
            host.check_remote(reth.rkey, reth.virtual_addr, reth.dma_len, RemoteAccess::Read)?;
        }
        let packets = link.mtu.packets(reth.dma_len);
        self.answers.read(ReadAnswer {
            psn: self.expected,
            packets,
            addr: reth.virtual_addr,
            rkey: reth.rkey,
            len: reth.dma_len,
            started: false,
            again: false,
        });
        self.complete_message();
        self.last_read = Some(self.expected);
        self.expected = self.expected.add(packets);
        Ok(())
    }

    fn complete_message(&mut self) {
        self.msn = (self.msn + 1) & 0x00ff_ffff;
    }

    pub(super) fn refuse(&mut self, refusal: Refusal, host: &mut impl Host, counters: &mut Counters) {
        let code = match refusal {
            Refusal::ReceiverNotReady => {
                counters.sent_rnr_nak += 1;
                return self.give_nak(Syndrome::RnrNak {
                    timer: self.min_rnr_timer,
                });
            }
            Refusal::Fatal(code) => code,
        };
        self.ending = true;
        self.nak = Some(PendingNak {
            psn: self.expected,
            syndrome: Syndrome::Nak(code),
        });
        host.event(match code {
            NakCode::RemoteAccessError => {
                counters.resp_remote_access_errors += 1;
                Event::AccessError
            }
            NakCode::RemoteOperationalError => Event::Fatal,
            _ => {
                counters.resp_remote_invalid_request += 1;
                Event::InvalidRequest
            }
        });
    }

    /// Asks for the expected packet (again), once.
    fn give_nak(&mut self, syndrome: Syndrome) {
        if !self.nak_given {
            self.nak_given = true;
            self.nak = Some(PendingNak {
                psn: self.expected,
                syndrome,
            });
        }
    }
}

fn next_receive(host: &mut impl Host) -> Result<ReceiveRequest, Refusal> {
    host.next_receive().ok_or(Refusal::ReceiverNotReady)
}
