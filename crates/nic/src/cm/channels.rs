//! Channels, and the events that wait in them.

use std::collections::{HashSet, VecDeque};

use serde::{Deserialize, Serialize};
use verbatim_cm::CommId;
use verbatim_device::control::{CmEvent, CmNews};

use super::Manager;
use crate::outbox::Outbox;

/// What stands for an open `/dev/infiniband/rdma_cm`.
#[derive(Debug)]
pub struct Channel {
    pub context: u32,
    /// None until its program gives its end, after a move.
    pub outbox: Option<Outbox<CmNews>>,
    pub ids: HashSet<u32>,
    waiting: VecDeque<Waiting>,
}

/// An event that no program has taken yet.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Waiting {
    /// The id that it is about.
    pub id: u32,
    /// The id that counts it: of a new connection, the listening one.
    pub counts: u32,
    /// The membership that counts it too.
    pub membership: Option<u32>,
    /// The request of a peer that the program learns of.
    pub request: Option<CommId>,
    /// As the program is told, with its own name of the id.
    pub event: CmEvent,
}

impl Channel {
    pub fn new(context: u32, outbox: Option<Outbox<CmNews>>) -> Self {
        Self {
            context,
            outbox,
            ids: HashSet::new(),
            waiting: VecDeque::new(),
        }
    }

    /// The next event, and whether it was the last.
    pub fn take(&mut self) -> Option<(Waiting, bool)> {
        let waiting = self.waiting.pop_front()?;
        Some((waiting, self.waiting.is_empty()))
    }

    /// All that wait, the oldest first.
    pub fn waiting(&self) -> &VecDeque<Waiting> {
        &self.waiting
    }

    /// What waits from now on, without a message in the socket.
    pub fn set_waiting(&mut self, waiting: VecDeque<Waiting>) {
        self.waiting = waiting;
    }

    /// Takes those out for which that is true; says whether the channel had events, and has none now.
    pub fn take_out(&mut self, mut is_one: impl FnMut(&Waiting) -> bool) -> (Vec<Waiting>, bool) {
        let had_some = !self.waiting.is_empty();
        let (out, left): (Vec<_>, VecDeque<_>) =
            std::mem::take(&mut self.waiting)
                .into_iter()
                .fold(Default::default(), |mut parts, waiting| {
                    match is_one(&waiting) {
                        true => parts.0.push(waiting),
                        false => parts.1.push_back(waiting),
                    }
                    parts
                });
        self.waiting = left;
        (out, had_some && self.waiting.is_empty())
    }
}

impl Manager {
    /// Adds an event to a channel. The first one makes it readable.
    pub fn tell(&mut self, number: u32, waiting: Waiting) {
        let Some(channel) = self.channels.get_mut(number) else {
            return;
        };
        let is_first = channel.waiting.is_empty();
        channel.waiting.push_back(waiting);
        if is_first && let Some(outbox) = &mut channel.outbox {
            outbox.send(CmNews { channel: number });
            self.told.push(number);
        }
    }
}
