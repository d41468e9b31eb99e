//! One swap disk: a loop that waits for all events at once, and never for a single one.
//!
//! Once it runs, it allocates nothing on the path of a page: slots, queues and buffers are made before, and a
//! client that wants more than there are waits. A quarter of the slots is for reads, so that reads do not
//! wait for writes that cannot end.

mod client;
mod handing;
mod inbox;
mod moving;
mod servers;
mod status;
mod transfer;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use verbatim_lease::{Action, Config, Copy, Engine, Event, Extent, SlotId};

pub use inbox::{Answer, Inbox, Message, Order};
use servers::Looks;
pub use servers::Server;
pub use status::{CopyStatus, Status};

use crate::backup::{Backup, Job};
use crate::block::{Block, PAGE_BYTES, SLOT_PAGES, place};
use crate::remote::Flight;
use crate::wire::Session;
use client::{Client, Request, RequestId};
use handing::Handing;
use moving::{Leaving, Tenure, Waiting};

/// Number of requests in flight, each of up to [`SLOT_PAGES`].
pub const SLOTS: SlotId = 128;

/// Slots for reads only.
const FOR_READS: usize = SLOTS as usize / 4;

/// Clients at a time.
const CLIENTS: usize = 16;

/// Upper bound of the RDMA READs that slots may need, of different copies.
const FLIGHTS: usize = SLOTS as usize * SLOT_PAGES as usize;

/// Blocks for reads of a file.
const SPARES: usize = 16;

/// Time after which a copy that reported an error is tried again.
const RETRY: Duration = Duration::from_secs(5);

const WAKE: u64 = u64::MAX;
const REMOTE: u64 = u64::MAX - 2;

/// The stand-in for the first server.
#[allow(clippy::large_enum_variant, reason = "there is one, for a moment")]
pub enum Second {
    /// Nothing.
    None,
    /// A file, and its path for display.
    File(Backup, String),
    /// Another server.
    Server(Server),
}

/// Parameters of a disk.
pub struct Settings {
    /// The name.
    pub name: String,
    /// The length.
    pub bytes: u64,
    /// Limit for a server to transfer a page before it is given up.
    pub deadline: Duration,
    /// Time for which the disk looks for work before it sleeps.
    pub spin: Duration,
    /// The clients' address, if it is not the usual one.
    pub uri: Option<String>,
    /// The instance that the disk belongs to.
    pub instance: Option<String>,
    /// The session in which the disk comes here from another host. It is not served before the session is
    /// committed.
    pub arriving: Option<Session>,
    /// Begins to ask another server for memory.
    pub connect: Connect,
}

/// Begins to ask this server for memory for this copy. The result comes through the inbox.
pub type Connect = Box<dyn Fn(&str, Copy) -> anyhow::Result<Server> + Send>;

struct InUse {
    extent: Extent,
    /// The request; `None` for a refill.
    request: Option<RequestId>,
    is_released: bool,
    /// The slot's bytes are still to be sent.
    is_needed: bool,
}

/// The file as the disk uses it.
struct File {
    backup: Backup,
    path: String,
    spares: Vec<Box<Block>>,
    waiting: Vec<(SlotId, Extent)>,
    error: Option<i32>,
}

/// Parameters of the engine for a disk of this length.
fn config(bytes: u64) -> Config {
    Config {
        pages: bytes / PAGE_BYTES,
        slots: SLOTS,
        slot_pages: SLOT_PAGES,
        quirk: None,
    }
}

/// A disk, with all its resources.
pub struct Disk {
    settings: Settings,
    epoll: OwnedFd,
    inbox: Inbox,
    engine: Engine,
    actions: Vec<Action>,
    blocks: Vec<Arc<Block>>,
    slots: Vec<Option<InUse>>,
    free: Vec<SlotId>,
    servers: [Option<Server>; 2],
    file: Option<File>,
    clients: [Option<Client>; CLIENTS],
    client_numbers: u64,
    requests: Vec<Option<Request>>,
    counts: status::Totals,
    /// A copy that all pages have left.
    drained: Option<Copy>,
    refills: u32,
    retry: Instant,
    /// Whether the disk is served here.
    tenure: Tenure,
    /// Set while the disk may go to another host.
    leaving: Option<Leaving>,
    /// Set while a server hands its pages over to another one.
    handing: Option<Handing>,
    /// Commands without an answer.
    waiting: Vec<Waiting>,
}

impl Disk {
    /// A disk without connections yet; news of the servers come through the inbox.
    pub fn new(settings: Settings, inbox: Inbox, first: Server, second: Second) -> anyhow::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, inbox.wake(), EventData::new_u64(WAKE), EventFlags::IN)?;
        let config = config(settings.bytes);
        let tenure = match settings.arriving {
            None => Tenure::Serves,
            Some(by) => Tenure::arrives(by),
        };
        let mut first = first;
        first.is_ours = settings.arriving.is_none();
        let mut disk = Self {
            settings,
            epoll,
            inbox,
            engine: Engine::new(config),
            actions: Vec::with_capacity(FLIGHTS),
            blocks: (0..SLOTS).map(|_| Arc::from(Block::new())).collect(),
            slots: (0..SLOTS).map(|_| None).collect(),
            free: (0..SLOTS).rev().collect(),
            servers: [Some(first), None],
            file: None,
            clients: [const { None }; CLIENTS],
            client_numbers: 0,
            requests: (0..SLOTS).map(|_| None).collect(),
            counts: status::Totals::default(),
            drained: None,
            refills: 0,
            retry: Instant::now(),
            tenure,
            leaving: None,
            handing: None,
            waiting: Vec::new(),
        };
        match second {
            Second::None => {}
            Second::Server(mut server) => {
                server.is_ours = disk.settings.arriving.is_none();
                disk.servers[1] = Some(server);
            }
            Second::File(backup, path) => {
                disk.file = Some(File {
                    backup,
                    path,
                    spares: (0..SPARES).map(|_| Block::new()).collect(),
                    waiting: Vec::with_capacity(FLIGHTS),
                    error: None,
                });
                // The file is as empty as the engine assumes: no page of it counts before it was written.
                if disk.settings.arriving.is_none() {
                    disk.event(Event::Up {
                        copy: Copy::Second,
                        kept: false,
                    });
                }
            }
        }
        Ok(disk)
    }

    /// Serves until the disk is detached.
    pub fn run(mut self) -> anyhow::Result<()> {
        let mut events = Vec::with_capacity(64);
        let mut worked = Instant::now();
        let mut makes_events = true;
        loop {
            let spins = worked.elapsed() < self.settings.spin;
            let looks = if spins { Looks::Again } else { Looks::Then };
            // Completions make no event while the loop polls for them, so it polls once more before it waits.
            let mut waits = !spins;
            if spins || !makes_events {
                let found = Copy::BOTH.map(|copy| self.completions(copy, looks));
                makes_events = !spins;
                if found.contains(&true) {
                    worked = Instant::now();
                    waits = false;
                }
            }
            let limit = match waits {
                false => Some(Duration::ZERO),
                true => self
                    .next_deadline()
                    .map(|at| at.saturating_duration_since(Instant::now())),
            };
            let limit = limit.and_then(|left| rustix::event::Timespec::try_from(left).ok());
            events.clear();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                limit.as_ref(),
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(std::io::Error::from(errno).into()),
            }
            match events.is_empty() {
                // A process that shares the core may be about to cause the next event.
                true if !waits => rustix::thread::sched_yield(),
                true => {}
                false => worked = Instant::now(),
            }
            for event in &events {
                match event.data.u64() {
                    WAKE => {
                        if self.woken() {
                            return Ok(());
                        }
                    }
                    copy if copy >= REMOTE => {
                        self.completions(Copy::BOTH[(copy - REMOTE) as usize], looks);
                    }
                    client => self.serve(client as usize),
                }
            }
            self.tidy();
        }
    }

    /// Carries out all consequences of earlier events.
    fn tidy(&mut self) {
        self.check_deadlines();
        if self.retry.elapsed() >= RETRY {
            self.retry = Instant::now();
            self.event(Event::Retry);
        }
        self.look_at_move();
        self.look_at_handing();
        // A few refills beside the clients, more when they are quiet. A disk that is handed over stands
        // still.
        let most = match self.tenure {
            Tenure::Serves if self.free.len() + 4 >= SLOTS.into() => 4,
            Tenure::Serves => 1,
            _ => 0,
        };
        while self.engine.is_behind() && self.refills < most && self.free.len() > FOR_READS {
            let slot = *self.free.last().expect("there are some");
            if !self.engine.refill(slot, &mut self.actions) {
                self.act();
                // Before any other event: the other copy may be lost with the next one.
                if let Some(copy) = self.drained.take() {
                    self.left(copy);
                }
                break;
            }
            self.free.pop();
            self.refills += 1;
            let extent = self.actions.iter().find_map(|action| match action {
                Action::Read { extent, .. } => Some(*extent),
                _ => None,
            });
            self.slots[usize::from(slot)] = Some(InUse {
                extent: extent.expect("a refill reads one copy"),
                request: None,
                is_released: false,
                is_needed: false,
            });
            self.act();
        }
        loop {
            for client in 0..CLIENTS {
                if self.clients[client].as_ref().is_some_and(Client::is_held_up) {
                    self.serve(client);
                }
            }
            self.post();
            let mut has_sent = false;
            for client in 0..CLIENTS {
                has_sent |= self.answer(client);
            }
            // A held-up client may wait for an answer that has just left, and no event would wake this thread
            // for it.
            let waits = self.listens() && self.clients.iter().flatten().any(Client::is_held_up);
            if !(has_sent && waits) {
                return;
            }
        }
    }

    fn event(&mut self, event: Event) {
        self.engine.handle(event, &mut self.actions);
        self.act();
    }

    fn act(&mut self) {
        for at in 0..self.actions.len() {
            match self.actions[at] {
                Action::Read { slot, copy, extent } => match &mut self.servers[copy.index()] {
                    Some(server) => {
                        let first = self.slots[usize::from(slot)]
                            .as_ref()
                            .map_or(extent.page, |used| used.extent.page);
                        server.flights.push(Flight::new(slot, first, extent, false));
                    }
                    None => self.read_file(slot, extent),
                },
                Action::Write { slot, copy, extent } => match (&mut self.servers[copy.index()], &self.file) {
                    (Some(server), _) => server.flights.push(Flight::new(slot, extent.page, extent, true)),
                    (None, Some(file)) => {
                        let block = self.blocks[usize::from(slot)].clone();
                        file.backup.submit(Job::Write(slot, extent, block));
                    }
                    (None, None) => unreachable!("a copy that is not there is not written"),
                },
                Action::Clear { slot, extent } => {
                    let first = self.in_use(slot).extent.page;
                    self.block(slot)[place(first, extent)].fill(0);
                }
                Action::Reply { slot, result } => self.piece_done(slot, result),
                Action::Release { slot } => {
                    self.in_use(slot).is_released = true;
                    self.free_if_done(slot);
                }
                Action::Drained { copy } => self.drained = Some(copy),
            }
        }
        self.actions.clear();
    }

    fn in_use(&mut self, slot: SlotId) -> &mut InUse {
        self.slots[usize::from(slot)].as_mut().expect("it is in use")
    }

    /// The bytes of a slot that are not being written anywhere.
    fn block(&mut self, slot: SlotId) -> &mut [u8] {
        let block = Arc::get_mut(&mut self.blocks[usize::from(slot)]);
        block.expect("nobody else has it").bytes_mut()
    }

    fn free_if_done(&mut self, slot: SlotId) {
        let used = self.in_use(slot);
        if used.is_released && !used.is_needed {
            self.refills -= u32::from(used.request.is_none());
            self.slots[usize::from(slot)] = None;
            self.free.push(slot);
        }
    }

    /// Handles the messages of the inbox; returns whether one of them was the end.
    fn woken(&mut self) -> bool {
        self.inbox.quiet();
        while let Some(message) = self.inbox.take() {
            match message {
                Message::Client(stream) => self.client(stream, false),
                Message::Kernel(stream) => self.client(stream, true),
                Message::Link(copy, news) => self.news(copy, *news),
                Message::Order(order, answer) => {
                    if self.take_order(order, answer) {
                        return true;
                    }
                }
            }
        }
        self.file_done();
        false
    }

    /// Handles an order, which may be answered later; returns whether it was the end.
    fn take_order(&mut self, order: Order, answer: Answer) -> bool {
        let (said, is_end) = match self.order(&order) {
            Some(said) => said,
            None => {
                self.waiting.push(Waiting::new(order, answer));
                return false;
            }
        };
        // The command may have gone.
        let _ = answer.send(said);
        is_end
    }

    fn register(&self, fd: impl AsFd, number: u64) -> rustix::io::Result<()> {
        epoll::add(&self.epoll, fd, EventData::new_u64(number), EventFlags::IN)
    }
}
