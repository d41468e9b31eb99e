//! What other threads tell the disk's.

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

/// What a command wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// How it is.
    Status,
    /// The end; with `force`, even while a client uses it.
    Detach {
        /// Clients get no answers any more.
        force: bool,
    },
    /// That host may take it over in that session of the agents, which decides what becomes of it. Answered when its servers know.
    Follow {
        /// The host.
        to: String,
        /// The session.
        by: Session,
    },
    /// Answered when no page is here alone, so that it can be held.
    Mirrored {
        /// The session.
        by: Session,
    },
    /// Clients wait, and its servers get what is known of its pages. Then it waits for [`Order::Settle`].
    Hold {
        /// The session.
        by: Session,
    },
    /// That session is decided. The same to whatever has no part in it.
    Settle {
        /// The session.
        by: Session,
        /// It is the other host's.
        is_committed: bool,
    },
}

/// Something for the disk.
pub enum Message {
    /// A client that has negotiated.
    Client(UnixStream),
    /// The kernel, as the client of a device.
    Kernel(UnixStream),
    /// From the thread that looks after a server.
    Link(Copy, Box<News>),
    /// From a command, which waits for the answer.
    Order(Order, Answer),
}

/// Where the answer to a command goes.
pub type Answer = oneshot::Sender<Result<super::Status, String>>;

struct Shared {
    messages: Mutex<VecDeque<Message>>,
    wake: Arc<OwnedFd>,
}

/// Where that goes.
#[derive(Clone)]
pub struct Inbox(Arc<Shared>);

impl Inbox {
    /// An empty one.
    pub fn new() -> std::io::Result<Self> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(Shared {
            messages: Mutex::default(),
            wake: Arc::new(wake),
        })))
    }

    /// What is written when there is something; for others that wake the disk, too.
    pub fn waker(&self) -> Arc<OwnedFd> {
        self.0.wake.clone()
    }

    /// A message.
    pub fn put(&self, message: Message) {
        let mut messages = self.0.messages.lock().unwrap_or_else(PoisonError::into_inner);
        messages.push_back(message);
        drop(messages);
        // An eventfd takes a write unless its count is about to overflow: then it is readable, too.
        let _ = rustix::io::write(&*self.0.wake, &1u64.to_ne_bytes());
    }

    /// From the thread that looks after a server.
    pub fn link(&self, copy: Copy, news: News) {
        self.put(Message::Link(copy, Box::new(news)));
    }

    pub(super) fn wake(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
    }

    /// Not readable any more, until something new is there.
    pub(super) fn quiet(&self) {
        let _ = rustix::io::read(&*self.0.wake, &mut [0; 8]);
    }

    pub(super) fn take(&self) -> Option<Message> {
        let mut messages = self.0.messages.lock().unwrap_or_else(PoisonError::into_inner);
        messages.pop_front()
    }
}
