//! Parts on their way to the destination: packed, without their zeroes, by RDMA where the session has a connection.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::mpsc;
use verbatim_bulk::{Operation, Outgoing, PAGE_BYTES, QpClass, Run};

use super::bulk::{Bulk, Credits};
use super::pace::Pace;
use super::transport::Tuning;
use crate::proto::{FilePart, Landed, Piece};

/// How many parts may wait for the network.
pub const QUEUE_PARTS: usize = 16;

/// The most content of a part that goes over TLS.
pub const PART_BYTES: usize = 256 << 10;

/// What is shorter goes over TLS also where there is RDMA: a part is on its way in any case.
const SMALL_BYTES: usize = 32 << 10;

/// Runs of bytes in a part, at most: whoever reads it holds them all.
pub const MOST_PIECES: usize = 1024;

/// How parts go.
#[derive(Debug, Clone)]
pub struct Route {
    /// The destination takes several runs of bytes in a part, and zeroes as a word.
    pub packs: bool,
    /// How, in detail.
    pub tuning: Tuning,
    /// By RDMA, if the session has it.
    pub bulk: Bulk,
    /// How fast.
    pub pace: Arc<Pace>,
    /// Programs go first at the RNICs.
    pub background: bool,
}

impl Default for Route {
    /// One part for each run of bytes, over TLS, as fast as can be.
    fn default() -> Self {
        Self {
            packs: false,
            tuning: Tuning::default(),
            bulk: Bulk::default(),
            pace: Arc::new(Pace::new(None)),
            background: false,
        }
    }
}

impl Route {
    /// The same, as fast as can be: the program stands still.
    pub fn in_a_hurry(&self) -> Self {
        Self {
            pace: Arc::new(Pace::new(None)),
            background: false,
            ..self.clone()
        }
    }

    /// The class that its runs have at the RNICs.
    pub fn class(&self) -> QpClass {
        match self.background {
            true => self.tuning.class,
            false => QpClass::User,
        }
    }
}

/// Takes what is to be sent, from any threads.
pub struct Parts {
    route: Route,
    sent: Arc<AtomicU64>,
    state: Mutex<State>,
}

struct State {
    channel: mpsc::Sender<FilePart>,
    ring: Option<Ring>,
    batch: Batch,
}

/// The session's connection, lent to this round.
pub struct Ring {
    pub outgoing: Outgoing<FilePart>,
    pub credits: Arc<Credits>,
    /// The RNICs may serve it behind programs.
    pub may_yield: bool,
    /// They do.
    pub background: bool,
    /// Bytes of runs.
    pub bytes: u64,
}

/// Pieces of one file that leave together.
#[derive(Default)]
struct Batch {
    /// It names the file.
    part: FilePart,
    /// What does not go by RDMA.
    data: Vec<u8>,
    /// What does.
    run: Option<Run>,
}

impl Parts {
    /// They leave through `channel`, and what goes by RDMA by `ring`. `sent` counts bytes of content.
    pub fn new(
        route: Route,
        channel: mpsc::Sender<FilePart>,
        ring: Option<Ring>,
        sent: Arc<AtomicU64>,
    ) -> Self {
        let state = State {
            channel,
            ring,
            batch: Batch::default(),
        };
        Self {
            route,
            sent,
            state: Mutex::new(state),
        }
    }

    /// A part as it is, behind all that came before.
    pub fn put(&self, part: FilePart) -> io::Result<()> {
        let mut state = self.lock();
        state.flush()?;
        state.leave(part)
    }

    /// Content of the file that `part` names, at `offset`; it may wait for its turn by the pace.
    pub fn data(&self, part: &FilePart, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let is_beside_others = self.route.pace.is_beside_others();
        {
            let mut state = self.lock();
            for (range, is_zero) in segments(bytes, self.route.packs && self.route.tuning.skips_zeroes) {
                let at = offset + range.start as u64;
                match (is_zero, self.route.packs) {
                    (true, _) => state.zeroes(part, at, range.len() as u64)?,
                    (false, true) => state.pack(part, at, &bytes[range], is_beside_others)?,
                    (false, false) => state.leave(FilePart {
                        offset: at,
                        data: Bytes::copy_from_slice(&bytes[range]),
                        ..part.clone()
                    })?,
                }
            }
        }
        let count = bytes.len() as u64;
        self.sent.fetch_add(count, Ordering::Relaxed);
        let mut left = Ok(());
        self.route.pace.pass(count, || left = self.wait_until_taken());
        left
    }

    /// A part of the file that `part` names, which is zero and needs no room. Only for a destination that takes several runs in a part.
    pub fn hole(&self, part: &FilePart, range: Range<u64>) -> io::Result<()> {
        self.lock().zeroes(part, range.start, range.end - range.start)
    }

    /// Until all parts have left. Called outside of asynchronous code, on a thread of the runtime.
    fn wait_until_taken(&self) -> io::Result<()> {
        let channel = {
            let mut state = self.lock();
            state.flush()?;
            state.tell(true)?;
            state.channel.clone()
        };
        // Room for all of them is there when none waits. If the destination takes none any more, the next part says so.
        _ = tokio::runtime::Handle::current().block_on(channel.reserve_many(QUEUE_PARTS));
        Ok(())
    }

    /// No more comes: waits until all have left. Returns what was lent.
    pub fn finish(self) -> (Option<Ring>, io::Result<()>) {
        let mut state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let ended = state.flush().and_then(|()| state.tell(true));
        (state.ring, ended)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Behind all that was sent before.
    fn leave(&mut self, part: FilePart) -> io::Result<()> {
        match &mut self.ring {
            Some(ring) => ring.outgoing.pass(part),
            None => return send(&self.channel, part),
        }
        self.tell(false)
    }

    /// Tells the destination of what has landed; `waits` for all of it.
    fn tell(&mut self, waits: bool) -> io::Result<()> {
        let Some(ring) = &mut self.ring else {
            return Ok(());
        };
        while let Some((mut part, landed)) = ring.outgoing.next(waits).map_err(io::Error::other)? {
            if let Some(run) = landed {
                part.landed = Some(Landed {
                    position: run.position,
                    length: run.length,
                    fingerprints: run.fingerprints,
                    fetch: run.operation == Operation::Read,
                    background: ring.background,
                });
                ring.bytes += run.length;
            }
            send(&self.channel, part)?;
        }
        Ok(())
    }

    /// The batch is one of this file, with room for one more piece.
    fn turn_to(&mut self, part: &FilePart) -> io::Result<()> {
        let batch = &self.batch.part;
        let is_same = (batch.folder, &batch.path, batch.length) == (part.folder, &part.path, part.length);
        if !is_same || batch.pieces.len() >= MOST_PIECES {
            self.flush()?;
            self.batch.part = part.clone();
        }
        Ok(())
    }

    fn zeroes(&mut self, part: &FilePart, offset: u64, length: u64) -> io::Result<()> {
        self.turn_to(part)?;
        self.batch.note(offset, length, true);
        Ok(())
    }

    fn pack(
        &mut self,
        part: &FilePart,
        mut offset: u64,
        mut bytes: &[u8],
        is_beside_others: bool,
    ) -> io::Result<()> {
        while !bytes.is_empty() {
            let by_rdma = self.ring.is_some();
            self.turn_to(part)?;
            let batch = &mut self.batch;
            if batch.run.is_none() && by_rdma && batch.data.len() + bytes.len() > SMALL_BYTES {
                if !batch.data.is_empty() {
                    // What was small leaves before what is large.
                    self.flush()?;
                    continue;
                }
                let run = self.room(is_beside_others)?;
                self.batch.run = Some(run);
                continue;
            }
            let room = match &batch.run {
                Some(run) => run.room() as usize,
                None => PART_BYTES.saturating_sub(batch.data.len()),
            };
            if room == 0 {
                self.flush()?;
                continue;
            }
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            match (&mut batch.run, &mut self.ring) {
                (Some(run), Some(ring)) => ring.outgoing.add(run, now).map_err(io::Error::other)?,
                _ => batch.data.extend_from_slice(now),
            }
            batch.note(offset, now.len() as u64, false);
            offset += now.len() as u64;
            bytes = later;
        }
        Ok(())
    }

    /// A new run. Waits until the rings have room. Beside others it keeps to a pace, and does not wait for them at the RNICs, too.
    fn room(&mut self, is_beside_others: bool) -> io::Result<Run> {
        let ring = self.ring.as_mut().expect("the caller has looked");
        let background = ring.may_yield && !is_beside_others;
        if ring.background != background {
            let class = match background {
                true => QpClass::Background,
                false => QpClass::User,
            };
            ring.outgoing.set_class(class).map_err(io::Error::other)?;
            ring.background = background;
        }
        loop {
            let ring = self.ring.as_mut().expect("the caller has looked");
            let freed = ring.credits.position();
            if freed > 0 {
                ring.outgoing.freed(freed).map_err(io::Error::other)?;
            }
            if let Some(run) = ring.outgoing.begin() {
                return Ok(run);
            }
            // The other side frees what it was told of.
            self.tell(true)?;
            let ring = self.ring.as_mut().expect("as above");
            ring.credits.wait_beyond(freed)?;
        }
    }

    /// What was packed leaves.
    fn flush(&mut self) -> io::Result<()> {
        let Batch { mut part, data, run } = std::mem::take(&mut self.batch);
        if part.pieces.is_empty() {
            return Ok(());
        }
        match (run, &mut self.ring) {
            (Some(run), Some(ring)) => {
                ring.outgoing.send(run, part).map_err(io::Error::other)?;
                self.tell(false)
            }
            _ => {
                if let [piece] = &part.pieces[..]
                    && !piece.zeroes
                {
                    part.offset = piece.offset;
                    part.pieces.clear();
                }
                part.data = data.into();
                self.leave(part)
            }
        }
    }
}

impl Batch {
    fn note(&mut self, offset: u64, length: u64, zeroes: bool) {
        if let Some(last) = self.part.pieces.last_mut()
            && last.zeroes == zeroes
            && last.offset + last.length == offset
            // In a ring, each piece begins a page.
            && (zeroes || last.length % PAGE_BYTES as u64 == 0)
        {
            last.length += length;
            return;
        }
        self.part.pieces.push(Piece {
            offset,
            length,
            zeroes,
        });
    }
}

fn send(channel: &mpsc::Sender<FilePart>, part: FilePart) -> io::Result<()> {
    channel
        .blocking_send(part)
        .map_err(|_| io::Error::new(io::ErrorKind::BrokenPipe, "the destination takes no more parts"))
}

/// Divides content into pages that are zero and others, as far as that is of interest.
fn segments(bytes: &[u8], finds_zeroes: bool) -> Vec<(Range<usize>, bool)> {
    if !finds_zeroes {
        return vec![(0..bytes.len(), false)];
    }
    const ZEROES: [u8; PAGE_BYTES] = [0; PAGE_BYTES];
    let mut segments: Vec<(Range<usize>, bool)> = Vec::new();
    for (index, page) in bytes.chunks(PAGE_BYTES).enumerate() {
        let is_zero = *page == ZEROES[..page.len()];
        let begin = index * PAGE_BYTES;
        match segments.last_mut() {
            Some((last, zero)) if *zero == is_zero => last.end = begin + page.len(),
            _ => segments.push((begin..begin + page.len(), is_zero)),
        }
    }
    segments
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::memory::place::Placer;

    const PAGE: usize = PAGE_BYTES;
    const FILE_PAGES: usize = 600;

    /// What is told of a file: pages from one on, each with this byte.
    type Told = (usize, usize, Vec<u8>);

    fn told() -> impl Strategy<Value = Vec<Told>> {
        let bytes = prop::collection::vec(prop_oneof![Just(0u8), 0..4u8], 1..200);
        prop::collection::vec((0..2usize, 0..FILE_PAGES - 200, bytes), 1..12)
    }

    /// Sends all of it, and has it placed as it comes.
    fn carried(route: Route, all: &[Told]) -> (BTreeMap<usize, Vec<u8>>, usize) {
        let root = tempfile::tempdir().unwrap();
        let (channel, mut parts) = mpsc::channel(QUEUE_PARTS);
        let mut placer = Placer::new(root.path().to_owned());
        let mut count = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let parts = Parts::new(route, channel, None, Arc::default());
                for (file, from, pages) in all {
                    let part = FilePart {
                        path: file.to_string().into_bytes(),
                        length: (FILE_PAGES * PAGE) as u64,
                        ..FilePart::default()
                    };
                    let content: Vec<u8> = pages.iter().flat_map(|byte| [*byte; PAGE]).collect();
                    parts.data(&part, (from * PAGE) as u64, &content).unwrap();
                }
                parts.finish().1.unwrap();
            });
            while let Some(part) = parts.blocking_recv() {
                assert!(part.data.len() <= 200 * PAGE && part.pieces.len() <= MOST_PIECES);
                placer.place(&part, None).unwrap();
                count += 1;
            }
        });
        let files = (0..2).filter_map(|file| {
            let content = std::fs::read(root.path().join(file.to_string())).ok()?;
            Some((file, content))
        });
        (files.collect(), count)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        /// Later content is over earlier one, also where one of them is zeroes, packed or not.
        #[test]
        fn what_is_told_is_what_is_placed(all in told(), packs in any::<bool>(), skips in any::<bool>()) {
            let mut wanted: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
            for (file, from, pages) in &all {
                let content = wanted.entry(*file).or_insert_with(|| vec![0; FILE_PAGES * PAGE]);
                for (index, byte) in pages.iter().enumerate() {
                    content[(from + index) * PAGE..][..PAGE].fill(*byte);
                }
            }
            let route = Route {
                packs,
                tuning: Tuning { skips_zeroes: skips, ..Tuning::default() },
                ..Route::default()
            };
            let (found, _) = carried(route, &all);
            prop_assert!(found == wanted);
        }
    }

    #[test]
    fn single_pages_leave_together() {
        let pages: Vec<Told> = (0..300).map(|page| (0, page * 2 % 399, vec![1])).collect();
        let packed = Route {
            packs: true,
            ..Route::default()
        };
        let ((one_by_one, parts), (together, fewer)) =
            (carried(Route::default(), &pages), carried(packed, &pages));
        assert!(one_by_one == together);
        assert_eq!((parts, fewer), (300, 300 * PAGE / PART_BYTES + 1));
    }
}
