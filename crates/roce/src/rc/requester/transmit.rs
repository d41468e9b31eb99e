//! Sending: the packet at `next`, as often as window, budget and batch let it.

use super::super::link::{Link, Outlet, SendError};
use super::Requester;
use super::wqe::Wqe;
use crate::wire::opcode::Opcode;
use crate::wire::packet::Head;
use crate::wire::reth::Reth;
use crate::{AccessError, Counters, Host, Key, Operation, Psn, SendData, Time, Transmit, WcStatus};

impl Requester {
    /// Sends what may be sent. New requests are taken off the ring only if `may_start`.
    pub fn transmit(
        &mut self,
        now: Time,
        may_start: bool,
        host: &mut impl Host,
        outlet: &mut Outlet<'_>,
    ) -> Transmit {
        loop {
            let under_way = self.next.offset_from(self.ack);
            if self.rnr_deadline.is_some() || under_way >= self.window.packets() {
                return Transmit::Idle;
            }
            if self.cursor == self.queue.len() && !(may_start && self.take_next(outlet.link, host)) {
                return Transmit::Idle;
            }
            let wqe = &self.queue[self.cursor];
            // A failed request stops the queue until it is the oldest. A fence (IBA §10.8.3.3) waits for READs.
            let fenced = wqe.request.fence && self.next == wqe.first && !self.reads.is_empty();
            if wqe.failure.is_some() || fenced {
                return Transmit::Idle;
            }
            let room = self.window.packets() - under_way;
            let packets = if wqe.is_read() {
                let piece = wqe.rest_of_piece(self.next);
                let too_much = piece > room && under_way > 0;
                if too_much || self.reads.len() >= usize::from(self.settings.max_rd_atomic) {
                    return Transmit::Idle;
                }
                piece
            } else {
                1
            };
            if outlet.budget == 0 {
                return Transmit::More;
            }
            let sent = if wqe.is_read() {
                send_read(wqe, self.next, packets, outlet)
            } else {
                let interval = self.config.ack_request_interval.max(1);
                let ack_request = room == 1 || self.next.get().is_multiple_of(interval);
                send_data(wqe, self.next, ack_request, host, outlet)
            };
            match sent {
                Ok(bytes) => {
                    outlet.budget -= 1;
                    outlet.counters.sent_requests += 1;
                    outlet.counters.sent_request_bytes += bytes as u64;
                    self.note_sent(packets, outlet.counters);
                    if self.ack_deadline.is_none() {
                        self.rearm(now);
                    }
                }
                Err(SendError::Full) => return Transmit::Full,
                Err(SendError::Access) => self.queue[self.cursor].failure = Some(WcStatus::LocProtErr),
            }
        }
    }

    /// Takes a request off the ring; says whether there was one.
    fn take_next(&mut self, link: &Link, host: &mut impl Host) -> bool {
        if self.queue.len() >= self.config.max_outstanding_sends.max(1) {
            return false;
        }
        let Some(item) = host.next_send() else {
            return false;
        };
        let wqe = Wqe::new(
            item,
            self.end,
            link.mtu,
            self.settings.max_rd_atomic,
            self.read_piece(),
            host,
        );
        self.end = wqe.end();
        self.queue.push_back(wqe);
        true
    }

    /// How many response packets each request of a READ asks for: so many that as many requests as may be outstanding
    /// (or four) fill the window.
    fn read_piece(&self) -> u32 {
        let pieces = u32::from(self.settings.max_rd_atomic).clamp(1, 4);
        (self.window.limit_packets() / pieces).max(1)
    }

    fn note_sent(&mut self, packets: u32, counters: &mut Counters) {
        let wqe = &self.queue[self.cursor];
        let again = self.next != self.high;
        let next = self.next.add(packets);
        if wqe.is_read() {
            self.reads.push_back(next.sub(1));
        }
        if next == wqe.end() {
            self.cursor += 1;
        }
        self.next = next;
        if next.offset_from(self.ack) > self.high.offset_from(self.ack) {
            self.high = next;
        }
        counters.retransmitted_requests += u64::from(again);
    }
}

fn send_read(wqe: &Wqe, psn: Psn, packets: u32, outlet: &mut Outlet<'_>) -> Result<usize, SendError> {
    let link = outlet.link;
    let Operation::Read { remote_addr, rkey } = wqe.request.operation else {
        unreachable!("the caller has asked whether it is a READ")
    };
    let (offset, _) = wqe.span(psn, link.mtu);
    let dma_len = (wqe.len - offset).min(packets.saturating_mul(link.mtu.bytes()));
    let mut bth = link.bth(Opcode::RC_READ_REQUEST, psn);
    bth.ack_request = true;
    let reth = Reth {
        virtual_addr: remote_addr.wrapping_add(u64::from(offset)),
        rkey,
        dma_len,
    };
    outlet.send(
        &Head {
            bth,
            reth: Some(reth),
            aeth: None,
            imm: None,
        },
        0,
        |_| Ok(()),
    )
}

fn send_data(
    wqe: &Wqe,
    psn: Psn,
    ack_request: bool,
    host: &mut impl Host,
    outlet: &mut Outlet<'_>,
) -> Result<usize, SendError> {
    let link = outlet.link;
    let request = &wqe.request;
    let starts = psn == wqe.first;
    let ends = psn.next() == wqe.end();
    let imm = request.operation.imm();
    let opcode = opcode(&request.operation, starts, ends);
    let mut bth = link.bth(opcode, psn);
    bth.ack_request = ends || ack_request;
    bth.solicited = ends && request.solicited;
    let reth = match request.operation {
        Operation::Write {
            remote_addr, rkey, ..
        } if starts => Some(Reth {
            virtual_addr: remote_addr,
            rkey,
            dma_len: wqe.len,
        }),
        _ => None,
    };
    let (offset, payload_bytes) = wqe.span(psn, link.mtu);
    let head = Head {
        bth,
        reth,
        aeth: None,
        imm: imm.filter(|_| ends),
    };
    outlet.send(&head, payload_bytes, |payload| {
        gather(&request.data, offset, payload, host)
    })
}

fn gather(data: &SendData, offset: u32, out: &mut [u8], host: &mut impl Host) -> Result<(), AccessError> {
    match data {
        SendData::Inline { bytes, .. } => {
            let start = offset as usize;
            out.copy_from_slice(&bytes[start..start + out.len()]);
            Ok(())
        }
        SendData::Sges(list) => list.for_range(offset, out.len() as u32, |part, at| {
            host.read(
                Key::Local(part.lkey),
                part.addr,
                &mut out[at..at + part.len as usize],
            )
        }),
    }
}

fn opcode(operation: &Operation, starts: bool, ends: bool) -> Opcode {
    let with_imm = operation.imm().is_some();
    match (operation, starts, ends) {
        (Operation::Read { .. }, ..) => Opcode::RC_READ_REQUEST,
        (Operation::Send { .. }, true, false) => Opcode::RC_SEND_FIRST,
        (Operation::Send { .. }, false, false) => Opcode::RC_SEND_MIDDLE,
        (Operation::Send { .. }, false, true) if with_imm => Opcode::RC_SEND_LAST_IMM,
        (Operation::Send { .. }, false, true) => Opcode::RC_SEND_LAST,
        (Operation::Send { .. }, true, true) if with_imm => Opcode::RC_SEND_ONLY_IMM,
        (Operation::Send { .. }, true, true) => Opcode::RC_SEND_ONLY,
        (Operation::Write { .. }, true, false) => Opcode::RC_WRITE_FIRST,
        (Operation::Write { .. }, false, false) => Opcode::RC_WRITE_MIDDLE,
        (Operation::Write { .. }, false, true) if with_imm => Opcode::RC_WRITE_LAST_IMM,
        (Operation::Write { .. }, false, true) => Opcode::RC_WRITE_LAST,
        (Operation::Write { .. }, true, true) if with_imm => Opcode::RC_WRITE_ONLY_IMM,
        (Operation::Write { .. }, true, true) => Opcode::RC_WRITE_ONLY,
    }
}
