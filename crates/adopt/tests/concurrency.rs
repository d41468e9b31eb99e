//! Other threads use the pages all the while.

mod support;

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use support::{Region, adopt, adopter, mem_dir, page};
use verbatim_adopt::{Adopter, Options};

const PAGES: usize = 700; // more than one chunk
const WRITERS: usize = 3;

/// Ends the other threads, also when a check fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Adopts and releases parts and the whole until `until`; how often.
fn cycle(adopter: &Adopter, region: &Region, until: Instant) -> u64 {
    let mut cycles = 0;
    while Instant::now() < until || cycles < 20 {
        let whole = adopt(adopter, region.pages(0..PAGES));
        let part = adopt(adopter, region.pages(100..600));
        assert_eq!(support::shape(&whole, region), [(0, PAGES, true)]);
        assert_eq!(support::shape(&part, region), [(100, 500, true)]);
        let released = adopter.release(whole.token);
        assert_eq!(released.returned_bytes, (200 * page()) as u64, "{released:?}");
        let other = adopt(adopter, region.pages(0..101));
        let released = adopter.release(part.token);
        assert_eq!(released.returned_bytes, (499 * page()) as u64, "{released:?}");
        assert!(adopter.release(other.token).kept_bytes == 0);
        assert!(adopter.ranges().is_empty());
        cycles += 1;
    }
    cycles
}

fn word(region: &Region, index: usize, slot: usize) -> &AtomicU64 {
    region.word(index * page() + slot * 64)
}

/// Each writer increments its own word of each page by a plain load and store; a lost page is a lost count.
fn counters_are_exact(options: Options) {
    let dir = mem_dir();
    let adopter = adopter(&dir, options);
    let region = Region::new(PAGES);
    let stop = AtomicBool::new(false);
    let (cycles, rounds) = thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|slot| {
                let (region, stop) = (&region, &stop);
                scope.spawn(move || {
                    let mut rounds = 0u64;
                    while !stop.load(Ordering::Relaxed) {
                        for index in (0..PAGES).map(|index| index * 37 % PAGES) {
                            let word = word(region, index, slot);
                            let count = word.load(Ordering::Relaxed);
                            assert_eq!(count, rounds, "page {index}");
                            word.store(count + 1, Ordering::Relaxed);
                        }
                        rounds += 1;
                    }
                    rounds
                })
            })
            .collect();
        scope.spawn(|| {
            let mut seen = vec![0; PAGES];
            while !stop.load(Ordering::Relaxed) {
                for (index, seen) in seen.iter_mut().enumerate() {
                    let count = word(&region, index, 0).load(Ordering::Relaxed);
                    assert!(count >= *seen, "page {index} went back from {seen} to {count}");
                    *seen = count;
                }
            }
        });
        let cycles = {
            let _stop = Stop(&stop);
            cycle(&adopter, &region, Instant::now() + Duration::from_secs(2))
        };
        let rounds: Vec<u64> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        (cycles, rounds)
    });
    for index in 0..PAGES {
        for (slot, rounds) in rounds.iter().enumerate() {
            assert_eq!(
                word(&region, index, slot).load(Ordering::Relaxed),
                *rounds,
                "page {index}"
            );
        }
    }
    println!("{cycles} cycles, {rounds:?} rounds of {PAGES} pages");
    assert!(rounds.iter().all(|rounds| *rounds > 0));
}

#[test]
fn no_write_is_lost_with_a_full_userfaultfd() {
    if support::has_full_rights() {
        counters_are_exact(Options::default());
    }
}

#[test]
fn no_write_is_lost_with_one_for_user_mode() {
    counters_are_exact(Options {
        full: false,
        user_mode: true,
        ..Options::default()
    });
}

/// `pread` into the pages, `pwrite` from them and `process_vm_readv`, while they move: the kernel waits as a thread does.
/// (`process_vm_writev` does not: it writes to the page that was there when it began, see the crate's documentation.)
#[test]
fn system_calls_wait_too() {
    if !support::has_full_rights() {
        return;
    }
    let dir = mem_dir();
    let adopter = adopter(&dir, Options::default());
    let region = Region::new(PAGES);
    let source = memfd_create("numbers", MemfdFlags::CLOEXEC).unwrap();
    let numbers: Vec<u8> = (0..4096u64).flat_map(u64::to_ne_bytes).collect();
    rustix::io::pwrite(&source, &numbers, 0).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let calls: Vec<_> = (0..2)
            .map(|slot| {
                let (region, stop, source) = (&region, &stop, source.as_fd());
                scope.spawn(move || {
                    let mut calls = 0u64;
                    while !stop.load(Ordering::Relaxed) {
                        for index in 0..PAGES {
                            let at = index * page() + slot * 64;
                            let number = (calls + index as u64) % 4096;
                            // SAFETY: eight bytes of this thread's own, within the region.
                            let bytes = unsafe { std::slice::from_raw_parts_mut(region.pointer(at), 8) };
                            if slot == 0 {
                                assert_eq!(rustix::io::pread(source, &mut *bytes, number * 8), Ok(8));
                            } else {
                                region.word(at).store(number, Ordering::Relaxed);
                                assert_eq!(read_through_process(bytes.as_ptr()), number.to_ne_bytes());
                            }
                            assert_eq!(region.word(at).load(Ordering::Relaxed), number);
                            let sink = 4096 * 8 + slot as u64 * 8;
                            assert_eq!(rustix::io::pwrite(source, &*bytes, sink), Ok(8));
                            let mut back = [0u8; 8];
                            assert_eq!(rustix::io::pread(source, &mut back, sink), Ok(8));
                            assert_eq!(u64::from_ne_bytes(back), number);
                        }
                        calls += 1;
                    }
                    calls
                })
            })
            .collect();
        let cycles = {
            let _stop = Stop(&stop);
            cycle(&adopter, &region, Instant::now() + Duration::from_secs(2))
        };
        for calls in calls {
            let calls = calls.join().unwrap();
            println!("{cycles} cycles, {calls} rounds of {PAGES} pages");
            assert!(calls > 0);
        }
    });
}

fn read_through_process(from: *const u8) -> [u8; 8] {
    let mut bytes = [0u8; 8];
    let local = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let remote = libc::iovec {
        iov_base: from.cast_mut().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: both ranges are valid for the length, and the local one is ours to write to.
    let read =
        unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
    assert_eq!(read, bytes.len() as isize, "{}", std::io::Error::last_os_error());
    bytes
}

/// Threads register overlapping parts of one region at once, in small blocks of the heap.
#[test]
fn several_threads_adopt_at_once() {
    let dir = mem_dir();
    let adopter = adopter(&dir, Options::default());
    thread::scope(|scope| {
        for thread in 0..4u8 {
            let adopter = &adopter;
            scope.spawn(move || {
                for round in 0..200usize {
                    let mut block = vec![thread; 100 + round * 13];
                    let adoption = adopter.adopt(block.as_ptr().addr(), block.len()).unwrap();
                    block.fill(thread + 100);
                    let released = adopter.release(adoption.token);
                    assert_eq!(released.kept_bytes + released.gone_bytes, 0, "{released:?}");
                    assert!(block.iter().all(|byte| *byte == thread + 100));
                }
            });
        }
    });
    assert!(adopter.ranges().is_empty());
}
