//! One volume that this host serves: carries out the actions of its engine.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Notify, watch};
use verbatim_mirror::{
    Action, Config, Engine, Event, Extent, Failure, Op, Report, RequestId, Standing, Status, Ticket,
};

use crate::disk::{Class, Disks, OwnDisks};
use crate::faults::{Hook, Point};
use crate::outlet::{Chunk, Outgoing, Outlet, is_zero};
use crate::progress::Progress;
use crate::room::Room;
use crate::store::Store;
use crate::transport::Carriage;
use crate::wire::{Tag, ToSource};

/// The largest request that a connection's thread carries out: larger ones go to several threads.
const HERE: u64 = 128 << 10;

/// Interval of the looks at a migration's progress.
const LOOK: Duration = Duration::from_secs(1);

/// Called with the result of a request: the data of a read, or no data.
pub type Reply = Box<dyn FnOnce(Result<Vec<u8>, Failure>) + Send>;

/// An operation of a client, within bounds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// Read data.
    Read,
    /// Write these data.
    Write(Arc<Vec<u8>>),
    /// Write zeros, which need no space on the disk.
    Zero {
        /// Space may be given back.
        may_free: bool,
    },
    /// Make acknowledged writes durable.
    Flush,
}

struct Request {
    wanted: Wanted,
    extent: Extent,
    is_durable: bool,
    read: Vec<u8>,
    reply: Reply,
}

struct Inner {
    engine: Engine,
    ids: u64,
    requests: HashMap<RequestId, Request>,
    outlet: Outlet,
    /// Progress of the migration.
    progress: Progress,
    /// Time of the last look at the progress.
    looked: Duration,
    reports: Option<UnboundedSender<Report>>,
    /// The request that its caller may carry out itself, until the engine has decided about it.
    offered: Option<RequestId>,
    /// Answers that are sent when the lock is free again.
    replies: Vec<(Reply, Result<Vec<u8>, Failure>)>,
}

/// A volume that is served.
pub struct Volume {
    inner: Mutex<Inner>,
    store: Arc<Store>,
    disks: OwnDisks,
    room: Room,
    began: Instant,
    hook: Hook,
    /// Notified when a request has ended.
    answered: Notify,
    is_open: watch::Sender<bool>,
    /// The size, for servers that tell clients of growth.
    length: watch::Sender<u64>,
}

impl Volume {
    /// What is called at points that a test knows.
    pub(crate) fn hook(&self) -> Hook {
        self.hook
    }

    /// Serves that store.
    pub fn new(store: impl Into<Arc<Store>>, length: u64, disks: Disks, hook: Hook) -> Arc<Self> {
        let inner = Inner {
            engine: Engine::new(Config::default(), length),
            ids: 0,
            requests: HashMap::new(),
            outlet: Outlet::default(),
            progress: Progress::default(),
            looked: Duration::ZERO,
            reports: None,
            offered: None,
            replies: Vec::new(),
        };
        Arc::new(Self {
            inner: Mutex::new(inner),
            store: store.into(),
            disks: disks.own(),
            room: disks.room(),
            began: Instant::now(),
            hook,
            answered: Notify::new(),
            is_open: watch::Sender::new(true),
            length: watch::Sender::new(length),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    /// The size in bytes.
    pub fn length(&self) -> u64 {
        self.lock().engine.length()
    }

    /// Room for the requests of all clients.
    pub fn room(&self) -> &Room {
        &self.room
    }

    /// Whether the volume answers requests.
    pub fn standing(&self) -> Standing {
        self.lock().engine.standing()
    }

    /// State of a migration, and the bytes sent for it.
    pub fn migration(&self) -> Option<(Status, u64)> {
        let inner = self.lock();
        Some((inner.engine.status()?, inner.outlet.sent_bytes))
    }

    /// The reason why a migration makes no progress, if it does not.
    pub fn stalled(&self) -> Option<String> {
        let inner = self.lock();
        inner
            .progress
            .stalled(self.began.elapsed(), &inner.engine.status()?)
    }

    /// The clock has advanced. Returns a message if a lack of progress has to be reported.
    pub fn tick(self: &Arc<Self>) -> Option<String> {
        let mut inner = self.lock();
        let now = self.began.elapsed();
        let mut said = None;
        if now - inner.looked >= LOOK
            && let Some(status) = inner.engine.status()
        {
            inner.looked = now;
            if inner.progress.look(now, &status) {
                said = inner.progress.stalled(now, &status);
            }
        }
        self.handle(inner, Event::Tick);
        said
    }

    /// Transport of the present move's chunks, or of the last one's.
    pub fn carriage(&self) -> Option<Carriage> {
        self.lock().outlet.carriage.clone()
    }

    /// Sets the transport of the chunks.
    pub fn carried_by(&self, carriage: Carriage) {
        self.lock().outlet.carriage = Some(carriage);
    }

    /// Changes the statistics of the transport.
    pub fn carries(&self, change: impl FnOnce(&mut Carriage)) {
        if let Some(carriage) = &mut self.lock().outlet.carriage {
            change(carriage);
        }
    }

    /// Changes the size, if no request is in flight.
    pub fn resize(&self, length: u64) -> bool {
        self.lock().engine.resize(length)
    }

    /// Tells clients the present size. The data have it already.
    pub fn has_grown(&self) {
        self.length.send_replace(self.length());
    }

    /// The size that clients are told.
    pub fn lengths(&self) -> watch::Receiver<u64> {
        self.length.subscribe()
    }

    /// Number of requests that have not ended.
    pub fn in_flight(&self) -> usize {
        self.lock().engine.in_flight()
    }

    /// Turns false when connections of clients are to end.
    pub fn open(&self) -> watch::Receiver<bool> {
        self.is_open.subscribe()
    }

    /// Ends the connections of clients, and waits for requests in flight. Later requests are refused.
    pub async fn close(&self) {
        {
            let _inner = self.lock();
            self.is_open.send_replace(false);
        }
        loop {
            let answered = self.answered.notified();
            if self.lock().engine.in_flight() == 0 {
                return;
            }
            answered.await;
        }
    }

    /// A request of a client. The reply may be called at once or at any later time; it must not wait.
    pub fn request(self: &Arc<Self>, wanted: Wanted, extent: Extent, is_durable: bool, reply: Reply) {
        let mut inner = self.lock();
        let (id, event) = inner.take_in(wanted, extent, is_durable, reply);
        self.handle_request(inner, id, event);
    }

    /// The same, from a thread that may wait a moment: this thread carries out requests that the page cache
    /// is likely to serve, since that is quicker than a hand-over.
    pub fn request_here(self: &Arc<Self>, wanted: Wanted, extent: Extent, is_durable: bool, reply: Reply) {
        let may_be_here = extent.length <= HERE
            && match &wanted {
                Wanted::Read => true,
                Wanted::Write(_) => !is_durable,
                Wanted::Zero { .. } | Wanted::Flush => false,
            };
        if !may_be_here {
            return self.request(wanted, extent, is_durable, reply);
        }
        let mut inner = self.lock();
        let (id, event) = inner.take_in(wanted.clone(), extent, is_durable, reply);
        inner.offered = Some(id);
        if !self.handle_request(inner, id, event) {
            return;
        }
        let mut read = Vec::new();
        let done = match &wanted {
            Wanted::Write(data) => self.store.write_at_once(extent.offset, data),
            _ => {
                read = vec![0; extent.length as usize];
                self.store.read_at_once(extent.offset, &mut read)
            }
        };
        match done {
            Some(done) => self.local_done(id, read, done),
            None => self.submit(id, wanted, extent, is_durable),
        }
    }

    /// True if the request was offered and the engine wants it carried out now: then the caller does so.
    fn handle_request(
        self: &Arc<Self>,
        mut inner: MutexGuard<'_, Inner>,
        id: RequestId,
        event: Event,
    ) -> bool {
        let refused = match &event {
            _ if !*self.is_open.borrow() => Some(Failure::Moved),
            Event::Request { op: Op::Read, .. } => None,
            // Refused before the engine gets it: no part of it goes to another host.
            _ if self.store.is_suspect() => Some(Failure::Disk(libc::EIO)),
            _ => None,
        };
        if let Some(failure) = refused {
            inner.offered = None;
            let request = inner.requests.remove(&id).expect("it was taken in");
            drop(inner);
            (request.reply)(Err(failure));
            return false;
        }
        let was_offered = inner.offered.is_some();
        self.act_on(&mut inner, event);
        // The engine has taken the offer, or wants something else first: then the request is for the threads
        // that wait for disks.
        let is_taken = was_offered && inner.offered.take().is_none();
        answer(inner);
        is_taken
    }

    /// An event that belongs to no connection to the destination.
    pub fn event(self: &Arc<Self>, event: Event) {
        self.handle(self.lock(), event);
    }

    /// Begins to move. Reports go to `reports`.
    pub fn migrate(self: &Arc<Self>, bytes_per_second: Option<u64>, reports: UnboundedSender<Report>) {
        let mut inner = self.lock();
        inner.reports = Some(reports);
        let keeps_room = self.store.keeps_room(inner.engine.length());
        inner.outlet.begin(keeps_room);
        inner.progress = Progress::default();
        self.handle(inner, Event::Migrate { bytes_per_second });
    }

    /// A connection to the destination is up, and gets all messages. `knows`: whether the destination
    /// compares, and knows zeros that stay allocated. Returns the connection's number.
    pub fn link_up(
        self: &Arc<Self>,
        keeps: bool,
        knows: (bool, bool),
        sender: UnboundedSender<Outgoing>,
    ) -> u64 {
        let mut inner = self.lock();
        let number = inner.outlet.connect(knows, sender);
        self.handle(inner, Event::LinkUp { keeps });
        number
    }

    /// The connection of this number is lost.
    pub fn link_down(self: &Arc<Self>, number: u64) {
        let mut inner = self.lock();
        if inner.outlet.is_by(number) {
            inner.outlet.disconnect();
            self.handle(inner, Event::LinkDown);
        }
    }

    /// The destination has sent a message on this connection. False if the connection no longer counts.
    pub fn heard(self: &Arc<Self>, number: u64, message: ToSource) -> bool {
        let mut inner = self.lock();
        if !inner.outlet.is_by(number) {
            return false;
        }
        match message {
            ToSource::Done(tag, errno) => {
                let result = if errno == 0 {
                    Ok(())
                } else {
                    Err(Failure::Disk(errno))
                };
                let event = match tag {
                    Tag::Change(id) => Event::MirrorDone {
                        id: RequestId(id),
                        result,
                    },
                    Tag::Chunk(ticket) => {
                        let ticket = Ticket(ticket);
                        inner.outlet.forget(ticket);
                        Event::ChunkSent { ticket, result }
                    }
                    Tag::Flush(ticket) => Event::MirrorFlushed {
                        ticket: Ticket(ticket),
                        result,
                    },
                };
                self.handle(inner, event);
                true
            }
            ToSource::Differs(Tag::Chunk(ticket)) => {
                inner.outlet.differs(Ticket(ticket));
                true
            }
            ToSource::Differs(_)
            | ToSource::Welcome { .. }
            | ToSource::Refused(_)
            | ToSource::Answer(_)
            | ToSource::Taken(_)
            | ToSource::Again(..)
            | ToSource::WouldTake
            | ToSource::Promised => false,
        }
    }

    fn handle(self: &Arc<Self>, mut inner: MutexGuard<'_, Inner>, event: Event) {
        self.act_on(&mut inner, event);
        answer(inner);
    }

    fn act_on(self: &Arc<Self>, inner: &mut Inner, event: Event) {
        let mut actions = Vec::new();
        inner.engine.handle(self.began.elapsed(), event, &mut actions);
        for action in actions {
            self.act(inner, action);
        }
    }

    fn act(self: &Arc<Self>, inner: &mut Inner, action: Action) {
        match action {
            Action::Local { id } if inner.offered == Some(id) => inner.offered = None,
            Action::Local { id } => {
                let request = &inner.requests[&id];
                let (wanted, extent) = (request.wanted.clone(), request.extent);
                self.submit(id, wanted, extent, request.is_durable);
            }
            Action::Mirror { id } => {
                let request = &inner.requests[&id];
                let extent = request.extent;
                match request.wanted.clone() {
                    Wanted::Write(data) => inner.outlet.change(id.0, extent, data),
                    Wanted::Zero { may_free } => inner.outlet.zero(Tag::Change(id.0), extent, may_free),
                    Wanted::Read | Wanted::Flush => unreachable!("only changes are doubled"),
                }
            }
            Action::Reply { id, result } => {
                let request = inner.requests.remove(&id).expect("it has no answer yet");
                inner.replies.push((request.reply, result.map(|()| request.read)));
                self.answered.notify_waiters();
            }
            Action::ReadChunk { ticket, extent } => self.read_chunk(inner, ticket, extent),
            Action::SendChunk { ticket } => {
                inner.outlet.send_chunk(ticket);
                (self.hook)(Point::ChunkSent);
            }
            Action::DropChunk { ticket } => inner.outlet.forget(ticket),
            Action::FlushMirror { ticket } => inner.outlet.flush(ticket),
            Action::Disconnect => inner.outlet.disconnect(),
            Action::Report(report) => {
                if let Some(reports) = &inner.reports {
                    // The migration's task may have ended.
                    let _ = reports.send(report);
                }
            }
        }
    }

    fn submit(self: &Arc<Self>, id: RequestId, wanted: Wanted, extent: Extent, is_durable: bool) {
        let volume = self.clone();
        self.disks.submit(Class::Tenant, move || {
            let mut read = Vec::new();
            let store = &volume.store;
            let done = match &wanted {
                Wanted::Read => {
                    read = vec![0; extent.length as usize];
                    store.read(extent.offset, &mut read)
                }
                Wanted::Write(data) => store.write(extent.offset, data),
                Wanted::Zero { may_free } => store.zero(extent.offset, extent.length, *may_free),
                Wanted::Flush => store.flush(),
            };
            let done = match is_durable {
                true => done.and_then(|()| store.flush()),
                false => done,
            };
            volume.local_done(id, read, done);
        });
    }

    fn local_done(self: &Arc<Self>, id: RequestId, read: Vec<u8>, done: io::Result<()>) {
        let mut inner = self.lock();
        if let Some(request) = inner.requests.get_mut(&id) {
            request.read = read;
        }
        let result = done.map_err(failure);
        self.handle(inner, Event::LocalDone { id, result });
    }

    fn read_chunk(self: &Arc<Self>, inner: &Inner, ticket: Ticket, extent: Extent) {
        let volume = self.clone();
        let compares = inner.outlet.compares();
        self.disks.submit(Class::Copy, move || {
            let mut data = vec![0; extent.length as usize];
            let done = volume.store.read_in_pieces(extent.offset, &mut data);
            let chunk = Chunk {
                extent,
                hash: compares.then(|| *blake3::hash(&data).as_bytes()),
                is_zero: is_zero(&data),
                data: Arc::new(data),
            };
            let mut inner = volume.lock();
            let result = done.map_err(failure);
            // Otherwise the read was given up meanwhile.
            if inner.engine.reads(ticket) {
                inner.outlet.keep(ticket, chunk);
                volume.handle(inner, Event::ChunkRead { ticket, result });
            }
        });
    }
}

/// Calls the replies without the lock: each may take a system call.
fn answer(mut inner: MutexGuard<'_, Inner>) {
    let replies = std::mem::take(&mut inner.replies);
    drop(inner);
    for (reply, result) in replies {
        reply(result);
    }
}

impl Inner {
    fn take_in(
        &mut self,
        wanted: Wanted,
        extent: Extent,
        is_durable: bool,
        reply: Reply,
    ) -> (RequestId, Event) {
        self.ids += 1;
        let id = RequestId(self.ids);
        let op = match &wanted {
            Wanted::Read => Op::Read,
            Wanted::Write(_) | Wanted::Zero { .. } => Op::Change(extent),
            Wanted::Flush => Op::Flush,
        };
        let request = Request {
            wanted,
            extent,
            is_durable,
            read: Vec::new(),
            reply,
        };
        self.requests.insert(id, request);
        (id, Event::Request { id, op })
    }
}

/// The engine's form of an error.
pub fn failure(error: io::Error) -> Failure {
    Failure::Disk(error.raw_os_error().unwrap_or(libc::EIO))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::thread::ThreadId;

    use super::*;

    const EXTENT: Extent = Extent {
        offset: 4096,
        length: 512,
    };

    fn volume(folder: &tempfile::TempDir) -> Arc<Volume> {
        let store = Store::new_file(&folder.path().join("data"), 1 << 20).expect("made");
        Volume::new(store, 1 << 20, Disks::new(2), crate::faults::none)
    }

    /// Gives a request. The channel gets its result, and the thread of the reply.
    fn give(volume: &Arc<Volume>, wanted: Wanted) -> Receiver<(Result<Vec<u8>, Failure>, ThreadId)> {
        let (sender, receiver) = channel();
        let reply = Box::new(move |result| {
            let thread = std::thread::current().id();
            sender.send((result, thread)).expect("the test waits");
        });
        volume.request_here(wanted, EXTENT, false, reply);
        receiver
    }

    #[test]
    fn what_the_page_cache_has_is_done_by_the_thread_that_asks() {
        let folder = tempfile::tempdir().expect("a folder");
        let volume = volume(&folder);
        let data = Arc::new(vec![7; 512]);
        let written = give(&volume, Wanted::Write(data.clone()))
            .recv()
            .expect("an answer");
        assert_eq!(written.0, Ok(Vec::new()));
        let (read, thread) = give(&volume, Wanted::Read).recv().expect("an answer");
        assert_eq!(read, Ok(data.to_vec()));
        let is_known = volume.store.read_at_once(EXTENT.offset, &mut [0; 512]).is_some();
        assert_eq!(thread == std::thread::current().id(), is_known);
        assert_eq!(volume.lock().engine.in_flight(), 0, "the engine has counted it");
    }

    #[tokio::test]
    async fn a_volume_that_was_closed_takes_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let volume = volume(&folder);
        volume.close().await;
        let answer = give(&volume, Wanted::Write(Arc::new(vec![7; 512])));
        assert_eq!(answer.recv().expect("an answer").0, Err(Failure::Moved));
        let mut data = [1; 512];
        volume.store.read(EXTENT.offset, &mut data).expect("read");
        assert_eq!(data, [0; 512]);
    }
}
