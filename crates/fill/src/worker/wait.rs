//! What the worker waits for.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::time::Timespec;

use crate::numbers::Numbers;
use crate::sys::descriptors;

/// Something is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ready {
    Guardian,
    Control,
    Client(RawFd),
    Listener,
    Criu,
    Task(u32),
}

const KIND: u64 = 1 << 32;

impl Ready {
    fn encode(self) -> u64 {
        match self {
            Self::Guardian => 0,
            Self::Control => KIND,
            Self::Client(fd) => 2 * KIND + fd as u64,
            Self::Listener => 3 * KIND,
            Self::Criu => 4 * KIND,
            Self::Task(index) => 5 * KIND + u64::from(index),
        }
    }

    fn decode(data: u64) -> Self {
        let low = data as u32;
        match data / KIND {
            0 => Self::Guardian,
            1 => Self::Control,
            2 => Self::Client(low as RawFd),
            3 => Self::Listener,
            4 => Self::Criu,
            _ => Self::Task(low),
        }
    }
}

/// An epoll(7), once there is one.
#[derive(Debug)]
pub struct Waiter {
    epoll: Option<OwnedFd>,
    numbers: Option<Numbers>,
}

impl Waiter {
    pub fn nothing() -> Self {
        Self {
            epoll: None,
            numbers: None,
        }
    }

    /// Waits for connections to our listener.
    ///
    /// # Panics
    /// If the kernel has no memory; the next worker tries again.
    pub fn new(numbers: Numbers) -> Self {
        let waiter = Self {
            epoll: Some(epoll::create(CreateFlags::CLOEXEC).expect("an epoll can be made")),
            numbers: Some(numbers),
        };
        waiter.add(numbers.control(), Ready::Control);
        waiter
    }

    /// Whether there is one.
    pub fn is_made(&self) -> bool {
        self.epoll.is_some()
    }

    fn epoll(&self) -> &OwnedFd {
        self.epoll.as_ref().expect("it is made before anything is added")
    }

    fn add(&self, number: RawFd, ready: Ready) {
        let data = EventData::new_u64(ready.encode());
        let added = epoll::add(self.epoll(), descriptors::at(number), data, EventFlags::IN);
        // One that a later number has replaced is still there in the table's eyes.
        assert!(
            matches!(added, Ok(()) | Err(rustix::io::Errno::EXIST)),
            "epoll: {added:?}"
        );
    }

    fn remove(&self, number: RawFd) {
        let _ = epoll::delete(self.epoll(), descriptors::at(number));
    }

    pub fn add_guardian(&self, guardian: BorrowedFd<'_>) {
        use std::os::fd::AsRawFd;
        self.add(guardian.as_raw_fd(), Ready::Guardian);
    }

    pub fn add_client(&self, fd: RawFd) {
        self.add(fd, Ready::Client(fd));
    }

    pub fn add_task(&self, index: u32) {
        let numbers = self.numbers.expect("it is made before anything is added");
        self.add(numbers.task(index), Ready::Task(index));
    }

    /// Before its descriptor is closed.
    pub fn remove_task(&self, index: u32) {
        let numbers = self.numbers.expect("it is made before anything is added");
        self.remove(numbers.task(index));
    }

    pub fn add_criu(&self, number: RawFd, is_connection: bool) {
        self.add(
            number,
            if is_connection {
                Ready::Criu
            } else {
                Ready::Listener
            },
        );
    }

    /// What is ready now, or, with a pause, is first within it.
    pub fn wait(&self, pause: Option<Duration>) -> Vec<Ready> {
        let mut events: [std::mem::MaybeUninit<Event>; 64] = [const { std::mem::MaybeUninit::uninit() }; 64];
        let wait = pause.unwrap_or_default();
        // epoll_wait(2) counts in ms. The pauses that are shorter wait for what no descriptor tells.
        let short = !wait.is_zero() && wait < Duration::from_millis(1);
        if short {
            std::thread::sleep(wait);
        }
        let wait = if short { Duration::ZERO } else { wait };
        let timeout = Timespec {
            tv_sec: wait.as_secs() as i64,
            tv_nsec: (wait.subsec_millis() * 1_000_000).into(),
        };
        match epoll::wait(self.epoll().as_fd(), &mut events[..], Some(&timeout)) {
            Ok((ready, _)) => ready
                .iter()
                .map(|event| Ready::decode(event.data.u64()))
                .collect(),
            Err(_) => Vec::new(),
        }
    }
}
