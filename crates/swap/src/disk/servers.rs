//! Servers: the state of each, and the handling of its news.

use std::time::Instant;

use rustix::event::epoll;
use tokio::sync::mpsc::UnboundedSender;
use verbatim_lease::{Copy, Event};

use super::{Disk, FLIGHTS, REMOTE};
use crate::link::{News, Wanted};
use crate::remote::{Flights, Remote};

/// State of a server's connection.
#[allow(
    clippy::large_enum_variant,
    reason = "there are two of them, and a box would be one more way to allocate"
)]
pub(super) enum Standing {
    Up(Remote),
    /// The connection is lost, and the server is being called. Requests wait, up to the deadline.
    Suspended(Instant),
    /// The server was given up, until it answers again.
    Down,
}

/// Kind of the next poll for completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Looks {
    /// When a completion makes an event.
    Then,
    /// At once, in any case.
    Again,
}

/// A server as the disk knows it.
pub struct Server {
    pub(super) host: String,
    pub(super) standing: Standing,
    pub(super) flights: Flights,
    wanted: UnboundedSender<Wanted>,
    pub(super) is_leaving: bool,
    /// The reason why it is not up.
    pub(super) why: String,
    /// Number of times that it was given up.
    pub(super) failures: u64,
    /// The lease is this host's. A lease that comes from another host belongs to that host until it is taken
    /// over.
    pub(super) is_ours: bool,
    /// The other server to which it wants its pages handed over.
    pub(super) hand_over: Option<String>,
    /// Number of times that its link has brought memory.
    pub(super) calls: u64,
}

impl Server {
    /// A server without news yet; orders to its link go to `wanted`.
    pub fn new(host: String, wanted: UnboundedSender<Wanted>) -> Self {
        Self {
            host,
            standing: Standing::Down,
            flights: Flights::new(FLIGHTS),
            wanted,
            is_leaving: false,
            why: String::new(),
            failures: 0,
            is_ours: true,
            hand_over: None,
            calls: 0,
        }
    }

    /// A link that has ended takes no orders.
    pub(super) fn want(&self, wanted: Wanted) {
        let _ = self.wanted.send(wanted);
    }
}

impl Disk {
    pub(super) fn news(&mut self, copy: Copy, news: News) {
        let Some(server) = self.servers[copy.index()].as_mut() else {
            // The link is about to end.
            return;
        };
        match news {
            News::Up { remote, kept } => {
                server.is_leaving = false;
                server.calls += 1;
                if !server.is_ours {
                    self.disconnect(copy);
                    self.connected(copy, remote);
                    return self.adopted(copy);
                }
                let was_down = matches!(server.standing, Standing::Down);
                self.disconnect(copy);
                if !kept && self.needs_no_more(copy) {
                    return self.drop_server(copy);
                }
                if !kept && !was_down {
                    self.give_up(copy, "its memory was lost".to_owned());
                }
                self.connected(copy, remote);
                // Otherwise nothing has changed for the engine.
                if was_down || !kept {
                    self.event(Event::Up { copy, kept });
                }
                if !kept {
                    self.is_new(copy);
                }
                self.leaves_again(copy);
                // The server may not have got the messages of the earlier connection.
                self.say_again(copy);
            }
            News::Lost => {
                if matches!(server.standing, Standing::Up(_)) {
                    // The link is calling already.
                    self.disconnect(copy);
                    let server = self.servers[copy.index()].as_mut().expect("it is there");
                    server.why = "its connection has ended".to_owned();
                }
            }
            News::Unreachable(why) => match server.standing {
                Standing::Down => server.why = why,
                Standing::Up(_) | Standing::Suspended(_) => self.give_up(copy, why),
            },
            News::Leaving => {
                server.is_leaving = true;
                if server.is_ours {
                    self.event(Event::Leaving { copy });
                }
            }
            News::Offered(by) => self.offered(copy, by),
            News::Deposited(by) => self.deposited(copy, by),
            News::Taken(map) => self.taken(copy, Some(&map)),
            News::NotTaken => self.taken(copy, None),
            News::Gone(to) => self.gone_to(to),
            News::HandOver(to) => self.hand_over_to(copy, to),
        }
    }

    fn connected(&mut self, copy: Copy, remote: Remote) {
        let registered = self.register(remote.events(), REMOTE + copy.index() as u64);
        let server = self.servers[copy.index()].as_mut().expect("it is there");
        server.flights.unpost();
        server.standing = Standing::Up(remote);
        server.why.clear();
        if let Err(errno) = registered {
            return self.suspend(copy, format!("epoll_ctl: {errno}"));
        }
        // From here on completions make events.
        self.completions(copy, Looks::Then);
    }

    /// Drops the queue pair: nothing lands in this host's memory any more.
    pub(super) fn disconnect(&mut self, copy: Copy) {
        let server = self.servers[copy.index()].as_mut().expect("it is there");
        if let Standing::Up(remote) = &server.standing {
            let _ = epoll::delete(&self.epoll, remote.events());
            server.standing = Standing::Suspended(Instant::now());
        }
    }

    /// Suspends a server: its requests wait while it is called again.
    fn suspend(&mut self, copy: Copy, why: String) {
        self.disconnect(copy);
        let server = self.servers[copy.index()].as_mut().expect("it is there");
        server.why = why;
        server.want(Wanted::Again);
    }

    /// Gives a server up: the other copy takes over.
    pub(super) fn give_up(&mut self, copy: Copy, why: String) {
        self.disconnect(copy);
        let server = self.servers[copy.index()].as_mut().expect("it is there");
        server.standing = Standing::Down;
        server.is_leaving = false;
        server.flights.clear();
        server.failures += 1;
        server.why = why;
        if server.is_ours {
            self.event(Event::Down { copy });
        }
    }

    /// A server that all pages have left.
    pub(super) fn left(&mut self, copy: Copy) {
        if self.has_handed_over(copy) {
            return;
        }
        if let Some(server) = &self.servers[copy.index()] {
            server.want(Wanted::Leave);
            self.give_up(copy, "it has left".to_owned());
        }
    }

    /// Handles completions; returns whether there were any.
    pub(super) fn completions(&mut self, copy: Copy, looks: Looks) -> bool {
        let Some(server) = &mut self.servers[copy.index()] else {
            return false;
        };
        let Standing::Up(remote) = &mut server.standing else {
            return false;
        };
        let done = match looks {
            Looks::Then => remote.progress(),
            Looks::Again => remote.look(),
        };
        let done = match done {
            Ok(done) => done,
            Err(error) => {
                self.suspend(copy, error.to_string());
                return true;
            }
        };
        let mut has_taken = false;
        loop {
            let server = self.servers[copy.index()].as_mut().expect("it is there");
            let Standing::Up(remote) = &mut server.standing else {
                return has_taken;
            };
            let flight = match remote.take(&mut server.flights, done, &mut self.blocks) {
                Ok(Some(flight)) => flight,
                Ok(None) => return has_taken,
                Err(error) => {
                    self.suspend(copy, error.to_string());
                    return true;
                }
            };
            has_taken = true;
            let (slot, result) = (flight.slot, Ok(()));
            self.event(match flight.is_write {
                true => Event::WriteDone { slot, copy, result },
                false => Event::ReadDone { slot, copy, result },
            });
        }
    }

    /// Posts requests to the RNIC.
    pub(super) fn post(&mut self) {
        for copy in Copy::BOTH {
            let Some(server) = &mut self.servers[copy.index()] else {
                continue;
            };
            let Standing::Up(remote) = &mut server.standing else {
                continue;
            };
            if let Err(error) = remote.post(&mut server.flights, &self.blocks) {
                self.suspend(copy, error.to_string());
            }
        }
    }

    /// The next deadline of a request or a suspended server.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let servers = self.servers.iter().flatten();
        let of_servers = servers.filter_map(|server| match &server.standing {
            Standing::Up(_) => server.flights.oldest(),
            Standing::Suspended(since) => Some(*since),
            Standing::Down => None,
        });
        let retry = self.retry + super::RETRY;
        let first = of_servers.min().map(|since| since + self.settings.deadline);
        first.into_iter().chain(self.move_deadline()).chain([retry]).min()
    }

    /// Gives up servers that take too long.
    pub(super) fn check_deadlines(&mut self) {
        for copy in Copy::BOTH {
            let Some(server) = &self.servers[copy.index()] else {
                continue;
            };
            let limit = self.settings.deadline;
            let oldest = server
                .flights
                .oldest()
                .is_some_and(|since| since.elapsed() >= limit);
            match &server.standing {
                Standing::Up(_) if oldest => {
                    server.want(Wanted::Again);
                    self.give_up(copy, format!("a page took longer than {} ms", limit.as_millis()));
                }
                Standing::Suspended(since) if oldest || since.elapsed() >= limit => {
                    let why = server.why.clone();
                    self.give_up(copy, why);
                }
                _ => {}
            }
        }
    }
}
