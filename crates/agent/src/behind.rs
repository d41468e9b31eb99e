//! RAM that virtual machines have left here by post-copy, and that their new hosts have not all of yet.
//!
//! ```text
//!  behind/SESSION/
//!    destination   the host that may read it, and that says when it has all
//!    ram           the file that was QEMU's RAM: another link to it
//!    own/          or a mount of the file system that has only this RAM, with another link to it: behind.SESSION
//! ```
//!
//! The link is made before the decision, so that the old place is cleared after it as ever. It goes when the session is rolled back, or when
//! the destination says that nothing is missing there, durably on its side ([`crate::session::behind`]). Until then the destination asks for parts of it, or has it lent and
//! reads it by one-sided RDMA, in place. The files lie in memory: what a host's restart takes
//! away is lost, and with it the virtual machine, which its destination ends.

use std::collections::HashMap;
use std::fs::{DirBuilder, File};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use verbatim_bounded::decode;
use verbatim_bulk::fingerprint::Key;
use verbatim_bulk::{Device, Lender};
use verbatim_vm::{Behind, Ram, Run};

use crate::own_files;
use crate::proto::{LendBehindReply, LendBehindRequest, RamRun, ReadBehindReply, ReadBehindRequest};

/// Where RAM's own file system is mounted, in a session's folder.
const OWN: &str = "own";

/// What was left, by session.
#[derive(Debug)]
pub struct Behinds {
    folder: PathBuf,
    kept: Mutex<HashMap<u64, Arc<Kept>>>,
}

/// What one virtual machine has left.
#[derive(Debug)]
pub struct Kept {
    destination: String,
    /// For its connections, which come and go with the destination's agent.
    lenders: Mutex<Vec<Lender>>,
    key: Key,
    behind: Behind,
    /// The session is over here, and somebody sees to it.
    is_over: AtomicBool,
}

impl Kept {
    fn new(destination: String, behind: Behind) -> Self {
        Self {
            destination,
            lenders: Mutex::default(),
            key: Key::new(),
            behind,
            is_over: AtomicBool::new(false),
        }
    }

    /// What is in a range of it: its bytes, or, if it is only to be described, their fingerprints.
    fn read(&self, range: Range<u64>, described: bool) -> anyhow::Result<Vec<RamRun>> {
        let runs = self.behind.runs(range)?.into_iter().map(|run| {
            let (range, mut data) = match run {
                Run::Zero(range) => (range, Vec::new()),
                Run::Data(range) => {
                    let bytes = usize::try_from(range.end - range.start)?;
                    (range, vec![0; bytes])
                }
            };
            if !data.is_empty() {
                self.behind.ram().read(range.clone(), &mut data)?;
            }
            let (data, fingerprints) = match described {
                true => (Vec::new(), self.key.fingerprints(&data)),
                false => (data, Vec::new()),
            };
            Ok(RamRun {
                start: range.start,
                length: range.end - range.start,
                data,
                fingerprints,
            })
        });
        runs.collect()
    }

    /// From now on it is read by these connections, and by no others.
    fn lend(&self, wishes: &[Vec<u8>], device: &Device) -> anyhow::Result<Vec<Vec<u8>>> {
        let mut lenders = self.lenders.lock().unwrap_or_else(PoisonError::into_inner);
        lenders.clear();
        let ram = self.behind.ram();
        let lent = wishes.iter().map(|wish| {
            let wish = decode(wish).context("a malformed wish")?;
            let file = ram.file().try_clone()?;
            let (lender, loan) = Lender::accept(device, file.into(), ram.bytes(), &wish)?;
            anyhow::Ok((lender, postcard::to_allocvec(&loan)?))
        });
        let (made, loans): (Vec<_>, _) = lent.collect::<anyhow::Result<Vec<_>>>()?.into_iter().unzip();
        *lenders = made;
        Ok(loans)
    }
}

impl Behinds {
    /// Those in a folder, once [`Behinds::find`] was called.
    pub fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            kept: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Kept>>> {
        self.kept.lock().expect("no panic under this lock")
    }

    fn of(&self, session: u64) -> PathBuf {
        self.folder.join(format!("{session:016x}"))
    }

    /// What was left in a session, for a host; `None` if nothing is kept for it.
    fn get(&self, session: u64, host: &str) -> Option<Arc<Kept>> {
        let kept = self.lock().get(&session).cloned();
        kept.filter(|kept| kept.destination == host)
    }

    /// What is in a range of what was left in a session, for a host.
    pub async fn read(&self, host: &str, request: &ReadBehindRequest) -> anyhow::Result<ReadBehindReply> {
        let Some(kept) = self.get(request.session, host) else {
            return Ok(ReadBehindReply::default());
        };
        let range = request.start..request.start.saturating_add(request.length);
        let described = request.described;
        let read = tokio::task::spawn_blocking(move || kept.read(range, described)).await;
        let runs = read.context("reading RAM panicked")??;
        Ok(ReadBehindReply { kept: true, runs })
    }

    /// Lends what was left in a session to a host, by the RNIC that `open` opens.
    pub async fn lend(
        &self,
        host: &str,
        request: LendBehindRequest,
        open: impl FnOnce() -> Result<Device, verbatim_bulk::Error> + Send + 'static,
    ) -> anyhow::Result<LendBehindReply> {
        let Some(kept) = self.get(request.session, host) else {
            return Ok(LendBehindReply::default());
        };
        let key = kept.key.to_bytes();
        let lent = tokio::task::spawn_blocking(move || kept.lend(&request.wishes, &open()?)).await;
        Ok(LendBehindReply {
            kept: true,
            loans: lent.context("lending RAM panicked")??,
            key,
        })
    }

    /// Keeps what stands still, whoever clears the place that it has: from now on the destination may read it.
    pub fn keep(&self, session: u64, destination: &str, behind: Behind) -> anyhow::Result<()> {
        let folder = self.of(session);
        let made = make(&self.folder).and_then(|()| {
            make(&folder)?;
            std::fs::write(folder.join("destination"), destination)?;
            match link(behind.ram().file(), &folder.join("ram")) {
                Err(error) if error.kind() == io::ErrorKind::CrossesDevices => stay(&behind, &folder),
                linked => linked,
            }
        });
        made.with_context(|| {
            format!(
                "cannot keep {} in {} for post-copy; the RAM must lie in the same tmpfs, or in one of its own",
                behind.ram().path().display(),
                folder.display()
            )
        })?;
        let destination = destination.to_owned();
        let kept = Kept::new(destination, behind);
        self.lock().insert(session, Arc::new(kept));
        Ok(())
    }

    /// The session is over here. For which host something is kept of it; who says so first is told, and sees to it.
    pub fn over(&self, session: u64) -> Option<String> {
        let kept = self.lock().get(&session).cloned()?;
        let is_first = !kept.is_over.swap(true, SeqCst);
        is_first.then(|| kept.destination.clone())
    }

    /// It is not needed (any more). Whether nothing is left of it.
    pub fn forget(&self, session: u64) -> bool {
        self.lock().remove(&session);
        let folder = self.of(session);
        // The file system mounted there may have the RAM of a guest that still runs here: its other files are
        // left alone.
        let let_go = own_files::remove_ram(&folder, &format!("{OWN}/{}", name_in(&folder)))
            .and_then(|()| own_files::unmount(&folder.join(OWN)));
        match let_go.and_then(|()| std::fs::remove_dir_all(&folder)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(folder = %folder.display(), %error, "RAM that nobody needs stays in memory; it is removed later");
                false
            }
            _ => true,
        }
    }

    /// Finds what an earlier agent has kept. From then on it may be read.
    pub fn find(&self) -> anyhow::Result<()> {
        make(&self.folder).with_context(|| format!("cannot make {}", self.folder.display()))?;
        for entry in std::fs::read_dir(&self.folder)? {
            let name = entry?.file_name();
            let Some(session) = name.to_str().and_then(|name| u64::from_str_radix(name, 16).ok()) else {
                continue;
            };
            match found(&self.of(session)) {
                Ok(kept) => drop(self.lock().insert(session, Arc::new(kept))),
                Err(error) => {
                    // The earlier agent was cut off before the decision, or after all had come.
                    tracing::info!(error = format!("{error:#}"), "what is left of RAM is removed");
                    self.forget(session);
                }
            }
        }
        Ok(())
    }

    /// Upper bound of this host's memory that all of it takes.
    pub fn bytes(&self) -> u64 {
        self.lock().values().map(|kept| kept.behind.ram().bytes()).sum()
    }

    /// The sessions of which something is kept.
    pub fn all(&self) -> Vec<u64> {
        self.lock().keys().copied().collect()
    }
}

/// A folder for root alone, if there is none.
fn make(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Another link to a file that is open.
fn link(file: &File, path: &Path) -> io::Result<()> {
    let open = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::linkat(CWD, open, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

/// Name of the link in the RAM's own file system, where several sessions may each have one.
fn name_in(folder: &Path) -> String {
    format!("behind.{}", folder.file_name().unwrap_or_default().display())
}

/// Makes another link to RAM that has its own file system, and a bind mount of that file system in `folder`,
/// which lasts as long as the RAM is needed.
fn stay(behind: &Behind, folder: &Path) -> io::Result<()> {
    let ram = behind.ram();
    let place = ram.path().parent().ok_or(Errno::NOENT)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let place = rustix::fs::openat(CWD, place, flags, Mode::empty())?;
    let name = name_in(folder);
    let _ = rustix::fs::unlinkat(&place, &name, AtFlags::empty());
    let open = format!("/proc/self/fd/{}", ram.file().as_raw_fd());
    rustix::fs::linkat(CWD, open, &place, &name, AtFlags::SYMLINK_FOLLOW)?;
    let own = folder.join(OWN);
    make(&own)?;
    rustix::mount::mount_bind(format!("/proc/self/fd/{}", place.as_raw_fd()), &own)?;
    Ok(())
}

fn found(folder: &Path) -> anyhow::Result<Kept> {
    let destination = folder.join("destination");
    let destination = std::fs::read_to_string(&destination)
        .with_context(|| format!("cannot read {}", destination.display()))?;
    let own = folder.join(OWN).join(name_in(folder));
    let place = if own.exists() { own } else { folder.join("ram") };
    let ram = Arc::new(Ram::open(&place)?);
    let behind = Behind::of(&ram)?;
    Ok(Kept::new(destination, behind))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A RAM of four pages, of which the second has something.
    fn ram(folder: &Path) -> Arc<Ram> {
        let ram = Ram::create(&folder.join("mem"), 4 * 4096).unwrap();
        ram.write(4096, &[7; 4096]).unwrap();
        Arc::new(ram)
    }

    #[test]
    fn what_is_kept_outlives_its_place_and_is_given_to_its_destination_alone() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let behinds = Behinds::new(folder.path().join("behind"));
        let ram = ram(folder.path());
        behinds.keep(5, "dst", Behind::of(&ram).unwrap()).unwrap();
        std::fs::remove_file(folder.path().join("mem")).unwrap();
        drop(ram);
        assert!(behinds.get(5, "other").is_none());
        assert!(behinds.get(6, "dst").is_none());
        let runs = behinds.get(5, "dst").unwrap().read(0..4 * 4096, false).unwrap();
        let bytes: u64 = runs.iter().map(|run| run.length).sum();
        assert_eq!(bytes, 4 * 4096);
        let data: Vec<_> = runs.iter().filter(|run| !run.data.is_empty()).collect();
        assert_eq!(data.len(), 1);
        assert_eq!((data[0].start, &data[0].data[..]), (4096, &[7; 4096][..]));
        // Described, it is the same without its bytes.
        let kept = behinds.get(5, "dst").unwrap();
        let described = kept.read(0..4 * 4096, true).unwrap();
        assert_eq!(described.len(), runs.len());
        for (described, run) in described.iter().zip(&runs) {
            assert_eq!((described.start, described.length), (run.start, run.length));
            assert_eq!(described.fingerprints, kept.key.fingerprints(&run.data));
            assert!(described.data.is_empty() && run.fingerprints.is_empty());
        }
        drop(kept);
        // One that comes later finds it.
        let kept = found(&behinds.of(5)).unwrap();
        assert_eq!(kept.destination, "dst");
        assert_eq!(kept.read(4096..8192, false).unwrap()[0].data, [7; 4096]);
        assert_eq!(behinds.over(5).as_deref(), Some("dst"));
        assert_eq!(behinds.over(5), None, "somebody sees to it");
        assert!(behinds.forget(5));
        assert!(behinds.get(5, "dst").is_none());
        assert!(!behinds.of(5).exists());
    }

    #[test]
    fn ram_in_a_file_system_of_its_own_outlives_its_place_and_a_running_guests_is_not_touched() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let place = folder.path().join("instances/web");
        let own = place.join("mem");
        std::fs::create_dir_all(&own).unwrap();
        let behinds = Behinds::new(folder.path().join("behind"));
        let cleared = scopeguard(&place, &behinds);
        assert!(own_files::mount(&own, 1 << 20, false).unwrap());
        let made = Ram::create(&own.join("ram"), 4 * 4096).unwrap();
        made.write(4096, &[7; 4096]).unwrap();
        let ram = Arc::new(made);
        // Rolled back: the guest goes on with its RAM.
        behinds.keep(6, "dst", Behind::of(&ram).unwrap()).unwrap();
        assert!(behinds.forget(6));
        assert!(!behinds.of(6).exists() && own.join("ram").exists());
        assert_eq!(std::fs::read_dir(&own).unwrap().count(), 1);
        // Committed: its place is cleared.
        behinds.keep(5, "dst", Behind::of(&ram).unwrap()).unwrap();
        drop(ram);
        own_files::clear(&place, "mem", "mem/ram").unwrap();
        assert!(!place.exists());
        let read = |kept: &Kept| kept.read(4096..8192, false).unwrap()[0].data.clone();
        assert_eq!(read(&behinds.get(5, "dst").unwrap()), [7; 4096]);
        let later = Behinds::new(folder.path().join("behind"));
        later.find().unwrap();
        assert_eq!(read(&later.get(5, "dst").unwrap()), [7; 4096]);
        assert_eq!(later.bytes(), 4 * 4096);
        assert!(behinds.forget(5));
        drop(cleared);
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(folder.path().to_str().unwrap()));
    }

    /// Nothing stays mounted, however the test ends.
    fn scopeguard<'a>(place: &'a Path, behinds: &'a Behinds) -> impl Drop + 'a {
        struct Cleared<'a>(&'a Path, &'a Behinds);
        impl Drop for Cleared<'_> {
            fn drop(&mut self) {
                for session in [5, 6] {
                    self.1.forget(session);
                }
                _ = own_files::clear(self.0, "mem", "mem/ram");
            }
        }
        Cleared(place, behinds)
    }

    #[test]
    fn who_asks_for_more_than_there_is_is_refused() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let behinds = Behinds::new(folder.path().join("behind"));
        behinds
            .keep(5, "dst", Behind::of(&ram(folder.path())).unwrap())
            .unwrap();
        let kept = behinds.get(5, "dst").unwrap();
        assert!(kept.read(0..5 * 4096, false).is_err(), "there are four pages");
    }
}
