//! Each promise by itself.

use std::io::ErrorKind;

use super::{open, records};
use crate::Durability::{Later, Synced};
use crate::testing::{Disk, Fault};
use crate::{AppendError, Error, MAX_RECORD};

const NOTHING: Fault = Fault {
    error: ErrorKind::Other,
    done: 0,
};

#[test]
fn a_synced_record_is_there_after_a_crash_and_takes_those_before_it_along() {
    let disk = Disk::new();
    let (mut log, _) = open(&disk).unwrap();
    log.append(b"a", Later).unwrap();
    log.append(b"b", Synced).unwrap();
    log.append(b"c", Later).unwrap();
    disk.crash(|_| 0..0);
    assert_eq!(records(&disk), [b"a", b"b"]);
}

#[test]
fn a_record_that_could_not_be_synced_is_not_brought_back_by_the_next_sync() {
    let disk = Disk::new();
    let (mut log, _) = open(&disk).unwrap();
    log.append(b"a", Later).unwrap();
    // The write, then the sync, whose pages are dropped.
    let sync = disk.operations() + 1;
    disk.fail(sync..sync + 1, NOTHING);
    assert!(matches!(
        log.append(b"b", Synced),
        Err(AppendError::NotWritten(_))
    ));
    log.append(b"c", Synced).unwrap();
    disk.crash(|_| 0..0);
    assert_eq!(records(&disk), [b"a", b"c"]);
}

#[test]
fn a_record_in_doubt_is_settled_by_the_next_append() {
    let disk = Disk::new();
    let (mut log, _) = open(&disk).unwrap();
    log.append(b"a", Synced).unwrap();
    // It is written whole, and nothing works from then on.
    let sync = disk.operations() + 1;
    disk.fail(sync..u64::MAX, NOTHING);
    assert!(matches!(log.append(b"b", Synced), Err(AppendError::Unknown(_))));
    assert!(matches!(
        log.append(b"c", Synced),
        Err(AppendError::NotWritten(_))
    ));
    let in_doubt = disk.copy();
    in_doubt.heal();
    in_doubt.crash(|all| 0..all);
    assert_eq!(records(&in_doubt), [b"a"], "its pages were dropped");
    disk.heal();
    log.append(b"d", Synced).unwrap();
    disk.crash(|all| 0..all);
    assert_eq!(records(&disk), [b"a", b"d"]);
}

#[test]
fn what_the_page_cache_alone_has_is_on_the_disk_when_the_log_is_open() {
    let disk = Disk::new();
    let (mut log, _) = open(&disk).unwrap();
    log.append(b"a", Synced).unwrap();
    let sync = disk.operations() + 1;
    disk.fail(sync..u64::MAX, NOTHING);
    assert!(matches!(log.append(b"b", Synced), Err(AppendError::Unknown(_))));
    drop(log);
    disk.heal();
    assert_eq!(records(&disk), [b"a", b"b"], "the page cache has it");
    disk.crash(|_| 0..0);
    assert_eq!(records(&disk), [b"a", b"b"], "it was replayed once");
}

#[test]
fn what_the_page_cache_alone_has_cut_off_stays_away() {
    let disk = Disk::new();
    let (mut log, _) = open(&disk).unwrap();
    log.append(b"a", Synced).unwrap();
    log.rewrite([b"a".to_vec()].into_iter()).unwrap();
    // All of it is written, but with an error. It is cut off, but of that only the bytes before come to the disk.
    let write = disk.operations();
    let written = Fault { done: 21, ..NOTHING };
    disk.fail(write..write + 1, written);
    disk.fail(write + 2..write + 3, written);
    disk.fail(write + 3..u64::MAX, NOTHING);
    assert!(matches!(log.append(b"c", Synced), Err(AppendError::Unknown(_))));
    drop(log);
    disk.heal();
    assert_eq!(records(&disk), [b"a"]);
    disk.crash(|_| 0..0);
    assert_eq!(records(&disk), [b"a"]);
}

#[test]
fn what_was_reserved_is_there_when_the_disk_is_full() {
    let disk = Disk::new();
    let (mut log, _) = open(&disk).unwrap();
    log.append(b"a", Synced).unwrap();
    log.reserve(3 * 120).unwrap();
    assert_eq!(log.reserved(), 360);
    disk.set_capacity(Some(0));
    for _ in 0..3 {
        log.append(&[7; 100], Synced).unwrap();
    }
    assert_eq!(log.reserved(), 0);
    let full = log.append(b"b", Synced);
    assert!(matches!(full, Err(AppendError::NotWritten(error)) if error.kind() == ErrorKind::StorageFull));
    assert!(log.reserve(1).is_err());
    disk.set_capacity(None);
    log.append(b"c", Synced).unwrap();
    drop(log);
    let records = records(&disk);
    assert_eq!((records.len(), &records[4][..]), (5, &b"c"[..]));
}

#[test]
fn what_was_reserved_is_reserved_again_after_a_failure_if_there_is_space() {
    let disk = Disk::new();
    let (mut log, _) = open(&disk).unwrap();
    log.reserve(120).unwrap();
    // The write, which is cut off; then a sync, after which a new segment is begun.
    for operation in [0, 1] {
        let begin = disk.operations() + operation;
        disk.fail(begin..begin + 1, NOTHING);
        let failed = log.append(b"a", Synced);
        assert!(matches!(failed, Err(AppendError::NotWritten(_))));
        assert_eq!(log.reserved(), 120);
    }
    disk.set_capacity(Some(0));
    log.append(&[7; 100], Synced).unwrap();
}

#[test]
fn a_rewritten_log_has_the_new_records_and_one_segment() {
    let disk = Disk::new();
    let (mut log, _) = open(&disk).unwrap();
    log.max_segment = 300;
    for number in 0..20_u8 {
        log.append(&[number; 100], Synced).unwrap();
    }
    assert_eq!(disk.files().len(), 10);
    let sum: usize = disk.files().values().map(Vec::len).sum();
    assert_eq!(log.bytes(), sum as u64);
    log.rewrite([b"x".to_vec(), b"y".to_vec()].into_iter()).unwrap();
    assert_eq!(disk.files().into_keys().collect::<Vec<_>>(), ["0000000b.log"]);
    assert_eq!(log.bytes(), disk.files()["0000000b.log"].len() as u64);
    log.append(b"z", Synced).unwrap();
    disk.crash(|_| 0..0);
    assert_eq!(records(&disk), [b"x", b"y", b"z"]);
    assert_eq!(
        disk.files().into_keys().collect::<Vec<_>>(),
        ["0000000b.log"],
        "the old ones came back with the crash, and were removed"
    );
}

#[test]
fn a_log_that_is_opened_again_and_again_does_not_grow() {
    let disk = Disk::new();
    open(&disk).unwrap().0.append(b"a", Synced).unwrap();
    let files = disk.files();
    for _ in 0..3 {
        assert_eq!(records(&disk), [b"a"]);
    }
    assert_eq!(disk.files(), files);
}

#[test]
fn one_process_has_it() {
    let disk = Disk::new();
    let (log, _) = open(&disk).unwrap();
    assert!(matches!(open(&disk), Err(Error::InUse)));
    drop(log);
    open(&disk).unwrap();
}

#[test]
fn records_of_all_lengths_and_not_longer_ones() {
    let disk = Disk::new();
    let (mut log, _) = open(&disk).unwrap();
    log.append(b"", Synced).unwrap();
    log.append(&[1; MAX_RECORD], Synced).unwrap();
    let too_long = vec![1; MAX_RECORD + 1];
    assert!(matches!(
        log.append(&too_long, Synced),
        Err(AppendError::NotWritten(_))
    ));
    assert!(log.rewrite([too_long].into_iter()).is_err());
    log.append(b"b", Synced).unwrap();
    drop(log);
    let lengths: Vec<_> = records(&disk).iter().map(Vec::len).collect();
    assert_eq!(lengths, [0, MAX_RECORD, 1]);
}
