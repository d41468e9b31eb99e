//! What happens while a queue pair runs and concerns others too, or the program.

use std::net::IpAddr;

use verbatim_device::control::{AsyncEvent, AsyncEventType};
use verbatim_roce::{Forwarded, Location};

/// A queue pair has heard from its partner by the secret of both.
#[derive(Debug)]
pub struct Heard {
    pub qpn: u32,
    /// Where the partner is, by its word.
    pub partner: Location,
    /// The packet has come from there, and no other RNIC has passed it on.
    pub is_direct: bool,
}

#[derive(Debug, Default)]
pub struct Effects {
    /// Completion queues that overran: their queue pairs go to ERR.
    pub overrun_cqs: Vec<u32>,
    /// Contexts whose files were truncated: their queue pairs go to ERR.
    pub truncated_contexts: Vec<u32>,
    /// Queue pairs with broken rings: they go to ERR.
    pub broken_qps: Vec<u32>,
    /// Queue pairs whose partner has gone on elsewhere, and where it was.
    pub moved_peers: Vec<(u32, IpAddr)>,
    /// Queue pairs that have heard from their partner by the secret of both, and where it is. They are looked at before anybody has a turn
    /// to send.
    pub heard_peers: Vec<Heard>,
    /// RESUMEs for queue pairs that have left, and the own address that they came to.
    pub forwarded: Vec<(Forwarded, IpAddr)>,
    /// Asynchronous events, with the contexts to tell.
    pub events: Vec<(u32, AsyncEvent)>,
}

impl Effects {
    pub fn is_empty(&self) -> bool {
        let Self {
            overrun_cqs,
            truncated_contexts,
            broken_qps,
            moved_peers,
            heard_peers: _,
            forwarded: _,
            events: _,
        } = self;
        overrun_cqs.is_empty()
            && truncated_contexts.is_empty()
            && broken_qps.is_empty()
            && moved_peers.is_empty()
    }

    /// A program is to be told.
    pub fn tell(&mut self, context: u32, event: AsyncEventType, object: u32) {
        self.events.push((context, AsyncEvent { event, object }));
    }
}
