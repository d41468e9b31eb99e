//! One queue at work.
//!
//! Its thread takes requests, asks the volume, and carries out requests itself that are not likely to wait
//! ([`Volume::request_here`]), as an NBD client's thread does. Requests that other threads carry out come
//! back to it. So one thread alone touches the guest's memory and the front end's descriptors, of any kind: a
//! front end can delay its own queues, but no others.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{Errno, ReadWriteFlags};
use verbatim_mirror::{Extent, Failure};
use virtio_bindings::bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestRegionMmap, MmapRegion};

use super::inflight::Noted;
use super::memory::{Lost, Memory, Ram, scatter};
use super::request::{Asked, ID, Request};
use crate::room::{Held, Own};
use crate::volume::{Volume, Wanted};
use crate::words;

/// Number of answers that are written at the latest, even if more requests wait.
const TOGETHER: usize = 32;

/// Time after which answers are written at the latest, even if more requests wait. With requests that take
/// much longer than this, the guest would be idle until the last of them is done: a write takes some ten
/// times as long as a read.
const NOT_LONG: Duration = Duration::from_micros(50);

/// An address where no guest has memory, for the ring of requests that begin again.
const AGAIN: u64 = 1 << 60;

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const FAILED: u8 = VIRTIO_BLK_S_IOERR as u8;

/// Settings of a ring that may change while it works.
pub struct Ends {
    /// The guest's memory.
    pub ram: Mutex<Arc<Ram>>,
    /// The eventfd that tells the guest of answers.
    pub call: Mutex<Option<File>>,
    /// The eventfd that tells the front end that the queue is broken.
    pub error: Mutex<Option<File>>,
}

/// A ring that is to work.
pub struct Ring {
    /// Its number, for the log.
    pub index: usize,
    /// The queue's place in the guest's memory, and its position.
    pub queue: Queue,
    /// The notes on requests in flight, if the front end keeps them.
    pub noted: Option<Noted>,
    /// The eventfd by which the guest tells of requests.
    pub kick: File,
    /// Settings that may change.
    pub ends: Arc<Ends>,
    /// The disk.
    pub volume: Arc<Volume>,
    /// The size of the disk.
    pub length: Arc<AtomicU64>,
    /// The name of the disk.
    pub id: [u8; ID],
    /// Writes are durable when they are answered, since the guest knows no flush.
    pub is_durable: bool,
}

/// Requests that other threads have carried out.
#[derive(Default)]
struct Finished {
    list: Vec<(Request, Held, Result<Vec<u8>, Failure>)>,
    /// The ring's thread sleeps, or is about to.
    sleeps: bool,
}

struct Shared {
    finished: Mutex<Finished>,
    wake: OwnedFd,
    is_stopping: AtomicBool,
}

impl Shared {
    fn rouse(&self) {
        // The write fails only after 2^64 unread ones.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn finish(&self, request: Request, held: Held, result: Result<Vec<u8>, Failure>) {
        let mut finished = self.finished.lock().expect("no panic under this lock");
        finished.list.push((request, held, result));
        if std::mem::take(&mut finished.sleeps) {
            drop(finished);
            self.rouse();
        }
    }
}

impl Wake for Shared {
    fn wake(self: Arc<Self>) {
        self.rouse();
    }
}

/// A ring at work.
pub struct Running {
    shared: Arc<Shared>,
    thread: JoinHandle<u16>,
}

impl Running {
    /// Starts the thread of the ring.
    pub fn start(ring: Ring) -> io::Result<Self> {
        let work = Work::new(ring)?;
        let shared = work.shared.clone();
        let thread = std::thread::Builder::new()
            .name("vhost-user ring".into())
            .spawn(move || work.run())?;
        Ok(Self { shared, thread })
    }

    /// Takes no more requests, and waits for those in flight. Returns the position of the next request to
    /// take.
    pub fn stop(self) -> u16 {
        self.shared.is_stopping.store(true, Ordering::Release);
        self.shared.rouse();
        self.thread.join().expect("a ring does not panic")
    }
}

/// A wait for room of the volume.
type Beginning = Pin<Box<dyn Future<Output = Held> + Send>>;

struct Work {
    ring: Ring,
    shared: Arc<Shared>,
    room: Own,
    /// A request that was taken, and has no room yet.
    waiting: Option<Request>,
    /// The wait for room of the volume.
    beginning: Option<Beginning>,
    /// The guest or the front end has broken the ring: no more requests are taken.
    is_broken: bool,
    /// There are answers that the guest was not told of.
    has_answered: bool,
}

impl Work {
    fn new(ring: Ring) -> io::Result<Self> {
        let shared = Shared {
            finished: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            is_stopping: AtomicBool::new(false),
        };
        Ok(Self {
            shared: Arc::new(shared),
            room: Own::default(),
            waiting: None,
            beginning: None,
            is_broken: false,
            has_answered: false,
            ring,
        })
    }

    fn run(mut self) -> u16 {
        if let Err(Lost) = self.go_on() {
            self.give_up("the memory is gone");
        }
        // An earlier ring may have taken the guest's kick.
        let mut look = true;
        loop {
            if look && !self.is_stopping() {
                self.take();
            }
            self.answer();
            if self.is_stopping() && self.room.requests() == 0 {
                break;
            }
            look = self.sleep();
        }
        match &self.waiting {
            // This request has not begun.
            Some(_) => self.ring.queue.next_avail().wrapping_sub(1),
            None => self.ring.queue.next_avail(),
        }
    }

    fn is_stopping(&self) -> bool {
        self.shared.is_stopping.load(Ordering::Acquire)
    }

    fn ram(&self) -> Arc<Ram> {
        self.ring
            .ends
            .ram
            .lock()
            .expect("no panic under this lock")
            .clone()
    }

    fn give_up(&mut self, why: &str) {
        if self.is_broken {
            return;
        }
        self.is_broken = true;
        tracing::warn!("queue {} of a virtual machine is broken: {why}", self.ring.index);
        let error = self.ring.ends.error.lock().expect("no panic under this lock");
        if let Some(error) = error.as_ref() {
            // The reader may have gone.
            let _ = rustix::io::write(error, &1u64.to_ne_bytes());
        }
    }

    /// Goes on at the position where an earlier daemon, or an earlier start, has left the queue.
    fn go_on(&mut self) -> Result<(), Lost> {
        let ram = self.ram();
        let queue = &mut self.ring.queue;
        let used = ram.touch(|memory| {
            queue.set_ready(true);
            let is_valid = queue.is_valid(memory);
            let used = queue.used_idx(memory, std::sync::atomic::Ordering::Acquire);
            is_valid.then_some(used.ok()).flatten()
        })?;
        let Some(used) = used else {
            self.give_up("it is not in the guest's memory");
            return Ok(());
        };
        queue.set_next_used(used.0);
        let Some(noted) = &mut self.ring.noted else {
            return Ok(());
        };
        let left = noted.begin(used.0);
        // All taken requests, answered or not, were taken in the order of the ring.
        queue.set_next_avail(used.0.wrapping_add(left.len() as u16));
        if left.is_empty() {
            return Ok(());
        }
        tracing::info!("{} requests of a virtual machine are begun again", left.len());
        self.again(&ram, &left)
    }

    /// Begins these requests again. A ring of our own with their numbers is placed beside the guest's memory.
    fn again(&mut self, ram: &Ram, heads: &[u16]) -> Result<(), Lost> {
        let size = self.ring.queue.size();
        let made = MmapRegion::new(4096.max(6 + 2 * usize::from(size)))
            .ok()
            .and_then(|mapping| GuestRegionMmap::new(mapping, GuestAddress(AGAIN)))
            .and_then(|region| ram.with(region));
        let queue = Queue::new(size).ok();
        let (Some(memory), Some(mut queue)) = (made, queue) else {
            self.give_up("requests cannot be begun again");
            return Ok(());
        };
        for (place, head) in (0..).zip(heads) {
            let at = GuestAddress(AGAIN + 4 + 2 * place);
            memory.write_obj(head.to_le(), at).expect("there is room");
        }
        let index = (heads.len() as u16).to_le();
        memory
            .write_obj(index, GuestAddress(AGAIN + 2))
            .expect("there is room");
        queue.set_ready(true);
        let table = GuestAddress(self.ring.queue.desc_table());
        let is_set = queue.try_set_desc_table_address(table).is_ok()
            && queue.try_set_avail_ring_address(GuestAddress(AGAIN)).is_ok();
        assert!(is_set, "both are aligned");
        for _ in heads {
            let length = self.ring.length.load(Ordering::Relaxed);
            let request = ram.touch_other(&memory, |memory| next(&mut queue, memory, length))?;
            let Ok(Some(request)) = request else {
                self.give_up("requests cannot be begun again");
                return Ok(());
            };
            self.begin(request);
            // There may be more requests than there is room for.
            while self.waiting.is_some() {
                if self.is_stopping() {
                    // The remaining requests are still noted in the inflight file.
                    self.waiting = None;
                    return Ok(());
                }
                self.sleep();
                self.answer();
                self.begin_waiting();
            }
        }
        Ok(())
    }

    /// Takes the available requests, as far as there is room.
    fn take(&mut self) {
        let ram = self.ram();
        let mut answered = Instant::now();
        loop {
            self.begin_waiting();
            // A guest may add requests as fast as they are taken: a stop must not wait for an end of them.
            if self.waiting.is_some() || self.is_broken || self.is_stopping() {
                return;
            }
            let length = self.ring.length.load(Ordering::Relaxed);
            let queue = &mut self.ring.queue;
            let taken = ram.touch(|memory| {
                queue.disable_notification(memory).map_err(drop)?;
                if let Some(request) = next(queue, memory, length)? {
                    return Ok(Some(request));
                }
                match queue.enable_notification(memory).map_err(drop)? {
                    true => next(queue, memory, length),
                    false => Ok(None),
                }
            });
            match taken {
                Ok(Ok(Some(request))) => {
                    if let Some(noted) = &mut self.ring.noted {
                        noted.note(request.head);
                    }
                    self.begin(request);
                }
                Ok(Ok(None)) => return,
                Ok(Err(())) => self.give_up("the guest's ring makes no sense"),
                Err(Lost) => self.give_up("the memory is gone"),
            }
            let finished = {
                let finished = self.shared.finished.lock().expect("no panic under this lock");
                finished.list.len()
            };
            let now = Instant::now();
            if finished >= TOGETHER || finished > 0 && now - answered >= NOT_LONG {
                self.answer();
                answered = now;
            }
        }
    }

    fn begin_waiting(&mut self) {
        if let Some(request) = self.waiting.take() {
            self.begin(request);
        }
    }

    fn begin(&mut self, request: Request) {
        let kib = request.needed_kib();
        if !self.room.try_begin(kib) {
            self.answer();
            if !self.room.try_begin(kib) {
                self.waiting = Some(request);
                return;
            }
        }
        let Some(held) = self.hold(kib) else {
            self.room.end(1, kib);
            self.waiting = Some(request);
            return;
        };
        let is_durable = self.ring.is_durable;
        let (wanted, extent, is_durable) = match request.asked {
            Asked::Read(extent) => (Wanted::Read, extent, false),
            Asked::Write(extent) => {
                let data = self.ram().touch(|memory| request.data(memory));
                match data {
                    Ok(Some(data)) => (Wanted::Write(Arc::new(data)), extent, is_durable),
                    // The guest's memory does not have the data.
                    _ => {
                        return self
                            .shared
                            .finish(request, held, Err(Failure::Disk(libc::EFAULT)));
                    }
                }
            }
            Asked::Zero { extent, may_free } => (Wanted::Zero { may_free }, extent, is_durable),
            Asked::Flush => (Wanted::Flush, Extent { offset: 0, length: 1 }, false),
            Asked::Id => return self.shared.finish(request, held, Ok(self.ring.id.to_vec())),
            Asked::Nothing | Asked::Refused(_) => return self.shared.finish(request, held, Ok(Vec::new())),
        };
        let shared = self.shared.clone();
        let reply = Box::new(move |result| shared.finish(request, held, result));
        self.ring.volume.request_here(wanted, extent, is_durable, reply);
    }

    /// Takes room of the volume; `None` while there is none. This thread is woken when there is.
    fn hold(&mut self, kib: usize) -> Option<Held> {
        let room = self.ring.volume.room();
        let mut beginning: Beginning = match self.beginning.take() {
            Some(beginning) => beginning,
            None => match room.try_begin(kib) {
                Some(held) => return Some(held),
                None => Box::pin(room.clone().begin(kib)),
            },
        };
        let waker = Waker::from(self.shared.clone());
        match beginning.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(held) => Some(held),
            Poll::Pending => {
                self.beginning = Some(beginning);
                None
            }
        }
    }

    /// Writes the results of ended requests, and tells the guest.
    fn answer(&mut self) {
        loop {
            let list = {
                let mut finished = self.shared.finished.lock().expect("no panic under this lock");
                std::mem::take(&mut finished.list)
            };
            if list.is_empty() {
                break;
            }
            let ram = self.ram();
            for (request, _held, result) in list {
                self.room.end(1, request.needed_kib());
                if !self.is_broken && self.write(&ram, &request, result).is_err() {
                    self.give_up("answers cannot be written");
                }
            }
        }
        if std::mem::take(&mut self.has_answered) && !self.is_broken {
            let ram = self.ram();
            let needs = ram.touch(|memory| self.ring.queue.needs_notification(memory));
            if let Ok(Ok(true)) = needs {
                call(&self.ring.ends.call);
            }
        }
    }

    fn write(&mut self, ram: &Ram, request: &Request, result: Result<Vec<u8>, Failure>) -> Result<(), ()> {
        let (mut status, data) = match (request.asked, result) {
            (Asked::Refused(status), _) => (status, Vec::new()),
            (_, Ok(data)) => (OK, data),
            (_, Err(failure)) => {
                tracing::debug!(
                    "a request of a virtual machine fails: {}",
                    words::failure(&failure)
                );
                (FAILED, Vec::new())
            }
        };
        let queue = &mut self.ring.queue;
        let noted = self.ring.noted.as_ref();
        let written = ram.touch(|memory| {
            let room = request.writable.iter().map(|part| part.length as usize).sum();
            // Only the name may be cut off.
            let data = &data[..data.len().min(room)];
            if !scatter(memory, &request.writable, data) {
                status = FAILED;
            }
            let mut length = 0;
            if let Some(address) = request.status
                && memory.write_obj(status, address).is_ok()
            {
                length = data.len() as u32 + 1;
            }
            if let Some(noted) = noted {
                noted.answering(request.head);
            }
            queue.add_used(memory, request.head, length).map_err(drop)?;
            if let Some(noted) = noted {
                noted.answered(request.head, queue.next_used());
            }
            Ok(())
        });
        self.has_answered = true;
        written.map_err(|Lost| ())?
    }

    /// Sleeps until there is something to do. True if the guest has kicked.
    fn sleep(&mut self) -> bool {
        {
            let mut finished = self.shared.finished.lock().expect("no panic under this lock");
            if !finished.list.is_empty() {
                return true;
            }
            finished.sleeps = true;
        }
        // While a request waits for room, no others are taken.
        let listens = !self.is_broken && !self.is_stopping() && self.waiting.is_none();
        let mut ends = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        if listens {
            ends.push(PollFd::new(&self.ring.kick, PollFlags::IN));
        }
        let polled = poll(&mut ends, None);
        let is_kicked = ends.get(1).is_some_and(|end| !end.revents().is_empty());
        self.shared
            .finished
            .lock()
            .expect("no panic under this lock")
            .sleeps = false;
        if !matches!(polled, Ok(_) | Err(Errno::INTR)) {
            self.give_up("it cannot be waited for");
        }
        let mut count = [0; 8];
        // The wake-up may have had another cause.
        let _ = rustix::io::read(&self.shared.wake, &mut count);
        if is_kicked {
            self.hear();
        }
        // There may be room now.
        is_kicked || !listens
    }

    /// Takes the kick. Never waits, for any kind of descriptor.
    fn hear(&mut self) {
        let mut count = [0; 8];
        let mut parts = [io::IoSliceMut::new(&mut count)];
        match rustix::io::preadv2(&self.ring.kick, &mut parts, u64::MAX, ReadWriteFlags::NOWAIT) {
            Ok(8) | Err(Errno::AGAIN | Errno::INTR) => {}
            _ => self.give_up("its kick is no eventfd"),
        }
    }
}

/// Tells the guest that there are answers.
pub fn call(call: &Mutex<Option<File>>) {
    let call = call.lock().expect("no panic under this lock");
    if let Some(call) = call.as_ref() {
        // The eventfd is full if the guest has not read it for long; the guest is told all the same.
        let _ = rustix::io::write(call, &1u64.to_ne_bytes());
    }
}

/// The next request in a ring. An error if the ring is invalid.
fn next(queue: &mut Queue, memory: &Memory, length: u64) -> Result<Option<Request>, ()> {
    let size = queue.size();
    let mut chains = queue.iter(memory).map_err(drop)?;
    let chain: Option<DescriptorChain<&Memory>> = chains.next();
    match chain {
        None => Ok(None),
        Some(chain) if chain.head_index() >= size => Err(()),
        Some(chain) => {
            let head = chain.head_index();
            Ok(Some(Request::parse(memory, head, chain, length)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::hostile::{AVAILABLE, Guest, Options};
    use super::*;
    use crate::disk::Disks;
    use crate::store::Store;

    /// A guest may add requests forever.
    #[test]
    fn a_ring_that_is_stopped_takes_nothing_more_even_if_there_is_more() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::new_file(&folder.path().join("data"), 1 << 20).expect("made");
        let volume = Volume::new(store, 1 << 20, Disks::new(1), crate::faults::none);
        let options = Options {
            size: 8,
            knows_events: true,
            is_durable: false,
            notes: false,
        };
        let guest = Guest::new(&volume, options);
        guest.hands().write(AVAILABLE + 2, &3u16.to_le_bytes());
        let taken = |is_stopping: bool| {
            let mut work = Work::new(guest.ring()).expect("an eventfd");
            work.go_on().expect("the memory is there");
            work.shared.is_stopping.store(is_stopping, Ordering::Relaxed);
            work.take();
            work.ring.queue.next_avail()
        };
        assert_eq!((taken(true), taken(false)), (0, 3));
    }
}
