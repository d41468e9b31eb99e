//! The side that sends.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use verbatim_far::{Buffer, Canceller, Connection, Device, Exposed, QpClass, Ticket};

use crate::error::Error;
use crate::fingerprint::{FINGERPRINT_BYTES, Key, PAGE_BYTES, to_bytes};
use crate::ring::{Ring, offset};
use crate::{Accepted, Landed, MOST_RING_BYTES, MOST_RUN_BYTES, Offer, Operation, Options};

/// How long one run may take. The RNIC notices much earlier that the other one is gone.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// How far the connection can be configured in requests.
pub(crate) const WINDOW_REQUESTS: u32 = 256;

/// The memory of a ring.
pub(crate) fn ring_of(connection: &Connection, bytes: u64, locks: bool) -> Result<Arc<Buffer>, Error> {
    Ok(match locks {
        true => connection.locked_buffer(bytes as usize)?,
        false => connection.buffer(bytes as usize)?,
    })
}

/// A run that is being put together.
#[derive(Debug)]
pub struct Run {
    position: u64,
    /// Room that it has.
    most: u64,
    length: u64,
    fingerprints: Vec<u8>,
}

impl Run {
    /// Bytes that are in it; whole pages.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Bytes that still fit.
    pub fn room(&self) -> u64 {
        self.most - self.length
    }
}

/// Something that leaves in order, with or without a run.
#[derive(Debug)]
struct Queued<T> {
    item: T,
    landed: Option<Landed>,
    /// The WRITE that must be done before it leaves.
    ticket: Option<Ticket>,
}

/// The side that sends runs, each with an item that says what it is.
#[derive(Debug)]
pub struct Outgoing<T> {
    connection: Connection,
    buffer: Arc<Buffer>,
    /// The ring at the other side, once that is known.
    there: Option<Exposed>,
    key: Key,
    ring: Ring,
    options: Options,
    queue: VecDeque<Queued<T>>,
}

impl<T> Outgoing<T> {
    /// A connection that is not connected yet, and what the other side must know.
    pub fn open(device: &Device, options: Options) -> Result<(Self, Offer), Error> {
        let page = PAGE_BYTES as u64;
        if options.run_bytes == 0
            || !options.run_bytes.is_multiple_of(page)
            || options.run_bytes > MOST_RUN_BYTES
            || !options.ring_bytes.is_multiple_of(options.run_bytes)
            || !(options.run_bytes..=MOST_RING_BYTES).contains(&options.ring_bytes)
        {
            return Err(Error::Malformed("runs are whole pages, and a ring is whole runs"));
        }
        let connection = device.connection(verbatim_far::Options {
            class: options.class,
            window_bytes: options.window_bytes,
            window_requests: WINDOW_REQUESTS,
        })?;
        let buffer = ring_of(&connection, options.ring_bytes, options.locks)?;
        let key = Key::new();
        let offer = Offer {
            end: connection.end(),
            ring: buffer.exposed(),
            key: key.to_bytes(),
            ring_bytes: options.ring_bytes,
            window_bytes: options.window_bytes,
            yields: options.class == QpClass::Background,
        };
        let outgoing = Self {
            connection,
            buffer,
            there: None,
            key,
            ring: Ring::new(options.ring_bytes),
            options,
            queue: VecDeque::new(),
        };
        Ok((outgoing, offer))
    }

    /// The other side is there. From now on runs can be sent.
    pub fn accept(&mut self, accepted: &Accepted) -> Result<(), Error> {
        if accepted.ring.length < self.options.ring_bytes {
            return Err(Error::Malformed("its ring is shorter than was asked for"));
        }
        self.connection.connect(&accepted.end)?;
        self.there = Some(accepted.ring);
        Ok(())
    }

    /// The number of this side's queue pair.
    pub fn number(&self) -> u32 {
        self.connection.end().qpn
    }

    /// From now on the other side carries runs, by READs.
    pub fn have_it_fetched(&mut self) {
        self.options.operation = Operation::Read;
    }

    /// Ends the waiting, from any thread.
    pub fn canceller(&self) -> Canceller {
        self.connection.canceller()
    }

    /// Whose work goes first at this side's RNIC.
    pub fn set_class(&mut self, class: QpClass) -> Result<(), Error> {
        Ok(self.connection.set_class(class)?)
    }

    /// A new run; `None` while the rings have no room for a whole one.
    pub fn begin(&self) -> Option<Run> {
        let most = self.options.run_bytes;
        let position = self.ring.room(most)?;
        Some(Run {
            position,
            most,
            length: 0,
            fingerprints: Vec::with_capacity((most as usize / PAGE_BYTES) * FINGERPRINT_BYTES),
        })
    }

    /// Adds bytes to a run, which has room for them. They begin a page; what they leave of their last page reads as zeroes. The same
    /// bytes go on their way and into the fingerprints, whatever their owner changes later.
    pub fn add(&mut self, run: &mut Run, bytes: &[u8]) -> Result<(), Error> {
        let at = offset(run.position, run.most, self.options.ring_bytes)? + run.length;
        let (pages, rest) = bytes.as_chunks::<PAGE_BYTES>();
        let whole = (pages.len() + usize::from(!rest.is_empty())) * PAGE_BYTES;
        assert!(whole as u64 <= run.room(), "the caller asks for the room first");
        self.buffer.write(at, &bytes[..pages.len() * PAGE_BYTES])?;
        for page in pages {
            run.fingerprints.extend(to_bytes(self.key.fingerprint(page)));
        }
        if !rest.is_empty() {
            let mut last = [0; PAGE_BYTES];
            last[..rest.len()].copy_from_slice(rest);
            self.buffer.write(at + (pages.len() * PAGE_BYTES) as u64, &last)?;
            run.fingerprints.extend(to_bytes(self.key.fingerprint(&last)));
        }
        run.length += whole as u64;
        Ok(())
    }

    /// Sends a run on its way. It may wait for room in the window.
    pub fn send(&mut self, run: Run, item: T) -> Result<(), Error> {
        let at = offset(run.position, run.most, self.options.ring_bytes)?;
        self.ring.take(run.position, run.length);
        let there = self.there.ok_or(Error::Malformed("nobody has accepted yet"))?;
        let ticket = match self.options.operation {
            Operation::Write => Some(self.connection.write(
                (&self.buffer, at),
                (&there, at),
                run.length,
                Some(Instant::now() + PATIENCE),
            )?),
            Operation::Read => None,
        };
        let landed = Landed {
            position: run.position,
            length: run.length,
            fingerprints: run.fingerprints,
            operation: self.options.operation,
        };
        self.queue.push_back(Queued {
            item,
            landed: Some(landed),
            ticket,
        });
        Ok(())
    }

    /// Something without a run, behind all that was sent before.
    pub fn pass(&mut self, item: T) {
        self.queue.push_back(Queued {
            item,
            landed: None,
            ticket: None,
        });
    }

    /// The next item that the other side may be told, with its run, which has landed; `None` if there is none (yet, unless it
    /// `waits`).
    pub fn next(&mut self, waits: bool) -> Result<Option<(T, Option<Landed>)>, Error> {
        let Some(first) = self.queue.front() else {
            return Ok(None);
        };
        if let Some(ticket) = first.ticket {
            if waits {
                self.connection.wait(ticket, Some(Instant::now() + PATIENCE))?;
            } else if !self.connection.is_done(ticket)? {
                return Ok(None);
            }
        }
        let first = self.queue.pop_front();
        Ok(first.map(|first| (first.item, first.landed)))
    }

    /// The other side has taken all runs before `position`.
    pub fn freed(&mut self, position: u64) -> Result<(), Error> {
        self.ring.free(position)
    }

    /// Whether the other side has taken all runs.
    pub fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }
}
