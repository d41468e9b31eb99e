//! Trust in the data of a copy. The rules are in `verbatim_mirror::trust`; this module carries them out.
//!
//! When a flush fails, Linux may mark the pages that it could not write as clean, and keep them: reads return
//! the new data until the pages leave the page cache. No later flush reports the failure, by any descriptor.
//! So a failure is a property of the copy that must outlive the process, and data read through the page cache
//! prove nothing about the disk.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

use verbatim_mirror::trust::{self, May};
use verbatim_mirror::{Extent, Failure, Op};

use super::pages::Pages;
use super::under_way::UnderWay;
use crate::faults::{Hook, Point};

/// The two names of one file in a volume's folder. The file exists before a failure: on a full disk a file
/// can be renamed, but not made.
const SOUND: &str = "data.sound";
const SUSPECT: &str = "data.broken";

/// Endings of a volume's files in the runtime folder: its mark, the note of a flush, and the socket of its keeper of pages.
const MARK: &str = "broken";
const FLUSHING: &str = "flushing";
pub(super) const PAGES: &str = "pages";

/// Mark of a suspect copy. It is beside its sidecar, and also in the runtime folder, which lives as long as
/// the page cache, in case the first one's disk has failed, too.
#[derive(Debug, Clone)]
pub struct Marker {
    folder: PathBuf,
    runtime: PathBuf,
    hook: Hook,
}

impl Marker {
    /// A marker in the volume's folder, and by this name in the runtime folder. The hook is called when a
    /// failure is known and not noted yet.
    pub fn new(folder: &Path, runtime_dir: &Path, name: &str, hook: Hook) -> Self {
        Self {
            folder: folder.to_owned(),
            runtime: runtime_dir.join("volumes").join(format!("{name}.{MARK}")),
            hook,
        }
    }

    /// The path of the note that a flush is in progress.
    fn under_way(&self) -> PathBuf {
        self.runtime.with_extension(FLUSHING)
    }

    /// The keeper of its device's pages.
    pub fn pages(&self) -> Pages {
        Pages::at(self.runtime.with_extension(PAGES))
    }

    /// Removes the note: the volume is gone.
    pub fn discard(&self) {
        self.pages().end();
        // A note that stays means nothing to a later volume.
        let _ = fs::remove_file(self.under_way());
    }

    /// Whether a flush was in progress when an earlier process with this copy ended, since the last start of
    /// the machine.
    pub fn was_cut_off(&self) -> bool {
        UnderWay::was_cut_off(&self.under_way())
    }

    /// Whether the copy was marked.
    pub fn is_set(&self) -> bool {
        self.folder.join(SUSPECT).exists() || self.runtime.exists()
    }

    /// Makes the file that [`Self::set`] renames.
    pub fn prepare(&self) -> io::Result<()> {
        let (sound, suspect) = (self.folder.join(SOUND), self.folder.join(SUSPECT));
        if !sound.exists() && !suspect.exists() {
            File::create(&sound)?.sync_all()?;
            sync(&self.folder)?;
        }
        Ok(())
    }

    /// Marks the copy, for the next process.
    pub fn set(&self) {
        (self.hook)(Point::FlushFailed);
        let (sound, suspect) = (self.folder.join(SOUND), self.folder.join(SUSPECT));
        let renamed = match fs::rename(&sound, &suspect) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && !suspect.exists() => {
                File::create(&suspect).map(drop)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            renamed => renamed,
        };
        let beside = renamed.and_then(|()| sync(&self.folder));
        let runtime = File::create(&self.runtime).map(drop);
        if let (Err(error), Err(other)) = (&beside, &runtime) {
            tracing::error!(
                "that the data are suspect can be noted neither in {} ({error}) nor at {} ({other}): a daemon that is started anew will not know",
                self.folder.display(),
                self.runtime.display()
            );
        }
    }

    /// Removes the mark. After an error the rest of the mark counts.
    pub fn clear(&self) -> io::Result<()> {
        match fs::remove_file(&self.runtime) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        match fs::rename(self.folder.join(SUSPECT), self.folder.join(SOUND)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            renamed => renamed.and_then(|()| sync(&self.folder)),
        }
    }
}

/// Names of volumes with kept pages that may be the only current data: a flush has failed, or was cut off by the end of its daemon. No
/// daemon runs.
pub fn at_stake(runtime_dir: &Path) -> Vec<String> {
    let folder = fs::read_dir(runtime_dir.join("volumes"));
    let paths = folder.into_iter().flatten().flatten().map(|entry| entry.path());
    let keepers = paths.filter(|path| path.extension().is_some_and(|kind| kind == PAGES));
    let at_stake = keepers.filter(|path| {
        let is_in_doubt =
            path.with_extension(MARK).exists() || UnderWay::was_cut_off(&path.with_extension(FLUSHING));
        is_in_doubt && Pages::at(path.clone()).is_any()
    });
    let name = |path: PathBuf| Some(path.file_stem()?.to_str()?.to_owned());
    at_stake.filter_map(name).collect()
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Degree of trust in the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Belief {
    /// Flushed data are on the disk.
    Sound,
    /// Some written data may be only in the page cache, and may vanish from it. Writes and flushes fail.
    Suspect,
    /// All data are being overwritten: the old ones prove nothing.
    Rewritten,
}

#[derive(Debug)]
struct Inner {
    trust: trust::Trust,
    /// All data of a copy that is not suspect are being overwritten.
    is_rewritten: bool,
    /// Flushes that have begun.
    begun: u64,
    /// The last of them that has ended.
    ended: u64,
    /// The process ends: no other begins.
    is_over: bool,
}

/// Trust in an open copy, shared by all its users.
#[derive(Debug)]
pub struct Trust {
    inner: Mutex<Inner>,
    /// Notified when a flush has ended.
    flushed: Condvar,
    marker: Option<Marker>,
    under_way: Option<UnderWay>,
}

/// Any change.
const CHANGE: Op = Op::Change(Extent { offset: 0, length: 1 });

/// Whether the operation may go on. It never waits here: the mark of a suspect copy is written under the
/// lock.
fn may(trust: &trust::Trust, op: Op) -> io::Result<()> {
    match trust.may(op) {
        May::Go => Ok(()),
        May::Fail(Failure::Disk(errno)) => Err(io::Error::from_raw_os_error(errno)),
        May::Wait | May::Fail(Failure::Moved) => Err(io::Error::from_raw_os_error(libc::EIO)),
    }
}

impl Trust {
    /// Trust in a copy that was just opened.
    pub fn new(belief: Belief, marker: Option<Marker>) -> Self {
        let under_way = marker.as_ref().and_then(|marker| {
            let noted = UnderWay::open(&marker.under_way());
            let warn = |error: &io::Error| {
                tracing::warn!(
                    "flushes that a killed daemon leaves cannot be noted at {}: {error}",
                    marker.under_way().display()
                );
            };
            noted.inspect_err(warn).ok()
        });
        Self {
            inner: Mutex::new(Inner {
                trust: trust::Trust::of(belief == Belief::Suspect),
                is_rewritten: belief == Belief::Rewritten,
                begun: 0,
                ended: 0,
                is_over: false,
            }),
            flushed: Condvar::new(),
            marker,
            under_way,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    /// The degree of trust.
    pub fn belief(&self) -> Belief {
        let inner = self.lock();
        match (inner.trust.is_sound(), inner.is_rewritten) {
            (false, _) => Belief::Suspect,
            (true, true) => Belief::Rewritten,
            (true, false) => Belief::Sound,
        }
    }

    /// Sets the degree of trust. [`Self::fail`] is for failures.
    pub fn believe(&self, belief: Belief) {
        let mut inner = self.lock();
        inner.trust = trust::Trust::of(belief == Belief::Suspect);
        inner.is_rewritten = belief == Belief::Rewritten;
    }

    /// All data were written again, and flushed.
    pub fn is_whole(&self) {
        self.lock().is_rewritten = false;
    }

    /// The copy has failed. It is marked when this returns, and so before the failure is reported.
    pub fn fail(&self) {
        self.fail_locked(&mut self.lock());
    }

    fn fail_locked(&self, inner: &mut Inner) {
        if !inner.trust.has_failed() {
            return;
        }
        if let Some(marker) = &self.marker {
            marker.set();
        }
        inner.trust.noted();
        inner.is_rewritten = false;
    }

    /// An error for a copy that cannot be written to.
    pub fn check(&self) -> io::Result<()> {
        may(&self.lock().trust, CHANGE)
    }

    /// Flushes the disk after the call began, by one thread for all that wait. The kernel reports an error
    /// that concerns all flushes to one of them only, so they go one after the other. A note says that a
    /// flush is in progress until its result is handled: this costs two writes to memory.
    pub fn flush(&self, sync: impl Fn() -> io::Result<()>) -> io::Result<()> {
        let mut inner = self.lock();
        let wanted = inner.begun + 1;
        loop {
            may(&inner.trust, Op::Flush)?;
            if inner.ended >= wanted {
                return Ok(());
            }
            // Without an answer the client asks the next daemon.
            if inner.begun > inner.ended || inner.is_over {
                inner = self.flushed.wait(inner).expect("no panic under this lock");
                continue;
            }
            inner.begun += 1;
            drop(inner);
            self.is_under_way(true);
            let synced = sync();
            inner = self.lock();
            inner.ended = inner.begun;
            if synced.is_err() {
                self.fail_locked(&mut inner);
            }
            self.is_under_way(false);
            self.flushed.notify_all();
            synced?;
        }
    }

    /// The process ends: no flush begins any more. Whether none is in flight before this time.
    pub fn rests_by(&self, end: Instant) -> bool {
        let mut inner = self.lock();
        inner.is_over = true;
        while inner.begun > inner.ended {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.flushed.wait_timeout(inner, left);
            inner = waited.expect("no panic under this lock").0;
        }
        true
    }

    fn is_under_way(&self, is: bool) {
        if let Some(under_way) = &self.under_way {
            under_way.set(is);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn marker(folder: &tempfile::TempDir) -> Marker {
        std::fs::create_dir_all(folder.path().join("volumes")).expect("made");
        Marker::new(folder.path(), folder.path(), "runtime", crate::faults::none)
    }

    #[test]
    fn a_mark_is_there_until_it_is_taken_away() {
        let folder = tempfile::tempdir().expect("a folder");
        let marker = marker(&folder);
        for _ in 0..2 {
            marker.prepare().expect("made");
            assert!(!marker.is_set());
            marker.set();
            marker.set();
            marker.prepare().expect("it is there");
            assert!(marker.is_set());
            // Either of the two is enough.
            fs::remove_file(&marker.runtime).expect("it was made");
            assert!(marker.is_set());
            marker.clear().expect("cleared");
            assert!(!marker.is_set());
        }
        marker.set();
        fs::remove_file(folder.path().join(SUSPECT)).expect("it was made");
        assert!(marker.is_set());
    }

    #[test]
    fn after_one_flush_that_failed_no_other_succeeds_and_the_mark_is_there_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let trust = Trust::new(Belief::Sound, Some(marker(&folder)));
        trust.flush(|| Ok(())).expect("flushed");
        assert!(!marker(&folder).is_set());
        trust
            .flush(|| Err(io::Error::from_raw_os_error(libc::ENOSPC)))
            .expect_err("it fails");
        assert!(marker(&folder).is_set());
        trust.flush(|| Ok(())).expect_err("nothing is believed");
        trust.check().expect_err("nothing is written");
        trust.believe(Belief::Rewritten);
        trust.flush(|| Ok(())).expect("flushed");
    }

    #[test]
    fn a_flush_that_a_killed_process_leaves_is_known_to_the_next_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let marker = marker(&folder);
        assert!(!marker.was_cut_off(), "there was none");
        let trust = Trust::new(Belief::Sound, Some(marker.clone()));
        trust
            .flush(|| {
                assert!(marker.was_cut_off(), "whoever comes while it is under way");
                Ok(())
            })
            .expect("flushed");
        assert!(!marker.was_cut_off(), "it is dealt with");
        trust
            .flush(|| Err(io::Error::from_raw_os_error(libc::EIO)))
            .expect_err("it fails");
        assert!(!marker.was_cut_off() && marker.is_set(), "it is noted");
        // The page cache does not outlive its kernel.
        std::fs::write(marker.under_way(), [b'1'; 64]).expect("written");
        assert!(!marker.was_cut_off(), "of another start of the machine");
    }

    #[test]
    fn a_process_that_ends_waits_for_its_flush_and_begins_no_other() {
        let folder = tempfile::tempdir().expect("a folder");
        let marker = marker(&folder);
        let trust = Arc::new(Trust::new(Belief::Sound, Some(marker.clone())));
        let (ends, end) = std::sync::mpsc::channel::<()>();
        let (begins, begun) = std::sync::mpsc::channel();
        let of = trust.clone();
        let flush = std::thread::spawn(move || {
            let end = std::sync::Mutex::new(end);
            of.flush(|| {
                begins.send(()).expect("it is awaited");
                let _ = end.lock().expect("no panic under this lock").recv();
                Ok(())
            })
        });
        begun.recv().expect("it begins");
        assert!(!trust.rests_by(Instant::now()), "it is in flight");
        let of = trust.clone();
        let (says, said) = std::sync::mpsc::channel();
        std::thread::spawn(move || says.send(of.flush(|| Ok(()))));
        drop(ends);
        assert!(trust.rests_by(Instant::now() + std::time::Duration::from_secs(60)));
        flush.join().expect("it does not panic").expect("flushed");
        assert!(!marker.was_cut_off(), "nothing is left in doubt");
        let limit = std::time::Duration::from_millis(50);
        said.recv_timeout(limit).expect_err("another one has begun");
    }

    #[test]
    fn an_error_that_one_of_many_flushes_hears_is_heard_by_all_of_them() {
        for _ in 0..50 {
            let trust = Arc::new(Trust::new(Belief::Sound, None));
            // The kernel reports the error to the first flush, and to no other.
            let asked = Arc::new(AtomicU64::new(0));
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    let (trust, asked) = (trust.clone(), asked.clone());
                    std::thread::spawn(move || {
                        trust.flush(|| match asked.fetch_add(1, Ordering::Relaxed) {
                            0 => Err(io::Error::from_raw_os_error(libc::EIO)),
                            _ => Ok(()),
                        })
                    })
                })
                .collect();
            for thread in threads {
                let flushed = thread.join().expect("it does not panic");
                assert!(flushed.is_err(), "one has heard of no error");
            }
        }
    }
}
