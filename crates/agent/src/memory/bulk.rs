//! One-sided RDMA as sessions use it: the RNIC, and the connection of each session.

use std::io;
use std::sync::Arc;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use verbatim_bulk::{Canceller, Device, Error, Outgoing, Which};

use crate::proto::FilePart;

/// This host's RNIC, opened when it is needed first.
#[derive(Debug)]
pub struct Rnic {
    which: Which,
    device: Mutex<Option<Device>>,
}

impl Rnic {
    /// That one.
    pub fn new(which: Which) -> Self {
        Self {
            which,
            device: Mutex::default(),
        }
    }

    /// The RNIC; one that was restarted is opened again. It may block.
    pub fn device(&self) -> Result<Device, Error> {
        let mut device = lock(&self.device);
        if let Some(device) = device.as_ref().filter(|device| !device.is_gone()) {
            return Ok(device.clone());
        }
        Ok(device.insert(Device::choose(&self.which)?).clone())
    }
}

/// A session's connection, which one round at a time uses; what others send meanwhile goes over TLS.
#[derive(Debug, Clone, Default)]
pub struct Bulk(Arc<Mutex<Slot>>);

#[derive(Debug, Default)]
struct Slot {
    idle: Option<Outgoing<FilePart>>,
    /// Bytes of runs that went by it.
    bytes: u64,
    failure: Option<String>,
}

impl Bulk {
    /// From now on there is one.
    pub fn set(&self, outgoing: Outgoing<FilePart>) {
        lock(&self.0).idle = Some(outgoing);
    }

    /// For one round, if there is one and nobody uses it.
    pub fn lend(&self) -> Option<Outgoing<FilePart>> {
        lock(&self.0).idle.take()
    }

    /// It works, and `bytes` have gone by it.
    pub fn give_back(&self, outgoing: Outgoing<FilePart>, bytes: u64) {
        let mut slot = lock(&self.0);
        slot.idle = Some(outgoing);
        slot.bytes += bytes;
    }

    /// It is of no use any more.
    pub fn fail(&self, why: String) {
        let mut slot = lock(&self.0);
        slot.idle = None;
        slot.failure = Some(why);
    }

    /// Why it is of no use any more, if so.
    pub fn failure(&self) -> Option<String> {
        lock(&self.0).failure.clone()
    }

    /// Bytes of runs that went by it.
    pub fn bytes(&self) -> u64 {
        lock(&self.0).bytes
    }
}

/// What the other side has freed, for a thread that waits for it.
#[derive(Debug, Default)]
pub struct Credits {
    freed: Mutex<Freed>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Freed {
    position: u64,
    /// No more comes.
    ended: bool,
}

impl Credits {
    /// The other side has freed everything before this position.
    pub fn freed(&self, position: u64) {
        let mut freed = lock(&self.freed);
        freed.position = position;
        self.changed.notify_all();
    }

    /// The other side says no more.
    pub fn end(&self) {
        lock(&self.freed).ended = true;
        self.changed.notify_all();
    }

    /// What it has said so far.
    pub fn position(&self) -> u64 {
        lock(&self.freed).position
    }

    /// Waits until it has freed more than that.
    pub fn wait_beyond(&self, position: u64) -> io::Result<u64> {
        let mut freed = lock(&self.freed);
        while freed.position <= position {
            if freed.ended {
                return Err(io::Error::new(
                    io::ErrorKind::BrokenPipe,
                    "the destination takes no more runs",
                ));
            }
            freed = self.changed.wait(freed).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(freed.position)
    }
}

/// Ends the waiting of a round's thread when the round is dropped.
pub struct Cutter {
    pub canceller: Canceller,
    pub credits: Arc<Credits>,
}

impl Cutter {
    /// Whoever waits gets an error.
    pub fn cut(&self) {
        self.canceller.cancel();
        self.credits.end();
    }
}

/// Whoever drops it has cut it off, unless it was [`Option::take`]n out.
pub struct CutOnDrop(pub Option<Cutter>);

impl Drop for CutOnDrop {
    fn drop(&mut self) {
        if let Some(cutter) = &self.0 {
            cutter.cut();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_room_is_woken_by_it_or_by_the_end() {
        let credits = Arc::new(Credits::default());
        let waiting = {
            let credits = Arc::clone(&credits);
            std::thread::spawn(move || (credits.wait_beyond(0).unwrap(), credits.wait_beyond(4096)))
        };
        credits.freed(4096);
        credits.end();
        let (first, second) = waiting.join().unwrap();
        assert_eq!(first, 4096);
        assert_eq!(second.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(credits.position(), 4096);
    }

    #[test]
    fn a_connection_that_failed_is_not_lent() {
        let bulk = Bulk::default();
        assert!(bulk.lend().is_none() && bulk.failure().is_none());
        bulk.fail("gone".to_owned());
        assert_eq!((bulk.failure().as_deref(), bulk.bytes()), (Some("gone"), 0));
    }
}
