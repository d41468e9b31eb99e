//! Sends what changed in an instance's folders as a stream of parts.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context;
use bytes::Bytes;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tokio::sync::mpsc;
use tonic::transport::Channel;
use verbatim_bulk::QpClass;

use super::attributes;
use super::bulk::{Bulk, Credits, CutOnDrop, Cutter};
use super::leases::Leases;
use super::pace::Pace;
use super::parts::{PART_BYTES, Parts, QUEUE_PARTS, Ring, Route};
use super::tracker::Tracker;
use super::tree::{Detail, Entry, Inode, Kind, Times, Tree};
use crate::beneath;
use crate::proto::file_part::{Folder, Kind as PartKind};
use crate::proto::peer_client::PeerClient;
use crate::proto::{Attributes, FilePart};

/// `S_IFREG`: the destination looks at the permission bits alone, and a mode of 0 would leave them.
const REGULAR: u32 = 0o100_000;

/// How much a stamp takes beside its path, at most.
const STAMP_BYTES: usize = 64;

/// A file that was to be read.
enum Opened {
    File(File),
    /// Of the holder of a lease: whoever reads by it changes its times, which were these.
    Lent(File, Times),
    /// It is there no more.
    Gone,
    /// A program has a lease on it, and would be told of its end if it was opened.
    Leased,
}

/// The source's view of what the destination has of one folder.
#[derive(Debug)]
pub struct Sender {
    session: u64,
    folder: Folder,
    root: PathBuf,
    tree: Tree,
    /// Of files that change in place: adopted memory and whatever else is written repeatedly.
    trackers: HashMap<PathBuf, Tracker>,
    /// Files below this folder are never written through a mapping, so that their times show every change. All others
    /// are compared in every round: a store to a mapped page of tmpfs changes no time.
    trusted: Option<PathBuf>,
    /// What the round that runs has sent, in bytes.
    sent: Arc<AtomicU64>,
    /// How many read.
    threads: usize,
    route: Route,
    scope: Scope,
    detail: Detail,
    /// Nobody writes any more, and this round is the last.
    is_last: bool,
    /// Only further names of files are sent, and only new ones.
    only_names: bool,
    /// Files that were gone when the round that runs came to read them: the destination has nothing by that name, or something else.
    gone: HashSet<PathBuf>,
    /// Of programs, on files, at the beginning of the round that runs.
    leases: Leases,
}

/// Which part of its folder a sender looks at; paths are relative to the folder.
#[derive(Debug, Clone, Default)]
enum Scope {
    #[default]
    All,
    /// This folder, and those that it is in.
    Only(PathBuf),
    /// All but this folder.
    Without(PathBuf),
    /// All but the content of this folder.
    WithoutWhatIsIn(PathBuf),
}

impl Scope {
    fn has(&self, path: &Path) -> bool {
        match self {
            Self::All => true,
            Self::Only(folder) => path.starts_with(folder) || folder.starts_with(path),
            Self::Without(folder) => !path.starts_with(folder),
            Self::WithoutWhatIsIn(folder) => !path.starts_with(folder) || path == folder,
        }
    }
}

impl Sender {
    /// The destination has nothing of `root` yet. The times of files below `trusted` (relative) are trusted.
    pub fn new(session: u64, folder: Folder, root: PathBuf, trusted: Option<PathBuf>) -> Self {
        Self {
            session,
            folder,
            root,
            tree: Tree::default(),
            trackers: HashMap::new(),
            trusted,
            sent: Arc::default(),
            threads: 1,
            route: Route::default(),
            scope: Scope::default(),
            detail: Detail::Content,
            is_last: false,
            only_names: false,
            gone: HashSet::new(),
            leases: Leases::default(),
        }
    }

    /// The destination gives files all that they have: hard links, times, extended attributes, and sockets' names.
    pub fn send_everything(&mut self) {
        self.detail = Detail::Everything;
    }

    /// The next round is the last one, and nobody writes to the files, or reads them, until the destination has restored the tasks.
    pub fn end(&mut self) {
        self.is_last = true;
    }

    /// It sends what is below this folder, and nothing else.
    pub fn only(mut self, folder: &Path) -> Self {
        self.scope = Scope::Only(folder.to_owned());
        self
    }

    /// It does not send what is below this folder.
    pub fn without(mut self, folder: &Path) -> Self {
        self.scope = Scope::Without(folder.to_owned());
        self
    }

    /// It sends this folder, but not its content.
    pub fn without_what_is_in(mut self, folder: &Path) -> Self {
        self.scope = Scope::WithoutWhatIsIn(folder.to_owned());
        self
    }

    /// It sends by this route.
    pub fn by(mut self, route: &Route) -> Self {
        self.route = route.clone();
        self
    }

    /// From now on it sends by this route.
    pub fn go_by(&mut self, route: &Route) {
        self.route = route.clone();
    }

    /// Has something removed at the destination, which may have none of it.
    pub async fn remove(
        session: u64,
        folder: Folder,
        path: &Path,
        destination: &mut PeerClient<Channel>,
    ) -> anyhow::Result<()> {
        let part = Self::new(session, folder, PathBuf::new(), None).part(path, PartKind::Removed);
        let placed = destination.place(tokio_stream::once(part)).await;
        placed.map_err(|status| anyhow::anyhow!("{}", crate::peers::reason(&status)))?;
        Ok(())
    }

    /// What the round that runs has sent so far, in bytes; may be looked at while it runs.
    pub fn sent(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.sent)
    }

    /// From now on files are sent as fast as can be, read by all processors: the instance is frozen and does not need them, and CRIU
    /// goes before (`container::proxy::hurry`) and sleeps in between.
    pub fn hurry(&mut self) {
        self.route = self.route.in_a_hurry();
        self.threads = std::thread::available_parallelism().map_or(1, usize::from);
    }

    /// Sends everything that the destination does not have, and says how many bytes of content that were.
    pub async fn round(&mut self, destination: &mut PeerClient<Channel>) -> anyhow::Result<u64> {
        self.sent.store(0, Ordering::Relaxed);
        let (route, sent) = (self.route.clone(), Arc::clone(&self.sent));
        let mut this = std::mem::replace(self, Self::new(self.session, self.folder, PathBuf::new(), None));
        let streamed = stream(destination, &route, &sent, move |parts| {
            let result = this.read(parts);
            (this, result)
        });
        let ((this, read), placed) = streamed.await?;
        *self = this;
        // What the destination says explains a reader whose queue was closed.
        placed?;
        read.with_context(|| format!("reading {}", self.root.display()))
    }

    /// Sends new further names of files that the destination has, and nothing else.
    pub async fn names(&mut self, destination: &mut PeerClient<Channel>) -> anyhow::Result<()> {
        self.only_names = true;
        let sent = self.round(destination).await;
        self.only_names = false;
        sent.map(drop)
    }

    fn read(&mut self, parts: &Parts) -> io::Result<u64> {
        self.gone.clear();
        let mut changes = self.tree.look(&self.root, self.detail)?;
        if self.only_names {
            for entry in changes.touched {
                if matches!(entry.kind, Kind::Link(_)) && self.scope.has(&entry.path) {
                    self.read_entry(&entry, parts)?;
                }
            }
            return Ok(0);
        }
        self.leases = Leases::look()?;
        changes.touched.retain(|entry| self.scope.has(&entry.path));
        changes.removed.retain(|path| self.scope.has(path));
        let mut bytes = 0;
        for path in &changes.removed {
            self.trackers.remove(path);
            parts.put(self.part(path, PartKind::Removed))?;
        }
        for entry in &changes.touched {
            bytes += self.read_entry(entry, parts)?;
        }
        bytes += self.read_always(&changes.touched, parts)?;
        if self.is_last && self.detail == Detail::Everything {
            self.tell_times(parts)?;
        }
        Ok(bytes)
    }

    fn read_entry(&mut self, entry: &Entry, parts: &Parts) -> io::Result<u64> {
        let mut part = FilePart {
            // Also that of a file with no bit set is told.
            mode: entry.mode | REGULAR,
            uid: Some(entry.uid),
            gid: Some(entry.gid),
            length: entry.length,
            ..self.part(&entry.path, PartKind::File)
        };
        match &entry.kind {
            Kind::Directory => part.set_kind(PartKind::Directory),
            Kind::Fifo => part.set_kind(PartKind::Fifo),
            Kind::Socket => part.set_kind(PartKind::Socket),
            Kind::Symlink(to) => {
                part.set_kind(PartKind::Symlink);
                part.data = Bytes::copy_from_slice(to.as_os_str().as_bytes());
            }
            Kind::Link(to) if self.gone.contains(to) => {
                // The next look finds what it is a name of now, and takes it for new.
                self.trackers.remove(&entry.path);
                self.tree.forget(&entry.path);
                parts.put(self.part(&entry.path, PartKind::Removed))?;
                return Ok(0);
            }
            Kind::Link(to) => {
                part = self.part(&entry.path, PartKind::Link);
                part.data = Bytes::copy_from_slice(to.as_os_str().as_bytes());
            }
            Kind::File => {
                part.attributes = self.attributes(&entry.path)?;
                return self.read_file(&entry.path, Some(part), parts);
            }
        }
        // What the destination had of a file of that name is gone.
        self.trackers.remove(&entry.path);
        if !matches!(entry.kind, Kind::Link(_)) {
            part.attributes = self.attributes(&entry.path)?;
        }
        parts.put(part)?;
        Ok(0)
    }

    /// The extended attributes of what is at `path`, if they are sent.
    fn attributes(&self, path: &Path) -> io::Result<Option<Attributes>> {
        if self.detail == Detail::Content {
            return Ok(None);
        }
        let file = match beneath::open_any(beneath::folder(&self.root)?, path, OFlags::PATH, Mode::empty()) {
            Ok(file) => file,
            // Gone since the look; the next one sees it.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        let read = attributes::read(file.as_fd());
        let read = read.map_err(|error| io::Error::new(error.kind(), format!("{} {error}", path.display())));
        Ok(Some(read?))
    }

    /// The files whose times tell nothing, as far as they were not sent above.
    fn read_always(&mut self, sent: &[Entry], parts: &Parts) -> io::Result<u64> {
        let trusted = |path: &Path| {
            self.trusted
                .as_deref()
                .is_some_and(|trusted| path.starts_with(trusted))
        };
        let below: Vec<_> = self
            .trackers
            .keys()
            .filter(|path| !trusted(path))
            .cloned()
            .collect();
        let mut bytes = 0;
        for path in below {
            if !sent.iter().any(|entry| entry.path == path) {
                bytes += self.read_file(&path, None, parts)?;
            }
        }
        Ok(bytes)
    }

    /// Sends what the destination does not have of a file, behind `itself`, the file without content. Both tell one length, that of now:
    /// the destination cuts off what lies behind it, and the tracker goes by it.
    fn read_file(&mut self, path: &Path, itself: Option<FilePart>, parts: &Parts) -> io::Result<u64> {
        let (file, times) = match self.open(path)? {
            Opened::File(file) => (file, None),
            Opened::Lent(file, times) => (file, Some(times)),
            // Removed, or no file any more, since the look; the next one sees it.
            Opened::Gone => {
                self.gone.insert(path.to_owned());
                return Ok(0);
            }
            // Its content is sent in the last round.
            Opened::Leased => {
                self.tree.forget(path);
                if let Some(itself) = itself {
                    parts.put(itself)?;
                }
                return Ok(0);
            }
        };
        let length = file.metadata()?.len();
        let itself = itself.map(|itself| FilePart { length, ..itself });
        if let Some(itself) = &itself {
            parts.put(itself.clone())?;
        }
        let part = FilePart {
            length,
            ..self.part(path, PartKind::File)
        };
        let tracker = self.trackers.entry(path.to_owned()).or_default();
        let bytes = tracker.round(&file, length, self.threads, |offset, data| {
            parts.data(&part, offset, data)
        })?;
        if let Some(times) = times {
            rustix::fs::futimens(&file, &times.stamps())?;
        }
        let loses = |itself: &FilePart| itself.attributes.as_ref().is_some_and(attributes::has_capability);
        if let Some(itself) = itself.filter(loses) {
            // Writing has taken its capabilities away.
            parts.put(itself)?;
        }
        Ok(bytes)
    }

    /// Opens a file to be read, in a way that neither changes a time nor breaks a lease.
    fn open(&self, path: &Path) -> io::Result<Opened> {
        if !self.leases.is_empty() {
            let folder = beneath::folder(&self.root)?;
            let inode = match beneath::open_any(folder, path, OFlags::PATH, Mode::empty()) {
                Ok(file) => Inode::of(&rustix::fs::fstat(file)?),
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => return Ok(Opened::Gone),
                Err(errno) => return Err(errno.into()),
            };
            match self.leases.holder(inode) {
                Some(_) if !self.is_last => return Ok(Opened::Leased),
                Some(holder) => {
                    let opened = holder.open(inode);
                    let file = opened.map_err(|error| {
                        io::Error::new(error.kind(), format!("{} {error}", path.display()))
                    })?;
                    let times = Times::of(&rustix::fs::fstat(&file)?);
                    return Ok(Opened::Lent(file, times));
                }
                None => {}
            }
        }
        match beneath::open(&self.root, path, OFlags::RDONLY | OFlags::NOATIME) {
            Ok(Some(file)) => Ok(Opened::File(file)),
            Ok(None) => Ok(Opened::Gone),
            // A program has taken one a moment ago.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !self.is_last => Ok(Opened::Leased),
            Err(error) => Err(error),
        }
    }

    /// The times of all files, as of this round's look.
    fn tell_times(&self, parts: &Parts) -> io::Result<()> {
        let mut part = self.part(Path::new(""), PartKind::Times);
        let mut bytes = 0;
        for (path, times) in self.tree.times().filter(|(path, _)| self.scope.has(path)) {
            let stamp = times.told_of(path);
            bytes += stamp.path.len() + STAMP_BYTES;
            part.stamps.push(stamp);
            if bytes >= PART_BYTES {
                bytes = 0;
                let next = self.part(Path::new(""), PartKind::Times);
                parts.put(std::mem::replace(&mut part, next))?;
            }
        }
        match part.stamps.is_empty() {
            true => Ok(()),
            false => parts.put(part),
        }
    }

    fn part(&self, path: &Path, kind: PartKind) -> FilePart {
        FilePart {
            session: self.session,
            folder: self.folder.into(),
            path: path.as_os_str().as_bytes().to_vec(),
            kind: kind.into(),
            ..FilePart::default()
        }
    }
}

/// Lets `read` put parts into a stream to the destination, by this route; `sent` counts the bytes of their content. Returns what it said, and
/// whether the destination has placed them all.
pub(super) async fn stream<T: Send + 'static>(
    destination: &mut PeerClient<Channel>,
    route: &Route,
    sent: &Arc<AtomicU64>,
    read: impl FnOnce(&Parts) -> T + Send + 'static,
) -> anyhow::Result<(T, anyhow::Result<()>)> {
    let (channel, receiver) = mpsc::channel(QUEUE_PARTS);
    let receiver = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let lent = route.bulk.lend();
    let ring = lent.map(|outgoing| Ring {
        outgoing,
        credits: Arc::new(Credits::default()),
        may_yield: route.class() == QpClass::Background,
        background: route.class() == QpClass::Background,
        bytes: 0,
    });
    let cutter = ring.as_ref().map(|ring| Cutter {
        canceller: ring.outgoing.canceller(),
        credits: Arc::clone(&ring.credits),
    });
    let (carrying, sent) = (route.clone(), Arc::clone(sent));
    let reader = tokio::task::spawn_blocking(move || {
        let mut ring = ring;
        let class = ring
            .as_mut()
            .map(|ring| ring.outgoing.set_class(carrying.class()));
        let parts = Parts::new(carrying, channel, ring, sent);
        let read = read(&parts);
        let (ring, ended) = parts.finish();
        (read, ring, class.transpose().map_err(io::Error::other).and(ended))
    });
    let mut on_the_way = CutOnDrop(cutter);
    let placed = match &on_the_way.0 {
        None => destination.place(receiver).await.map(drop),
        Some(cutter) => {
            let placed = place_landed(destination, receiver, &cutter.credits, &route.pace).await;
            match &placed {
                Ok(()) => cutter.credits.end(),
                // Nobody waits for a destination that takes no more.
                Err(_) => cutter.cut(),
            }
            placed
        }
    };
    let (read, ring, ended) = reader.await.context("reading what is to be sent panicked")?;
    on_the_way.0 = None;
    if let Some(ring) = ring {
        settle(&route.bulk, ring, &ended, placed.as_ref().err());
    }
    let placed = placed.map_err(|status| anyhow::anyhow!("{}", crate::peers::reason(&status)));
    let placed = placed.context("the destination could not place the files");
    Ok((read, placed.and(ended.context("what was read did not leave"))))
}

/// Until all parts are in place; what is freed meanwhile becomes known.
async fn place_landed(
    destination: &mut PeerClient<Channel>,
    parts: tokio_stream::wrappers::ReceiverStream<FilePart>,
    credits: &Credits,
    pace: &Pace,
) -> Result<(), tonic::Status> {
    let mut answers = destination.place_landed(parts).await?.into_inner();
    while let Some(freed) = answers.message().await? {
        credits.freed(freed.position);
        pace.hear(freed.others_bytes_per_second);
    }
    Ok(())
}

/// The session's connection is lent to the next round, or is of no use any more.
fn settle(bulk: &Bulk, mut ring: Ring, ended: &io::Result<()>, placed: Option<&tonic::Status>) {
    let is_theirs = placed.filter(|status| status.code() == tonic::Code::DataLoss);
    if let Some(status) = is_theirs {
        return bulk.fail(status.message().to_owned());
    }
    match ended {
        // What has become of its runs is unknown, and the round has failed in any case.
        _ if placed.is_some() => {}
        Err(error)
            if error
                .get_ref()
                .is_some_and(|error| error.is::<verbatim_bulk::Error>()) =>
        {
            bulk.fail(error.to_string());
        }
        Err(_) => {}
        Ok(()) => match ring.outgoing.freed(ring.credits.position()) {
            Ok(()) if ring.outgoing.is_empty() => bulk.give_back(ring.outgoing, ring.bytes),
            Ok(()) => bulk.fail("the destination has not taken all that was sent".to_owned()),
            Err(error) => bulk.fail(error.to_string()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_looks_at_its_part_of_the_folder() {
        let has = |scope: &Scope, path: &str| scope.has(Path::new(path));
        let only = Scope::Only("pre-dump/2".into());
        assert!(has(&only, "pre-dump") && has(&only, "pre-dump/2") && has(&only, "pre-dump/2/pages-1.img"));
        assert!(!has(&only, "pre-dump/21") && !has(&only, "pre-dump/1") && !has(&only, "core-1.img"));
        let without = Scope::Without("pre-dump".into());
        assert!(has(&without, "core-1.img") && has(&without, "parent"));
        assert!(!has(&without, "pre-dump") && !has(&without, "pre-dump/1/pages-1.img"));
        assert!(has(&Scope::All, "pre-dump"));
    }
}
