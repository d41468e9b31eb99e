//! A context: what one control connection has made.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use rustix::event::EventfdFlags;
use verbatim_device::control::AsyncEvent;
use verbatim_device::layout::MAX_QP_SLOTS;
use verbatim_roce::Time;
use verbatim_seqpacket::{Credentials, Process};

use crate::arena::Arena;
use crate::authority::Stage;
use crate::ends::Doorbells;
use crate::error::Refused;
use crate::memory::{Mappings, Owner};
use crate::outbox::Outbox;
use crate::tenant::{Kind, Owned, Payer};

#[derive(Debug)]
pub struct Context {
    /// The program's or instance's name, for logs.
    pub name: String,
    doorbells: Doorbells,
    pub eventfd: OwnedFd,
    /// The version of the contract that whoever opened or attached it speaks.
    pub version: u32,
    /// Who opened or attached it.
    pub credentials: Credentials,
    pub owner: Rc<Owner>,
    pub mappings: Mappings,
    /// Where its asynchronous events go, if somebody wants to know.
    pub events: Option<Outbox<AsyncEvent>>,
    /// Somebody has attached to it.
    attached: bool,
    /// No packet is taken in.
    pub parked: bool,
    /// It serves the host itself: nobody is asked about the other ends of its queue pairs.
    pub serves_host: bool,
    pub pds: Owned,
    pub cqs: Owned,
    /// Entries of all its completion queues.
    pub cqes: u64,
    pub channels: Owned,
    /// Channels of rdma_cm.
    pub cm_channels: HashSet<u32>,
    pub srqs: Owned,
    pub ahs: Owned,
    pub regions: Owned,
    /// Pieces of all its regions.
    pub pieces: usize,
    /// Windows by number, the upper 24 bits of their keys.
    pub windows: Owned,
    /// The doorbells that queue pairs have.
    qp_slots: Owned,
    /// Queue pairs by doorbell.
    slots: Vec<Option<u32>>,
    free_slots: Vec<u32>,
    pub arena: Rc<Arena>,
    /// Until then its program's requests gather: it need not wake the RNIC for them.
    pub gathers_until: Option<Time>,
}

impl Context {
    pub fn new(
        name: String,
        version: u32,
        arena_bytes: u64,
        mappings: Mappings,
        payer: &Payer,
        credentials: Credentials,
        process: Process,
    ) -> Result<Self, Refused> {
        let owned = |kind| Owned::new(kind, payer);
        let owner = Rc::new(Owner::default());
        owner.set(credentials, process);
        let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Refused::os("eventfd", errno))?;
        let arena = Arena::new(arena_bytes, mappings.is_locked())?;
        let doorbells = Doorbells::new(&arena)?;
        Ok(Self {
            name,
            doorbells,
            eventfd,
            version,
            credentials,
            owner,
            mappings,
            events: None,
            attached: false,
            parked: false,
            serves_host: false,
            pds: owned(Kind::Pds),
            cqs: owned(Kind::Cqs),
            cqes: 0,
            channels: owned(Kind::Channels),
            cm_channels: HashSet::new(),
            srqs: owned(Kind::Srqs),
            ahs: owned(Kind::Ahs),
            regions: owned(Kind::Regions),
            pieces: 0,
            windows: owned(Kind::Windows),
            qp_slots: owned(Kind::Qps),
            slots: Vec::new(),
            free_slots: Vec::new(),
            arena,
            gathers_until: None,
        })
    }

    /// What this sender has in it.
    pub fn stage(&self, sender: Credentials) -> Stage {
        // Who was handed the connection may use it without having attached; a process that has ended sends nothing.
        match self.owner.pid() == Some(sender.pid) && !self.attached {
            true => Stage::Opened,
            false => Stage::HandedOver,
        }
    }

    /// Another process has taken it over.
    pub fn set_owner(&mut self, credentials: Credentials, process: Process) {
        self.owner.set(credentials, process);
        self.credentials = credentials;
        self.attached = true;
    }

    /// Whether it may have one more queue pair, of `most` in this context.
    pub fn check_qp(&self, most: u32) -> Result<(), Refused> {
        self.qp_slots.check(most)
    }

    /// A doorbell that no queue pair has.
    pub fn free_slot(&mut self) -> Result<u32, Refused> {
        if let Some(slot) = self.free_slots.pop() {
            return Ok(slot);
        }
        let slot = self.slots.len() as u32;
        if slot >= MAX_QP_SLOTS {
            return Err(Refused::new(
                libc::ENOMEM,
                format!("a context has at most {MAX_QP_SLOTS} queue pairs"),
            ));
        }
        self.slots.push(None);
        Ok(slot)
    }

    /// Gives the doorbell to a queue pair, or back.
    pub fn assign_slot(&mut self, slot: u32, qpn: Option<u32>) {
        self.slots[slot as usize] = qpn;
        match qpn {
            Some(_) => self.qp_slots.insert(slot),
            None => {
                self.qp_slots.remove(slot);
                self.free_slots.push(slot);
            }
        }
    }

    /// All queue pairs.
    pub fn qps(&self) -> impl Iterator<Item = u32> + '_ {
        self.slots.iter().filter_map(|slot| *slot)
    }

    /// Takes the bells that were rung.
    pub fn drain_doorbells(&mut self, mut visit: impl FnMut(u32)) {
        let slots = &self.slots;
        self.doorbells.reader.drain(|slot| {
            if let Some(Some(qpn)) = slots.get(slot as usize) {
                visit(*qpn);
            }
        });
    }

    /// Tells the program whether it must wake the RNIC; says whether it has rung meanwhile.
    pub fn set_sleeping(&self, sleeping: bool) -> bool {
        self.doorbells.reader.set_sleeping(sleeping);
        sleeping && self.doorbells.reader.is_rung()
    }

    /// Tells the program whether the RNIC has to wait for a core.
    pub fn set_starved(&self, starved: bool) {
        self.doorbells.signs.set_starved(starved);
    }
}
