//! Everything that programs have made, and its way out.

mod queues;

use std::net::IpAddr;
use std::ops::Range;

use verbatim_device::control::{CompletionEvent, FIRST_PUBLISHED_QPN, QPNS_PER_HOST};
use verbatim_roce::{Counters, Forwarding, HoldBudget, MigrationCounters, Path, Time};

pub use queues::{Cq, News, Srq};

use crate::budget::Peers;
use crate::cm::Manager;
use crate::config::{HostNumber, Limits};
use crate::confirming::Confirming;
use crate::context::Context;
use crate::memory::Regions;
use crate::multicast::Groups;
use crate::named::Named;
use crate::outbox::Outbox;
use crate::qp::{QueuePair, Route, Scratch};
use crate::table::Table;

/// A protection domain.
#[derive(Debug)]
pub struct Pd {
    pub context: u32,
    /// Objects that refer to it.
    pub users: u32,
}

/// A completion channel.
#[derive(Debug)]
pub struct Channel {
    /// Completion queues that refer to it.
    pub users: u32,
    pub outbox: Outbox<CompletionEvent>,
}

/// An address handle.
#[derive(Debug)]
pub struct Ah {
    pub pd: u32,
    pub path: Path,
}

/// What queue pairs use in common while they run.
#[derive(Debug)]
pub struct Shared {
    pub cqs: Table<Cq>,
    pub srqs: Table<Srq>,
    pub ahs: Table<Ah>,
    pub regions: Regions,
    pub scratch: Scratch,
    /// For packets that came too early.
    pub hold_budget: HoldBudget,
    /// Completion queues with a channel that got completions in this turn, each once.
    pub newsworthy: Vec<u32>,
    /// What all reliable connections have counted of pause and resume.
    pub migration: MigrationCounters,
}

/// All objects of all contexts. Who asks for one by its number must also be its owner.
#[derive(Debug)]
pub struct Objects {
    pub pds: Table<Pd>,
    pub qps: Table<QueuePair>,
    pub channels: Table<Channel>,
    pub groups: Groups,
    pub peers: Peers,
    /// Queue pairs that have gone on elsewhere.
    pub forwarding: Forwarding,
    /// Connections by address and port.
    pub cm: Manager,
    /// Queue pairs whose other ends are asked about.
    pub confirming: Confirming,
    /// Numbers of queue pairs that other RNICs send to.
    pub named: Named,
    pub shared: Shared,
    /// The counters of all queue pairs, also of those that are gone, as of the end of the last turn.
    pub counted: Counters,
}

/// Queue pairs 0 and 1 are for management (IBA Vol 1 §10.2.4); the agents have the upper half.
const QPNS: Range<u32> = 2..FIRST_PUBLISHED_QPN;

impl Objects {
    pub fn new(limits: &Limits, host: HostNumber, guid: [u8; 8]) -> Self {
        Self {
            pds: Table::new(1, limits.max_pd, 0),
            qps: Table::scattered(limits.max_qp, host.first_of(QPNS_PER_HOST), QPNS),
            channels: Table::new(1, limits.max_cq, 0),
            groups: Groups::new(limits.max_mcast_grp),
            peers: Peers::default(),
            forwarding: Forwarding::new(limits.max_qp as usize),
            cm: Manager::new(guid, limits),
            confirming: Confirming::default(),
            named: Named::default(),
            shared: Shared {
                cqs: Table::new(1, limits.max_cq, 0),
                srqs: Table::new(1, limits.max_srq, 0),
                ahs: Table::new(1, limits.max_ah, 0),
                regions: Regions::new(limits.max_mr + limits.max_mw, host),
                scratch: Scratch::default(),
                hold_budget: HoldBudget::new(limits.max_held_bytes),
                newsworthy: Vec::new(),
                migration: MigrationCounters::default(),
            },
            counted: Counters::default(),
        }
    }

    /// Removes a queue pair; whoever still refers to its number finds nothing.
    pub fn remove_qp(&mut self, qpn: u32, now: Time) -> Option<QueuePair> {
        let qp = self.qps.remove(qpn)?;
        self.confirming.remove(qpn, now);
        if self.named.leave(qpn, now) {
            self.qps.keep_back(qpn);
        }
        for cq in [qp.send_cq, qp.recv_cq] {
            if let Some(cq) = self.shared.cqs.get_mut(cq) {
                cq.users -= 1;
            }
        }
        if let Some(srq) = qp.srq.and_then(|srq| self.shared.srqs.get_mut(srq)) {
            srq.users -= 1;
        }
        self.end_route(&qp);
        crate::names::add(&mut self.counted, qp.transport.counters(), &qp.counted);
        if qp.groups > 0 {
            self.groups.detach_all(qpn);
        }
        self.shared.regions.free_windows_of(qpn);
        self.release_pd(qp.pd);
        Some(qp)
    }

    fn end_route(&mut self, qp: &QueuePair) {
        if let Some(route) = qp.route {
            if qp.active {
                self.peers.set_active(route.peer, false);
            }
            self.peers.end(route.peer, route.remote);
        }
    }

    /// Gives a queue pair another way to its partner, or none.
    pub fn set_route(&mut self, qpn: u32, route: Option<Route>) {
        let Some(qp) = self.qps.get_mut(qpn) else { return };
        if let Some(earlier) = std::mem::replace(&mut qp.route, route) {
            if std::mem::take(&mut qp.active) {
                self.peers.set_active(earlier.peer, false);
            }
            self.peers.end(earlier.peer, earlier.remote);
        }
    }

    /// The partner of a queue pair was at an address, and its way goes to another one now.
    pub fn share_new_way(&mut self, qpn: u32, from: IpAddr) {
        let Some(qp) = self.qps.get_mut(qpn) else { return };
        if let Some(route) = &mut qp.route {
            if std::mem::take(&mut qp.active) {
                self.peers.set_active(route.peer, false);
            }
            let earlier = std::mem::replace(&mut route.peer, self.peers.begin(route.remote));
            self.peers.end(earlier, from);
        }
    }

    /// Removes a completion queue that nobody uses.
    pub fn remove_cq(&mut self, cq: u32) {
        let Some(queue) = self.shared.cqs.remove(cq) else {
            return;
        };
        if let Some(channel) = queue.channel.and_then(|channel| self.channels.get_mut(channel)) {
            channel.users -= 1;
            channel.outbox.forget(|event| event.cq == queue.event);
        }
    }

    /// Removes a shared receive queue that nobody uses.
    pub fn remove_srq(&mut self, srq: u32) {
        if let Some(queue) = self.shared.srqs.remove(srq) {
            self.release_pd(queue.pd);
        }
    }

    /// Removes an address handle.
    pub fn remove_ah(&mut self, ah: u32) {
        if let Some(handle) = self.shared.ahs.remove(ah) {
            self.release_pd(handle.pd);
        }
    }

    /// Removes a window by its number.
    pub fn remove_window(&mut self, number: u32) {
        if let Some(window) = self.shared.regions.remove_window(number) {
            self.release_pd(window.pd);
        }
    }

    /// Removes a region; accesses with its key fail from now on.
    pub fn remove_region(&mut self, key: u32) {
        if let Some(region) = self.shared.regions.remove(key) {
            self.release_pd(region.pd);
        }
    }

    pub fn release_pd(&mut self, pd: u32) {
        if let Some(pd) = self.pds.get_mut(pd) {
            pd.users -= 1;
        }
    }

    /// Removes all that a context has made, in the order of their dependencies.
    pub fn remove_all(&mut self, context: Context, now: Time) {
        context.arena.keep();
        for qpn in context.qps() {
            self.remove_qp(qpn, now);
        }
        for ah in &context.ahs {
            self.remove_ah(*ah);
        }
        for srq in &context.srqs {
            self.remove_srq(*srq);
        }
        for number in &context.windows {
            self.remove_window(*number);
        }
        for key in &context.regions {
            self.remove_region(*key);
        }
        for cq in &context.cqs {
            self.remove_cq(*cq);
        }
        for channel in &context.channels {
            self.channels.remove(*channel);
        }
        for pd in &context.pds {
            self.pds.remove(*pd);
        }
    }
}
