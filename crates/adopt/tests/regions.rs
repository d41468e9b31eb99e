//! Regions come and go, overlap, and are moved by the program.

mod support;

use std::sync::atomic::Ordering;

use rustix::mm::{MapFlags, MprotectFlags, MremapFlags, ProtFlags};
use support::{Region, adopt, adopter, mapping_of, mem_dir, page, shape};
use tempfile::TempDir;
use verbatim_adopt::{AdoptError, Adopter, Backing, Options};

/// With a userfaultfd of some kind: the harness has threads.
fn new_adopter() -> (TempDir, Adopter) {
    let dir = mem_dir();
    let adopter = adopter(
        &dir,
        Options {
            user_mode: true,
            ..Options::default()
        },
    );
    (dir, adopter)
}

fn raw(region: &Region, first_page: usize) -> *mut std::ffi::c_void {
    region.pointer(first_page * page()).cast()
}

fn in_file(adopter: &Adopter, offset: u64) -> u64 {
    let file = adopter.open_file().unwrap().unwrap();
    let mut word = [0; 8];
    assert_eq!(rustix::io::pread(file, &mut word, offset), Ok(8));
    u64::from_ne_bytes(word)
}

#[test]
fn pages_are_shared_with_the_file_and_come_back() {
    let (_dir, adopter) = new_adopter();
    let region = Region::new(1100);
    region.number(1000);
    let adoption = adopt(&adopter, region.pages(0..1100));
    let [(_, Backing::File { offset })] = adoption.segments[..] else {
        panic!("{adoption:?}")
    };
    region.check_numbers(1000);
    region.word(700 * page()).store(5, Ordering::Relaxed);
    assert_eq!(in_file(&adopter, offset + 700 * page() as u64), 5);
    let file = adopter.open_file().unwrap().unwrap();
    rustix::io::pwrite(file, &1700u64.to_ne_bytes(), offset + 700 * page() as u64).unwrap();
    region.check_numbers(1000);
    assert!(mapping_of(region.address()).0.contains("rw-s"));

    let released = adopter.release(adoption.token);
    assert_eq!(released.returned_bytes, region.length() as u64);
    region.check_numbers(1000);
    assert!(mapping_of(region.address()).0.contains("rw-p 00000000 00:00 0"));
    let file = std::fs::metadata(adopter.path().unwrap()).unwrap();
    assert_eq!(
        std::os::unix::fs::MetadataExt::blocks(&file),
        0,
        "the file's space is free again"
    );
}

#[test]
fn overlapping_regions_are_counted_by_page() {
    let (_dir, adopter) = new_adopter();
    let region = Region::new(10);
    region.number(0);
    let first = adopt(&adopter, region.pages(0..6));
    let second = adopt(&adopter, region.pages(4..10));
    let inner = adopter.adopt(region.address() + 5 * page() + 100, 8).unwrap();
    assert_eq!(shape(&inner, &region), [(5, 1, true)]);
    assert_eq!(adopter.ranges().len(), 1, "continued in the file");
    let released = adopter.release(first.token);
    assert_eq!(
        (released.returned_bytes, released.claimed_bytes),
        (4 * page() as u64, 2 * page() as u64)
    );
    let released = adopter.release(second.token);
    assert_eq!(
        (released.returned_bytes, released.claimed_bytes),
        (5 * page() as u64, page() as u64)
    );
    assert!(mapping_of(region.address() + 5 * page()).0.contains("rw-s"));
    assert_eq!(adopter.release(inner.token).returned_bytes, page() as u64);
    region.check_numbers(0);
    assert!(adopter.ranges().is_empty());
}

#[test]
fn untouched_pages_stay_holes_for_whoever_reads_the_file() {
    let (_dir, adopter) = new_adopter();
    let region = Region::new(4096);
    region.word(3000 * page()).store(7, Ordering::Relaxed);
    let adoption = adopt(&adopter, region.pages(0..4096));
    let [(_, Backing::File { offset })] = adoption.segments[..] else {
        panic!("{adoption:?}")
    };
    let file = adopter.open_file().unwrap().unwrap();
    let data = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(offset)).unwrap();
    assert_eq!(data, offset + 3000 * page() as u64);
    let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(data)).unwrap();
    assert_eq!(hole, data + page() as u64);
    assert_eq!(region.word(5 * page()).load(Ordering::Relaxed), 0);
    assert_eq!(
        adopter.release(adoption.token).returned_bytes,
        region.length() as u64
    );
    assert_eq!(region.word(3000 * page()).load(Ordering::Relaxed), 7);
}

#[test]
fn heap_blocks_share_pages_with_other_blocks() {
    let (_dir, adopter) = new_adopter();
    let blocks: Vec<Vec<u8>> = (0..50u8).map(|index| vec![index; 1000]).collect();
    let adoptions: Vec<_> = blocks
        .iter()
        .map(|block| adopter.adopt(block.as_ptr().addr() + 3, block.len() - 5).unwrap())
        .collect();
    assert!(
        adoptions
            .iter()
            .any(|adoption| matches!(adoption.segments[0].1, Backing::File { .. }))
    );
    for (index, adoption) in adoptions.into_iter().enumerate() {
        let released = adopter.release(adoption.token);
        assert_eq!(released.kept_bytes, 0, "{released:?}");
        assert!(
            blocks
                .iter()
                .enumerate()
                .all(|(index, block)| block.iter().all(|byte| *byte == index as u8)),
            "{index}"
        );
    }
}

/// malloc of glibc writes to them in a child of `fork` before the child can have its own pages.
#[test]
fn memory_that_the_program_unmapped_or_moved_is_left_alone() {
    let (_dir, adopter) = new_adopter();
    let region = Region::new(10);
    region.number(0);
    let adoption = adopt(&adopter, region.pages(0..10));
    region.unmap(2..4);
    let elsewhere = Region::new(3);
    // SAFETY: all within the two regions, which the test owns.
    unsafe {
        let flags = MremapFlags::MAYMOVE;
        rustix::mm::mremap_fixed(raw(&region, 5), 3 * page(), 3 * page(), flags, raw(&elsewhere, 0)).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        rustix::mm::mmap_anonymous(
            raw(&region, 5),
            page(),
            access,
            MapFlags::PRIVATE | MapFlags::FIXED,
        )
        .unwrap();
        rustix::mm::mprotect(raw(&region, 9), page(), MprotectFlags::READ).unwrap();
    }
    region.word(5 * page()).store(99, Ordering::Relaxed);
    let again = adopt(&adopter, elsewhere.pages(0..3));
    assert_eq!(
        shape(&again, &elsewhere),
        [(0, 3, true)],
        "known by its place in the file"
    );
    let released = adopter.release(adoption.token);
    assert_eq!(released.gone_bytes, 2 * page() as u64);
    assert_eq!(
        (released.returned_bytes, released.claimed_bytes),
        (5 * page() as u64, 3 * page() as u64)
    );
    assert_eq!(adopter.release(again.token).returned_bytes, 3 * page() as u64);
    elsewhere.check_numbers(5);
    assert_eq!(region.word(5 * page()).load(Ordering::Relaxed), 99);
    for index in [0, 1, 4, 8, 9] {
        assert_eq!(region.word(index * page()).load(Ordering::Relaxed), index as u64);
    }
    assert!(
        mapping_of(region.address() + 9 * page()).0.contains("r--p"),
        "access as the program set it"
    );
    assert!(adopter.ranges().is_empty());
}

#[test]
fn the_file_goes_with_the_process() {
    let (dir, adopter) = new_adopter();
    let region = Region::new(4);
    region.number(8);
    let adoption = adopt(&adopter, region.pages(0..4));
    assert_eq!(
        adopter.path().unwrap(),
        dir.path().join(std::process::id().to_string())
    );
    adopter.close_files();
    adopter.cleanup();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    assert!(matches!(
        adopter.adopt(region.address(), 1),
        Err(AdoptError::Closed)
    ));
    let released = adopter.release(adoption.token);
    assert_eq!(
        released.kept_bytes,
        region.length() as u64,
        "it cannot be opened any more"
    );
    region.check_numbers(8);
}
