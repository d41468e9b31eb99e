//! Requests in flight, in a file that the front end keeps (the vhost-user protocol, "Inflight I/O tracking",
//! split virtqueues).
//!
//! After a daemon was killed, the next one gets the file back, and carries out the requests without an
//! answer. A request is noted before it begins. It becomes the queue's last batch before its answer is in the
//! used ring, and its note is cleared after that. Whenever the daemon is killed, a noted request therefore
//! has no answer, unless it is the last batch of a used ring that has advanced.
//!
//! ```text
//!  a queue:    u64 features, u16 version, u16 descriptors, u16 last batch, u16 used index; and for each descriptor:
//!              u8 in flight, 5 unused, u16 next of a batch, u64 order
//! ```

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags};
use vhost::vhost_user::message::VhostUserInflight;
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

use super::config::{MAX_QUEUE_SIZE, MAX_QUEUES};
use super::memory::is_so_long;

const HEAD: usize = 16;
const VERSION: usize = 8;
const DESCRIPTORS: usize = 10;
const LAST_BATCH: usize = 12;
const USED: usize = 14;
const ENTRY: usize = 16;
const NEXT: usize = 6;
const ORDER: usize = 8;

/// Least distance of the queues.
const ALIGNED: usize = 64;

/// The seal: no process can make the file shorter, so no access fails.
const SEALS: SealFlags = SealFlags::SHRINK;

/// The file, mapped.
pub struct Inflight {
    map: MmapRegion,
    queues: u16,
    size: u16,
}

fn bytes_of_queue(size: u16) -> usize {
    (HEAD + ENTRY * usize::from(size)).next_multiple_of(ALIGNED)
}

impl Inflight {
    /// Makes a file in which no request is in flight.
    pub fn make(wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File), String> {
        let (queues, size) = (wanted.num_queues, wanted.queue_size);
        if !(1..=MAX_QUEUES).contains(&queues) || !(1..=MAX_QUEUE_SIZE).contains(&size) {
            return Err(format!("{queues} queues of {size} descriptors cannot be"));
        }
        let length = bytes_of_queue(size) as u64 * u64::from(queues);
        let make = || -> std::io::Result<File> {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = File::from(rustix::fs::memfd_create("vhost-user-inflight", flags)?);
            file.set_len(length)?;
            rustix::fs::fcntl_add_seals(&file, SEALS | SealFlags::GROW | SealFlags::SEAL)?;
            Ok(file)
        };
        let file = make().map_err(|error| error.to_string())?;
        Ok((VhostUserInflight::new(length, 0, queues, size), file))
    }

    /// Opens a file that [`Inflight::make`] has made, perhaps in an earlier daemon.
    pub fn open(given: &VhostUserInflight, file: File) -> Result<Arc<Self>, String> {
        let (queues, size) = (given.num_queues, given.queue_size);
        if !(1..=MAX_QUEUES).contains(&queues) || !(1..=MAX_QUEUE_SIZE).contains(&size) {
            return Err(format!("{queues} queues of {size} descriptors cannot be"));
        }
        let seals = rustix::fs::fcntl_get_seals(&file).map_err(|error| error.to_string())?;
        if !seals.contains(SEALS) {
            return Err("the file of requests under way is not ours: it can be cut off".into());
        }
        let length = bytes_of_queue(size) * usize::from(queues);
        if given.mmap_size < length as u64 {
            return Err("the file of requests under way is too short".into());
        }
        is_so_long(&file, given.mmap_offset, length as u64)?;
        let map = MmapRegion::from_file(FileOffset::new(file, given.mmap_offset), length)
            .map_err(|error| error.to_string())?;
        Ok(Arc::new(Self { map, queues, size }))
    }

    /// The part of a queue with this many descriptors.
    pub fn queue(self: &Arc<Self>, index: u16, size: u16) -> Option<Noted> {
        (index < self.queues && size <= self.size).then(|| Noted {
            inflight: self.clone(),
            start: usize::from(index) * bytes_of_queue(self.size),
            size,
            order: 0,
        })
    }
}

/// Requests of one queue that are in flight.
pub struct Noted {
    inflight: Arc<Inflight>,
    start: usize,
    size: u16,
    /// Number of requests noted so far.
    order: u64,
}

impl Noted {
    fn load<T: vm_memory::AtomicAccess>(&self, at: usize) -> T {
        let map = self.inflight.map.as_volatile_slice();
        map.load(self.start + at, Ordering::Acquire)
            .expect("the file is so long")
    }

    fn store<T: vm_memory::AtomicAccess>(&self, at: usize, value: T) {
        let map = self.inflight.map.as_volatile_slice();
        map.store(value, self.start + at, Ordering::Release)
            .expect("the file is so long");
    }

    fn entry(head: u16) -> usize {
        HEAD + ENTRY * usize::from(head)
    }

    /// Called before the queue goes on. Returns the requests that were taken and have no answer, oldest
    /// first. `used` is the index of the used ring.
    pub fn begin(&mut self, used: u16) -> Vec<u16> {
        self.store(VERSION, 1u16);
        self.store(DESCRIPTORS, self.size);
        let last: u16 = self.load(LAST_BATCH);
        if self.load::<u16>(USED) != used {
            // Killed between the answer and its note.
            if last < self.size {
                self.store(Self::entry(last), 0u8);
            }
            self.store(USED, used);
        }
        let mut left: Vec<(u64, u16)> = (0..self.size)
            .filter(|&head| self.load::<u8>(Self::entry(head)) == 1)
            .map(|head| (self.load(Self::entry(head) + ORDER), head))
            .collect();
        left.sort_unstable();
        self.order = left.last().map_or(0, |(order, _)| order.wrapping_add(1));
        left.into_iter().map(|(_, head)| head).collect()
    }

    /// Notes a request that is about to begin.
    pub fn note(&mut self, head: u16) {
        if head >= self.size {
            return;
        }
        let entry = Self::entry(head);
        self.store(entry + ORDER, self.order);
        self.order = self.order.wrapping_add(1);
        self.store(entry, 1u8);
    }

    /// Called before the request's answer is in the used ring.
    pub fn answering(&self, head: u16) {
        if head < self.size {
            self.store(Self::entry(head) + NEXT, self.load::<u16>(LAST_BATCH));
            self.store(LAST_BATCH, head);
        }
    }

    /// Called when the answer is in the used ring. `used` is the ring's index from now on.
    pub fn answered(&self, head: u16, used: u16) {
        if head < self.size {
            self.store(Self::entry(head), 0u8);
        }
        self.store(USED, used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made() -> (VhostUserInflight, File) {
        Inflight::make(&VhostUserInflight::new(0, 0, 2, 8)).expect("made")
    }

    fn opened(made: &(VhostUserInflight, File)) -> Noted {
        let file = made.1.try_clone().expect("a copy");
        let inflight = Inflight::open(&made.0, file).expect("ours");
        inflight.queue(1, 8).expect("the second queue")
    }

    /// The daemon is killed at each point between a request and the note of its answer.
    #[test]
    fn what_has_no_answer_is_found_and_nothing_else() {
        let made = made();
        let mut noted = opened(&made);
        assert!(noted.begin(0).is_empty());
        for head in [5, 2, 7] {
            noted.note(head);
        }
        assert_eq!(opened(&made).begin(0), [5, 2, 7], "in their order");
        noted.answering(2);
        assert_eq!(opened(&made).begin(0), [5, 2, 7], "its answer is not there yet");
        assert_eq!(
            opened(&made).begin(1),
            [5, 7],
            "its answer is there, and not noted"
        );
        assert_eq!(
            opened(&made).begin(1),
            [5, 7],
            "and the same for one that comes later"
        );
        let mut noted = opened(&made);
        assert_eq!(noted.begin(1), [5, 7]);
        noted.note(0);
        noted.answering(5);
        noted.answered(5, 2);
        assert_eq!(opened(&made).begin(2), [7, 0], "the order goes on");
        let file = made.1.try_clone().expect("a copy");
        let inflight = Inflight::open(&made.0, file).expect("ours");
        assert!(inflight.queue(0, 8).expect("the first").begin(0).is_empty());
        assert!(inflight.queue(2, 8).is_none() && inflight.queue(0, 16).is_none());
    }

    #[test]
    fn a_file_that_can_be_cut_off_or_says_nonsense_is_not_believed() {
        let made = made();
        let free = tempfile::tempfile().expect("a file");
        free.set_len(1 << 20).expect("it grows");
        assert!(Inflight::open(&made.0, free).is_err(), "it can be cut off");
        for (queues, size) in [(0, 8), (65, 8), (2, 0), (2, 2048)] {
            let wanted = VhostUserInflight::new(1 << 30, 0, queues, size);
            assert!(Inflight::make(&wanted).is_err());
            assert!(Inflight::open(&wanted, made.1.try_clone().expect("a copy")).is_err());
        }
        for (length, offset, size) in [(1, 0, 8), (1 << 30, 64, 8), (1 << 30, 0, 512)] {
            let given = VhostUserInflight::new(length, offset, 2, size);
            assert!(Inflight::open(&given, made.1.try_clone().expect("a copy")).is_err());
        }
        // The front end may write anything.
        rustix::io::pwrite(&made.1, &[0xff; 288], 0).expect("written");
        let mut noted = opened(&made);
        noted.begin(3);
        noted.note(u16::MAX);
        noted.answering(u16::MAX);
        noted.answered(u16::MAX, 4);
    }
}
