//! The data of a volume: a file or a block device.
//!
//! [`Store::open`] opens existing data, and [`Store::make`] makes new ones: neither does the other's work.
//! Opened data must have the noted [`identity`], and are claimed while they are open.

mod age;
mod content;
mod direct;
pub mod identity;
mod opening;
pub mod pages;
mod resident;
pub mod shared;
mod signature;
mod sys;
pub mod trust;
mod under_way;

use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::fs::FallocateFlags;
use rustix::io::{Errno, ReadWriteFlags};

use verbatim_mirror::decision::VolumeId;

use crate::quick::Quick;
pub use age::at as seen_at;
use direct::Direct;
use identity::Identity;
use opening::Access;
pub use opening::{Expected, Lack, Making, is_no_place_of_devices, takes_writes};
use pages::Pages;
pub use signature::Room;
use signature::Signature;
use trust::{Belief, Marker, Trust};

/// Zeros that are written if the file system cannot make them.
const ZEROS: usize = 256 << 10;

/// Bytes of a copy in one call. Many kernels do not preempt a thread within a call, however urgent others
/// are, and a call that writes 256 KiB takes up to 0.8 ms.
const PIECE: usize = 32 << 10;

/// File systems (statfs(2)) that refuse a write for lack of room before they accept any of it, so that no
/// accepted data are lost: ext4, XFS, Btrfs, tmpfs, F2FS, ZFS and overlays. On others such an error may
/// concern earlier writes.
const LOCAL: [u64; 7] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0x0102_1994,
    0xf2f5_2010,
    0x2fc1_2fc1,
    0x794c_7630,
];

/// Open data. A process has one `Store` for each copy.
#[derive(Debug)]
pub struct Store {
    file: File,
    /// How `file` was opened.
    access: Access,
    /// The same file once more, since `file` is only good for reads.
    writable: OnceLock<File>,
    is_device: bool,
    /// The first byte of the device's signature, behind the volume; `u64::MAX` if there is none.
    signed_at: AtomicU64,
    /// This process has made the file, and nobody had one there.
    is_fresh: bool,
    /// Whether a write that is refused for lack of room leaves earlier writes intact.
    refuses_cleanly: bool,
    trust: Trust,
    /// All data were allocated on the disk from the beginning.
    is_preallocated: AtomicBool,
    direct: Direct,
    /// The file system can tell that a read would wait.
    reads_at_once: AtomicBool,
    quick: Quick,
    closed: Mutex<Option<Closed>>,
    /// Keeps a device's pages for the next daemon.
    pages: Option<Pages>,
    /// The reason why it is suspect, if no flush of this process has failed.
    doubt: OnceLock<String>,
    /// The last field, since it is dropped when the file is closed and the claim has ended.
    _open: Sender<Infallible>,
}

/// Tells when a store is closed.
#[derive(Debug)]
pub struct Closed(Receiver<Infallible>);

impl Closed {
    /// Whether its last user has closed it within the limit.
    pub fn within(&self, limit: Duration) -> bool {
        matches!(self.0.recv_timeout(limit), Err(RecvTimeoutError::Disconnected))
    }
}

impl Store {
    fn new(
        file: File,
        access: Access,
        is_fresh: bool,
        belief: Belief,
        marker: Option<Marker>,
    ) -> io::Result<Self> {
        let is_device = file.metadata()?.file_type().is_block_device();
        let system = rustix::fs::fstatfs(&file).map(|system| system.f_type as u64);
        let (open, closed) = std::sync::mpsc::channel();
        let pages = marker.as_ref().filter(|_| is_device).map(Marker::pages);
        Ok(Self {
            is_device,
            signed_at: AtomicU64::new(u64::MAX),
            is_fresh,
            refuses_cleanly: !is_device && system.is_ok_and(|system| LOCAL.contains(&system)),
            file,
            access,
            writable: OnceLock::new(),
            trust: Trust::new(belief, marker),
            is_preallocated: AtomicBool::new(false),
            direct: Direct::default(),
            reads_at_once: AtomicBool::new(true),
            quick: Quick::default(),
            closed: Mutex::new(Some(Closed(closed))),
            pages,
            doubt: OnceLock::new(),
            _open: open,
        })
    }

    /// For the one that closes it: tasks that still use it keep the data claimed for a moment. `None` from the second call on.
    pub fn closed(&self) -> Option<Closed> {
        self.closed.lock().expect("no panic under this lock").take()
    }

    /// The open file for writes.
    fn writer(&self) -> &File {
        self.writable.get().unwrap_or(&self.file)
    }

    /// Opens for writing what could only be read when it was opened. An error as long as its file system is
    /// read-only. The read lock stays: it keeps out others who want to write, and others who only read.
    pub fn be_writable(&self) -> io::Result<()> {
        if self.access == Access::Write || self.writable.get().is_some() {
            return Ok(());
        }
        // Not by its name, which another file may have by now.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let file = File::options().read(true).write(true).open(path)?;
        // Of two callers each has opened the same file.
        let _ = self.writable.set(file);
        Ok(())
    }

    /// Whether it is a block device.
    pub fn is_device(&self) -> bool {
        self.is_device
    }

    /// Whether this process has made the file, where there was none.
    pub fn is_fresh(&self) -> bool {
        self.is_fresh
    }

    /// The trust in its data.
    pub fn trust(&self) -> &Trust {
        &self.trust
    }

    /// Whether some written data may be only in the page cache.
    pub fn is_suspect(&self) -> bool {
        self.trust.belief() == Belief::Suspect
    }

    /// Whether a later process finds the data: the file has not been deleted since it was opened. Not all network file systems tell.
    pub fn has_name(&self) -> bool {
        self.is_device || self.file.metadata().is_ok_and(|metadata| metadata.nlink() > 0)
    }

    /// An error (`NotFound`) if what is at this path is not what is open.
    pub fn is_at(&self, path: &Path) -> io::Result<()> {
        let here = self.file.metadata()?;
        let is_it = path.metadata().is_ok_and(|there| match self.is_device {
            true => there.rdev() == here.rdev(),
            false => (there.dev(), there.ino()) == (here.dev(), here.ino()),
        });
        match is_it {
            true => Ok(()),
            false => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Writes a signature behind a volume of this length, if there is room for it.
    pub fn sign(&self, length: u64) -> io::Result<Result<Identity, Room>> {
        let offset = match Room::of(&self.file, length)? {
            Room::At(offset) => offset,
            none => return Ok(Err(none)),
        };
        let signature = Signature::write(&self.file, offset)?;
        self.signed_at.store(offset, Ordering::Relaxed);
        Ok(Ok(match Identity::of(&self.file)? {
            Identity::Device { names, .. } => Identity::Device {
                names,
                signature: Some(signature),
            },
            file @ Identity::File { .. } => file,
        }))
    }

    /// Its size now.
    pub fn size(&self) -> io::Result<u64> {
        match self.is_device {
            true => Ok(rustix::fs::seek(&self.file, rustix::fs::SeekFrom::End(0))?),
            false => Ok(self.file.metadata()?.len()),
        }
    }

    /// Makes the data at least this long, durably. Longer data stay as they are.
    pub fn reach(&self, length: u64) -> io::Result<()> {
        let size = self.size()?;
        let signed_at = self.signed_at.load(Ordering::Relaxed);
        if length > signed_at {
            return Err(io::Error::other(format!(
                "the device has {size} bytes, and from byte {signed_at} on the signature by which it is known, since it has no name: the volume \
                 cannot have {length}"
            )));
        }
        if size >= length {
            return Ok(());
        }
        if self.is_device {
            return Err(io::Error::other(format!(
                "the device has {size} bytes, the volume {length}"
            )));
        }
        self.trust.check()?;
        self.writer().set_len(length)?;
        // This also flushes writes of the tenant, and the kernel reports their failure once.
        self.trust.flush(|| self.writer().sync_all())
    }

    /// Whether all of it is allocated on the disk.
    pub fn is_allocated(&self, length: u64) -> bool {
        let blocks = self.file.metadata().map_or(0, |metadata| metadata.blocks());
        !self.is_device && blocks * 512 >= length
    }

    /// Notes that all data were allocated on the disk from the beginning.
    pub fn is_preallocated(&self) {
        self.is_preallocated.store(true, Ordering::Relaxed);
    }

    /// Whether zeros stay allocated when the volume moves.
    pub fn keeps_room(&self, length: u64) -> bool {
        self.is_preallocated.load(Ordering::Relaxed) || self.is_allocated(length)
    }

    /// Whether its first and its last MiB are zeros. A file that was just made has nothing else.
    pub fn is_blank(&self, length: u64) -> bool {
        const LOOKED_AT: u64 = 1 << 20;
        let is_zero = |offset: u64| {
            let mut data = vec![0; LOOKED_AT.min(length - offset) as usize];
            self.file.read_exact_at(&mut data, offset).is_ok() && data.iter().all(|byte| *byte == 0)
        };
        !self.is_device || (is_zero(0) && is_zero(length.saturating_sub(LOOKED_AT)))
    }

    /// Whether nothing was ever written to it, as far as the file system shows.
    pub fn is_untouched(&self) -> bool {
        let data = rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(0));
        self.is_device || matches!(data, Err(Errno::NXIO))
    }

    /// Allocates all of it on the disk.
    pub fn allocate(&self, length: u64) -> io::Result<()> {
        match self.is_device {
            true => Ok(()),
            false => Ok(rustix::fs::fallocate(
                &self.file,
                FallocateFlags::empty(),
                0,
                length,
            )?),
        }
    }

    /// Writes the same bytes once more, from the page cache as far as it has them, and flushes them: then
    /// they are on the disk.
    pub fn write_again(&self, length: u64, keeps_room: bool) -> io::Result<()> {
        let mut data = vec![0; ZEROS];
        for offset in (0..length).step_by(ZEROS) {
            let part = &mut data[..(length - offset).min(ZEROS as u64) as usize];
            self.read(offset, part)?;
            match part.iter().all(|&byte| byte == 0) {
                true => self.zero_now(offset, part.len() as u64, !keeps_room)?,
                false => self.writer().write_all_at(part, offset)?,
            }
        }
        self.writer().sync_data()
    }

    /// Fills `data` from `offset` on.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(data, offset)
    }

    /// The same if the page cache has all of it; `None` if the read would wait for the disk.
    pub fn read_at_once(&self, offset: u64, data: &mut [u8]) -> Option<io::Result<()>> {
        if !self.reads_at_once.load(Ordering::Relaxed) {
            return None;
        }
        let length = data.len();
        let mut parts = [io::IoSliceMut::new(data)];
        match rustix::io::preadv2(&self.file, &mut parts, offset, ReadWriteFlags::NOWAIT) {
            Ok(read) if read == length => Some(Ok(())),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => None,
            Err(_) => {
                // A read that may wait reports the same error.
                self.reads_at_once.store(false, Ordering::Relaxed);
                None
            }
        }
    }

    /// Writes all data if that is not likely to take long; `None` otherwise.
    pub fn write_at_once(&self, offset: u64, data: &[u8]) -> Option<io::Result<()>> {
        self.quick.try_it(|| self.write(offset, data))
    }

    /// Writes all data.
    pub fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.trust.check()?;
        self.failing(self.writer().write_all_at(data, offset))
    }

    /// Fills `data` from the disk, past the page cache. An error if that is not possible.
    pub fn read_from_disk(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.direct.read(&self.file, offset, data, || self.flush())
    }

    /// The first flush after an earlier process was killed during one: that flush may have failed, and the
    /// kernel does not report it again. The flush counts as failed if the disk differs from the page cache, or if
    /// that cannot be determined. `left`: the descriptor by which a block device has kept its page cache. The note
    /// stays until the result is known.
    pub fn flush_and_compare(&self, length: u64, path: &Path, left: Option<&File>) -> io::Result<()> {
        tracing::warn!(
            "{}: a daemon was ended while it flushed; what the page cache has of it is compared with the disk",
            path.display()
        );
        let compared = self.trust.flush(|| {
            match (self.is_device, left) {
                (true, Some(left)) => pages::flush_by(left)?,
                (true, None) => {
                    return Err(io::Error::other(
                        "whether a flush has failed cannot be said: the kernel has dropped the device's pages with the daemon, since no \
                         keeper was left either",
                    ));
                }
                (false, _) => {}
            }
            self.file.sync_data()?;
            match self.is_as_cached(length) {
                Ok(true) => Ok(()),
                Ok(false) => Err(io::Error::other(
                    "the disk has something else than the page cache: a flush has failed, and nobody has heard of it",
                )),
                Err(error) => Err(io::Error::other(format!(
                    "whether a flush has failed cannot be said: {error}"
                ))),
            }
        });
        compared.inspect_err(|error| {
            let doubt = format!(
                "a daemon was ended while it flushed, and {error}; if the data are right, `verbatim volume accept` says so"
            );
            // The first reason counts.
            let _ = self.doubt.set(doubt);
        })
    }

    /// The reason why it is suspect, if no flush of this process has failed.
    pub fn doubt(&self) -> Option<&str> {
        self.doubt.get().filter(|_| self.is_suspect()).map(String::as_str)
    }

    /// All of it was written again, and flushed: failures before that count no more.
    pub fn is_whole(&self) {
        self.trust.is_whole();
        self.trusts_anew();
    }

    /// An operator trusts it again.
    pub fn is_accepted(&self) {
        self.trust.believe(Belief::Sound);
        self.trusts_anew();
    }

    fn trusts_anew(&self) {
        if let Some(Err(error)) = self.pages.as_ref().map(|pages| pages.keep_anew(&self.file)) {
            tracing::warn!(
                "the keeper of the device's pages may report an old failure if this daemon is killed in a flush: {error:#}"
            );
        }
    }

    /// Has a new copy's pages kept: an earlier copy at the same place is nobody's any more.
    fn keep_new_pages(&self) {
        if let Some(Err(error)) = self.pages.as_ref().map(|pages| pages.keep_anew(&self.file)) {
            tracing::warn!(
                "nothing keeps the device's pages: if this daemon is killed in a flush, the copy is suspect ({error:#})"
            );
        }
    }

    /// Has a device's pages kept for the next daemon, from now on. While a flush of an earlier daemon is in doubt,
    /// and no pages were kept from then on, this comes after that is settled.
    fn keep_pages(&self) {
        if let Some(Err(error)) = self.pages.as_ref().map(|pages| pages.keep(&self.file)) {
            tracing::warn!(
                "nothing keeps the device's pages: if this daemon is killed in a flush, the copy is suspect ({error:#})"
            );
        }
    }

    /// The process ends: no flush begins any more, and those in flight are waited for until `end`. Then the next
    /// daemon has nothing to compare, and the device is free.
    pub fn rest(&self, end: Instant) {
        if self.trust.rests_by(end) && !self.is_suspect() {
            self.let_go();
        }
    }

    /// Its pages are no longer kept: the copy does not serve any more.
    pub fn let_go(&self) {
        if let Some(pages) = &self.pages {
            pages.end();
        }
    }

    /// The number of writes of this volume's sidecar that the data have seen; `None` if the data keep no
    /// number.
    pub fn seen(&self, id: VolumeId) -> Option<u64> {
        age::of(&self.file, id)
    }

    /// Shows this number to the data.
    pub fn sees(&self, id: VolumeId, number: u64) {
        if self.is_device || self.seen(id).is_some_and(|seen| seen >= number) {
            return;
        }
        if let Err(error) = age::note(&self.file, id, number) {
            tracing::debug!("the data cannot keep how often their sidecar was written: {error}");
        }
    }

    /// Whether the disk has the same content as the page cache, in the first `length` bytes; nothing is
    /// dropped. An error if that cannot be determined.
    pub fn is_as_cached(&self, length: u64) -> io::Result<bool> {
        let mut is_same = true;
        resident::for_each(&self.file, length, |offset, bytes| {
            let (mut cached, mut stored) = (vec![0; bytes as usize], vec![0; bytes as usize]);
            self.read(offset, &mut cached)?;
            self.direct.read_past(&self.file, offset, &mut stored)?;
            is_same &= cached == stored;
            Ok(())
        })?;
        Ok(is_same)
    }

    /// Any error but a lack of room on a local file system means that accepted data may be lost: the copy
    /// becomes suspect.
    fn failing(&self, done: io::Result<()>) -> io::Result<()> {
        if let Err(error) = &done {
            let is_full = matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
            if !(is_full && self.refuses_cleanly) {
                self.trust.fail();
            }
        }
        done
    }

    /// As [`Store::read`], for copies: a thread with something urgent gets the processor between two pieces.
    pub fn read_in_pieces(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let mut pieces = (offset..).step_by(PIECE).zip(data.chunks_mut(PIECE));
        pieces.try_for_each(|(offset, piece)| self.read(offset, piece))
    }

    /// As [`Store::write`], also in pieces.
    pub fn write_in_pieces(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut pieces = (offset..).step_by(PIECE).zip(data.chunks(PIECE));
        pieces.try_for_each(|(offset, piece)| self.write(offset, piece))
    }

    /// Writes zeros, allocated or not. Later reads return zeros in either case.
    pub fn zero(&self, offset: u64, length: u64, may_free: bool) -> io::Result<()> {
        self.trust.check()?;
        self.failing(self.zero_now(offset, length, may_free))
    }

    fn zero_now(&self, offset: u64, length: u64, may_free: bool) -> io::Result<()> {
        let flags = match may_free {
            true => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            false => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
        };
        match rustix::fs::fallocate(self.writer(), flags, offset, length) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                let zeros = vec![0; ZEROS.min(length as usize)];
                let mut done = 0;
                while done < length {
                    let part = (length - done).min(ZEROS as u64);
                    self.writer()
                        .write_all_at(&zeros[..part as usize], offset + done)?;
                    done += part;
                }
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Makes written data durable. After one failed flush none succeeds.
    pub fn flush(&self) -> io::Result<()> {
        self.trust.flush(|| self.writer().sync_data())
    }
}

impl Drop for Store {
    /// Nobody uses it any more, so no flush is in flight. The pages of a suspect copy may have the only current data.
    fn drop(&mut self) {
        if !self.is_suspect() {
            self.let_go();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_all_of_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::new_file(&folder.path().join("data"), 1 << 20).expect("made");
        for length in [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5] {
            let data: Vec<u8> = (0..length).map(|at| (at / 100) as u8 | 1).collect();
            store.write_in_pieces(77, &data).expect("written");
            let mut read = vec![0; length + 1];
            store.read_in_pieces(77, &mut read[..length]).expect("read");
            assert_eq!(read[..length], data);
            store.read(77, &mut read).expect("read");
            assert_eq!(read[..length], data);
        }
        assert!(store.read_in_pieces((1 << 20) - 1, &mut [0; 2]).is_err());
    }

    #[test]
    fn zeros_are_zeros() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::new_file(&folder.path().join("data"), 1 << 20).expect("made");
        for may_free in [true, false] {
            store.write(0, &[7; 4096]).expect("written");
            store.zero(5, 1000, may_free).expect("zeroed");
            let mut data = [1; 1010];
            store.read(0, &mut data).expect("read");
            assert_eq!(data[..5], [7; 5]);
            assert_eq!(data[5..1005], [0; 1000]);
            assert_eq!(data[1005..], [7; 5]);
        }
        store.flush().expect("flushed");
        assert!(store.read((1 << 20) - 1, &mut [0; 2]).is_err());
    }

    #[test]
    fn what_has_failed_is_read_and_neither_written_nor_flushed_until_it_was_written_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::new_file(&folder.path().join("data"), 1 << 20).expect("made");
        store.write(5, &[7; 4096]).expect("written");
        store.trust().fail();
        let mut data = [0; 4096];
        store.read(5, &mut data).expect("read");
        assert_eq!(data, [7; 4096]);
        let refused = [store.write(5, &[8]), store.zero(0, 4096, true), store.flush()];
        assert!(refused.iter().all(Result::is_err), "{refused:?}");
        store.write_again(1 << 20, false).expect("written");
        store.trust().believe(Belief::Sound);
        store.flush().expect("flushed");
        store.read(5, &mut data).expect("read");
        assert_eq!(data, [7; 4096]);
    }

    #[test]
    fn it_grows_and_is_never_cut() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::new_file(&folder.path().join("data"), 8192).expect("made");
        assert!(store.is_untouched());
        for (length, size) in [(4096, 8192), (8192, 8192), (12_288, 12_288)] {
            store.reach(length).expect("it can");
            assert_eq!(store.size().expect("known"), size);
        }
        assert!(!store.is_allocated(12_288));
        store.allocate(12_288).expect("there is room");
        assert!(store.is_allocated(12_288));
        store.write(0, &[1]).expect("written");
        assert!(!store.is_untouched());
    }
}
