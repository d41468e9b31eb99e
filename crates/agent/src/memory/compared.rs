//! Private memory of a process whose writes no kernel tracks: what changed since the last look is found by content.
//!
//! As with files ([`super::tracker`]) it does not matter who wrote a page, and the fingerprint is of the very bytes that are sent. What it
//! costs is reading all of it in each look, the last one in the blackout.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use verbatim_bulk::fingerprint::{Fingerprint, Key, PAGE_BYTES};
use verbatim_tracking::{Memory, Ranges};

use super::tracker::Emit;

/// Pages of a window: what a thread looks at, and for which there are fingerprints, at a time.
const WINDOW_PAGES: usize = 256;
const WINDOW_BYTES: u64 = (WINDOW_PAGES * PAGE_BYTES) as u64;

type Window = Box<[Option<Fingerprint>; WINDOW_PAGES]>;

/// What the destination has of a process.
#[derive(Debug, Default)]
pub struct Compared {
    key: Key,
    /// The fingerprints of what was sent, by the address of the window.
    windows: BTreeMap<u64, Window>,
}

/// What a look came to.
#[derive(Debug, Default)]
pub struct Look {
    /// What could be read: the destination has all of it as it was then.
    pub read: Ranges,
    /// What reading and comparing took, emitting left out.
    pub took: Duration,
}

/// A window that is looked at.
struct Piece<'a> {
    wanted: Vec<Range<u64>>,
    start: u64,
    sent: &'a mut Window,
}

impl Compared {
    /// Reads these pages of a process, and emits those whose content is not what was sent last, in any order and from as many threads as
    /// it is allowed to use. After an error nothing is known of what was sent.
    pub fn look(
        &mut self,
        memory: &Memory,
        pages: &Ranges,
        threads: usize,
        emit: impl Emit,
    ) -> anyhow::Result<Look> {
        let wanted = by_window(pages);
        // What is not there has nothing to be compared with, should it come again.
        self.windows.retain(|start, _| wanted.contains_key(start));
        for start in wanted.keys() {
            let window = || Box::new([None; WINDOW_PAGES]);
            self.windows.entry(*start).or_insert_with(window);
        }
        let pieces = self.windows.iter_mut().zip(wanted);
        let pieces = pieces.map(|((start, sent), (_, wanted))| Piece {
            wanted,
            start: *start,
            sent,
        });
        let pieces: Vec<Piece<'_>> = pieces.collect();
        let threads = threads.clamp(1, pieces.len().max(1));
        let (key, waiting) = (&self.key, Mutex::new(pieces.into_iter()));
        let (waiting, emit) = (&waiting, &emit);
        let work = || {
            let begun = Instant::now();
            let mut worker = Worker {
                key,
                memory,
                buffer: vec![0; WINDOW_BYTES as usize],
                emitting: Duration::ZERO,
            };
            let mut read = Vec::new();
            loop {
                let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(piece) = next else {
                    return anyhow::Ok((read, begun.elapsed().saturating_sub(worker.emitting)));
                };
                read.extend(worker.look(piece, emit)?);
            }
        };
        let done = std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mut done = vec![work()];
            for other in others {
                done.push(
                    other
                        .join()
                        .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                );
            }
            done
        });
        let (mut all, mut took) = (Vec::new(), Duration::ZERO);
        for done in done {
            let (read, busy) = done?;
            all.extend(read);
            took = took.max(busy);
        }
        all.sort_unstable_by_key(|range: &Range<u64>| range.start);
        Ok(Look {
            read: all.into_iter().collect(),
            took,
        })
    }
}

/// The parts of each window that are wanted.
fn by_window(pages: &Ranges) -> BTreeMap<u64, Vec<Range<u64>>> {
    let mut windows: BTreeMap<u64, Vec<Range<u64>>> = BTreeMap::new();
    for range in pages.iter() {
        let mut from = range.start;
        while from < range.end {
            let start = from / WINDOW_BYTES * WINDOW_BYTES;
            let to = range.end.min(start + WINDOW_BYTES);
            windows.entry(start).or_default().push(from..to);
            from = to;
        }
    }
    windows
}

struct Worker<'a> {
    key: &'a Key,
    memory: &'a Memory,
    buffer: Vec<u8>,
    emitting: Duration,
}

impl Worker<'_> {
    fn look(&mut self, piece: Piece<'_>, emit: &impl Emit) -> anyhow::Result<Vec<Range<u64>>> {
        let mut all = Vec::new();
        for wanted in piece.wanted {
            let bytes = &mut self.buffer[..(wanted.end - wanted.start) as usize];
            let read = self.memory.read(wanted.clone(), bytes)?;
            for read in read.iter() {
                let bytes = &bytes[(read.start - wanted.start) as usize..(read.end - wanted.start) as usize];
                let first = ((read.start - piece.start) / PAGE_BYTES as u64) as usize;
                let (pages, _) = bytes.as_chunks::<PAGE_BYTES>();
                // Pages that follow each other leave as one run.
                let mut run: Option<usize> = None;
                for (index, page) in pages.iter().enumerate() {
                    let now = Some(self.key.fingerprint(page));
                    let is_sent = std::mem::replace(&mut piece.sent[first + index], now) == now;
                    match (is_sent, run) {
                        (false, None) => run = Some(index),
                        (true, Some(from)) => {
                            run = None;
                            self.emitting += leave(emit, read.start, from..index, bytes)?;
                        }
                        _ => {}
                    }
                }
                if let Some(from) = run {
                    self.emitting += leave(emit, read.start, from..pages.len(), bytes)?;
                }
                all.push(read);
            }
        }
        Ok(all)
    }
}

/// Emits a run of pages; how long that took.
fn leave(emit: &impl Emit, start: u64, pages: Range<usize>, bytes: &[u8]) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    let run = pages.start * PAGE_BYTES..pages.end * PAGE_BYTES;
    emit(start + run.start as u64, &bytes[run]).context("private memory cannot be sent")?;
    Ok(begun.elapsed())
}

#[cfg(test)]
mod tests {
    use std::iter::once;

    use super::*;

    const PAGE: u64 = PAGE_BYTES as u64;

    /// Memory of this process, at whole pages.
    struct Own {
        bytes: Vec<u8>,
        skipped: usize,
    }

    impl Own {
        fn new(pages: usize) -> Self {
            let bytes = vec![0; (pages + 1) * PAGE_BYTES];
            let start = bytes.as_ptr() as usize;
            let skipped = start.next_multiple_of(PAGE_BYTES) - start;
            Self { bytes, skipped }
        }

        fn start(&self) -> u64 {
            self.bytes.as_ptr() as u64 + self.skipped as u64
        }

        fn page(&mut self, page: usize) -> &mut [u8] {
            let at = self.skipped + page * PAGE_BYTES;
            &mut self.bytes[at..at + PAGE_BYTES]
        }

        fn pages(&self, pages: impl IntoIterator<Item = Range<u64>>) -> Ranges {
            let at = |page: u64| self.start() + page * PAGE;
            let pages = pages.into_iter();
            pages.map(|pages| at(pages.start)..at(pages.end)).collect()
        }
    }

    /// Where what was emitted goes.
    #[derive(Default)]
    struct There(Mutex<BTreeMap<u64, Vec<u8>>>);

    impl There {
        /// One look; which pages were emitted.
        fn look(
            &self,
            compared: &mut Compared,
            own: &Own,
            pages: impl IntoIterator<Item = Range<u64>>,
        ) -> Vec<u64> {
            let emitted = Mutex::new(Vec::new());
            let memory = Memory::open(std::process::id()).unwrap();
            let wanted = own.pages(pages);
            let look = compared.look(&memory, &wanted, 3, |at, bytes: &[u8]| {
                for (page, bytes) in (0..).zip(bytes.chunks(PAGE_BYTES)) {
                    let at = at + page * PAGE;
                    self.0.lock().unwrap().insert(at, bytes.to_vec());
                    emitted.lock().unwrap().push((at - own.start()) / PAGE);
                }
                Ok(())
            });
            assert_eq!(look.unwrap().read, wanted);
            let mut emitted = emitted.into_inner().unwrap();
            emitted.sort_unstable();
            emitted
        }
    }

    #[test]
    fn what_changed_is_emitted_whoever_changed_it_and_nothing_else() {
        // Several windows, which do not begin where the memory does.
        const PAGES: usize = 3 * WINDOW_PAGES + 5;
        let (mut own, there, mut compared) = (Own::new(PAGES), There::default(), Compared::default());
        let all = || once(0..PAGES as u64);
        for page in 0..PAGES {
            own.page(page).fill(page as u8);
        }
        assert_eq!(there.look(&mut compared, &own, all()).len(), PAGES, "all is new");
        assert_eq!(there.look(&mut compared, &own, all()), [0u64; 0]);
        own.page(0)[17] ^= 1;
        own.page(WINDOW_PAGES).fill(7);
        own.page(PAGES - 1)[PAGE_BYTES - 1] ^= 128;
        let changed = [0, WINDOW_PAGES as u64, PAGES as u64 - 1];
        assert_eq!(there.look(&mut compared, &own, all()), changed);
        // There and back between two looks is no change.
        own.page(3)[0] ^= 1;
        own.page(3)[0] ^= 1;
        assert_eq!(there.look(&mut compared, &own, all()), [0u64; 0]);
        let there = there.0.into_inner().unwrap();
        for page in 0..PAGES {
            let at = own.start() + page as u64 * PAGE;
            assert!(there[&at] == own.page(page), "page {page}");
        }
    }

    #[test]
    fn windows_without_any_page_are_forgotten() {
        const PAGES: u64 = 4 * WINDOW_PAGES as u64;
        let (own, there, mut compared) = (Own::new(PAGES as usize), There::default(), Compared::default());
        there.look(&mut compared, &own, once(0..PAGES));
        assert_eq!(there.look(&mut compared, &own, [0..1, 9..10]), [0u64; 0]);
        let windows = compared.windows.len();
        assert!(windows <= 2, "{windows}");
        // Those of the other windows are sent again: nobody knows what became of them meanwhile.
        let again = there.look(&mut compared, &own, once(0..PAGES));
        assert!(again.len() >= PAGES as usize - 2 * WINDOW_PAGES);
    }

    #[test]
    fn what_cannot_be_sent_is_an_error() {
        let (own, mut compared) = (Own::new(4), Compared::default());
        let memory = Memory::open(std::process::id()).unwrap();
        let error = compared
            .look(&memory, &own.pages(once(0..4)), 2, |_, _: &[u8]| {
                Err(std::io::ErrorKind::BrokenPipe.into())
            })
            .unwrap_err();
        assert!(format!("{error:#}").contains("cannot be sent"), "{error:#}");
    }
}
