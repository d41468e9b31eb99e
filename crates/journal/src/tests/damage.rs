//! What no crash can do.

use super::{damage, open, records};
use crate::Durability::{Later, Synced};
use crate::segment::EMPTY;
use crate::testing::Disk;
use crate::{Error, Replayed};

const FIRST: &str = "00000001.log";

/// Segment 1 with the records a, b, c, and segment 2 with d, e, f.
fn two_segments() -> Disk {
    let disk = Disk::new();
    let (mut log, _) = open(&disk).unwrap();
    log.max_segment = EMPTY + 3 * 21;
    for record in [b"a", b"b", b"c", b"d", b"e", b"f"] {
        log.append(record, Synced).unwrap();
    }
    disk
}

fn change(disk: &Disk, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = disk.files()[name].clone();
    change(&mut bytes);
    disk.put(name, Some(bytes));
}

fn replay(disk: &Disk) -> Replayed {
    open(disk).unwrap().1
}

/// What is replayed of a damaged log, by every process that opens it, and also when there are new records.
fn replayed_for_ever(disk: &Disk) -> Replayed {
    let first = replay(disk);
    assert_eq!(replay(disk), first);
    let mut expected = first.clone();
    for new in [b"x", b"y"] {
        open(disk).unwrap().0.append(new, Synced).unwrap();
        disk.crash(|_| 0..0);
        expected.records.push(new.to_vec());
        assert_eq!(replay(disk), expected);
    }
    first
}

#[test]
fn any_changed_byte_in_any_frame_is_damage_and_costs_that_record_only() {
    let all = [b"a", b"b", b"c", b"d", b"e", b"f"];
    for (segment, name) in [(1, FIRST), (2, "00000002.log")] {
        // What is changed in the last record cannot be told from a torn one.
        for index in 0..if segment == 1 { 3 } else { 2 } {
            for byte in 0..21 {
                let disk = two_segments();
                let offset = EMPTY as usize + index * 21;
                change(&disk, name, |bytes| bytes[offset + byte] ^= 0x10);
                let replayed = replayed_for_ever(&disk);
                assert_eq!(replayed.damage, damage(segment, offset as u64));
                assert_eq!(replayed.gaps, [(segment as usize - 1) * 3 + index]);
                let mut left = all.to_vec();
                left.remove((segment as usize - 1) * 3 + index);
                assert_eq!(replayed.records, left, "{segment} {index} {byte}");
            }
        }
    }
}

#[test]
fn a_changed_header_is_damage_and_the_other_segments_are_replayed() {
    for byte in 0..EMPTY as usize {
        let disk = two_segments();
        change(&disk, FIRST, |bytes| bytes[byte] ^= 1);
        let replayed = replayed_for_ever(&disk);
        assert_eq!(replayed.damage, damage(1, 0));
        assert_eq!(replayed.gaps, [0]);
        assert_eq!(replayed.records, [b"d", b"e", b"f"]);

        let disk = two_segments();
        change(&disk, "00000002.log", |bytes| bytes[byte] ^= 1);
        let replayed = replayed_for_ever(&disk);
        assert_eq!(replayed.damage, damage(2, 0));
        assert_eq!(replayed.gaps, [3]);
        assert_eq!(replayed.records, [b"a", b"b", b"c"]);
    }
}

#[test]
fn every_damaged_place_is_told_by_the_records_before_it() {
    let disk = two_segments();
    let record = |index: usize| EMPTY as usize + index * 21;
    change(&disk, FIRST, |bytes| {
        bytes[record(0)] ^= 1;
        bytes[record(2)] ^= 1;
    });
    change(&disk, "00000002.log", |bytes| bytes[record(1)] ^= 1);
    let replayed = replayed_for_ever(&disk);
    assert_eq!(replayed.records, [b"b", b"d", b"f"]);
    assert_eq!(replayed.damage, damage(1, EMPTY));
    assert_eq!(replayed.gaps, [0, 1, 2]);
}

#[test]
fn a_missing_segment_and_a_missing_end_are_damage() {
    let disk = two_segments();
    open(&disk).unwrap().0.append(b"g", Synced).unwrap();
    disk.put(FIRST, None);
    let replayed = replayed_for_ever(&disk);
    assert_eq!(replayed.damage, damage(1, 0));
    assert_eq!(replayed.records, [b"d", b"e", b"f", b"g"]);

    for length in EMPTY..EMPTY + 3 * 21 {
        let disk = two_segments();
        change(&disk, FIRST, |bytes| bytes.truncate(length as usize));
        let whole = (length - EMPTY) / 21;
        let replayed = replayed_for_ever(&disk);
        assert_eq!(replayed.damage, damage(1, EMPTY + whole * 21));
        assert_eq!(replayed.records.len() as u64, whole + 3);
    }

    let disk = Disk::new();
    let (mut log, _) = open(&disk).unwrap();
    log.rewrite([b"a".to_vec(), b"b".to_vec()].into_iter()).unwrap();
    drop(log);
    change(&disk, "00000002.log", |bytes| bytes.truncate(bytes.len() - 1));
    let replayed = replayed_for_ever(&disk);
    assert_eq!(
        replayed.damage,
        damage(2, EMPTY + 21),
        "it was whole when it got its name"
    );
    assert_eq!(replayed.records, [b"a"]);
}

#[test]
fn segments_that_nobody_can_read_are_not_an_empty_log() {
    let disk = Disk::new();
    disk.put("00000007.log", Some(b"not a segment".to_vec()));
    let replayed = replayed_for_ever(&disk);
    assert_eq!(replayed.damage, damage(7, 0));
    assert_eq!(replayed.records, Vec::<Vec<u8>>::new());
    assert_eq!(disk.files()["00000007.log"], b"not a segment");
}

#[test]
fn rewriting_ends_it_and_keeps_what_was_damaged() {
    for name in [FIRST, "00000002.log"] {
        for byte in [3, EMPTY as usize + 22] {
            let disk = two_segments();
            change(&disk, name, |bytes| bytes[byte] ^= 1);
            let bad = disk.files()[name].clone();
            let (mut log, replayed) = open(&disk).unwrap();
            assert!(replayed.damage.is_some());
            log.rewrite(replayed.records.clone().into_iter()).unwrap();
            drop(log);
            assert_eq!(records(&disk), replayed.records);
            let files = disk.files();
            assert_eq!(files[&name.replace("log", "damaged")], bad);
            assert_eq!(files.len(), 2, "{:?}", files.keys());
        }
    }
}

#[test]
fn a_frame_of_another_place_is_not_good() {
    let disk = two_segments();
    let files = disk.files();
    let first = &files[FIRST];
    let frame = |index: usize| &first[EMPTY as usize + index * 21..][..21];
    let expect = |end: &[u8]| {
        let disk = Disk::new();
        disk.put(FIRST, Some([&first[..EMPTY as usize + 42], end].concat()));
        assert_eq!(records(&disk), [b"a", b"b"]);
        let cut_off = disk.files()[FIRST].len();
        assert_eq!(cut_off, EMPTY as usize + 42);
    };
    // Earlier frames, and the one of the other segment that has the same offset.
    expect(frame(0));
    expect(frame(1));
    expect(&files["00000002.log"][EMPTY as usize + 42..]);
    // A segment under another one's name.
    let disk = Disk::new();
    disk.put("00000003.log", Some(first.clone()));
    assert_eq!(replay(&disk).damage, damage(3, 0));
}

#[test]
fn a_stale_frame_behind_another_one_is_not_good() {
    // Two logs that have different second records: the third one follows only one of them.
    let log = |second: &[u8]| {
        let disk = Disk::new();
        let (mut log, _) = open(&disk).unwrap();
        for record in [b"a", second, b"c"] {
            log.append(record, Later).unwrap();
        }
        disk.files()[FIRST].clone()
    };
    let (fresh, stale) = (log(b"b"), log(b"x"));
    let disk = Disk::new();
    let third = EMPTY as usize + 42;
    disk.put(FIRST, Some([&fresh[..third], &stale[third..]].concat()));
    assert_eq!(records(&disk), [b"a", b"b"]);
}

#[test]
fn what_was_never_synced_is_torn_and_no_damage() {
    let disk = Disk::new();
    let (mut log, _) = open(&disk).unwrap();
    log.append(b"a", Synced).unwrap();
    log.append(b"b", Later).unwrap();
    log.append(b"c", Later).unwrap();
    drop(log);
    let whole = disk.files()[FIRST].clone();
    for byte in 0..21 {
        let disk = Disk::new();
        let mut torn = whole.clone();
        torn[EMPTY as usize + 21 + byte] ^= 1;
        disk.put(FIRST, Some(torn));
        assert_eq!(records(&disk), [b"a"], "not c without b");
    }
}

#[test]
fn a_later_version_is_not_touched() {
    let disk = Disk::new();
    let mut bytes = Vec::new();
    let header = [&b"vrbt-log"[..], &2_u32.to_le_bytes(), b"who knows"].concat();
    crate::frame::write(&mut bytes, 1, 0, 0, 0, &header);
    disk.put(FIRST, Some(bytes));
    let files = disk.files();
    assert!(matches!(
        open(&disk),
        Err(Error::Version {
            segment: 1,
            version: 2
        })
    ));
    assert_eq!(disk.files(), files);
}
