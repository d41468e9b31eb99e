//! What arrives (IBA §9.8.2.2): whole messages only, and no answers.
//!
//! The classes of errors are those of IBA §9.9.3: where a message cannot be taken, it is dropped silently and its RECV
//! serves the next one (class D1); a RECV that came from a shared queue cannot go back there, so it completes in error
//! (class E); and a RECV whose own memory is wrong completes in error and takes the queue pair to ERR (class A).

use crate::receive::{
    Message, ScatterError, WriteMessage, complete_receive, flush_receive, payload_fits_position, scatter,
};
use crate::wire::opcode::Kind;
use crate::{
    AccessFlags, Completion, Counters, Event, Host, Mtu, Packet, Psn, Queue, ReceiveRequest, WcOpcode,
    WcStatus,
};

/// The queue pair must go to ERR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken;

/// The receiver's half of an unreliable connection.
#[derive(Debug, Default)]
pub(super) struct Receiver {
    expected: Psn,
    message: Option<Message>,
    /// A RECV whose message was dropped: the next one gets it.
    spare: Option<Box<ReceiveRequest>>,
}

impl Receiver {
    pub fn start(&mut self, expected: Psn) {
        self.expected = expected;
    }

    /// Flushes the RECVs that were taken and not completed.
    pub fn flush(&mut self, host: &mut impl Host, counters: &mut Counters) {
        if let Some(Message::Send { receive, .. }) = self.message.take() {
            flush_receive(&receive, host, counters);
        }
        if let Some(receive) = self.spare.take() {
            flush_receive(&receive, host, counters);
        }
        *self = Receiver::default();
    }

    /// A packet has arrived.
    pub fn handle_request(
        &mut self,
        packet: &Packet<'_>,
        mtu: Mtu,
        access: AccessFlags,
        shared: bool,
        host: &mut impl Host,
        counters: &mut Counters,
    ) -> Result<(), Broken> {
        counters.rcvd_requests += 1;
        counters.rcvd_request_bytes += packet.payload.len() as u64;
        let gap = packet.bth.psn != self.expected;
        counters.out_of_sequence += u64::from(gap);
        self.expected = packet.bth.psn.next();
        let follows = match (&self.message, packet.info.kind) {
            (Some(Message::Send { .. }), Kind::Send) | (Some(Message::Write(_)), Kind::Write) => {
                !packet.info.starts && !gap
            }
            _ => false,
        };
        if !follows {
            self.abandon(shared, WcStatus::RemInvReqErr, host, counters);
            if !packet.info.starts {
                return Ok(());
            }
        }
        if !payload_fits_position(packet, mtu) {
            counters.resp_bad_length += 1;
            self.abandon(shared, WcStatus::LocLenErr, host, counters);
            return Ok(());
        }
        match packet.info.kind {
            Kind::Send => self.receive_send(packet, shared, host, counters),
            Kind::Write => {
                self.receive_write(packet, access, host, counters);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Drops the message of which some packets have come.
    fn abandon(&mut self, shared: bool, status: WcStatus, host: &mut impl Host, counters: &mut Counters) {
        let Some(message) = self.message.take() else {
            return;
        };
        counters.incomplete_messages += 1;
        if let Message::Send { receive, .. } = message {
            self.give_back(receive, shared, status, host, counters);
        }
    }

    /// Keeps a RECV for the next message, or completes it in error if it came from a shared queue.
    fn give_back(
        &mut self,
        receive: ReceiveRequest,
        shared: bool,
        status: WcStatus,
        host: &mut impl Host,
        counters: &mut Counters,
    ) {
        if shared {
            counters.resp_cqe_error += 1;
            let opcode = WcOpcode::Recv;
            host.complete(Completion::new(Queue::Receive, receive.wr_id, status, opcode, 0));
        } else {
            self.spare = Some(Box::new(receive));
        }
    }

    fn take_receive(&mut self, host: &mut impl Host, counters: &mut Counters) -> Option<ReceiveRequest> {
        let receive = self
            .spare
            .take()
            .map(|spare| *spare)
            .or_else(|| host.next_receive());
        counters.out_of_buffer += u64::from(receive.is_none());
        receive
    }

    fn receive_send(
        &mut self,
        packet: &Packet<'_>,
        shared: bool,
        host: &mut impl Host,
        counters: &mut Counters,
    ) -> Result<(), Broken> {
        let (receive, received) = match self.message.take() {
            Some(Message::Send { receive, received }) => (receive, received),
            _ => match self.take_receive(host, counters) {
                Some(receive) => (receive, 0),
                None => return Ok(()),
            },
        };
        match scatter(&receive, received, packet.payload, host) {
            Ok(()) => {}
            Err(ScatterError::Length) => {
                counters.resp_local_length_error += 1;
                self.give_back(receive, shared, WcStatus::LocLenErr, host, counters);
                return Ok(());
            }
            Err(ScatterError::Access) => {
                counters.resp_cqe_error += 1;
                complete_receive(&receive, WcStatus::LocProtErr, WcOpcode::Recv, 0, packet, host);
                host.event(Event::Fatal);
                return Err(Broken);
            }
        }
        let received = received + packet.payload.len() as u32;
        if packet.info.ends {
            let (status, opcode) = (WcStatus::Success, WcOpcode::Recv);
            complete_receive(&receive, status, opcode, received, packet, host);
        } else {
            self.message = Some(Message::Send { receive, received });
        }
        Ok(())
    }

    fn receive_write(
        &mut self,
        packet: &Packet<'_>,
        access: AccessFlags,
        host: &mut impl Host,
        counters: &mut Counters,
    ) {
        let mut write = match (self.message.take(), &packet.reth) {
            (Some(Message::Write(write)), _) => write,
            (_, Some(reth)) => WriteMessage::new(reth),
            (_, None) => return,
        };
        if !write.accepts(packet) {
            counters.resp_bad_length += 1;
            counters.incomplete_messages += 1;
            return;
        }
        let allowed = access.contains(AccessFlags::REMOTE_WRITE)
            && (!packet.info.starts || write.check(host).is_ok())
            && write.store(packet.payload, host).is_ok();
        if !allowed {
            counters.resp_remote_access_errors += 1;
            counters.incomplete_messages += 1;
            return;
        }
        if !packet.info.ends {
            self.message = Some(Message::Write(write));
        } else if packet.info.consumes_receive
            && let Some(receive) = self.take_receive(host, counters)
        {
            let (status, opcode) = (WcStatus::Success, WcOpcode::RecvRdmaWithImm);
            complete_receive(&receive, status, opcode, write.len, packet, host);
        }
    }
}
