//! The loop.
//!
//! ```text
//!  turn: control ─► doorbells ─► receive ─► timers ─► transmit ─► settle ─► statistics
//!                └──────── each marks the queue pairs that it touched ───────┘
//! ```
//!
//! Queue pairs that were touched take their turn to transmit (ACKs are made there too), and at the end of the turn their
//! timers and counters are brought up to date, once per turn however many packets came. A loop that finds nothing to do
//! looks again while a stream arrives ([`busy_poll`]); else it yields the core, and after [`NicConfig::spin`] it sleeps.

mod attention;
mod busy_poll;
mod capture;
mod confirming;
mod control;
mod core_watch;
mod lineup;
mod listeners;
mod management;
mod notify;
mod receive;
mod settle;
mod statistics;
mod transmit;
mod withheld;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use rustix::event::epoll::EventFlags;
use verbatim_device::control::QpClass;
use verbatim_roce::icrc::Flow;
use verbatim_roce::{Psn, Time, TxBatch, UDP_PORT};

use self::attention::Attention;
use self::busy_poll::{Amount, BusyPoll};
use self::control::{Clients, Endpoint};
use self::core_watch::CoreWatch;
use self::lineup::Lineup;
use crate::account::Account;
use crate::config::{HostNumber, NicConfig};
use crate::device::Device;
use crate::error::NicError;
use crate::interface::Interface;
use crate::link::LinkWatch;
use crate::objects::Objects;
use crate::poller::{Poller, Token, Wait, now};
use crate::qp::{Effects, QueuePair};
use crate::socket::{RECEIVE_BYTES, UdpPort};
use crate::stats::{NicCounters, STATS_NAME, StatsWriter};
use crate::tenant::Tenants;
use crate::timers::Timers;

/// How often an idle loop looks at its descriptors besides the UDP socket: every so many turns.
const IDLE_TURNS_PER_POLL: u32 = 8;

/// While more arrives than a turn takes, timers are looked at every so many turns only.
const TURNS_BEHIND_PER_EXPIRY: u32 = 16;

/// A software RNIC. It is made, runs and ends on one thread.
#[derive(Debug)]
pub struct Nic {
    device: Device,
    spin: Duration,
    runtime_dir: PathBuf,
    /// Sockets of the addresses in the GID table, in its order.
    ports: Vec<PortSocket>,
    /// The port that receives first in this turn.
    first_port: usize,
    /// The GID table.
    gids: Vec<[u8; 16]>,
    /// For what is received.
    buffer: Box<[u8]>,
    poller: Poller,
    main_listener: Endpoint,
    links: LinkWatch,
    listeners: listeners::Listeners,
    clients: Clients,
    tenants: Tenants,
    objects: Objects,
    effects: Effects,
    /// Queue pairs that something has happened to in this turn.
    touched: Touched,
    /// Queue pairs that wait for their turn to transmit.
    lineup: Lineup,
    timers: Timers,
    withheld: withheld::Withheld,
    busy_poll: BusyPoll,
    core: CoreWatch,
    /// Turns since all that had arrived was taken.
    turns_behind: u32,
    batch: TxBatch,
    blocked: transmit::Blocked,
    /// The latest PSN of queue pair 1.
    management_psn: Psn,
    /// Who has copies of all packets.
    captures: Vec<capture::Sink>,
    /// The connection that takes questions about other ends.
    asked: Option<u32>,
    /// The socket of that connection is full for so long.
    asked_full_until: Option<Time>,
    /// Batches that went nowhere.
    withheld_batches: u64,
    counters: NicCounters,
    stats: StatsWriter,
}

/// The socket of an own address.
#[derive(Debug)]
struct PortSocket {
    socket: UdpPort,
    /// From which requests of the communication manager go out, and its port.
    requests: Option<(UdpPort, u16)>,
    attention: Attention,
}

/// A list without duplicates: each queue pair knows whether it is in.
#[derive(Debug, Default)]
struct Touched(Vec<u32>);

impl Touched {
    #[inline]
    fn add(&mut self, qpn: u32, qp: &mut QueuePair) {
        if !qp.touched {
            qp.touched = true;
            self.0.push(qpn);
        }
    }
}

impl Nic {
    /// Binds the sockets: from now on programs can connect, though nobody answers before [`Nic::run`].
    pub fn new(config: NicConfig) -> Result<Self, NicError> {
        verbatim_mapped::install();
        let interface = Interface::find(&config)?;
        let address = interface.address();
        let host_number = config.host_number.unwrap_or_else(|| HostNumber::of(address));
        let ports = bind_ports(&interface, config.limits.socket_buffer_bytes)?;
        let gids: Vec<_> = ports.iter().map(|port| port.socket.address()).collect();
        let device = Device::new(&config, interface, &gids);
        let stats = StatsWriter::create(&config.runtime_dir.join(STATS_NAME))?;
        // Last of all that others see: who finds the socket finds the rest.
        let main_listener = Endpoint::bind(&config.runtime_dir)?;
        let poller = Poller::new()?;
        for (index, port) in (0..).zip(&ports) {
            poller.add(&port.socket, Token::Port(index))?;
            if let Some((socket, _)) = &port.requests {
                poller.add_edge(socket, Token::Requests(index))?;
            }
        }
        poller.add(&main_listener, Token::MainListener)?;
        let links = LinkWatch::open()?;
        poller.add(&links, Token::Links)?;
        let end = SocketAddr::new(address, UDP_PORT);
        let flow = Flow::new(end, end).expect("both are of one family");
        tracing::info!(
            name = device.attr.name,
            %address,
            interface = device.interface.name,
            mtu = device.interface.mtu,
            gids = gids.len(),
            host_number = host_number.get(),
            socket = %main_listener.path().display(),
            "the software RNIC is ready"
        );
        Ok(Self {
            clients: Clients::new(device.limits.max_contexts),
            tenants: Tenants::new(
                &device.limits,
                Rc::new(Account::of_all(&device.limits, device.locked)),
            ),
            gids: device.port.gid_table(),
            objects: Objects::new(&device.limits, host_number, device.attr.node_guid),
            device,
            spin: config.spin,
            runtime_dir: config.runtime_dir,
            ports,
            first_port: 0,
            buffer: vec![0; RECEIVE_BYTES].into_boxed_slice(),
            poller,
            main_listener,
            links,
            listeners: listeners::Listeners::default(),
            effects: Effects::default(),
            touched: Touched::default(),
            lineup: Lineup::default(),
            timers: Timers::default(),
            withheld: withheld::Withheld::default(),
            busy_poll: BusyPoll::default(),
            core: CoreWatch::default(),
            turns_behind: 0,
            batch: TxBatch::new(flow),
            blocked: transmit::Blocked::default(),
            management_psn: management::first_psn(),
            captures: Vec::new(),
            asked: None,
            asked_full_until: None,
            withheld_batches: 0,
            counters: NicCounters::default(),
            stats,
        })
    }

    /// The port's address.
    pub fn address(&self) -> IpAddr {
        self.device.interface.address()
    }

    /// Works until `stop` is readable.
    pub fn run(&mut self, stop: &OwnedFd) -> Result<(), NicError> {
        self.poller.add(stop, Token::Stop)?;
        self.core.begin();
        let mut last_work = now();
        let mut idle_turns = 0;
        let mut wait = Some(Wait::No);
        loop {
            let mut worked = false;
            if wait.is_some() || idle_turns % IDLE_TURNS_PER_POLL == 0 {
                match self.poll(wait.unwrap_or(Wait::No))? {
                    Polled::Stop => break,
                    Polled::Worked => worked = true,
                    Polled::Nothing => {}
                }
            }
            let time = now();
            self.watch_core(time);
            worked |= self.turn(time)?;
            if worked {
                self.counters.busy_turns += 1;
                self.publish();
                (last_work, idle_turns, wait) = (time, 0, Some(Wait::No));
                // Whoever the work was for may wait for this core.
                let is_done = self.turns_behind == 0 && !self.has_more(time);
                if is_done && self.spin.is_zero() && !self.busy_poll.is_on(time) {
                    wait = Some(self.nap(time));
                }
                continue;
            }
            idle_turns += 1;
            if self.busy_poll.is_on(time) {
                wait = None;
            } else if time - last_work < self.spin {
                wait = None;
                rustix::thread::sched_yield();
            } else {
                wait = Some(self.nap(time));
            }
        }
        self.clients.for_each_context(|_, context| context.arena.keep());
        tracing::info!(address = %self.address(), "the software RNIC ends");
        Ok(())
    }

    /// One turn of the data path; says whether there was anything to do.
    fn turn(&mut self, now: Time) -> Result<bool, NicError> {
        let NicCounters {
            rx_packets, rx_bytes, ..
        } = self.counters;
        self.lineup.begin();
        self.read_doorbells();
        // The answer that a timer waits for may be among what has not been taken yet.
        let all = self.receive(now);
        self.turns_behind = if all { 0 } else { self.turns_behind + 1 };
        if self.turns_behind.is_multiple_of(TURNS_BEHIND_PER_EXPIRY) {
            self.expire(now);
            self.objects.cm.handle_timeout(now, &self.gids);
        }
        self.hear_peers(now);
        self.ask_peers(now);
        self.release_due(now);
        self.line_up(now);
        self.transmit(now)?;
        self.apply_effects(now);
        self.notify();
        let worked = !self.touched.0.is_empty() || self.turns_behind > 0;
        self.settle(now);
        let arrivals = Amount {
            packets: self.counters.rx_packets - rx_packets,
            bytes: self.counters.rx_bytes - rx_bytes,
        };
        self.busy_poll.follow(now, arrivals, self::now);
        self.lineup.end(now, self::now);
        Ok(worked)
    }

    fn read_doorbells(&mut self) {
        let Self {
            clients,
            objects,
            touched,
            ..
        } = self;
        clients.for_each_context(|_, context| {
            context.drain_doorbells(|qpn| {
                if let Some(qp) = objects.qps.get_mut(qpn) {
                    touched.add(qpn, qp);
                }
            });
        });
    }

    fn expire(&mut self, now: Time) {
        while let Some((entry, qpn)) = self.timers.pop_due(now) {
            let Self {
                objects,
                effects,
                touched,
                ..
            } = self;
            let Some(qp) = objects.qps.get_mut(qpn) else {
                continue;
            };
            if !qp.alarm.rings(entry) || qp.stopped || qp.is_awaiting() {
                continue;
            }
            touched.add(qpn, qp);
            // In the background this comes with its turn: what it did not yet send for want of one, nobody can have answered.
            if qp.class == QpClass::User {
                ring(qpn, objects, effects, now);
            }
        }
    }

    /// Whoever was touched may have something to send.
    fn line_up(&mut self, now: Time) {
        for qpn in &self.touched.0 {
            if let Some(qp) = self.objects.qps.get_mut(*qpn) {
                self.lineup.join(*qpn, &mut qp.line, qp.class, now);
            }
        }
    }

    /// Whether somebody can send at once.
    fn has_more(&self, now: Time) -> bool {
        self.lineup.next().is_some_and(|next| next <= now)
    }

    /// Until when to sleep; programs are told to wake the RNIC meanwhile. Not at all if something has come up.
    fn nap(&mut self, now: Time) -> Wait {
        let deadlines = [
            self.timers.next(),
            self.withheld.next(&self.objects),
            self.objects.cm.next_deadline(),
            self.next_of_peers(),
            self.blocked.until(),
            self.core.next(),
            // Who is blocked is woken when there is room.
            self.lineup
                .next()
                .filter(|_| self.blocked == transmit::Blocked::No),
        ];
        let next = deadlines.into_iter().flatten().min();
        if next.is_some_and(|deadline| deadline <= now) {
            return Wait::No;
        }
        let Ok(gathered) = self.clients.fall_asleep(now) else {
            return Wait::No;
        };
        self.counters.sleeps += 1;
        self.publish();
        Wait::Until([next, gathered].into_iter().flatten().min())
    }

    fn publish(&mut self) {
        self.counters.contexts = self.clients.contexts() as u64;
        self.counters.tenant_refusals = self.tenants.refusals();
        self.counters.pds = self.objects.pds.len() as u64;
        let shared = &self.objects.shared;
        self.counters.mrs = shared.regions.len() as u64;
        self.counters.mws = shared.regions.windows() as u64;
        self.counters.cqs = shared.cqs.len() as u64;
        self.counters.srqs = shared.srqs.len() as u64;
        self.counters.ahs = shared.ahs.len() as u64;
        self.counters.groups = self.objects.groups.len() as u64;
        self.counters.qps = self.objects.qps.len() as u64;
        let migration = &self.objects.shared.migration;
        self.counters.pauses = migration.pauses;
        self.counters.pause_limit_exceeded = migration.pause_limit_exceeded;
        self.counters.tx_resumes = migration.sent_resumes;
        self.counters.rx_resumes = migration.rcvd_resumes;
        self.counters.migration_ignored =
            migration.migration_forged + migration.migration_replayed + migration.migration_refused;
        self.stats.publish(&self.counters);
    }
}

/// A queue pair's time has come.
fn ring(qpn: u32, objects: &mut Objects, effects: &mut Effects, now: Time) {
    let Objects { qps, shared, .. } = objects;
    let Some(qp) = qps.get_mut(qpn) else { return };
    let was_paused = qp.is_paused();
    let (transport, mut host) = qp.split(shared, effects, now);
    transport.handle_timeout(now, &mut host);
    if was_paused && !qp.is_paused() {
        objects.went_on(qpn, effects, now);
    }
}

/// What a look at the descriptors gave.
#[derive(Debug, PartialEq, Eq)]
enum Polled {
    Stop,
    Worked,
    Nothing,
}

impl Nic {
    /// Waits and serves what comes over sockets other than the UDP one.
    fn poll(&mut self, wait: Wait) -> Result<Polled, NicError> {
        let slept = wait != Wait::No;
        self.poller.wait(wait)?;
        if slept {
            self.clients.wake_up();
        }
        let time = now();
        let mut polled = Polled::Nothing;
        while let Some((token, events)) = self.poller.take() {
            match token {
                Token::Stop => return Ok(Polled::Stop),
                // The turn receives.
                Token::Port(index) => {
                    if events.contains(EventFlags::OUT) {
                        self.unblock()?;
                    }
                    self.ports[index as usize].attention.announce();
                    continue;
                }
                Token::Requests(index) => self.take_refusals(index as usize, time),
                Token::Group(id) => {
                    if let Some(group) = self.objects.groups.get_mut(id) {
                        group.readable = true;
                    }
                    continue;
                }
                Token::Channel(id) => self.flush_channel(id),
                Token::CmChannel(id) => self.flush_cm_channel(id),
                Token::Events(id) => self.flush_events(id),
                // These are only there to wake the loop; the turn reads the doorbells and looks at the time.
                Token::Doorbell(_) | Token::Clock => continue,
                Token::MainListener => self.accept(token),
                Token::Links => {
                    self.links.take();
                    self.device.follow_link();
                }
                Token::Listener(id) => {
                    self.accept(token);
                    // One that was shut down is readable for ever, and on a non-blocking one accept4 only ever says EAGAIN.
                    if events.contains(EventFlags::HUP) {
                        self.forget_listener(id);
                    }
                }
                Token::Client(id) => {
                    // What it asks for may take queue pairs away, and so does its end.
                    self.release_all(time)?;
                    self.serve(id, time);
                }
            }
            polled = Polled::Worked;
        }
        Ok(polled)
    }
}

/// The port's own address must be free; others of the interface may belong to another RNIC.
fn bind_ports(interface: &Interface, buffer_bytes: usize) -> Result<Vec<PortSocket>, NicError> {
    let mut ports = Vec::new();
    for address in &interface.addresses {
        match UdpPort::bind(*address, interface.index, UDP_PORT, buffer_bytes) {
            Ok(socket) => ports.push(PortSocket {
                socket,
                requests: management::bind_for_requests(*address, interface.index),
                attention: Attention::default(),
            }),
            Err(error) if ports.is_empty() => return Err(error),
            Err(error) => tracing::warn!(%address, %error, "the address is left out of the GID table"),
        }
    }
    Ok(ports)
}

impl Drop for Nic {
    fn drop(&mut self) {
        for name in [verbatim_device::control::SOCKET_NAME, STATS_NAME] {
            // They may be gone with their folder.
            let _ = std::fs::remove_file(self.runtime_dir.join(name));
        }
    }
}
