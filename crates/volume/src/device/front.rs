//! The server of the device's file: passes the kernel's requests to the volume.
//!
//! A daemon that is told to end takes no more requests, and answers those that it has taken ([`Front::stop`],
//! [`Front::idle`]); the next daemon begins with the first unread request. A daemon that is killed leaves
//! requests that were read and not answered. The kernel resends them, also those that were carried out
//! already (Linux 6.9 and later), and they are carried out again, in the order of their numbers
//! ([`Front::take_again`]). No client can notice:
//!
//! - A read or a flush changes nothing.
//! - A change W that was carried out twice is as if it was carried out once, unless another change W2 to the
//!   same bytes came in between. None did: W2 is given to the volume only when the kernel has W's answer
//!   ([`Work::waiting`]), and then W is not resent. The engine also holds overlapping changes, but lets W2 go
//!   on when W is done, a moment before W's answer is written; so the engine's order would not be enough. A
//!   W2 that waited has a higher number, so the next process carries out W first.
//! - A client by another way (NBD) that changes the same bytes at that time races with a request that has no
//!   answer yet. No disk defines which of the two stays.
//! - The dead process has released the lock of the volumes' folder before the next one serves, and the lock
//!   is released after its last system call: nothing that it had begun comes later.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;
use verbatim_mirror::{Extent, Failure};

use super::fuse::{MAX_BYTES, MAX_HEADER};
use super::protocol::{self, Op, parse};
use crate::faults::Point;
use crate::volume::{Volume, Wanted};

/// Numbers of requests of each kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub reads: u64,
    pub changes: u64,
    pub flushes: u64,
    /// Requests among these that an earlier process had read.
    pub again: u64,
}

/// A change, and the address of its answer.
struct Change {
    to: Answering,
    extent: Extent,
    wanted: Wanted,
}

#[derive(Clone)]
struct Answering {
    channel: Arc<OwnedFd>,
    unique: u64,
}

impl Answering {
    fn say(&self, answer: Result<&[u8], i32>) {
        self::answer(&self.channel, self.unique, answer);
    }
}

/// Requests in flight.
#[derive(Default)]
struct Work {
    /// Threads that take requests.
    readers: usize,
    /// Requests that the volume has or will have, and that have no answer.
    unanswered: usize,
    /// The changes among them that the volume has.
    changes: Vec<(u64, Extent)>,
    /// Changes that overlap an unanswered one, in their order.
    waiting: VecDeque<Change>,
    counts: Counts,
    /// A thread waits until nothing is in flight. Each notification costs a system call per request, so there
    /// is none without a waiter.
    is_awaited: bool,
}

impl Work {
    fn must_wait(&self, extent: Extent, earlier: usize) -> bool {
        let is_changed = self.changes.iter().any(|(_, other)| other.overlaps(extent));
        let mut before = self.waiting.iter().take(earlier);
        is_changed || before.any(|change| change.extent.overlaps(extent))
    }

    /// The first waiting change that no longer has to wait.
    fn next(&mut self) -> Option<Change> {
        let index =
            (0..self.waiting.len()).find(|&index| !self.must_wait(self.waiting[index].extent, index))?;
        let change = self.waiting.remove(index)?;
        self.changes.push((change.to.unique, change.extent));
        Some(change)
    }
}

/// A thread that the kernel does not let take a request tries again after this time.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves one connection.
pub struct Front {
    volume: Arc<Volume>,
    length: AtomicU64,
    is_read_only: bool,
    work: Mutex<Work>,
    changed: Condvar,
    is_stopped: AtomicBool,
    stop: OwnedFd,
}

impl Front {
    pub fn new(volume: &Arc<Volume>, is_read_only: bool) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            volume: volume.clone(),
            length: AtomicU64::new(volume.length()),
            is_read_only,
            work: Mutex::default(),
            changed: Condvar::new(),
            is_stopped: AtomicBool::new(false),
            stop: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        }))
    }

    /// Takes requests from these channels, until the connection ends or [`Front::stop`] is called.
    pub fn start(self: &Arc<Self>, channels: Vec<Arc<OwnedFd>>) -> io::Result<()> {
        for channel in channels {
            let own = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            let (wakes, data) = (epoll::EventFlags::IN, epoll::EventData::new_u64(0));
            // One thread is woken for one request.
            epoll::add(&own, &channel, data, wakes | epoll::EventFlags::EXCLUSIVE)?;
            epoll::add(&own, &self.stop, data, wakes)?;
            self.lock().readers += 1;
            let front = Reader(self.clone());
            std::thread::Builder::new().name("fuse".into()).spawn(move || {
                if let Err(error) = front.0.take_all(&channel, &own) {
                    tracing::error!("requests to a volume's device are taken no more: {error}");
                }
            })?;
        }
        Ok(())
    }

    /// Takes the requests that the kernel resends, and then new ones from these channels. Returns at once: a
    /// thread carries the resent requests out, and calls `after` when it has.
    pub fn go_on(
        self: &Arc<Self>,
        channels: Vec<Arc<OwnedFd>>,
        after: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        self.lock().readers += 1;
        let front = Reader(self.clone());
        std::thread::Builder::new().name("fuse".into()).spawn(move || {
            let gone_on = front
                .0
                .take_again(&channels[0])
                .and_then(|()| front.0.start(channels));
            drop(front);
            match gone_on {
                Ok(()) => after(),
                Err(error) => tracing::error!("requests to a volume's device are not taken: {error}"),
            }
        })?;
        Ok(())
    }

    /// Takes all requests that an earlier process has read and not answered, the oldest first. The kernel was
    /// told to resend them, and delivers them before any other.
    fn take_again(self: &Arc<Self>, channel: &Arc<OwnedFd>) -> io::Result<()> {
        let mut bytes = vec![0xff; MAX_BYTES as usize + MAX_HEADER];
        let (mut again, mut new) = (Vec::new(), None);
        while new.is_none() {
            match rustix::io::read(channel, &mut bytes) {
                Ok(length) => match parse(&bytes[..length]) {
                    Some(request) if request.is_again() => {
                        again.push((request.unique, bytes[..length].to_vec()))
                    }
                    _ => new = Some(bytes[..length].to_vec()),
                },
                Err(Errno::AGAIN | Errno::NODEV) => break,
                Err(Errno::INTR | Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        again.sort_by_key(|(unique, _)| *unique);
        for bytes in again.iter().map(|(_, bytes)| bytes).chain(&new) {
            self.take(bytes, channel);
        }
        Ok(())
    }

    /// Takes no more requests. Those that were taken are answered.
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::SeqCst);
        rustix::io::write(&self.stop, &1u64.to_ne_bytes()).expect("nobody else counts there");
    }

    /// Waits until all taken requests are answered. Returns the number of those that are not at `end`.
    pub fn idle(&self, end: Instant) -> usize {
        let mut work = self.lock();
        work.is_awaited = true;
        while work.readers + work.unanswered > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(work, left);
            work = waited.expect("no panic under this lock").0;
        }
        work.unanswered
    }

    pub fn counts(&self) -> Counts {
        self.lock().counts
    }

    /// The length of the file.
    pub fn length(&self) -> u64 {
        self.length.load(Ordering::SeqCst)
    }

    /// Sets the length of the file; the kernel does not know it yet.
    pub fn set_length(&self, length: u64) {
        self.length.store(length, Ordering::SeqCst);
    }

    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().expect("no panic under this lock")
    }

    fn take_all(self: &Arc<Self>, channel: &Arc<OwnedFd>, own: &OwnedFd) -> io::Result<()> {
        // The pages exist before a request comes: the kernel fails a request if the thread is killed while
        // the kernel copies the request into a missing page.
        let mut bytes = vec![0xff; MAX_BYTES as usize + MAX_HEADER];
        let mut events = Vec::with_capacity(2);
        while !self.is_stopped.load(Ordering::SeqCst) {
            match rustix::io::read(channel, &mut bytes) {
                Ok(0) => return Ok(()),
                Ok(length) => self.take(&bytes[..length], channel),
                Err(Errno::AGAIN) => {
                    events.clear();
                    match epoll::wait(own, rustix::buffer::spare_capacity(&mut events), None) {
                        Ok(_) | Err(Errno::INTR) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                // The requester has given up meanwhile.
                Err(Errno::INTR | Errno::NOENT) => {}
                Err(Errno::NODEV) => return Ok(()),
                // For example, no memory. This request has failed; without this thread all later ones would
                // wait forever.
                Err(error) => {
                    tracing::error!("a request to a volume's device cannot be taken: {error}");
                    std::thread::sleep(PAUSE);
                }
            }
        }
        Ok(())
    }

    fn take(self: &Arc<Self>, bytes: &[u8], channel: &Arc<OwnedFd>) {
        let Some(request) = parse(bytes) else {
            return tracing::error!("the kernel has sent a request of {} bytes", bytes.len());
        };
        let to = Answering {
            channel: channel.clone(),
            unique: request.unique,
        };
        let is_again = request.is_again();
        let length = self.length();
        match request.op {
            Op::Attributes => {
                (self.volume.hook())(Point::Attributes);
                to.say(Ok(&protocol::attributes(length)));
            }
            Op::Open => to.say(Ok(&protocol::opened())),
            Op::FileSystem => to.say(Ok(&protocol::file_system())),
            Op::Nothing => to.say(Ok(&[])),
            Op::Silent => {}
            Op::Unknown | Op::Init(_) => to.say(Err(libc::ENOSYS)),
            Op::Refused => to.say(Err(libc::EOPNOTSUPP)),
            Op::Damaged => to.say(Err(libc::EIO)),
            Op::Read {
                offset,
                length: wanted,
            } => {
                let there = length.saturating_sub(offset).min(wanted);
                match Extent::within(length, offset, there) {
                    Some(extent) => self.read(to, extent, is_again),
                    None => to.say(Ok(&[])),
                }
            }
            Op::Write { offset, data } => match Extent::within(length, offset, data.len() as u64) {
                Some(extent) => self.change(to, extent, Wanted::Write(Arc::new(data.to_vec())), is_again),
                None => to.say(Err(libc::ENOSPC)),
            },
            Op::Zero {
                offset,
                length: wanted,
                may_free,
            } => match Extent::within(length, offset, wanted) {
                Some(extent) => self.change(to, extent, Wanted::Zero { may_free }, is_again),
                None => to.say(Err(libc::EINVAL)),
            },
            Op::Sync => self.flush(to, is_again),
        }
    }

    fn begin(&self, is_again: bool, count: impl FnOnce(&mut Counts)) -> MutexGuard<'_, Work> {
        let mut work = self.lock();
        work.unanswered += 1;
        work.counts.again += u64::from(is_again);
        count(&mut work.counts);
        work
    }

    fn read(self: &Arc<Self>, to: Answering, extent: Extent, is_again: bool) {
        drop(self.begin(is_again, |counts| counts.reads += 1));
        let front = self.clone();
        let reply = Box::new(move |result: Result<Vec<u8>, Failure>| {
            to.say(result.as_deref().map_err(|failure| errno(*failure)));
            front.answered(&to);
        });
        self.volume.request_here(Wanted::Read, extent, false, reply);
    }

    fn flush(self: &Arc<Self>, to: Answering, is_again: bool) {
        drop(self.begin(is_again, |counts| counts.flushes += 1));
        let front = self.clone();
        let reply = Box::new(move |result: Result<Vec<u8>, Failure>| {
            to.say(result.map(|_| [].as_slice()).map_err(errno));
            front.answered(&to);
        });
        let any = Extent { offset: 0, length: 1 };
        self.volume.request(Wanted::Flush, any, false, reply);
    }

    fn change(self: &Arc<Self>, to: Answering, extent: Extent, wanted: Wanted, is_again: bool) {
        if self.is_read_only {
            return to.say(Err(libc::EROFS));
        }
        let mut work = self.begin(is_again, |counts| counts.changes += 1);
        let change = Change { to, extent, wanted };
        if work.must_wait(extent, work.waiting.len()) {
            work.waiting.push_back(change);
            return;
        }
        work.changes.push((change.to.unique, extent));
        drop(work);
        self.carry_out(change);
    }

    fn carry_out(self: &Arc<Self>, change: Change) {
        let (to, extent, front) = (change.to, change.extent, self.clone());
        let is_write = matches!(change.wanted, Wanted::Write(_));
        let reply = Box::new(move |result: Result<Vec<u8>, Failure>| {
            let body = match is_write {
                true => protocol::written(extent.length as u32),
                false => Vec::new(),
            };
            to.say(result.map(|_| body.as_slice()).map_err(errno));
            front.answered(&to);
        });
        self.volume.request_here(change.wanted, extent, false, reply);
    }

    /// The kernel has the answer.
    fn answered(self: &Arc<Self>, to: &Answering) {
        let mut work = self.lock();
        work.unanswered -= 1;
        work.changes.retain(|(unique, _)| *unique != to.unique);
        if work.is_awaited {
            self.changed.notify_all();
        }
        while let Some(change) = work.next() {
            drop(work);
            self.carry_out(change);
            work = self.lock();
        }
    }
}

/// A thread that takes requests.
struct Reader(Arc<Front>);

impl Drop for Reader {
    fn drop(&mut self) {
        self.0.lock().readers -= 1;
        self.0.changed.notify_all();
    }
}

fn errno(failure: Failure) -> i32 {
    match failure {
        // The kernel takes no other numbers, and a request without an answer waits forever.
        Failure::Disk(errno @ 1..=511) => errno,
        Failure::Disk(_) => libc::EIO,
        Failure::Moved => libc::ESHUTDOWN,
    }
}

/// Answers a request. The requester may have given up, or the connection may have ended.
pub fn answer(fuse: impl AsFd, unique: u64, answer: Result<&[u8], i32>) {
    let (body, errno) = match answer {
        Ok(body) => (body, 0),
        Err(errno) => ([].as_slice(), errno),
    };
    let header = protocol::header(unique, errno, body.len());
    match rustix::io::writev(&fuse, &[IoSlice::new(&header), IoSlice::new(body)]) {
        Ok(_) | Err(Errno::NOENT | Errno::NODEV | Errno::PERM) => {}
        Err(error) => {
            tracing::error!(
                "the kernel does not take an answer of {} bytes: {error}",
                body.len()
            );
            // The requester must not wait forever. A request that the kernel has ended meanwhile no longer
            // exists.
            let _ = rustix::io::write(&fuse, &protocol::header(unique, libc::EIO, 0));
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::disk::Disks;
    use crate::store::Store;

    const AGAIN: u64 = 1 << 63;

    /// A write as the kernel sends it.
    fn write(unique: u64, offset: u64, data: &[u8]) -> Vec<u8> {
        let mut body = vec![0; 40];
        body[8..16].copy_from_slice(&offset.to_ne_bytes());
        body[16..20].copy_from_slice(&(data.len() as u32).to_ne_bytes());
        body.extend(data);
        let mut bytes = ((40 + body.len()) as u32).to_ne_bytes().to_vec();
        bytes.extend(16u32.to_ne_bytes());
        bytes.extend(unique.to_ne_bytes());
        bytes.resize(40, 0);
        bytes.extend(body);
        bytes
    }

    struct World {
        _folder: tempfile::TempDir,
        volume: Arc<Volume>,
        front: Arc<Front>,
        kernel: OwnedFd,
        channel: Arc<OwnedFd>,
    }

    fn world() -> World {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::new_file(&folder.path().join("data"), 1 << 20).expect("made");
        let volume = Volume::new(store, 1 << 20, Disks::new(4), crate::faults::none);
        let flags = SocketFlags::CLOEXEC;
        let (kernel, channel) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("sockets");
        rustix::io::ioctl_fionbio(&channel, true).expect("set");
        World {
            _folder: folder,
            front: Front::new(&volume, false).expect("made"),
            volume,
            kernel,
            channel: Arc::new(channel),
        }
    }

    impl World {
        /// The number and the error of the next answer.
        fn answer(&self) -> (u64, i32) {
            let mut bytes = [0; 64];
            let length = rustix::io::read(&self.kernel, &mut bytes).expect("an answer");
            assert!(length >= 16, "{length}");
            let error = i32::from_ne_bytes(bytes[4..8].try_into().expect("four"));
            (u64::from_ne_bytes(bytes[8..16].try_into().expect("eight")), error)
        }

        fn content(&self) -> Vec<u8> {
            let (sender, receiver) = std::sync::mpsc::channel();
            let reply = Box::new(move |result| sender.send(result).expect("the test waits"));
            let extent = Extent {
                offset: 0,
                length: 1536,
            };
            self.volume.request(Wanted::Read, extent, false, reply);
            receiver.recv().expect("an answer").expect("read")
        }
    }

    #[test]
    fn what_comes_again_is_carried_out_in_the_order_of_its_numbers() {
        let world = world();
        // The kernel may send them in any order; the last one is new.
        let sent = [
            write(AGAIN | 8, 512, &[8; 512]),
            write(AGAIN | 4, 0, &[4; 1024]),
            write(AGAIN | 6, 0, &[6; 1024]),
            write(10, 1024, &[10; 512]),
        ];
        for bytes in &sent {
            rustix::io::write(&world.kernel, bytes).expect("sent");
        }
        world
            .front
            .go_on(vec![world.channel.clone()], || {})
            .expect("it goes on");
        let mut answers: Vec<_> = sent.iter().map(|_| world.answer()).collect();
        let order: Vec<_> = answers
            .iter()
            .map(|(unique, _)| *unique)
            .filter(|unique| *unique != 10)
            .collect();
        assert_eq!(order, [AGAIN | 4, AGAIN | 6, AGAIN | 8]);
        answers.sort_unstable();
        assert!(answers.iter().all(|(_, error)| *error == 0), "{answers:?}");
        assert_eq!(
            world.content(),
            [vec![6; 512], vec![8; 512], vec![10; 512]].concat()
        );
        assert_eq!((world.front.counts().changes, world.front.counts().again), (4, 3));
        world.front.stop();
        assert_eq!(world.front.idle(Instant::now() + Duration::from_secs(60)), 0);
    }

    #[test]
    fn a_change_that_overlaps_one_without_an_answer_is_not_begun() {
        let world = world();
        let answering = |unique| Answering {
            channel: world.channel.clone(),
            unique,
        };
        let extent = |offset| Extent { offset, length: 1024 };
        {
            let mut work = world.front.lock();
            work.unanswered = 1;
            work.changes.push((2, extent(0)));
        }
        let data = |byte: u8| Wanted::Write(Arc::new(vec![byte; 1024]));
        world.front.change(answering(4), extent(512), data(4), false);
        // It overlaps only a waiting change.
        world.front.change(answering(6), extent(1024), data(6), false);
        world.front.change(answering(8), extent(8192), data(8), false);
        assert_eq!(world.answer(), (8, 0));
        assert_eq!(world.content()[512..], [0; 1024]);
        world.front.answered(&answering(2));
        assert_eq!((world.answer(), world.answer()), ((4, 0), (6, 0)));
        assert_eq!(world.content()[512..], [vec![4; 512], vec![6; 512]].concat());
        assert_eq!(world.front.idle(Instant::now() + Duration::from_secs(60)), 0);
    }

    #[test]
    fn one_that_is_stopped_takes_nothing_and_leaves_it_where_it_is() {
        let world = world();
        world.front.start(vec![world.channel.clone()]).expect("it starts");
        rustix::io::write(&world.kernel, &write(2, 0, &[2; 512])).expect("sent");
        assert_eq!(world.answer(), (2, 0));
        world.front.stop();
        assert_eq!(world.front.idle(Instant::now() + Duration::from_secs(60)), 0);
        rustix::io::write(&world.kernel, &write(4, 0, &[4; 512])).expect("sent");
        let next = Front::new(&world.volume, false).expect("made");
        next.go_on(vec![world.channel.clone()], || {})
            .expect("it goes on");
        assert_eq!(world.answer(), (4, 0));
        assert_eq!((next.counts().changes, next.counts().again), (1, 0));
        next.stop();
    }
}
