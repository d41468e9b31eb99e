//! Private memory of an instance's processes, tracked from outside ([`verbatim_tracking`]), or compared with what was sent
//! ([`super::compared`]), and sent in rounds.
//!
//! A page that was sent is clean as long as its tracker says so, or its content is the same. What is left is sent while the tasks stand still: first what was
//! written since the last round, beside CRIU's dump, then whatever else CRIU has left out of its images. So the
//! destination has every page that the images lack, whatever the rounds have missed: processes that came late, or were not
//! tracked at all.
//!
//! The destination has a file for each process, named by its number in the instance's PID namespace; offsets are addresses.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tonic::transport::Channel;
use verbatim_tracking::{Error, Memory, Ranges, Tracker, Writer};

use super::compared::Compared;
use super::parts::{PART_BYTES, Parts, Route};
use super::private::{has_rnic, processes};
use super::send::stream;
use crate::proto::FilePart;
use crate::proto::file_part::{Folder, Kind};
use crate::proto::peer_client::PeerClient;

/// More goes with the images: CRIU keeps what it leaves out in pipes, which its limits on descriptors and pipes let hold some
/// 9.7 GiB.
pub const MOST_BYTES: u64 = 8 << 30;

/// As much may memory grow by processes that no longer share what fork let them share: each gets its own pages.
pub const MOST_SHARED_BYTES: u64 = 16 << 20;

/// The length of each file: beyond every address of a process.
const FILE_LENGTH: u64 = 1 << 47;

/// Why memory is not tracked (any more). What was sent is of no use where it says so.
#[derive(Debug)]
pub struct Untracked(pub String);

/// What says whether the destination has a page as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum By {
    /// The kernel's tracking.
    #[default]
    Kernel,
    /// Its content.
    Content,
}

/// What the destination has of each process, and what says whether that is still right.
#[derive(Debug, Default)]
pub struct Tracked {
    by: By,
    /// By the process's number in this host's PID namespace.
    tasks: BTreeMap<u32, Task>,
    /// What the last look at all contents took.
    look_time: Duration,
}

#[derive(Debug)]
struct Task {
    /// Its number in the instance's PID namespace.
    number: u32,
    seen: Seen,
    memory: Memory,
    /// What the destination has, as far as nobody has written to it since.
    sent: Ranges,
}

/// What tells what was written.
#[derive(Debug)]
enum Seen {
    Kernel(Tracker),
    Content(Compared),
}

/// Why the private memory of a process and all that descend from it cannot be left out of the images, if so: neither tracked nor
/// sent at once.
pub fn must_go_in_images(root: i32, bytes: u64) -> Option<String> {
    if bytes > MOST_BYTES {
        return Some(format!(
            "it is {} MiB, and CRIU can leave {} MiB out of its images",
            bytes >> 20,
            MOST_BYTES >> 20
        ));
    }
    let pids: Vec<_> = processes(root);
    match verbatim_tracking::shared_by_fork(&pids) {
        Ok(shared) if shared > MOST_SHARED_BYTES => Some(format!(
            "its processes share memory since they were forked, and would take {} MiB more if each got its own",
            shared >> 20
        )),
        Ok(_) => None,
        Err(error) => Some(format!("what its processes share is unknown: {error}")),
    }
}

/// Why the kernel cannot be asked what is written to private memory.
#[derive(Debug, PartialEq, Eq)]
pub struct Untrackable {
    /// In words for an operator.
    pub why: String,
    /// Why it cannot be compared with what was sent, either; `None` if it can.
    pub incomparable: Option<String>,
}

/// Why the private memory of a process and all that descend from it cannot be tracked from outside, if so.
pub fn cannot_be_tracked(root: i32) -> Option<Untrackable> {
    let mut why = verbatim_tracking::supported()
        .err()
        .map(|unsupported| unsupported.to_string());
    for pid in processes(root) {
        let incomparable = match verbatim_tracking::pinned_writers(pid) {
            Ok(None) => continue,
            Ok(Some(writer)) => {
                why.get_or_insert_with(|| writer.to_string());
                incomparable(pid, &writer)
            }
            // It has ended.
            Err(Error::Gone) => continue,
            Err(error) => Some(error.to_string()),
        };
        if incomparable.is_some() {
            let why = why.or_else(|| incomparable.clone())?;
            return Some(Untrackable { why, incomparable });
        }
    }
    why.map(|why| Untrackable {
        why,
        incomparable: None,
    })
}

/// Why memory to which this writes cannot be compared with what was sent, if so. An RNIC stands still before the tasks do: nothing of
/// the last look changes behind it. Nobody knows that of other devices, nor of rings.
fn incomparable(pid: u32, writer: &Writer) -> Option<String> {
    match writer {
        Writer::Device(_) if has_rnic(pid) => None,
        Writer::Device(words) | Writer::Ring(words) => Some(words.clone()),
    }
}

impl Tracked {
    /// Of nothing yet.
    pub fn new(by: By) -> Self {
        Self {
            by,
            ..Self::default()
        }
    }

    /// What a look takes that finds nothing to send; the last one is a part of the blackout.
    pub fn look_time(&self) -> Duration {
        self.look_time
    }

    /// What is to be sent now, by process: what was written since the last look, and what is not tracked yet. Nothing that is
    /// written later is missed by the next look.
    fn look(&mut self, root: i32) -> Result<Vec<(u32, Ranges)>, Untracked> {
        let pids = processes(root);
        self.tasks.retain(|pid, _| pids.contains(pid));
        let mut written = Vec::new();
        for pid in &pids {
            match self.look_at(*pid) {
                Ok(ranges) => written.push((*pid, ranges)),
                // It has ended.
                Err(Error::Gone) => _ = self.tasks.remove(pid),
                Err(error) => return Err(Untracked(format!("process {pid}: {error}"))),
            }
            if let Ok(Some(writer)) = verbatim_tracking::pinned_writers(*pid) {
                return Err(Untracked(writer.to_string()));
            }
        }
        let pids: Vec<_> = self.tasks.keys().copied().collect();
        verbatim_tracking::stand_still_once(&pids).map_err(|error| Untracked(error.to_string()))?;
        Ok(written)
    }

    fn look_at(&mut self, pid: u32) -> Result<Ranges, Error> {
        // Another program has another memory: all of it is to be sent.
        for _ in 0..3 {
            let task = match self.tasks.entry(pid) {
                std::collections::btree_map::Entry::Occupied(task) => task.into_mut(),
                std::collections::btree_map::Entry::Vacant(place) => {
                    place.insert(Task::new(pid, Seen::Kernel(Tracker::arm(pid)?))?)
                }
            };
            let Seen::Kernel(tracker) = &mut task.seen else {
                return Err(Error::Changed);
            };
            match tracker.look() {
                Ok(look) => {
                    task.sent.subtract(&look.written);
                    return Ok(look.written);
                }
                Err(Error::Changed) => _ = self.tasks.remove(&pid),
                Err(error) => return Err(error),
            }
        }
        Err(Error::Changed)
    }

    /// The tasks stand still: what was written since the last look. What is no longer tracked is forgotten, and so not sent.
    fn last_look(&mut self) -> Vec<(u32, Ranges)> {
        let mut written = Vec::new();
        self.tasks.retain(|pid, task| {
            let Seen::Kernel(tracker) = &mut task.seen else {
                return false;
            };
            let Ok(look) = tracker.last_look() else {
                return false;
            };
            task.sent.subtract(&look.written);
            written.push((*pid, look.written));
            true
        });
        written
    }

    /// Sends all that has another content than what was sent. Afterwards the destination has what was read in this look, and nothing else is
    /// said of.
    fn compare(&mut self, root: i32, threads: usize, out: &Out<'_>) -> anyhow::Result<()> {
        let pids = processes(root);
        self.tasks.retain(|pid, _| pids.contains(pid));
        self.look_time = Duration::ZERO;
        for pid in pids {
            match self.compare_one(pid, threads, out) {
                // It has ended.
                Err(error) if matches!(error.downcast_ref(), Some(Error::Gone)) => {
                    self.tasks.remove(&pid);
                }
                done => done.with_context(|| format!("process {pid}"))?,
            }
        }
        Ok(())
    }

    fn compare_one(&mut self, pid: u32, threads: usize, out: &Out<'_>) -> anyhow::Result<()> {
        let writer = verbatim_tracking::pinned_writers(pid)?;
        if let Some(why) = writer.and_then(|writer| incomparable(pid, &writer)) {
            bail!(why);
        }
        let present = verbatim_tracking::present(pid)?;
        let number = number_of(pid).map_err(|_| Error::Gone)?;
        // The number may be another process's by now. That it has become another program does not matter, but for where its memory is.
        self.tasks.retain(|of, task| *of != pid || task.number == number);
        let task = match self.tasks.entry(pid) {
            std::collections::btree_map::Entry::Occupied(task) => task.into_mut(),
            std::collections::btree_map::Entry::Vacant(place) => {
                place.insert(Task::new(pid, Seen::Content(Compared::default()))?)
            }
        };
        task.memory = Memory::open(pid)?;
        let Seen::Content(compared) = &mut task.seen else {
            bail!("it is tracked by the kernel");
        };
        let (part, parts) = (part(out.session, number), out.parts);
        let look = compared.look(&task.memory, &present, threads, |at, bytes: &[u8]| {
            parts.data(&part, at, bytes)
        })?;
        task.sent = look.read;
        self.look_time += look.took;
        Ok(())
    }

    /// The tasks stand still and CRIU's images are complete: what they lack and the destination has not, by process.
    fn missing(&self, root: i32, images: &Path) -> anyhow::Result<Vec<Missing>> {
        let mut by_number: BTreeMap<u32, u32> = BTreeMap::new();
        for pid in processes(root) {
            by_number.insert(number_of(pid).with_context(|| format!("process {pid}"))?, pid);
        }
        let mut missing = Vec::new();
        for number in verbatim_fill::tasks(images)? {
            let mut ranges = Ranges::from_iter(verbatim_fill::left_to_fill(images, number)?);
            if ranges.is_empty() {
                continue;
            }
            let pid = *by_number
                .get(&number)
                .with_context(|| format!("the images have a task {number} that is not there"))?;
            if let Some(task) = self.tasks.get(&pid).filter(|task| task.number == number) {
                ranges.subtract(&task.sent);
            }
            missing.push(Missing { pid, number, ranges });
        }
        Ok(missing)
    }
}

/// What the destination has to get of one process.
struct Missing {
    pid: u32,
    number: u32,
    ranges: Ranges,
}

impl Task {
    fn new(pid: u32, seen: Seen) -> Result<Self, Error> {
        let number = number_of(pid).map_err(|_| Error::Gone)?;
        Ok(Self {
            number,
            seen,
            memory: Memory::open(pid)?,
            sent: Ranges::default(),
        })
    }
}

/// A process's number in the innermost of its PID namespaces (`NSpid` of proc_pid_status(5)).
fn number_of(pid: u32) -> anyhow::Result<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let innermost = numbers.and_then(|numbers| numbers.split_ascii_whitespace().last());
    Ok(innermost
        .context("the kernel does not tell its number")?
        .parse()?)
}

/// Reads memory, and puts it into the stream to the destination.
struct Out<'a> {
    session: u64,
    parts: &'a Parts,
    buffer: Vec<u8>,
}

impl Out<'_> {
    /// Sends what can be read of these ranges; returns what that was.
    fn send(&mut self, number: u32, memory: &Memory, ranges: &Ranges) -> anyhow::Result<Ranges> {
        let part = part(self.session, number);
        let mut sent = Ranges::default();
        for range in ranges.iter() {
            let mut from = range.start;
            while from < range.end {
                let to = range.end.min(from + PART_BYTES as u64);
                let bytes = &mut self.buffer[..(to - from) as usize];
                for read in memory.read(from..to, bytes)?.iter() {
                    let data = &bytes[(read.start - from) as usize..(read.end - from) as usize];
                    self.parts.data(&part, read.start, data)?;
                    sent.insert(read);
                }
                from = to;
            }
        }
        Ok(sent)
    }
}

/// The file of a process, whose offsets are its addresses.
fn part(session: u64, number: u32) -> FilePart {
    FilePart {
        session,
        folder: Folder::Private.into(),
        path: number.to_string().into_bytes(),
        kind: Kind::File.into(),
        length: FILE_LENGTH,
        ..FilePart::default()
    }
}

/// The way to the destination.
#[derive(Debug, Clone)]
pub struct Way {
    /// The session.
    pub session: u64,
    /// How it goes.
    pub route: Route,
    /// What the round that runs has sent, in bytes; may be looked at while it runs.
    pub sent: Arc<AtomicU64>,
}

/// Tracking, or the state of it that a round came to its end with, and what the round has sent in bytes.
type Sent<E> = (Tracked, Result<u64, E>);

impl Way {
    /// Reads and sends in a thread of its own.
    async fn carry<E: Send + 'static>(
        &self,
        tracked: &mut Tracked,
        destination: &mut PeerClient<Channel>,
        read: impl FnOnce(&mut Tracked, &mut Out<'_>) -> Result<(), E> + Send + 'static,
    ) -> anyhow::Result<Result<u64, E>> {
        let mut taken = std::mem::take(tracked);
        let way = self.clone();
        way.sent.store(0, Ordering::Relaxed);
        let (route, sent) = (way.route.clone(), Arc::clone(&way.sent));
        let streamed = stream(destination, &route, &sent, move |parts| -> Sent<E> {
            let mut out = Out {
                session: way.session,
                parts,
                buffer: vec![0; PART_BYTES],
            };
            let read = read(&mut taken, &mut out);
            (taken, read.map(|()| way.sent.load(Ordering::Relaxed)))
        });
        let ((back, read), placed) = streamed.await?;
        *tracked = back;
        placed?;
        Ok(read)
    }

    /// One round: sends what was written since the last one, while the program runs. The inner error says that nothing is tracked
    /// any more; the outer one is of the way to the destination.
    pub async fn round(
        &self,
        tracked: &mut Tracked,
        root: i32,
        destination: &mut PeerClient<Channel>,
    ) -> anyhow::Result<Result<u64, Untracked>> {
        let round = self.carry(tracked, destination, move |tracked, out| {
            if tracked.by == By::Content {
                // While the program runs it is left the other processors, and only this thread may be held up.
                let compared = tracked.compare(root, 1, out);
                return compared.map_err(|error| Untracked(format!("{error:#}")));
            }
            let written = tracked.look(root)?;
            for (pid, ranges) in written {
                let Some(task) = tracked.tasks.get_mut(&pid) else {
                    continue;
                };
                let sent = out.send(task.number, &task.memory, &ranges);
                let sent = sent.map_err(|error| Untracked(format!("process {pid}: {error:#}")))?;
                task.sent.union(&sent);
            }
            Ok(())
        });
        let round = round.await;
        if !matches!(round, Ok(Ok(_))) {
            *tracked = Tracked::default();
        }
        round
    }

    /// The tasks stand still: sends what was written since the last round.
    pub async fn last_written(
        &self,
        tracked: &mut Tracked,
        root: i32,
        destination: &mut PeerClient<Channel>,
    ) -> anyhow::Result<u64> {
        let sending = self.carry(tracked, destination, move |tracked, out| {
            if tracked.by == By::Content {
                let threads = std::thread::available_parallelism().map_or(1, usize::from);
                return tracked.compare(root, threads, out);
            }
            for (pid, ranges) in tracked.last_look() {
                let Some(task) = tracked.tasks.get_mut(&pid) else {
                    continue;
                };
                let sent = out.send(task.number, &task.memory, &ranges)?;
                task.sent.union(&sent);
            }
            anyhow::Ok(())
        });
        sending.await?
    }

    /// The tasks stand still and CRIU's images are complete: sends all that they lack and the destination has not.
    pub async fn rest(
        &self,
        tracked: &mut Tracked,
        root: i32,
        images: &Path,
        destination: &mut PeerClient<Channel>,
    ) -> anyhow::Result<u64> {
        let images = images.to_owned();
        let sending = self.carry(tracked, destination, move |tracked, out| {
            for Missing { pid, number, ranges } in tracked.missing(root, &images)? {
                let memory = Memory::open(pid)?;
                let sent = out.send(number, &memory, &ranges)?;
                ensure_all(pid, &ranges, &sent)?;
            }
            anyhow::Ok(())
        });
        sending.await?
    }
}

/// An error unless everything was read.
fn ensure_all(pid: u32, wanted: &Ranges, read: &Ranges) -> anyhow::Result<()> {
    let mut unread = wanted.clone();
    unread.subtract(read);
    let first: Option<Range<u64>> = unread.iter().next();
    if let Some(first) = first {
        bail!(
            "{} bytes of the memory of process {pid} cannot be read, from {:#x} on",
            unread.bytes(),
            first.start
        );
    }
    ensure!(
        wanted.bytes() == read.bytes(),
        "more was read of process {pid} than asked for"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_a_file_as_long_as_its_addresses() {
        let part = part(7, 12);
        assert_eq!(part.path.as_slice(), b"12");
        assert_eq!(part.folder(), Folder::Private);
        assert!(part.length >= 1 << 47);
    }

    #[test]
    fn numbers_are_those_of_the_innermost_namespace() {
        assert_eq!(number_of(std::process::id()).unwrap(), std::process::id());
        assert!(number_of(u32::MAX).is_err());
    }

    #[test]
    fn what_was_not_read_is_an_error() {
        let ranges = |end| std::iter::once(0x1000..end).collect::<Ranges>();
        let all = ranges(0x3000);
        assert!(ensure_all(1, &all, &all).is_ok());
        let half = ranges(0x2000);
        let error = ensure_all(1, &all, &half).unwrap_err().to_string();
        assert!(
            error.contains("4096 bytes") && error.contains("0x2000"),
            "{error}"
        );
    }

    #[test]
    fn too_much_memory_goes_with_the_images() {
        let own = std::process::id().cast_signed();
        assert!(must_go_in_images(own, MOST_BYTES + 1).unwrap().contains("MiB"));
        assert_eq!(must_go_in_images(own, 1 << 20), None);
    }
}
