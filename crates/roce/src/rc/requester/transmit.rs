//! Sending: the packet at `next`, as often as window, budget and batch let it.

use super::wqe::Wqe;
use super::{Requester, Timed};
use crate::gather::{gather, opcode, write_header};
use crate::link::{Link, Outlet, SendError};
use crate::wire::atomiceth::AtomicEth;
use crate::wire::opcode::{Opcode, Service};
use crate::wire::packet::Head;
use crate::wire::reth::Reth;
use crate::{AtomicOp, Counters, Host, Operation, Psn, Rkey, Time, Transmit, WcStatus};

/// The packets of a READ that has a First and a Last and no Middle.
const PAIR: u32 = 2;

/// Sending goes on when that part of the window is free; so often, too, a packet asks for an acknowledgement.
const ROOM_PART: u32 = 4;

impl Requester {
    /// Sends what may be sent. New requests are taken off the ring only if `may_start`.
    pub fn transmit(
        &mut self,
        now: Time,
        may_start: bool,
        host: &mut impl Host,
        outlet: &mut Outlet<'_>,
    ) -> Transmit {
        while let Some((psn, last)) = self.repair.next() {
            if outlet.budget == 0 {
                return Transmit::More;
            }
            match self.send_again(psn, last, host, outlet) {
                Ok((packets, bytes)) => {
                    self.repair.note_sent(packets);
                    self.count_sent_again(bytes, outlet);
                }
                Err(SendError::Full) => return Transmit::Full,
                Err(SendError::Access) => {
                    self.repair.cancel();
                    self.fail(WcStatus::LocProtErr);
                    return Transmit::Idle;
                }
            }
        }
        let sent = self.next;
        let mut outcome = Transmit::Idle;
        if self.has_more || !self.is_room_too_small() {
            outcome = self.fill_window(now, may_start, host, outlet);
            self.has_more = outcome != Transmit::Idle;
        }
        if self.repair.owes() {
            if self.next != sent {
                self.repair.note_shown();
            } else if outcome == Transmit::Idle {
                return self.send_latest_again(host, outlet);
            }
        }
        outcome
    }

    /// Behind a repair, if nothing new can be sent: the latest packet again. A READ is not asked for again only to see how
    /// things are, since it may have been executed.
    fn send_latest_again(&mut self, host: &mut impl Host, outlet: &mut Outlet<'_>) -> Transmit {
        let latest = self.high.sub(1);
        let wqe = self.owner(latest);
        let psn = if wqe.is_read() {
            wqe.piece_of(latest)
        } else {
            latest
        };
        let is_begun = psn.offset_from(self.ack) >= self.high.offset_from(self.ack);
        if is_begun || self.probing && wqe.is_read_or_atomic() {
            self.repair.show_nothing();
            return Transmit::Idle;
        }
        if outlet.budget == 0 {
            return Transmit::More;
        }
        match self.send_again(psn, true, host, outlet) {
            Ok((_, bytes)) => {
                self.repair.note_shown();
                self.count_sent_again(bytes, outlet);
                Transmit::Idle
            }
            Err(SendError::Full) => Transmit::Full,
            Err(SendError::Access) => {
                self.repair.cancel();
                self.fail(WcStatus::LocProtErr);
                Transmit::Idle
            }
        }
    }

    fn count_sent_again(&self, bytes: usize, outlet: &mut Outlet<'_>) {
        outlet.budget -= 1;
        outlet.counters.sent_requests += 1;
        outlet.counters.sent_request_bytes += bytes as u64;
        outlet.counters.retransmitted_requests += 1;
    }

    /// Sends what was not sent yet, until the window, the budget or the batch is full.
    fn fill_window(
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
            if wqe.is_local() {
                if self.pass_local(host) {
                    continue;
                }
                return Transmit::Idle;
            }
            // A failed request stops the queue until it is the oldest. A fence (IBA §10.8.3.3) waits for READs and
            // atomics.
            let fenced = wqe.request.fence && self.next == wqe.first && !self.reads.is_empty();
            if wqe.failure.is_some() || fenced {
                return Transmit::Idle;
            }
            let room = self.window.packets() - under_way;
            let packets = if wqe.is_read() {
                wqe.rest_of_piece(self.next)
            } else {
                1
            };
            if wqe.is_read_or_atomic() {
                let too_much = packets > room && under_way > 0;
                if too_much || self.reads.len() >= usize::from(self.settings.max_rd_atomic) {
                    return Transmit::Idle;
                }
            }
            if outlet.budget == 0 {
                return Transmit::More;
            }
            let mut ack_request = true;
            let sent = match wqe.request.operation {
                Operation::Read { remote_addr, rkey } => {
                    send_read(wqe, self.next, packets, (remote_addr, rkey), outlet)
                }
                Operation::Atomic {
                    remote_addr,
                    rkey,
                    op,
                } => send_atomic(self.next, (remote_addr, rkey), op, outlet),
                _ => {
                    // So often that the window never runs empty for want of an answer.
                    let interval =
                        (self.window.packets() / ROOM_PART).clamp(1, self.config.ack_request_interval.max(1));
                    ack_request = room == 1
                        || self.next.next() == wqe.end()
                        || self.next.get().is_multiple_of(interval);
                    send_data(wqe, self.next, ack_request, host, outlet)
                }
            };
            match sent {
                Ok(bytes) => {
                    outlet.budget -= 1;
                    outlet.counters.sent_requests += 1;
                    outlet.counters.sent_request_bytes += bytes as u64;
                    self.note_sent(now, packets, ack_request, outlet.counters);
                    if self.retry_deadline.is_none() {
                        self.rearm(now);
                    }
                }
                Err(SendError::Full) => return Transmit::Full,
                Err(SendError::Access) => self.queue[self.cursor].failure = Some(WcStatus::LocProtErr),
            }
        }
    }

    /// Each acknowledgement opens the window a little, and what would leave each time is a batch of a few packets at the price
    /// of a full one (TCP's silly window, RFC 1122 §4.2.3.4). So while another one is awaited, sending goes on only when a
    /// part of the window is free.
    fn is_room_too_small(&self) -> bool {
        let window = self.window.packets();
        let under_way = self.next.offset_from(self.ack);
        let is_awaited = (1..=under_way).contains(&self.asked.offset_from(self.ack));
        is_awaited && under_way > window - window / ROOM_PART
    }

    /// Sends a packet again that is under way; says for how many PSNs it stands.
    fn send_again(
        &self,
        psn: Psn,
        ack_request: bool,
        host: &mut impl Host,
        outlet: &mut Outlet<'_>,
    ) -> Result<(u32, usize), SendError> {
        let wqe = self.owner(psn);
        let (packets, sent) = match wqe.request.operation {
            Operation::Read { remote_addr, rkey } => {
                let packets = self.repair.data_packets(psn, wqe.rest_of_piece(psn));
                (packets, send_read(wqe, psn, packets, (remote_addr, rkey), outlet))
            }
            Operation::Atomic {
                remote_addr,
                rkey,
                op,
            } => (1, send_atomic(psn, (remote_addr, rkey), op, outlet)),
            _ => (1, send_data(wqe, psn, ack_request, host, outlet)),
        };
        sent.map(|bytes| (packets, bytes))
    }

    /// The request that a packet belongs to that is under way.
    fn owner(&self, psn: Psn) -> &Wqe {
        let owner = self
            .queue
            .iter()
            .find(|wqe| psn.offset_from(wqe.first) < wqe.packets);
        owner.expect("what is under way belongs to a request")
    }

    /// Takes a request off the ring; says whether there was one.
    pub(super) fn take_next(&mut self, link: &Link, host: &mut impl Host) -> bool {
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

    /// How many response packets each request of a READ asks for.
    ///
    /// Two, if enough requests may be outstanding to keep half of the window busy: the responder sends equal packets in one
    /// system call (`UDP_SEGMENT` of udp(7)), and First and Last are of one size, which Middle is not.
    ///
    /// Otherwise so many that as many requests as may be outstanding (or four) fill the window. Also on a path that loses
    /// packets, where the window is smaller than it could be: there are fewer requests to lose then. Besides, a kernel's rxe
    /// (6.12) ends a connection if it is asked again for the first packet of a READ right after a message without data.
    fn read_piece(&self) -> u32 {
        let outstanding = u32::from(self.settings.max_rd_atomic);
        let limit = self.window.limit_packets();
        let is_open = self.window.packets() == limit;
        if is_open && outstanding * PAIR * 2 >= limit {
            return PAIR.min(limit).max(1);
        }
        (limit / outstanding.clamp(1, 4)).max(1)
    }

    fn note_sent(&mut self, now: Time, packets: u32, ack_request: bool, counters: &mut Counters) {
        let wqe = &self.queue[self.cursor];
        let again = self.next != self.high;
        let next = self.next.add(packets);
        if wqe.is_read_or_atomic() {
            self.reads.push_back(next.sub(1));
        }
        if ack_request && !again && self.timed.is_none() && self.recovering.is_none() {
            self.timed = Some(Timed {
                psn: self.next,
                at: now,
                delivered: self.delivered,
            });
        }
        if ack_request {
            self.asked = next;
        }
        self.in_flight_bytes += wqe.bytes_between(self.next, next, self.settings.mtu);
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

fn send_read(
    wqe: &Wqe,
    psn: Psn,
    packets: u32,
    (remote_addr, rkey): (u64, Rkey),
    outlet: &mut Outlet<'_>,
) -> Result<usize, SendError> {
    let link = outlet.link;
    let (offset, _) = wqe.span(psn, link.mtu);
    let dma_len = (wqe.len - offset).min(packets.saturating_mul(link.mtu.bytes()));
    let mut bth = link.bth(Opcode::RC_READ_REQUEST, psn);
    bth.ack_request = true;
    let reth = Reth {
        virtual_addr: remote_addr.wrapping_add(u64::from(offset)),
        rkey,
        dma_len,
    };
    let head = Head {
        reth: Some(reth),
        ..Head::new(bth)
    };
    outlet.send(&head, 0, |_| Ok(()))
}

fn send_atomic(
    psn: Psn,
    (virtual_addr, rkey): (u64, Rkey),
    op: AtomicOp,
    outlet: &mut Outlet<'_>,
) -> Result<usize, SendError> {
    let (opcode, swap_or_add, compare) = match op {
        AtomicOp::CompareSwap { compare, swap } => (Opcode::RC_COMPARE_SWAP, swap, compare),
        AtomicOp::FetchAdd { add } => (Opcode::RC_FETCH_ADD, add, 0),
    };
    let mut bth = outlet.link.bth(opcode, psn);
    bth.ack_request = true;
    let head = Head {
        atomic_eth: Some(AtomicEth {
            virtual_addr,
            rkey,
            swap_or_add,
            compare,
        }),
        ..Head::new(bth)
    };
    outlet.send(&head, 0, |_| Ok(()))
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
    let mut bth = link.bth(opcode(Service::Rc, &request.operation, starts, ends), psn);
    bth.ack_request = ack_request;
    bth.solicited = ends && request.solicited;
    let head = Head {
        reth: write_header(&request.operation, starts, wqe.len),
        imm: request.operation.imm(),
        invalidate: request.operation.invalidates(),
        ..Head::new(bth)
    };
    let (offset, payload_bytes) = wqe.span(psn, link.mtu);
    outlet.send(&head, payload_bytes, |payload| {
        gather(&request.data, offset, payload, host)
    })
}
