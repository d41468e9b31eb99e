//! A request packet: checked step by step, then executed.

use super::answers::{AtomicAnswer, ReadAnswer};
use super::early::Early;
use super::{PendingNak, Responder};
use crate::link::Link;
use crate::receive::{Message, ScatterError, WriteMessage, complete_receive, payload_fits_position, scatter};
use crate::wire::aeth::{NakCode, Syndrome};
use crate::wire::opcode::{Kind, Opcode};
use crate::{
    AccessError, AccessFlags, AtomicOp, Counters, Event, Host, MAX_MESSAGE, Packet, ReceiveRequest,
    RemoteAccess, WcOpcode, WcStatus,
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
                self.early = Early::default();
                self.nak = None;
                if let Err(refusal) = self.execute(packet, link, host, counters) {
                    self.refuse(refusal, host, counters);
                }
            }
            ..0 => self.handle_duplicate(packet, link, host, counters),
            1.. => {
                counters.out_of_sequence += 1;
                // A READ takes as many PSNs as its answer has packets.
                let packets = match packet.reth {
                    Some(reth) if packet.info.kind == Kind::ReadRequest => link.mtu.packets(reth.dma_len),
                    _ => 1,
                };
                if self.early.note(self.expected, packet.bth.psn, packets) {
                    self.give_nak(Syndrome::Nak(NakCode::PsnSequenceError));
                }
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
        if packet.info.kind == Kind::Reserved {
            counters.bad_opcode += 1;
        }
        self.check_supported(packet)?;
        let has_data = matches!(packet.info.kind, Kind::Send | Kind::Write);
        if has_data && !payload_fits_position(packet, link.mtu) {
            counters.resp_bad_length += 1;
            return Err(INVALID);
        }
        match packet.info.kind {
            Kind::Send => self.receive_send(packet, host, counters)?,
            Kind::Write => self.receive_write(packet, host)?,
            Kind::ReadRequest => return self.receive_read(packet, link, host),
            Kind::Atomic | Kind::AtomicWrite => return self.receive_atomic(packet, host, counters),
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
            Kind::Send => true,
            Kind::Write | Kind::AtomicWrite => self.access.contains(AccessFlags::REMOTE_WRITE),
            Kind::ReadRequest => self.access.contains(AccessFlags::REMOTE_READ),
            Kind::Atomic => self.access.contains(AccessFlags::REMOTE_ATOMIC),
            _ => false,
        })
    }

    fn receive_send(
        &mut self,
        packet: &Packet<'_>,
        host: &mut impl Host,
        counters: &mut Counters,
    ) -> Result<(), Refusal> {
        let (receive, received) = match self.message.take() {
            Some(Message::Send { receive, received }) => (receive, received),
            _ => (next_receive(host)?, 0),
        };
        let status = match scatter(&receive, received, packet.payload, host) {
            // The key ends with the message, before the program learns of it. A key that cannot be invalidated ends the
            // connection (IBA §9.9.3, class J).
            Ok(()) => match packet.invalidate.map(|rkey| host.invalidate_remote(rkey)) {
                None | Some(Ok(())) => WcStatus::Success,
                Some(Err(AccessError)) => WcStatus::RemInvReqErr,
            },
            Err(ScatterError::Length) => WcStatus::LocLenErr,
            Err(ScatterError::Access) => WcStatus::LocProtErr,
        };
        let received = received + packet.payload.len() as u32;
        if packet.info.ends || status != WcStatus::Success {
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
        Err(Refusal::Fatal(match status {
            WcStatus::LocLenErr => NakCode::InvalidRequest,
            WcStatus::RemInvReqErr => NakCode::RemoteAccessError,
            _ => NakCode::RemoteOperationalError,
        }))
    }

    fn receive_write(&mut self, packet: &Packet<'_>, host: &mut impl Host) -> Result<(), Refusal> {
        let mut write = match (&self.message, packet.reth) {
            (Some(Message::Write(write)), _) => *write,
            (_, Some(reth)) => WriteMessage::new(&reth),
            (_, None) => return Err(INVALID),
        };
        valid(write.accepts(packet))?;
        // The RECV first (IBA §9.7.4.1.4): a request that comes again later must not have been executed.
        let receive = if packet.info.consumes_receive {
            Some(next_receive(host)?)
        } else {
            None
        };
        let mut stored = Ok(());
        if packet.info.starts {
            stored = write.check(host);
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
        valid(self.answers.new_reads_and_atomics() < usize::from(self.max_dest_rd_atomic))?;
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
        self.last_data = Some(self.expected);
        self.expected = self.expected.add(packets);
        Ok(())
    }

    /// Executed at once, and the result is kept: a duplicate is answered from there.
    fn receive_atomic(
        &mut self,
        packet: &Packet<'_>,
        host: &mut impl Host,
        counters: &mut Counters,
    ) -> Result<(), Refusal> {
        let most = usize::from(self.max_dest_rd_atomic);
        valid(self.answers.new_reads_and_atomics() < most)?;
        let value = match (packet.atomic_eth, packet.reth) {
            (Some(eth), _) => {
                valid(eth.virtual_addr.is_multiple_of(8))?;
                let op = if packet.bth.opcode == Opcode::RC_COMPARE_SWAP {
                    AtomicOp::CompareSwap {
                        compare: eth.compare,
                        swap: eth.swap_or_add,
                    }
                } else {
                    AtomicOp::FetchAdd { add: eth.swap_or_add }
                };
                Some(host.atomic(eth.rkey, eth.virtual_addr, op)?)
            }
            (None, Some(reth)) => {
                let data: [u8; 8] = packet.payload.try_into().map_err(|_| INVALID)?;
                valid(reth.dma_len == 8 && reth.virtual_addr.is_multiple_of(8))?;
                host.atomic_write(reth.rkey, reth.virtual_addr, data)?;
                None
            }
            (None, None) => return Err(INVALID),
        };
        counters.rcvd_atomics += 1;
        let answer = AtomicAnswer {
            psn: self.expected,
            value,
            again: false,
        };
        self.keep_atomic(answer);
        self.answers.atomic(answer);
        self.complete_message();
        self.last_data = Some(self.expected);
        self.expected = self.expected.next();
        Ok(())
    }

    /// Keeps the result for a partner that asks again, in the place of the oldest.
    pub(super) fn keep_atomic(&mut self, answer: AtomicAnswer) {
        let most = usize::from(self.max_dest_rd_atomic);
        while self.atomics.len() >= most && self.atomics.pop_front().is_some() {}
        self.atomics.push_back(answer);
    }

    fn complete_message(&mut self) {
        self.msn = (self.msn + 1) & 0x00ff_ffff;
    }

    pub(super) fn refuse(&mut self, refusal: Refusal, host: &mut impl Host, counters: &mut Counters) {
        let code = match refusal {
            Refusal::ReceiverNotReady => {
                counters.sent_rnr_nak += 1;
                if self.early.note_not_ready() {
                    self.give_nak(Syndrome::RnrNak {
                        timer: self.min_rnr_timer,
                    });
                }
                return;
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

    /// Asks for the expected packet (again).
    fn give_nak(&mut self, syndrome: Syndrome) {
        self.nak = Some(PendingNak {
            psn: self.expected,
            syndrome,
        });
    }
}

fn next_receive(host: &mut impl Host) -> Result<ReceiveRequest, Refusal> {
    host.next_receive().ok_or(Refusal::ReceiverNotReady)
}
