//! The destination of a move: a copy that another host fills.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, BufWriter};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{oneshot, watch};
use verbatim_mirror::decision::SessionId;
use verbatim_mirror::{Arrival, Extent, Line, Receiver, Task};

use crate::background;
use crate::disk::{Class, Disks, OwnDisks};
use crate::faults::{Hook, Point};
use crate::peer::fetching::{Fetching, Job};
use crate::reserve::Reserve;
use crate::store::Store;
use crate::store::trust::Belief;
use crate::wire::{self, Landing, MAX_DATA, Tag, ToDestination, ToSource};

/// The largest change that the connection's thread writes itself, if it is not likely to wait for the disk: a
/// hand-over takes longer.
const HERE: usize = 128 << 10;

/// Most letters of a reason, so that a message has room for it.
const LONGEST_REASON: usize = 1000;

enum What {
    Data(Vec<u8>),
    Zero {
        may_free: bool,
    },
    Flush,
    /// A chunk that this connection reads by RDMA: its place in the ring, and its fingerprints.
    Fetch(Line, Landing, Vec<u8>),
}

/// A connection of the source.
struct Caller {
    sender: UnboundedSender<ToSource>,
    welcome: ToSource,
    fetching: Option<Fetching>,
    /// The source's name of the connection.
    link: u128,
}

#[derive(Default)]
struct Inner {
    receiver: Receiver,
    lines: HashMap<Line, Caller>,
    arrivals: HashMap<Arrival, (Tag, Extent, What)>,
    /// Answers to arrivals, until they are sent.
    names: HashMap<Arrival, ToSource>,
    target: Option<(SessionId, Arc<Store>, u64)>,
    /// The arrival that its reading thread may write itself, until its fate is known.
    offered: Option<Arrival>,
    /// Chunks that wait for the one that is being written.
    chunks: VecDeque<Put>,
    is_writing_chunks: bool,
    /// The volume is fully allocated at its source.
    keeps_room: bool,
    /// Limit of the room that the copy may take.
    reserve: Option<Arc<Reserve>>,
    /// A write found no room.
    is_full: bool,
    /// Puts that exist are its receivers.
    under_way: Arc<watch::Sender<()>>,
}

/// Content to write, and its extent.
struct Put {
    /// Until it is dropped, [`Incoming::ended`] waits.
    _under_way: watch::Receiver<()>,
    arrival: Arrival,
    tag: Tag,
    extent: Extent,
    what: What,
    store: Arc<Store>,
    reserve: Option<Arc<Reserve>>,
}

/// A volume that is filled, through all attempts in the life of this process.
pub struct Incoming {
    inner: Mutex<Inner>,
    disks: OwnDisks,
    hook: Hook,
    /// Something else than zeros has come, or was there already.
    has_data: AtomicBool,
}

impl Incoming {
    /// A copy that is not filled yet.
    pub fn new(disks: Disks, hook: Hook) -> Arc<Self> {
        Arc::new(Self {
            inner: Mutex::default(),
            disks: disks.own(),
            hook,
            has_data: AtomicBool::new(false),
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    /// Whether all data of this session are on the disk.
    pub fn is_complete(&self, session: SessionId) -> bool {
        let inner = self.lock();
        let is_sound = |store: &Store| !store.is_suspect();
        let target = inner.target.as_ref();
        target.is_some_and(|(of, store, _)| *of == session && is_sound(store)) && inner.receiver.is_flushed()
    }

    /// Whether the volume is fully allocated at its source.
    pub fn keeps_room(&self) -> bool {
        self.lock().keeps_room
    }

    /// Whether the copy has anything but zeros, as far as a source has sent or compared it in the life of this process.
    pub fn has_data(&self) -> bool {
        self.has_data.load(Ordering::Relaxed)
    }

    /// Whether the source has a connection.
    pub fn is_connected(&self) -> bool {
        self.lock().receiver.is_connected()
    }

    /// Makes later writes leave this reserve free.
    pub(crate) fn keep_free(&self, reserve: Option<Arc<Reserve>>) {
        let mut inner = self.lock();
        (inner.reserve, inner.is_full) = (reserve, false);
    }

    /// Whether a write has found no room since `keep_free`.
    pub fn ran_full(&self) -> bool {
        self.lock().is_full
    }

    /// Whether a write or a flush has failed: then the session is over.
    pub fn is_poisoned(&self) -> bool {
        self.lock().receiver.is_poisoned()
    }

    /// Begins a session that writes everything again. Returns `false` while requests of an earlier one are in
    /// flight.
    pub fn renew(&self) -> bool {
        self.lock().receiver.renew()
    }

    /// Receives nothing more, and writes nothing that waits for its turn.
    pub fn close(&self) {
        let mut inner = self.lock();
        inner.receiver.close();
        inner.lines.clear();
        inner.target = None;
        for put in std::mem::take(&mut inner.chunks) {
            // Without a connection there are no tasks.
            inner.receiver.dropped(put.arrival, &mut Vec::new());
        }
    }

    /// Waits until nothing is being written any more.
    pub async fn ended(&self) {
        let under_way = self.lock().under_way.clone();
        under_way.closed().await;
    }

    /// Serves a connection of the source for this session, until it ends. The source calls the connection
    /// `link`.
    pub async fn fill<S>(
        self: &Arc<Self>,
        (stream, link): (S, u128),
        session: SessionId,
        store: Arc<Store>,
        length: u64,
        welcome: ToSource,
        fetching: Option<Fetching>,
    ) -> io::Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (reader, writer) = tokio::io::split(stream);
        let (sender, mut receiver) = unbounded_channel();
        let line = {
            let mut inner = self.lock();
            inner.target = Some((session, store, length));
            let mut tasks = Vec::new();
            let line = inner.receiver.connected(&mut tasks);
            let caller = Caller {
                sender,
                welcome,
                fetching,
                link,
            };
            inner.lines.insert(line, caller);
            self.carry_out(&mut inner, tasks);
            line
        };
        // The first message is the welcome, as soon as all writes of earlier connections are done.
        let Some(first) = receiver.recv().await else {
            return Ok(());
        };
        let writing = tokio::spawn(write(writer, first, receiver));
        let result = self.read(BufReader::with_capacity(256 << 10, reader), line).await;
        let mut inner = self.lock();
        inner.receiver.lost(line);
        inner.lines.remove(&line);
        drop(inner);
        writing.abort();
        result
    }

    /// Serves the second connection, with the chunks of the one that the source calls `link`, until it ends:
    /// both end together.
    pub async fn fill_beside<S>(self: &Arc<Self>, stream: S, link: u128) -> io::Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut lines = self
            .lock()
            .lines
            .iter()
            .map(|(line, caller)| (*line, caller.link))
            .collect::<Vec<_>>();
        lines.retain(|(_, name)| *name == link);
        let &[(line, _)] = &lines[..] else {
            // The first connection has ended meanwhile.
            return Ok(());
        };
        let result = self.read_chunks(BufReader::with_capacity(256 << 10, stream), line);
        let result = result.await;
        // The task that writes answers to the first connection ends.
        self.lock().lines.remove(&line);
        result
    }

    async fn read(self: &Arc<Self>, mut reader: impl AsyncRead + Unpin, line: Line) -> io::Result<()> {
        loop {
            let (message, data) = wire::receive::<ToDestination>(&mut reader).await?;
            if !self.has_come(line, message, data)? {
                return Ok(());
            }
        }
    }

    /// The same on a thread in the background, which takes no lock for which a change might wait.
    async fn read_chunks(self: &Arc<Self>, mut reader: impl AsyncRead + Unpin, line: Line) -> io::Result<()> {
        loop {
            let (message, data) = wire::receive::<ToDestination>(&mut reader).await?;
            background::look();
            let (incoming, (sender, counts)) = (self.clone(), oneshot::channel());
            self.disks.submit(Class::Copy, move || {
                // Without a receiver, the connection has ended.
                let _ = sender.send(incoming.has_come(line, message, data));
            });
            if !counts.await.map_err(io::Error::other)?? {
                return Ok(());
            }
        }
    }

    /// Handles one message. False if this connection no longer counts.
    fn has_come(self: &Arc<Self>, line: Line, message: ToDestination, data: Vec<u8>) -> io::Result<bool> {
        let mut inner = self.lock();
        let Some(size) = inner.target.as_ref().map(|(.., length)| *length) else {
            return Ok(false);
        };
        let within = |offset, length| {
            let extent = Extent::within(size, offset, length);
            extent.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "outside of the volume"))
        };
        let mut tasks = Vec::new();
        let (tag, extent, what) = match message {
            ToDestination::Put { tag, offset } => (tag, within(offset, data.len() as u64)?, What::Data(data)),
            ToDestination::Zero { tag, offset, length } => {
                (tag, within(offset, length)?, What::Zero { may_free: true })
            }
            ToDestination::Allocate { tag, offset, length } => {
                if let Tag::Chunk(_) = tag {
                    inner.keeps_room = true;
                }
                (tag, within(offset, length)?, What::Zero { may_free: false })
            }
            ToDestination::Flush { tag } => (tag, within(0, 1)?, What::Flush),
            ToDestination::Compare {
                tag,
                offset,
                length,
                hash,
            } => {
                if length > MAX_DATA as u64 {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "too much to compare"));
                }
                self.compare(&inner, line, tag, within(offset, length)?, hash);
                return Ok(true);
            }
            ToDestination::Fetch { tag, offset, landing } => {
                let extent = within(offset, landing.length)?;
                (tag, extent, What::Fetch(line, landing, data))
            }
            ToDestination::StopFetching => {
                if let Some(fetching) = inner.lines.get(&line).and_then(|caller| caller.fetching.as_ref()) {
                    fetching.stop();
                }
                return Ok(true);
            }
        };
        let arrival = match what {
            What::Flush => inner.receiver.flush(line, &mut tasks),
            What::Data(_) | What::Zero { .. } | What::Fetch(..) => inner.receiver.write(line, &mut tasks),
        };
        // Another connection has come.
        let Some(arrival) = arrival else {
            return Ok(false);
        };
        if let What::Data(_) | What::Fetch(..) = what {
            self.has_data.store(true, Ordering::Relaxed);
        }
        let may_be_here = matches!((tag, &what), (Tag::Change(_), What::Data(data)) if data.len() <= HERE);
        inner.offered = may_be_here.then_some(arrival);
        inner.arrivals.insert(arrival, (tag, extent, what));
        self.carry_out(&mut inner, tasks);
        let is_taken = may_be_here && inner.offered.take().is_none();
        if is_taken && let Some(put) = inner.take(arrival) {
            drop(inner);
            let What::Data(data) = &put.what else {
                unreachable!("only data are offered")
            };
            match put.has_room() {
                Err(error) => self.put_is_done(&put, Err(error)),
                Ok(()) => match put.store.write_at_once(put.extent.offset, data) {
                    Some(done) => self.put_is_done(&put, done),
                    None => self.put(&mut self.lock(), put),
                },
            }
        }
        Ok(true)
    }

    fn carry_out(self: &Arc<Self>, inner: &mut Inner, tasks: Vec<Task>) {
        let mut tasks = VecDeque::from(tasks);
        while let Some(task) = tasks.pop_front() {
            match task {
                Task::Welcome(line) => {
                    if let Some(caller) = inner.lines.get(&line) {
                        inner.say(line, caller.welcome.clone());
                    }
                }
                Task::Close(line) => {
                    inner.lines.remove(&line);
                }
                // The sidecar cannot be reached from here yet: only this process knows.
                Task::Suspect => {
                    let mut said = Vec::new();
                    inner.receiver.suspected(&mut said);
                    tasks.extend(said);
                }
                Task::Write(arrival) if inner.offered == Some(arrival) => inner.offered = None,
                Task::Write(arrival) | Task::Flush(arrival) => {
                    let put = inner.take(arrival).expect("it has come");
                    match put.what {
                        What::Fetch(line, landing, fingerprints) => {
                            let tag = put.tag;
                            let what = What::Data(Vec::new());
                            let (incoming, empty) = (self.clone(), Put { what, ..put });
                            let then = Box::new(move |fetched| incoming.fetched(line, empty, fetched));
                            let job = Job {
                                landing,
                                fingerprints,
                                then,
                            };
                            let fetching = inner.lines.get(&line).and_then(|caller| caller.fetching.as_ref());
                            if !fetching.is_some_and(|fetching| fetching.fetch(job)) {
                                tasks.extend(inner.not_fetched(arrival, tag, "nobody fetches here"));
                            }
                        }
                        _ => self.put(inner, put),
                    }
                }
                Task::Answer {
                    line,
                    arrival,
                    is_good,
                } => {
                    if let Some(answer) = inner.names.remove(&arrival) {
                        inner.say(
                            line,
                            match answer {
                                // The flush succeeded after another one had failed.
                                ToSource::Done(tag, 0) if !is_good => ToSource::Done(tag, libc::EIO),
                                answer => answer,
                            },
                        );
                    }
                }
            }
        }
    }

    /// Writes, or flushes. Chunks are written one after the other: writes lock the file against each other,
    /// and a change would wait for all chunks in line.
    fn put(self: &Arc<Self>, inner: &mut Inner, put: Put) {
        let incoming = self.clone();
        match put.tag {
            Tag::Change(_) | Tag::Flush(_) => self.disks.submit(Class::Tenant, move || {
                let done = put.carry_out();
                incoming.put_is_done(&put, done);
            }),
            Tag::Chunk(_) => {
                inner.chunks.push_back(put);
                if !std::mem::replace(&mut inner.is_writing_chunks, true) {
                    self.disks.submit(Class::Copy, move || incoming.write_chunk());
                }
            }
        }
    }

    /// Writes the first waiting chunk. The next one's turn comes after the jobs of other volumes.
    fn write_chunk(self: &Arc<Self>) {
        let first = self.lock().chunks.pop_front();
        if let Some(put) = first {
            let done = put.carry_out();
            self.put_is_done(&put, done);
        }
        let mut inner = self.lock();
        inner.is_writing_chunks = !inner.chunks.is_empty();
        if inner.is_writing_chunks {
            let incoming = self.clone();
            self.disks.submit(Class::Copy, move || incoming.write_chunk());
        }
    }

    fn put_is_done(self: &Arc<Self>, put: &Put, done: io::Result<()>) {
        let errno = done
            .err()
            .map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
        (self.hook)(Point::Written);
        let mut inner = self.lock();
        inner.is_full |= matches!(errno, libc::ENOSPC | libc::EDQUOT);
        inner.names.insert(put.arrival, ToSource::Done(put.tag, errno));
        let mut tasks = Vec::new();
        match put.what {
            What::Flush => inner.receiver.flushed(put.arrival, errno == 0, &mut tasks),
            _ => inner.receiver.written(put.arrival, errno == 0, &mut tasks),
        }
        self.carry_out(&mut inner, tasks);
        // There was no answer if the connection no longer counts.
        inner.names.remove(&put.arrival);
    }

    /// A chunk has come by RDMA, with the ring's position behind it; or its fetch has failed. `empty`: the content is not in it yet.
    fn fetched(self: &Arc<Self>, line: Line, empty: Put, fetched: Result<(Vec<u8>, u64), String>) {
        let mut inner = self.lock();
        let (arrival, tag) = (empty.arrival, empty.tag);
        let why = match fetched {
            Ok((data, end)) if inner.target.is_some() => {
                inner.say(line, ToSource::Taken(end));
                let (what, reserve) = (What::Data(data), inner.reserve.clone());
                let put = Put {
                    what,
                    reserve,
                    ..empty
                };
                return self.put(&mut inner, put);
            }
            Ok(_) => "the copy was given up".to_owned(),
            Err(why) => why,
        };
        let tasks = inner.not_fetched(arrival, tag, &why);
        self.carry_out(&mut inner, tasks);
        inner.names.remove(&arrival);
    }

    /// Equal data on the disk need not be sent. Data that are only in the page cache do not count: a failed
    /// flush may have marked them clean.
    fn compare(self: &Arc<Self>, inner: &Inner, line: Line, tag: Tag, extent: Extent, hash: [u8; 32]) {
        let (_, store, _) = inner.target.as_ref().expect("it is filled");
        let (store, incoming) = (store.clone(), self.clone());
        self.disks.submit(Class::Copy, move || {
            let mut data = vec![0; extent.length as usize];
            let is_same = store.trust().belief() == Belief::Sound
                && store.read_from_disk(extent.offset, &mut data).is_ok()
                && *blake3::hash(&data).as_bytes() == hash;
            let answer = if is_same {
                if data.iter().any(|byte| *byte != 0) {
                    incoming.has_data.store(true, Ordering::Relaxed);
                }
                ToSource::Done(tag, 0)
            } else {
                ToSource::Differs(tag)
            };
            incoming.lock().say(line, answer);
        });
    }
}

impl Put {
    fn has_room(&self) -> io::Result<()> {
        let bytes = match &self.what {
            What::Data(data) => data.len() as u64,
            // Zeros that stay allocated take as much room as data.
            What::Zero { may_free: false } => self.extent.length,
            What::Zero { may_free: true } | What::Flush | What::Fetch(..) => return Ok(()),
        };
        self.reserve
            .as_ref()
            .map_or(Ok(()), |reserve| reserve.take(bytes))
    }

    fn carry_out(&self) -> io::Result<()> {
        let Self { extent, store, .. } = self;
        self.has_room()?;
        match (&self.what, self.tag) {
            (What::Data(data), Tag::Chunk(_)) => store.write_in_pieces(extent.offset, data),
            (What::Data(data), _) => store.write(extent.offset, data),
            (What::Zero { may_free }, _) => store.zero(extent.offset, extent.length, *may_free),
            (What::Flush, _) => store.flush(),
            (What::Fetch(..), _) => unreachable!("it has its bytes by now"),
        }
    }
}

impl Inner {
    /// The content of an arrival, and its target.
    fn take(&mut self, arrival: Arrival) -> Option<Put> {
        let (tag, extent, what) = self.arrivals.remove(&arrival)?;
        let (_, store, _) = self.target.as_ref().expect("it is filled");
        Some(Put {
            _under_way: self.under_way.subscribe(),
            arrival,
            tag,
            extent,
            what,
            store: store.clone(),
            reserve: self.reserve.clone(),
        })
    }

    fn say(&self, line: Line, message: ToSource) {
        if let Some(caller) = self.lines.get(&line) {
            // Without a receiver, the connection has ended.
            let _ = caller.sender.send(message);
        }
    }

    /// Nothing is written for this arrival: the source has to send the chunk again.
    fn not_fetched(&mut self, arrival: Arrival, tag: Tag, why: &str) -> Vec<Task> {
        let why = why.chars().take(LONGEST_REASON).collect();
        self.names.insert(arrival, ToSource::Again(tag, why));
        let mut tasks = Vec::new();
        self.receiver.dropped(arrival, &mut tasks);
        tasks
    }
}

async fn write(
    writer: impl AsyncWrite + Unpin,
    first: ToSource,
    mut messages: UnboundedReceiver<ToSource>,
) -> io::Result<()> {
    let mut writer = BufWriter::new(writer);
    let mut next = Some(first);
    while let Some(message) = next {
        writer.write_all(&wire::frame(&message, 0)).await?;
        if messages.is_empty() {
            writer.flush().await?;
        }
        next = messages.recv().await;
    }
    writer.shutdown().await
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, DuplexStream, duplex};

    use super::*;
    use crate::wire::Rings;

    const LENGTH: u64 = 1 << 20;

    fn incoming(folder: &std::path::Path) -> (Arc<Incoming>, Arc<Store>) {
        let store = Store::new_file(&folder.join("data"), LENGTH).expect("a file");
        (Incoming::new(Disks::new(2), crate::faults::none), Arc::new(store))
    }

    /// A connection after its welcome.
    async fn connect(incoming: &Arc<Incoming>, store: &Arc<Store>, link: u128) -> DuplexStream {
        let (mut near, far) = duplex(1 << 16);
        let (incoming, store) = (incoming.clone(), store.clone());
        let welcome = ToSource::Welcome {
            incarnation: 1,
            has_old: false,
            rings: Rings::None,
        };
        tokio::spawn(async move {
            let filled = incoming.fill((far, link), SessionId(1), store, LENGTH, welcome, None);
            filled.await
        });
        let (first, _) = wire::receive::<ToSource>(&mut near).await.expect("an answer");
        assert!(matches!(first, ToSource::Welcome { .. }));
        near
    }

    fn beside(incoming: &Arc<Incoming>, link: u128) -> DuplexStream {
        let (near, far) = duplex(1 << 16);
        let incoming = incoming.clone();
        tokio::spawn(async move { incoming.fill_beside(far, link).await });
        near
    }

    fn put(tag: Tag, offset: u64, byte: u8) -> Vec<u8> {
        let mut bytes = wire::frame(&ToDestination::Put { tag, offset }, 4096);
        bytes.extend([byte; 4096]);
        bytes
    }

    async fn done(stream: &mut DuplexStream) -> Tag {
        match wire::receive::<ToSource>(stream).await.expect("an answer") {
            (ToSource::Done(tag, 0), _) => tag,
            other => panic!("{other:?}"),
        }
    }

    fn byte(store: &Store, offset: u64) -> u8 {
        let mut byte = [0];
        store.read(offset, &mut byte).expect("it can be read");
        byte[0]
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn zeros_that_stay_allocated_leave_the_reserve_free_as_data_do() {
        let folder = tempfile::tempdir().expect("a folder");
        let (incoming, store) = incoming(folder.path());
        let mut line = connect(&incoming, &store, 7).await;
        line.write_all(&put(Tag::Change(1), 0, 1)).await.expect("sent");
        assert_eq!(done(&mut line).await, Tag::Change(1));
        // More than there is.
        let reserve = Reserve::new(&folder.path().join("data"), 0, u64::MAX);
        incoming.keep_free(Some(Arc::new(reserve)));
        let tag = Tag::Change(2);
        let (offset, length) = (8192, 4096);
        let zeros = [
            (ToDestination::Zero { tag, offset, length }, 0),
            (ToDestination::Allocate { tag, offset, length }, libc::ENOSPC),
        ];
        for (message, errno) in zeros {
            line.write_all(&wire::frame(&message, 0)).await.expect("sent");
            let (answer, _) = wire::receive::<ToSource>(&mut line).await.expect("an answer");
            assert_eq!(answer, ToSource::Done(tag, errno));
        }
        assert!(incoming.ran_full());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_change_waits_behind_no_chunk() {
        let folder = tempfile::tempdir().expect("a folder");
        let (incoming, store) = incoming(folder.path());
        let mut line = connect(&incoming, &store, 7).await;
        let mut chunks = beside(&incoming, 7);
        let chunk = put(Tag::Chunk(1), 0, 1);
        // The rest of the chunk comes later.
        chunks.write_all(&chunk[..100]).await.expect("it is taken");
        line.write_all(&put(Tag::Change(2), 8192, 2))
            .await
            .expect("it is taken");
        assert_eq!(done(&mut line).await, Tag::Change(2));
        assert_eq!((byte(&store, 0), byte(&store, 8192)), (0, 2));
        chunks.write_all(&chunk[100..]).await.expect("it is taken");
        assert_eq!(done(&mut line).await, Tag::Chunk(1));
        assert_eq!(byte(&store, 0), 1);
        // Both end together.
        drop(chunks);
        assert!(wire::receive::<ToSource>(&mut line).await.is_err());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn chunks_of_a_connection_that_does_not_count_any_more_are_not_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let (incoming, store) = incoming(folder.path());
        let mut first = connect(&incoming, &store, 7).await;
        let mut late = beside(&incoming, 7);
        late.write_all(&put(Tag::Chunk(1), 0, 1))
            .await
            .expect("it is taken");
        assert_eq!(done(&mut first).await, Tag::Chunk(1));
        let mut second = connect(&incoming, &store, 8).await;
        late.write_all(&put(Tag::Chunk(2), 4096, 2))
            .await
            .expect("it is taken");
        // The late connection ends without the second one. A connection that names no known link is not
        // served.
        late.read_to_end(&mut Vec::new()).await.expect("its end");
        let mut unknown = beside(&incoming, 9);
        unknown.read_to_end(&mut Vec::new()).await.expect("its end");
        second
            .write_all(&put(Tag::Change(3), 8192, 3))
            .await
            .expect("it is taken");
        assert_eq!(done(&mut second).await, Tag::Change(3));
        assert_eq!([0, 4096, 8192].map(|offset| byte(&store, offset)), [1, 0, 3]);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_waits_for_its_turn_is_not_written_after_the_copy_was_closed() {
        static WAITS: AtomicBool = AtomicBool::new(true);
        fn hold(point: Point) -> crate::faults::Fault {
            while point == Point::Written && WAITS.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            crate::faults::Fault::None
        }
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::new_file(&folder.path().join("data"), LENGTH).expect("a file");
        let (incoming, store) = (Incoming::new(Disks::new(2), hold), Arc::new(store));
        let mut line = connect(&incoming, &store, 7).await;
        for (tag, offset) in [(1, 0), (2, 4096), (3, 8192)] {
            line.write_all(&put(Tag::Chunk(tag), offset, tag as u8))
                .await
                .expect("sent");
        }
        // The first one was written, and its turn is not over.
        while incoming.lock().chunks.len() < 2 || byte(&store, 0) != 1 {
            tokio::task::yield_now().await;
        }
        incoming.close();
        let ended = tokio::time::timeout(std::time::Duration::from_millis(50), incoming.ended());
        assert!(ended.await.is_err(), "one is under way");
        WAITS.store(false, Ordering::Relaxed);
        incoming.ended().await;
        assert_eq!([0, 4096, 8192].map(|offset| byte(&store, offset)), [1, 0, 0]);
    }
}
