//! Connections by address and port: what the kernel's rdma_cm and rdma_ucm are to programs elsewhere.
//!
//! ```text
//!  requests of programs ──► commands.rs ──► ids.rs, ports.rs          packets to queue pair 1 ──► receive.rs
//!                                   │           │                                                 │
//!                                   ▼           ▼                                                 ▼
//!                                 verbatim_cm::Cm: messages, states, timers of connections (IBA chapter 12)
//!                                   │ notices                                       │ messages
//!                                   ▼                                               ▼
//!  events of programs ◄──── channels.rs ◄── notices.rs                        transmit.rs
//! ```
//!
//! An id of a program has at most one id of the communication manager: its listener, its connection, its question for a queue
//! pair. Ports are the RNIC's: all programs share its addresses. Everything belongs to a context and goes with it.
//!
//! A program moves with all it has: `moving.rs`. What comes for its ids at the old place is passed on.

mod attributes;
mod channels;
mod commands;
mod groups;
mod ids;
mod image;
mod moving;
mod notices;
mod options;
mod ports;
mod programs;
mod requests;
mod ways;

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use verbatim_cm::{CommId, Config, Gid, Limits as CmLimits, Outcome, QueuePairs, Transmit};
use verbatim_device::control::CmNews;
use verbatim_roce::Time;

pub use self::moving::{PASS_ON_QKEY, PassingOn};
pub use self::requests::Asking;

use self::channels::Channel;
use self::ids::{Id, Membership};
use self::moving::PassedOn;
use self::ports::Ports;
use self::programs::Programs;
use crate::config::Limits;
use crate::outbox::Outbox;
use crate::table::Table;

/// As many as a program has names for.
const MOST_IDS: u32 = 65_535;

/// How many programs' requests that nobody has taken are kept.
const MOST_PENDING: usize = 4096;

/// All of it.
#[derive(Debug)]
pub struct Manager {
    machine: verbatim_cm::Cm,
    channels: Table<Channel>,
    ids: Table<Id>,
    memberships: Table<Membership>,
    /// Ids by those of the machine.
    by_comm: HashMap<CommId, u32>,
    ports: Ports,
    programs: Programs,
    /// How many ids a program may have.
    most_of_context: usize,
    /// Hosts from which programs have come: they may pass on what comes for those.
    trusted: BTreeSet<Gid>,
    /// What is to be passed on.
    passing_on: Vec<PassingOn>,
    /// Channels to whose sockets something was written.
    pub told: Vec<u32>,
}

impl Manager {
    /// Of an RNIC with this GUID.
    pub fn new(guid: [u8; 8], limits: &Limits) -> Self {
        let most = limits.max_cm_ids.min(MOST_IDS);
        let config = Config {
            limits: CmLimits {
                ids: most as usize,
                ids_per_owner: limits.per_program.max_cm_ids as usize,
                pending: MOST_PENDING,
                ..CmLimits::default()
            },
            ..Config::new(u64::from_be_bytes(guid), rand::random())
        };
        Self {
            machine: verbatim_cm::Cm::new(config),
            channels: Table::new(1, most, 0),
            ids: Table::new(1, most, 0),
            memberships: Table::new(1, most, 0),
            by_comm: HashMap::new(),
            ports: Ports::default(),
            programs: Programs::default(),
            most_of_context: limits.per_program.max_cm_ids as usize,
            trusted: BTreeSet::new(),
            passing_on: Vec::new(),
            told: Vec::new(),
        }
    }

    /// A management datagram has come to queue pair 1.
    pub fn handle_mad(
        &mut self,
        now: Time,
        from: [u8; 16],
        to: [u8; 16],
        bytes: &[u8],
        gids: &[[u8; 16]],
        queue_pairs: &dyn QueuePairs,
    ) -> Outcome {
        self.arrived(
            now,
            PassedOn::direct(Gid(from), Gid(to)),
            bytes,
            gids,
            queue_pairs,
        )
    }

    /// The time has come that [`Self::next_deadline`] has named.
    pub fn handle_timeout(&mut self, now: Time, gids: &[[u8; 16]]) {
        if self.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.machine.handle_timeout(now);
            self.take_notices(now, gids);
        }
    }

    /// No RNIC is at that address.
    pub fn refused(&mut self, now: Time, peer: IpAddr) {
        self.machine.refused(now, peer);
    }

    /// When to be called again.
    pub fn next_deadline(&self) -> Option<Time> {
        self.machine.next_deadline()
    }

    /// The next message to send.
    pub fn next_transmit(&mut self) -> Option<Transmit> {
        self.machine.poll_transmit()
    }

    /// The socket of a channel.
    pub fn outbox(&mut self, channel: u32) -> Option<&mut Outbox<CmNews>> {
        self.channels.get_mut(channel)?.outbox.as_mut()
    }
}
