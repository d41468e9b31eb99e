//! What a queue pair sees while it runs: the RNIC's side of [`Host`].

use std::net::SocketAddr;

use verbatim_device::control::{Access, AsyncEventType, QpType};
use verbatim_device::layout::Cqe;
use verbatim_roce::icrc::Flow;
use verbatim_roce::{
    AccessError, AtomicOp, BadRequest, Bind, Completion, Event, HoldBudget, Host, Key, Lkey, LocalAccess,
    Location, MigrationCounters, Queue, ReceiveRequest, RemoteAccess, Rkey, SendRequest, Time, UDP_PORT,
    WcStatus,
};

use super::{Effects, Heard, Rings, Route};
use crate::memory::{BindWanted, Denied, Domain, Region};
use crate::objects::{News, Shared};
use crate::wqe::{Sender, send_request, sge_list};

pub struct Surroundings<'a> {
    pub(super) context: u32,
    pub(super) domain: Domain,
    pub(super) qp_type: QpType,
    pub(super) send_cq: u32,
    pub(super) recv_cq: u32,
    pub(super) srq: Option<u32>,
    pub(super) rings: &'a mut Rings,
    pub(super) route: &'a mut Option<Route>,
    pub(super) shared: &'a mut Shared,
    pub(super) effects: &'a mut Effects,
    pub(super) now: Time,
}

impl Surroundings<'_> {
    #[cold]
    fn denied(&mut self, denied: Denied, key: u32) -> AccessError {
        let regions = &self.shared.regions;
        if denied == Denied::Truncated
            && let Ok((region, _)) = regions.check_remote(self.domain, key, 0, 0, Access::empty())
        {
            self.effects.truncated_contexts.push(region.context);
        } else if denied == Denied::Truncated {
            self.effects.truncated_contexts.push(self.context);
        }
        tracing::debug!(qpn = self.domain.qpn, key, ?denied, "memory access denied");
        AccessError
    }

    #[cold]
    fn failed(&self, status: WcStatus) {
        tracing::debug!(
            qpn = self.domain.qpn,
            context = self.context,
            ?status,
            "a queue pair fails"
        );
    }

    #[cold]
    fn break_rings(&mut self, what: &str) {
        tracing::debug!(qpn = self.domain.qpn, what, "the program broke its queue");
        self.rings.broken = true;
        self.effects.broken_qps.push(self.domain.qpn);
    }

    #[inline]
    fn find(&self, key: Key, addr: u64, len: u64, write: bool) -> Result<(&Region, u64), Denied> {
        let regions = &self.shared.regions;
        match (key, write) {
            (Key::Local(lkey), _) => {
                let rights = if write {
                    Access::LOCAL_WRITE
                } else {
                    Access::empty()
                };
                let region = regions.check_local(self.domain, lkey.0, addr, len, rights)?;
                Ok((region, addr))
            }
            (Key::Remote(rkey), false) => {
                regions.check_remote(self.domain, rkey.0, addr, len, Access::REMOTE_READ)
            }
            (Key::Remote(rkey), true) => {
                regions.check_remote(self.domain, rkey.0, addr, len, Access::REMOTE_WRITE)
            }
        }
    }

    /// The next request of the shared receive queue.
    fn next_shared_receive(&mut self, number: u32) -> Option<ReceiveRequest> {
        let Shared { srqs, scratch, .. } = &mut *self.shared;
        let srq = srqs.get_mut(number).filter(|srq| !srq.broken)?;
        let taken = match srq.ring.recv.pop(&mut scratch.sges) {
            Ok(None) => return None,
            Ok(Some(Some(wr_id))) if scratch.sges.len() <= srq.attr.max_sge as usize => {
                sge_list(&scratch.sges).map(|sges| ReceiveRequest { wr_id, sges })
            }
            Ok(Some(_)) | Err(_) => None,
        };
        let Some(receive) = taken else {
            srq.broken = true;
            let context = srq.context;
            self.effects.tell(context, AsyncEventType::SrqErr, number);
            self.break_rings("the shared receive queue holds an index or a request that cannot be");
            return None;
        };
        // IBA Vol 1 §10.2.9.1: the event comes when fewer than the limit are left, once.
        if srq.attr.limit > 0 && srq.ring.recv.pending().is_ok_and(|left| left < srq.attr.limit) {
            srq.attr.limit = 0;
            let context = srq.context;
            self.effects
                .tell(context, AsyncEventType::SrqLimitReached, number);
        }
        Some(receive)
    }
}

fn key_number(key: Key) -> u32 {
    match key {
        Key::Local(lkey) => lkey.0,
        Key::Remote(rkey) => rkey.0,
    }
}

impl Host for Surroundings<'_> {
    #[inline]
    fn check_local(
        &mut self,
        lkey: Lkey,
        addr: u64,
        len: u32,
        access: LocalAccess,
    ) -> Result<(), AccessError> {
        let found = self.find(Key::Local(lkey), addr, len.into(), access == LocalAccess::Write);
        found.map(|_| ()).map_err(|denied| self.denied(denied, lkey.0))
    }

    #[inline]
    fn check_remote(
        &mut self,
        rkey: Rkey,
        addr: u64,
        len: u32,
        access: RemoteAccess,
    ) -> Result<(), AccessError> {
        let found = self.find(Key::Remote(rkey), addr, len.into(), access == RemoteAccess::Write);
        found.map(|_| ()).map_err(|denied| self.denied(denied, rkey.0))
    }

    #[inline]
    fn read(&mut self, key: Key, addr: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.find(key, addr, out.len() as u64, false)
            .and_then(|(region, addr)| region.read(addr, out))
            .map_err(|denied| self.denied(denied, key_number(key)))
    }

    #[inline]
    fn write(&mut self, key: Key, addr: u64, data: &[u8]) -> Result<(), AccessError> {
        self.find(key, addr, data.len() as u64, true)
            .and_then(|(region, addr)| region.write(addr, data))
            .map_err(|denied| self.denied(denied, key_number(key)))
    }

    fn atomic(&mut self, rkey: Rkey, addr: u64, op: AtomicOp) -> Result<u64, AccessError> {
        let regions = &self.shared.regions;
        regions
            .check_remote(self.domain, rkey.0, addr, 8, Access::REMOTE_ATOMIC)
            .and_then(|(region, addr)| region.atomic(addr, op))
            .map_err(|denied| self.denied(denied, rkey.0))
    }

    fn atomic_write(&mut self, rkey: Rkey, addr: u64, data: [u8; 8]) -> Result<(), AccessError> {
        self.find(Key::Remote(rkey), addr, 8, true)
            .and_then(|(region, addr)| region.store(addr, data))
            .map_err(|denied| self.denied(denied, rkey.0))
    }

    fn invalidate_remote(&mut self, rkey: Rkey) -> Result<(), AccessError> {
        let done = self.shared.regions.invalidate(self.domain, rkey.0);
        done.map_err(|denied| self.denied(denied, rkey.0))
    }

    fn local_invalidate(&mut self, rkey: Rkey) -> Result<(), AccessError> {
        let done = self.shared.regions.invalidate(self.domain, rkey.0);
        done.map_err(|denied| self.denied(denied, rkey.0))
    }

    fn bind(&mut self, bind: &Bind) -> Result<(), AccessError> {
        let wanted = BindWanted {
            window: bind.window.0,
            rkey: bind.rkey.0,
            lkey: bind.lkey.0,
            start: bind.addr,
            length: bind.len,
            access: Access::from_bits_retain(bind.access.bits()),
        };
        let done = self.shared.regions.bind(self.domain, &wanted);
        done.map_err(|denied| self.denied(denied, bind.window.0))
    }

    fn hold_budget(&self) -> Option<&HoldBudget> {
        Some(&self.shared.hold_budget)
    }

    fn next_send(&mut self) -> Option<Result<SendRequest, BadRequest>> {
        if self.rings.broken {
            return None;
        }
        let Rings { ends, cap, .. } = &mut *self.rings;
        let Shared { scratch, ahs, .. } = &mut *self.shared;
        let sender = Sender {
            qp_type: self.qp_type,
            pd: self.domain.pd,
            cap,
            ahs,
        };
        match ends.send.pop(&mut scratch.wqe) {
            Ok(true) => Some(send_request(&scratch.wqe, &sender)),
            Ok(false) => None,
            Err(bad) => {
                self.break_rings(&bad.to_string());
                None
            }
        }
    }

    fn next_receive(&mut self) -> Option<ReceiveRequest> {
        if self.rings.broken {
            return None;
        }
        if let Some(srq) = self.srq {
            return self.next_shared_receive(srq);
        }
        let Rings { ends, cap, .. } = &mut *self.rings;
        let sges = &mut self.shared.scratch.sges;
        match ends.recv.pop(sges) {
            Ok(None) => None,
            Ok(Some(Some(wr_id))) if sges.len() <= cap.max_recv_sge as usize => Some(ReceiveRequest {
                wr_id,
                sges: sge_list(sges)?,
            }),
            Ok(Some(_)) => {
                self.break_rings("a receive request has more entries than its queue allows");
                None
            }
            Err(bad) => {
                self.break_rings(&bad.to_string());
                None
            }
        }
    }

    fn retire_sends(&mut self, count: u32) {
        self.rings.ends.send.complete(count);
    }

    fn complete(&mut self, completion: Completion) {
        if !matches!(completion.status, WcStatus::Success | WcStatus::WrFlushErr) {
            self.failed(completion.status);
        }
        let number = match completion.queue {
            Queue::Send => self.send_cq,
            Queue::Receive => self.recv_cq,
        };
        let entry = Cqe {
            wr_id: completion.wr_id,
            timestamp_ns: self.now.as_nanos(),
            status: completion.status as u32,
            opcode: completion.opcode as u32,
            vendor_err: completion.vendor_err,
            byte_len: completion.byte_len,
            imm: completion.imm_data(),
            qpn: self.domain.qpn,
            src_qpn: completion.source_qpn.get(),
            wc_flags: completion.flags.bits(),
            sl: 0,
            solicited: completion.solicited.into(),
        };
        let Some(queue) = self.shared.cqs.get_mut(number) else {
            return;
        };
        // A queue that overran takes no more: what was lost cannot be made good (IBA Vol 1 §11.3.1, "CQ error").
        if !queue.overrun && !queue.ring.producer.push(&entry) {
            queue.overrun = true;
            self.effects.overrun_cqs.push(number);
        }
        if queue.channel.is_some() {
            if queue.news == News::Nothing {
                self.shared.newsworthy.push(number);
            }
            let solicited = completion.solicited || completion.status != WcStatus::Success;
            let news = if solicited { News::Solicited } else { News::Plain };
            queue.news = queue.news.max(news);
        }
    }

    fn peer_moved(&mut self, to: &Location) -> bool {
        let Some(route) = self.route.as_mut() else {
            return false;
        };
        let end = SocketAddr::new(to.address, UDP_PORT);
        let Ok(flow) = Flow::new(route.flow.source(), end) else {
            return false;
        };
        tracing::info!(qpn = self.domain.qpn, from = %route.remote, to = %to.address, "the partner has moved");
        // Who shares the way is counted at the end of the turn.
        self.effects.moved_peers.push((self.domain.qpn, route.remote));
        route.remote = to.address;
        route.flow = flow;
        true
    }

    fn partner_is_at(&mut self, partner: &Location, is_direct: bool) {
        self.effects.heard_peers.push(Heard {
            qpn: self.domain.qpn,
            partner: *partner,
            is_direct,
        });
    }

    fn count_migration(&mut self, counted: &MigrationCounters) {
        self.shared.migration.add(counted);
    }

    fn event(&mut self, event: Event) {
        let event = match event {
            Event::CommunicationEstablished => AsyncEventType::CommEst,
            Event::SendQueueDrained => AsyncEventType::SqDrained,
            Event::Fatal => AsyncEventType::QpFatal,
            Event::InvalidRequest => AsyncEventType::QpReqErr,
            Event::AccessError => AsyncEventType::QpAccessErr,
            Event::LastWqeReached => AsyncEventType::QpLastWqeReached,
        };
        self.effects.tell(self.context, event, self.domain.qpn);
    }
}
