//! Which pages of a file differ from what was last sent.
//!
//! A page is dirty if its content is not the one that was sent. That holds whoever wrote it: the program's threads, the
//! RNIC through its own mapping, the kernel on behalf of a system call or a device. The fingerprint is taken of the very
//! bytes that are sent, so that a write between reading and sending cannot be missed: it makes another fingerprint next
//! time.
//!
//! The price is that every round reads all that is not a hole (large files through a mapping that stays from round to round, since
//! read(2) takes three times as long for it as the fingerprints): `cargo test
//! --release -p verbatim-agent how_long -- --ignored --nocapture` says how long that takes. Dirty tracking by the kernel (`PAGEMAP_SCAN`, soft-dirty) would be faster and is not used: it
//! sees what goes through a page table, and neither what a device or the kernel writes to pages that it has pinned
//! (`O_DIRECT`, registered io_uring buffers) nor what other mappings of the file write.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use verbatim_bulk::PAGE_BYTES;
use verbatim_bulk::fingerprint::{Fingerprint, Key};
use verbatim_mapped::ReadOnly;

/// The longest run that is given out at once.
pub const RUN_BYTES: usize = 256 * 1024;

/// Shorter files are read by system calls.
const MAPPED_BYTES: u64 = 1 << 20;

/// What one thread looks at before it takes the next, in pages.
const PIECE_PAGES: usize = 1024;

/// What the other side has of one file.
#[derive(Debug)]
pub struct Tracker {
    key: Key,
    /// Of each page, as last sent.
    sent: Vec<Fingerprint>,
    zero: Fingerprint,
    /// The file of the last round.
    mapped: Option<ReadOnly>,
}

impl Default for Tracker {
    fn default() -> Self {
        let key = Key::new();
        Self {
            sent: Vec::new(),
            zero: key.fingerprint(&[0; PAGE_BYTES]),
            key,
            mapped: None,
        }
    }
}

/// Takes an offset and what is there now.
pub trait Emit: Fn(u64, &[u8]) -> io::Result<()> + Sync {}
impl<F: Fn(u64, &[u8]) -> io::Result<()> + Sync> Emit for F {}

/// A part of the file that one thread looks at.
struct Piece<'a> {
    offset: u64,
    length: usize,
    sent: &'a mut [Fingerprint],
}

impl Tracker {
    /// Gives every run of pages that the other side does not have to `emit`, as offset and bytes, and takes them for
    /// sent; runs come in any order, from as many threads as it is allowed to use. A file that the other side does not have
    /// yet reads as zeroes there.
    ///
    /// `length` is what the other side is told of the file's: what a file that grows has beyond that is cut off there, and so is not
    /// looked at.
    pub fn round(&mut self, file: &File, length: u64, threads: usize, emit: impl Emit) -> io::Result<u64> {
        let pages = length.div_ceil(PAGE_BYTES as u64) as usize;
        self.sent.resize(pages, self.zero);
        let data = data_of(file, length)?;
        let mut emitted = 0;
        let mut position = 0;
        for run in &data {
            emitted += self.hole(position..run.start, length, &emit)?;
            position = run.end;
        }
        emitted += self.hole(position..length, length, &emit)?;
        self.map(file, length)?;
        let source = Source {
            file,
            mapped: self.mapped.as_ref(),
            length,
        };
        let pieces = pieces(&data, &mut self.sent);
        Ok(emitted + look(&self.key, source, pieces, threads, &emit)?)
    }

    /// Keeps a mapping of the file, if it is worth one and can be had.
    fn map(&mut self, file: &File, length: u64) -> io::Result<()> {
        let is_of = |mapped: &ReadOnly| mapped.is_of(file);
        if !self.mapped.as_ref().map(is_of).transpose()?.unwrap_or(false) {
            self.mapped = None;
            if length >= MAPPED_BYTES {
                self.mapped = ReadOnly::map(file).ok();
            }
        }
        Ok(())
    }

    /// Pages that are zero now, since nothing is stored there.
    fn hole(&mut self, range: Range<u64>, length: u64, emit: &impl Emit) -> io::Result<u64> {
        let page_of = |offset: u64| offset.div_ceil(PAGE_BYTES as u64) as usize;
        let mut emitted = 0;
        for page in page_of(range.start)..page_of(range.end) {
            let sent = &mut self.sent[page];
            if *sent != self.zero {
                let offset = (page * PAGE_BYTES) as u64;
                let bytes = (length - offset).min(PAGE_BYTES as u64);
                emit(offset, &[0; PAGE_BYTES][..bytes as usize])?;
                *sent = self.zero;
                emitted += bytes;
            }
        }
        Ok(emitted)
    }
}

/// The parts of a file that are no holes, as whole pages.
fn data_of(file: &File, length: u64) -> io::Result<Vec<Range<u64>>> {
    let page = PAGE_BYTES as u64;
    let mut parts: Vec<Range<u64>> = Vec::new();
    let mut position = 0;
    while position < length {
        let Some(data) = seek(file, position, Seek::Data)?.filter(|data| *data < length) else {
            break;
        };
        let end = seek(file, data, Seek::Hole)?.unwrap_or(length).min(length);
        let part = data / page * page..end.next_multiple_of(page).min(length);
        match parts.last_mut() {
            Some(last) if last.end >= part.start => last.end = part.end,
            _ => parts.push(part),
        }
        position = end;
    }
    Ok(parts)
}

/// Divides the data among threads, each piece with its own part of the fingerprints.
fn pieces<'a>(data: &[Range<u64>], sent: &'a mut [Fingerprint]) -> Vec<Piece<'a>> {
    let mut pieces = Vec::new();
    let (mut rest, mut first_page) = (sent, 0);
    for run in data {
        let mut offset = run.start;
        while offset < run.end {
            let length = (run.end - offset).min((PIECE_PAGES * PAGE_BYTES) as u64) as usize;
            let page = (offset / PAGE_BYTES as u64) as usize;
            let (_, from_here) = std::mem::take(&mut rest).split_at_mut(page - first_page);
            let (own, after) = from_here.split_at_mut(length.div_ceil(PAGE_BYTES));
            (rest, first_page) = (after, page + length.div_ceil(PAGE_BYTES));
            pieces.push(Piece {
                offset,
                length,
                sent: own,
            });
            offset += length as u64;
        }
    }
    pieces
}

fn look(
    key: &Key,
    source: Source<'_>,
    pieces: Vec<Piece<'_>>,
    threads: usize,
    emit: &impl Emit,
) -> io::Result<u64> {
    let threads = threads.clamp(1, pieces.len().max(1));
    let waiting = Mutex::new(pieces.into_iter());
    let work = || {
        let mut buffer = vec![0; RUN_BYTES];
        let mut emitted = 0;
        loop {
            let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(piece) = next else {
                return Ok(emitted);
            };
            emitted += piece.look(key, source, &mut buffer, emit)?;
        }
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        let others = others.into_iter().map(|other| {
            other
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        others.fold(own, |sum: io::Result<u64>, other| Ok(sum? + other?))
    })
}

impl Piece<'_> {
    fn look(self, key: &Key, source: Source<'_>, buffer: &mut [u8], emit: &impl Emit) -> io::Result<u64> {
        let mut emitted = 0;
        for (index, sent) in self.sent.chunks_mut(RUN_BYTES / PAGE_BYTES).enumerate() {
            let skipped = index * RUN_BYTES;
            let offset = self.offset + skipped as u64;
            let wanted = (self.length - skipped).min(RUN_BYTES);
            let read = source.read(&mut buffer[..wanted], offset)?;
            // Dirty pages that follow each other leave as one run. What is missing was cut off meanwhile; the next round sees
            // the new length.
            let mut run: Option<usize> = None;
            let mut leave = |run: &mut Option<usize>, end: usize| match run.take() {
                Some(start) => {
                    emitted += (end - start) as u64;
                    emit(offset + start as u64, &buffer[start..end])
                }
                None => Ok(()),
            };
            for (index, page) in buffer[..read].chunks(PAGE_BYTES).enumerate() {
                let now = match page.try_into() {
                    Ok(page) => key.fingerprint(page),
                    Err(_) => {
                        let mut whole = [0; PAGE_BYTES];
                        whole[..page.len()].copy_from_slice(page);
                        key.fingerprint(&whole)
                    }
                };
                if std::mem::replace(&mut sent[index], now) != now {
                    run.get_or_insert(index * PAGE_BYTES);
                } else {
                    leave(&mut run, index * PAGE_BYTES)?;
                }
            }
            leave(&mut run, read)?;
        }
        Ok(emitted)
    }
}

/// The file of a round.
#[derive(Clone, Copy)]
struct Source<'a> {
    file: &'a File,
    mapped: Option<&'a ReadOnly>,
    /// When the round began.
    length: u64,
}

impl Source<'_> {
    /// Reads until the buffer is full or the file ends; how much that was.
    fn read(self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        if let Some(mapped) = self.mapped {
            let wanted = self.length.saturating_sub(offset).min(buffer.len() as u64) as usize;
            // Else it was cut off meanwhile; where it ends now the system call says.
            if mapped.read(offset, &mut buffer[..wanted]).is_ok() {
                return Ok(wanted);
            }
        }
        let mut done = 0;
        while done < buffer.len() {
            match self.file.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }
}

enum Seek {
    Data,
    Hole,
}

/// Where the next data or hole at or after `from` begins; `None` if there is none.
fn seek(file: &File, from: u64, what: Seek) -> io::Result<Option<u64>> {
    let to = match what {
        Seek::Data => rustix::fs::SeekFrom::Data(from),
        Seek::Hole => rustix::fs::SeekFrom::Hole(from),
    };
    match rustix::fs::seek(file, to) {
        Ok(offset) => Ok(Some(offset)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Applies one round to `copy`.
    fn send(tracker: &mut Tracker, file: &File, copy: &mut Vec<u8>) -> u64 {
        send_by(tracker, 1, file, copy)
    }

    fn send_by(tracker: &mut Tracker, threads: usize, file: &File, copy: &mut Vec<u8>) -> u64 {
        let length = file.metadata().unwrap().len();
        copy.resize(length as usize, 0);
        let copy = Mutex::new(copy);
        tracker
            .round(file, length, threads, |offset, bytes| {
                copy.lock().unwrap()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
                Ok(())
            })
            .unwrap()
    }

    #[test]
    fn only_what_changed_is_sent_again() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(100 * PAGE_BYTES as u64).unwrap();
        let (mut tracker, mut copy) = (Tracker::default(), Vec::new());
        assert_eq!(send(&mut tracker, &file, &mut copy), 0, "a hole is not sent");
        file.write_all_at(&[7; 3 * PAGE_BYTES], 10 * PAGE_BYTES as u64)
            .unwrap();
        assert_eq!(send(&mut tracker, &file, &mut copy), 3 * PAGE_BYTES as u64);
        file.write_all_at(&[8], 11 * PAGE_BYTES as u64 + 5).unwrap();
        assert_eq!(send(&mut tracker, &file, &mut copy), PAGE_BYTES as u64);
        assert_eq!(send(&mut tracker, &file, &mut copy), 0);
        rustix::fs::fallocate(
            &file,
            rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
            10 * PAGE_BYTES as u64,
            PAGE_BYTES as u64,
        )
        .unwrap();
        assert_eq!(
            send(&mut tracker, &file, &mut copy),
            PAGE_BYTES as u64,
            "what became a hole is zero there, too"
        );
        assert_eq!(copy[10 * PAGE_BYTES], 0);
    }

    /// The other side cuts a file off where it is told that it ends, whatever is sent behind that.
    #[test]
    fn of_a_file_that_grows_meanwhile_nothing_is_lost() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        let content: Vec<u8> = (0..600_000).map(|byte| (byte / 777 + byte % 251) as u8).collect();
        let mut tracker = Tracker::default();
        let mut copy = Vec::new();
        for told in [100_000, 300_001, 300_001, 600_000] {
            // It is longer already than what the other side is told.
            file.write_all_at(&content[..content.len().min(told + 150_000)], 0)
                .unwrap();
            copy.resize(told, 0);
            let other = Mutex::new(&mut copy);
            let emit = |offset: u64, bytes: &[u8]| {
                other.lock().unwrap()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
                Ok(())
            };
            tracker.round(&file, told as u64, 1, emit).unwrap();
            assert!(copy == content[..told], "{told}");
        }
    }

    /// A program may cut its file off, and make it longer again, at any time.
    #[test]
    fn a_file_that_is_cut_off_while_it_is_read_ends_nothing() {
        const BYTES: usize = 2 << 20;
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.write_all_at(&vec![5; BYTES], 0).unwrap();
        let (mut tracker, mut copy) = (Tracker::default(), Vec::new());
        assert_eq!(send(&mut tracker, &file, &mut copy), BYTES as u64);
        assert!(tracker.mapped.is_some());
        // In the middle of a round: behind the first run nothing is there any more.
        file.write_all_at(&[6; PAGE_BYTES], 0).unwrap();
        let cut = |offset: u64, _: &[u8]| match offset {
            0 => file.set_len(RUN_BYTES as u64),
            _ => Ok(()),
        };
        let sent = tracker.round(&file, BYTES as u64, 1, cut).unwrap();
        assert_eq!(sent, PAGE_BYTES as u64);
        file.set_len(BYTES as u64).unwrap();
        file.write_all_at(&[7; 3 * PAGE_BYTES], (BYTES - 3 * PAGE_BYTES) as u64)
            .unwrap();
        copy[..PAGE_BYTES].fill(6);
        send(&mut tracker, &file, &mut copy);
        let mut whole = vec![0; BYTES];
        file.read_exact_at(&mut whole, 0).unwrap();
        assert!(copy == whole);
    }

    #[test]
    fn several_threads_share_the_work() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        let pages = 5 * PIECE_PAGES + 7;
        let content: Vec<u8> = (0..pages * PAGE_BYTES - 100)
            .map(|byte| (byte / PAGE_BYTES + byte % 251) as u8)
            .collect();
        file.write_all_at(&content, 0).unwrap();
        let (mut tracker, mut copy) = (Tracker::default(), Vec::new());
        assert_eq!(send_by(&mut tracker, 4, &file, &mut copy), content.len() as u64);
        assert!(copy == content);
        assert_eq!(send_by(&mut tracker, 3, &file, &mut copy), 0);
        let failed = std::io::ErrorKind::BrokenPipe;
        file.write_all_at(&[0xFF; 8], 4 * (PIECE_PAGES * PAGE_BYTES) as u64)
            .unwrap();
        let result = tracker.round(&file, content.len() as u64, 4, |_, _| Err(failed.into()));
        assert_eq!(result.unwrap_err().kind(), failed);
    }

    #[test]
    #[ignore = "a measurement, for a quiet machine"]
    fn how_long_rounds_take() {
        let mebibytes = 1024;
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        let content: Vec<u8> = (0..1 << 20).map(|byte: u32| (byte / 4096 + byte) as u8).collect();
        for index in 0..mebibytes {
            file.write_all_at(&content, index << 20).unwrap();
        }
        for threads in [1, 2] {
            let mut tracker = Tracker::default();
            for dirty in [0, 0, 100] {
                for page in 0..dirty {
                    file.write_all_at(&rand::random::<[u8; 8]>(), page * 97 * PAGE_BYTES as u64)
                        .unwrap();
                }
                let begun = std::time::Instant::now();
                let found = tracker
                    .round(&file, mebibytes << 20, threads, |_, _| Ok(()))
                    .unwrap();
                println!(
                    "{threads} threads: {} pages to send found in 1 GiB in {:.0} ms",
                    found / PAGE_BYTES as u64,
                    begun.elapsed().as_secs_f64() * 1e3
                );
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn the_copy_equals_the_file_after_every_round(
            rounds in prop::collection::vec(
                (0usize..2_500_000, prop::collection::vec((0usize..2_500_000, 1usize..20_000, any::<u8>()), 0..8)), 1..6)
        ) {
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            let (mut tracker, mut copy) = (Tracker::default(), Vec::new());
            for (length, writes) in rounds {
                file.set_len(length as u64).unwrap();
                for (offset, bytes, value) in writes {
                    file.write_all_at(&vec![value; bytes], offset as u64).unwrap();
                }
                send_by(&mut tracker, 1 + length % 3, &file, &mut copy);
                let mut whole = vec![0; file.metadata().unwrap().len() as usize];
                file.read_exact_at(&mut whole, 0).unwrap();
                prop_assert_eq!(&copy, &whole);
            }
        }
    }
}
