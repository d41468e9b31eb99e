//! Many small regions, and what a program does to their mappings meanwhile.

mod support;

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;

use rustix::mm::MremapFlags;
use support::{Region, adopt, adopter, mapping_of, mem_dir, page};
use tempfile::TempDir;
use verbatim_adopt::{Adopter, Adoption, Backing, Options};

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

/// How many mappings lie in the region.
fn mappings_in(region: &Region) -> usize {
    let bounds = region.address()..region.address() + region.length();
    let text = std::fs::read_to_string("/proc/self/maps").unwrap();
    let start = |line: &str| usize::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
    text.lines().filter(|line| bounds.contains(&start(line))).count()
}

fn page_by_page(adopter: &Adopter, region: &Region) -> Vec<Adoption> {
    (0..region.length() / page())
        .map(|index| adopt(adopter, region.pages(index..index + 1)))
        .collect()
}

fn blocks(adopter: &Adopter) -> u64 {
    std::fs::metadata(adopter.path().unwrap()).unwrap().blocks()
}

#[test]
fn regions_side_by_side_are_few_mappings_while_they_last_and_afterwards() {
    let (_dir, adopter) = new_adopter();
    let region = Region::new(2000);
    region.number(0);
    let adoptions = page_by_page(&adopter, &region);
    assert!(
        adoptions
            .iter()
            .all(|adoption| matches!(adoption.segments[..], [(_, Backing::File { .. })]))
    );
    assert!(mappings_in(&region) <= 3, "{}", mappings_in(&region));
    let mut totals = (0, 0);
    for (index, adoption) in adoptions.into_iter().enumerate() {
        let released = adopter.release(adoption.token);
        totals = (
            totals.0 + released.returned_bytes,
            totals.1.max(mappings_in(&region)),
        );
        region.word(index * page()).store(index as u64, Ordering::Relaxed);
    }
    assert_eq!(totals.0, region.length() as u64, "all came back in the end");
    assert!(totals.1 < 100, "{} mappings at once", totals.1);
    region.check_numbers(0);
    assert!(mapping_of(region.address() + 1500 * page()).0.contains("rw-p"));
    assert!(adopter.ranges().is_empty());
    assert_eq!(blocks(&adopter), 0);
}

#[test]
fn pages_that_wait_for_their_neighbours_are_adopted_again_as_they_are() {
    let (_dir, adopter) = new_adopter();
    let region = Region::new(300);
    region.number(0);
    let mut adoptions = page_by_page(&adopter, &region);
    let last = adoptions.pop().unwrap();
    let released: Vec<_> = adoptions
        .into_iter()
        .map(|adoption| adopter.release(adoption.token))
        .collect();
    assert_eq!(released.last().unwrap().kept_bytes, page() as u64);
    let again = adopt(&adopter, region.pages(200..299));
    assert!(matches!(again.segments[..], [(_, Backing::File { .. })]));
    assert_eq!(
        adopter.release(last.token).kept_bytes,
        page() as u64,
        "its neighbour is in use again"
    );
    assert!(adopter.release(again.token).returned_bytes >= 100 * page() as u64);
    region.check_numbers(0);
    assert!(adopter.ranges().is_empty());
}

#[test]
fn space_of_pages_that_waited_and_were_unmapped_is_freed() {
    let (_dir, adopter) = new_adopter();
    let region = Region::new(300);
    region.number(0);
    let mut adoptions = page_by_page(&adopter, &region);
    let last = adoptions.pop().unwrap();
    for adoption in adoptions {
        adopter.release(adoption.token);
    }
    assert!(blocks(&adopter) > 0);
    region.unmap(0..299);
    adopter.release(last.token);
    assert_eq!(blocks(&adopter), 0);
    assert!(adopter.ranges().is_empty());
}

/// `mremap` with an old length of 0 maps shared memory a second time, and leaves the first as it is.
#[test]
fn what_is_mapped_a_second_time_keeps_its_content() {
    let (_dir, adopter) = new_adopter();
    let region = Region::new(4);
    region.number(10);
    let second = Region::new(4);
    let adoption = adopt(&adopter, region.pages(0..4));
    // SAFETY: all within the two regions, which the test owns.
    unsafe {
        rustix::mm::mremap_fixed(
            region.pointer(0).cast(),
            0,
            4 * page(),
            MremapFlags::MAYMOVE,
            second.pointer(0).cast(),
        )
    }
    .unwrap();
    adopter.release(adoption.token);
    region.check_numbers(10);
    second.check_numbers(10);
    let again = adopt(&adopter, second.pages(0..4));
    second.check_numbers(10);
    let third = Region::new(4);
    third.number(99);
    let other = adopt(&adopter, third.pages(0..4));
    second.check_numbers(10);
    adopter.release(other.token);
    adopter.release(again.token);
    second.check_numbers(10);
    third.check_numbers(99);
}

#[test]
fn what_was_locked_while_it_was_registered_stays_locked() {
    let (_dir, adopter) = new_adopter();
    let region = Region::new(4);
    region.number(3);
    let adoption = adopt(&adopter, region.pages(0..4));
    // SAFETY: locking is no matter of memory safety.
    unsafe { rustix::mm::mlock(region.pointer(0).cast(), 2 * page()) }.unwrap();
    assert_eq!(
        adopter.release(adoption.token).returned_bytes,
        region.length() as u64
    );
    region.check_numbers(3);
    let locked = |index: usize| {
        let (header, flags) = mapping_of(region.address() + index * page());
        assert!(header.contains("rw-p"));
        flags.split(' ').any(|flag| flag == "lo")
    };
    assert!(locked(0) && !locked(3));
}

#[test]
fn no_descriptor_stays_open_for_a_dump() {
    let (dir, adopter) = new_adopter();
    let region = Region::new(4);
    region.number(1);
    let adoption = adopt(&adopter, region.pages(0..4));
    let ours = || {
        let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        fds.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|path| path.starts_with(dir.path())))
            .count()
    };
    assert_eq!(ours(), 1, "one for all mappings");
    adopter.close_files();
    assert_eq!(ours(), 0);
    assert_eq!(
        adopter.release(adoption.token).returned_bytes,
        region.length() as u64
    );
    region.check_numbers(1);
}
