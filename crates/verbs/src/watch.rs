//! What the helper thread sleeps on: the agent's connection, the devices, and being woken.
//!
//! An `epoll` instance, since devices come and go while the thread sleeps, and since it must not keep a connection open
//! that a closed device had: the RNIC destroys a context when its last descriptor is closed.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec};
use rustix::io::Errno;

use crate::backend::Device;
use crate::error::VerbsError;
use crate::{held, nap};

const WAKE: u64 = 0;
const AGENT: u64 = 1;
/// A context's number is this much less than what its descriptors are known by.
const CONTEXTS: u64 = 2;

/// How many descriptors one look tells of; the others are told by the next.
const LOOK: usize = 8;

/// What a thread sleeps on.
#[derive(Debug)]
pub struct Watch {
    /// The process that made it: a forked child makes its own.
    pid: u32,
    /// Forgotten before they go.
    _held: [held::Held; 2],
    epoll: OwnedFd,
    wake: OwnedFd,
}

/// Whether a descriptor's other side is gone.
pub type HungUp = bool;

/// What woke it.
#[derive(Debug, Default)]
pub struct Ready {
    /// The agent has something to say, or is gone.
    pub agent: bool,
    /// Contexts with events, or with a descriptor whose other side is gone.
    pub contexts: Vec<(u32, HungUp)>,
}

impl Watch {
    pub fn new() -> Result<Self, VerbsError> {
        let epoll =
            epoll::create(CreateFlags::CLOEXEC).map_err(|errno| VerbsError::os("epoll_create1", errno))?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| VerbsError::os("eventfd", errno))?;
        let watch = Self {
            pid: std::process::id(),
            _held: [held::hold_fd(epoll.as_fd()), held::hold_fd(wake.as_fd())],
            epoll,
            wake,
        };
        watch.add(watch.wake.as_fd(), WAKE, EventFlags::IN);
        Ok(watch)
    }

    /// Whether it is this process's, and not its parent's.
    pub fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }

    /// What is not known yet is watched from now on; what is closed is forgotten by itself.
    fn add(&self, fd: BorrowedFd<'_>, token: u64, flags: EventFlags) {
        // Fails where it is watched already, or where memory is short: then its events come late or not at all, and the
        // program has them as an RNIC that is slow.
        let _ = epoll::add(&self.epoll, fd, EventData::new_u64(token), flags);
    }

    pub fn add_agent(&self, connection: BorrowedFd<'_>) {
        self.add(connection, AGENT, EventFlags::IN);
    }

    pub fn add_device(&self, context: u32, device: &dyn Device) {
        let watched = device.watch();
        let token = CONTEXTS + u64::from(context);
        if let Some(connection) = watched.connection {
            // That the other side is gone is told in any case. Answers are for who has asked.
            self.add(connection, token, EventFlags::empty());
        }
        if let Some(events) = watched.events {
            self.add(events, token, EventFlags::IN);
        }
    }

    /// No more of a device whose RNIC is gone.
    pub fn remove_device(&self, device: &dyn Device) {
        self.remove_events(device);
        if let Some(connection) = device.watch().connection {
            let _ = epoll::delete(&self.epoll, connection);
        }
    }

    /// No more of a device's events: nobody will send any.
    pub fn remove_events(&self, device: &dyn Device) {
        if let Some(events) = device.watch().events {
            let _ = epoll::delete(&self.epoll, events);
        }
    }

    /// Makes a wait that is under way, or else the next, end.
    pub fn wake(&self) {
        // Fails only when the counter is about to overflow.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Sleeps until there is something, or as long as that.
    pub fn wait(&self, timeout: Option<Duration>) -> Ready {
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let mut events = [const { std::mem::MaybeUninit::uninit() }; LOOK];
        // On the stack, as all that is touched asleep must be.
        let epoll = self.epoll.as_fd();
        let found = nap::asleep_while(|| epoll::wait(epoll, &mut events[..], timeout.as_ref()));
        let found = match found {
            Ok((found, _)) => &*found,
            Err(Errno::INTR) => &[],
            Err(_) => {
                // Cannot be, as long as the descriptor is ours. A program that has closed it gets no events, and no
                // thread that spins.
                nap::asleep_while(|| std::thread::sleep(Duration::from_millis(100)));
                &[]
            }
        };
        let mut ready = Ready::default();
        for event in found {
            match event.data.u64() {
                WAKE => _ = rustix::io::read(&self.wake, &mut [0; 8]),
                AGENT => ready.agent = true,
                token => {
                    let flags = event.flags;
                    let hung_up = flags.intersects(EventFlags::HUP | EventFlags::ERR);
                    ready.contexts.push(((token - CONTEXTS) as u32, hung_up));
                }
            }
        }
        ready
    }
}
