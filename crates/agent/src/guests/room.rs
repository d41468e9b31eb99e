//! Room in this agent's memory for what guest libraries answer.
//!
//! A program may answer what it likes. What that takes here is bounded for each tenant, so that no one's programs leave none
//! for others, and in all. An answer has a place while it is read, as large as it could become, which is waited for: reading
//! waits for nobody. Then it has one as large as it is, for as long as somebody [holds](Held) it; of those a tenant that has
//! too many gets no more.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use anyhow::Context;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::quotas;

/// Permits are so many bytes.
const UNIT: usize = 1 << 10;

/// How much there is.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes that are read at a time.
    pub read: usize,
    /// Bytes that are held.
    pub held: usize,
}

impl Limits {
    /// Of all tenants together.
    pub const ALL: Self = Self {
        read: quotas::ANSWERS_READ,
        held: quotas::ANSWERS_HELD,
    };

    /// Of one.
    pub const TENANT: Self = Self {
        read: quotas::ANSWERS_READ_OF_ONE,
        held: quotas::ANSWERS_HELD_OF_ONE,
    };
}

/// Room of one tenant, or of all.
#[derive(Debug)]
pub struct Room {
    read: Arc<Semaphore>,
    held: AtomicUsize,
    most_held: usize,
}

/// What a tenant's answers may take: room of its own, of that of all.
#[derive(Debug, Clone)]
pub struct Rooms {
    pub own: Arc<Room>,
    pub all: Arc<Room>,
}

/// An answer is being read.
#[derive(Debug)]
pub struct Reading {
    rooms: Rooms,
    _permits: [OwnedSemaphorePermit; 2],
}

/// An answer that was read is in use.
#[derive(Debug)]
pub struct Held {
    rooms: Rooms,
    bytes: usize,
}

/// There is no room for an answer now. Whoever gave it has done nothing wrong.
#[derive(Debug, thiserror::Error)]
#[error("what {whose} say takes more than {most_mib} MiB at once; try again")]
pub struct Full {
    whose: &'static str,
    most_mib: usize,
}

impl Full {
    fn of(room: &Room, whose: &'static str) -> Self {
        let most_mib = room.most_held >> 20;
        Self { whose, most_mib }
    }
}

impl Default for Room {
    fn default() -> Self {
        Self::new(Limits::TENANT)
    }
}

impl Room {
    pub fn new(limits: Limits) -> Self {
        Self {
            read: Arc::new(Semaphore::new(limits.read / UNIT)),
            held: AtomicUsize::new(0),
            most_held: limits.held,
        }
    }

    async fn read(&self, bytes: usize) -> anyhow::Result<OwnedSemaphorePermit> {
        let units = u32::try_from(bytes.div_ceil(UNIT)).context("an answer is too long")?;
        let permits = Arc::clone(&self.read).acquire_many_owned(units).await;
        permits.context("no more answers are read")
    }

    fn hold(&self, bytes: usize) -> bool {
        let fits = |held: usize| held.checked_add(bytes).filter(|held| *held <= self.most_held);
        self.held.fetch_update(SeqCst, SeqCst, fits).is_ok()
    }
}

impl Rooms {
    /// Waits until an answer may be read that could take so many bytes, the room of one tenant at most.
    pub async fn read(&self, bytes: usize) -> anyhow::Result<Reading> {
        // The own one first: who waits there keeps nobody else waiting.
        let own = self.own.read(bytes).await?;
        let all = self.all.read(bytes).await?;
        Ok(Reading {
            rooms: self.clone(),
            _permits: [own, all],
        })
    }
}

impl Reading {
    /// The answer takes so many bytes; [`Full`] if its tenant, or all, have too many already.
    pub fn done(self, bytes: usize) -> Result<Held, Full> {
        let rooms = self.rooms;
        if !rooms.own.hold(bytes) {
            return Err(Full::of(&rooms.own, "its programs"));
        }
        if !rooms.all.hold(bytes) {
            rooms.own.held.fetch_sub(bytes, SeqCst);
            return Err(Full::of(&rooms.all, "the programs of this host"));
        }
        Ok(Held { rooms, bytes })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.rooms.own.held.fetch_sub(self.bytes, SeqCst);
        self.rooms.all.held.fetch_sub(self.bytes, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rooms(own: usize, all: &Arc<Room>) -> Rooms {
        let limits = Limits { read: own, held: own };
        Rooms {
            own: Arc::new(Room::new(limits)),
            all: Arc::clone(all),
        }
    }

    #[tokio::test]
    async fn a_tenant_waits_for_its_own_answers_and_others_do_not() {
        let limits = Limits {
            read: 4 * UNIT,
            held: 4 * UNIT,
        };
        let all = Arc::new(Room::new(limits));
        let (one, other) = (rooms(2 * UNIT, &all), rooms(2 * UNIT, &all));
        let reading = one.read(2 * UNIT).await.unwrap();
        let mut second = std::pin::pin!(one.read(1));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(second.as_mut().poll(&mut context).is_pending());
        drop(other.read(2 * UNIT).await.unwrap());
        let held = reading.done(2 * UNIT).unwrap();
        let second = second.await.unwrap();
        let refused = second.done(1).unwrap_err().to_string();
        assert!(refused.contains("its programs"), "{refused}");
        // Nothing of what was refused is counted.
        let others = other.read(1).await.unwrap().done(2 * UNIT).unwrap();
        let third = rooms(UNIT, &all);
        let refused = third.read(1).await.unwrap().done(1).unwrap_err().to_string();
        assert!(refused.contains("this host"), "{refused}");
        assert_eq!(third.own.held.load(SeqCst), 0);
        drop((held, others));
        assert_eq!(all.held.load(SeqCst), 0);
        drop(one.read(1).await.unwrap().done(2 * UNIT).unwrap());
    }
}
