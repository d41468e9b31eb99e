//! What kinds of memory become what, and what they were told stays in force.

mod support;

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, MlockFlags, MprotectFlags, ProtFlags};
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

#[test]
fn headers_of_thread_arenas_stay_with_the_process() {
    const HEAP_MAX_BYTES: usize = 64 << 20;
    let (_dir, adopter) = new_adopter();
    std::thread::spawn(move || {
        let block = vec![1u8; 1000];
        let start = block.as_ptr().addr() / HEAP_MAX_BYTES * HEAP_MAX_BYTES;
        if mapping_of(block.as_ptr().addr())
            .0
            .starts_with(&format!("{start:x}-"))
        {
            let adoption = adopter.adopt(start, 10 * page()).unwrap();
            let first = adoption.segments[0].clone();
            assert_eq!(first, (start as u64..(start + page()) as u64, Backing::Process));
            assert_eq!(adopter.release(adoption.token).kept_bytes, 0);
        } else {
            eprintln!("skipped: this thread's memory is not in an arena of glibc's kind");
        }
    })
    .join()
    .unwrap();
}

#[test]
fn other_kinds_of_memory_stay_with_the_process() {
    let (_dir, adopter) = new_adopter();
    let region = Region::new(12);
    region.number(50);
    let file = memfd_create("data", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 2 * page() as u64).unwrap();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: all within the region, which the test owns.
    unsafe {
        rustix::mm::mprotect(raw(&region, 1), page(), MprotectFlags::READ).unwrap();
        rustix::mm::mmap(
            raw(&region, 3),
            page(),
            access,
            MapFlags::PRIVATE | MapFlags::FIXED,
            file.as_fd(),
            0,
        )
        .unwrap();
        rustix::mm::mmap(
            raw(&region, 4),
            page(),
            access,
            MapFlags::SHARED | MapFlags::FIXED,
            file.as_fd(),
            0,
        )
        .unwrap();
        rustix::mm::mmap_anonymous(
            raw(&region, 5),
            page(),
            access,
            MapFlags::SHARED | MapFlags::FIXED,
        )
        .unwrap();
        rustix::mm::mprotect(
            raw(&region, 7),
            page(),
            MprotectFlags::READ | MprotectFlags::WRITE | MprotectFlags::EXEC,
        )
        .unwrap();
        rustix::mm::madvise(raw(&region, 9), page(), Advice::LinuxWipeOnFork).unwrap();
        rustix::mm::mmap_anonymous(
            raw(&region, 11),
            page(),
            access,
            MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::GROWSDOWN,
        )
        .unwrap();
    }
    let adoption = adopt(&adopter, region.pages(0..12));
    let expected = [
        (0, 1, true),
        (1, 1, false),
        (2, 1, true),
        (3, 3, false),
        (6, 1, true),
        (7, 1, false),
        (8, 1, true),
        (9, 1, false),
        (10, 1, true),
        (11, 1, false),
    ];
    assert_eq!(shape(&adoption, &region), expected);
    for index in [0, 1, 2, 6, 7, 8, 9, 10] {
        assert_eq!(
            region.word(index * page()).load(Ordering::Relaxed),
            50 + index as u64
        );
    }
    assert_eq!(adopter.release(adoption.token).returned_bytes, 5 * page() as u64);
}

#[test]
fn stacks_stay_with_the_process() {
    let (_dir, adopter) = new_adopter();
    let local = [1u8; 10_000];
    let adoption = adopter.adopt(local.as_ptr().addr(), local.len()).unwrap();
    assert!(
        adoption
            .segments
            .iter()
            .all(|(_, backing)| *backing == Backing::Process),
        "{adoption:?}"
    );
    assert_eq!(adopter.release(adoption.token), Default::default());
    assert!(adopter.path().is_none(), "no file without need");
}

#[test]
fn holes_and_inaccessible_pages_are_errors_that_change_nothing() {
    let (_dir, adopter) = new_adopter();
    let region = Region::new(10);
    region.unmap(4..5);
    // SAFETY: the test does not touch the page again.
    unsafe { rustix::mm::mprotect(raw(&region, 8), page(), MprotectFlags::empty()) }.unwrap();
    let error = |pages| {
        let range = region.pages(pages);
        let error = adopter.adopt(range.start, range.len()).unwrap_err();
        assert_eq!(error.errno(), libc::EFAULT);
        assert!(!error.leaves_process_access());
        let AdoptError::Unmapped { address } = error else {
            panic!("{error}")
        };
        (address - region.address()) / page()
    };
    assert_eq!(
        [error(0..10), error(4..5), error(0..5), error(5..9)],
        [4, 4, 4, 8]
    );
    assert_eq!(adopter.adopt(8, 8).unwrap_err().errno(), libc::EFAULT);
    assert_eq!(
        adopter.adopt(usize::MAX - 5, 100).unwrap_err().errno(),
        libc::EINVAL
    );
    assert!(adopter.adopt(region.address(), 0).unwrap().segments.is_empty());
    assert!(mapping_of(region.address()).0.contains("rw-p") && adopter.ranges().is_empty());
}

#[test]
fn what_was_advised_stays_in_force() {
    let (_dir, adopter) = new_adopter();
    let region = Region::new(8);
    region.number(3);
    let length = region.length();
    // SAFETY: none of these changes content.
    unsafe {
        rustix::mm::madvise(raw(&region, 0), length, Advice::LinuxDontFork).unwrap();
        rustix::mm::madvise(raw(&region, 0), length, Advice::LinuxDontDump).unwrap();
        rustix::mm::madvise(raw(&region, 0), length, Advice::LinuxNoHugepage).unwrap();
        rustix::mm::mlock(raw(&region, 0), 4 * page()).unwrap();
        rustix::mm::mlock_with(raw(&region, 4), 4 * page(), MlockFlags::ONFAULT).unwrap();
    }
    let has = |first_page: usize, wanted: &str| {
        let (_, flags) = mapping_of(region.address() + first_page * page());
        let missing: Vec<_> = wanted.split(' ').filter(|flag| !flags.contains(flag)).collect();
        assert!(missing.is_empty(), "{missing:?} not in {flags}");
    };
    for _ in 0..2 {
        let adoption = adopt(&adopter, region.pages(0..8));
        assert_eq!(shape(&adoption, &region), [(0, 8, true)]);
        has(0, "sh dc dd nh lo");
        has(4, "sh dc dd nh lo");
        assert_eq!(adopter.release(adoption.token).kept_bytes, 0);
        has(0, "dc dd nh lo");
        has(4, "dc dd nh lo lf");
        region.check_numbers(3);
    }
}

#[test]
fn without_rights_threads_are_left_alone() {
    let dir = mem_dir();
    let adopter = adopter(
        &dir,
        Options {
            full: false,
            ..Options::default()
        },
    );
    let region = Region::new(4);
    // The harness runs this in a thread beside its main thread.
    let adoption = adopt(&adopter, region.pages(0..4));
    assert_eq!(shape(&adoption, &region), [(0, 4, false)]);
    assert_eq!(adopter.release(adoption.token), Default::default());
}
