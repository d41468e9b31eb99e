//! A guest that writes anything into its memory while a ring works there: for a test, and for the fuzz target
//! (`fuzz/`).
//!
//! The guest's RAM lies between two inaccessible pages, so that an access beside it faults.

use std::fs::File;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{pread, pwrite};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use vhost::vhost_user::message::VhostUserInflight;
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, MmapRegion};

use super::inflight::Inflight;
use super::memory::Ram;
use super::ring::{Ends, Ring, Running};
use crate::volume::Volume;

/// Bytes of the RAM, which begins at 0.
pub const RAM: u64 = 1 << 16;
/// The largest queue for which there is room.
pub const MAX_SIZE: u16 = 256;
/// Address of the descriptors.
pub const TABLE: u64 = 0;
/// Address of the available ring.
pub const AVAILABLE: u64 = 0x1000;
/// Address of the used ring.
pub const USED: u64 = 0x2000;

const PAGE: usize = 4096;

/// Limit for a ring to stop on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Settings by the front end.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Size of the queue: a power of two, [`MAX_SIZE`] at most.
    pub size: u16,
    /// There are event indices.
    pub knows_events: bool,
    /// The guest knows no flush.
    pub is_durable: bool,
    /// There is an inflight file.
    pub notes: bool,
}

/// RAM between two inaccessible pages.
struct Guarded {
    start: usize,
    file: File,
}

impl Guarded {
    const LENGTH: usize = RAM as usize + 2 * PAGE;

    fn new() -> rustix::io::Result<Self> {
        let file = File::from(memfd_create("hostile-guest", MemfdFlags::CLOEXEC)?);
        rustix::fs::ftruncate(&file, RAM)?;
        // SAFETY: a new mapping, wherever there is room.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                Self::LENGTH,
                ProtFlags::empty(),
                MapFlags::PRIVATE,
            )?
        };
        let guarded = Self {
            start: start as usize,
            file,
        };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: it replaces a part of the mapping above, which nobody uses.
        unsafe {
            mmap(
                guarded.ram().cast(),
                RAM as usize,
                access,
                MapFlags::SHARED | MapFlags::FIXED,
                &guarded.file,
                0,
            )?;
        }
        Ok(guarded)
    }

    fn ram(&self) -> *mut u8 {
        (self.start + PAGE) as *mut u8
    }

    fn region(&self) -> MmapRegion {
        let access = (ProtFlags::READ | ProtFlags::WRITE).bits() as i32;
        let flags = MapFlags::SHARED.bits() as i32;
        // SAFETY: the mapping is there until this is dropped, which a guest does last.
        unsafe { MmapRegion::build_raw(self.ram(), RAM as usize, access, flags) }.expect("it is mapped")
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: it is ours, and the regions that were made of it are gone.
        unsafe { munmap(self.start as *mut _, Self::LENGTH) }.expect("it is mapped");
    }
}

/// Actions of a guest and its front end, from any thread.
#[derive(Debug)]
pub struct Hands {
    ram: File,
    kick: File,
    notes: Option<File>,
}

impl Hands {
    /// Cuts the RAM's file off: its pages cannot be touched any more.
    #[cfg(test)]
    pub fn cut_off(&self) {
        self.ram.set_len(0).expect("it can be cut");
    }

    /// Writes into the RAM, as far as there is some.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        write(&self.ram, at, bytes);
    }

    /// Writes into the inflight file, if there is one, as far as it goes.
    pub fn write_notes(&self, at: u64, bytes: &[u8]) {
        if let Some(notes) = &self.notes {
            write(notes, at, bytes);
        }
    }

    /// Bytes of the RAM.
    pub fn read(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let read = pread(&self.ram, &mut bytes, at).expect("it can be read");
        assert_eq!(read, length, "it is in the RAM");
        bytes
    }

    /// Tells the ring that there are requests.
    pub fn kick(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).expect("an eventfd is written");
    }
}

fn write(file: &File, at: u64, bytes: &[u8]) {
    let end = file.metadata().expect("it is there").len();
    let room = usize::try_from(end.saturating_sub(at)).unwrap_or(usize::MAX);
    let bytes = &bytes[..bytes.len().min(room)];
    if !bytes.is_empty() {
        pwrite(file, bytes, at).expect("it can be written");
    }
}

/// The guest.
pub struct Guest {
    volume: Arc<Volume>,
    options: Options,
    hands: Arc<Hands>,
    /// Addresses of the descriptors, the available ring and the used ring.
    places: [u64; 3],
    call: File,
    error: File,
    inflight: Option<Arc<Inflight>>,
    base: u16,
    running: Option<Running>,
    ram: Arc<Ram>,
    /// Declared behind `ram`, so that it is dropped later.
    guarded: Option<Guarded>,
}

impl Guest {
    /// A guest whose RAM is zero. The ring does not work yet.
    pub fn new(volume: &Arc<Volume>, options: Options) -> Self {
        let guarded = Guarded::new().expect("there is room for it");
        let event = || File::from(eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"));
        let copy = |file: &File| file.try_clone().expect("a descriptor");
        let noted = options.notes.then(|| {
            let wanted = VhostUserInflight::new(0, 0, 1, options.size);
            let (given, file) = Inflight::make(&wanted).expect("a file");
            let inflight = Inflight::open(&given, copy(&file)).expect("it is ours");
            (inflight, file)
        });
        let (inflight, notes) = noted.unzip();
        Self {
            volume: volume.clone(),
            options,
            hands: Arc::new(Hands {
                ram: copy(&guarded.file),
                kick: event(),
                notes,
            }),
            places: [TABLE, AVAILABLE, USED],
            call: event(),
            error: event(),
            inflight,
            base: 0,
            running: None,
            ram: Arc::new(Ram::of_mapping(guarded.region())),
            guarded: Some(guarded),
        }
    }

    /// The hands of this guest.
    pub fn hands(&self) -> Arc<Hands> {
        self.hands.clone()
    }

    /// The ring, from the position where it was stopped.
    pub fn ring(&self) -> Ring {
        let mut queue = Queue::new(MAX_SIZE).expect("a size");
        queue.try_set_size(self.options.size).expect("a size");
        let set = [
            queue.try_set_desc_table_address(GuestAddress(self.places[0])),
            queue.try_set_avail_ring_address(GuestAddress(self.places[1])),
            queue.try_set_used_ring_address(GuestAddress(self.places[2])),
        ];
        assert!(set.iter().all(Result::is_ok), "they are aligned");
        queue.set_event_idx(self.options.knows_events);
        queue.set_next_avail(self.base);
        let noted = self
            .inflight
            .as_ref()
            .and_then(|inflight| inflight.queue(0, self.options.size));
        let copy = |file: &File| file.try_clone().expect("a descriptor");
        let ends = Ends {
            ram: Mutex::new(self.ram.clone()),
            call: Mutex::new(Some(copy(&self.call))),
            error: Mutex::new(Some(copy(&self.error))),
        };
        Ring {
            index: 0,
            queue,
            noted,
            kick: copy(&self.hands.kick),
            ends: Arc::new(ends),
            volume: self.volume.clone(),
            length: Arc::new(AtomicU64::new(self.volume.length())),
            id: *b"twenty letters of it",
            is_durable: self.options.is_durable,
        }
    }

    /// Puts the queue at other addresses, from its next start on.
    #[cfg(test)]
    pub fn put(&mut self, places: [u64; 3]) {
        self.places = places;
    }

    /// Starts the ring.
    pub fn start(&mut self) {
        self.running = Some(Running::start(self.ring()).expect("a thread"));
    }

    /// Stops the ring, also if the guest goes on meanwhile.
    ///
    /// # Panics
    /// If it has panicked, or does not stop.
    pub fn stop(&mut self) {
        let Some(running) = self.running.take() else {
            return;
        };
        let (sender, stopped) = channel();
        let stopping = std::thread::spawn(move || {
            let base = running.stop();
            // The receiver may have given up.
            let _ = sender.send(base);
        });
        match stopped.recv_timeout(PATIENCE) {
            Ok(base) => self.base = base,
            Err(RecvTimeoutError::Timeout) => {
                // The ring still uses the memory.
                std::mem::forget(self.guarded.take());
                panic!("the ring does not stop");
            }
            Err(RecvTimeoutError::Disconnected) => panic!("the ring has panicked"),
        }
        stopping.join().expect("it has stopped");
    }

    /// Waits until the ring tells that there are answers.
    ///
    /// # Panics
    /// If it does not.
    pub fn until_called(&self) {
        assert!(is_written(&self.call, PATIENCE), "there is no answer");
        rustix::io::read(&self.call, &mut [0; 8]).expect("an eventfd is read");
    }

    /// Waits until the front end is told that the ring is broken.
    ///
    /// # Panics
    /// If it is not.
    #[cfg(test)]
    pub fn until_broken(&self) {
        assert!(is_written(&self.error, PATIENCE), "the ring is not broken");
    }

    /// Whether the front end was told that the ring is broken.
    #[cfg(test)]
    pub fn is_broken(&self) -> bool {
        is_written(&self.error, Duration::ZERO)
    }
}

/// Whether an eventfd is written within this time.
fn is_written(event: &File, limit: Duration) -> bool {
    let mut ends = [PollFd::new(event, PollFlags::IN)];
    let limit = rustix::time::Timespec::try_from(limit).expect("it is short");
    poll(&mut ends, Some(&limit)) == Ok(1)
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Whether a correct guest of this volume is served: it writes, and reads the same data back.
///
/// # Panics
/// If it is not.
pub fn serves(volume: &Arc<Volume>) {
    let options = Options {
        size: 8,
        knows_events: true,
        is_durable: false,
        notes: true,
    };
    let mut guest = Guest::new(volume, options);
    let hands = guest.hands();
    guest.start();
    let (heads, data, answers) = (0x3000, 0x8000, 0x9000);
    let written: Vec<u8> = (0..512u32).map(|byte| (byte * 7) as u8).collect();
    hands.write(data, &written);
    for (turn, kind, flags) in [(0u16, 1u32, 0u16), (1, 0, 2)] {
        // The fourth sector.
        let head = [&kind.to_le_bytes()[..], &[0; 4], &3u64.to_le_bytes()].concat();
        hands.write(heads, &head);
        let descriptor = |address: u64, length: u32, flags: u16, next: u16| {
            [
                &address.to_le_bytes()[..],
                &length.to_le_bytes(),
                &flags.to_le_bytes(),
                &next.to_le_bytes(),
            ]
            .concat()
        };
        let chain = [
            descriptor(heads, 16, 1, 1),
            descriptor(data, 512, 1 | flags, 2),
            descriptor(answers, 1, 2, 0),
        ];
        hands.write(TABLE, &chain.concat());
        hands.write(answers, &[0xff]);
        hands.write(AVAILABLE + 2, &(turn + 1).to_le_bytes());
        hands.kick();
        guest.until_called();
        assert_eq!(
            hands.read(USED + 2, 2),
            (turn + 1).to_le_bytes(),
            "one answer more"
        );
        assert_eq!(hands.read(answers, 1), [0], "it was done");
        if kind == 1 {
            hands.write(data, &[0; 512]);
            // The guest wants a notification for the second answer as well.
            hands.write(AVAILABLE + 4 + 2 * 8, &1u16.to_le_bytes());
        }
    }
    assert!(hands.read(data, 512) == written, "it reads something else");
    guest.stop();
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use proptest::prelude::*;
    use rand::rngs::StdRng;
    use rand::seq::IndexedRandom;
    use rand::{Rng, SeedableRng};

    use super::*;
    use crate::disk::Disks;
    use crate::store::Store;

    const LENGTH: u64 = 1 << 20;

    /// Indirect tables, heads of requests, and data; no descriptor names the quiet ranges between and behind
    /// these.
    const INNER: u64 = 0x3000;
    const HEADS: u64 = 0x4000;
    const QUIET: [std::ops::Range<u64>; 2] = [0x6000..0x8000, 0xc000..RAM];
    const DATA: u64 = 0x8000;
    const DATA_STARTS: u64 = 0x3000;
    const PATTERN: u8 = 0xa5;

    const NEXT: u16 = 1;
    const WRITABLE: u16 = 2;
    const INDIRECT: u16 = 4;

    /// The kind of memory that a descriptor names. It never changes, so a guest that changes descriptors
    /// while they are read never names a quiet range.
    #[derive(Clone, Copy)]
    enum Names {
        Data,
        Head,
        Inner,
        /// Nothing in the guest's memory.
        Outside,
    }

    const LENGTHS: [u32; 12] = [0, 1, 15, 16, 17, 20, 48, 512, 513, 4096, 32 << 20, u32::MAX];

    struct Storm {
        random: StdRng,
        size: u16,
        available: u16,
        /// Now and then it writes impossible values, which end the ring's work.
        is_rude: bool,
        names: Vec<Names>,
    }

    impl Storm {
        fn new(seed: u64, size: u16, is_rude: bool) -> Self {
            let mut random = StdRng::seed_from_u64(seed);
            // The queue's descriptors, and as many in indirect tables.
            let names = (0..2 * size).map(|_| match random.random_range(0..10) {
                0..4 => Names::Data,
                4..7 => Names::Head,
                7..9 => Names::Inner,
                _ => Names::Outside,
            });
            Self {
                names: names.collect(),
                random,
                size,
                available: 0,
                is_rude,
            }
        }

        fn address(&mut self, slot: u16) -> u64 {
            match self.names[usize::from(slot)] {
                Names::Data => DATA + self.random.random_range(0..DATA_STARTS),
                Names::Head => HEADS + 16 * self.random.random_range(0..256),
                Names::Inner => INNER + 16 * self.random.random_range(0..u64::from(self.size)),
                Names::Outside => *[RAM, RAM + 1, 1 << 32, 1 << 60, u64::MAX - 15, u64::MAX]
                    .choose(&mut self.random)
                    .expect("some"),
            }
        }

        fn flags(&mut self, slot: u16) -> u16 {
            let nonsense = self.random.random::<u16>() & !7;
            let next = NEXT * u16::from(self.random.random_ratio(3, 4));
            let writable = WRITABLE * u16::from(self.random.random::<bool>());
            next | match self.names[usize::from(slot)] {
                Names::Data => writable,
                Names::Head => 0,
                Names::Inner => INDIRECT | writable,
                Names::Outside => {
                    nonsense | writable | (INDIRECT * u16::from(self.random.random_ratio(1, 4)))
                }
            }
        }

        fn place(&self, slot: u16) -> u64 {
            match slot.checked_sub(self.size) {
                None => TABLE + 16 * u64::from(slot),
                Some(inner) => INNER + 16 * u64::from(inner),
            }
        }

        fn change(&mut self, hands: &Hands) {
            let slot = self.random.random_range(0..2 * self.size);
            let place = self.place(slot);
            match self.random.random_range(0..12) {
                0 => {
                    let address = self.address(slot);
                    hands.write(place, &address.to_le_bytes());
                }
                1 => {
                    let length = LENGTHS.choose(&mut self.random).expect("some");
                    hands.write(place + 8, &length.to_le_bytes());
                }
                2 => {
                    let flags = self.flags(slot);
                    hands.write(place + 12, &flags.to_le_bytes());
                }
                3 => {
                    let next = self.random.random_range(0..self.size + 2);
                    hands.write(place + 14, &next.to_le_bytes());
                }
                4 | 5 => {
                    let kind = *[0u32, 1, 4, 8, 11, 13, 14, u32::MAX]
                        .choose(&mut self.random)
                        .expect("some");
                    let sector = *[0, 1, 2047, 2048, 1 << 55, u64::MAX]
                        .choose(&mut self.random)
                        .expect("some");
                    let head = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
                    hands.write(HEADS + 16 * self.random.random_range(0..256), &head);
                }
                6 if self.is_rude && self.random.random_ratio(1, 64) => {
                    // Nonsense in either ring, and in the inflight file.
                    let noise: [u8; 8] = self.random.random();
                    let at = self.random.random_range(0..0x400);
                    match self.random.random_range(0..3) {
                        0 => hands.write(AVAILABLE + at, &noise),
                        1 => hands.write(USED + at, &noise),
                        _ => hands.write_notes(at, &noise),
                    }
                }
                6 => hands.write(USED + self.random.random_range(4..0x400), &[self.random.random()]),
                _ => {
                    let used = hands.read(USED + 2, 2).try_into().expect("two bytes");
                    let waiting = self.available.wrapping_sub(u16::from_le_bytes(used));
                    let more = self.random.random_range(1..=4);
                    // More requests than the ring has room for would end it.
                    for _ in 0..self.size.saturating_sub(waiting).min(more) {
                        let entry = AVAILABLE + 4 + 2 * u64::from(self.available % self.size);
                        let head = self.random.random_range(0..self.size);
                        hands.write(entry, &head.to_le_bytes());
                        self.available = self.available.wrapping_add(1);
                    }
                    hands.write(AVAILABLE + 2, &self.available.to_le_bytes());
                    hands.kick();
                    std::thread::yield_now();
                }
            }
        }

        /// The first descriptors and heads.
        fn prepare(&mut self, hands: &Hands) {
            for slot in 0..2 * self.size {
                let (address, flags) = (self.address(slot), self.flags(slot));
                let length = *LENGTHS.choose(&mut self.random).expect("some");
                let next = self.random.random_range(0..self.size);
                let descriptor = [
                    &address.to_le_bytes()[..],
                    &length.to_le_bytes(),
                    &flags.to_le_bytes(),
                    &next.to_le_bytes(),
                ];
                hands.write(self.place(slot), &descriptor.concat());
            }
            for quiet in QUIET {
                hands.write(quiet.start, &vec![PATTERN; (quiet.end - quiet.start) as usize]);
            }
        }
    }

    thread_local! {
        static VOLUME: (tempfile::TempDir, Arc<Volume>) = {
            // In memory, so that flushes are quick.
            let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
            let store = Store::new_file(&folder.path().join("data"), LENGTH).expect("made");
            let volume = Volume::new(store, LENGTH, Disks::new(1), crate::faults::none);
            (folder, volume)
        };
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        /// A guest changes rings, descriptors, indirect tables and heads while they are read, and goes on
        /// when the ring is stopped. The ring neither panics nor goes on; only memory that a descriptor names
        /// is written; the next guest is served.
        #[test]
        fn a_guest_that_changes_what_is_read_harms_itself_alone(
            seed in any::<u64>(),
            log_size in 0..9u32,
            knows_events in any::<bool>(),
            is_durable in any::<bool>(),
            notes in any::<bool>(),
            is_rude in prop::bool::weighted(0.3),
            changes in 0..10_000u32,
        ) {
            VOLUME.with(|(folder, volume)| {
                let options = Options { size: 1 << log_size, knows_events, is_durable, notes };
                let mut guest = Guest::new(volume, options);
                let mut storm = Storm::new(seed, options.size, is_rude);
                let hands = guest.hands();
                storm.prepare(&hands);
                guest.start();
                let is_over = AtomicBool::new(false);
                std::thread::scope(|scope| {
                    let (hands, is_over) = (&hands, &is_over);
                    let (sender, enough) = channel();
                    scope.spawn(move || {
                        let mut made = 0;
                        while made < changes || !is_over.load(Ordering::Relaxed) {
                            storm.change(hands);
                            made += 1;
                            if made == changes {
                                sender.send(()).expect("it is waited for");
                            }
                        }
                    });
                    if changes > 0 {
                        enough.recv().expect("it does not panic");
                    }
                    for _ in 0..2 {
                        guest.stop();
                        guest.start();
                    }
                    guest.stop();
                    is_over.store(true, Ordering::Relaxed);
                });
                for quiet in QUIET {
                    let is_whole = hands
                        .read(quiet.start, (quiet.end - quiet.start) as usize)
                        .iter()
                        .all(|&byte| byte == PATTERN);
                    assert!(is_whole, "something was written into {quiet:?}, which nothing names");
                }
                let data = std::fs::metadata(folder.path().join("data")).expect("it is there");
                assert_eq!(data.len(), LENGTH, "the disk has another length");
                serves(volume);
            });
        }
    }
}
