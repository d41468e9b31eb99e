//! Algorithm 1 of the paper, as printed, in the engine's place.

use std::collections::BTreeMap;

use verbatim_mirror::{
    Action, Config, Ended, Engine, Event, Extent, Failure, Op, Report, RequestId, Standing, Ticket, Time,
};

/// The interface of the algorithm at the source.
pub trait Machine {
    fn handle(&mut self, now: Time, event: Event, actions: &mut Vec<Action>);
    fn standing(&self) -> Standing;
}

impl Machine for Engine {
    fn handle(&mut self, now: Time, event: Event, actions: &mut Vec<Action>) {
        Engine::handle(self, now, event, actions);
    }

    fn standing(&self) -> Standing {
        Engine::standing(self)
    }
}

/// The repaired holes of the algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mended {
    /// A chunk is read only when no change of it is in flight.
    pub waits_before_read: bool,
    /// Changes of a chunk in flight have to wait.
    pub locks: bool,
}

/// TH.
const DEPTH: usize = 4;

struct Request {
    op: Op,
    local: bool,
    mirror: bool,
    result: Result<(), Failure>,
}

pub struct Paper {
    mended: Mended,
    chunk_bytes: u64,
    length: u64,
    standing: Standing,
    is_moving: bool,
    is_up: bool,
    /// In chunks.
    head: u64,
    tail: u64,
    requests: BTreeMap<RequestId, Request>,
    waiting: Vec<(RequestId, Op)>,
    /// Copies, and whether they are being read already.
    copies: BTreeMap<Ticket, (Extent, bool)>,
    flush: Option<Ticket>,
    is_mirrored: bool,
    tickets: u64,
}

impl Paper {
    pub fn new(config: Config, length: u64, mended: Mended) -> Self {
        Self {
            mended,
            chunk_bytes: config.chunk_bytes,
            length,
            standing: Standing::Serving,
            is_moving: false,
            is_up: false,
            head: 0,
            tail: 0,
            requests: BTreeMap::new(),
            waiting: Vec::new(),
            copies: BTreeMap::new(),
            flush: None,
            is_mirrored: false,
            tickets: 0,
        }
    }

    fn chunks(&self) -> u64 {
        self.length.div_ceil(self.chunk_bytes)
    }

    fn begin(&mut self, id: RequestId, op: Op, actions: &mut Vec<Action>) {
        let mut mirror = false;
        if let Op::Change(extent) = op {
            // Line 10: address < LM_Head.
            mirror = self.is_up && extent.offset < self.head * self.chunk_bytes;
        }
        let request = Request {
            op,
            local: true,
            mirror,
            result: Ok(()),
        };
        self.requests.insert(id, request);
        actions.push(Action::Local { id });
        if mirror {
            actions.push(Action::Mirror { id });
        }
    }

    fn is_locked(&self, op: Op) -> bool {
        match op {
            Op::Change(extent) => {
                self.mended.locks && self.copies.values().any(|(chunk, _)| chunk.overlaps(extent))
            }
            Op::Read | Op::Flush => false,
        }
    }

    fn finish(&mut self, id: RequestId, actions: &mut Vec<Action>) {
        if let Some(request) = self.requests.get(&id)
            && !request.local
            && !request.mirror
        {
            let result = request.result;
            self.requests.remove(&id);
            actions.push(Action::Reply { id, result });
        }
    }

    fn stop(&mut self, actions: &mut Vec<Action>) {
        self.is_moving = false;
        self.is_up = false;
        self.copies.clear();
        (self.head, self.tail, self.is_mirrored, self.flush) = (0, 0, false, None);
        self.standing = Standing::Serving;
        let ids: Vec<_> = self.requests.keys().copied().collect();
        for id in ids {
            self.requests.get_mut(&id).expect("it is there").mirror = false;
            self.finish(id, actions);
        }
        actions.push(Action::Disconnect);
        actions.push(Action::Report(Report::Ended(Ended::Cancelled)));
    }

    fn after(&mut self, actions: &mut Vec<Action>) {
        if self.standing == Standing::Serving {
            for (id, op) in std::mem::take(&mut self.waiting) {
                match self.is_locked(op) {
                    true => self.waiting.push((id, op)),
                    false => self.begin(id, op, actions),
                }
            }
        }
        // Lines 4 to 8.
        while self.is_up
            && self.head < self.chunks()
            && (self.head - self.tail) as usize + self.requests.len() < DEPTH
        {
            self.tickets += 1;
            let extent = Extent::of_chunk(self.head, self.chunk_bytes, self.length);
            self.copies.insert(Ticket(self.tickets), (extent, false));
            self.head += 1;
        }
        for (&ticket, (extent, is_read)) in &mut self.copies {
            let mut requests = self.requests.values();
            let is_busy = self.mended.waits_before_read
                && requests.any(|request| matches!(request.op, Op::Change(other) if other.overlaps(*extent)));
            if !*is_read && !is_busy {
                *is_read = true;
                let extent = *extent;
                actions.push(Action::ReadChunk { ticket, extent });
            }
        }
        if self.is_up && self.tail == self.chunks() && !self.is_mirrored {
            self.is_mirrored = true;
            actions.push(Action::Report(Report::Mirrored));
        }
        if self.standing == Standing::Holding && self.requests.is_empty() && self.flush.is_none() {
            self.tickets += 1;
            let ticket = Ticket(self.tickets);
            self.flush = Some(ticket);
            actions.push(Action::FlushMirror { ticket });
        }
    }
}

impl Machine for Paper {
    fn handle(&mut self, _now: Time, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Request { id, op } => match self.standing {
                Standing::Serving if !self.is_locked(op) => self.begin(id, op, actions),
                _ => self.waiting.push((id, op)),
            },
            Event::LocalDone { id, result } => {
                if let Some(request) = self.requests.get_mut(&id) {
                    (request.local, request.result) = (false, result);
                    self.finish(id, actions);
                }
            }
            Event::MirrorDone { id, .. } => {
                if let Some(request) = self.requests.get_mut(&id) {
                    request.mirror = false;
                    self.finish(id, actions);
                }
            }
            Event::Migrate { .. } => self.is_moving = true,
            Event::LinkUp { .. } => self.is_up = self.is_moving,
            Event::LinkDown if self.is_up => self.stop(actions),
            Event::Cancel | Event::Release if self.is_moving => self.stop(actions),
            Event::ChunkRead { ticket, .. } if self.copies.contains_key(&ticket) => {
                actions.push(Action::SendChunk { ticket });
            }
            Event::ChunkSent { ticket, .. } if self.copies.remove(&ticket).is_some() => self.tail += 1,
            Event::MirrorFlushed { ticket, .. } if self.flush == Some(ticket) => {
                self.standing = Standing::Held;
                actions.push(Action::Report(Report::Held));
            }
            Event::Hold if self.is_mirrored => self.standing = Standing::Holding,
            Event::Moved => {
                self.standing = Standing::Moved;
                for (id, _) in std::mem::take(&mut self.waiting) {
                    let result = Err(Failure::Moved);
                    actions.push(Action::Reply { id, result });
                }
            }
            _ => {}
        }
        self.after(actions);
    }

    fn standing(&self) -> Standing {
        self.standing
    }
}
