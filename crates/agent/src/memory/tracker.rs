//! Which pages of a file differ from what was last sent.
//!
//! A page is dirty if its content is not the one that was sent. That holds whoever wrote it: the program's threads, the
//! RNIC through its own mapping, the kernel on behalf of a system call. The fingerprint is taken of the very bytes that
//! are sent, so that a write between reading and sending cannot be missed: it makes another fingerprint next time.
//!
//! The price is that every round reads all that is not a hole: about 1 ms per 2 MiB.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// The longest run that is given out at once.
pub const RUN_BYTES: usize = 256 * 1024;

/// 128 bits of BLAKE3: two different pages of one migration have the same with a chance of less than 2⁻⁸⁰, also when
/// the program chooses them.
type Fingerprint = [u8; 16];

fn fingerprint(page: &[u8]) -> Fingerprint {
    *blake3::hash(page)
        .as_bytes()
        .first_chunk()
        .expect("a hash of 32 bytes")
}

/// What the other side has of one file.
#[derive(Debug)]
pub struct Tracker {
    /// Of each page, as last sent.
    sent: Vec<Fingerprint>,
    zero: Fingerprint,
    buffer: Vec<u8>,
}

impl Default for Tracker {
    fn default() -> Self {
        Self {
            sent: Vec::new(),
            zero: fingerprint(&[0; PAGE_BYTES]),
            buffer: vec![0; RUN_BYTES],
        }
    }
}

impl Tracker {
    /// Gives every run of pages that the other side does not have to `emit`, as offset and bytes, and takes them for
    /// sent. A file that the other side does not have yet reads as zeroes there.
    pub fn round(
        &mut self,
        file: &File,
        mut emit: impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<u64> {
        let length = file.metadata()?.len();
        let pages = length.div_ceil(PAGE_BYTES as u64) as usize;
        self.sent.resize(pages, self.zero);
        let mut emitted = 0;
        let mut position = 0;
        while position < length {
            let data = seek(file, position, Seek::Data)?.unwrap_or(length).min(length);
            emitted += self.hole(position, data, length, &mut emit)?;
            if data == length {
                break;
            }
            let end = seek(file, data, Seek::Hole)?.unwrap_or(length).min(length);
            emitted += self.data(file, data, end, &mut emit)?;
            position = end;
        }
        Ok(emitted)
    }

    /// Pages that are zero now, since nothing is stored there.
    fn hole(
        &mut self,
        from: u64,
        to: u64,
        length: u64,
        emit: &mut impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<u64> {
        let mut emitted = 0;
        for page in from.div_ceil(PAGE_BYTES as u64)..to.div_ceil(PAGE_BYTES as u64) {
            let sent = &mut self.sent[page as usize];
            if *sent != self.zero {
                let offset = page * PAGE_BYTES as u64;
                let bytes = (length - offset).min(PAGE_BYTES as u64);
                emit(offset, &[0; PAGE_BYTES][..bytes as usize])?;
                *sent = self.zero;
                emitted += bytes;
            }
        }
        Ok(emitted)
    }

    fn data(
        &mut self,
        file: &File,
        from: u64,
        to: u64,
        emit: &mut impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<u64> {
        let mut emitted = 0;
        let mut position = from / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        while position < to {
            let wanted = (to - position).min(RUN_BYTES as u64) as usize;
            let read = read_full(file, &mut self.buffer[..wanted], position)?;
            if read == 0 {
                // Cut off meanwhile; the next round sees the new length.
                break;
            }
            let first = (position / PAGE_BYTES as u64) as usize;
            // Dirty pages that follow each other leave as one run.
            let mut run: Option<usize> = None;
            for (index, page) in self.buffer[..read].chunks(PAGE_BYTES).enumerate() {
                let now = if page.len() == PAGE_BYTES {
                    fingerprint(page)
                } else {
                    let mut whole = [0; PAGE_BYTES];
                    whole[..page.len()].copy_from_slice(page);
                    fingerprint(&whole)
                };
                let dirty = std::mem::replace(&mut self.sent[first + index], now) != now;
                let at = index * PAGE_BYTES;
                match (dirty, run) {
                    (true, None) => run = Some(at),
                    (false, Some(start)) => {
                        emit(position + start as u64, &self.buffer[start..at])?;
                        emitted += (at - start) as u64;
                        run = None;
                    }
                    _ => {}
                }
            }
            if let Some(start) = run {
                emit(position + start as u64, &self.buffer[start..read])?;
                emitted += (read - start) as u64;
            }
            position += wanted as u64;
        }
        Ok(emitted)
    }
}

fn read_full(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
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
        copy.resize(file.metadata().unwrap().len() as usize, 0);
        tracker
            .round(file, |offset, bytes| {
                copy[offset as usize..][..bytes.len()].copy_from_slice(bytes);
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

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn the_copy_equals_the_file_after_every_round(
            rounds in prop::collection::vec(
                (0usize..400_000, prop::collection::vec((0usize..400_000, 1usize..20_000, any::<u8>()), 0..8)), 1..6)
        ) {
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            let (mut tracker, mut copy) = (Tracker::default(), Vec::new());
            for (length, writes) in rounds {
                file.set_len(length as u64).unwrap();
                for (offset, bytes, value) in writes {
                    file.write_all_at(&vec![value; bytes], offset as u64).unwrap();
                }
                send(&mut tracker, &file, &mut copy);
                let mut whole = vec![0; file.metadata().unwrap().len() as usize];
                file.read_exact_at(&mut whole, 0).unwrap();
                prop_assert_eq!(&copy, &whole);
            }
        }
    }
}
