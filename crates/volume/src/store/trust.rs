//! Trust in the data of a copy.
//!
//! When a flush fails, Linux may mark the pages that it could not write as clean, and keep them: reads return
//! the new data until the pages leave the page cache. No later flush reports the failure, by any descriptor.
//! So a failure is a property of the copy that must outlive the process, and data read through the page cache
//! prove nothing about the disk.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard};

/// A file in the volume's folder has one of these names. It is made in advance: on a full disk a file can be
/// renamed, but not made.
const SOUND: &str = "data.sound";
const SUSPECT: &str = "data.broken";

/// Mark of a suspect copy. It is beside its sidecar, and also in the runtime folder, which lives as long as
/// the page cache, in case the first one's disk has failed, too.
#[derive(Debug, Clone)]
pub struct Marker {
    folder: PathBuf,
    runtime: PathBuf,
}

impl Marker {
    /// In the volume's folder, and at that path of the runtime folder.
    pub fn new(folder: &Path, runtime: PathBuf) -> Self {
        Self {
            folder: folder.to_owned(),
            runtime,
        }
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
    belief: Belief,
    /// Flushes that have begun.
    begun: u64,
    /// The last of them that has ended.
    ended: u64,
}

/// Trust in an open copy, shared by all its users.
#[derive(Debug)]
pub struct Trust {
    inner: Mutex<Inner>,
    /// A flush has ended.
    flushed: Condvar,
    marker: Option<Marker>,
}

impl Trust {
    /// Of a copy that was just opened.
    pub fn new(belief: Belief, marker: Option<Marker>) -> Self {
        Self {
            inner: Mutex::new(Inner {
                belief,
                begun: 0,
                ended: 0,
            }),
            flushed: Condvar::new(),
            marker,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    /// The degree of trust.
    pub fn belief(&self) -> Belief {
        self.lock().belief
    }

    /// Sets the degree of trust. [`Self::fail`] is for failures.
    pub fn believe(&self, belief: Belief) {
        self.lock().belief = belief;
    }

    /// All of it was written again, and flushed.
    pub fn is_whole(&self) {
        let mut inner = self.lock();
        if inner.belief == Belief::Rewritten {
            inner.belief = Belief::Sound;
        }
    }

    /// The copy has failed. It is marked when this returns, and so before the failure is reported.
    pub fn fail(&self) {
        Self::fail_locked(&mut self.lock(), self.marker.as_ref());
    }

    fn fail_locked(inner: &mut Inner, marker: Option<&Marker>) {
        if inner.belief == Belief::Suspect {
            return;
        }
        inner.belief = Belief::Suspect;
        if let Some(marker) = marker {
            marker.set();
        }
    }

    /// An error for a copy that cannot be written to.
    pub fn check(&self) -> io::Result<()> {
        match self.belief() {
            Belief::Suspect => Err(io::Error::from_raw_os_error(libc::EIO)),
            Belief::Sound | Belief::Rewritten => Ok(()),
        }
    }

    /// Returns after a flush that began after this call; one thread flushes for all that wait. The kernel may
    /// report an error that concerns several flushes to only one of them, so they go one after the other.
    pub fn flush(&self, sync: impl Fn() -> io::Result<()>) -> io::Result<()> {
        let mut inner = self.lock();
        let wanted = inner.begun + 1;
        loop {
            if inner.belief == Belief::Suspect {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            if inner.ended >= wanted {
                return Ok(());
            }
            if inner.begun > inner.ended {
                inner = self.flushed.wait(inner).expect("no panic under this lock");
                continue;
            }
            inner.begun += 1;
            drop(inner);
            let synced = sync();
            inner = self.lock();
            inner.ended = inner.begun;
            if synced.is_err() {
                Self::fail_locked(&mut inner, self.marker.as_ref());
            }
            self.flushed.notify_all();
            synced?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn marker(folder: &tempfile::TempDir) -> Marker {
        Marker::new(folder.path(), folder.path().join("runtime"))
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
    fn an_error_that_one_of_many_flushes_hears_is_heard_by_all_of_them() {
        for _ in 0..50 {
            let trust = Arc::new(Trust::new(Belief::Sound, None));
            // The first that asks the kernel is told, and no other.
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
