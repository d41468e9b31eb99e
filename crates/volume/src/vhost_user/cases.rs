//! Rings, chains and requests that make no sense, one by one, each with its outcome. Whatever a guest writes,
//! its ring neither panics nor hangs, nothing is written into memory that no descriptor names, and other
//! clients of the volume are served.

mod tables;

use std::sync::Arc;

use tempfile::TempDir;

use self::tables::{ADDRESSES, CHAINS, LENGTHS, Outcome, PLACES, RINGS, TABLES};
use super::hostile::{AVAILABLE, Guest, Hands, Options, RAM, TABLE, USED, serves};
use crate::disk::Disks;
use crate::store::Store;
use crate::volume::Volume;

/// The length of the disk.
const LENGTH: u64 = 1 << 20;

/// Descriptors of the queue.
const SIZE: u16 = 8;

/// Flags of a descriptor.
const NEXT: u16 = 1;
const WRITABLE: u16 = 2;

/// The kind of a read.
const READ: u32 = 0;

/// Addresses of a request's head, its data and its status, and of memory that no descriptor names.
const HEAD: u64 = 0x3000;
const DATA: u64 = 0x8000;
const STATUS: u64 = 0x9000;
const QUIET: std::ops::Range<u64> = 0xc000..RAM;

/// Content of memory that nobody has written.
const PATTERN: u8 = 0xa5;

fn descriptor(hands: &Hands, at: u64, (address, length, flags, next): (u64, u32, u16, u16)) {
    let bytes = [
        &address.to_le_bytes()[..],
        &length.to_le_bytes(),
        &flags.to_le_bytes(),
        &next.to_le_bytes(),
    ];
    hands.write(at, &bytes.concat());
}

/// Descriptors from this address on.
fn descriptors(hands: &Hands, at: u64, all: &[(u64, u32, u16, u16)]) {
    for (place, one) in (at..).step_by(16).zip(all) {
        descriptor(hands, place, *one);
    }
}

/// The queue's descriptors.
fn chain(hands: &Hands, all: &[(u64, u32, u16, u16)]) {
    descriptors(hands, TABLE, all);
}

/// Makes the head a request of this kind, from this sector on.
fn asks(hands: &Hands, kind: u32, sector: u64) {
    let head = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
    hands.write(HEAD, &head);
}

/// A driver's usual chain: head, data, status.
fn usual(hands: &Hands, length: u32, flags: u16) {
    chain(
        hands,
        &[
            (HEAD, 16, NEXT, 1),
            (DATA, length, NEXT | flags, 2),
            (STATUS, 1, WRITABLE, 0),
        ],
    );
}

fn available(hands: &Hands, index: u16) {
    hands.write(AVAILABLE + 2, &index.to_le_bytes());
}

/// A volume, and the file with its data.
struct Disk {
    volume: Arc<Volume>,
    folder: TempDir,
}

impl Disk {
    fn new() -> Self {
        // In memory, so that flushes are quick.
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
        let store = Store::new_file(&folder.path().join("data"), LENGTH).expect("made");
        let volume = Volume::new(store, LENGTH, Disks::new(1), crate::faults::none);
        Self { volume, folder }
    }

    /// A guest with one request, which reads the first sector.
    fn guest(&self, notes: bool) -> Guest {
        let options = Options {
            size: SIZE,
            knows_events: false,
            is_durable: false,
            notes,
        };
        let guest = Guest::new(&self.volume, options);
        let hands = guest.hands();
        for part in [DATA..STATUS + 1, QUIET] {
            hands.write(part.start, &vec![PATTERN; (part.end - part.start) as usize]);
        }
        asks(&hands, READ, 0);
        usual(&hands, 512, WRITABLE);
        available(&hands, 1);
        guest
    }

    /// Others are served, and nothing was written: the correct guest's own sector is the fourth.
    fn is_unharmed(&self) {
        serves(&self.volume);
        let data = std::fs::read(self.folder.path().join("data")).expect("it is there");
        assert_eq!(data.len() as u64, LENGTH);
        let (others, own) = (&data[..3 * 512], &data[4 * 512..]);
        assert!(
            others.iter().chain(own).all(|byte| *byte == 0),
            "the disk was written"
        );
    }
}

fn has_ended_well(guest: &Guest, outcome: Outcome, what: &str) {
    let hands = guest.hands();
    if let Outcome::Broken = outcome {
        guest.until_broken();
        return;
    }
    guest.until_called();
    assert!(!guest.is_broken(), "{what}: the ring is broken");
    assert_eq!(hands.read(USED + 2, 2), [1, 0], "{what}: answers");
    assert_eq!(hands.read(USED + 4, 4), [0; 4], "{what}: the answered head");
    if let Outcome::Status(status) = outcome {
        assert_eq!(hands.read(STATUS, 1), [status], "{what}: status");
        let data = hands.read(DATA + 0x20, 512 - 0x20);
        assert!(
            data.iter().all(|byte| *byte == PATTERN),
            "{what}: data were written"
        );
    }
    let quiet = hands.read(QUIET.start, (QUIET.end - QUIET.start) as usize);
    assert!(
        quiet.iter().all(|byte| *byte == PATTERN),
        "{what}: memory that nothing names was written"
    );
}

#[test]
fn a_request_of_a_correct_guest_is_carried_out() {
    let disk = Disk::new();
    let mut guest = disk.guest(true);
    guest.start();
    guest.until_called();
    let hands = guest.hands();
    assert_eq!(hands.read(STATUS, 1), [0]);
    assert_eq!(hands.read(DATA, 512), [0; 512]);
    guest.stop();
    assert!(!guest.is_broken());
    disk.is_unharmed();
}

#[test]
fn a_guest_that_makes_no_sense_is_answered_or_its_queue_alone_is_broken() {
    let disk = Disk::new();
    for (what, act, outcome) in [CHAINS, ADDRESSES, LENGTHS, TABLES, RINGS].concat() {
        for notes in [false, true] {
            let mut guest = disk.guest(notes);
            act(&guest.hands());
            guest.start();
            has_ended_well(&guest, outcome, what);
            // While that queue is at work, or broken, and afterwards.
            disk.is_unharmed();
            guest.stop();
        }
    }
    disk.is_unharmed();
}

#[test]
fn a_queue_that_is_not_all_in_the_memory_is_broken_alone() {
    let disk = Disk::new();
    for (what, places) in PLACES {
        let mut guest = disk.guest(false);
        guest.put(*places);
        guest.start();
        has_ended_well(&guest, Outcome::Broken, what);
        let hands = guest.hands();
        assert_eq!(hands.read(USED + 2, 2), [0, 0], "{what}: answers");
        assert_eq!(hands.read(STATUS, 1), [PATTERN], "{what}: status");
        disk.is_unharmed();
        guest.stop();
    }
}

#[test]
fn an_index_that_jumps_while_the_queue_works_breaks_it_alone() {
    let disk = Disk::new();
    for jump in [SIZE + 2, 0x8000, 0] {
        let mut guest = disk.guest(true);
        guest.start();
        guest.until_called();
        let hands = guest.hands();
        available(&hands, jump);
        hands.kick();
        guest.until_broken();
        assert_eq!(hands.read(USED + 2, 2), [1, 0], "answers");
        disk.is_unharmed();
        guest.stop();
    }
}
