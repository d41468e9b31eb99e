//! A queue pair: the transport's state machine, its rings, and the surroundings in which it runs.

use std::net::Ipv4Addr;
use std::time::Duration;

use verbatim_device::control::{Access, QpCap};
use verbatim_device::layout::{self, Cqe};
use verbatim_device::ring::SentWqe;
use verbatim_roce::icrc::Flow;
use verbatim_roce::{
    AccessError, BadRequest, Completion, Counters, Event, Host, Key, Lkey, LocalAccess, Queue, RcConfig,
    RcQp, ReceiveRequest, RemoteAccess, Rkey, SendRequest, Time,
};

use crate::config::Limits;
use crate::ends::QpEnds;
use crate::memory::{Denied, Domain, Regions};
use crate::objects::Cq;
use crate::table::Table;
use crate::timers::Alarm;
use crate::wqe::{send_request, sge_list};

/// `IBV_WC_WITH_IMM`.
const WC_WITH_IMM: u32 = 1 << 1;

/// A partner's RNIC is a process: it may have to wait for a core longer than the shortest timeouts that a program can
/// ask for, and sending again what it has already received makes it later still.
const MIN_ACK_TIMEOUT: Duration = Duration::from_millis(50);

/// Enough for a small message and its retransmission.
const NARROWEST_WINDOW_BYTES: u32 = 16 << 10;

/// More for one queue pair does not make it faster, measured between two network namespaces.
const WIDEST_WINDOW_BYTES: u32 = 256 << 10;

/// A queue pair.
#[derive(Debug)]
pub struct QueuePair {
    pub context: u32,
    /// Its doorbell.
    pub slot: u32,
    pub pd: u32,
    pub send_cq: u32,
    pub recv_cq: u32,
    pub cap: QpCap,
    pub transport: RcQp,
    pub rings: Rings,
    /// Where its packets go, once it is connected.
    pub route: Option<Route>,
    /// Its context is parked: no packet is taken in.
    pub parked: bool,
    /// It waits for its turn to transmit.
    pub queued: bool,
    /// It is in the list of those whose counters may have changed.
    pub touched: bool,
    pub alarm: Alarm,
    /// In ERR: when to look for receive requests to flush.
    pub flush_interval: Duration,
    /// The transport's counters as they were added to the RNIC's last.
    pub counted: Counters,
}

/// The way to the partner.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    pub remote: Ipv4Addr,
    pub flow: Flow,
}

/// A queue pair's rings, and what is needed to read them.
#[derive(Debug)]
pub struct Rings {
    ends: QpEnds,
    cap: QpCap,
    /// A ring index cannot be: the rings are not read any more, and the queue pair goes to ERR.
    broken: bool,
    wqe: SentWqe,
    sges: Vec<layout::Sge>,
}

impl Rings {
    pub fn new(ends: QpEnds, cap: QpCap) -> Self {
        Self {
            ends,
            cap,
            broken: false,
            wqe: SentWqe::default(),
            sges: Vec::new(),
        }
    }

    /// Forgets everything, for RESET.
    pub fn reset(&mut self) {
        self.ends.send.reset();
        self.ends.recv.reset();
        self.broken = false;
    }
}

/// What happened while a queue pair ran and concerns others too.
#[derive(Debug, Default)]
pub struct Effects {
    /// Completion queues that overran: their queue pairs go to ERR.
    pub overrun_cqs: Vec<u32>,
    /// Contexts whose files were truncated: their queue pairs go to ERR.
    pub truncated_contexts: Vec<u32>,
    /// Queue pairs with broken rings: they go to ERR.
    pub broken_qps: Vec<u32>,
}

impl Effects {
    pub fn is_empty(&self) -> bool {
        self.overrun_cqs.is_empty() && self.truncated_contexts.is_empty() && self.broken_qps.is_empty()
    }
}

/// What a queue pair sees while it runs.
pub struct Surroundings<'a> {
    qpn: u32,
    domain: Domain,
    send_cq: u32,
    recv_cq: u32,
    rings: &'a mut Rings,
    cqs: &'a mut Table<Cq>,
    regions: &'a Regions,
    effects: &'a mut Effects,
    now: Time,
}

impl QueuePair {
    /// The transport's settings that are not attributes, for a queue pair that is made beside `others`: the more there
    /// are, the less it may have on its way.
    pub fn transport_config(limits: &Limits, others: usize) -> RcConfig {
        let share = limits.window_bytes / (others as u32 + 1);
        RcConfig {
            window_bytes: share.clamp(NARROWEST_WINDOW_BYTES, WIDEST_WINDOW_BYTES),
            min_ack_timeout: MIN_ACK_TIMEOUT,
            ..RcConfig::default()
        }
    }

    /// The state machine and its surroundings.
    #[inline]
    pub fn split<'a>(
        &'a mut self,
        cqs: &'a mut Table<Cq>,
        regions: &'a Regions,
        effects: &'a mut Effects,
        now: Time,
    ) -> (&'a mut RcQp, Surroundings<'a>) {
        let surroundings = Surroundings {
            qpn: self.transport.qpn().get(),
            domain: Domain { pd: self.pd },
            send_cq: self.send_cq,
            recv_cq: self.recv_cq,
            rings: &mut self.rings,
            cqs,
            regions,
            effects,
            now,
        };
        (&mut self.transport, surroundings)
    }
}

impl Surroundings<'_> {
    #[inline]
    fn denied(&mut self, denied: Denied, key: u32) -> AccessError {
        if denied == Denied::Truncated
            && let Some(region) = self.regions.get(key)
        {
            self.effects.truncated_contexts.push(region.context);
        }
        tracing::debug!(qpn = self.qpn, key, ?denied, "memory access denied");
        AccessError
    }

    fn break_rings(&mut self, what: &str) {
        tracing::debug!(qpn = self.qpn, what, "the program broke its queue");
        self.rings.broken = true;
        self.effects.broken_qps.push(self.qpn);
    }

    fn check(&mut self, key: u32, addr: u64, len: u32, rights: Access) -> Result<(), AccessError> {
        match self.regions.check(self.domain, key, addr, len.into(), rights) {
            Ok(_) => Ok(()),
            Err(denied) => Err(self.denied(denied, key)),
        }
    }
}

impl Host for Surroundings<'_> {
    fn check_local(
        &mut self,
        lkey: Lkey,
        addr: u64,
        len: u32,
        access: LocalAccess,
    ) -> Result<(), AccessError> {
        let rights = match access {
            LocalAccess::Read => Access::empty(),
            LocalAccess::Write => Access::LOCAL_WRITE,
        };
        self.check(lkey.0, addr, len, rights)
    }

    fn check_remote(
        &mut self,
        rkey: Rkey,
        addr: u64,
        len: u32,
        access: RemoteAccess,
    ) -> Result<(), AccessError> {
        let rights = match access {
            RemoteAccess::Read => Access::REMOTE_READ,
            RemoteAccess::Write => Access::REMOTE_WRITE,
        };
        self.check(rkey.0, addr, len, rights)
    }

    fn read(&mut self, key: Key, addr: u64, out: &mut [u8]) -> Result<(), AccessError> {
        let (key, rights) = match key {
            Key::Local(lkey) => (lkey.0, Access::empty()),
            Key::Remote(rkey) => (rkey.0, Access::REMOTE_READ),
        };
        let region = self
            .regions
            .check(self.domain, key, addr, out.len() as u64, rights);
        region
            .and_then(|region| region.read(addr, out))
            .map_err(|denied| self.denied(denied, key))
    }

    fn write(&mut self, key: Key, addr: u64, data: &[u8]) -> Result<(), AccessError> {
        let (key, rights) = match key {
            Key::Local(lkey) => (lkey.0, Access::LOCAL_WRITE),
            Key::Remote(rkey) => (rkey.0, Access::REMOTE_WRITE),
        };
        let region = self
            .regions
            .check(self.domain, key, addr, data.len() as u64, rights);
        region
            .and_then(|region| region.write(addr, data))
            .map_err(|denied| self.denied(denied, key))
    }

    fn next_send(&mut self) -> Option<Result<SendRequest, BadRequest>> {
        if self.rings.broken {
            return None;
        }
        let Rings { ends, wqe, cap, .. } = &mut *self.rings;
        match ends.send.pop(wqe) {
            Ok(true) => Some(send_request(wqe, cap)),
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
        let Rings { ends, sges, cap, .. } = &mut *self.rings;
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
        let cq = match completion.queue {
            Queue::Send => self.send_cq,
            Queue::Receive => self.recv_cq,
        };
        let entry = Cqe {
            wr_id: completion.wr_id,
            timestamp_ns: self.now.as_nanos(),
            status: completion.status as u32,
            opcode: completion.opcode as u32,
            byte_len: completion.byte_len,
            imm: completion.imm.map_or(0, |imm| u32::from_ne_bytes(imm.0)),
            qpn: self.qpn,
            wc_flags: if completion.imm.is_some() { WC_WITH_IMM } else { 0 },
            ..Cqe::default()
        };
        let Some(queue) = self.cqs.get_mut(cq) else { return };
        // A queue that overran takes no more: what was lost cannot be made good (IBA Vol 1 §11.3.1, "CQ error").
        if !queue.overrun && !queue.ring.producer.push(&entry) {
            queue.overrun = true;
            self.effects.overrun_cqs.push(cq);
        }
    }

    fn event(&mut self, event: Event) {
        tracing::debug!(qpn = self.qpn, ?event, "asynchronous event");
    }
}
