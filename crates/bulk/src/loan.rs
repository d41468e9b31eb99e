//! Memory that stands still at one side, and that the other side reads in place.
//!
//! ```text
//!  Borrower                                              Lender
//!   open ──────────── Wish ────────────────────────────► accept(file)
//!   accept ◄───────── Loan ─────────────────────────────
//!          ◄───────── fingerprints of its pages ───────── by the same channel
//!   fetch(range) ──── READ ────────────────────────────► (does nothing)
//!   take ◄─────────── READ responses ───────────────────  the file
//! ```
//!
//! Each page is compared with its fingerprint in a copy that nobody can reach, as that of a run is. Both are told by a channel that both sides trust.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use verbatim_far::{Buffer, Canceller, Connection, Device, End, Exposed, Lent, QpClass, Ticket};

use crate::error::Error;
use crate::fingerprint::{Key, PAGE_BYTES};
use crate::{MOST_RING_BYTES, MOST_RUN_BYTES};

/// What the side that reads says first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wish {
    end: End,
    /// In the background: answers wait like requests.
    yields: bool,
}

/// The answer to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loan {
    end: End,
    memory: Exposed,
}

impl Loan {
    /// How much is lent, in bytes.
    pub fn length(&self) -> u64 {
        self.memory.length
    }
}

/// The side that has the memory, for one connection. When it is dropped, nobody reads that way any more.
#[derive(Debug)]
pub struct Lender {
    // Dropped in this order.
    _connection: Connection,
    _lent: Lent,
}

impl Lender {
    /// Lends the first `length` bytes of a file in memory, which must not change and not become shorter.
    pub fn accept(device: &Device, file: OwnedFd, length: u64, wish: &Wish) -> Result<(Self, Loan), Error> {
        let mut connection = device.connection(verbatim_far::Options {
            class: class(wish.yields),
            window_requests: 1,
            ..verbatim_far::Options::default()
        })?;
        let lent = connection.lend(file, length)?;
        connection.connect(&wish.end)?;
        let loan = Loan {
            end: connection.end(),
            memory: lent.exposed(),
        };
        let lender = Self {
            _connection: connection,
            _lent: lent,
        };
        Ok((lender, loan))
    }
}

fn class(yields: bool) -> QpClass {
    match yields {
        true => QpClass::Background,
        false => QpClass::User,
    }
}

/// The side that reads, by one connection: so many ranges at a time, which come in their order.
#[derive(Debug)]
pub struct Borrower {
    connection: Connection,
    /// Rooms of the same size, used by turns.
    buffer: Arc<Buffer>,
    rooms: u64,
    room_bytes: u64,
    there: Option<Exposed>,
    fetched: u64,
    posted: VecDeque<Fetched>,
    patience: Duration,
}

/// A range that is on its way.
#[derive(Debug, Clone, Copy)]
struct Fetched {
    room: u64,
    length: u64,
    ticket: Ticket,
}

impl Borrower {
    /// A connection that is not connected yet, with room for so many ranges of so many bytes, and what the other side must know. `patience`: so long one
    /// range may take.
    pub fn open(
        device: &Device,
        class: QpClass,
        (rooms, room_bytes): (u64, u64),
        patience: Duration,
    ) -> Result<(Self, Wish), Error> {
        let bytes = rooms.saturating_mul(room_bytes);
        if !(1..=MOST_RUN_BYTES).contains(&room_bytes) || !(1..=MOST_RING_BYTES).contains(&bytes) {
            return Err(Error::Malformed("so much room is not made"));
        }
        let connection = device.connection(verbatim_far::Options {
            class,
            window_bytes: bytes,
            window_requests: rooms as u32,
        })?;
        let borrower = Self {
            buffer: connection.buffer(bytes as usize)?,
            rooms,
            room_bytes,
            there: None,
            fetched: 0,
            posted: VecDeque::new(),
            patience,
            connection,
        };
        let wish = Wish {
            end: borrower.connection.end(),
            yields: class == QpClass::Background,
        };
        Ok((borrower, wish))
    }

    /// The other side is there. From now on ranges can be fetched.
    pub fn accept(&mut self, loan: &Loan) -> Result<(), Error> {
        self.connection.connect(&loan.end)?;
        self.there = Some(loan.memory);
        Ok(())
    }

    /// Ends the waiting, from any thread.
    pub fn canceller(&self) -> Canceller {
        self.connection.canceller()
    }

    /// Whether there is room for one more range.
    pub fn has_room(&self) -> bool {
        (self.posted.len() as u64) < self.rooms
    }

    /// Whether something is on its way.
    pub fn is_fetching(&self) -> bool {
        !self.posted.is_empty()
    }

    /// Reads a range of the memory: whole pages, no more than there is room for.
    pub fn fetch(&mut self, range: Range<u64>) -> Result<(), Error> {
        let there = self.there.ok_or(Error::Malformed("nothing is lent yet"))?;
        let length = range.end.saturating_sub(range.start);
        if length == 0 || length > self.room_bytes || !length.is_multiple_of(PAGE_BYTES as u64) {
            return Err(Error::Malformed(
                "a range is not whole pages, or longer than its room",
            ));
        }
        if !self.has_room() {
            return Err(Error::Malformed("more ranges than there is room for"));
        }
        let room = self.fetched % self.rooms * self.room_bytes;
        let ticket = self.connection.read(
            (&self.buffer, room),
            (&there, range.start),
            length,
            Some(Instant::now() + self.patience),
        )?;
        self.fetched += 1;
        self.posted.push_back(Fetched { room, length, ticket });
        Ok(())
    }

    /// Waits for the range that was fetched first of those on their way, copies it out, and compares it.
    pub fn take(&mut self, key: &Key, fingerprints: &[u8]) -> Result<Vec<u8>, Error> {
        let Fetched { room, length, ticket } =
            *self.posted.front().ok_or(Error::Malformed("nothing comes"))?;
        self.connection
            .wait(ticket, Some(Instant::now() + self.patience))?;
        let mut bytes = vec![0; length as usize];
        self.buffer.read(room, &mut bytes)?;
        key.compare(&bytes, fingerprints)?;
        self.posted.pop_front();
        Ok(bytes)
    }

    /// Changes a bit of the range that comes next, once it is there, for a test that wants to see it noticed.
    pub fn damage(&mut self) -> Result<(), Error> {
        let Fetched { room, ticket, .. } = *self.posted.front().ok_or(Error::Malformed("nothing comes"))?;
        self.connection
            .wait(ticket, Some(Instant::now() + self.patience))?;
        let mut byte = [0];
        self.buffer.read(room, &mut byte)?;
        self.buffer.write(room, &[byte[0] ^ 1])?;
        Ok(())
    }
}
