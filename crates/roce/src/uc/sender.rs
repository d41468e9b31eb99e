//! Requests become packets, one after the other; there is nothing to wait for.

use crate::gather::{check_data, execute_local, gather, opcode, retire, write_header};
use crate::link::{Outlet, SendError};
use crate::wire::opcode::Service;
use crate::wire::packet::Head;
use crate::{BadRequest, Completion, Counters, Host, Operation, Psn, Queue, SendRequest, Transmit, WcStatus};

/// The request that is being sent.
#[derive(Debug)]
struct Outgoing {
    request: SendRequest,
    /// Length of the message in bytes.
    len: u32,
    /// Bytes sent.
    sent: u32,
    /// Nothing was sent yet.
    fresh: bool,
}

/// The sender's half of an unreliable connection.
#[derive(Debug, Default)]
pub(super) struct Sender {
    /// On the heap only while a message is under way, so that an idle queue pair is small.
    outgoing: Option<Box<Outgoing>>,
    next: Psn,
    failed: bool,
}

impl Sender {
    pub fn start(&mut self, first: Psn) {
        self.next = first;
    }

    pub fn is_drained(&self) -> bool {
        self.outgoing.is_none()
    }

    /// Has a request failed since the last call?
    pub fn take_failure(&mut self) -> bool {
        std::mem::take(&mut self.failed)
    }

    /// Completes what was begun, without going on with it.
    pub fn flush(&mut self, host: &mut impl Host, counters: &mut Counters) {
        if let Some(outgoing) = self.outgoing.take() {
            counters.req_cqe_flush_error += 1;
            let opcode = outgoing.request.operation.wc_opcode();
            retire(
                &outgoing.request,
                opcode,
                WcStatus::WrFlushErr,
                outgoing.len,
                host,
            );
        }
        *self = Sender::default();
    }

    /// Sends what the budget lets it; new requests are taken off the ring only if `may_start`.
    pub fn transmit(&mut self, may_start: bool, host: &mut impl Host, outlet: &mut Outlet<'_>) -> Transmit {
        loop {
            if self.outgoing.is_none() {
                if !may_start || self.failed {
                    return Transmit::Idle;
                }
                if outlet.budget == 0 {
                    return Transmit::More;
                }
                let Some(item) = host.next_send() else {
                    return Transmit::Idle;
                };
                self.begin(item, host, outlet.counters);
                continue;
            }
            if outlet.budget == 0 {
                return Transmit::More;
            }
            match self.send_packet(host, outlet) {
                Ok(()) => outlet.budget -= 1,
                Err(SendError::Full) => return Transmit::Full,
                Err(SendError::Access) => self.finish(WcStatus::LocProtErr, host, outlet.counters),
            }
        }
    }

    /// Looks at a request, and executes one that needs no packets.
    fn begin(
        &mut self,
        item: Result<SendRequest, BadRequest>,
        host: &mut impl Host,
        counters: &mut Counters,
    ) {
        let request = match item {
            Ok(request) => request,
            Err(bad) => {
                self.failed = true;
                counters.req_cqe_error += 1;
                host.retire_sends(1);
                let status = WcStatus::LocQpOpErr;
                return host.complete(Completion::new(Queue::Send, bad.wr_id, status, bad.opcode, 0));
            }
        };
        let checked = match request.operation {
            Operation::Send { .. } | Operation::Write { .. } => check_data(&request, host),
            Operation::LocalInvalidate { .. } | Operation::Bind(_) => execute_local(&request, host),
            // Not operations of UC (IBA §9.8.1).
            Operation::SendInvalidate { .. }
            | Operation::Read { .. }
            | Operation::Atomic { .. }
            | Operation::AtomicWrite { .. }
            | Operation::Executed { .. } => Err(WcStatus::LocQpOpErr),
        };
        let is_local = request.operation.is_local();
        let len = match checked {
            Ok(()) if !is_local => request.data.len_bytes() as u32,
            _ => 0,
        };
        self.outgoing = Some(Box::new(Outgoing {
            request,
            len,
            sent: 0,
            fresh: true,
        }));
        match checked {
            Ok(()) if is_local => self.finish(WcStatus::Success, host, counters),
            Ok(()) => {}
            Err(status) => self.finish(status, host, counters),
        }
    }

    fn send_packet(&mut self, host: &mut impl Host, outlet: &mut Outlet<'_>) -> Result<(), SendError> {
        let outgoing = self.outgoing.as_mut().expect("the caller has seen a request");
        let link = outlet.link;
        let payload_bytes = (outgoing.len - outgoing.sent).min(link.mtu.bytes());
        let (starts, ends) = (outgoing.fresh, outgoing.sent + payload_bytes == outgoing.len);
        let request = &outgoing.request;
        let opcode = opcode(Service::Uc, &request.operation, starts, ends);
        let mut bth = link.bth(opcode, self.next);
        bth.solicited = ends && request.solicited;
        let head = Head {
            reth: write_header(&request.operation, starts, outgoing.len),
            imm: request.operation.imm(),
            ..Head::new(bth)
        };
        let offset = outgoing.sent;
        outlet.send(&head, payload_bytes, |payload| {
            gather(&request.data, offset, payload, host)
        })?;
        outlet.counters.sent_requests += 1;
        outlet.counters.sent_request_bytes += u64::from(payload_bytes);
        self.next = self.next.next();
        outgoing.sent += payload_bytes;
        outgoing.fresh = false;
        if ends {
            self.finish(WcStatus::Success, host, outlet.counters);
        }
        Ok(())
    }

    fn finish(&mut self, status: WcStatus, host: &mut impl Host, counters: &mut Counters) {
        let Some(outgoing) = self.outgoing.take() else {
            return;
        };
        if status != WcStatus::Success {
            self.failed = true;
            counters.req_cqe_error += 1;
        }
        let opcode = outgoing.request.operation.wc_opcode();
        retire(&outgoing.request, opcode, status, outgoing.len, host);
    }
}
