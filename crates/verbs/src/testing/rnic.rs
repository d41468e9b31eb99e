//! What one RNIC has.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;

use rustix::net::SendFlags;
use verbatim_device::control::{AsyncEvent, AsyncEventType, CompletionEvent, QpAttr, QpType, SrqAttr};
use verbatim_device::layout::{Cqe, SendWqe};
use verbatim_roce::{Forwarding, Qp, QpConfig, Qpn, RcQp, ReceiveRequest, SendData, Standing};

use super::memory::Memory;
use super::wire::PAUSE_LIMIT;
use crate::backend::PhysicalQpInit;

/// A request in a send queue.
#[derive(Debug, Clone)]
pub struct Posted {
    pub wqe: SendWqe,
    pub data: SendData,
}

#[derive(Debug)]
pub struct Queues {
    pub qpn: u32,
    pub init: PhysicalQpInit,
    /// Pushed and not published.
    pub pushed: Vec<Posted>,
    /// Published and not taken.
    pub sends: VecDeque<Posted>,
    /// Published and not retired.
    pub unfinished: VecDeque<Posted>,
    pub pushed_recvs: Vec<ReceiveRequest>,
    pub recvs: VecDeque<ReceiveRequest>,
}

#[derive(Debug)]
pub struct WireQp {
    pub transport: Qp,
    pub queues: Queues,
    /// The device at the other end of a connection.
    pub remote: u8,
    pub stopped: bool,
    pub attr: QpAttr,
}

#[derive(Debug, Default)]
pub struct WireCq {
    pub entries: VecDeque<Cqe>,
    /// Armed, and whether for any completion.
    pub armed: Option<bool>,
    /// The channel of its events, and what they say.
    pub channel: Option<(u32, u32)>,
}

#[derive(Debug)]
pub struct WireSrq {
    pub attr: SrqAttr,
    pub pushed: Vec<ReceiveRequest>,
    pub recvs: VecDeque<ReceiveRequest>,
}

/// What queue pairs have in common.
#[derive(Debug, Default)]
pub struct Shared {
    pub memory: Memory,
    pub cqs: BTreeMap<u32, WireCq>,
    pub srqs: BTreeMap<u32, WireSrq>,
    /// What is told of completions.
    pub channels: BTreeMap<u32, OwnedFd>,
    /// The devices to which address handles lead.
    pub ahs: BTreeMap<u32, u8>,
    /// What is told of asynchronous events: one for each time that the device was opened.
    pub lines: Vec<OwnedFd>,
}

#[derive(Debug, Default)]
pub struct Rnic {
    pub last_number: u32,
    pub qps: BTreeMap<u32, WireQp>,
    pub shared: Shared,
    /// Queue pairs that have left.
    pub left: Option<Forwarding>,
    /// Its context is parked: no packet is taken in.
    pub parked: bool,
    pub dead: bool,
}

impl Rnic {
    /// Whether anything here has that number.
    pub fn has(&self, number: u32) -> bool {
        let shared = &self.shared;
        let of_region = |key: &u32| key >> 8 == number;
        self.qps.contains_key(&number)
            || shared.cqs.contains_key(&number)
            || shared.srqs.contains_key(&number)
            || shared.channels.contains_key(&number)
            || shared.ahs.contains_key(&number)
            || shared.memory.windows.contains_key(&number)
            || shared.memory.regions.keys().any(of_region)
    }
}

pub fn config(init: &PhysicalQpInit) -> QpConfig {
    QpConfig {
        pause_limit: PAUSE_LIMIT,
        shared_receive_queue: init.srq.is_some(),
        ..QpConfig::default()
    }
}

impl WireQp {
    pub fn new(qpn: u32, init: PhysicalQpInit) -> Self {
        let qp_type = match init.qp_type {
            QpType::Rc => verbatim_roce::QpType::Rc,
            QpType::Uc => verbatim_roce::QpType::Uc,
            QpType::Ud => verbatim_roce::QpType::Ud,
        };
        Self {
            transport: Qp::new(qp_type, Qpn::new(qpn), config(&init)),
            queues: Queues {
                qpn,
                init,
                pushed: Vec::new(),
                sends: VecDeque::new(),
                unfinished: VecDeque::new(),
                pushed_recvs: Vec::new(),
                recvs: VecDeque::new(),
            },
            remote: 0,
            stopped: false,
            attr: QpAttr::default(),
        }
    }

    pub fn connection(&mut self) -> &mut RcQp {
        self.transport.as_rc_mut().expect("a reliable connection")
    }

    pub fn is_paused(&self) -> bool {
        let connection = self.transport.as_rc();
        connection.is_some_and(|connection| connection.standing() == Standing::Stopped)
    }
}

impl Shared {
    pub fn complete(&mut self, number: u32, entry: Cqe) {
        let cq = self.cqs.get_mut(&number).expect("a completion queue in use");
        let wanted = |any: bool| any || entry.solicited != 0 || entry.status != 0;
        cq.entries.push_back(entry);
        if !cq.armed.is_some_and(wanted) {
            return;
        }
        cq.armed = None;
        let (channel, event) = cq.channel.expect("who asks for events has a channel");
        let message = postcard::to_stdvec(&CompletionEvent { cq: event }).expect("an event");
        rustix::net::send(&self.channels[&channel], &message, SendFlags::NOSIGNAL).expect("there is room");
    }

    /// The next RECV of a shared receive queue.
    pub fn pop_shared(&mut self, number: u32) -> Option<ReceiveRequest> {
        let srq = self.srqs.get_mut(&number).expect("a queue in use");
        let taken = srq.recvs.pop_front()?;
        if (srq.recvs.len() as u32) < srq.attr.limit {
            srq.attr.limit = 0;
            self.tell(AsyncEvent {
                event: AsyncEventType::SrqLimitReached,
                object: number,
            });
        }
        Some(taken)
    }

    pub fn tell(&self, event: AsyncEvent) {
        let message = postcard::to_stdvec(&event).expect("an event");
        for line in &self.lines {
            // A line that a parked device had is nobody's.
            let _ = rustix::net::send(line, &message, SendFlags::NOSIGNAL);
        }
    }
}
