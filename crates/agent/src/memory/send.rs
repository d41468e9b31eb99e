//! Sends what changed in an instance's folders as a stream of parts.

use std::collections::HashMap;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context;
use bytes::Bytes;
use rustix::fs::OFlags;
use tokio::sync::mpsc;
use tonic::transport::Channel;
use verbatim_bulk::QpClass;

use super::bulk::{Bulk, Credits, CutOnDrop, Cutter};
use super::pace::Pace;
use super::parts::{Parts, QUEUE_PARTS, Ring, Route};
use super::tracker::Tracker;
use super::tree::{Kind, Tree};
use crate::beneath;
use crate::proto::FilePart;
use crate::proto::file_part::{Folder, Kind as PartKind};
use crate::proto::peer_client::PeerClient;

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
        }
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

    fn read(&mut self, parts: &Parts) -> io::Result<u64> {
        let mut changes = self.tree.look(&self.root)?;
        changes.touched.retain(|entry| self.scope.has(&entry.path));
        changes.removed.retain(|path| self.scope.has(path));
        let mut bytes = 0;
        for path in &changes.removed {
            self.trackers.remove(path);
            parts.put(self.part(path, PartKind::Removed))?;
        }
        for entry in &changes.touched {
            let mut part = FilePart {
                mode: entry.mode,
                uid: Some(entry.uid),
                gid: Some(entry.gid),
                length: entry.length,
                ..self.part(&entry.path, PartKind::File)
            };
            match &entry.kind {
                Kind::Directory => part.set_kind(PartKind::Directory),
                Kind::Fifo => part.set_kind(PartKind::Fifo),
                Kind::Symlink(to) => {
                    part.set_kind(PartKind::Symlink);
                    part.data = Bytes::copy_from_slice(to.as_os_str().as_bytes());
                }
                Kind::File => {
                    bytes += self.read_file(&entry.path, Some(part), parts)?;
                    continue;
                }
            }
            parts.put(part)?;
        }
        Ok(bytes + self.read_always(&changes.touched, parts)?)
    }

    /// The files whose times tell nothing, as far as they were not sent above.
    fn read_always(&mut self, sent: &[super::tree::Entry], parts: &Parts) -> io::Result<u64> {
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
        let Some(file) = beneath::open(&self.root, path, OFlags::RDONLY)? else {
            // Removed, or no file any more, since the look; the next one sees it.
            return Ok(0);
        };
        let length = file.metadata()?.len();
        if let Some(itself) = itself {
            parts.put(FilePart { length, ..itself })?;
        }
        let part = FilePart {
            length,
            ..self.part(path, PartKind::File)
        };
        let tracker = self.trackers.entry(path.to_owned()).or_default();
        tracker.round(&file, length, self.threads, |offset, data| {
            parts.data(&part, offset, data)
        })
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
