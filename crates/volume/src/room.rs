//! Limits for the requests of clients that are in flight.
//!
//! A request holds memory of the daemon from its beginning until its answer has left. Three limits bound that
//! memory: of one connection ([`Own`]), of all connections and queues of one volume ([`Room`]), and of all
//! volumes ([`Total`]). A client that does not read its answers keeps the memory. So one connection gets at
//! most half of its volume's room, and each volume may always have one request in flight, even if others have
//! all of the total. A request waits before it holds any memory, in the order of arrival.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::thread::Thread;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError};

/// The most requests of a connection in flight, with those whose answers wait.
pub const MAX_IN_FLIGHT: usize = 128;

/// The most KiB of data of them; at least one request of the largest size.
pub const MAX_KIB: usize = 32 << 10;

/// The same of a volume.
const MAX_VOLUME_KIB: usize = 2 * MAX_KIB;

/// The same of all volumes together, besides one request of each.
const MAX_TOTAL_KIB: usize = 512 << 10;

/// The longest data of a request, in bytes.
pub const MAX_REQUEST: u32 = 32 << 20;

const _: () = assert!(MAX_REQUEST as usize / 1024 <= MAX_KIB, "a request always fits");

/// Requests of one connection in flight.
#[derive(Debug, Default)]
pub struct Own {
    requests: usize,
    kib: usize,
}

impl Own {
    /// Begins one more request, with this many KiB of data; false if there is no room for it.
    pub fn try_begin(&mut self, kib: usize) -> bool {
        let is_full = self.requests >= MAX_IN_FLIGHT || self.requests > 0 && self.kib + kib > MAX_KIB;
        if !is_full {
            self.requests += 1;
            self.kib += kib;
        }
        !is_full
    }

    /// This many requests have ended.
    pub fn end(&mut self, requests: usize, kib: usize) {
        self.requests -= requests;
        self.kib -= kib;
    }

    /// The number of requests in flight.
    pub fn requests(&self) -> usize {
        self.requests
    }
}

/// Memory for requests of all volumes.
#[derive(Debug)]
pub struct Total(Arc<Semaphore>);

impl Default for Total {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_TOTAL_KIB)))
    }
}

/// Memory for requests of one volume.
#[derive(Debug, Clone)]
pub struct Room {
    kib: Arc<Semaphore>,
    /// For one request, if others have all of the total.
    one: Arc<Semaphore>,
    total: Arc<Total>,
}

/// Memory that a request holds; given back when this is dropped.
#[derive(Debug, Default)]
pub struct Held(#[expect(dead_code, reason = "it is kept to be dropped")] Option<[OwnedSemaphorePermit; 2]>);

impl Room {
    /// The room of one volume.
    pub fn new(total: Arc<Total>) -> Self {
        Self {
            kib: Arc::new(Semaphore::new(MAX_VOLUME_KIB)),
            one: Arc::new(Semaphore::new(1)),
            total,
        }
    }

    /// Takes room for one more request, with this many KiB of data; `None` if there is none now.
    pub fn try_begin(&self, kib: usize) -> Option<Held> {
        if kib == 0 {
            return Some(Held::default());
        }
        let wanted = kib as u32;
        let try_from = |semaphore: &Arc<Semaphore>, wanted| {
            let taken = semaphore.clone().try_acquire_many_owned(wanted);
            debug_assert!(!matches!(taken, Err(TryAcquireError::Closed)));
            taken.ok()
        };
        let own = try_from(&self.kib, wanted)?;
        let shared = try_from(&self.total.0, wanted).or_else(|| try_from(&self.one, 1))?;
        Some(Held(Some([own, shared])))
    }

    /// The same as soon as there is room.
    pub async fn begin(self, kib: usize) -> Held {
        if let Some(held) = self.try_begin(kib) {
            return held;
        }
        let wanted = kib as u32;
        let own = self.kib.acquire_many_owned(wanted).await;
        let shared = tokio::select! {
            biased;
            shared = self.total.0.clone().acquire_many_owned(wanted) => shared,
            one = self.one.acquire_owned() => one,
        };
        Held(Some(
            [own, shared].map(|permit| permit.expect("it is never closed")),
        ))
    }

    /// The same for a thread that waits.
    pub fn begin_here(&self, kib: usize) -> Held {
        if let Some(held) = self.try_begin(kib) {
            return held;
        }
        let parked = Arc::new(Parked {
            thread: std::thread::current(),
            is_woken: AtomicBool::new(false),
        });
        let waker = Waker::from(parked.clone());
        let mut beginning = std::pin::pin!(self.clone().begin(kib));
        loop {
            if let std::task::Poll::Ready(held) = beginning.as_mut().poll(&mut Context::from_waker(&waker)) {
                return held;
            }
            while !parked.is_woken.swap(false, Ordering::Acquire) {
                std::thread::park();
            }
        }
    }
}

/// A thread that waits for room.
struct Parked {
    thread: Thread,
    is_woken: AtomicBool,
}

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.is_woken.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGEST: usize = MAX_REQUEST as usize / 1024;

    #[test]
    fn all_connections_of_a_volume_have_its_room_together_and_one_request_of_each_volume_always_fits() {
        let total = Arc::new(Total::default());
        let mut all = Vec::new();
        // Volumes whose clients do not read their answers.
        for _ in 0..2 * MAX_TOTAL_KIB / MAX_VOLUME_KIB {
            let room = Room::new(total.clone());
            let held: Vec<_> = (0..64).map_while(|_| room.try_begin(LARGEST)).collect();
            assert!((1..=2).contains(&held.len()), "{} requests", held.len());
            all.push((room, held));
        }
        let held: usize = all.iter().map(|(_, held)| held.len()).sum();
        assert!(held * LARGEST <= MAX_TOTAL_KIB + all.len() * LARGEST, "{held}");
        let last = Room::new(total);
        let one = last.try_begin(LARGEST).expect("it has nothing under way");
        assert!(last.try_begin(1).is_none(), "others have all of the total");
        assert!(last.try_begin(0).is_some(), "a flush needs nothing");
        drop(one);
        assert!(last.try_begin(LARGEST).is_some());
    }

    #[test]
    fn who_waits_goes_on_when_there_is_room_and_nobody_overtakes() {
        let room = Room::new(Arc::default());
        let first = room.begin_here(LARGEST);
        let second = room.begin_here(LARGEST);
        let (sender, begun) = std::sync::mpsc::channel();
        let (of, waiting) = (room.clone(), std::sync::mpsc::channel());
        let thread = std::thread::spawn(move || {
            waiting.0.send(()).expect("the test waits");
            let held = of.begin_here(LARGEST);
            sender.send(()).expect("the test waits");
            held
        });
        waiting.1.recv().expect("it runs");
        assert!(begun.try_recv().is_err());
        drop(first);
        begun
            .recv_timeout(std::time::Duration::from_secs(60))
            .expect("there is room");
        drop((second, thread.join().expect("it does not panic")));
        assert!(room.try_begin(2 * LARGEST).is_some(), "all was given back");
    }
}
