//! Messages of other threads to the disk's thread.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::EventfdFlags;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use verbatim_lease::Copy;

use crate::link::News;
use crate::wire::Session;

/// An order of a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Report the state.
    Status,
    /// End the disk; with `force`, even while a client uses it.
    Detach {
        /// Clients get no answers any more.
        force: bool,
    },
    /// This host may take the disk over in this session of the agents, which decides about it. Answered when
    /// the disk's servers know.
    Follow {
        /// The host.
        to: String,
        /// The session.
        by: Session,
    },
    /// Answered when no page is only on this host, so that the disk can be held.
    Mirrored {
        /// The session.
        by: Session,
    },
    /// Hold the clients, and give the servers the map of the pages. The disk then waits for
    /// [`Order::Settle`].
    Hold {
        /// The session.
        by: Session,
    },
    /// The session is decided. Disks without a part in it get the same order.
    Settle {
        /// The session.
        by: Session,
        /// The disk belongs to the other host.
        is_committed: bool,
    },
}

/// A message to the disk.
pub enum Message {
    /// A client that has negotiated.
    Client(UnixStream),
    /// The kernel, as the client of a device.
    Kernel(UnixStream),
    /// News of the thread that calls a server.
    Link(Copy, Box<News>),
    /// An order of a command, which waits for the answer.
    Order(Order, Answer),
}

/// The channel for the answer to a command.
pub type Answer = oneshot::Sender<Result<super::Status, String>>;

struct Shared {
    messages: Mutex<VecDeque<Message>>,
    wake: Arc<OwnedFd>,
}

/// The queue of messages to the disk.
#[derive(Clone)]
pub struct Inbox(Arc<Shared>);

impl Inbox {
    /// An empty inbox.
    pub fn new() -> std::io::Result<Self> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(Shared {
            messages: Mutex::default(),
            wake: Arc::new(wake),
        })))
    }

    /// The descriptor that is written when there is a message; other threads may wake the disk by it, too.
    pub fn waker(&self) -> Arc<OwnedFd> {
        self.0.wake.clone()
    }

    /// Adds a message.
    pub fn put(&self, message: Message) {
        let mut messages = self.0.messages.lock().unwrap_or_else(PoisonError::into_inner);
        messages.push_back(message);
        drop(messages);
        // A write to an eventfd fails only when its count is about to overflow: then it is readable anyway.
        let _ = rustix::io::write(&*self.0.wake, &1u64.to_ne_bytes());
    }

    /// Adds news of the thread that calls a server.
    pub fn link(&self, copy: Copy, news: News) {
        self.put(Message::Link(copy, Box::new(news)));
    }

    pub(super) fn wake(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
    }

    /// Makes the descriptor unreadable until there is a new message.
    pub(super) fn quiet(&self) {
        let _ = rustix::io::read(&*self.0.wake, &mut [0; 8]);
    }

    pub(super) fn take(&self) -> Option<Message> {
        let mut messages = self.0.messages.lock().unwrap_or_else(PoisonError::into_inner);
        messages.pop_front()
    }
}
