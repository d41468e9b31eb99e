//! A server's memory, over one queue pair: requests in flight, and requests to post.

mod reaper;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use verbatim_far::{Buffer, Connection, Error, Exposed, Ticket};
use verbatim_lease::{Extent, SlotId};

use crate::block::{Block, PAGE_BYTES, SLOT_BYTES, place};

/// A connection to a lease's memory. A drop never waits for the RNIC ([`reaper`]).
pub struct Remote(Option<Parts>);

pub(crate) struct Parts {
    connection: Connection,
    /// A place for each slot's bytes.
    staging: Arc<Buffer>,
    memory: Exposed,
}

impl Drop for Remote {
    fn drop(&mut self) {
        if let Some(parts) = self.0.take() {
            reaper::take(parts);
        }
    }
}

/// A READ or WRITE.
#[derive(Debug, Clone, Copy)]
pub struct Flight {
    /// The slot.
    pub slot: SlotId,
    /// The first page of the slot.
    pub first: u64,
    /// Pages of the disk.
    pub extent: Extent,
    /// The transfer goes to the server.
    pub is_write: bool,
    /// Time of the request.
    pub since: Instant,
    ticket: Option<Ticket>,
}

impl Flight {
    /// A flight that was not posted yet.
    pub fn new(slot: SlotId, first: u64, extent: Extent, is_write: bool) -> Self {
        Self {
            slot,
            first,
            extent,
            is_write,
            since: Instant::now(),
            ticket: None,
        }
    }
}

/// Requests in flight at a server, oldest first. They outlive a connection: unanswered ones are posted again
/// on the next one to the same memory.
#[derive(Debug)]
pub struct Flights {
    all: VecDeque<Flight>,
    /// Number of flights at the front that are posted.
    posted: usize,
}

impl Flights {
    /// Room for this many flights, so that nothing is allocated later.
    pub fn new(most: usize) -> Self {
        Self {
            all: VecDeque::with_capacity(most),
            posted: 0,
        }
    }

    /// Adds a flight.
    pub fn push(&mut self, flight: Flight) {
        self.all.push_back(flight);
    }

    /// Time of the oldest flight's request.
    pub fn oldest(&self) -> Option<Instant> {
        self.all.front().map(|flight| flight.since)
    }

    /// No flight is posted any more. Their times stay.
    pub fn unpost(&mut self) {
        self.posted = 0;
        for flight in &mut self.all {
            flight.ticket = None;
        }
    }

    /// Removes all flights: no request waits for them.
    pub fn clear(&mut self) {
        self.all.clear();
        self.posted = 0;
    }
}

impl Remote {
    /// `staging` has room for all slots.
    pub fn new(connection: Connection, staging: Arc<Buffer>, memory: Exposed) -> Self {
        reaper::start();
        Self(Some(Parts {
            connection,
            staging,
            memory,
        }))
    }

    fn parts(&self) -> &Parts {
        self.0.as_ref().expect("it is there until this is dropped")
    }

    fn parts_mut(&mut self) -> &mut Parts {
        self.0.as_mut().expect("it is there until this is dropped")
    }

    /// Readable when a flight is done.
    pub fn events(&self) -> BorrowedFd<'_> {
        self.parts().connection.events()
    }

    /// Posts flights as far as there is room.
    pub fn post(&mut self, flights: &mut Flights, blocks: &[Arc<Block>]) -> Result<(), Error> {
        let Parts {
            connection,
            staging,
            memory,
        } = self.parts_mut();
        while let Some(flight) = flights.all.get_mut(flights.posted) {
            let length = flight.extent.count * PAGE_BYTES;
            if !connection.has_room(length) {
                break;
            }
            let part = place(flight.first, flight.extent);
            let near = at(flight.slot) + part.start as u64;
            let far = (&*memory, flight.extent.page * PAGE_BYTES);
            let ticket = match flight.is_write {
                true => {
                    staging.write(near, &blocks[usize::from(flight.slot)].bytes()[part])?;
                    connection.write((&*staging, near), far, length, None)?
                }
                false => connection.read((&*staging, near), far, length, None)?,
            };
            flight.ticket = Some(ticket);
            flights.posted += 1;
        }
        Ok(())
    }

    /// The next finished flight; the data of a READ are in its block. `done` comes from [`Self::progress`] or
    /// [`Self::look`].
    pub fn take(
        &self,
        flights: &mut Flights,
        done: Ticket,
        blocks: &mut [Arc<Block>],
    ) -> Result<Option<Flight>, Error> {
        let is_done = |flight: &&Flight| flight.ticket.is_some_and(|ticket| ticket <= done);
        let Some(flight) = flights.all.front().filter(is_done).copied() else {
            return Ok(None);
        };
        if !flight.is_write {
            let block = Arc::get_mut(&mut blocks[usize::from(flight.slot)]);
            let block = block.expect("a slot that is read is written nowhere");
            let part = place(flight.first, flight.extent);
            let near = at(flight.slot) + part.start as u64;
            self.parts().staging.read(near, &mut block.bytes_mut()[part])?;
        }
        flights.all.pop_front();
        flights.posted -= 1;
        Ok(Some(flight))
    }

    /// The last finished ticket; later completions make [`Self::events`] readable.
    pub fn progress(&mut self) -> Result<Ticket, Error> {
        self.parts_mut().connection.progress()
    }

    /// The last finished ticket, for callers that poll again in any case.
    pub fn look(&mut self) -> Result<Ticket, Error> {
        self.parts_mut().connection.look()
    }
}

fn at(slot: SlotId) -> u64 {
    u64::from(slot) * SLOT_BYTES as u64
}
