//! The side that receives.

use std::sync::Arc;
use std::time::{Duration, Instant};

use verbatim_far::{Buffer, Canceller, Connection, Device, Exposed, QpClass, Ticket};

use crate::error::Error;
use crate::fingerprint::{FINGERPRINT_BYTES, Key, PAGE_BYTES};
use crate::outgoing::{PATIENCE, WINDOW_REQUESTS, ring_of};
use crate::ring::offset;
use crate::{Accepted, Landed, MOST_RING_BYTES, MOST_RUN_BYTES, Offer, Operation};

/// The side that receives runs.
#[derive(Debug)]
pub struct Incoming {
    connection: Connection,
    buffer: Arc<Buffer>,
    /// The ring at the other side.
    there: Exposed,
    key: Key,
    ring_bytes: u64,
    class: QpClass,
    patience: Duration,
}

impl Incoming {
    /// Takes the other side's offer, and says what that must know.
    pub fn accept(device: &Device, offer: &Offer) -> Result<(Self, Accepted), Error> {
        Self::accept_in(device, offer, false)
    }

    /// The same, with a ring in memory that is never swapped out ([`Options::locks`](crate::Options::locks)).
    pub fn accept_locked(device: &Device, offer: &Offer) -> Result<(Self, Accepted), Error> {
        Self::accept_in(device, offer, true)
    }

    fn accept_in(device: &Device, offer: &Offer, locks: bool) -> Result<(Self, Accepted), Error> {
        let key = Key::from_bytes(&offer.key).ok_or(Error::Malformed("its key is not as long as a key"))?;
        let page = PAGE_BYTES as u64;
        if offer.ring_bytes == 0
            || offer.ring_bytes > MOST_RING_BYTES
            || !offer.ring_bytes.is_multiple_of(page)
        {
            return Err(Error::Malformed("a ring of that length is not made"));
        }
        if offer.ring.length < offer.ring_bytes {
            return Err(Error::Malformed("its ring is shorter than it says"));
        }
        let class = match offer.yields {
            true => QpClass::Background,
            false => QpClass::User,
        };
        let mut connection = device.connection(verbatim_far::Options {
            class,
            window_bytes: offer.window_bytes.min(MOST_RING_BYTES),
            window_requests: WINDOW_REQUESTS,
        })?;
        let buffer = ring_of(&connection, offer.ring_bytes, locks)?;
        connection.connect(&offer.end)?;
        let accepted = Accepted {
            end: connection.end(),
            ring: buffer.exposed(),
        };
        let incoming = Self {
            connection,
            buffer,
            there: offer.ring,
            key,
            ring_bytes: offer.ring_bytes,
            class,
            patience: PATIENCE,
        };
        Ok((incoming, accepted))
    }

    /// How long one run may take from now on; half a minute otherwise.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// The number of this side's queue pair.
    pub fn number(&self) -> u32 {
        self.connection.end().qpn
    }

    /// Ends the waiting, from any thread.
    pub fn canceller(&self) -> Canceller {
        self.connection.canceller()
    }

    /// Whose work goes first at this side's RNIC: answers wait like requests.
    pub fn set_class(&mut self, class: QpClass) -> Result<(), Error> {
        if self.class != class {
            self.connection.set_class(class)?;
            self.class = class;
        }
        Ok(())
    }

    /// Fetches a run, if that is this side's to do; it may wait for room in the window. [`Self::take`] waits for the run itself.
    pub fn fetch(&mut self, landed: &Landed) -> Result<Option<Ticket>, Error> {
        let at = self.place_of(landed)?;
        match landed.operation {
            Operation::Write => Ok(None),
            Operation::Read => Ok(Some(self.connection.read(
                (&self.buffer, at),
                (&self.there, at),
                landed.length,
                Some(Instant::now() + self.patience),
            )?)),
        }
    }

    /// Copies a run out of the ring, from where nobody else can reach it any more, and compares it with its fingerprints. The other
    /// side may then be told [`Landed::end`]. `fetched` is what [`Self::fetch`] has returned.
    pub fn take(
        &mut self,
        landed: &Landed,
        fetched: Option<Ticket>,
        into: &mut Vec<u8>,
    ) -> Result<(), Error> {
        if let Some(fetched) = fetched {
            self.connection
                .wait(fetched, Some(Instant::now() + self.patience))?;
        }
        let at = self.place_of(landed)?;
        into.resize(landed.length as usize, 0);
        self.buffer.read(at, into)?;
        self.key.compare(into, &landed.fingerprints)
    }

    /// Where it lies in both rings.
    fn place_of(&self, landed: &Landed) -> Result<u64, Error> {
        let page = PAGE_BYTES as u64;
        if landed.length == 0 || landed.length > MOST_RUN_BYTES || !landed.length.is_multiple_of(page) {
            return Err(Error::Malformed("a run is not whole pages, or too long"));
        }
        if landed.fingerprints.len() as u64 != landed.length / page * FINGERPRINT_BYTES as u64 {
            return Err(Error::Malformed("a run has not a fingerprint for each page"));
        }
        offset(landed.position, landed.length, self.ring_bytes)
    }

    /// Changes a bit of a run that lies in the ring, for a test that wants to see it noticed.
    pub fn damage(&mut self, landed: &Landed) -> Result<(), Error> {
        let at = self.place_of(landed)?;
        let mut byte = [0];
        self.buffer.read(at, &mut byte)?;
        self.buffer.write(at, &[byte[0] ^ 1])?;
        Ok(())
    }
}
