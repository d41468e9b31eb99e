//! A disk that goes to another host with its instance: the session of the agents decides, and the disks of both hosts obey.
//!
//! ```text
//!  source: serves ─ Follow, Mirrored ─ Hold ─► held ─┬─ committed ───► moved
//!                                                    └─ rolled back ─► serves
//!  destination:            arriving ─► ready ────────┬─ committed ───► serves, when a server has given it the lease
//!                                                    └─ rolled back ─► (detached)
//! ```
//!
//! Neither `held` nor `ready` changes by itself. Each server fences the source by itself ([`crate::server`]),
//! so that the pages are right even if the source does not learn of the commit, or goes on in spite of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use verbatim_lease::{Copy, Engine, Event, Map};

use super::servers::Standing;
use super::{Answer, Disk, Order, Status, config};
use crate::block::PAGE_BYTES;
use crate::link::Wanted;
use crate::wire::Session;

/// Limit for servers to learn of an offer.
const FOLLOW_LIMIT: Duration = Duration::from_secs(10);

/// Limit for pages that are only on this host to reach their servers.
const MIRROR_LIMIT: Duration = Duration::from_secs(600);

/// Limit for a hold, while the instance stands still.
const HOLD_LIMIT: Duration = Duration::from_secs(10);

/// Limit for the wait for the map of the pages, when the session is committed and no server answers. After it
/// all pages are lost.
const TAKE_LIMIT: Duration = Duration::from_secs(60);

/// Whether a disk is served here.
pub(super) enum Tenure {
    /// The disk is served here.
    Serves,
    /// Clients wait until the session is decided.
    Held,
    /// The disk comes from another host.
    Arrives {
        by: Session,
        /// Time of the commit of the session.
        committed: Option<Instant>,
    },
    /// The disk belongs to this host.
    Gone(String),
}

impl Tenure {
    pub(super) fn arrives(by: Session) -> Self {
        Self::Arrives { by, committed: None }
    }
}

/// A disk that may go to another host.
pub(super) struct Leaving {
    to: String,
    by: Session,
    /// Servers that know of the offer.
    offered: [bool; 2],
    /// Servers that have the map of the pages.
    deposited: [bool; 2],
    /// The map of the pages, once the disk stands still.
    map: Option<Arc<[u8]>>,
    /// Servers that have lost their memory since then. The map does not describe their new memory, which must
    /// not be adopted.
    lost: [bool; 2],
}

/// A command without an answer.
pub(super) struct Waiting {
    order: Order,
    answer: Answer,
    since: Instant,
}

impl Waiting {
    pub(super) fn new(order: Order, answer: Answer) -> Self {
        let since = Instant::now();
        Self { order, answer, since }
    }

    fn limit(&self) -> Instant {
        let limit = match self.order {
            Order::Mirrored { .. } => MIRROR_LIMIT,
            Order::Hold { .. } => HOLD_LIMIT,
            _ => FOLLOW_LIMIT,
        };
        self.since + limit
    }
}

impl Disk {
    /// Whether requests of clients are read.
    pub(super) fn listens(&self) -> bool {
        matches!(self.tenure, Tenure::Serves | Tenure::Gone(_))
    }

    /// Whether the disk belongs to another host.
    pub(super) fn is_gone(&self) -> bool {
        matches!(self.tenure, Tenure::Gone(_))
    }

    /// Whether the disk waits for a decision.
    pub(super) fn is_held(&self) -> bool {
        matches!(self.tenure, Tenure::Held)
    }

    pub(super) fn role(&self) -> &'static str {
        match &self.tenure {
            Tenure::Serves => "serving",
            Tenure::Held => "held",
            Tenure::Arrives { .. } if self.why_not_ready().is_none() => "ready",
            Tenure::Arrives { .. } => "arriving",
            Tenure::Gone(_) => "moved",
        }
    }

    pub(super) fn other_host(&self) -> Option<String> {
        match &self.tenure {
            Tenure::Gone(to) => Some(to.clone()),
            _ => self.leaving.as_ref().map(|leaving| leaving.to.clone()),
        }
    }

    /// The copies that are servers' memory.
    fn of_servers(&self) -> [bool; 2] {
        Copy::BOTH.map(|copy| self.servers[copy.index()].is_some())
    }

    /// The reason why a server is not ready, if one is not.
    fn why_not_ready(&self) -> Option<String> {
        let mut servers = self.servers.iter().flatten();
        let lost = servers.find(|server| !matches!(server.standing, Standing::Up(_)) || server.is_leaving)?;
        let why = match lost.is_leaving {
            true => "it is about to end",
            false => lost.why.as_str(),
        };
        Some(format!("the memory server of {} is not there: {why}", lost.host))
    }

    /// The answer to an order about a move, if there is one already.
    pub(super) fn order_of_move(&mut self, order: &Order) -> Option<Result<Status, String>> {
        let begun = match order {
            Order::Follow { to, by } => self.follow(to, *by),
            Order::Hold { by } => self.hold(*by),
            Order::Settle { by, is_committed } => {
                self.settle(*by, *is_committed);
                return Some(Ok(self.status()));
            }
            _ => Ok(()),
        };
        begun.err().map(Err).or_else(|| self.is_done(order))
    }

    fn follow(&mut self, to: &str, by: Session) -> Result<(), String> {
        if !matches!(self.tenure, Tenure::Serves) {
            return Err(format!("it is {} here", self.role()));
        }
        if self.handing.is_some() {
            return Err("its pages are just going to another memory server".to_owned());
        }
        if self.clients.iter().flatten().any(super::Client::is_kernel) {
            return Err("it is a block device of this machine, and does not move".to_owned());
        }
        if let Some(why) = self.why_not_ready() {
            return Err(why);
        }
        if let Some(server) = self.servers.iter().flatten().find(|server| !server.is_ours) {
            return Err(format!("{} has not given it to this host yet", server.host));
        }
        self.leaving = Some(Leaving {
            to: to.to_owned(),
            by,
            offered: [false; 2],
            deposited: [false; 2],
            map: None,
            lost: [false; 2],
        });
        for copy in Copy::BOTH {
            self.say_again(copy);
        }
        Ok(())
    }

    fn hold(&mut self, by: Session) -> Result<(), String> {
        let leaving = self.leaving.as_ref().filter(|leaving| leaving.by == by);
        match (leaving, &self.tenure) {
            (Some(_), Tenure::Serves) => self.tenure = Tenure::Held,
            (Some(_), Tenure::Held) => {}
            _ => return Err("it does not move in that session".to_owned()),
        }
        self.hand_over();
        Ok(())
    }

    /// Whether a waiting order is done, or has failed.
    fn is_done(&self, order: &Order) -> Option<Result<Status, String>> {
        let by = match order {
            Order::Follow { by, .. } | Order::Mirrored { by } | Order::Hold { by } => *by,
            _ => return Some(Err("no order to wait for".to_owned())),
        };
        let Some(leaving) = self.leaving.as_ref().filter(|leaving| leaving.by == by) else {
            return Some(Err("it does not move in that session (any more)".to_owned()));
        };
        let all = |done: [bool; 2]| {
            Copy::BOTH
                .iter()
                .all(|copy| done[copy.index()] || self.servers[copy.index()].is_none())
        };
        if leaving.lost.contains(&true) {
            return Some(Err("a memory server has lost what it had".to_owned()));
        }
        let is_done = match order {
            Order::Follow { .. } => all(leaving.offered),
            Order::Mirrored { .. } => self.engine.stays_behind(self.of_servers()) == 0,
            _ => leaving.map.is_some() && all(leaving.deposited),
        };
        match is_done {
            true => Some(Ok(self.status())),
            // Waiting would be in vain.
            false => self.why_not_ready().map(Err),
        }
    }

    /// Handles the consequences for a move: answers commands, and gives up waits that take too long.
    pub(super) fn look_at_move(&mut self) {
        if matches!(self.tenure, Tenure::Held) {
            self.hand_over();
        }
        let now = Instant::now();
        let mut at = 0;
        while at < self.waiting.len() {
            let done = self.is_done(&self.waiting[at].order);
            let is_late = self.waiting[at].limit() <= now;
            if done.is_none() && !is_late {
                at += 1;
                continue;
            }
            let Waiting { order, answer, .. } = self.waiting.swap_remove(at);
            let said = done.unwrap_or_else(|| Err(self.too_late(&order)));
            // The command may have gone.
            let _ = answer.send(said);
        }
        if let Tenure::Arrives {
            committed: Some(since),
            ..
        } = self.tenure
            && since.elapsed() >= TAKE_LIMIT
        {
            tracing::error!("no server gives the lease; all that was on the disk is lost");
            self.begin_here(&Map::lost(self.settings.bytes / PAGE_BYTES), None);
            self.listen_again();
        }
    }

    fn too_late(&self, order: &Order) -> String {
        match order {
            Order::Follow { .. } => "a memory server does not answer".to_owned(),
            _ => format!(
                "{} pages are on this host alone, and the rest is not at rest or not told",
                self.engine.stays_behind(self.of_servers())
            ),
        }
    }

    /// The time at which a wait of a move is given up.
    pub(super) fn move_deadline(&self) -> Option<Instant> {
        let orders = self.waiting.iter().map(Waiting::limit);
        let arrival = match self.tenure {
            Tenure::Arrives { committed, .. } => committed.map(|since| since + TAKE_LIMIT),
            _ => None,
        };
        orders.chain(arrival).min()
    }

    /// Gives each server the map of the pages, once no request is in flight.
    fn hand_over(&mut self) {
        let goes = self.of_servers();
        let Some(leaving) = self.leaving.as_mut().filter(|leaving| leaving.map.is_none()) else {
            return;
        };
        let Some(map) = self.engine.hand_over(goes) else {
            return;
        };
        // The disk on the other host has its first server as the first copy, also after a hand-over here.
        let map = match goes {
            [false, true] => map.exchanged(),
            _ => map,
        };
        leaving.map = Some(map.to_bytes().into());
        for copy in Copy::BOTH {
            self.say_again(copy);
        }
    }

    /// A server has other memory than before.
    pub(super) fn is_new(&mut self, copy: Copy) {
        if let Some(leaving) = self.leaving.as_mut().filter(|leaving| leaving.map.is_some()) {
            leaving.lost[copy.index()] = true;
        }
    }

    /// Tells a server everything about a move that it may not know.
    pub(super) fn say_again(&mut self, copy: Copy) {
        let (Some(leaving), Some(server)) = (&mut self.leaving, &self.servers[copy.index()]) else {
            return;
        };
        leaving.offered[copy.index()] = false;
        leaving.deposited[copy.index()] = false;
        if leaving.lost[copy.index()] {
            return;
        }
        let (to, by, call) = (leaving.to.clone(), leaving.by, server.calls);
        server.want(Wanted::Offer { to, by, call });
        if let Some(map) = leaving.map.clone() {
            server.want(Wanted::Deposit { by, map, call });
        }
    }

    pub(super) fn offered(&mut self, copy: Copy, by: Session) {
        if let Some(leaving) = self.leaving.as_mut().filter(|leaving| leaving.by == by) {
            leaving.offered[copy.index()] = true;
        }
    }

    pub(super) fn deposited(&mut self, copy: Copy, by: Session) {
        if let Some(leaving) = self.leaving.as_mut().filter(|leaving| leaving.by == by) {
            leaving.deposited[copy.index()] = true;
        }
    }

    /// The session is decided.
    fn settle(&mut self, by: Session, is_committed: bool) {
        if let Tenure::Arrives { by: waits, committed } = &mut self.tenure {
            if *waits == by && is_committed && committed.is_none() {
                *committed = Some(Instant::now());
                for copy in Copy::BOTH {
                    self.adopted(copy);
                }
            }
            return;
        }
        let Some(leaving) = self.leaving.take_if(|leaving| leaving.by == by) else {
            return;
        };
        if is_committed {
            return self.gone_to(leaving.to);
        }
        for server in self.servers.iter().flatten() {
            server.want(Wanted::Withdraw { by });
        }
        if matches!(self.tenure, Tenure::Held) {
            self.tenure = Tenure::Serves;
            self.listen_again();
        }
    }

    /// The disk belongs to another host: further requests here are refused.
    pub(super) fn gone_to(&mut self, to: String) {
        if !self.is_gone() {
            tracing::info!("the disk is that of {to} now");
        }
        self.tenure = Tenure::Gone(to);
        self.leaving = None;
        self.listen_again();
    }

    /// A server has memory for the disk whose lease is still another host's. The lease is taken over if the
    /// session is committed.
    pub(super) fn adopted(&mut self, copy: Copy) {
        let by = match (&self.tenure, self.settings.arriving) {
            (
                Tenure::Arrives {
                    by,
                    committed: Some(_),
                },
                _,
            ) => *by,
            // Another server was faster.
            (Tenure::Serves, Some(by)) => by,
            _ => return,
        };
        if let Some(server) = self.servers[copy.index()]
            .as_ref()
            .filter(|server| !server.is_ours)
        {
            server.want(Wanted::TakeOver { by });
        }
    }

    /// A server has given the lease to this host, with the map of the pages; or the lease no longer exists.
    pub(super) fn taken(&mut self, copy: Copy, map: Option<&[u8]>) {
        let Some(server) = self.servers[copy.index()]
            .as_mut()
            .filter(|server| !server.is_ours)
        else {
            return;
        };
        server.is_ours = true;
        let pages = self.settings.bytes / PAGE_BYTES;
        if let Tenure::Arrives { .. } = self.tenure {
            let is_last = self.servers.iter().flatten().all(|server| server.is_ours);
            match map.and_then(|bytes| Map::from_bytes(pages, bytes)) {
                Some(map) => self.begin_here(&map, Some(copy)),
                None if is_last => {
                    tracing::error!(
                        "the lease has ended before it was taken over; all that was on the disk is lost"
                    );
                    self.begin_here(&Map::lost(pages), Some(copy));
                }
                None => {}
            }
        }
        let server = self.servers[copy.index()].as_mut().expect("it is there");
        if map.is_some() && matches!(server.standing, Standing::Up(_)) {
            self.begins(copy, true);
        } else {
            // The link's next news are the same lease again, or another one.
            self.disconnect(copy);
            let server = self.servers[copy.index()].as_mut().expect("it is there");
            server.standing = Standing::Down;
        }
        if matches!(self.tenure, Tenure::Serves) {
            self.listen_again();
        }
    }

    /// Serves the disk from now on; clients' requests are read when there is a copy. `answered`: the server
    /// that has given the map, or has said that there is none.
    fn begin_here(&mut self, map: &Map, answered: Option<Copy>) {
        self.engine = Engine::taken_over(config(self.settings.bytes), map.clone());
        self.tenure = Tenure::Serves;
        for copy in Copy::BOTH.into_iter().filter(|copy| Some(*copy) != answered) {
            let Some(server) = self.servers[copy.index()]
                .as_ref()
                .filter(|server| server.is_ours)
            else {
                continue;
            };
            // It has lost the lease that the map is of, and may have given another one meanwhile.
            let is_down = matches!(server.standing, Standing::Down);
            self.begins(copy, false);
            if is_down {
                self.event(Event::Down { copy });
            }
        }
        if self.file.is_some() {
            // The file is new here, and is filled.
            let copy = Copy::Second;
            self.event(Event::Up { copy, kept: false });
        }
    }

    /// The engine has this server's memory from now on.
    fn begins(&mut self, copy: Copy, kept: bool) {
        self.event(Event::Up { copy, kept });
        let server = &self.servers[copy.index()];
        if server.as_ref().is_some_and(|server| server.is_leaving) {
            self.event(Event::Leaving { copy });
        }
    }
}
